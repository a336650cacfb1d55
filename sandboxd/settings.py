"""The daemon's flags, read once and checked. Nothing else reads a flag or the environment.

In: what docopt found, the environment's XDG directories, the user. Out: frozen `Settings`, or `SetupError`
with the flag's name and what would be right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxd.errors import SetupError

SOCKET = "sandboxd.sock"
MAX_SOCKET_PATH = 104
"""sun_path of the smallest system a client may run on, its NUL included."""
UID_BASE = 900_000
BACKENDS = ("auto", "qemu")


@dataclass(frozen=True, slots=True)
class Settings:
    """`socket` is where the API is; `build_dir` holds the native programs."""

    prepare_only: bool
    socket: Path
    state_dir: Path
    assets_dir: Path
    build_dir: Path
    backend: str
    end_sandboxes: bool
    uid_base: int
    policy: Path | None
    no_network: bool


def read(flags: Mapping[str, Any], environment: Mapping[str, str], uid: int) -> Settings:
    state_dir = _path(flags["--state-dir"] or default_state_dir(environment, uid))
    build_dir = Path(__file__).resolve().parent.parent / "build"
    backend = flags["--backend"]
    if backend == "firecracker":
        raise SetupError("--backend firecracker is not built yet; qemu runs here, with KVM or without")
    if backend not in BACKENDS:
        raise SetupError(f"--backend must be {' or '.join(BACKENDS)}")
    base = flags["--uid-base"] or str(UID_BASE)
    if not base.isascii() or not base.isdigit():
        raise SetupError("--uid-base must be a number")
    return Settings(
        prepare_only=bool(flags["prepare"]),
        socket=socket_path(flags["--listen"] or f"unix://{default_socket(environment, uid)}"),
        state_dir=state_dir,
        assets_dir=_path(flags["--assets-dir"]) if flags["--assets-dir"] else state_dir / "assets",
        build_dir=_path(flags["--build-dir"]) if flags["--build-dir"] else build_dir,
        backend=backend,
        end_sandboxes=bool(flags["--end-sandboxes"]),
        uid_base=int(base),
        policy=_path(flags["--policy"]) if flags["--policy"] else None,
        no_network=bool(flags["--no-network"]),
    )


def socket_path(listen: str) -> Path:
    """The path of a unix:// address. Addresses of the network are refused: they need a token and TLS."""
    if listen.startswith("/"):
        raise SetupError(f"--listen {listen}: write unix://{listen}")
    scheme, separator, rest = listen.partition("://")
    if not separator or scheme != "unix":
        raise SetupError(f"--listen {listen}: TCP is not built yet; use unix:///path/to/{SOCKET}")
    if not rest.startswith("/"):
        raise SetupError(f"--listen {listen}: the path must be absolute, as in unix:///path/to/{SOCKET}")
    if len(os.fsencode(rest)) >= MAX_SOCKET_PATH:
        raise SetupError(
            f"--listen {listen}: the path of a unix socket must be shorter than {MAX_SOCKET_PATH} bytes"
        )
    return Path(rest)


def default_socket(environment: Mapping[str, str], uid: int) -> Path:
    if uid == 0:
        return Path("/run/sandboxd") / SOCKET
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / SOCKET
    return _home(environment) / ".config/sandbox" / SOCKET


def default_state_dir(environment: Mapping[str, str], uid: int) -> Path:
    if uid == 0:
        return Path("/var/lib/sandboxd")
    data = environment.get("XDG_DATA_HOME", "")
    return (Path(data) if data.startswith("/") else _home(environment) / ".local/share") / "sandboxd"


def _home(environment: Mapping[str, str]) -> Path:
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        raise SetupError("HOME is not set; name the places with --listen and --state-dir")
    return Path(home)


def _path(text: str | Path) -> Path:
    return Path(os.path.abspath(text))
