"""Which package registries this host uses: their names, and the settings that make a guest use the same ones.

In: apt's sources as `assets.apt` read them, pip's and npm's configuration files and variables, what the two programs
themselves say where nothing is configured, and the certificates an administrator added to this host's. Out: names in
normal form, and files for the guest. No registry's name stands in this source. User names, passwords and tokens are
dropped, and so is what is no http or https address of a host name. A configuration that cannot be read gives nothing
and stops nothing.
"""

from __future__ import annotations

import configparser
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from egress.policy import WEB_PORTS, normal, normal_tcp

APT_SOURCES = "/etc/apt/sources.list"
APT_CONF = "/etc/apt/apt.conf.d/90sandbox"
AT_ONCE = b'Acquire::Retries::Delay "false";\n'
"""apt waits seven seconds between its tries, also where a name is refused and stays so. It tries as often as before."""
PIP_CONF = "/etc/pip.conf"
NPMRC = "/usr/local/lib/node_modules/npm/npmrc"
"""npm's own file: it is read whatever the prefix is, and every other one wins over it."""
AUTHORITIES = "usr/local/share/ca-certificates"
"""Where an administrator of Debian puts certificates to be trusted (update-ca-certificates(8))."""
TRUST = "/etc/ssl/certs/ca-certificates.crt"
MAX_AUTHORITIES = 16
MAX_AUTHORITIES_BYTES = 128 << 10
ASK_S = 10.0
DIRECTORIES = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin"
"""Where npm and what runs it are looked for, whatever PATH says: this may be root."""
_PIP_ASK = "from pip._internal.models.index import PyPI; print(PyPI.simple_url, PyPI.file_storage_domain)"
_PIP_KEYS = ("index-url", "extra-index-url")
_NPM_REGISTRY = re.compile(r"\s*((?:@[A-Za-z0-9._-]+:)?registry)\s*=\s*(\S+)\s*\Z")

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Registries:
    """`files` are by their path in the guest; `services` are HOST:PORT, of those on a port of their own."""

    names: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    services: tuple[str, ...] = ()


def read(apt: Iterable[tuple[str, str]], environment: Mapping[str, str], root: Path = Path("/")) -> Registries:
    """`apt` are (URI, suite) of the sources that a guest can use; `root` is where /etc is."""
    home = root / environment.get("HOME", "/").lstrip("/")
    names: set[str] = set()
    used: set[str] = set()
    files: dict[str, bytes] = {}
    sources = [(address, suite) for uri, suite in apt if (address := plain(uri))]
    if sources:
        files[APT_CONF] = AT_ONCE
        files[APT_SOURCES] = "".join(f"deb {address} {suite} main\n" for address, suite in sources).encode()
    used.update(address for address, _ in sources)

    trusted = authorities(root)
    files.update(trusted)
    pip = pip_settings(_pip_texts(root, home, environment), environment)
    if pip or trusted:
        files[PIP_CONF] = _pip_conf(pip, TRUST if trusted else "").encode()
    if "index-url" not in pip:
        names.update(_pip_default())
    used.update(address for addresses in pip.values() for address in addresses)

    npm = npm_settings(_npm_texts(root, home, environment), environment)
    if npm or trusted:
        settings = {**npm, **({"cafile": TRUST} if trusted else {})}
        files[NPMRC] = "".join(f"{key}={value}\n" for key, value in sorted(settings.items())).encode()
    if "registry" not in npm and (address := _npm_default()):
        used.add(address)
    used.update(npm.values())
    names.update(map(_host, used))
    services = {service for address in used if (service := _service(address))}
    return Registries(tuple(sorted(names)), files, tuple(sorted(services)))


def authorities(root: Path = Path("/")) -> dict[str, bytes]:
    """The certificates this host was told to trust beyond Debian's: a guest that goes to the same registries meets
    the same certificates. guestd adds what lies in this place to the guest's list."""
    found: dict[str, bytes] = {}
    left = MAX_AUTHORITIES_BYTES
    for path in sorted((root / AUTHORITIES).rglob("*.crt")):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except OSError:
            continue
        if b"-----BEGIN CERTIFICATE-----" not in data or b"PRIVATE KEY" in data:
            continue
        left -= len(data)
        if left < 0 or len(found) == MAX_AUTHORITIES:
            log.warning("not all of /%s goes to the guests: there is too much in it", AUTHORITIES)
            break
        found[f"/{AUTHORITIES}/host-{len(found)}.crt"] = data
    return found


def plain(url: str) -> str:
    """An http or https address without user, password, query and fragment; empty for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = normal(parts.hostname or "")
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or host.startswith("*") or not _printable(parts.path):
        return ""
    where = host if port is None else f"{host}:{port}"
    return urlunsplit((parts.scheme, where, parts.path, "", ""))


def pip_settings(texts: Iterable[str], environment: Mapping[str, str]) -> dict[str, list[str]]:
    """pip's addresses by their key; of several files the later wins, the environment over all of them."""
    found: dict[str, str] = {}
    for text in texts:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text)
        except configparser.Error as fault:
            log.warning("a pip configuration is not read: %s", type(fault).__name__)
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {key: value for key, value in parser.items(section) if key in _PIP_KEYS}
    for key in _PIP_KEYS:
        if given := environment.get("PIP_" + key.upper().replace("-", "_")):
            found[key] = given
    settings = {key: [address for word in value.split() if (address := plain(word))] for key, value in found.items()}
    return {key: addresses for key, addresses in settings.items() if addresses}


def npm_settings(texts: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """npm's registry, and those of scopes, by their key; the later file wins, the environment over all of them."""
    found: dict[str, str] = {}
    for text in texts:
        for line in text.splitlines():
            if (match := _NPM_REGISTRY.match(line)) and (address := plain(match[2].strip("\"'"))):
                found[match[1]] = address
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if address := plain(environment.get(name, "")):
            found["registry"] = address
    return found


def _pip_texts(root: Path, home: Path, environment: Mapping[str, str]) -> list[str]:
    own = environment.get("XDG_CONFIG_HOME", "")
    config = root / own.lstrip("/") if own.startswith("/") else home / ".config"
    paths = [
        root / "etc/xdg/pip/pip.conf", root / "etc/pip.conf", home / ".pip/pip.conf", config / "pip/pip.conf",
    ]  # fmt: skip
    if given := environment.get("PIP_CONFIG_FILE"):
        # pip's way to read no configuration is a file that is empty.
        paths = [] if given == os.devnull else [*paths, Path(given)]
    return _texts(paths)


def _npm_texts(root: Path, home: Path, environment: Mapping[str, str]) -> list[str]:
    user = environment.get("NPM_CONFIG_USERCONFIG")
    everybodys = [root / where / "npmrc" for where in ("etc", "usr/etc", "usr/local/etc")]
    return _texts([*everybodys, Path(user) if user else home / ".npmrc"])


def _texts(paths: Iterable[Path]) -> list[str]:
    found = []
    for path in paths:
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return found


def _pip_conf(settings: Mapping[str, list[str]], trust: str) -> str:
    lines = ["[global]", *([f"cert = {trust}"] if trust else [])]
    for key, addresses in sorted(settings.items()):
        lines.append(f"{key} = " + "\n    ".join(addresses))
    insecure = sorted({_host(one) for addresses in settings.values() for one in addresses if one.startswith("http:")})
    if insecure:
        lines.append("trusted-host = " + "\n    ".join(insecure))
    return "\n".join(lines) + "\n"


def _pip_default() -> list[str]:
    """What pip itself goes to, and where that keeps its files, as the pip of this host says."""
    for python in (sys.executable, "/usr/bin/python3"):
        words = _ask([python, "-I", "-c", _PIP_ASK]).split()
        if len(words) == 2 and (address := plain(words[0])):
            return [_host(address), normal(words[1])]
    return []


def _npm_default() -> str:
    npm = shutil.which("npm", path=DIRECTORIES)
    return plain(_ask([npm, "config", "get", "registry"]).strip()) if npm else ""


def _ask(command: list[str]) -> str:
    # npm is a script whose first line has its interpreter looked for in PATH.
    ours = {"PATH": DIRECTORIES, "npm_config_logs_max": "0", "npm_config_update_notifier": "false"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False, cwd="/",
            env=dict(os.environ) | ours,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _host(address: str) -> str:
    return urlsplit(address).hostname or ""


def _service(address: str) -> str:
    """HOST:PORT of what is not on the web's ports; empty for the rest."""
    parts = urlsplit(address)
    if parts.port is None or parts.port in WEB_PORTS:
        return ""
    try:
        return normal_tcp(f"{parts.hostname}:{parts.port}")
    except ValueError:
        return ""


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
