"""The repository's way into a sandbox and back, and the record that outlives a killed command line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from cli import bringback, checkpoint, collect, gate, place, repository, session, show
from cli.bucket import Mirror
from cli.checkpoint import Checkpoints
from cli.gather import BRANCH
from cli.plan import Packed, Plan
from cli.repository import Repository
from cli.session import Session
from sandboxd.client import Client, Create, Sandbox
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

PIECE_BYTES = 256 * 1024


class Workspace:
    """The repository's way into a sandbox and back."""

    def __init__(
        self, name: str | None, agent: str, repo: Repository, packed: Packed | None = None, mirror: Mirror | None = None
    ) -> None:
        self._name = name
        self._agent = agent
        # What was packed earlier is clean, and its notes were made when that was done.
        self._repo = replace(repo, head_commit=packed.commit, dirty=False, notes=()) if packed else repo
        self._packed = packed
        self._mirror = mirror
        self._config = Path(place.config_dir())
        self._bundle: tuple[IO[bytes], int] | None = None
        self._record: Session | None = None
        self._held = -1

    @classmethod
    def of(cls, asked: Plan) -> Workspace | None:
        """None outside a repository, unless one was asked for."""
        repo = repository.discover(asked.project or Path("."))
        if repo is None:
            if asked.project is not None:
                raise SandboxError(f"--project {clean(str(asked.project))}: not in a git repository")
            return None
        if asked.branch is None and asked.create.name is not None:
            bringback.check_name(asked.create.name)
        agent = asked.agent.name if asked.agent else ""
        return cls(asked.branch or asked.create.name, agent, repo, asked.packed, asked.mirror)

    @property
    def notes(self) -> tuple[str, ...]:
        dirty = ("uncommitted changes stay here: the sandbox gets HEAD",) if self._repo.dirty else ()
        return dirty + self._repo.notes

    def pack(self) -> None:
        session.prepare(self._config)
        if self._packed is None:
            self._bundle = bringback.bundle_head(self._repo)
        else:
            # Opened anew, so that its position is ours alone.
            bundle = open(f"/proc/self/fd/{self._packed.descriptor}", "rb")  # noqa: SIM115 - `send` closes it
            self._bundle = bundle, os.fstat(bundle.fileno()).st_size

    def announce(self, asked: Create, where: str) -> Create:
        """Write down that a sandbox is being made for this run, and give it the label by which it is found again."""
        self._record = Session(
            sandbox="",
            context=where,
            repo=str(self._repo.top),
            base=self._repo.head_commit,
            branch=self._name or "",
            agent=self._agent,
            started=session.now(),
            run=secrets.token_hex(6),
        )
        self._held = session.hold(self._config, self._record)
        return asked._replace(labels={**(asked.labels or {}), session.RUN_LABEL: self._record.run})

    def was_made(self, sandbox: Sandbox) -> None:
        """From now on the record is the sandbox's."""
        announced = self._record
        assert announced is not None
        self._record = replace(announced, sandbox=sandbox.id, branch=self._name or sandbox.id)
        session.save(self._config, self._record)
        session.forget(self._config, announced.key)
        os.close(self._held)

    def end_what_was_made(self, client: Client) -> None:
        """Nobody waits for the sandbox any more, and whether there is one was not heard: then there is to be none."""
        assert self._record is not None
        with suppress(SandboxError):
            for one in client.sandboxes([f"{session.RUN_LABEL}={self._record.run}"]):
                client.delete(one.id)
            self.forget()

    def send(self, client: Client, sandbox: Sandbox) -> None:
        """Clone it in the sandbox."""
        assert self._bundle is not None
        bundle, size = self._bundle
        with bundle:
            client.put_workspace(sandbox.id, BRANCH, iter(partial(bundle.read, PIECE_BYTES), b""), size)

    def checkpoints(self, client: Client, every_s: float) -> Checkpoints:
        assert self._record is not None
        return Checkpoints(client, self._config, self._record, self._repo, every_s, self._mirror)

    def bring_back(
        self, client: Client, sandbox: str, left_behind: Callable[[Sequence[str]], None]
    ) -> dict[str, Any]:
        record = self._record
        assert record is not None
        gathered, received = collect.collect(client, sandbox, self._repo, record.base, record.branch)
        now = collect.remember(self._config, record.sandbox, received)
        review = gate.review(self._repo, record.base, received.commit) if received else gate.Review()
        collect.tell(gathered, received, record.base, review)
        if received and self._mirror:
            collect.to_mirror(self._mirror, self._config, self._repo, sandbox, received)
        if gathered.left:
            left_behind(gathered.left)
        if now and now.checkpoint:
            self._settle(now, superseded=received is not None and not gathered.left)
        return collect.result(received, review)

    def _settle(self, record: Session, *, superseded: bool) -> None:
        """What came back makes the checkpoint superfluous; else it may hold what the end of the run does not."""
        if not superseded:
            show.note(checkpoint.where(record))
            return
        try:
            bringback.drop_checkpoint(self._repo, record.sandbox, record.checkpoint)
        except SandboxError as error:
            show.note(str(error))

    def last_resort(self) -> str:
        """Where to look for the work of a sandbox that has ended by itself."""
        assert self._record is not None
        record = session.load(self._config, self._record.key) or self._record
        return checkpoint.where(record) if record.checkpoint else "there is no checkpoint of it"

    def is_done(self) -> None:
        """The run went to its end, and its sandbox stays because that was asked for."""
        assert self._record is not None
        session.update(self._config, self._record.key, done=True)

    def forget(self) -> None:
        """The sandbox is gone and with it all that the record was for."""
        if self._record is not None:
            session.forget(self._config, self._record.key)
