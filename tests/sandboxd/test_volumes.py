"""Volumes through the API, with stand-in machines: names, places, claims, files, and what a killed daemon leaves."""

from __future__ import annotations

import http.client
import json
import os
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxd.rig import Rig

S, V = "/v1/sandboxes", "/v1/volumes"


def mount(name: str, path: str = "/data", read_only: bool | None = None) -> dict[str, Any]:
    return {"name": name, "path": path} | ({} if read_only is None else {"read_only": read_only})


def make(rig: Rig, name: str, **fields: Any) -> None:
    answer = rig.call("POST", V, {"name": name, **fields})
    assert answer.status == 201, answer.body


def remove(rig: Rig, *names: str) -> None:
    for name in names:
        answer = rig.call("DELETE", f"{V}/{name}")
        assert answer.status == 204, answer.body


def listed(rig: Rig) -> dict[str, Any]:
    return {one["name"]: one for one in rig.call("GET", V).json["volumes"]}


def files(rig: Rig) -> list[str]:
    return sorted(entry.name for entry in (rig.state / "volumes").iterdir())


# -- the endpoints


def test_a_volume_is_made_listed_by_name_and_deleted(rig: Rig) -> None:
    default = rig.call("POST", V, {"name": "vb"})
    assert (default.status, default.json["name"], default.json["size_mb"]) == (201, "vb", 10240)
    assert set(default.json) == {"name", "size_mb", "created_at"}
    assert default.json["created_at"].endswith("Z")
    make(rig, "va", size_mb=1)
    found = rig.call("GET", V).json["volumes"]
    assert [one["name"] for one in found if one["name"] in ("va", "vb")] == ["va", "vb"]
    assert all("attached_to" not in one for one in found if one["name"] in ("va", "vb"))
    file = rig.state / "volumes" / "vb.ext4"
    assert (file.stat().st_mode & 0o777, file.stat().st_size) == (0o600, 10240 << 20)
    assert file.stat().st_blocks * 512 < 64 << 20, "it is sparse"
    assert (rig.state / "volumes").stat().st_mode & 0o777 == 0o700
    assert rig.call("POST", V, {"name": "vb"}).code == "conflict"
    for _ in range(2):
        assert rig.call("DELETE", f"{V}/va").status == (204 if _ == 0 else 404)
    remove(rig, "vb")
    assert rig.call("DELETE", f"{V}/vb").code == "not_found"
    assert not {"va.ext4", "vb.ext4"} & set(files(rig))


def test_the_root_directory_is_the_sandbox_users(rig: Rig) -> None:
    make(rig, "owned", size_mb=16)
    said = subprocess.run(
        ["/usr/sbin/debugfs", "-R", "stat /", str(rig.state / "volumes" / "owned.ext4")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    remove(rig, "owned")
    assert "User:  1001   Group:  1001" in said


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({}, id="no name"),
        pytest.param({"name": ""}, id="an empty name"),
        pytest.param({"name": "A"}, id="a capital"),
        pytest.param({"name": "-a"}, id="a dash in front"),
        pytest.param({"name": "a_b"}, id="an underscore"),
        pytest.param({"name": "../x"}, id="a path"),
        pytest.param({"name": "a\n"}, id="a newline"),
        pytest.param({"name": "a" * 64}, id="too long"),
        pytest.param({"name": "ok", "size_mb": 0}, id="no size"),
        pytest.param({"name": "ok", "size_mb": -1}, id="less than none"),
        pytest.param({"name": "ok", "size_mb": 102401}, id="above the limit"),
        pytest.param({"name": "ok", "size_mb": 1.5}, id="half a megabyte"),
        pytest.param({"name": "ok", "colour": 1}, id="an unknown field"),
    ],
)
def test_a_volume_that_is_refused(rig: Rig, body: dict[str, Any]) -> None:
    answer = rig.call("POST", V, body)
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert "ok" not in listed(rig)


@pytest.mark.parametrize("name", ["unknown", "Bad_Name", "..%2fstate.sqlite", "%00", "a" * 300])
def test_deleting_what_is_no_volume(rig: Rig, name: str) -> None:
    answer = rig.call("DELETE", f"{V}/{name}")
    assert (answer.status, answer.code) == (404, "not_found")


def test_twenty_creates_of_one_volume(rig: Rig) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: rig.call("POST", V, {"name": "once", "size_mb": 8}).status, range(20)))
    remove(rig, "once")
    assert sorted(answers) == [201] + [409] * 19
    assert all(not name.startswith(".") for name in files(rig))


# -- C46: where a volume may be


@pytest.mark.parametrize(
    "path",
    [
        "/usr/local", "/usr", "/tmp/cache", "/tmp", "/proc/x", "/proc", "/etc", "/etc/", "//etc", "/./etc/x", "data",
        "./data", "", "/a/../b", "/..", "/", "//", "/.", "/sys", "/dev/shm", "/run", "/bin", "/sbin/x", "/boot",
        "/lib", "/lib64", "/libexec/x", "/workspace", "/workspace/x", "/with blank", "/a\n", "/a\u0000b", "/\u00e4",
        "/a:b", "/" + "a" * 2000,
    ],
)  # fmt: skip
def test_c46_places_where_nothing_is_mounted(rig: Rig, path: str) -> None:
    answer = rig.call("POST", S, {"volumes": [mount("unknown", path)]})
    assert (answer.status, answer.code) == (400, "invalid_request"), path


@pytest.mark.parametrize(
    "path", ["/data", "/data/", "//data/./x", "/sandbox/home/.cache", "/opt/a_b-c.d", "/temporary", "/usrlocal",
             "/etcetera", "/workspaces", "/var/lib/x", "/home"],
)  # fmt: skip
def test_places_that_are_fine(rig: Rig, path: str) -> None:
    answer = rig.call("POST", S, {"volumes": [mount("unknown", path)]})
    assert (answer.status, answer.code) == (404, "not_found"), "all that is wrong is the name"


@pytest.mark.parametrize(
    ("volumes", "status"),
    [
        pytest.param([mount("a", "/d"), mount("b", "/d/e")], 400, id="one within the other"),
        pytest.param([mount("a", "/d/e"), mount("b", "/d")], 400, id="one around the other"),
        pytest.param([mount("a", "/d"), mount("b", "/d/")], 400, id="at the same place"),
        pytest.param([mount("a", "/d"), mount("b", "/data")], 404, id="a common beginning is no nesting"),
        pytest.param([mount("a", "/d"), mount("a", "/e")], 400, id="the same twice"),
        pytest.param([mount("a", "/d", True), mount("a", "/e", True)], 400, id="the same twice, only read"),
        pytest.param([mount("A", "/d")], 400, id="a bad name"),
        pytest.param([{"path": "/d"}], 400, id="no name"),
        pytest.param([{"name": "a"}], 400, id="no path"),
        pytest.param([mount(f"v{n}", f"/d{n}") for n in range(9)], 400, id="nine"),
        pytest.param([mount(f"v{n}", f"/d{n}") for n in range(8)], 404, id="eight are fine"),
        pytest.param([{"name": "a", "path": "/d", "size": 1}], 400, id="an unknown field"),
        pytest.param("a", 400, id="not a list"),
        pytest.param([mount("unknown", "/d")], 404, id="unknown"),
    ],
)
def test_c46_mounts_that_are_refused(rig: Rig, volumes: Any, status: int) -> None:
    before = len(rig.call("GET", S).json["sandboxes"])
    assert rig.call("POST", S, {"volumes": volumes}).status == status
    assert len(rig.call("GET", S).json["sandboxes"]) == before


# -- C45 and C47: who has it


def test_c47_one_writer_or_any_readers(other: Rig) -> None:
    make(other, "shared", size_mb=8)
    writer = other.create(volumes=[mount("shared", "/data/")])
    made = other.call("GET", f"{S}/{writer}").json
    assert made["volumes"] == [{"name": "shared", "path": "/data", "read_only": False}]
    assert listed(other)["shared"]["attached_to"] == writer
    created = next(one for one in other.call("GET", f"{S}/{writer}/events").json["events"])
    assert (created["type"], created["volumes"]) == ("sandbox.created", made["volumes"])
    for read_only in (True, False):
        refused = other.call("POST", S, {"volumes": [mount("shared", read_only=read_only)]})
        assert (refused.status, refused.code) == (409, "conflict") and writer in refused.message
    assert other.call("DELETE", f"{V}/shared").code == "conflict"
    assert other.call("DELETE", f"{S}/{writer}").status == 204
    assert "attached_to" not in listed(other)["shared"]

    first = other.create(volumes=[mount("shared", read_only=True)])
    second = other.create(volumes=[mount("shared", "/elsewhere", True)])
    assert listed(other)["shared"]["attached_to"] == first
    assert other.call("POST", S, {"volumes": [mount("shared")]}).status == 409
    assert other.call("DELETE", f"{S}/{first}").status == 204
    assert listed(other)["shared"]["attached_to"] == second
    assert other.call("DELETE", f"{V}/shared").code == "conflict"
    assert other.call("DELETE", f"{S}/{second}").status == 204
    remove(other, "shared")


def test_concurrent_creates_cannot_both_write(other: Rig) -> None:
    make(other, "raced", size_mb=8)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: other.call("POST", S, {"volumes": [mount("raced")]}).status, range(12)))
    assert sorted(answers) == [201] + [409] * 11
    (writer,) = [one["id"] for one in other.call("GET", S).json["sandboxes"] if one["state"] == "running"]
    assert other.call("DELETE", f"{S}/{writer}").status == 204
    remove(other, "raced")


def test_a_create_that_fails_lets_the_volume_go(other: Rig) -> None:
    make(other, "kept", size_mb=8)
    other.knob("no_boot", "1")
    assert other.call("POST", S, {"volumes": [mount("kept")]}).status == 500
    other.knob("no_boot", None)
    assert "attached_to" not in listed(other)["kept"]
    other.knob("boot_s", "1")
    with ThreadPoolExecutor(1) as pool:
        create = pool.submit(other.call, "POST", S, {"name": "born", "volumes": [mount("kept")]})
        while other.call("GET", f"{S}/born").status != 200:
            time.sleep(0.02)
        assert listed(other)["kept"]["attached_to"] == other.call("GET", f"{S}/born").json["id"], "claimed at once"
        assert other.call("DELETE", f"{S}/born").status == 204
        assert create.result().status == 409
    other.knob("boot_s", None)
    remove(other, "kept")


def test_a_taken_name_takes_no_volume(other: Rig) -> None:
    make(other, "free", size_mb=8)
    other.create(name="taken")
    assert other.call("POST", S, {"name": "taken", "volumes": [mount("free")]}).status == 409
    assert "attached_to" not in listed(other)["free"]
    remove(other, "free")


def test_a_volume_whose_file_is_gone_is_said_to_be(other: Rig) -> None:
    make(other, "lost", size_mb=8)
    (other.state / "volumes" / "lost.ext4").unlink()
    answer = other.call("POST", S, {"volumes": [mount("lost")]})
    assert answer.code == "conflict" and "gone" in answer.message and str(other.state) not in answer.message
    remove(other, "lost")


# -- an end without notice


def soil(path: Path) -> None:
    """What a machine that is cut off leaves: a file system whose journal is to be replayed."""
    with path.open("r+b") as file:
        file.seek(1024 + 0x60)
        (flags,) = struct.unpack("<I", file.read(4))
        file.seek(1024 + 0x60)
        file.write(struct.pack("<I", flags | 4))
    # The superblock has a checksum; a wrong one is no file system at all to e2fsck.
    subprocess.run(["/usr/sbin/debugfs", "-w", "-R", "ssv mtime now", str(path)], check=True, capture_output=True)


def needs_recovery(path: Path) -> bool:
    said = subprocess.run(["/usr/sbin/dumpe2fs", "-h", str(path)], capture_output=True, text=True, check=True).stdout
    return "needs_recovery" in said


def test_a_reader_of_a_volume_left_unclean_finds_it_replayed(other: Rig) -> None:
    make(other, "unclean", size_mb=64)
    path = other.state / "volumes" / "unclean.ext4"
    soil(path)
    assert needs_recovery(path)
    path.chmod(0o444)  # as root's Firecracker leaves what it only read
    other.knob("recover_s", "0.3")
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: other.create(volumes=[mount("unclean", read_only=True)]), range(3)))
    assert not needs_recovery(path)
    assert other.log.read_text().count("volume unclean: its last writer ended without notice") == 1
    assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), os.getegid())
    assert path.stat().st_mode & 0o777 == 0o600
    for sandbox in made:
        other.call("DELETE", f"{S}/{sandbox}")
    remove(other, "unclean")


def test_a_volume_that_cannot_be_replayed_is_refused_to_readers_with_the_way_out(other: Rig) -> None:
    make(other, "broken", size_mb=64)
    soil(other.state / "volumes" / "broken.ext4")
    other.knob("no_recover", "1")
    answer = other.call("POST", S, {"volumes": [mount("broken", read_only=True)]})
    assert answer.code == "conflict"
    assert "attach it for writing" in answer.message and "delete it" in answer.message
    assert "attached_to" not in listed(other)["broken"]
    other.knob("no_recover", None)
    (other.state / "volumes" / "broken.ext4").write_bytes(b"\xff" * 5000)
    assert other.call("POST", S, {"volumes": [mount("broken", read_only=True)]}).code == "conflict"
    remove(other, "broken")


# -- a daemon that is killed


def test_a_restart_keeps_volumes_and_who_has_them(own: Rig) -> None:
    make(own, "writes", size_mb=8)
    make(own, "reads", size_mb=8)
    sandbox = own.create(name="has", volumes=[mount("writes", "/w"), mount("reads", "/r", True)])
    before = own.call("GET", V).json
    own.kill()
    own.start()
    assert own.call("GET", V).json == before
    assert own.call("GET", f"{S}/has").json["volumes"][1] == {"name": "reads", "path": "/r", "read_only": True}
    assert own.call("POST", S, {"volumes": [mount("writes", read_only=True)]}).status == 409
    assert own.call("DELETE", f"{V}/reads").status == 409
    own.kill()
    pid = int(json.loads((own.state / "sandboxes" / sandbox / "vm.json").read_text())["pid"])
    os.kill(pid, 9)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)
    own.start()
    assert [one.get("attached_to") for one in own.call("GET", V).json["volumes"]] == [None, None]
    remove(own, "reads", "writes")


def test_what_a_killed_daemon_left_is_swept_and_no_data_is_lost(own: Rig) -> None:
    make(own, "has-both", size_mb=8)
    make(own, "has-record", size_mb=8)
    own.kill()
    volumes = own.state / "volumes"
    (volumes / ".new-0123456789abcdef").write_bytes(b"half")
    (volumes / ".gone-0123456789abcdef").write_bytes(b"half")
    (volumes / "notes.txt").write_text("the operator's")
    (volumes / "link.ext4").symlink_to("/etc/passwd")
    (volumes / "has-record.ext4").rename(volumes / "has-file.ext4")
    own.start()
    found = listed(own)
    assert {name: one["size_mb"] for name, one in found.items()} == {"has-both": 8, "has-file": 8}
    assert files(own) == ["has-both.ext4", "has-file.ext4", "link.ext4", "notes.txt"]
    assert Path("/etc/passwd").stat().st_uid == 0


def test_creates_and_deletes_cut_off_by_kill_leave_each_volume_whole_or_not_there(own: Rig) -> None:
    def busy() -> None:
        for round_ in range(1000):
            try:
                own.call("POST", V, {"name": f"n{round_ % 5}", "size_mb": 32}, timeout=5)
                own.call("DELETE", f"{V}/n{(round_ + 2) % 5}", timeout=5)
            except (OSError, http.client.HTTPException):
                return

    for delay_s in (0.05, 0.13, 0.31):
        worker = threading.Thread(target=busy)
        worker.start()
        time.sleep(delay_s)
        own.kill()
        worker.join()
        own.start()
        there = set(listed(own))
        assert {f"{name}.ext4" for name in there} == set(files(own))
        for name in there:
            path = own.state / "volumes" / f"{name}.ext4"
            assert subprocess.run(["/usr/sbin/e2fsck", "-fn", str(path)], capture_output=True).returncode == 0
