"""The records in their file: what comes back, what is owed while nothing can be written, what a start refuses."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxd.errors import Internal, SetupError
from sandboxd.lifecycle import State
from sandboxd.store import Network, ProcessRecord, SandboxRecord, Store, Unreadable
from tests.sandboxd.rig import ROOT, Rig


def test_what_is_owed_is_written_once_there_is_room(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    records = [
        SandboxRecord(f"sbx_{n}", "", State.RUNNING, "i", 1, 1, 2, (), Network("none"), float(n), 3) for n in range(3)
    ]
    for record in records:
        store.put(record)
        store.put_process(ProcessRecord(record.id, 1, ("a",), False, "s", 2.5))
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(Internal, match="cannot be written"):
        store.put(replace(records[0], name="new"))
    ended = replace(records[0], state=State.TERMINATED)
    store.put_done(ended)
    done = ProcessRecord("sbx_0", 1, ("a",), False, "s", 2.5, 0)
    store.note_process(done)
    store.note_process(ProcessRecord("sbx_1", 1, ("a",), False, "s", 2.5, 0))
    store.forget("sbx_1")
    store.forget_process("sbx_2", 1)
    store.catch_up()
    assert store.sandboxes()[0] == records
    store._db.execute("PRAGMA query_only = OFF")
    store.catch_up()
    assert store.sandboxes()[0] == [ended, records[2]]
    assert (store.processes("sbx_0"), store.processes("sbx_2")) == ([done], [])
    assert store._owed == {}


def test_the_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    record = SandboxRecord(
        "sbx_1", "n", State.RUNNING, "i", 1.5, 1, 2, ("A",), Network("allowlist", ("a",), ("b",), ("c:22",)), 1.25,
        3, 4, {"k": "ü"}, 900_001, "", 2, 7.5,
    )  # fmt: skip
    plain = SandboxRecord("sbx_2", "", State.PENDING, "i", 1, 1, 2, (), Network("none"), 1.0, 3)
    process = ProcessRecord("sbx_1", 1, ("a", "\udcff"), True, "s", 2.5)
    for one in (record, plain):
        store.put(one)
    store.put_process(process)
    store.put_process(ProcessRecord("sbx_1", 2, ("b",), False, "", 2.5, -1))
    store.close()
    store = Store(tmp_path / "state.sqlite")
    assert store.sandboxes()[0] == [plain, record]
    (text,) = store._db.execute("SELECT record FROM sandbox WHERE id = 'sbx_2'").fetchone()
    old = json.loads(text)
    del old["network"]["allow_tcp"]
    store._db.execute("UPDATE sandbox SET record = ? WHERE id = 'sbx_2'", (json.dumps(old),))
    assert store.sandboxes()[0] == [plain, record], "as an earlier version wrote it"
    assert store.processes("sbx_1") == [process, ProcessRecord("sbx_1", 2, ("b",), False, "", 2.5, -1)]
    store.forget_process("sbx_1", 1)
    store.forget("sbx_1")
    assert store.processes("sbx_1") == [] and store.sandboxes()[0] == [plain]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    store._db.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(SetupError, match="newer sandboxd"):
        Store(tmp_path / "state.sqlite")


S = "/v1/sandboxes"


def filled(path: Path, count: int = 400) -> None:
    """A file of many pages, closed."""
    store = Store(path)
    for n in range(count):
        store.put(SandboxRecord(f"sbx_{n:04}", "", State.TERMINATED, "i" * 300, 1, 1, 2, (), Network("none"), 1.0, 3))
    store.close()


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda path: path.write_bytes(b"no database" * 1000), "damaged: file is not a database",
                     id="another file"),
        pytest.param(lambda path: overwrite(path, 0, bytes(100)), "damaged", id="its head gone"),
        pytest.param(lambda path: overwrite(path, 3 * 4096, b"\xa5" * 4096), "damaged", id="a page overwritten"),
        pytest.param(lambda path: os.truncate(path, path.stat().st_size // 2), "damaged", id="cut in half"),
        pytest.param(lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "cannot be used: Too many levels",
                     id="a link"),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), "cannot be used: Is a directory", id="a directory"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_trusted_stops_the_start_and_is_left_as_it_is(
    tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    path = tmp_path / "state.sqlite"
    filled(path)
    damage(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(SetupError, match=said) as refused:
        Store(path)
    assert ".recover" in str(refused.value) or "cannot be used" in said
    assert (path.read_bytes() if path.is_file() else b"") == before


WRITER = """
import sys
from pathlib import Path
from sandboxd.lifecycle import State
from sandboxd.store import Network, SandboxRecord, Store
store = Store(Path(sys.argv[1]))
for n in range(10**9):
    store.put(SandboxRecord(f"sbx_{n % 50}", str(n), State.RUNNING, "i", 1, 1, 2, (), Network("none"), float(n), 3))
    print(n, flush=True)
"""


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(200)]
            writer.kill()
            said += writer.stdout.read().split()
        last = int(said[-1])
        store = Store(path)
        records, unreadable = store.sandboxes()
        store.close()
        assert unreadable == [] and int(records[-1].created_at) in (last, last + 1)


def rewritten(store: Store, table: str, change: Callable[[dict[str, Any]], Any], where: str) -> None:
    (text,) = store._db.execute(f"SELECT record FROM {table} WHERE {where}").fetchone()
    store._db.execute(f"UPDATE {table} SET record = ? WHERE {where}", (json.dumps(change(json.loads(text))),))


@pytest.mark.parametrize(
    ("table", "change", "why"),
    [
        pytest.param("sandbox", lambda r: r | {"gpu": 1}, "field 'gpu'", id="a field more"),
        pytest.param("sandbox", lambda r: r | {"network": r["network"] | {"allow_udp": []}}, "field 'allow_udp'",
                     id="a field more inside"),
        pytest.param("sandbox", lambda r: r | {"state": "dreaming"}, "dreaming", id="a state of its own"),
        pytest.param("sandbox", lambda r: r | {"cpus": "many"}, "float", id="another type"),
        pytest.param("sandbox", lambda r: {k: r[k] for k in r if k != "image"}, "image", id="a field less"),
        pytest.param("sandbox", lambda r: r | {"id": "sbx_b"}, "another sandbox's", id="of another id"),
        pytest.param("sandbox", lambda r: [r], "array", id="no object"),
        pytest.param("process", lambda r: r | {"nice": 5}, "a process of it: .*field 'nice'", id="a process's field"),
    ],
)
def test_a_record_of_another_version_is_told_of_and_costs_no_other(
    tmp_path: Path, table: str, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    store = Store(tmp_path / "state.sqlite")
    a, b = (
        SandboxRecord(id, id[-1], State.RUNNING, "i", 1, 1, 2, (), Network("none"), 1.0, 3) for id in ("sbx_a", "sbx_b")
    )
    for one in (a, b):
        store.put(one)
        store.put_process(ProcessRecord(one.id, 1, ("a",), False, "s", 2.5))
    rewritten(store, table, change, "id = 'sbx_a'" if table == "sandbox" else "sandbox = 'sbx_a'")
    before = store._db.execute(f"SELECT record FROM {table}").fetchall()
    records, (left,) = store.sandboxes()
    assert records == [b] and left.id == "sbx_a" and left.name in ("a", "")
    assert isinstance(left, Unreadable) and re.search(why, left.why), left.why
    assert store._db.execute(f"SELECT record FROM {table}").fetchall() == before


def test_a_sandbox_of_a_newer_daemon_is_left_alone_until_that_one_is_back(own: Rig) -> None:
    strange, fine = own.create(name="strange"), own.create(name="fine")
    process = own.start_process(strange, "sh", "-c", "read x; echo $x")

    def change(add: bool) -> None:
        db = sqlite3.connect(own.state / "state.sqlite")
        (text,) = db.execute("SELECT record FROM sandbox WHERE id = ?", (strange,)).fetchone()
        body = json.loads(text)
        body |= {"gpu": 1}
        if not add:
            del body["gpu"]
        db.execute("UPDATE sandbox SET record = ? WHERE id = ?", (json.dumps(body), strange))
        db.commit()
        db.close()

    own.stop()
    change(add=True)
    own.start()
    assert [one["id"] for one in own.call("GET", S).json["sandboxes"]] == [fine]
    for method, ref in (("GET", strange), ("GET", "strange"), ("DELETE", strange)):
        answer = own.call(method, f"{S}/{ref}")
        assert (answer.status, answer.code) == (409, "conflict") and "another version of sandboxd" in answer.message
    assert own.call("POST", S, {"name": "strange"}).code == "conflict"
    assert own.run("fine", "echo", "here").stdout == b"here\n"
    assert f"{strange}: its record was written by another version: it has a field 'gpu'" in own.log.read_text()
    own.stop()
    change(add=False)
    own.start()
    assert own.call("POST", f"{process}/stdin?close=1", b"still here\n").status == 204
    assert own.output(process) == (b"still here\n", b"", 0)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_records_that_others_may_read_are_refused_and_not_mended(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state.sqlite"
    Store(path).close()
    path.chmod(mode)
    with pytest.raises(SetupError, match=rf"open to others \(mode 0{mode:o}\): chmod 600 "):
        Store(path)
    assert path.stat().st_mode & 0o777 == mode
    path.chmod(0o600)
    Store(path).close()
