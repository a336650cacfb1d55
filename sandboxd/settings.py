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

from sandboxd import transport
from sandboxd.address import SOCKET
from sandboxd.errors import SetupError
from sandboxd.transport import Transport

UID_BASE = 900_000
BACKENDS = ("auto", "qemu")


@dataclass(frozen=True, slots=True)
class Settings:
    """`transport` is how the API is reached; `build_dir` holds the native programs; `audit_log` None: there is none."""

    prepare_only: bool
    transport: Transport
    state_dir: Path
    assets_dir: Path
    build_dir: Path
    backend: str
    end_sandboxes: bool
    uid_base: int
    policy: Path | None
    no_network: bool
    default_image: str
    insecure_registries: tuple[str, ...]
    audit_log: Path | None
    audit_required: bool


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
    audit = flags["--audit-log"] or str(state_dir / "audit" / "events.jsonl")
    audit_log = None if audit == "none" else _path(audit)
    if audit_log is None and flags["--audit-required"]:
        raise SetupError("--audit-required needs an audit log, and --audit-log is none")
    return Settings(
        prepare_only=bool(flags["prepare"]),
        transport=transport.read(flags["--listen"] or [f"unix://{default_socket(environment, uid)}"], flags),
        state_dir=state_dir,
        assets_dir=_path(flags["--assets-dir"]) if flags["--assets-dir"] else state_dir / "assets",
        build_dir=_path(flags["--build-dir"]) if flags["--build-dir"] else build_dir,
        backend=backend,
        end_sandboxes=bool(flags["--end-sandboxes"]),
        uid_base=int(base),
        policy=_path(flags["--policy"]) if flags["--policy"] else None,
        no_network=bool(flags["--no-network"]),
        default_image=flags["--default-image"] or "",
        insecure_registries=tuple(_registry(text) for text in flags["--insecure-registry"]),
        audit_log=audit_log,
        audit_required=bool(flags["--audit-required"]),
    )


def _registry(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or "/" in text:
        raise SetupError(f"--insecure-registry {text}: write HOST:PORT, as it stands in the images' names")
    return text


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
