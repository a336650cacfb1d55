"""Guests of another protocol version: what is asked of them, and what is refused with the way out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from guestd import protocol
from sandboxd import skew
from tests.sandboxd.rig import Rig

S = "/v1/sandboxes"
COMMIT = "cd /workspace && echo work > work.txt && git add . && git -c user.name=a -c user.email=a@b commit -qm Two"
SINCE = {"quiesce": 7, "exec.nice": 6}


@pytest.mark.parametrize(
    ("op", "fields", "guest", "why"),
    [
        pytest.param("quiesce", (), 7, None, id="our own version has everything"),
        pytest.param("read", ("path",), 6, None, id="the one before has what is older"),
        pytest.param("exec", ("argv", "nice"), 6, None, id="and the fields it brought itself"),
        pytest.param("quiesce", (), 6, skew.OLDER, id="not what came after it"),
        pytest.param("exec", ("argv",), 5, skew.OLDER, id="two before is asked for nothing that may change"),
        pytest.param("read", ("path",), 8, skew.NEWER, id="nor is a newer one"),
        *(pytest.param(op, (), guest, None, id=f"{op} of version {guest}")
          for op in sorted(protocol.EVERY_VERSION) for guest in (1, 99)),
    ],
)  # fmt: skip
def test_what_a_guest_is_asked_for(op: str, fields: tuple[str, ...], guest: int, why: str | None) -> None:
    assert skew.refusal(op, fields, guest, 7, SINCE) == why


def test_a_field_that_came_later_is_refused_where_it_is_used() -> None:
    assert skew.refusal("exec", ("argv", "nice"), 6, 7, {"exec.nice": 7}) == skew.OLDER


def test_the_table_names_what_the_protocol_has() -> None:
    known = set(protocol.FIELDS) | {f"{op}.{name}" for op, fields in protocol.FIELDS.items() for name in fields}
    assert known >= protocol.EVERY_VERSION and set(protocol.SINCE) <= known
    assert protocol.EVERY_VERSION.isdisjoint(protocol.SINCE)
    assert all(1 < version <= protocol.VERSION for version in protocol.SINCE.values())


@pytest.mark.parametrize(
    ("ours", "works", "refusal"),
    [
        pytest.param(protocol.VERSION + 1, True, skew.OLDER, id="one version older"),
        pytest.param(protocol.VERSION + 2, False, skew.OLDER, id="two versions older"),
        pytest.param(protocol.VERSION - 1, False, skew.NEWER, id="newer"),
    ],
)
def test_a_sandbox_of_another_version_is_listed_killed_and_brought_back(
    own: Rig, tmp_path: Path, ours: int, works: bool, refusal: str
) -> None:
    box = own.create(name="old")
    process = own.start_process(box, "sh", "-c", "echo before; read line; echo $line; sleep 600")
    base = put_repository(own, box, tmp_path)
    assert own.run(box, "sh", "-c", COMMIT).exit_code == 0
    own.stop()
    own.knob("speaks", json.dumps({"version": ours, "since": {"remove": ours}}))
    own.start()

    if works:
        assert own.run(box, "echo", "here").stdout == b"here\n"
        assert own.call("PUT", f"{S}/{box}/files?path=/workspace/more.txt", b"more").status == 204
    else:
        answer = own.call("POST", f"{S}/{box}/run", {"argv": ["true"]})
        assert (answer.status, answer.code, answer.message) == (501, "unsupported", refusal)
        answer = own.call("POST", f"{S}/{box}/processes", {"argv": ["true"]})
        assert (answer.status, answer.code, answer.message) == (501, "unsupported", refusal)
    answer = own.call("DELETE", f"{S}/{box}/files?path=/workspace/work.txt")
    assert (answer.status, answer.code, answer.message) == (501, "unsupported", refusal)

    assert [one["name"] for one in own.call("GET", S).json["sandboxes"]] == ["old"]
    assert own.call("GET", f"{S}/{box}/processes").json["processes"][0]["state"] == "running"
    with own.attach(process, early=b"i\0\0\0\6after\n") as client:
        said = b""
        while not said.endswith(b"after\n"):
            kind, data = client.frame() or (b"", b"")
            assert kind == b"o"
            said += data
        assert said == b"before\nafter\n"
        assert own.call("POST", f"{process}/signal", {"signal": "KILL"}).status == 204
        assert client.rest()[2] == 137
    brought = own.call("GET", f"{S}/{box}/workspace/bundle?base={base}&branch=main")
    assert brought.status == 200, brought.body
    (tmp_path / "back.bundle").write_bytes(brought.body)
    heads = git(tmp_path, "bundle", "list-heads", "back.bundle")
    assert heads.count("\n") == 1
    assert own.call("DELETE", f"{S}/{box}").status == 204
    told = f"its guest speaks version {protocol.VERSION} of the protocol, this daemon version {ours}"
    assert told in own.log.read_text()


def put_repository(rig: Rig, box: str, place: Path) -> str:
    """The commit the sandbox starts from."""
    source = place / "source"
    git(place, "init", "-q", "-b", "main", "source")
    git(source, "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "-q", "--allow-empty", "-m", "One")
    git(source, "bundle", "create", "-q", "../in.bundle", "HEAD")
    answer = rig.call("POST", f"{S}/{box}/workspace?branch=main", (place / "in.bundle").read_bytes())
    assert answer.status in (200, 204), answer.body
    return git(source, "rev-parse", "main").strip()


def git(where: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout
