"""guestd's start. In a guest it takes no flags. On a host, for tests:

    guestd --unix PATH --helper GUEST_EXEC --spool DIR [--cgroup DIR]

listens on a unix socket and takes the root directory it finds for the sandbox's, without mounting anything;
`configure` then sets the environment and no more.
"""

from __future__ import annotations

import contextlib
import os
import sys

from guestd import process, serve
from guestd.place import BASE_ENV, Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from guestd.protocol import Request

_USAGE = "usage: guestd [--unix PATH --helper GUEST_EXEC --spool DIR [--cgroup DIR]]"


def _take_low_descriptors() -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    while null < process.LOWEST_FD - 1:
        null = os.dup(null)


def _protect() -> None:
    """The kernel shall not choose guestd when memory runs out; guest-exec takes this back for every
    command."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("-1000")


def _host_place(request: Request, flags: dict[str, str]) -> Place:
    return Place(
        root_fd=os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), namespace_fd=None,
        git_namespace=lambda: None, switch_identity=os.geteuid() == 0, cgroup=flags.get("--cgroup", ""),
        helper=flags["--helper"], spool=flags["--spool"], env={**BASE_ENV, **request.env},
    )


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    flags = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) % 2 or not flags.keys() <= {"--unix", "--helper", "--cgroup", "--spool"}:
        sys.exit(_USAGE)
    if flags and not {"--unix", "--helper", "--spool"} <= flags.keys():
        sys.exit(_USAGE)
    return flags


def main() -> None:
    flags = _flags(sys.argv[1:])
    os.umask(0o022)
    _take_low_descriptors()
    if flags:
        server = serve.Server(lambda request: _host_place(request, flags), None)
        server.run(serve.listen_unix(flags["--unix"]))
        return
    from guestd import boot  # what it needs is on no host

    _protect()
    os.setgroups([])
    server = serve.Server(boot.configure, boot.resume())
    server.run(serve.listen_vsock())


if __name__ == "__main__":
    main()
