"""The fleet file: which agents work on what, side by side.

In: the file a person named, which has the trust of flags they typed, and no other: none is ever looked for. Out: a
`Fleet`, or a `FleetFileError` with every fault and its place. Sizes and times are text with a unit ("4g", "30m"), "0"
lifts a cap. A task's own caps replace the defaults, its names to reach are added to them.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import bringback, duration
from cli.agents import start
from cli.agents.table import AGENTS
from sandboxd.errors import SandboxError
from sandboxd.plain_yaml import Section, document
from sandboxd.termsafe import clean

MAX_BYTES = 1 << 20
MAX_TASKS = 500
MAX_PARALLEL = 64
PARALLEL = 4
MEMORY = "4g"
CPUS = 2
ARGUMENT_BYTES = 128 * 1024 - 1  # execve(2): MAX_ARG_STRLEN, with the NUL
REFS = "fleet/"
_SIZE = re.compile(r"([1-9][0-9]{0,6})([mMgG])")
_MIB = {"m": 1, "g": 1024}
_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?")
NOT_HERE = {
    "profile": "a profile is a person's choice: --profile",
    "image": "every task starts from the image of your own configuration (image:), else from the server's",
    "cache": "a cache that outlives a sandbox is a volume; a fleet mounts none",
}


class FleetFileError(SandboxError):
    """A fleet file that cannot be read, or says what it may not."""


@dataclass(frozen=True, slots=True)
class Task:
    """One agent's work. `branch` names the ref its commits come back as, below refs/sandbox/fleet/; a cap that is None
    is the server's to choose; `verify` is a shell command, or None; so is `timeout_s` where nothing ends agent and
    verify command."""

    branch: str
    prompt: str
    agent: str
    args: tuple[str, ...]
    memory_mb: int | None
    cpus: float | None
    allow: tuple[str, ...]
    git: bool
    verify: str | None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    tasks: tuple[Task, ...]
    max_parallel: int


@dataclass(frozen=True, slots=True)
class _Defaults:
    memory_mb: int | None
    cpus: float | None
    allow: tuple[str, ...]
    git: bool
    timeout_s: float | None


def read(path: Path) -> Fleet:
    """A file that a person named."""
    shown = clean(str(path))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FleetFileError(f"{shown} is not a file")
            data = file.read(MAX_BYTES + 1)
    except OSError as fault:
        raise FleetFileError(f"{shown} cannot be read: {fault.strerror}") from None
    faults: list[str] = []
    fleet = parse(data, faults)
    if faults:
        raise FleetFileError(f"{shown} is not in order: {'; '.join(faults)}")
    return fleet


def parse(data: bytes, faults: list[str]) -> Fleet:
    """What the text says; `faults` gets a line for each that was found, and the result is then of no use."""
    tree = document(data, MAX_BYTES, faults)
    root = Section("", {} if faults or tree is None else tree, faults)
    if faults:
        return Fleet((), 1)
    agent = root.take("agent", None, _is_text, "an agent's name")
    parallel = root.take(
        "max_parallel", PARALLEL, lambda value: type(value) is int and 1 <= value <= MAX_PARALLEL,
        f"a whole number from 1 to {MAX_PARALLEL}",
    )  # fmt: skip
    defaults = _defaults(root.section("defaults"))
    entries = root.take("tasks", [], lambda value: isinstance(value, list), "a list")
    if not entries or len(entries) > MAX_TASKS:
        root.fault("tasks", f"1 to {MAX_TASKS} are needed, and there are {len(entries)}")
    _done(root)
    sections = [Section(f"tasks[{number}]", entry, faults) for number, entry in enumerate(entries[:MAX_TASKS])]
    tasks = tuple(_task(section, agent, defaults) for section in sections)
    _check_branches(tasks, sections)
    return Fleet(tasks, parallel)


def _defaults(section: Section) -> _Defaults:
    found = _Defaults(
        memory_mb=_memory(section, MEMORY),
        cpus=_cpus(section, CPUS),
        allow=_texts(section, "allow"),
        git=section.take("git", False, lambda value: isinstance(value, bool), "true or false"),
        timeout_s=_timeout(section),
    )
    _done(section)
    return found


def _task(section: Section, agent: Any, defaults: _Defaults) -> Task:
    capped = {key for key in ("memory", "cpus", "timeout") if section.value.get(key) is not None}
    task = Task(
        branch=_required(section, "branch"),
        prompt=_required(section, "prompt"),
        agent=section.take("agent", agent, _is_text, "an agent's name") or "",
        args=_texts(section, "args"),
        memory_mb=_memory(section, "0") if "memory" in capped else defaults.memory_mb,
        cpus=_cpus(section, 0) if "cpus" in capped else defaults.cpus,
        allow=tuple(dict.fromkeys((*defaults.allow, *_texts(section, "allow")))),
        git=defaults.git,
        verify=section.take("verify", None, _is_text, "a shell command"),
        timeout_s=_timeout(section) if "timeout" in capped else defaults.timeout_s,
    )
    section.known += ["memory", "cpus", "timeout"]
    _done(section)
    _check_agent(section, task)
    for key, text in (("prompt", task.prompt), ("verify", task.verify or ""), *(("args", one) for one in task.args)):
        if "\0" in text or len(text.encode("utf-8", "surrogatepass")) > ARGUMENT_BYTES:
            section.fault(key, f"no argument of a command can hold it: it has a NUL, or over {ARGUMENT_BYTES} bytes")
    return task


def _check_agent(section: Section, task: Task) -> None:
    if not task.agent:
        section.fault("agent", "it is missing here and at the top of the file")
        return
    able = sorted(name for name, row in AGENTS.items() if row.headless is not None)
    if task.agent not in able:
        why = "works in a terminal only" if task.agent in AGENTS else "is not known"
        section.fault("agent", f"{clean(task.agent)[:80]} {why}; these work by themselves: {', '.join(able)}")
        return
    if task.prompt:
        try:
            start.headless(AGENTS[task.agent], task.prompt, task.args)
        except SandboxError as error:
            section.fault("prompt", str(error))


def _check_branches(tasks: tuple[Task, ...], sections: list[Section]) -> None:
    """A ref each, and none in the way of another: below a ref there can be no other."""
    first: dict[str, str] = {}
    for task, section in zip(tasks, sections, strict=True):
        if not task.branch:
            continue
        try:
            for name in (task.branch, REFS + task.branch):
                bringback.check_name(name, ours=True)
        except bringback.BringBackError:
            section.fault("branch", f"'{clean(task.branch)[:80]}' cannot be the name of a branch")
            continue
        if task.branch in first:
            section.fault("branch", f"{first[task.branch]} has it already")
        first.setdefault(task.branch, section.path)
    for branch, path in first.items():
        for above in _above(branch):
            if above in first:
                section_of = next(section for section in sections if section.path == path)
                section_of.fault("branch", f"git has no room for it below {above}, the branch of {first[above]}")


def _above(branch: str) -> list[str]:
    parts = branch.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _required(section: Section, key: str) -> str:
    if section.value.get(key) in (None, ""):
        section.fault(key, "it is missing")
    text: str = section.take(key, "", lambda value: isinstance(value, str), "text; a number goes in quotes")
    return text


def _texts(section: Section, key: str) -> tuple[str, ...]:
    fits = section.take(
        key, [], lambda value: isinstance(value, list) and all(_is_text(one) for one in value), "a list of texts"
    )  # fmt: skip
    return tuple(fits)


def _memory(section: Section, default: str) -> int | None:
    given = section.take("memory", default, _is_size, 'a size such as "4g" or "512m", or "0" for no cap')
    size = _SIZE.fullmatch(str(given))
    return int(size[1]) * _MIB[size[2].lower()] if size else None


def _cpus(section: Section, default: int) -> float | None:
    given = section.take("cpus", default, _is_count, 'a number such as 2 or 0.5, or "0" for no cap')
    return float(given) or None


def _timeout(section: Section) -> float | None:
    given = section.take("timeout", "0", _is_time, 'a length of time such as "30m" or "1h30m", or "0" for no limit')
    return duration.seconds("timeout", str(given)) or None


def _is_time(value: Any) -> bool:
    try:
        return type(value) in (int, str) and duration.seconds("timeout", str(value)) >= 0
    except SandboxError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_size(value: Any) -> bool:
    return value == "0" or (type(value) is int and value == 0) or bool(_SIZE.fullmatch(str(value)))


def _is_count(value: Any) -> bool:
    return type(value) in (int, float, str) and bool(_NUMBER.fullmatch(str(value)))


def _done(section: Section) -> None:
    for key, instead in NOT_HERE.items():
        if key in section.value:
            section.fault(key, f"it does not go into a fleet file: {instead}")
            del section.value[key]
    section.done()
