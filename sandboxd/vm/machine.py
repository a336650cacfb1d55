"""What a machine is, to whoever asks for one: a frozen description, and the few things a running one can do.

In: a `MachineSpec`, fully resolved. Out: an object with the `Machine` protocol. Nothing here names a VMM,
decides a policy or carries a value from an environment; two backends fit behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAX_CPUS = 64
MIN_MEMORY_MB = 64
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_MAC = re.compile(r"[0-9a-f][02468ace](:[0-9a-f]{2}){5}")  # of one interface, not of a group


@dataclass(frozen=True, slots=True)
class Rate:
    """What a drive may do in a second, reads and writes together; None: as much as it can. Raises ValueError."""

    bytes_per_s: int | None = None
    ops_per_s: int | None = None

    def __post_init__(self) -> None:
        if any(value is not None and value < 1 for value in (self.bytes_per_s, self.ops_per_s)):
            raise ValueError("a drive that may do nothing is none")


UNLIMITED = Rate()


@dataclass(frozen=True, slots=True)
class Drive:
    """A disk image of the host. A read-only one reaches the VMM as an O_RDONLY descriptor."""

    path: Path
    read_only: bool
    rate: Rate = UNLIMITED


@dataclass(frozen=True, slots=True)
class Share:
    """A directory of the host that the guest has as the virtio file system `workspace`. `directory_fd` stays its
    opener's; whoever started the machine owns what the guest makes there."""

    directory_fd: int
    read_only: bool


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """One machine.

    `drives` come up as /dev/vda, /dev/vdb, … in order. `directory` exists, is 0700 and belongs to the daemon;
    the machine's sockets and record are made in it. `uid` is the uid and gid of the VMM where the daemon is
    root, and nobody else's; None where the daemon is an ordinary user and the VMM stays that user.
    `tap_fd` is an open tap device, made with IFF_VNET_HDR, that becomes the guest's eth0 with the address `mac`;
    None: no interface. It stays its maker's: the VMM gets a copy, and the maker closes the original afterwards. A VMM
    that opens it by name finds `tap_name` in `netns` once `leave_tap` was called with its uid.
    With `console` the guest's console is kept even where that costs the guest time; it is for finding out why one
    does not come up.
    """

    id: str
    cpus: int
    memory_mb: int
    kernel: Path
    initramfs: Path
    drives: tuple[Drive, ...]
    directory: Path
    uid: int | None
    tap_fd: int | None = None
    mac: str = ""
    tap_name: str = ""
    netns: Path | None = None
    leave_tap: Callable[[int], None] | None = None
    share: Share | None = None
    console: bool = False

    def __post_init__(self) -> None:
        if not is_name(self.id):
            raise ValueError(f"not an id of a machine: {self.id!r}")
        if not 1 <= self.cpus <= MAX_CPUS:
            raise ValueError(f"cpus is {self.cpus}, not 1 to {MAX_CPUS}")
        if self.memory_mb < MIN_MEMORY_MB:
            raise ValueError(f"memory_mb is {self.memory_mb}, less than {MIN_MEMORY_MB}")
        if self.uid is not None and self.uid < 1:
            raise ValueError("a VMM never runs as root")
        if (self.tap_fd is None) != (self.mac == ""):
            raise ValueError("an interface has a tap and a MAC address")
        if self.mac and not _MAC.fullmatch(self.mac):
            raise ValueError(f"not the MAC address of an interface: {self.mac!r}")


def is_name(text: str) -> bool:
    """Whether `text` may stand in a path and a command line: at most 64 letters, digits, `_` and `-`."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Program:
    """A process of a machine, for looking at its accounts in /proc. A pid alone may be another's by now:
    `start_ticks` is field 22 of /proc/<pid>/stat."""

    pid: int
    start_ticks: int


class Machine(Protocol):
    """A machine that was started or adopted. Its guest, its VMM and its console are hostile."""

    @property
    def spec_id(self) -> str: ...

    @property
    def vsock_path(self) -> Path:
        """A unix socket: `CONNECT <port>\\n` in, `OK <port>\\n` out, then the guest's bytes."""
        ...

    @property
    def programs(self) -> tuple[Program, ...]:
        """What does the machine's work: the VMM first."""
        ...

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        """The end of what the guest wrote to its console; empty where the VMM does not say. Never raises."""
        ...

    async def wait_exit(self) -> None:
        """Returns once VMM or device process is gone or the guest has shut down. Any number may wait."""
        ...

    async def terminate(self) -> None:
        """Ends the machine at once; returns when no process and no socket of it is left. Idempotent."""
        ...


class Backend(Protocol):
    """What starts machines and finds those that outlived us."""

    @property
    def name(self) -> str: ...

    @property
    def silent(self) -> bool:
        """Whether a machine's console is kept only where its spec asks for it."""
        ...

    async def start(self, spec: MachineSpec) -> Machine: ...

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        """The machine that was started in this directory, where it still runs."""
        ...

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        """Ends every machine below `sandboxes` but those of `known`. Blocking."""
        ...

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        """Replays a volume's journal; False where that fails."""
        ...
