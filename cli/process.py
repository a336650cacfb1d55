"""A process of a sandbox: started and joined, or found among those that are there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cli import show, stream, terminal
from sandboxd.client import Client, Process
from sandboxd.errors import NotFound, SandboxError
from sandboxd.termsafe import clean


def start_and_follow(client: Client, ref: str, argv: Sequence[str], cwd: str | None) -> int:
    """Run `argv` with our streams, on a terminal when ours is one; its exit code."""
    tty = terminal.is_ours()
    env = terminal.environment() if tty else {}
    size = terminal.size() if tty else None
    process = client.start(ref, argv, env=env, cwd=cwd, size=size)
    code = follow(client, ref, process, role=stream.Role.OWNED)
    assert code is not None
    return code


def follow(client: Client, ref: str, process: Process, *, role: stream.Role) -> int | None:
    """Join a process until it ends; None when the person detached."""
    attachment = client.attach(ref, process.pid)
    deliver = partial(client.signal, ref, process.pid)
    tty = process.tty and terminal.is_ours()
    code = stream.follow(attachment, deliver, tty=tty, role=role)
    if code is not None and code < 0:
        show.note("the sandbox ended before the command did")
        return 1
    return code


def find(client: Client, ref: str, pid: str | None) -> Process:
    """The one with this pid; without one the first that runs on a terminal, else that runs, else that
    was."""
    if pid is not None:
        if not pid.isascii() or not pid.isdigit():
            raise SandboxError(f"--pid {clean(pid)}: not a number")
        return client.process(ref, int(pid))
    processes = client.processes(ref)
    running = [one for one in processes if one.state == "running"]
    for group in ([one for one in running if one.tty], running, processes):
        if group:
            return group[0]
    raise NotFound(f"nothing has run in {clean(ref)}")
