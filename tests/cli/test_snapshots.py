"""suspend, resume and snapshots: what is sent, what is made of the answers, what is refused before that."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from docopt import docopt

from cli import __main__ as top
from cli.config import Config
from cli.plan import of as plan_of
from sandboxd.client import Client, Snapshot
from sandboxd.errors import SandboxError, Unsupported
from tests.cli.rawserver import ReadRequest, serving

BOX = {
    "id": "sbx_1", "name": "box", "state": "suspended", "image": "i", "cpus": 1, "memory_mb": 1, "disk_mb": 1,
    "network": {"mode": "none", "allow": None}, "created_at": "2026-01-01T00:00:00Z", "idle_timeout_secs": 0,
}  # fmt: skip
SNAPSHOT = {
    "id": "snp_0123456789abcdef", "sandbox": "sbx_1", "image": "i\u202e", "kind": "memory", "bytes": 1536,
    "created_at": "2026-01-01T00:00:00.123Z",
}  # fmt: skip
LACKS = "this endpoint does not have the capability "


def answer(value: object, status: str = "200 OK") -> list[Any]:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return [ReadRequest(), head.encode() + body]


def error(code: str, message: str, status: str) -> list[Any]:
    return answer({"error": {"code": code, "message": message}}, status)


ASKED: list[tuple[str, Callable[[Client], object], str, object, object]] = [
    ("suspend", lambda c: c.suspend("a/b").state, "POST /v1/sandboxes/a%2Fb/suspend", BOX, "suspended"),
    ("resume", lambda c: c.resume("box").id, "POST /v1/sandboxes/box/resume", BOX, "sbx_1"),
    (
        "a snapshot", lambda c: c.snapshot("box"), "POST /v1/sandboxes/box/snapshots", SNAPSHOT,
        Snapshot("snp_0123456789abcdef", "sbx_1", "i\u202e", "memory", 1536, "2026-01-01T00:00:00.123Z"),
    ),
    (
        "all of them", lambda c: [one.id for one in c.snapshots()], "GET /v1/snapshots",
        {"snapshots": [SNAPSHOT, SNAPSHOT | {"id": "snp_2", "scheduled": True}]}, ["snp_0123456789abcdef", "snp_2"],
    ),
    ("one less", lambda c: c.delete_snapshot("snp_1"), "DELETE /v1/snapshots/snp_1", {}, None),
    (
        "a schedule", lambda c: c.schedule_snapshots("box", 300, 2).id,
        'PUT /v1/sandboxes/box/snapshot-schedule {"every_secs":300,"keep":2}', BOX, "sbx_1",
    ),
    (
        "no schedule", lambda c: c.schedule_snapshots("box", 0).id,
        'PUT /v1/sandboxes/box/snapshot-schedule {"every_secs":0}', BOX, "sbx_1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sent", "value", "found"), [row[1:] for row in ASKED], ids=[row[0] for row in ASKED])
def test_on_the_wire(
    tmp_path: Path, call: Callable[[Client], object], sent: str, value: object, found: object
) -> None:
    with serving(tmp_path / "s", answer(value)) as server:
        assert call(Client(server.path)) == found
    head, _, body = server.seen[0].decode().partition("\r\n\r\n")
    assert f"{head.partition(' HTTP/1.1')[0]} {body}".strip() == sent


def test_without_the_capability(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "s", error("unsupported", f"{LACKS}suspend", "501 Not Implemented")) as server,
        pytest.raises(Unsupported),
    ):
        Client(server.path).suspend("box")


NO_SUSPEND = error("unsupported", f"{LACKS}suspend", "501 N")
NO_SNAPSHOTS = error("unsupported", f"{LACKS}memory_snapshot", "501 N")
ONE = "snp_0123456789abcdef"
SAID: list[tuple[str, list[Any], str]] = [
    ("suspend box", NO_SUSPEND, "this sandboxd cannot suspend sandboxes (what it can: sandbox-cli doctor)"),
    ("resume box", NO_SUSPEND, "this sandboxd cannot suspend sandboxes"),
    ("snapshot box", NO_SNAPSHOTS, "this sandboxd cannot take snapshots"),
    ("snapshot ls", NO_SNAPSHOTS, "this sandboxd cannot take snapshots"),
    (f"snapshot rm {ONE}", NO_SNAPSHOTS, "this sandboxd cannot take snapshots"),
    ("snapshot-schedule --off box", NO_SNAPSHOTS, "this sandboxd cannot take snapshots"),
    (
        f"snapshot rm {ONE}", error("not_found", "no such snapshot", "404 N"),
        f"no such snapshot: {ONE}; see sandbox-cli snapshot ls",
    ),
    ("suspend x", error("not_found", "no such sandbox", "404 N"), "no such sandbox: x; see sandbox-cli list"),
    ("suspend box", error("conflict", "a process runs in it", "409 C"), "a process runs in it"),
    ("snapshot rm ls", [], "'ls' is no snapshot's id: it is snp_ and 16 digits"),
    ("snapshot a b", [], "snapshot: an argument is missing, too many, or given twice: sandbox-cli snapshot"),
    ("snapshot-schedule box", [], "snapshot-schedule: an argument is missing"),
    ("snapshot-schedule --every 5 box", [], "--every 5: not a length of time such as"),
    ("snapshot-schedule --every 0 box", [], "--every 0: whole seconds, and more than none"),
    ("snapshot-schedule --every 500ms box", [], "--every 500ms: whole seconds"),
    ("snapshot-schedule --every 5m --keep 0 box", [], "--keep 0: not a number from 1 to 1000"),
    ("snapshot-schedule --every 5m --off box", [], "snapshot-schedule: an argument is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "script", "line"), SAID, ids=[f"{row[0]} - {row[2][:40]}" for row in SAID])
def test_what_cannot_be_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str,
    script: list[Any], line: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("SANDBOX_CONTEXT", f"unix://{tmp_path}/s")
    # The first connection only looks who serves it.
    with serving(tmp_path / "s", [], script):
        assert top.main(words.split()) == 1
    out, err = capfd.readouterr()
    assert out == "" and line in err and err.count("\n") == 1


def test_what_is_shown_of_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOX_CONTEXT", f"unix://{tmp_path}/s")
    kept = answer({"snapshots": [SNAPSHOT]})
    with serving(tmp_path / "s", [], kept, [], kept, [], answer(SNAPSHOT)):
        assert top.main(["snapshot", "ls"]) == top.main(["snapshot", "ls", "--json"]) == 0
        assert top.main(["snapshot", "box"]) == 0
    table, _, objects = capfd.readouterr().out.partition("[\n")
    assert [line.split() for line in table.splitlines()] == [
        ["ID", "SANDBOX", "KIND", "SIZE", "CREATED", "IMAGE"],
        ["snp_0123456789abcdef", "sbx_1", "memory", "1.5", "KiB", "2026-01-01T00:00:00Z", "i"],
    ]
    assert objects.endswith("]\nsnp_0123456789abcdef\n")
    assert json.loads("[" + objects.rpartition("]")[0] + "]") == [SNAPSHOT | {"scheduled": False}]


def of_run(*flags: str) -> Any:
    args = docopt(str(import_module("cli.run").__doc__), argv=["run", *flags, "--", "x"])
    return plan_of(args, Config(), {}, None)


def test_a_run_that_starts_from_one_takes_no_repository() -> None:
    asked = of_run("--from-snapshot=snp_0123456789abcdef")
    assert asked.create.body()["snapshot_id"] == ONE
    assert asked.snapshots and not asked.workspace
    assert of_run().workspace and not of_run().snapshots


def test_an_agent_from_one_gets_no_tools_volume_beside_the_disk_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOX_CONTEXT", f"unix://{tmp_path}/s")
    network = {"mode": "allowlist", "allow": ["a.test"]}
    offer = {
        "api_version": "v1", "backend": "x", "capabilities": {"memory_snapshot": True, "volumes": True}, "limits": {},
        "network": {"default": network, "ceiling": "allowlist", "registries": ["npm.test"]},
    }  # fmt: skip
    refused = error("invalid", "no more today", "400 B")
    with serving(tmp_path / "s", [], answer(offer), refused) as server:
        assert top.main(["agent", "claude", f"--from-snapshot={ONE}", "-p", "x"]) == 1
    made = server.seen[2].decode()
    assert made.startswith("POST /v1/sandboxes ") and "agent-claude" not in made, made
    assert capfd.readouterr().err.endswith("no more today\n")


def test_a_run_with_a_schedule() -> None:
    body = of_run("--snapshot-every=1h30m", "--snapshot-keep=3").create.body()
    assert (body["snapshot_every_secs"], body["snapshot_keep"]) == (5400, 3)
    assert "snapshot_keep" not in of_run("--snapshot-every=5m").create.body()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--from-snapshot=x",), "'x' is no snapshot's id"),
        (("--from-snapshot=snp_0123456789abcdef", "--project=."), "takes no repository"),
        (("--snapshot-keep=2",), "--snapshot-keep goes with --snapshot-every"),
        (("--snapshot-every=0",), "--snapshot-every 0: whole seconds"),
        (("--snapshot-every=5m", "--snapshot-keep=x"), "--snapshot-keep x: not a number"),
    ],
)
def test_what_a_run_refuses(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(SandboxError, match=said):
        of_run(*flags)
