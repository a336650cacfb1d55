"""The suite finds fault: with one thing changed in what an honest daemon says, the row that is about it fails."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.liar import Liar, Lie, Said, code, in_json, status, text
from tests.conformance.live import ENVIRONMENT, suite
from tests.conftest import SOAK
from tests.sandboxd.rig import Rig

LIMIT_S = 240
SANDBOX = r"/v1/sandboxes/[^/?]+"
RUN = rf"POST {SANDBOX}/run$"


def without(*names: str) -> Any:
    def change(body: Any) -> Any:
        inner = body
        for name in names[:-1]:
            inner = inner[name]
        inner.pop(names[-1], None)
        return body

    return change


def put(name: str, value: Any) -> Any:
    return lambda body: {**body, name: value}


def of_the_network(name: str, value: Any) -> Any:
    return lambda body: {**body, "network": {**body["network"], name: value}}


def in_stdout(honest: bytes, told: bytes) -> Any:
    old, new = (base64.b64encode(data).decode() for data in (honest, told))
    return lambda body: {**body, "stdout": new} if body["stdout"] == old else body


def with_the_environment(said: Said, heard: bytes) -> Said:
    found = re.search(rb"value-[0-9a-f]{32}", heard)
    if found is None:
        return said
    body = json.loads(said.body)
    return replace(said, body=json.dumps({**body, "environment": [found[0].decode()]}).encode())


def code_first(said: Said, _: bytes) -> Said:
    *lines, last = said.body.splitlines(keepends=True)
    return replace(said, body=b"".join([last, *lines]))


def media_type(told: str) -> Any:
    return lambda said, _: replace(said, media_type=told)


LIES: dict[str, tuple[str, Lie]] = {
    "a capability that must be stated is not": (
        "C1", Lie("GET /v1/capabilities", in_json(without("capabilities", "audit")))
    ),
    "a limit is a text": ("C1", Lie("GET /v1/capabilities", in_json(lambda b: {**b, "limits": {
        **b["limits"], "max_cpus": "8"}}))),
    "a terminated sandbox is said to run": ("C2", Lie(f"GET {SANDBOX}$", text(b'"terminated"', b'"running"'))),
    "an empty name is written out": ("C28", Lie(f"PATCH {SANDBOX}$", in_json(lambda b: {"name": "", **b}))),
    "a deletion answers with a body": ("C3", Lie("DELETE", status(204, 200))),
    "a name that is taken has a code of its own": ("C4", Lie("POST /v1/sandboxes$", code("conflict", "exists"))),
    "what is not found is refused": ("C6", Lie("GET|POST", code("not_found", "refused"))),
    "an answer holds a value of the environment": ("C7", Lie(f"GET {SANDBOX}$", with_the_environment)),
    "a reserved name is a mistake": ("C8", Lie("POST /v1/sandboxes$", status(403, 400))),
    "output is not in base64": ("C9", Lie(RUN, in_json(put("stdout", "hello world\n")))),
    "a timeout has the code of its signal": (
        "C11", Lie(RUN, in_json(lambda b: {**b, "exit_code": 137 if b["timed_out"] else b["exit_code"]}))
    ),
    "commands start at the root": ("C13", Lie(RUN, in_json(in_stdout(b"/sandbox/home\n", b"/\n")))),
    "a process that runs has no exit code at all": (
        "C14", Lie(r"/processes", in_json(lambda b: {k: v for k, v in b.items() if (k, v) != ("exit_code", None)}))
    ),
    "any signal is taken": ("C15", Lie("POST .*/signal$", status(400, 204))),
    "the exit code comes first": ("C16", Lie("GET .*/output$", code_first)),
    "a file is text": ("C17", Lie(r"GET .*/files\?", media_type("text/plain"))),
    "a relative path is only absent": ("C20", Lie(r"GET .*/files\?path=relative", status(400, 404))),
    "no list of names is an empty one": (
        "C23", Lie("POST /v1/sandboxes$", in_json(lambda b: of_the_network("allow", b["network"]["allow"] or [])(b)))
    ),
    "denied names stand as they were written": (
        "C25", Lie("POST /v1/sandboxes$", in_json(of_the_network("deny", ["Gist.GitHub.com."])))
    ),
    "a refused network is an error of the server": ("C24", Lie("POST /v1/sandboxes$", status(403, 500))),
    "standard output comes as standard error": (
        "C34", Lie("GET .*/attach$", down=lambda data: data.replace(b"o\0\0\0", b"E\0\0\0"))
    ),
    "an exit code in the wrong byte order": (
        "C34", Lie("GET .*/attach$", down=lambda data: data.replace(b"x\0\0\0\4\0\0\0\0", b"x\0\0\0\4\1\0\0\0"))
    ),
    "a half-close is swallowed": ("C39", Lie("GET .*/tunnel", half_close=False)),
    "labels select nothing out": ("C40", Lie(r"GET /v1/sandboxes\?", ask=lambda head: re.sub(rb"\?\S*", b"", head))),
    "commands run as root": ("C43", Lie(RUN, in_json(lambda b: {**b, "stdout": base64.b64encode(b"0\n").decode()}))),
    "any media type is taken": ("C50", Lie("POST", status(415, 400))),
    "errors come as text": ("C50", Lie("GET|POST", media_type("text/html"))),
}  # fmt: skip


@pytest.fixture(scope="module")
def rig(short_tmp: Path, worker_id: str) -> Iterator[Rig]:
    directory = short_tmp / f"liar-{worker_id}"
    directory.mkdir()
    with Rig(directory, "--network") as honest:
        yield honest


@pytest.fixture(scope="module")
def worker_id(request: pytest.FixtureRequest) -> str:
    return str(getattr(request.config, "workerinput", {}).get("workerid", "main"))


def judged(rig: Rig, lie: Lie | None, *rows: str) -> subprocess.CompletedProcess[str]:
    front = rig.directory / "front.sock"
    front.unlink(missing_ok=True)
    chosen = [word for row in rows for word in ("--row", row)]
    with Liar(front, rig.socket, lie):
        return subprocess.run(
            suite(f"unix://{front}", "-q", "--tb=short", *chosen),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S,
            env=ENVIRONMENT,
        )  # fmt: skip


# Those whose rows need a sandbox or two of their own take longer, and show no other kind of lie.
SLOWER = ("C2", "C3", "C4", "C25", "C28", "C40", "C20", "C24", "C13", "C39", "C34")
CASES = [
    pytest.param(row, lie, id=name, marks=[pytest.mark.soak] if row in SLOWER else [])
    for name, (row, lie) in LIES.items()
]


@pytest.mark.parametrize(("row", "lie"), CASES)
def test_a_lie_fails_its_row(rig: Rig, row: str, lie: Lie) -> None:
    ran = judged(rig, lie, row)
    assert ran.returncode == 1 and "1 failed" in ran.stdout and "error" not in ran.stdout.splitlines()[-1], ran.stdout


def test_an_honest_daemon_passes_those_rows(rig: Rig) -> None:
    rows = sorted({row for row, _ in LIES.values() if SOAK or row not in SLOWER})
    ran = judged(rig, None, *rows)
    assert ran.returncode == 0 and f"{len(rows)} passed" in ran.stdout, ran.stdout + ran.stderr
