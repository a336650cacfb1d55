"""Layers that mean harm, through the real programs in their jail."""

from __future__ import annotations

import base64
import gzip
import http.server
import os
import re
import signal
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import anyio
import pytest

from sandboxd.assets import confined, oci
from sandboxd.assets.layers import Layer
from sandboxd.assets.manifest import Unusable
from sandboxd.assets.oci import Resolved
from sandboxd.assets.reference import parse
from sandboxd.uids import DEFAULT_BASE, image_uids
from tests.registry import (
    CONFIG,
    LAYER,
    MANIFEST,
    Entry,
    digest,
    directory,
    encode,
    hard_link,
    link,
    squeezed,
    tar,
    zstd,
)  # fmt: skip

IDS = confined.ids(os.geteuid(), image_uids(DEFAULT_BASE).start)
MAX_BYTES = 64 << 20
MIB = 1 << 20

pytestmark = pytest.mark.skipif(bool(oci.missing()), reason=f"let root run: {oci.missing()}")


class Bench:
    """A place to build in. Whatever is beside it must stay as it is."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.work = place / "work"
        self.secret = place / "secret"
        self.secret.write_text("s3cr3t-CANARY")
        self.told: list[tuple[str, int, int]] = []

    def build(self, *layers: bytes, squeeze: Callable[[bytes], bytes] = squeezed, **wrong: str) -> Path:
        oci.workplace(self.work, IDS)
        rows = []
        for plain in layers:
            blob = squeeze(plain)
            (self.work / "blobs" / digest(blob).removeprefix("sha256:")).write_bytes(blob)
            rows.append(Layer(digest(blob), len(blob), wrong.get("diff_id", digest(plain))))
        image = Resolved("sha256:" + "0" * 64, "sha256:" + "0" * 64, tuple(rows), {"GREETING": "hello"})
        return anyio.run(oci.build, image, self.work, IDS, MAX_BYTES, lambda *what: self.told.append(what))

    def unpacked(self, *layers: bytes, squeeze: Callable[[bytes], bytes] = squeezed) -> Path:
        drive = self.build(*layers, squeeze=squeeze)
        tree = self.place / "tree"
        subprocess.run(["fsck.erofs", f"--extract={tree}", drive], check=True, capture_output=True)
        return tree


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    before = sorted(os.listdir(tmp_path.parent))
    yield made
    assert made.secret.read_text() == "s3cr3t-CANARY"
    assert sorted(os.listdir(tmp_path.parent)) == before
    oci.remove(made.work)
    assert not made.work.exists()


def test_layers_on_top_of_each_other(bench: Bench) -> None:
    tree = bench.unpacked(
        tar(directory("a"), Entry("a/old", b"1"), Entry("a/gone", b"2"), Entry("b/x", b"3"), Entry("twice", b"4")),
        tar(
            Entry("a/.wh.gone"), Entry("a/new", b"5"), Entry("b/.wh..wh..opq"), Entry("b/y", b"6"), Entry("twice", b"7")
        ),
        tar(Entry("same", b"8"), Entry("same", b"9"), hard_link("linked", "same")),
    )
    assert sorted(os.listdir(tree / "a")) == ["new", "old"]
    assert sorted(os.listdir(tree / "b")) == ["y"]
    assert (tree / "twice").read_bytes() == b"7"
    assert (tree / "same").read_bytes() == (tree / "linked").read_bytes() == b"9"
    assert "hello" in (tree / "etc/sandbox/image.json").read_text()


def test_owners_are_kept_and_no_program_gains_rights_by_them(bench: Bench) -> None:
    drive = bench.build(
        tar(Entry("theirs", b"x", uid=1001, gid=5, mode=0o6755), Entry("far", uid=1 << 20), directory("t", mode=0o1777))
    )
    nobody, theirs = ((0, 0), (0, 0)) if IDS.squash else ((65534, 0), (1001, 5))
    assert owned(drive, "/theirs") == theirs
    assert owned(drive, "/far") == nobody
    tree = bench.place / "tree"
    extract = ["fsck.erofs", f"--extract={tree}", "--no-preserve-owner", "--preserve-perms", drive]
    subprocess.run(extract, check=True, capture_output=True)
    assert stat.S_IMODE((tree / "theirs").lstat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "t").lstat().st_mode) == 0o1777


def owned(drive: Path, path: str) -> tuple[int, int]:
    """Owner and group, as the drive has them."""
    told = subprocess.run(["dump.erofs", f"--path={path}", drive], check=True, capture_output=True, text=True).stdout
    found = re.search(r"Uid:\s*(\d+)\s+Gid:\s*(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("squeeze", [bytes, squeezed, zstd], ids=["plain", "gzip", "zstd"])
def test_how_layers_may_be_compressed(bench: Bench, squeeze: Callable[[bytes], bytes]) -> None:
    assert (bench.unpacked(tar(Entry("x", b"y")), squeeze=squeeze) / "x").read_bytes() == b"y"


def device(name: str) -> Entry:
    return Entry(name, kind=tarfile.BLKTYPE)


@pytest.mark.parametrize(
    ("layers", "there"),
    [
        pytest.param([tar(Entry("../../../up", b"x"))], {"up"}, id="a name that leads up"),
        pytest.param([tar(Entry("/tmp/../../secret", b"x"))], {"secret"}, id="an absolute name that leads up"),
        pytest.param([tar(link("l", "/"), Entry("l/in", b"x"))], {"l", "in"}, id="through a link to the root"),
        pytest.param(
            [tar(link("l", "../../../../work/own"), Entry("l/in", b"x"))], {"l", "work"}, id="through a link up"
        ),
        pytest.param([tar(link("l", "/work/blobs")), tar(Entry("l/.wh..wh..opq"))], {"l"}, id="emptying"),
        pytest.param([tar(link("l", "/etc/passwd"), Entry("l", b"x"))], {"l"}, id="a file in place of a link"),
        pytest.param([tar(device("sda"), Entry("x"), Entry("f", kind=tarfile.FIFOTYPE))], {"x"}, id="devices"),
        pytest.param([tar(link("etc", "/var/etc"), Entry("x"))], {"x", "var"}, id="etc is one"),
        pytest.param([tar(link("etc", "/"), Entry("x"))], {"x", "sandbox"}, id="etc is a link to the root"),
    ],
)
def test_nothing_outside_is_touched(bench: Bench, layers: list[bytes], there: set[str]) -> None:
    tree = bench.unpacked(*layers)
    assert set(os.listdir(tree)) - {"etc"} == there
    assert sorted(os.listdir(bench.work)) == ["blobs", "layers.py", "own", "roots.py"]


def big(name: str, size: int) -> bytes:
    """A tar of one file of zeros, without its end."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def bomb(plain: bytes) -> bytes:
    """80 MiB of zeros in some kilobytes."""
    return gzip.compress(plain + bytes(80 * MIB), 9)


@pytest.mark.parametrize(
    ("layer", "squeeze", "says"),
    [
        pytest.param(tar(hard_link("x", "../../etc/passwd")), squeezed, "could not be unpacked", id="a hard link out"),
        pytest.param(tar(Entry("etc", b"f")), squeezed, "could not be unpacked", id="etc is a file"),
        pytest.param(tar(Entry("tmp", b"f")), squeezed, "its /tmp is not a directory", id="tmp is a file"),
        pytest.param(tar(link("run", "/no/where")), squeezed, "its /run is a link", id="run leads nowhere"),
        pytest.param(tar(link("dev", "dev")), squeezed, "its /dev is a link that leads", id="dev leads to itself"),
        pytest.param(tar(directory("etc/hosts")), squeezed, "its /etc/hosts is a directory", id="hosts is a directory"),
        pytest.param(big("x", 1 << 40), squeezed, "larger than 64 MiB", id="a terabyte that is not there"),
        pytest.param(big("x", 80 * MIB), bomb, "larger than 64 MiB", id="a bomb in a file"),
        pytest.param(tar(), bomb, "more than 64 MiB", id="a bomb behind the end"),
        pytest.param(big("x" * 90, 1 << 62), squeezed, "larger than", id="a size beyond reason"),
        pytest.param(big("x", 1000) + b"short", squeezed, "no tar archive", id="a file cut short"),
        pytest.param(b"\x1f\x8bno gzip at all", bytes, "cannot be decompressed|no tar", id="damaged compression"),
        pytest.param(os.urandom(4096), squeezed, "no tar archive", id="rubbish"),
        pytest.param(tar(Entry("a/" * 2040 + "b")), squeezed, "too long", id="two thousand directories deep"),
        pytest.param(tar(Entry("n" * 300)), squeezed, "too long", id="a name beyond NAME_MAX"),
        pytest.param(tar(link("l", "")), squeezed, "leads to no name", id="a link to nothing"),
        pytest.param(tar(Entry(".wh...")), squeezed, "could not be unpacked", id="a whiteout of the root"),
    ],
)
def test_what_is_refused(bench: Bench, layer: bytes, squeeze: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(Unusable, match=says):
        bench.build(layer, squeeze=squeeze)
    assert sum(path.stat().st_size for path in bench.work.rglob("*") if path.is_file()) < 200 * MIB


def test_a_layer_that_holds_something_else_than_the_image_says(bench: Bench) -> None:
    with pytest.raises(Unusable, match="does not hold what"):
        bench.build(tar(Entry("x")), diff_id=digest(b"other"))


def test_a_blob_that_was_changed(bench: Bench) -> None:
    oci.workplace(bench.work, IDS)
    (bench.work / "blobs" / ("1" * 64)).write_bytes(tar(Entry("x")))
    image = Resolved("", "", (Layer("sha256:" + "1" * 64, len(tar(Entry("x"))), digest(tar(Entry("x")))),), {})
    with pytest.raises(Unusable, match="not what its digest says"):
        anyio.run(oci.build, image, bench.work, IDS, MAX_BYTES, lambda *_: None)


def test_progress_counts_the_layers_bytes(bench: Bench) -> None:
    layers = [tar(Entry("a", os.urandom(3 * MIB))), tar(Entry("b", os.urandom(MIB)))]
    bench.build(*layers)
    total = sum(len(squeezed(layer)) for layer in layers)
    assert {what[2] for what in bench.told} == {total} and {what[0] for what in bench.told} == {"building"}
    done = [what[1] for what in bench.told]
    assert done[0] == 0 and done[-1] == total and done == sorted(done)


def test_the_same_layers_give_the_same_drive(tmp_path: Path) -> None:
    drives = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name)
        drives.append(bench.build(tar(Entry("a", b"x"), directory("d"), Entry("d/b", b"y", uid=7))).read_bytes())
        oci.remove(bench.work)
    assert drives[0] == drives[1]

# -- what a registry may do while layers are fetched, and what others see of it


class Tap(http.server.BaseHTTPRequestHandler):
    """A registry, or a proxy, that sends what its server's `send` writes."""

    def do_GET(self) -> None:
        manifest = self.server.manifest        # type: ignore[attr-defined]
        if self.path == "/v2/":
            self.reply(b"{}", "application/json")
        elif "/manifests/" in self.path:
            self.reply(manifest, MANIFEST)
        else:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                self.server.send(self.wfile)   # type: ignore[attr-defined]

    do_HEAD = do_GET  # noqa: N815

    def do_CONNECT(self) -> None:
        self.server.seen.append(self.headers["Proxy-Authorization"])    # type: ignore[attr-defined]
        time.sleep(2)

    def reply(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def tap() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tap)
    server.daemon_threads, server.block_on_close = True, False
    server.seen = []
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def endless(out: IO[bytes]) -> None:
    while True:
        out.write(os.urandom(MIB))


def nothing(out: IO[bytes]) -> None:
    out.write(b"x")
    time.sleep(60)


@pytest.mark.parametrize(
    ("send", "says"),
    [
        pytest.param(endless, "more than its manifest names", id="more than it said"),
        pytest.param(nothing, "nothing for 1 s", id="nothing any more"),
    ],
)
def test_a_registry_that_does_not_send_what_it_said(
    tap: Any, tmp_path: Path, send: Callable[[IO[bytes]], None], says: str
) -> None:
    """The large layer comes at any size; the small ones may not be as large as it."""
    sizes = [256 * MIB, 1000, 1000, 1000] if send is endless else [1000]
    layers = [Layer(f"sha256:{number:064x}", size, f"sha256:{number:064x}") for number, size in enumerate(sizes)]
    rows = [{"mediaType": LAYER, "digest": layer.digest, "size": layer.size_bytes} for layer in layers]
    named = {"mediaType": CONFIG, "digest": f"sha256:{9:064x}", "size": 10}
    tap.manifest = encode({"schemaVersion": 2, "mediaType": MANIFEST, "config": named, "layers": rows})
    tap.send = send
    name = f"127.0.0.1:{tap.server_address[1]}"
    registry = oci.Registry(IDS, {name}, (), {})
    registry.stall_s = 1
    image = Resolved(digest(tap.manifest), digest(tap.manifest), tuple(layers), {})
    work = tmp_path / "work"
    oci.workplace(work, IDS)
    with pytest.raises(Unusable, match=says):
        anyio.run(registry.fetch, parse(f"{name}/t/x:v1"), image, work, lambda *_: None)
    oci.remove(work)
    assert not work.exists(), "and nothing writes there any more"


def test_a_proxys_password_is_not_on_a_command_line(tap: Any, tmp_path: Path) -> None:
    address = f"http://user:s3cr3t-CANARY@127.0.0.1:{tap.server_address[1]}"
    registry = oci.Registry(IDS, (), (), {"HTTPS_PROXY": address})
    work = tmp_path / "work"
    oci.workplace(work, IDS)
    lines: set[bytes] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):
                    lines.add(Path(f"/proc/{pid}/cmdline").read_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with pytest.raises(Unusable) as refused:
            anyio.run(registry.resolve, parse("registry.example/t/x:v1"), work)
    finally:
        done.set()
        looking.join()
    oci.remove(work)
    assert set(tap.seen) == {f"Basic {base64.b64encode(b'user:s3cr3t-CANARY').decode()}"}
    assert any(b"skopeo" in line for line in lines)
    assert not [line for line in lines if b"CANARY" in line]
    assert "CANARY" not in str(refused.value)


def test_a_jail_that_is_only_being_built_ends_with_the_daemon(tmp_path: Path) -> None:
    """The daemon is killed before bubblewrap has tied itself to it: here that has not even begun."""
    work = tmp_path / "work"
    oci.workplace(work, IDS)
    alive, ours = os.pipe()
    words = confined.argv(
        work, ["true"], root=os.geteuid() == 0, ids=IDS, limits=confined.Limits(oci.SPACE, MIB, 1.0), network=False,
        info_fd=alive, block_fd=alive, alive_fd=alive, files=(),
    )  # fmt: skip
    begun = [*words[: words.index("bwrap")], "sh", "-c", "echo begun; exec sleep 300"]
    with subprocess.Popen(begun, pass_fds=[alive], start_new_session=True, stdout=subprocess.PIPE) as process:
        os.close(alive)
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        os.close(ours)
        assert process.wait(10) == -signal.SIGKILL
        assert process.stdout.read() == b""
    oci.remove(work)


def test_nothing_of_a_jail_runs_once_its_time_is_up(tmp_path: Path) -> None:
    work = tmp_path / "work"
    oci.workplace(work, IDS)
    limits = confined.Limits(oci.SPACE, MIB, 1.0)
    words = ["sh", "-c", "while :; do mkdir -p $$ x/y/z; rm -r x; done & exec sleep 300"]
    with pytest.raises(TimeoutError):
        anyio.run(lambda: confined.run(work, words, ids=IDS, limits=limits))
    before = sorted(os.listdir(work / confined.OWN))
    oci.remove(work)
    assert before and not work.exists()
