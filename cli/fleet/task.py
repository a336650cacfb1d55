"""One task of a fleet: a process of its own, which makes a run, and writes down itself what became of it.

In, on stdin: an `Order` as JSON; it may hold values of an environment, so it is in no argument and no variable. Out:
the task's entry of the fleet's record, and its log. It needs nobody: a fleet that is killed leaves it at work. INT is a
person's Ctrl-C: the command gets it, and what it left comes back.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from cli import session, show, stream
from cli.fleet import plain, state
from cli.fleet.plans import REJECTED
from cli.fleet.state import Store
from cli.plan import Plan
from cli.running import Outcome, Run, signals_end_us
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

LOG_BYTES = 64 << 20
LAST_WORDS_S = 5.0
DETAIL = 300
CUT = b"\n-- what follows is left out: this log is full --\n"


@dataclass(frozen=True, slots=True)
class Order:
    """`directory` is where the fleet's record is, `log` the file to write to; `checked` says that the plan's command
    ends with a verify command."""

    directory: Path
    branch: str
    log: Path
    checked: bool
    plan: Plan


def main() -> int:
    """The exit code is only for a person who looks: the record has what counts."""
    order = plain.load(Order, json.load(sys.stdin))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = Log(order.log)
    try:
        return work(Store(order.directory), order)
    finally:
        log.close()


def work(store: Store, order: Order) -> int:
    """Nothing is made before the record says that this process is at work."""
    pid = os.getpid()
    store.change(order.branch, state=state.RUNNING, pid=pid, born=state.born(pid), started=session.now())
    outcome: Outcome | None = None
    became, detail, code = state.FAILED, "", 1
    try:
        with signals_end_us():
            run = Run(order.plan, lambda sandbox: store.change(order.branch, sandbox=sandbox))
            outcome = run.to_the_end()
        became, detail = verdict(outcome, checked=order.checked)
        code = outcome.code
    except stream.Lost as error:
        became, detail = state.LOST, str(error)
        show.note(str(error))
    except SandboxError as error:
        detail = str(error)
        show.note(str(error))
    except KeyboardInterrupt:
        code, detail = 130, "it was interrupted before its command ran"
    except SystemExit as end:
        code, detail = int(end.code or 0), "it was ended"
    except BaseException as fault:
        detail = f"{type(fault).__name__}, which is a fault of this program: see its log"
        raise
    finally:
        # From here on no signal may come between what happened and its being written down.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        brought = outcome or Outcome(code, "")
        store.change(
            order.branch, state=became, code=code, commit=brought.commit or "", commits=brought.commits,
            detail=clean(detail)[:DETAIL], ended=session.now(),
        )  # fmt: skip
    return code


def verdict(outcome: Outcome, *, checked: bool) -> tuple[str, str]:
    """The state a run leaves its task in, and what a person should know of it."""
    code = outcome.code
    if outcome.died:
        return state.LOST, "its sandbox ended before its command did"
    if outcome.error:
        return state.FAILED, f"its commits did not come back: {outcome.error}"
    if (outcome.interrupted or outcome.expired) and not (checked and code == 0):
        became, why = state.FAILED, "its timeout was over" if outcome.expired else "it was interrupted"
    elif code == 0:
        became, why = state.VERIFIED, "" if checked else "it has no verify command: its agent's exit code was 0"
    elif checked and code == REJECTED:
        became, why = state.REJECTED, "its verify command failed"
    else:
        became, why = state.FAILED, f"exit code {code}"
    kept = "some of its work is only in its sandbox, which is kept: see its log" if outcome.left else ""
    return became, "; ".join(filter(None, (why, kept)))


class Log:
    """Our stdout and stderr, in a file that stops growing. A guest that writes without end is heard and not kept."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        read, write = os.pipe2(os.O_CLOEXEC)
        for number in (1, 2):
            os.dup2(write, number)
        os.close(write)
        self._thread = threading.Thread(target=_pump, args=(read, fd), daemon=True)
        self._thread.start()

    def close(self) -> None:
        sys.stdout.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nothing, number)
        self._thread.join(LAST_WORDS_S)  # a process somebody else started may have our stderr still


def _pump(read: int, fd: int) -> None:
    left = LOG_BYTES
    full = False
    with open(read, "rb", buffering=0) as source, open(fd, "wb", buffering=0) as log:
        while data := source.read(65536):
            if full:
                continue
            try:
                log.write(data[:left])
                left -= len(data)
                if left < 0:
                    log.write(CUT)
            except OSError:
                left = -1
            full = left < 0


if __name__ == "__main__":
    sys.exit(main())
