"""What an agent and its user said, from the session files that the agent itself keeps in its home.

In: a sandbox's files. They are a hostile guest's: every line is data, sizes and numbers are bounded, what is not
understood is left out. Out: `Turn`s in the order of their times. Formats are those that Claude Code 2.1.332 and Codex
0.171.0 write; both were looked at in sessions of the real programs. A file in another format has no turns.

Claude Code: `~/.claude/projects/<directory, / as ->/<session>.jsonl`. A line of type `user` or `assistant` holds a
message of the model's API: its content is a text, or blocks, of which `text` is what was said, `tool_use` a call and
`tool_result` its answer. What the program adds by itself (environment, instructions) is in lines of other types.

Codex: `~/.codex/sessions/YYYY/MM/DD/rollout-<time>-<id>.jsonl`. What was said is in `event_msg` lines about a
`UserMessage` or an `AgentMessage`; tools are `response_item` lines whose type ends in `_call` or `_call_output`. Text
of the role `user` in other `response_item` lines is the program's own, the environment for instance.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from sandboxd.errors import ApiError, SandboxError

if TYPE_CHECKING:
    from sandboxd.client import Client

FILES = 8
TURNS = 40
LINE_BYTES = 1 << 20
TEXT_CHARS = 8000
NAMES, NAME_CHARS = 10, 300
HOME = "/sandbox/home"
CLAUDE_PROJECTS = ("-workspace", "-sandbox-home")
CODEX_SESSIONS = f"{HOME}/.codex/sessions"

USER, AGENT, TOOL = "user", "agent", "tool"


class Turn(NamedTuple):
    """Something that was said. `who` is USER, AGENT, or TOOL for an answer to the agent's call; `text` is cut; `calls`
    are names of tools the agent called, `files` those it called them with; `at` is seconds since 1970, None where no
    time stands in the file."""

    who: str
    text: str
    at: float | None
    calls: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def readable(agent: str) -> bool:
    """Whether this agent's session files are understood."""
    return agent in _AGENTS


def read(client: Client, sandbox: str, agent: str) -> list[Turn]:
    """The last turns of an agent's newest sessions; none where there are none, or they are not understood."""
    if agent not in _AGENTS:
        return []
    find, parse = _AGENTS[agent]
    sessions = [_session(client, sandbox, path, parse) for path in reversed(find(client, sandbox))]
    sessions.sort(key=lambda turns: max((turn.at for turn in turns if turn.at is not None), default=0.0))
    return [turn for turns in sessions for turn in turns][-TURNS:]


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file as it comes; one that is too long is left out."""
    kept, skipping = bytearray(), False
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            if not skipping and len(kept) + len(part) <= LINE_BYTES:
                yield bytes(kept + part)
            kept.clear()
            skipping = False
        if skipping or len(kept) + len(rest) > LINE_BYTES:
            kept.clear()
            skipping = True
        else:
            kept += rest
    if kept:
        yield bytes(kept)


def claude(line: dict[str, Any]) -> Turn | None:
    """A line of Claude Code's."""
    kind, message = line.get("type"), line.get("message")
    if kind not in ("user", "assistant") or not isinstance(message, dict):
        return None
    if line.get("isSidechain") is True or line.get("isMeta") is True:
        return None
    content, at = message.get("content"), _time(line.get("timestamp"))
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _objects(content)
    said = "\n".join(_text(block.get("text")) for block in blocks if block.get("type") == "text")
    if kind == "assistant":
        uses = [block for block in blocks if block.get("type") == "tool_use"]
        inputs = _objects([block.get("input") for block in uses])
        named = (value.get(key) for value in inputs for key in ("file_path", "notebook_path", "path"))
        return Turn(AGENT, _cut(said), at, _names(block.get("name") for block in uses), _names(named))
    answers = [block for block in blocks if block.get("type") == "tool_result"]
    return Turn(TOOL, "", at) if answers else Turn(USER, _cut(said), at)


def codex(line: dict[str, Any]) -> Turn | None:
    """A line of Codex's."""
    kind, payload, at = line.get("type"), line.get("payload"), _time(line.get("timestamp"))
    if not isinstance(payload, dict):
        return None
    what = payload.get("type")
    if kind == "response_item" and isinstance(what, str):
        if what.endswith("_call"):
            return Turn(AGENT, "", at, _names([payload.get("name")]))
        return Turn(TOOL, "", at) if what.endswith("_call_output") else None
    if kind != "event_msg":
        return None
    if what in ("task_complete", "turn_aborted"):
        return Turn(AGENT, "", at)
    item = payload.get("item")
    if what != "item_completed" or not isinstance(item, dict):
        return None
    if item.get("type") == "CommandExecution":
        named = (part.get("path") for part in _objects(item.get("parsed_cmd")))
        return Turn(TOOL, "", at, files=_names(named))
    if (who := {"UserMessage": USER, "AgentMessage": AGENT}.get(_text(item.get("type")))) is None:
        return None
    return Turn(who, _cut("\n".join(_text(block.get("text")) for block in _objects(item.get("content")))), at)


def _session(client: Client, sandbox: str, path: str, parse: Callable[[dict[str, Any]], Turn | None]) -> list[Turn]:
    turns: deque[Turn] = deque(maxlen=TURNS)
    try:
        for line in lines(client.stream_file(sandbox, path)):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and (turn := parse(value)):
                turns.append(turn)
    except SandboxError:
        return []  # it is gone, no file, too large, or became shorter while it was read
    return list(turns)


def _claude_sessions(client: Client, sandbox: str) -> list[str]:
    """The newest first, where there are more than are read."""
    found = []
    for project in CLAUDE_PROJECTS:
        directory = f"{HOME}/.claude/projects/{project}"
        names = [name for name, kind in _entries(client, sandbox, directory) if kind == "file"]
        found += [f"{directory}/{name}" for name in names if name.endswith(".jsonl")]
    if len(found) <= FILES:
        return found
    # Their names say nothing of their age, and listings neither.
    try:
        newest = client.run(sandbox, ["ls", "-t", "--", *found[:1000]], timeout_secs=10).stdout.decode(
            "utf-8", "replace"
        )
    except ApiError:
        return found[:FILES]  # there is no ls, or the names are too long for one request: which are read is the guest's
    known = set(found)
    return [path for path in newest.splitlines() if path in known][:FILES]


def _codex_sessions(client: Client, sandbox: str) -> list[str]:
    """The newest first, by the dates in their paths."""
    found: list[str] = []
    places = [CODEX_SESSIONS]
    for _ in ("year", "month", "day"):
        below = [f"{at}/{name}" for at in places for name, kind in _entries(client, sandbox, at) if kind == "dir"]
        places = sorted(below, reverse=True)[:FILES]
    for place in places:
        names = sorted((name for name, kind in _entries(client, sandbox, place) if kind == "file"), reverse=True)
        found += [f"{place}/{name}" for name in names if name.endswith(".jsonl")]
    return found[:FILES]


def _entries(client: Client, sandbox: str, directory: str) -> list[tuple[str, str]]:
    try:
        return [(entry.name, entry.type) for entry in client.list_dir(sandbox, directory)]
    except ApiError:
        return []  # it is not there, no directory, or has too much in it


def _time(value: object) -> float | None:
    if not isinstance(value, str):
        return None
    try:
        given = datetime.fromisoformat(value)
        if given.tzinfo is None:
            return None
        at = given.timestamp()
        # Its zone may put a time beyond the years there are; whoever writes it out again would fail.
        datetime.fromtimestamp(at, UTC)
        return at
    except (ValueError, OverflowError):
        return None


def _objects(value: object) -> list[dict[str, Any]]:
    return [block for block in value if isinstance(block, dict)] if isinstance(value, list) else []


def _names(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(value[:NAME_CHARS] for value in values if isinstance(value, str) and value)[:NAMES]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"


_Parse = Callable[[dict[str, Any]], "Turn | None"]
_AGENTS: dict[str, tuple[Callable[..., list[str]], _Parse]] = {
    "claude": (_claude_sessions, claude),
    "codex": (_codex_sessions, codex),
}
