"""File operations through a real guestd: what is read, written, listed and removed, and what leads nowhere."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.guestd.peer import Call, Guest, eventually


def entries(guest: Guest, path: str) -> list[tuple[str, str, int]]:
    with guest.call("list", path=path) as call:
        answer = call.answer()
        assert answer.ok, answer.message
        found: list[dict[str, Any]] = json.loads(call.content(answer.size))["entries"]
    return [(entry["name"], entry["type"], entry["size"]) for entry in found]


@pytest.fixture(scope="module")
def area(guest: Guest) -> str:
    """A directory with one of everything."""
    made = guest.shell(
        "mkdir -p /tmp/area/full /tmp/area/bare && cd /tmp/area && echo text > file && echo x > full/x"
        " && mkfifo fifo && ln -s file link && ln -s /etc/passwd out && ln -s /proc/self/root/etc magic"
        " && ln -s ../../../../../../etc/hostname up && ln -s loop loop && ln -s nowhere dangling"
        " && printf '' > empty && python3 -c 'import socket; socket.socket(1).bind(\"socket\")'"
        " && truncate -s 70M large && cp /bin/sleep busy && chmod 0 bare && echo no > closed && chmod 0 closed"
    )
    assert made.code == 0, made.stderr
    return "/tmp/area"


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 64 << 20])
def test_what_is_written_is_read(guest: Guest, size: int) -> None:
    content = os.urandom(min(size, 1 << 20)) * (size // (1 << 20) or 1)
    content = content[:size] + bytes(size - len(content))
    assert guest.put("/tmp/some/where/deep/file", content).ok
    answer, got = guest.get("/tmp/some/where/deep/file")
    assert answer.ok
    assert got == content
    found = guest.run("stat", "-c", "%u %g %a", "/tmp/some/where/deep/file", "/tmp/some/where").stdout
    assert found == b"1001 1001 644\n1001 1001 755\n"
    assert guest.ask("remove", path="/tmp/some/where/deep/file").ok


def test_more_than_sixty_four_megabytes(guest: Guest, area: str) -> None:
    assert guest.ask("read", path=f"{area}/large").code == "too_large"
    with Call(guest.path, b'{"op":"write","path":"/tmp/x","size":67108865}\n') as call:
        assert call.answer().code == "too_large"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("absent", "not_found"), ("absent/below", "not_found"), ("full", "is_dir"), ("file/below", "not_dir"),
        ("fifo", "bad_request"), ("socket", "bad_request"), ("loop", "bad_request"), ("dangling", "not_found"),
        ("closed", "bad_request"), ("bare/x", "bad_request"), ("large", "too_large"), ("magic/passwd", "bad_request"),
    ],
)
def test_what_is_not_read(guest: Guest, area: str, name: str, code: str) -> None:
    assert guest.ask("read", path=f"{area}/{name}").code == code


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/dev/zero", "bad_request"), ("/dev/null", "bad_request"), ("/dev/tty", "bad_request"),
        ("/proc/kmsg", "bad_request"), ("/", "is_dir"), ("/proc/self/mem", "bad_request"),
    ],
)
def test_special_files_are_refused(guest: Guest, path: str, code: str) -> None:
    assert guest.ask("read", path=path).code in (code, "internal" if path == "/proc/self/mem" else code)


@pytest.mark.parametrize("path", ["/proc/meminfo", "/proc/self/status", "/proc/cpuinfo"])
def test_files_of_proc_are_read(guest: Guest, path: str) -> None:
    answer, content = guest.get(path)
    assert answer.ok and len(content) > 100


def test_links_within_are_followed(guest: Guest, area: str) -> None:
    assert guest.get(f"{area}/link")[1] == b"text\n"
    assert guest.get(f"{area}/out")[1].startswith(b"root:"), "the machine's own /etc/passwd"
    assert guest.get(f"{area}/empty")[1] == b""


def test_a_link_that_climbs_stays_in_the_root(guest: Guest, area: str) -> None:
    assert guest.get(f"{area}/up")[1] == guest.run("cat", "/etc/hostname").stdout


def test_a_growing_file_is_cut_at_what_it_said(guest: Guest) -> None:
    with guest.start("sh", "-c", "while :; do head -c 100000 /dev/zero; done >> /tmp/growing") as call:
        assert eventually(lambda: guest.ask("read", path="/tmp/growing").ok)
        for _ in range(5):
            answer = guest.ask("read", path="/tmp/growing")
            assert answer.ok or answer.code == "too_large"
        call.sock.close()
    guest.ask("remove", path="/tmp/growing")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("full", "is_dir"), ("file/below", "not_dir"), ("fifo", "bad_request"), ("socket", "bad_request"),
        ("bare/x", "bad_request"), ("full/", "is_dir"),
    ],
)
def test_what_is_not_written(guest: Guest, area: str, name: str, code: str) -> None:
    assert guest.put(f"{area}/{name}", b"new").code == code


@pytest.mark.parametrize("path", ["/", "/.", "/etc/passwd", "/usr/bin/new", "/dev/null", "/proc/self/comm", "/new"])
def test_what_is_not_the_users_is_not_written(guest: Guest, path: str) -> None:
    assert guest.put(path, b"new").code in ("bad_request", "read_only", "is_dir", "not_found")


def test_a_write_replaces_the_link_and_not_what_it_points_at(guest: Guest) -> None:
    guest.shell("mkdir -p /tmp/links; cd /tmp/links; echo old > target; ln -sf target link; ln -sf /etc/passwd out")
    assert guest.put("/tmp/links/link", b"new").ok
    assert guest.put("/tmp/links/out", b"new").ok
    assert guest.get("/tmp/links/target")[1] == b"old\n"
    assert ("link", "file", 3) in entries(guest, "/tmp/links")
    assert guest.get("/etc/passwd")[1] != b"new"


def test_a_program_that_runs_is_replaced_and_keeps_its_mode(guest: Guest, area: str) -> None:
    with guest.start(f"{area}/busy", "60") as call:
        assert guest.put(f"{area}/busy", b"#!/bin/sh\necho new\n").ok
        assert guest.run(f"{area}/busy").stdout == b"new\n"
        call.sock.close()


def test_special_bits_do_not_survive_a_write(guest: Guest) -> None:
    guest.shell("echo x > /tmp/special; chmod 6755 /tmp/special")
    assert guest.put("/tmp/special", b"y").ok
    assert guest.run("stat", "-c", "%a", "/tmp/special").stdout == b"755\n"


def test_a_write_that_is_cut_off_leaves_nothing(guest: Guest) -> None:
    guest.shell("mkdir -p /tmp/cut")
    with guest.call("write", path="/tmp/cut/file", size=1000) as call:
        assert call.answer().ok
        call.sock.sendall(b"x" * 999)
    assert eventually(lambda: entries(guest, "/tmp/cut") == [])


def test_a_disk_that_is_full(guest: Guest) -> None:
    assert guest.put("/run/small/file", b"old").ok
    assert guest.ask("write", path="/run/small/file", size=16 << 20).code == "disk_full"
    assert guest.shell("head -c 20M /dev/zero > /run/small/fill").code != 0
    assert guest.ask("write", path="/run/small/new", size=1 << 20).code == "disk_full"
    assert guest.get("/run/small/file")[1] == b"old"
    assert guest.run("true", cwd="/run/small").code == 0
    assert sorted(name for name, _, _ in entries(guest, "/run/small")) == ["file", "fill"]


def test_content_that_comes_with_the_request(guest: Guest) -> None:
    with Call(guest.path, b'{"op":"write","path":"/tmp/early","size":5}\nearly') as call:
        assert call.answer().ok
        assert call.answer().ok
    assert guest.get("/tmp/early")[1] == b"early"
    with Call(guest.path, b'{"op":"write","path":"/tmp/early","size":3}\nearly') as call:
        assert call.answer().ok
        assert call.answer().code == "bad_request"
    assert guest.get("/tmp/early")[1] == b"early"


@pytest.mark.parametrize(
    "name", ["ü€😀", "with\nnewline", "\udcff\udcfe", "--checkpoint=1", " ", "a" * 255, "\x1b[31m"]
)
def test_names_of_any_kind(guest: Guest, name: str) -> None:
    path = f"/tmp/names/{name}"
    assert guest.put(path, b"content").ok
    assert guest.get(path)[1] == b"content"
    assert entries(guest, "/tmp/names") == [(name, "file", 7)]
    assert guest.ask("remove", path=path).ok
    assert guest.ask("remove", path="/tmp/names").ok


def test_a_name_that_is_too_long(guest: Guest) -> None:
    assert guest.put("/tmp/" + "a" * 256, b"").code == "bad_request"


def test_removing(guest: Guest) -> None:
    guest.shell("mkdir -p /tmp/remove/full/x /tmp/remove/empty; cd /tmp/remove; echo > file; ln -s file link")
    guest.shell("mkfifo /tmp/remove/fifo")
    for name, code in (
        ("full", "not_empty"), ("absent", "not_found"), ("file/x", "not_dir"), ("absent/x", "not_found"),
        ("link", ""), ("empty", ""), ("fifo", ""),
    ):
        assert guest.ask("remove", path=f"/tmp/remove/{name}").code == code, name
    assert entries(guest, "/tmp/remove") == [("file", "file", 1), ("full", "dir", 0)]
    assert guest.ask("remove", path="/").code == "bad_request"
    assert guest.ask("remove", path="/etc/passwd").code in ("bad_request", "read_only")


def test_listing_is_sorted_and_says_what_is_what(guest: Guest, area: str) -> None:
    found = {name: (kind, size) for name, kind, size in entries(guest, area)}
    assert list(found) == sorted(found)
    assert found["file"] == ("file", 5)
    assert found["large"] == ("file", 70 << 20)
    assert found["full"] == ("dir", 0)
    assert found["link"] == found["dangling"] == found["loop"] == ("symlink", 0)
    assert found["fifo"] == found["socket"] == ("other", 0)


@pytest.mark.parametrize(
    ("name", "code"), [("file", "not_dir"), ("absent", "not_found"), ("bare", "bad_request"), ("fifo", "not_dir")]
)
def test_what_is_not_listed(guest: Guest, area: str, name: str, code: str) -> None:
    assert guest.ask("list", path=f"{area}/{name}").code == code


def test_a_large_directory(guest: Guest) -> None:
    guest.shell("mkdir -p /tmp/many; cd /tmp/many; seq 5000 | xargs touch")
    assert len(entries(guest, "/tmp/many")) == 5000
    guest.shell("rm -r /tmp/many")


def test_other_requests_go_on_during_a_transfer(guest: Guest) -> None:
    guest.shell("head -c 60000000 /dev/zero > /tmp/slow")
    with guest.call("read", path="/tmp/slow") as call:
        assert call.answer().size == 60_000_000
        assert guest.run("echo", "quick").stdout == b"quick\n"
        assert guest.get("/proc/uptime")[0].ok
    guest.ask("remove", path="/tmp/slow")
