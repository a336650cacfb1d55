"""Files of a sandbox, read and written from outside."""

from __future__ import annotations

import secrets
from urllib.parse import quote

from conformance import shape
from conformance.conftest import Past
from conformance.estate import Sandbox

CAP = 64 << 20


def test_a_binary_file_comes_back_as_it_was_written(box: Sandbox) -> None:
    """C17"""
    data = secrets.token_bytes(300_000)
    top = f"/tmp/{secrets.token_hex(4)}"
    path = f"{top}/new/directories/ünïcode and blank.bin"
    shape.done(box.write(path, data))
    answer = box.read(path)
    assert (answer.status, answer.media_type) == (200, "application/octet-stream")
    assert answer.body == data and answer.headers["Content-Length"] == str(len(data))
    shape.done(box.write(f"{top}/new/empty", b""))
    assert box.read(f"{top}/new/empty").body == b""
    assert box.entries(top) == [{"name": "new", "type": "dir", "size": 0}]
    assert box.entries(f"{top}/new") == [
        {"name": "directories", "type": "dir", "size": 0}, {"name": "empty", "type": "file", "size": 0},
    ]  # fmt: skip
    assert box.entries(f"{top}/new/directories") == [
        {"name": "ünïcode and blank.bin", "type": "file", "size": len(data)}
    ]
    shape.refused(box.call("GET", f"/dirs?path={quote(path)}"), 400)
    shape.refused(box.read(f"{top}/new"), 400)
    shape.refused(box.write(f"{top}/new", b"x"), 400)
    shape.refused(box.write(f"{top}/new/empty/below", b"x"), 400)
    shape.done(box.remove(path))
    shape.refused(box.read(path), 404)
    shape.refused(box.remove(path), 404)


def test_a_file_written_from_outside_is_there_for_a_command(box: Sandbox) -> None:
    """C18"""
    name = f"note-{secrets.token_hex(4)}"
    shape.done(box.write(f"/tmp/{name}", b"from outside\n"))
    assert box.run("cat", f"/tmp/{name}").stdout == b"from outside\n"
    assert box.run("cat", name, cwd="/tmp").stdout == b"from outside\n"
    assert box.run("cat", f"../tmp/{name}", cwd="/tmp").stdout == b"from outside\n"


def test_a_directory_that_is_not_empty_is_not_removed(box: Sandbox) -> None:
    """C19"""
    top = f"/tmp/{secrets.token_hex(4)}"
    shape.done(box.write(f"{top}/file", b"x"))
    shape.refused(box.remove(top), 409)
    shape.done(box.remove(f"{top}/file"))
    shape.done(box.remove(top))


def test_a_path_must_be_absolute_and_without_dots(box: Sandbox) -> None:
    """C20"""
    for path in ("relative/path", "/workspace/../etc/passwd", "/a/../../b", "", "/tmp/nul\0", "..", "/.."):
        shape.refused(box.read(path), 400)
        shape.refused(box.write(path, b"x"), 400)
        shape.refused(box.remove(path), 400)
        shape.refused(box.call("GET", f"/dirs?path={quote(path)}"), 400)
    shape.refused(box.call("GET", "/files"), 400)


def test_a_terminated_sandbox_runs_and_takes_nothing(past: Past) -> None:
    """C21"""
    one = past.sandbox
    shape.refused(one.call("POST", "/run", {"argv": ["true"]}), 409)
    shape.refused(one.write("/tmp/x", b"x"), 409)
    shape.refused(one.read("/tmp/x"), 409)
    shape.refused(one.call("POST", "/processes", {"argv": ["true"]}), 409)
    assert isinstance(shape.ok(one.call("GET", "/processes"))["processes"], list)


def test_a_file_over_the_cap_is_refused_and_one_below_is_not_cut(box: Sandbox) -> None:
    announced = box.estate.endpoint.head(
        "PUT", f"{box.path}/files?path=/tmp/huge",
        {"Content-Type": "application/octet-stream", "Content-Length": str(CAP + 1)},
    )  # fmt: skip
    shape.refused(box.estate.endpoint.say(announced + b"x"), 413)
    shape.refused(box.read("/tmp/huge"), 404)
    data = secrets.token_bytes(3 << 20)
    shape.done(box.write("/tmp/three", data))
    assert box.read("/tmp/three").body == data
    shape.done(box.remove("/tmp/three"))
