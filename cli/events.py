"""Show what was done with a sandbox, from its creation to its end, and which
names it asked for.

Usage:
  sandbox-cli events [options] SANDBOX

The oldest come first. By its id a sandbox's events are shown after it was
forgotten, too. Of a process its program is shown, how many arguments it had
and a hash of them; no argument, no value of a variable and no content of a
file was ever recorded.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the API's objects, one on a line
  -h, --help     show this
"""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any

from cli import context, show
from sandboxd.client import AuditEvent
from sandboxd.termsafe import clean

HEAD = ("time", "type", "sandbox")
NULLABLE = ("name", "idle_timeout_secs", "exit_code", "duration_ms", "bytes")
"""What is said where it is 0 or empty, too."""
HASH_CHARS = 12


def main(args: dict[str, Any]) -> int:
    found = context.choose(args["--context"]).client.events(args["SANDBOX"])
    for event in found.events:
        sys.stdout.write((json.dumps(fields(event)) if args["--json"] else fitted(line(event), show.columns())) + "\n")
    if found.truncated:
        show.note(f"older events than these {len(found.events)} are left out")
    return 0


def fields(event: AuditEvent) -> dict[str, Any]:
    """As the API has them: those that the event's type has."""
    said = event._asdict() | {"volumes": [mount._asdict() for mount in event.volumes]}
    if event.network is not None:
        network = event.network._asdict().items()
        said["network"] = {key: value for key, value in network if value or key in ("mode", "allow")}
    return {key: value for key, value in said.items() if value or (key in NULLABLE and value is not None)}


def line(event: AuditEvent) -> str:
    """Fit for a terminal; every text in it is somebody else's."""
    told = [f"{key}={value(key, said)}" for key, said in fields(event).items() if key not in HEAD]
    return "  ".join([f"{show.time(clean(event.time))}  {clean(event.type):<23}", *told]).rstrip()


def fitted(text: str, width: int | None) -> str:
    """What does not fit stands below the type. A value is not broken: it may be copied."""
    if width is None or show.display_width(text) <= width:
        return text
    indent = " " * min(22, width // 4)
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def value(key: str, said: Any) -> str:
    match said:
        case dict():
            text = ",".join(f"{name}:{value(name, one)}" for name, one in said.items() if one is not None)
        case list() | tuple():
            text = ",".join(value(key, one) for one in said)
        case _:
            text = str(said)
    text = clean(text)
    if key == "args_sha256":
        return text[:HASH_CHARS]
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text
