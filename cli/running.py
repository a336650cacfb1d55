"""A run, in order: a sandbox is made, the repository goes in, the command runs, its commits come back.

In: a `Plan`. Out: an `Outcome`, and what the person was told on the way. From the moment the command runs, nothing
ends the sandbox by accident: it stays wherever its work could not be brought back.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from cli import bind, checkpoint, context, network, secrets, show, stream, terminal, wording
from cli.agents import login, provider
from cli.agents.tools import Tools
from cli.bringback import BundleRefusedError
from cli.checkpoint import Checkpoints
from cli.plan import Plan
from cli.status import Status
from cli.workspace import Workspace
from sandboxd.client import Capabilities, Client, Create, Process, Sandbox, Unreachable
from sandboxd.errors import Conflict, InvalidRequest, NotFound, Refused, SandboxError, Unavailable

WAIT_FOR_READY_S = 3600.0
WAIT_WITHOUT_NEWS_S = 900.0
ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    `code` is its exit code, `sandbox` the id. `commits` are those that came back: 0 where there were none, None where
    nobody knows (nothing was to come back, it failed, or the command was left running); `commit` is the last of them,
    `error` why they did not. `died`: the sandbox ended before the command did. `left`: something that did not come back
    is still in it. `interrupted`: the person sent the command a signal. `expired`: its time limit ended it.
    """

    code: int
    sandbox: str
    commits: int | None = None
    commit: str | None = None
    error: str | None = None
    died: bool = False
    left: bool = False
    interrupted: bool = False
    expired: bool = False


class Run:
    """The steps of a run, in order."""

    def __init__(
        self, asked: Plan, created: Callable[[str], None] | None = None,
        ended: Callable[[Client, str, int], None] | None = None,
    ) -> None:
        """`created` is told the sandbox's id as soon as there is one, `ended` the command's exit code while the sandbox
        is still there to be looked at."""
        self._plan = asked
        self._created = created
        self._ended = ended
        self._left = self._interrupted = self._expired = False
        self._limit_at = float("inf")
        self._repo = Workspace.of(asked) if asked.workspace else None
        if asked.checkpoint_every_s and not self._repo:
            raise SandboxError("--checkpoint-every: not in a git repository, so there is nothing to take one of")
        self._watch: bind.Watch | None = None
        self._keep = asked.keep
        self._sandbox_id = ""
        self._ref = ""
        self._tools: Tools | None = None

    def to_the_end(self) -> Outcome:
        """Raises SandboxError where it cannot be begun, and then nothing is left of it."""
        asked = self._plan
        endpoint = context.choose(asked.context, context.STARTING_S)
        client = endpoint.client
        if endpoint.note:
            show.note(endpoint.note)
        wanted = asked.create
        if wanted.bind:
            bind.check_endpoint(client)
        asks = wanted.volumes or wanted.bind or asked.agent or asked.snapshots
        if self._repo or not asked.network.nothing or asks:
            offer = client.capabilities()
            if wanted.bind:
                bind.check_offer(offer)
            check_offer(
                offer, workspace=self._repo is not None, volumes=bool(wanted.volumes), snapshots=asked.snapshots
            )
            if asked.agent:
                network.for_agents(offer, os.geteuid())
            wanted = wanted._replace(network=network.of_run(asked.network, offer, asked.hosts))
            if asked.agent:
                self._tools = Tools(client, offer, asked.agent, wanted, partial(create, client))
                with Status() as status:
                    self._tools.install(status)
        if asked.secrets:
            secrets.guard()
        values = secrets.fetch(asked.secrets, os.environ)
        with Status() as status:
            if wanted.bind and not wanted.bind.read_only and not asked.detach:
                status.say("looking at the directory")
                self._watch = bind.Watch(wanted.bind)
            if self._repo:
                status.say("packing HEAD")
                self._repo.pack()
            sandbox = self._create(client, wanted._replace(env={**(wanted.env or {}), **values.env}), status)
        self._sandbox_id = sandbox.id
        self._ref = asked.create.name or sandbox.id
        try:
            if self._created:
                self._created(sandbox.id)
            reach = secrets.reach(asked.secrets, sandbox.network)
            agents = provider.unreached(asked.agent, wanted.env or {}, sandbox.network) if asked.agent else ()
            for note in (*self._notes(), *values.notes, *reach, *agents):
                show.note(note)
            with Status() as status:
                process = self._start(client, sandbox, status)
            if asked.detach:
                with suppress(Conflict):  # it has ended already
                    client.write_stdin(sandbox.id, process.pid, b"", close=True)
        except BaseException:
            self._end(client)
            raise
        if asked.detach:
            self._leave(sandbox, process)
            return Outcome(0, sandbox.id)
        return self._attached(client, process)

    def _create(self, client: Client, wanted: Create, status: Status) -> Sandbox:
        make = self._tools.create if self._tools else partial(create, client)
        if not self._repo:
            return make(wanted, status)
        wanted = self._repo.announce(wanted, client.endpoint.address)
        try:
            sandbox = make(wanted, status)
        except Unreachable:
            raise  # a sandbox may have been made: the record stays
        except SandboxError:
            self._repo.forget()
            raise
        except BaseException:
            self._repo.end_what_was_made(client)
            raise
        self._repo.was_made(sandbox)
        return sandbox

    def _notes(self) -> Iterator[str]:
        """What the person should know of a run that really happens."""
        yield from self._plan.notes
        yield from self._tools.notes if self._tools else ()
        for name in self._plan.unset:
            yield f"{name} is not set here: not passed on"
        if self._plan.create.bind:
            yield from bind.notes(self._plan.create.bind, detached=self._plan.detach)
        if self._repo:
            yield from self._repo.notes
        elif self._plan.workspace:
            yield "not in a git repository: the sandbox's /workspace is empty"

    def _start(self, client: Client, sandbox: Sandbox, status: Status) -> Process:
        cwd = bind.WORKSPACE if self._plan.create.bind else None
        if self._repo:
            status.say("cloning into the sandbox")
            self._repo.send(client, sandbox)
            cwd = "/workspace"
        if self._plan.agent and self._plan.persist_auth:
            for note in login.restore(client, sandbox.id, self._plan.agent):
                show.note(note)
        for path, content in self._plan.files.items():
            client.write_file(sandbox.id, path, content)
        status.say("starting the command")
        tty = not self._plan.detach and terminal.is_ours()
        env = terminal.environment() if tty else {}
        size = terminal.size() if tty else None
        return client.start(sandbox.id, self._plan.command, env=env, cwd=cwd, size=size)

    def _leave(self, sandbox: Sandbox, process: Process) -> None:
        if self._plan.json:
            show.as_json({"sandbox": sandbox.id, "pid": process.pid})
        else:
            show.line(sandbox.id)
        show.note(f"what it writes: sandbox-cli logs {self._ref}")
        show.note(f"attach: sandbox-cli attach {self._ref}")
        if self._repo and self._plan.bring_back:
            show.note(f"bring its commits back: {self._bring_back()}")
        show.note(f"end it: sandbox-cli kill {self._ref}")

    def _attached(self, client: Client, process: Process) -> Outcome:
        """Until the command ends, and what comes after. From here on nothing ends the sandbox by accident."""
        sandbox = self._sandbox_id
        try:
            attachment = client.attach(sandbox, process.pid)
            deliver = partial(self._signal, client, process)
            limit_s = self._plan.limit_s
            if limit_s is not None:
                self._limit_at = time.monotonic() + limit_s
            with self._checkpoints(client) as taken:
                code = stream.follow(
                    attachment, deliver, tty=process.tty, role=stream.Role.OWNED, limit_s=limit_s
                )
        except BaseException:
            show.note(f"{self._ref} is left as it is; look at it with: sandbox-cli attach {self._ref}")
            self._hint_bring_back()
            self._tell_changes(running=True)
            raise
        if self._expired:
            show.note("the command was ended: its time was over")
        if taken:
            for note in taken.told():
                show.note(note)
        if code is None or code < 0:
            return self._ended_early(client)
        result: dict[str, Any] = {"sandbox": sandbox, "exit_code": code}
        try:
            if self._ended:
                self._ended(client, sandbox, code)
            if self._plan.agent and self._plan.persist_auth:
                for note in login.save(client, sandbox, self._plan.agent):
                    show.note(note)
            if self._repo and self._plan.bring_back:
                result |= self._repo.bring_back(client, sandbox, self._left_behind)
            if self._repo and self._keep and not self._left:
                self._repo.is_done()
        except SandboxError as error:
            self._keep = True
            show.note(f"the commits could not be brought back: {error}")
            if isinstance(error, BundleRefusedError):
                show.note(f"it would be refused again: see to that in the sandbox first: {self._look()}")
            self._hint_bring_back()
            result["error"] = str(error)
            code = code or 1
        except BaseException:
            self._keep = True
            self._hint_bring_back()
            raise
        finally:
            self._end(client)
        # Afterwards, so that nothing that it left running changes the directory behind our back.
        result |= self._tell_changes(running=self._keep)
        if self._plan.json:
            show.error(json.dumps(result) + "\n")
        return Outcome(
            code, sandbox, result.get("commits"), result.get("commit"), result.get("error"), left=self._left,
            interrupted=self._interrupted, expired=self._expired,
        )  # fmt: skip

    def _signal(self, client: Client, process: Process, name: str) -> None:
        if time.monotonic() >= self._limit_at:
            self._expired = True
        else:
            self._interrupted = True
        client.signal(self._sandbox_id, process.pid, name)

    def _checkpoints(self, client: Client) -> AbstractContextManager[Checkpoints | None]:
        asked = self._plan.checkpoint_every_s
        every_s = (checkpoint.DEFAULT_S if self._plan.bring_back else 0.0) if asked is None else asked
        return self._repo.checkpoints(client, every_s) if self._repo and every_s else nullcontext()

    def _ended_early(self, client: Client) -> Outcome:
        """There is nothing to bring anything back from. The record stays, for `recover`."""
        why = "the sandbox ended before the command did"
        show.note(why)
        if self._repo:
            show.note(self._repo.last_resort())
            show.note("what became of it: sandbox-cli recover")
        else:
            self._end(client)
        changes = self._tell_changes(running=False)
        if self._plan.json:
            show.error(json.dumps({"sandbox": self._sandbox_id, "exit_code": 1, "error": why} | changes) + "\n")
        return Outcome(1, self._sandbox_id, error=why, died=True)

    def _tell_changes(self, *, running: bool) -> dict[str, Any]:
        return self._watch.tell(running=running) if self._watch else {}

    def _left_behind(self, left: Sequence[str]) -> None:
        """Something would be lost with the sandbox: it stays until the person has seen to it."""
        self._keep = self._left = True
        for what in left:
            show.note(f"still only in the sandbox: {what}")
        show.note(f"so {self._ref} is kept until it has been idle for its time; look: {self._look()}")

    def _look(self) -> str:
        return f"sandbox-cli shell {self._ref}"

    def _hint_bring_back(self) -> None:
        if self._repo and self._plan.bring_back:
            show.note(f"try again with: {self._bring_back()}")

    def _bring_back(self) -> str:
        named = self._plan.mirror.named if self._plan.mirror else ""
        return f"sandbox-cli bring-back{named} {self._ref}"

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


def check_offer(offer: Capabilities, *, workspace: bool, volumes: bool, snapshots: bool) -> None:
    """Raises on what this server has not got."""
    if snapshots and not (offer.capabilities.get("memory_snapshot") or offer.capabilities.get("disk_snapshot")):
        raise SandboxError("this sandboxd cannot take snapshots (what it can: sandbox-cli doctor)")
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
def signals_end_us() -> Iterator[None]:
    """TERM and HUP unwind like Ctrl-C does, so that whatever was set up is taken down."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
