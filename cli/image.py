"""Images that sandboxes start from: those of registries, and the server's own.

Usage:
  sandbox-cli image (ls | list) [--context=C] [--json]
  sandbox-cli image (pull | add) [--no-wait] [--context=C] IMAGE
  sandbox-cli image rm [--context=C] IMAGE...
  sandbox-cli image (-h | --help)

An image is REGISTRY/REPOSITORY[:TAG][@DIGEST]; `run --image` fetches one that
is not there yet. `pull` fetches what a tag names by now, also where it is
there; sandboxes that run keep what they started from. `rm` removes images that
no sandbox uses, and stops at the first failure.

Options:
  --no-wait      return at once; `ls` says how far it is
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the API's objects
  -h, --help     show this
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from cli import context, show
from sandboxd.client import Client, Image, ImageProgress
from sandboxd.errors import NotFound, SandboxError
from sandboxd.termsafe import clean

HEAD = ("IMAGE", "STATE", "SIZE", "IN USE", "DIGEST", "INSTALLED")
POLL_S = 1.0


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    if args["rm"]:
        return _remove(client, args["IMAGE"])
    if args["pull"] or args["add"]:
        return _pull(client, args["IMAGE"][0], wait=not args["--no-wait"])
    return _list(client, args["--json"])


def _list(client: Client, as_json: bool) -> int:
    found = client.images()
    if as_json:
        show.as_json([{**one._asdict(), "progress": one.progress and one.progress._asdict()} for one in found])
        return 0
    sys.stdout.write(show.table(HEAD, [_row(one) for one in found], drop=("DIGEST",)))
    for one in found:
        if one.error:
            show.note(f"{clean(one.image)}: {clean(one.error)}")
    return 0


def _row(one: Image) -> tuple[str, ...]:
    state = f"{one.state}, {_percent(one.progress)}" if one.progress else one.state
    size = show.bytes_size(one.bytes) if one.bytes else "-"
    use = "default" if one.default else "yes" if one.in_use else "no"
    installed = show.age(one.installed_at) if one.installed_at else "-"
    return one.image, state, size, use, one.digest[:19] or "-", installed


def _percent(now: ImageProgress) -> str:
    return f"{now.phase} {now.done * 100 // now.total if now.total else 0} %"


def _pull(client: Client, image: str, wait: bool) -> int:
    now = client.install_image(image)
    said = ""
    while wait and now.state == "installing":
        if now.progress is not None and (step := _percent(now.progress)) != said:
            said = step
            show.note(f"{clean(image)}: {clean(step)}")
        time.sleep(POLL_S)
        found = [one for one in client.images() if one.image == image]
        if not found:
            raise SandboxError(f"{clean(image)}: it was removed meanwhile")
        now = found[0]
    if now.error and now.state != "installing":
        raise SandboxError(f"{clean(image)}: {clean(now.error)}")
    show.line(image)
    return 0


def _remove(client: Client, images: Sequence[str]) -> int:
    for image in images:
        try:
            freed = client.delete_image(image).freed_bytes
        except NotFound:
            raise SandboxError(f"no such image: {clean(image)}; see sandbox-cli image ls") from None
        show.line(f"{image}: {show.bytes_size(freed)} freed")
    return 0
