"""The daemon's flags, read once and checked. Nothing else reads a flag or the environment.

In: what docopt found, the environment's XDG directories, the user. Out: frozen `Settings`, or `SetupError`
with the flag's name and what would be right.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandboxd import address, fields, transport
from sandboxd.address import SOCKET, TcpAddress
from sandboxd.errors import InvalidRequest, SetupError
from sandboxd.transport import Transport

UID_BASE = 900_000
BACKENDS = ("auto", "qemu", "firecracker")
NODE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,30}\Z")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How this machine is described. What no flag says of its capacity is None, and the host's own."""

    id: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """`transport` is how the API is reached; `build_dir` holds the native programs; `audit_log` None: there is none;
    `metrics` is the loopback address for Prometheus."""

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
    metrics: TcpAddress | None
    node: NodeSettings
    allow_bind: bool = False
    firecracker: str = ""
    jailer: str = ""
    allow_firecracker: str = ""
    kernel: Path | None = None


def read(flags: Mapping[str, Any], environment: Mapping[str, str], uid: int) -> Settings:
    state_dir = _path(flags["--state-dir"] or default_state_dir(environment, uid))
    # In a clone they are built beside us; `make install` puts them below its prefix.
    build_dir = Path(__file__).resolve().parent.parent / "build"
    if not build_dir.is_dir():
        build_dir = Path(sys.prefix) / "libexec"
    backend = flags["--backend"]
    if backend not in BACKENDS:
        raise SetupError(f"--backend must be {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    for flag in ("--firecracker", "--jailer", "--allow-firecracker"):
        if backend == "qemu" and flags[flag]:
            raise SetupError(f"{flag} means nothing with --backend qemu: leave one of them out")
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
        metrics=_metrics(flags["--metrics-listen"]) if flags["--metrics-listen"] else None,
        node=_node(flags),
        allow_bind=bool(flags["--allow-bind"]),
        firecracker=flags["--firecracker"] or "",
        jailer=flags["--jailer"] or "",
        allow_firecracker=flags["--allow-firecracker"] or "",
        kernel=_path(flags["--kernel"]) if flags["--kernel"] else None,
    )


def _registry(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or "/" in text:
        raise SetupError(f"--insecure-registry {text}: write HOST:PORT, as it stands in the images' names")
    return text


def _node(flags: Mapping[str, Any]) -> NodeSettings:
    id = flags["--node-id"] or ""
    if id and not NODE_ID.match(id):
        raise SetupError("--node-id must be 1 to 31 characters of a-z, 0-9 and -, not starting with -")
    labels: dict[str, str] = {}
    for text in flags["--node-label"]:
        key, equals, value = text.partition("=")
        if not equals:
            raise SetupError(f"--node-label {fields.printable(text)}: write KEY=VALUE")
        if key in labels:
            raise SetupError(f"--node-label {fields.printable(key)} stands twice")
        labels[key] = value
    try:
        fields.check_labels(labels)
    except InvalidRequest as fault:
        raise SetupError(f"--node-label: {fault.message}") from None
    return NodeSettings(
        id, labels, _amount(flags, "--capacity-cpus", fraction=True), _size(flags, "--capacity-memory-mb"),
        _size(flags, "--capacity-disk-mb"),
    )  # fmt: skip


def _size(flags: Mapping[str, Any], name: str) -> int | None:
    amount = _amount(flags, name)
    return None if amount is None else int(amount)


def _amount(flags: Mapping[str, Any], name: str, *, fraction: bool = False) -> float | None:
    text = flags[name]
    if text is None:
        return None
    number = r"[0-9]{1,9}(\.[0-9]{1,3})?" if fraction else r"[0-9]{1,12}"
    if not re.fullmatch(number, text) or not float(text):
        raise SetupError(f"{name} must be a {'' if fraction else 'whole '}number above 0")
    return float(text)


def _metrics(text: str) -> TcpAddress:
    listen = address.tcp("--metrics-listen", text)
    if not listen.loopback:
        raise SetupError(
            f"--metrics-listen {text}: it must be a loopback address, as in 127.0.0.1:9464: it asks for no credential"
        )
    return listen


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
