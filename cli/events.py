"""Show what was done with a sandbox, from its creation to its end, and which names it asked for.

Usage:
  sandbox-cli events [options] SANDBOX

The oldest come first. By its id a sandbox's events are shown after it was forgotten, too. Of a process its program is
shown, how many arguments it had and a hash of them; no argument, no value of a variable and no content of a file was
ever recorded.

Options:
  --context=C    which sandboxd: `local` or unix:///path
  --json         print the API's objects, one on a line
  -h, --help     show this
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from cli import context, show
from sandboxd.termsafe import clean

SHOWN_ELSEWHERE = ("time", "type", "sandbox")
HASH_CHARS = 12


def main(args: dict[str, Any]) -> int:
    found, truncated = context.choose(args["--context"]).client.events(args["SANDBOX"])
    for event in found:
        sys.stdout.write((json.dumps(event) if args["--json"] else line(event)) + "\n")
    if truncated:
        show.note(f"older events than these {len(found)} are left out")
    return 0


def line(event: Mapping[str, Any]) -> str:
    """Fit for a terminal; every text in it is somebody else's."""
    fields = [f"{key}={value(key, said)}" for key, said in event.items() if key not in SHOWN_ELSEWHERE]
    head = f"{show.time(clean(str(event.get('time', ''))))}  {clean(str(event.get('type', ''))):<23}"
    return "  ".join([head, *fields]).rstrip()


def value(key: str, said: Any) -> str:
    match said:
        case dict():
            text = ",".join(f"{name}:{value(name, one)}" for name, one in said.items() if one is not None)
        case list():
            text = ",".join(value(key, one) for one in said)
        case _:
            text = str(said)
    text = clean(text)
    if key == "args_sha256":
        return text[:HASH_CHARS]
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text
