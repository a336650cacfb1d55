"""Debian packages: from the host's own apt sources, downloaded and checked by apt, never installed on the host.

In: the host's apt configuration (sources, proxies). Out: `Package` values and verified .deb files.
Only Debian's own main archive is used: of the host's sources those that name the host's release in component main and
whose key, if one is given, is Debian's; and whatever a source says, apt is told to accept Debian's archive key alone,
so a vendor's repository among the host's sources can neither replace a package nor add one. Works the same for root
and for an ordinary user, since apt's lists, caches and status live in a directory of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxd.assets import command
from sandboxd.errors import SetupError

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
ARCHITECTURE = "amd64"


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """One suite of one archive; component main is meant."""

    uri: str
    suite: str


@dataclass(frozen=True, slots=True)
class Package:
    """One version of a package. `filename` is the name apt gives the downloaded file."""

    name: str
    version: str
    architecture: str
    sha256: str
    size_bytes: int

    @property
    def filename(self) -> str:
        return f"{self.name}_{self.version.replace(':', '%3a')}_{self.architecture}.deb"

    @property
    def line(self) -> str:
        """What a content key is made of."""
        return f"{self.name} {self.version} {self.architecture} {self.sha256}"


# ---- the host's sources ----


def host_sources(etc: Path = Path("/etc")) -> list[Source]:
    """Debian's main suites among the host's apt sources; `SetupError` when there are none."""
    codename = _codename(etc / "os-release")
    apt = etc / "apt"
    parts = sorted((apt / "sources.list.d").glob("*")) if (apt / "sources.list.d").is_dir() else []
    found: list[Source] = []
    for path in [apt / "sources.list", *parts]:
        if path.suffix == ".list" and path.is_file():
            found += one_line_sources(path.read_text(errors="replace"), codename)
        elif path.suffix == ".sources" and path.is_file():
            found += deb822_sources(path.read_text(errors="replace"), codename)
    unique = list(dict.fromkeys(found))
    if not any(source.suite == codename for source in unique):
        raise SetupError(
            f"No Debian archive for '{codename}' (component main) is among this machine's apt sources, and the "
            "sandbox's kernel and base image are made of Debian packages. Add one to /etc/apt/sources.list.d and "
            "run, as root:\n  apt-get update"
        )
    return unique


def one_line_sources(text: str, codename: str) -> list[Source]:
    """`deb [options] uri suite component...` lines (sources.list(5))."""
    found = []
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)\s+([^#]*)", line.strip())
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        given = dict(option.split("=", 1) for option in (options or "").split() if "=" in option)
        if _is_debian_main(uri, suite, components.split(), given.get("signed-by", ""), codename):
            found.append(Source(uri.rstrip("/"), suite))
    return found


def deb822_sources(text: str, codename: str) -> list[Source]:
    """Stanzas of fields (deb822, sources.list(5)); a field continues on indented lines."""
    found = []
    for stanza in re.split(r"\n(?:[ \t]*\n)+", text):
        fields = _fields(stanza)
        if fields.get("enabled", "yes").lower() in ("no", "false", "0", "off"):
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        components = fields.get("components", "").split()
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                if _is_debian_main(uri, suite, components, fields.get("signed-by", ""), codename):
                    found.append(Source(uri.rstrip("/"), suite))
    return found


def _fields(stanza: str) -> dict[str, str]:
    """The fields of one deb822 or control stanza, names in lower case."""
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t"):
            if name:
                fields[name] += "\n" + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


def _is_debian_main(uri: str, suite: str, components: Sequence[str], signed_by: str, codename: str) -> bool:
    if suite not in (codename, f"{codename}-updates", f"{codename}-security") or "main" not in components:
        return False
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*:[^\s\[\]]+", uri):
        return False
    if not signed_by:
        return True
    return all(Path(key).name.startswith("debian-archive-") for key in re.split(r"[\s,]+", signed_by))


def _codename(os_release: Path) -> str:
    text = os_release.read_text() if os_release.is_file() else ""
    match = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', text, re.MULTILINE)
    if match is None:
        raise SetupError("/etc/os-release names no Debian release (VERSION_CODENAME), and one is needed")
    return match.group(1)


# ---- apt on a directory of ours ----


class Archive:
    """apt with its state in `directory`; nothing is fetched before it is asked for."""

    def __init__(self, directory: Path, sources: Iterable[Source]) -> None:
        self._sources = tuple(sources)
        self._directory = directory

    def _write_configuration(self) -> None:
        keyring = next((path for path in KEYRINGS if path.is_file()), None)
        if keyring is None:
            raise SetupError(
                "Debian's archive key is not on this machine. Run as root:\n"
                "  apt-get install -y debian-archive-keyring"
            )
        for name in ("lists/partial", "cache/archives/partial"):
            (self._directory / name).mkdir(parents=True, exist_ok=True)
        (self._directory / "status").touch()
        (self._directory / "sources.list").write_text(sources_list(self._sources, keyring))
        (self._directory / "apt.conf").write_text(configuration(self._directory))

    def update(self, report: Callable[[int], None]) -> None:
        """Fetch the lists; everything else needs them. `report` is told the percentage."""
        self._write_configuration()
        self._get("update", step="read the lists of Debian packages", report=report)

    def closure(self, names: Iterable[str]) -> list[Package]:
        """What an empty system needs for `names` to be installed; recommendations left out."""
        plan = self._get("-s", "install", *names, step="choose packages").stdout.decode()
        chosen = re.findall(r"^Inst (\S+) \((\S+) ", plan, re.MULTILINE)
        return self.exactly(f"{name}={version}" for name, version in chosen)

    def exactly(self, names: Iterable[str]) -> list[Package]:
        """Just these packages, `name` in the version apt would choose or `name=version`; sorted by name."""
        packages = [
            Package(f["package"], f["version"], f["architecture"], f["sha256"], int(f["size"]))
            for f in self._show(list(names))
        ]
        return sorted(packages, key=lambda package: package.name)

    def depends(self, name: str) -> list[str]:
        """The names a package depends on, first alternatives."""
        fields = self._show([name])[0]
        parts = [*fields.get("pre-depends", "").split(","), *fields.get("depends", "").split(",")]
        return [re.split(r"[\s(|:]", part.strip())[0] for part in parts if part]

    def download(self, packages: Sequence[Package], into: Path, report: Callable[[int], None]) -> list[Path]:
        """The .deb files in `into`; apt has compared each with the signed lists."""
        into.mkdir(parents=True, exist_ok=True)
        wanted = [f"{package.name}={package.version}" for package in packages]
        self._get("download", *wanted, step="download Debian packages", cwd=into, report=report)
        paths = [into / package.filename for package in packages]
        for path, package in zip(paths, packages, strict=True):
            if not path.is_file() or path.stat().st_size != package.size_bytes:
                raise command.BuildFailed("download Debian packages", 0, f"{package.name} did not arrive")
        return paths

    def control(self, packages: Sequence[Package]) -> str:
        """Their control stanzas as a `Packages` file of a flat directory that holds the .deb files."""
        stanzas = []
        wanted = [f"{package.name}={package.version}" for package in packages]
        shown = _stanzas(self._cache("show", *wanted))
        for stanza in shown:
            name, version, architecture = (_fields(stanza)[key] for key in ("package", "version", "architecture"))
            filename = Package(name, version, architecture, "", 0).filename
            stanzas.append(re.sub(r"(?m)^Filename:.*$", f"Filename: ./{filename}", stanza))
        return "\n\n".join(stanzas) + "\n"

    def _show(self, wanted: list[str]) -> list[dict[str, str]]:
        shown = [_fields(stanza) for stanza in _stanzas(self._cache("show", "--no-all-versions", *wanted))]
        if len(shown) != len(wanted):
            raise command.BuildFailed("look up Debian packages", 0, f"{len(shown)} of {len(wanted)} found")
        return shown

    def _cache(self, *words: str) -> str:
        argv: list[str | Path] = ["apt-cache", "-c", self._directory / "apt.conf", *words]
        return command.run(argv, step="look up Debian packages").stdout.decode()

    def _get(
        self, *words: str, step: str, cwd: Path | None = None, report: Callable[[int], None] | None = None
    ) -> command.Result:
        told = -1

        def on_line(line: str) -> None:
            nonlocal told
            match = re.match(r"dlstatus:\d+:([0-9.]+):", line)
            if match is not None and report is not None and (percent := int(float(match.group(1)))) > told:
                told = percent
                report(percent)

        # apt writes its progress to descriptor 2, and its errors beside it.
        argv: list[str | Path] = ["apt-get", "-c", self._directory / "apt.conf", "-q", "-y", *words]
        try:
            return command.run(argv, step=step, cwd=cwd, on_line=on_line)
        except command.BuildFailed as failure:
            said = "\n".join(line for line in failure.tail.splitlines() if not line.startswith("dlstatus:"))
            raise command.BuildFailed(step, failure.exit_code, said) from failure


def sources_list(sources: Iterable[Source], keyring: Path) -> str:
    options = f"arch={ARCHITECTURE} target=Packages signed-by={keyring}"
    return "".join(f"deb [{options}] {source.uri} {source.suite} main\n" for source in sources)


def configuration(directory: Path) -> str:
    """What differs from the host's own apt configuration, which apt reads before this file."""
    quoted = str(directory)
    if re.search(r'["\\\n;]', quoted):
        raise SetupError(f"apt cannot work in a directory of this name: {quoted!r}")
    return f"""\
Dir::State "{quoted}";
Dir::State::lists "{quoted}/lists";
Dir::State::status "{quoted}/status";
Dir::Cache "{quoted}/cache";
Dir::Etc::sourcelist "{quoted}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
#clear APT::Architectures;
APT::Architecture "{ARCHITECTURE}";
APT::Architectures {{ "{ARCHITECTURE}"; }};
#clear APT::Default-Release;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Update::Error-Mode "any";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Get::AllowUnauthenticated "false";
APT::Status-Fd "2";
Acquire::AllowInsecureRepositories "false";
Acquire::Languages "none";
Acquire::GzipIndexes "false";
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "srcpkgcache.bin";
"""


def _stanzas(text: str) -> list[str]:
    return [stanza for stanza in re.split(r"\n\n+", text.strip("\n")) if stanza]
