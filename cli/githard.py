"""The one place on the host where git is started.

A repository is data somebody else may have written: an agent that had the directory bound, a clone, a
worktree it planted. Its configuration, attributes and hooks name programs, and plain git runs them from
`status`, `diff` or `fetch`. `run` takes a command and gives back what git printed; nothing that the
repository, the person's own configuration or the caller's environment names is ever started:

- git comes from a fixed list of directories, never from PATH or the current directory; its environment
  is made here from nothing. It finds no repository by itself: `Place` names the directory.
- System and global configuration are not read at all, so neither are the filters in them. What the
  repository's own files say (local, worktree and included scopes) is outranked by `FIXED` and, for
  names nobody can list in advance, by `overrides`: they are listed anew on every call, in the
  environment the call will have. All of it travels in GIT_CONFIG_COUNT, which ranks like `-c`, takes
  any name and reaches git's children.
- No transport but reading a file, and that only for `fetch`. No object is fetched lazily.
- Time, output, memory and file sizes have bounds; git runs in a session of its own and is ended as a
  group.

Left open, and known: a guest that is still writing to a bound repository may add a driver between the
listing and the call. Of the commands used here only `status` would look at it.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandboxd.errors import SandboxError, SetupError
from sandboxd.termsafe import clean

SEARCH = ("/usr/local/bin", "/usr/bin", "/bin", "/run/current-system/sw/bin")
OLDEST = (2, 35)  # core.fsmonitor= turns it off, GIT_CONFIG_COUNT, bundles of SHA-256 repositories
NULL = "/dev/null"
# Each is the object name of a tree without entries; git knows it without having it stored.
EMPTY_TREE = {
    "sha1": "4b825dc642cb6eb9a060e54bf8d69288fbee4904",
    "sha256": "6ef19b41225c5369f1c104d45d8d85efa9b057b53b14b4b9b939dd74decc5321",
}

# What each of these would run is planted and shown to run in tests/cli/planted.
FIXED: tuple[tuple[str, str], ...] = (
    ("core.hooksPath", NULL),
    ("core.attributesFile", NULL),
    ("core.fsmonitor", ""),
    ("core.sshCommand", ""),
    ("core.askPass", ""),
    ("core.alternateRefsCommand", ""),
    ("core.gitProxy", ""),
    ("core.pager", "cat"),
    ("core.editor", "false"),
    ("sequence.editor", "false"),
    ("interactive.diffFilter", ""),
    ("credential.helper", ""),
    ("diff.external", ""),
    ("commit.gpgSign", "false"),
    ("tag.gpgSign", "false"),
    ("tag.forceSignAnnotated", "false"),
    ("push.gpgSign", "false"),
    ("gpg.program", "false"),
    ("gpg.openpgp.program", "false"),
    ("gpg.ssh.program", "false"),
    ("gpg.ssh.defaultKeyCommand", "false"),
    ("gpg.x509.program", "false"),
    ("log.showSignature", "false"),
    ("merge.verifySignatures", "false"),
    ("gc.auto", "0"),
    ("gc.recentObjectsHook", ""),
    ("maintenance.auto", "false"),
    ("fetch.writeCommitGraph", "false"),
    ("protocol.allow", "never"),
    ("protocol.file.allow", "always"),
    ("protocol.ext.allow", "never"),
    ("safe.bareRepository", "explicit"),
    ("transfer.fsckObjects", "true"),
    ("fetch.fsckObjects", "true"),
    ("receive.fsckObjects", "true"),
    # git starts itself inside a submodule without any of these settings: never let it go there.
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("diff.submodule", "short"),
    ("diff.ignoreSubmodules", "all"),
    ("status.submoduleSummary", "false"),
    ("core.useReplaceRefs", "false"),
    ("core.bigFileThreshold", "64m"),  # larger blobs are streamed instead of held in memory
    ("core.filesRefLockTimeout", "2000"),
    ("advice.graftFileDeprecated", "false"),
    ("color.ui", "false"),
)

# Names chosen by the repository: for each one found, these keys. A value must be harmless where git runs it:
# `true` and `false` are programs, `git merge-file` merges text as the built-in driver does, and an empty diff
# command makes git fail unless it is told not to use one, which `COMMANDS` does.
DRIVERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "filter": (("clean", ""), ("smudge", ""), ("process", ""), ("required", "false")),
    "diff": (("command", ""), ("textconv", ""), ("cachetextconv", "false")),
    "merge": (("driver", "git merge-file %A %O %B"),),
    "trailer": (("command", "true"), ("cmd", "true")),
    "hook": (("command", "true"), ("enabled", "false")),  # git 2.54: hooks without a hooks directory
    "remote": (("uploadpack", "false"), ("receivepack", "false"), ("vcs", ""), ("promisor", "false")),
}
MAX_DRIVERS = 2000

NO_DRIVERS = ("--no-textconv", "--no-ext-diff")
# Every command that may run, with what is always added.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "add": (),
    "blame": ("--no-textconv",),
    "bundle": (),
    "cat-file": (),
    "check-attr": (),
    "commit": ("--no-verify", "--no-gpg-sign"),
    "config": (),
    "diff": NO_DRIVERS,
    "diff-tree": NO_DRIVERS,
    "fetch": ("--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", "--no-auto-maintenance"),
    "for-each-ref": (),
    "index-pack": (),
    "log": NO_DRIVERS,
    "ls-tree": (),
    "merge": ("--no-gpg-sign", "--no-verify-signatures", "--no-verify", "--no-edit"),
    "rev-list": (),
    "rev-parse": (),
    "show": NO_DRIVERS,
    "status": ("--ignore-submodules=all",),
    "symbolic-ref": (),
    "update-ref": (),
    "version": (),
}
# check-attr answers what attributes say and starts nothing; a merge writes files as attributes say they are written
# (line ends, encodings), and the drivers they name are blank.
READS_ATTRIBUTES = frozenset({"check-attr", "merge"})

STDERR_BYTES = 64 * 1024
RESOURCES = {
    "core": resource.RLIMIT_CORE,
    "cpu": resource.RLIMIT_CPU,
    "data": resource.RLIMIT_DATA,
    "fsize": resource.RLIMIT_FSIZE,
}
PROMISOR_KEY = re.compile(rb"extensions\.partialclone|remote\..*\.(promisor|partialclonefilter)", re.DOTALL)


class GitMissingError(SetupError):
    """No git, or one that is too old."""


class GitError(SandboxError):
    """git ended with a status the caller did not expect, or was ended. The message is one clean line."""

    def __init__(self, command: str, status: int | None, why: str) -> None:
        super().__init__(f"git {command}: {why}")
        self.command = command
        self.status = status
        self.why = why


@dataclass(frozen=True, slots=True)
class Place:
    """Where git acts. `object_format` is "" until known; `alternates` are further object directories."""

    git_dir: Path
    work_tree: Path | None = None
    object_format: str = ""
    alternates: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one call may use. `file_bytes` bounds each file it writes, standard output included."""

    time_s: float = 120
    output_bytes: int = 64 * 2**20
    memory_bytes: int = 2 * 2**30
    cpu_s: int = 600
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """`stdout` is empty where the caller gave a file for it."""

    status: int
    stdout: bytes
    message: str


# Who commits in a sandbox, and makes the reflog entries of refs that are ours; a commit of the person's has their name.
NOBODY: Mapping[str, str] = {
    "GIT_AUTHOR_NAME": "sandbox",
    "GIT_AUTHOR_EMAIL": "sandbox@localhost",
    "GIT_COMMITTER_NAME": "sandbox",
    "GIT_COMMITTER_EMAIL": "sandbox@localhost",
}
Argument = str | bytes | Path
DEFAULT = Bounds()
NOWHERE = Place(Path(NULL))


def run(
    place: Place,
    command: str,
    *arguments: Argument,
    stdin: bytes | IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
    bounds: Bounds = DEFAULT,
    accept: Sequence[int] = (0,),
    keep_fds: Sequence[int] = (),
    settings: Sequence[tuple[str, str]] = (),
    identity: Mapping[str, str] = NOBODY,
) -> Output:
    """Runs one git command; raises GitError for a status not in `accept`, and when a bound is reached.

    `keep_fds` stay open in git, so that a lock outlives a caller who is killed while git still writes. `settings` come
    last; who calls answers for them. `identity` is whose name a commit bears, in the variables of git-commit-tree(1).
    """
    argv: list[Argument] = [binary(), "--no-pager", command, *COMMANDS[command], *arguments]
    all_settings = [*FIXED, *overrides(config_names(place)), *settings]
    environment = _environment(place, all_settings, command)
    environment.update(identity)
    with _input(stdin) as source:
        return _start(place, command, argv, environment, source, stdout, bounds, accept, keep_fds)


def config_names(place: Place) -> list[bytes]:
    """The name of every setting in force at `place`, included files too; values are not read."""
    if place.git_dir == NOWHERE.git_dir:
        return []
    argv: list[Argument] = [binary(), "--no-pager", "config", "--list", "--name-only", "-z"]
    environment = _environment(place, FIXED, "config")
    bounds = Bounds(time_s=20, output_bytes=8 * 2**20)
    with _input(None) as source:
        listed = _start(place, "config", argv, environment, source, None, bounds, (0,), ())
    return listed.stdout.split(b"\0")[:-1]


def overrides(names: Iterable[bytes]) -> list[tuple[str, str]]:
    """The settings that make every driver among `names` do nothing."""
    found: dict[tuple[str, str], None] = {}
    for name in names:
        section, dot, rest = name.partition(b".")
        subsection, dot, _ = rest.rpartition(b".")
        if dot and section.decode("ascii", "replace").lower() in DRIVERS:
            found[section.decode("ascii").lower(), os.fsdecode(subsection)] = None
    if len(found) > MAX_DRIVERS:
        raise GitError("config", None, f"it names {len(found)} drivers; {MAX_DRIVERS} is the most")
    return [
        (f"{section}.{subsection}.{key}", value)
        for section, subsection in found
        for key, value in DRIVERS[section]
    ]  # fmt: skip


def is_promisor(names: Iterable[bytes]) -> bool:
    """Whether these settings make a partial clone, whose missing objects git fetches when it meets them."""
    return any(PROMISOR_KEY.fullmatch(name) for name in names)


def value_in(file: Path, key: str) -> str | None:
    """The last value of `key` in one configuration file, whose includes are not followed."""
    answer = run(NOWHERE, "config", "--file", file, "--no-includes", "-z", "--get", key, accept=(0, 1))
    return os.fsdecode(answer.stdout.removesuffix(b"\0")) if answer.status == 0 else None


def settings(text: bytes) -> list[tuple[str, str]]:
    """The settings in a configuration file's text, in order; what it includes is not read.

    A name without a value (git-config(1): true) has "". Raises GitError where git cannot read it.
    """
    listed = run(NOWHERE, "config", "--file", "-", "--no-includes", "-z", "--list", stdin=text).stdout
    entries = (os.fsdecode(entry).partition("\n") for entry in listed.split(b"\0")[:-1])
    return [(name, value) for name, _, value in entries]


def in_force(place: Place) -> list[tuple[str, str]]:
    """The settings of the repository at `place` itself: its own file, its worktree's, and what they include."""
    bounds = Bounds(time_s=20, output_bytes=8 * 2**20)
    listed = run(place, "config", "--list", "--show-scope", "-z", bounds=bounds).stdout.split(b"\0")
    entries = zip(listed[0::2], listed[1::2], strict=False)
    pairs = (os.fsdecode(entry).partition("\n") for scope, entry in entries if scope in (b"local", b"worktree"))
    return [(name, value) for name, _, value in pairs]


def persons(key: str) -> list[str]:
    """Every value of `key` in the person's own configuration (system and global), which no git acts on."""
    return [os.fsdecode(value) for value in _of_person("--get-all", key)]


def persons_names() -> list[bytes]:
    """The name of every setting in the person's own configuration."""
    return _of_person("--list", "--name-only")


def _of_person(*asked: str) -> list[bytes]:
    argv: list[Argument] = [binary(), "--no-pager", "config", "--includes", "-z", *asked]
    environment = _environment(NOWHERE, (), "config")
    for name in ("GIT_CONFIG_NOSYSTEM", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_GLOBAL"):
        del environment[name]
    if os.environ.get("XDG_CONFIG_HOME", "").startswith("/"):
        environment["XDG_CONFIG_HOME"] = os.environ["XDG_CONFIG_HOME"]
    with _input(None) as source:
        answer = _start(NOWHERE, "config", argv, environment, source, None, Bounds(time_s=20), (0, 1), ())
    return answer.stdout.split(b"\0")[:-1]


def binary() -> str:
    return program("git", "git")


@functools.cache
def program(name: str, package: str) -> str:
    """The path of a program, from the fixed list of directories only."""
    for directory in SEARCH:
        candidate = os.path.join(directory, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    raise GitMissingError(f"{name} is not in {', '.join(SEARCH)}: install it (apt-get install {package})")


@functools.cache
def version() -> tuple[int, ...]:
    """git's version: major, minor, and what follows as far as it is a number."""
    with _input(None) as source:
        environment = _environment(NOWHERE, (), "version")
        argv = [binary(), "version"]
        shown = _start(NOWHERE, "version", argv, environment, source, None, DEFAULT, (0,), ())
    match = re.match(rb"git version (\d+\.\d+(?:\.\d+)?)", shown.stdout)
    numbers = tuple(int(part) for part in match[1].split(b".")) if match else (0, 0)
    if numbers < OLDEST:
        found = f"{binary()} is {numbers[0]}.{numbers[1]}"
        raise GitMissingError(f"git {OLDEST[0]}.{OLDEST[1]} or newer is needed; {found}")
    return numbers


def attribute_source(object_format: str, command: str, known: tuple[int, ...]) -> str | None:
    """The tree attributes are read from: one without any, where git can be told. The drivers are blank anyway."""
    if known < (2, 41) or command in READS_ATTRIBUTES:
        return None
    return EMPTY_TREE[object_format]


def _environment(place: Place, settings: Iterable[tuple[str, str]], command: str) -> dict[str, str]:
    environment = {
        "PATH": ":".join(SEARCH),
        "HOME": os.environ.get("HOME", "/"),  # only `~` in the repository's own settings is looked up in it
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": NULL,
        "GIT_CONFIG_GLOBAL": NULL,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_DIR": str(place.git_dir),
        "GIT_CEILING_DIRECTORIES": "/",
        "GIT_ALLOW_PROTOCOL": "file" if command == "fetch" else "",  # outranks any protocol.<name>.allow
        "GIT_PROTOCOL_FROM_USER": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": NULL,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "GIT_SSH_COMMAND": "false",
        "GIT_PAGER": "cat",
        "GIT_EDITOR": "false",
        "GIT_SEQUENCE_EDITOR": "false",
        "GIT_MERGE_AUTOEDIT": "no",
        **NOBODY,
    }
    if place.work_tree is not None:
        environment["GIT_WORK_TREE"] = str(place.work_tree)
    if place.alternates:
        environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = ":".join(_quoted(path) for path in place.alternates)
    if place.object_format in EMPTY_TREE and (tree := attribute_source(place.object_format, command, version())):
        environment["GIT_ATTR_SOURCE"] = tree
    count = 0
    for count, (key, value) in enumerate(settings, 1):
        environment[f"GIT_CONFIG_KEY_{count - 1}"] = key
        environment[f"GIT_CONFIG_VALUE_{count - 1}"] = value
    environment["GIT_CONFIG_COUNT"] = str(count)
    return environment


def _quoted(path: Path) -> str:
    """A path as git reads it in a list: in double quotes a colon or a newline is part of the name."""
    escaped = "".join(f"\\{ord(char):03o}" if char in '"\\\n' else char for char in str(path))
    return f'"{escaped}"'


@contextmanager
def _input(given: bytes | IO[bytes] | None) -> Iterator[int]:
    """Standard input as a descriptor: bytes go through a file in memory, so nobody waits for a full pipe."""
    if given is None:
        yield subprocess.DEVNULL
    elif not isinstance(given, bytes):
        yield given.fileno()
    else:
        with os.fdopen(os.memfd_create("git-stdin", os.MFD_CLOEXEC), "w+b") as file:
            file.write(given)
            file.seek(0)
            yield file.fileno()


def _start(
    place: Place,
    command: str,
    argv: Sequence[Argument],
    environment: Mapping[str, str],
    source: int,
    stdout: IO[bytes] | None,
    bounds: Bounds,
    accept: Sequence[int],
    keep_fds: Sequence[int],
) -> Output:
    directory = place.work_tree or (Path("/") if place.git_dir == NOWHERE.git_dir else place.git_dir)
    try:
        process = subprocess.Popen(
            [*_limiter(bounds), *argv],
            env=environment,
            cwd=directory,
            stdin=source,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=keep_fds,
        )
    except (OSError, ValueError) as error:
        raise GitError(command, None, clean(str(error))) from None
    try:
        printed, messages = _read(process, command, bounds)
        status = process.wait()
    finally:
        # Also after success: a child git left behind must not outlive the call.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    message = _said(messages)
    if status not in accept:
        raise GitError(command, status, _reason(status, message, bounds))
    return Output(status, printed, message)


def _limiter(bounds: Bounds) -> list[str]:
    """What starts git with its limits already in force: setting them afterwards would come too late."""
    limits = {
        "core": 0,
        "cpu": bounds.cpu_s,
        "data": bounds.memory_bytes,  # not the address space: packs of any size are mapped read-only
        "fsize": bounds.file_bytes,
    }
    hard = {name: resource.getrlimit(kind)[1] for name, kind in RESOURCES.items()}
    return [
        program("prlimit", "util-linux"),
        *(
            f"--{name}={value if hard[name] == resource.RLIM_INFINITY else min(value, hard[name])}"
            for name, value in limits.items()
            if value is not None
        ),
        "--",
    ]


def _read(process: subprocess.Popen[bytes], command: str, bounds: Bounds) -> tuple[bytes, bytes]:
    """Standard output up to its bound, and the first of what it said on standard error."""
    deadline = time.monotonic() + bounds.time_s
    printed = bytearray()
    messages = bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                raise GitError(command, None, f"took longer than {bounds.time_s:g} s")
            for key, _ in ready:
                data = os.read(key.fd, 256 * 1024)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    messages += data[: STDERR_BYTES - len(messages)]
                elif len(printed) + len(data) > bounds.output_bytes:
                    raise GitError(command, None, f"printed more than {bounds.output_bytes} bytes")
                else:
                    printed += data
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise GitError(command, None, f"took longer than {bounds.time_s:g} s") from None
    return bytes(printed), bytes(messages)


def _said(messages: bytes) -> str:
    """The line that says what went wrong, else the first one; a guest may have chosen words in it."""
    lines = [clean(line) for line in messages.decode("utf-8", "replace").splitlines()]
    wrong = [line for line in lines if line.startswith(("fatal: ", "error: "))]
    line = next(iter(wrong or [line for line in lines if line]), "")
    return line.removeprefix("fatal: ").removeprefix("error: ")[:500]


def _reason(status: int, message: str, bounds: Bounds) -> str:
    if status == -signal.SIGXCPU:
        return f"used more than {bounds.cpu_s} s of processor time"
    if status == -signal.SIGXFSZ:
        return f"wrote more than {bounds.file_bytes} bytes"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return message or f"ended with status {status}"
