"""A task of a fleet as the plan of a run: the same flags, settings and profile a run of one's own would have.

In: a task of the file, the flags of the fleet, the settings in force. Out: a `Plan`. The agent runs without a person,
and where the task has a verify command that runs behind it, in a shell of its own and whatever the agent's exit code
was: its verdict is the run's exit code. Agent and verify command share a sandbox, so the verdict is the sandbox's word:
good against mistakes, no proof against an agent that means to lie.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cli import plan, run
from cli.agents import start
from cli.agents.table import named
from cli.config import Config
from cli.fleet.file import REFS, Task
from cli.plan import Packed, Plan
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

SLUG = 40
REJECTED = 90
# $1 is the verify command, the rest the agent's.
VERIFY = f"""\
verify=$1
shift
"$@"
code=$?
[ "$code" = 0 ] || echo "fleet: the agent ended with exit code $code" >&2
if sh -c "$verify" </dev/null; then
    echo "fleet: verified" >&2
    exit 0
fi
echo "fleet: rejected by its verify command" >&2
exit {REJECTED}
"""


def of(
    task: Task, flags: Sequence[str], common_dir: Path, project: Path, settings: Config,
    environ: Mapping[str, str], zone: str | None, packed: Packed,
) -> Plan:  # fmt: skip
    """`flags` are those of `run` that all tasks share."""
    agent = named(task.agent)
    words = [f"--name={sandbox_name(common_dir, task.branch)}", f"--project={project}", *flags]
    words += [f"--memory={task.memory_mb}"] if task.memory_mb else []
    words += [f"--cpus={task.cpus:g}"] if task.cpus else []
    words += [f"--allow={host}" for host in task.allow]
    words += ["--git"] if task.git else []
    args = run.parsed(words, command(task))
    try:
        asked = plan.of(args, settings, environ, zone, agent)
    except SandboxError as error:
        key = "; in a fleet file --allow is the key allow" if "--allow" in str(error) else ""
        raise SandboxError(f"task {clean(task.branch)}: {error}{key}") from None
    # The settings' notes are for the person, once, and not for every log.
    labels = {**(asked.create.labels or {}), "fleet.branch": task.branch}
    return replace(
        asked, create=asked.create._replace(labels=labels), branch=REFS + task.branch, packed=packed, notes=(),
        limit_s=task.timeout_s,
    )


def command(task: Task) -> tuple[str, ...]:
    """What runs in the sandbox."""
    agent = named(task.agent)
    argv = start.argv(agent, start.headless(agent, task.prompt, task.args))
    return argv if task.verify is None else ("sh", "-c", VERIFY, "fleet", task.verify, *argv)


def sandbox_name(common_dir: Path, branch: str) -> str:
    """One for each repository and branch, and one a sandbox may have: a-z, 0-9, - and at most 63 of them."""
    slug = re.sub("[^a-z0-9]+", "-", branch.lower())[:SLUG].strip("-")
    key = os.fsencode(common_dir) + b"\0" + branch.encode("utf-8", "surrogateescape")
    return "-".join(part for part in ("fleet", slug, hashlib.sha256(key).hexdigest()[:8]) if part)
