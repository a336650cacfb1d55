"""Make a sandbox, run a command in it, bring its commits back.

Usage:
  sandbox-cli run [--allow=HOST]... [--deny=HOST]... [--allow-tcp=HOST:PORT]... [--env=KV]... [--label=KV]...
                  [--volume=SPEC]... [options] -- CMD...

Inside a git repository HEAD goes in as a bundle and is checked out in /workspace, where the command starts.
When it ends, everything it left there is committed and comes back to refs/sandbox/NAME; no branch, index or
working tree is touched. The exit code is the command's; 1 if it was 0 and its commits could not come back.

Options:
  --name=NAME         the sandbox's name, and the one below refs/sandbox/ (default: the sandbox's id); a ref of an
                      earlier run of that name is replaced, and how to keep its commits is printed
  --project=DIR       the repository to take (default: the one around the current directory)
  --no-workspace      take no repository
  --no-bring-back     bring nothing back (add --keep, or the commits go with the sandbox)
  --keep              leave the sandbox running at the end
  -d, --detach        start the command, print the sandbox's id and leave
  -e KV, --env=KV     K=V, or K for the value it has here; may be given again
  --image=REF         the image to start from (default: the server's)
  --cpus=N            virtual processors
  --memory=MIB        memory in MiB
  --disk=MIB          disk in MiB
  --idle=SECONDS      end the sandbox after this long with no process and no request
  --network=MODE      none, allowlist or open (default: the server's); no more than the server's ceiling, which
                      `doctor` prints: where it is none, only none works
  --allow=HOST        a name it may reach on ports 80 and 443, beside those the server allows by itself; `*.HOST` for
                      all names below one; may be given again
  --allow-tcp=HOST:PORT
                      a name it may reach on another port, such as github.com:22; may be given again
  --deny=HOST         a name it may not reach, whatever is allowed; may be given again
  --no-baseline       only the names given here, none of the server's own
  --volume=SPEC       NAME:/path mounts a volume there, NAME:/path:ro only to read; may be given again
  --label=KV          K=V, for `list --label`; may be given again
  --context=C         which sandboxd: `local`, unix:///path, http://127.0.0.1:PORT or https://HOST:PORT
  --json              print the result as an object: on stdout with --detach, else last on stderr
  -h, --help          show this
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from cli import bringback, collect, context, network, repository, session, show, stream, terminal, volume, wording
from cli.gather import BRANCH
from cli.repository import Repository
from cli.session import Session
from cli.status import Status
from sandboxd.client import Capabilities, Client, Create, Process, Sandbox
from sandboxd.errors import Conflict, InvalidRequest, NotFound, Refused, SandboxError, Unavailable
from sandboxd.termsafe import clean

LATER = (
    "--bind", "--bind-read-only", "--checkpoint-every", "--config", "--fallback", "--from-snapshot", "--git",
    "--no-persist-auth", "--profile", "--snapshot-every", "--snapshot-keep", "--template",
)  # fmt: skip
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ZONE = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*")
IDENTITY = {
    "GIT_AUTHOR_NAME": "sandbox",
    "GIT_AUTHOR_EMAIL": "sandbox@localhost",
    "GIT_COMMITTER_NAME": "sandbox",
    "GIT_COMMITTER_EMAIL": "sandbox@localhost",
}
WAIT_FOR_READY_S = 3600.0
WAIT_WITHOUT_NEWS_S = 900.0
ASK_AGAIN_S = 1.0
PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """A run as it was asked for, checked as far as this side can."""

    command: tuple[str, ...]
    create: Create
    network: network.Wanted
    project: Path | None
    workspace: bool
    bring_back: bool
    keep: bool
    detach: bool
    context: str | None
    json: bool
    unset: tuple[str, ...] = ()


def main(args: dict[str, Any]) -> int:
    asked = plan(args, os.environ, _zone())
    with _signals_end_us():
        return _Run(asked).to_the_end()


def plan(args: Mapping[str, Any], environ: Mapping[str, str], zone: str | None) -> Plan:
    """From arguments to a plan; raises on what can be seen to be wrong from here."""
    given = environment(args["--env"], environ)
    unset = tuple(name for name in args["--env"] if "=" not in name and name not in environ)
    create = Create(
        name=args["--name"],
        image=args["--image"],
        cpus=_number("--cpus", args["--cpus"], float),
        memory_mb=_number("--memory", args["--memory"], int),
        disk_mb=_number("--disk", args["--disk"], int),
        idle_timeout_secs=_number("--idle", args["--idle"], int),
        env=IDENTITY | ({"TZ": zone} if zone else {}) | given,
        labels=_labels(args["--label"]),
        volumes=volume.given(args["--volume"]),
    )
    return Plan(
        command=tuple(args["CMD"]),
        create=create,
        network=network.wanted(args),
        project=Path(args["--project"]) if args["--project"] else None,
        workspace=not args["--no-workspace"],
        bring_back=not args["--no-bring-back"],
        keep=args["--keep"],
        detach=args["--detach"],
        context=args["--context"],
        json=args["--json"],
        unset=unset,
    )


def environment(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`-e` values: K=V as it is, K with the value it has here, nothing for a K that is not set."""
    found: dict[str, str] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not ENV_NAME.fullmatch(name):
            raise SandboxError(f"-e {clean(name)}: not a variable's name")
        if equals:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
    return found


class _Run:
    """The steps of a run, in order."""

    def __init__(self, asked: Plan) -> None:
        self._plan = asked
        self._repo = _Workspace.of(asked) if asked.workspace else None
        self._keep = asked.keep
        self._sandbox_id = ""
        self._ref = ""

    def to_the_end(self) -> int:
        asked = self._plan
        endpoint = context.choose(asked.context, context.STARTING_S)
        client = endpoint.client
        if endpoint.note:
            show.note(endpoint.note)
        wanted = asked.create
        if self._repo or not asked.network.nothing or wanted.volumes:
            offer = client.capabilities()
            check_offer(offer, workspace=self._repo is not None, volumes=bool(wanted.volumes))
            wanted = wanted._replace(network=network.of_run(asked.network, offer))
        with Status() as status:
            if self._repo:
                status.say("packing HEAD")
                self._repo.pack()
            sandbox = create(client, wanted, status)
        self._sandbox_id = sandbox.id
        self._ref = asked.create.name or sandbox.id
        try:
            for note in self._notes():
                show.note(note)
            with Status() as status:
                process = self._start(client, sandbox, status)
            if asked.detach:
                with suppress(Conflict):  # it has ended already
                    client.write_stdin(sandbox.id, process.pid, b"", close=True)
        except BaseException:
            self._end(client)
            raise
        return self._leave(sandbox, process) if asked.detach else self._attached(client, process)

    def _notes(self) -> Iterator[str]:
        """What the person should know of a run that really happens."""
        for name in self._plan.unset:
            yield f"{name} is not set here: not passed on"
        if self._repo:
            yield from self._repo.notes
        elif self._plan.workspace:
            yield "not in a git repository: the sandbox's /workspace is empty"

    def _start(self, client: Client, sandbox: Sandbox, status: Status) -> Process:
        cwd = None
        if self._repo:
            status.say("cloning into the sandbox")
            self._repo.send(client, sandbox, client.endpoint.address)
            cwd = "/workspace"
        status.say("starting the command")
        tty = not self._plan.detach and terminal.is_ours()
        env = terminal.environment() if tty else {}
        size = terminal.size() if tty else None
        return client.start(sandbox.id, self._plan.command, env=env, cwd=cwd, size=size)

    def _leave(self, sandbox: Sandbox, process: Process) -> int:
        if self._plan.json:
            show.as_json({"sandbox": sandbox.id, "pid": process.pid})
        else:
            show.line(sandbox.id)
        show.note(f"what it writes: sandbox-cli logs {self._ref}")
        show.note(f"attach: sandbox-cli attach {self._ref}")
        if self._repo and self._plan.bring_back:
            show.note(f"bring its commits back: sandbox-cli bring-back {self._ref}")
        show.note(f"end it: sandbox-cli kill {self._ref}")
        return 0

    def _attached(self, client: Client, process: Process) -> int:
        """Until the command ends, and what comes after. From here on nothing ends the sandbox by accident."""
        sandbox = self._sandbox_id
        try:
            attachment = client.attach(sandbox, process.pid)
            deliver = partial(client.signal, sandbox, process.pid)
            code = stream.follow(attachment, deliver, tty=process.tty, role=stream.Role.OWNED)
        except BaseException:
            show.note(f"{self._ref} is left as it is; look at it with: sandbox-cli attach {self._ref}")
            self._hint_bring_back()
            raise
        if code is None or code < 0:
            show.note("the sandbox ended before the command did")
            code = 1
        result: dict[str, Any] = {"sandbox": sandbox, "exit_code": code}
        try:
            if self._repo and self._plan.bring_back:
                result |= self._repo.bring_back(client, sandbox, self._left_behind)
        except SandboxError as error:
            self._keep = True
            show.note(f"the commits could not be brought back: {error}")
            self._hint_bring_back()
            result["error"] = str(error)
            code = code or 1
        except BaseException:
            self._keep = True
            self._hint_bring_back()
            raise
        finally:
            self._end(client)
        if self._plan.json:
            show.error(json.dumps(result) + "\n")
        return code

    def _left_behind(self, left: Sequence[str]) -> None:
        """Something would be lost with the sandbox: it stays until the person has seen to it."""
        self._keep = True
        for what in left:
            show.note(f"still only in the sandbox: {what}")
        show.note(f"so {self._ref} is kept until it has been idle for its time; look: {self._look()}")

    def _look(self) -> str:
        return f"sandbox-cli shell {self._ref}"

    def _hint_bring_back(self) -> None:
        if self._repo and self._plan.bring_back:
            show.note(f"try again with: sandbox-cli bring-back {self._ref}")

    def _end(self, client: Client) -> None:
        if self._keep:
            show.note(f"{self._ref} is kept; end it with: sandbox-cli kill {self._ref}")
            return
        try:
            client.delete(self._sandbox_id)
        except NotFound:
            pass
        except SandboxError as error:
            show.note(f"{self._ref} could not be ended: {error}")
            return
        if self._repo:
            self._repo.forget()


class _Workspace:
    """The repository's way into a sandbox and back."""

    def __init__(self, name: str | None, repo: Repository) -> None:
        self._name = name
        self._repo = repo
        self._bundle: tuple[IO[bytes], int] | None = None
        self._record: Session | None = None

    @classmethod
    def of(cls, asked: Plan) -> _Workspace | None:
        """None outside a repository, unless one was asked for."""
        repo = repository.discover(asked.project or Path("."))
        if repo is None:
            if asked.project is not None:
                raise SandboxError(f"--project {clean(str(asked.project))}: not in a git repository")
            return None
        if asked.create.name is not None:
            bringback.check_name(asked.create.name)
        return cls(asked.create.name, repo)

    @property
    def notes(self) -> tuple[str, ...]:
        dirty = ("uncommitted changes stay here: the sandbox gets HEAD",) if self._repo.dirty else ()
        return dirty + self._repo.notes

    def pack(self) -> None:
        session.prepare(Path(context.config_dir()))
        self._bundle = bringback.bundle_head(self._repo)

    def send(self, client: Client, sandbox: Sandbox, where: str) -> None:
        """Clone it in the sandbox, and write down what would be needed to bring it back."""
        assert self._bundle is not None
        bundle, size = self._bundle
        with bundle:
            client.put_workspace(sandbox.id, BRANCH, iter(partial(bundle.read, PIECE_BYTES), b""), size)
        self._record = Session(
            sandbox=sandbox.id,
            context=where,
            repo=str(self._repo.top),
            base=self._repo.head_commit,
            branch=self._name or sandbox.id,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        session.save(Path(context.config_dir()), self._record)

    def bring_back(
        self, client: Client, sandbox: str, left_behind: Callable[[Sequence[str]], None]
    ) -> dict[str, Any]:
        record = self._record
        assert record is not None
        gathered, received = collect.collect(client, sandbox, self._repo, record.base, record.branch)
        session.save(Path(context.config_dir()), replace(record, brought_back=True))
        collect.tell(gathered, received, record.base)
        if gathered.left:
            left_behind(gathered.left)
        return collect.result(received)

    def forget(self) -> None:
        """The sandbox is gone and with it all that the record was for."""
        if self._record is not None:
            session.forget(Path(context.config_dir()), self._record.sandbox)


def check_offer(offer: Capabilities, *, workspace: bool, volumes: bool) -> None:
    """Raises on what this server has not got."""
    if volumes and not offer.capabilities.get("volumes"):
        raise SandboxError("this sandboxd has no volumes")
    if workspace and not offer.capabilities.get("workspace_bundle"):
        raise SandboxError("this sandboxd takes no repository: use --no-workspace, or another one")


def create(client: Client, asked: Create, status: Status) -> Sandbox:
    """A running sandbox; waits, with the server's progress shown, while the server gets ready."""
    started = heard = time.monotonic()
    said = ""
    status.say("starting a sandbox")
    while True:
        try:
            return client.create(asked)
        except (InvalidRequest, Conflict, NotFound, Refused) as error:
            raise SandboxError(wording.of_create(error.message)) from None
        except Unavailable as error:
            if not error.message.startswith(wording.GETTING_READY):
                raise
            now = time.monotonic()
            if error.message != said:
                said, heard = error.message, now
            if now - started > WAIT_FOR_READY_S or now - heard > WAIT_WITHOUT_NEWS_S:
                raise
            status.say(f"waiting for sandboxd: {said}")
            time.sleep(ASK_AGAIN_S)


@contextmanager
def _signals_end_us() -> Iterator[None]:
    """TERM and HUP unwind like Ctrl-C does, so that whatever was set up is taken down."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _number(flag: str, text: str | None, kind: type[int] | type[float]) -> Any:
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        raise SandboxError(f"{flag} {clean(text)}: not a number above 0")
    return value


def _labels(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SandboxError(f"--label {clean(pair)}: it is KEY=VALUE")
        found[key] = value
    return found


def _zone() -> str | None:
    """The name of this machine's time zone, where it has one."""
    try:
        _, found, name = os.readlink("/etc/localtime").partition("zoneinfo/")
    except OSError:
        return None
    return name if found and ZONE.fullmatch(name) else None
