"""Where a sandbox's processes and files are, as one value that every part is handed. A leaf.

In a guest it is made by `boot`, in tests by `__main__` from its flags: then the root is guestd's own, no
namespace is entered, and nobody's identity changes unless guestd is root.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Final

UID: Final = 1001
GID: Final = 1001
HOME: Final = "/sandbox/home"
WORKSPACE: Final = "/workspace"
CONTEXT: Final = "/sandbox/context"
"""What the host has to tell those who work here, as files."""

BASE_ENV: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
}
"""What every process finds, below the image's, the sandbox's and the request's own environment."""


class Place:
    """What the rest of guestd has to know of the machine.

    root_fd           the processes' root directory namespace_fd      their mount namespace; None: guestd's
    own git_namespace     makes, once, a mount namespace where guestd's own git finds their files; None:
    guestd's own switch_identity   guestd is root: processes and file operations become UID, GID cgroup
    the directory that holds one cgroup per process; "": none, in tests only helper            guest-exec
    spool             a directory of guestd's own for what is on its way out env               what
    processes find, before the request adds its own
"""

    __slots__ = (
        "cgroup", "env", "git_namespace", "helper", "namespace_fd", "root_fd", "spool", "switch_identity",
    )

    def __init__(
        self, *, root_fd: int, namespace_fd: int | None, git_namespace: Callable[[], int | None],
        switch_identity: bool, cgroup: str, helper: str, spool: str, env: Mapping[str, str],
    ) -> None:
        self.root_fd = root_fd
        self.namespace_fd = namespace_fd
        self.git_namespace = git_namespace
        self.switch_identity = switch_identity
        self.cgroup = cgroup
        self.helper = helper
        self.spool = spool
        self.env = env
