"""What came back, kept in a bucket: against moto's server, which speaks S3 on loopback, and against worse ones."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from moto.server import ThreadedMotoServer

from cli import bucket, mirrored, repository, s3, session
from cli.bucket import Mirror, MirrorError
from cli.fleet import state as fleets
from cli.repository import Repository
from cli.s3 import Store
from cli.session import Session
from sandboxd.errors import SandboxError
from tests.cli.person import Done, Person
from tests.cli.planted.world import git, text
from tests.conftest import make_repository
from tests.sandboxd.rig import Rig

KEYS = {"MIRROR_KEY": "AKIDEXAMPLE", "MIRROR_SECRET": "s3cr3t-CANARY"}
WHEN = 1_800_000_000.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def mirror(endpoint: str, request: pytest.FixtureRequest) -> Mirror:
    name = f"b{abs(hash(request.node.nodeid)) % 10**12}"
    found = Mirror(
        name, endpoint=endpoint, prefix="team/", path_style=True, access_key_env="MIRROR_KEY",
        secret_key_env="MIRROR_SECRET", max_object_mb=1,
    )  # fmt: skip
    outside(found).create_bucket(Bucket=name)
    return found


def outside(mirror: Mirror) -> Any:
    """The bucket's owner, who may put anything into it."""
    return botocore.session.Session().create_client(
        "s3", region_name="us-east-1", endpoint_url=mirror.endpoint, aws_access_key_id="x", aws_secret_access_key="y"
    )  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a commit of its own, and one that came back as refs/sandbox/job."""
    top = tmp_path_factory.mktemp("template") / "project"
    make_repository(top)
    git(top, "checkout", "-q", "-b", "agents")
    (top / "new").write_text("new\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "agent")
    git(top, "update-ref", "refs/sandbox/job", "HEAD")
    git(top, "checkout", "-q", "-")
    git(top, "branch", "-q", "-D", "agents")
    return top


@pytest.fixture
def repo(template: Path, tmp_path: Path) -> Repository:
    shutil.copytree(template, tmp_path / "project", symlinks=True)
    return discovered(tmp_path / "project")


def discovered(top: Path) -> Repository:
    found = repository.discover(top)
    assert found is not None
    return found


def state(repo: Repository) -> tuple[str, list[str]]:
    """Every ref, and every object file."""
    files = (path for path in (repo.git_dir / "objects").rglob("*") if path.is_file())
    return git(repo.top, "for-each-ref").decode(), sorted(str(path) for path in files)


def upload(mirror: Mirror, repo: Repository, config: Path) -> bucket.Object:
    return mirrored.upload(mirror, KEYS, config, repo, "sbx_0123456789abcdef", "bring-back", "refs/sandbox/job")


# Settings and names: pure.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"s3": {}}, "mirror.s3.bucket: it must be given"),
        ({"s3": {"bucket": "b/../c"}}, "mirror.s3.bucket: it must be a bucket's name"),
        ({"s3": {"bucket": "bkt", "endpoint": "http://store.test"}}, "mirror.s3.endpoint: it must be https://"),
        ({"s3": {"bucket": "bkt", "endpoint": "https://u:p@store.test"}}, "mirror.s3.endpoint: it must be https://"),
        ({"s3": {"bucket": "bkt", "endpoint": "https://store.test/x"}}, "mirror.s3.endpoint: it must be https://"),
        ({"s3": {"bucket": "bkt", "prefix": "../x"}}, "mirror.s3.prefix: it must be names"),
        ({"s3": {"bucket": "bkt", "prefix": "x/./y"}}, "mirror.s3.prefix: it must be names"),
        ({"s3": {"bucket": "bkt", "prefix": "x//y"}}, "mirror.s3.prefix: it must be names"),
        ({"s3": {"bucket": "bkt", "prefix": "x/.."}}, "mirror.s3.prefix: it must be names"),
        ({"s3": {"bucket": "bkt", "prefix": "/x"}}, "mirror.s3.prefix: it must be names"),
        ({"s3": {"bucket": "bkt", "access_key": "AKID"}}, "mirror.s3.access_key: it is not known"),
        ({"s3": {"bucket": "bkt", "access_key_env": "A B"}}, "access_key_env: it must be a variable's name"),
        ({"s3": {"bucket": "bkt"}, "upload": "never"}, "mirror.upload: it must be bring-back or all"),
        ({"s3": {"bucket": "bkt"}, "max_object_mb": 9999}, "mirror.max_object_mb: it must be a number"),
        ({"s3": {"bucket": "bkt"}, "max_object_mb": True}, "mirror.max_object_mb: it must be a number"),
        ({"s3": "bkt"}, "mirror.s3: it must be a mapping"),
        ({"s4": {}, "s3": {"bucket": "bkt"}}, "mirror.s4: it is not known"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_their_place(given: Mapping[str, object], said: str) -> None:
    with pytest.raises(MirrorError) as caught:
        bucket.of(given, "/home/me/config.yaml")
    told = str(caught.value)
    assert told.startswith("/home/me/config.yaml: mirror") and said in told and "\n" not in told


def test_settings_that_are_right() -> None:
    assert bucket.of({}, "") is None
    assert bucket.of({"s3": {"bucket": "bkt"}}, "") == Mirror("bkt")
    given = {"s3": {"bucket": "bkt", "endpoint": "https://s:9/", "prefix": "a/b/", "path_style": True}, "upload": "all"}
    found = bucket.of(given, "")
    assert found == Mirror("bkt", endpoint="https://s:9", prefix="a/b/", path_style=True, every_checkpoint=True)


@pytest.mark.parametrize("sandbox", ["sbx_0123456789abcdef", "sbx_n_0123456789abcdef", "job-1"])
def test_a_name_reads_as_it_was_made(sandbox: str) -> None:
    mirror = Mirror("bkt", prefix="a/")
    made = bucket.name(mirror, "ab" * 20, sandbox, "checkpoint", "c" * 64, WHEN)
    assert made.key == f"a/{'ab' * 8}/{sandbox}/checkpoint-20270115T080000Z-{'c' * 64}.bundle"
    assert bucket.read(mirror, made.key) == made
    assert made.shown_time == "2027-01-15T08:00:00Z"


GOOD = f"{'ab' * 8}/sbx_1/bring-back-20270115T080000Z-{'c' * 40}.bundle"


@pytest.mark.parametrize(
    "key",
    [
        GOOD.replace("sbx_1", ".."), GOOD.replace("sbx_1", ""), GOOD.replace("sbx_1", "a/b"), f"/{GOOD}", f"../{GOOD}",
        GOOD.replace("sbx_1", "-x\x1b[2J"), GOOD.replace("ab", "AB"), GOOD.replace("bring-back", "other"), f"{GOOD}\n",
        GOOD.replace("c" * 40, "c" * 39), GOOD.replace(".bundle", ".bundle.exe"), GOOD + "/x", "", "x" * 2000,
        GOOD.replace("20270115T080000Z", "20270115T080000Z-x"), GOOD.replace("sbx_1", "x" * 65),
    ],
    ids=lambda key: ascii(key)[:60],
)  # fmt: skip
def test_a_name_that_is_not_ours_is_none(key: str) -> None:
    assert bucket.read(Mirror("bkt"), GOOD) is not None
    assert bucket.read(Mirror("bkt"), key) is None
    assert bucket.read(Mirror("bkt", prefix="a/"), GOOD) is None


# A bucket that is as it should be.


def test_what_came_back_goes_up_with_its_history_and_comes_down_elsewhere(
    mirror: Mirror, repo: Repository, tmp_path: Path
) -> None:
    made = upload(mirror, repo, tmp_path / "config")
    commit = text(repo.top, "rev-parse", "refs/sandbox/job")
    assert (made.commit, made.repository) == (commit, repo.head_commit[:16])
    (tmp_path / "b").write_bytes(outside(mirror).get_object(Bucket=mirror.bucket, Key=made.key)["Body"].read())
    git(tmp_path, "init", "-q", "--bare", "alone.git")
    git(tmp_path / "alone.git", "fetch", "-q", str(tmp_path / "b"), "refs/sandbox/job:refs/heads/x")
    assert text(tmp_path / "alone.git", "rev-list", "--count", commit) == "2", "it does not stand for itself"
    git(tmp_path, "clone", "-q", "--no-local", str(repo.top), "elsewhere")
    other = discovered(tmp_path / "elsewhere")
    store = Store(mirror, KEYS)
    wanted = mirrored.newest(mirror, store, mirrored.first_commit(other), made.sandbox, None)
    assert wanted == made
    before = git(other.top, "for-each-ref").decode()
    received, recorded = mirrored.fetch(mirror, store, other, wanted, None)
    assert (received.ref, received.commit, recorded) == (f"refs/sandbox/mirror/{made.sandbox}", commit, False)
    assert git(other.top, "for-each-ref").decode() == f"{before}{commit} commit\t{received.ref}\n"
    assert text(other.top, "show", f"{received.ref}:new") == "new"
    again, _ = mirrored.fetch(mirror, store, other, wanted, None)
    assert again.replaced is None


def test_the_record_remembers_what_was_uploaded(mirror: Mirror, repo: Repository, tmp_path: Path) -> None:
    config = tmp_path / "config"
    session.prepare(config)
    session.save(config, Session("sbx_0123456789abcdef", "unix:///x", str(repo.top), repo.head_commit, "job"))
    made = upload(mirror, repo, config)
    record = session.load(config, "sbx_0123456789abcdef")
    assert record is not None and record.mirrored == (made.key,)
    found = [mirrored.record_of(config, repo, called) for called in ("job", "sbx_0123456789abcdef", "other")]
    assert found == [record, record, None]
    store = Store(mirror, KEYS)
    fake = bucket.name(mirror, mirrored.first_commit(repo), made.sandbox, "bring-back", "d" * 40, WHEN + 10**9)
    store.put(fake.key, b"x", 1)
    assert mirrored.newest(mirror, store, mirrored.first_commit(repo), made.sandbox, None) == fake
    assert mirrored.newest(mirror, store, mirrored.first_commit(repo), made.sandbox, record) == made
    assert mirrored.fetch(mirror, store, repo, made, record)[1]
    forged = bucket.read(mirror, made.key.replace(made.commit, "e" * 40))
    assert forged is not None
    with pytest.raises(MirrorError, match=f"is not what was uploaded then: {made.commit}"):
        mirrored.fetch(mirror, store, repo, forged, record)


def test_it_is_called_as_it_came_back_and_what_is_called_by_an_id_is_still_found(
    mirror: Mirror, repo: Repository, tmp_path: Path
) -> None:
    root, store = mirrored.first_commit(repo), Store(mirror, KEYS)
    old = bucket.name(mirror, root, "sbx_0123456789abcdef", "bring-back", "d" * 40, WHEN - 10**9)
    store.put(old.key, b"x", 1)
    made = upload(mirror, repo, tmp_path / "config")
    assert made.sandbox == "job"
    git(repo.top, "update-ref", "refs/sandbox/fleet/a.b", "refs/sandbox/job")
    config = tmp_path / "config"
    fleets = mirrored.upload(mirror, KEYS, config, repo, "sbx_1", "bring-back", "refs/sandbox/fleet/a.b")
    assert fleets.sandbox == "sbx_1"
    assert {one.key for one, _ in mirrored.objects(mirror, store, root)[0]} == {old.key, made.key, fleets.key}
    assert [mirrored.newest(mirror, store, root, one.sandbox, None) for one in (old, made, fleets)] == [
        old, made, fleets,
    ]  # fmt: skip


def test_a_listing_of_many_pages(mirror: Mirror, repo: Repository) -> None:
    store = Store(mirror, KEYS)
    for number in range(1030):
        made = bucket.name(mirror, repo.head_commit, f"sbx_{number}", "checkpoint", "c" * 40, WHEN + number)
        outside(mirror).put_object(Bucket=mirror.bucket, Key=made.key, Body=b"") if number == 0 else None
        if number:
            _put_quickly(mirror, made.key)
    found, strange = mirrored.objects(mirror, store, repo.head_commit)
    assert (len(found), strange, found[-1][0].sandbox) == (1030, 0, "sbx_1029")


def _put_quickly(mirror: Mirror, key: str) -> None:
    """Into moto's own state: a thousand requests would take a minute."""
    from moto.s3.models import s3_backends

    s3_backends["123456789012"]["aws"].put_object(mirror.bucket, key, b"")


def test_trying_it_out_writes_one_small_object(mirror: Mirror) -> None:
    mirrored.try_out(mirror, Store(mirror, KEYS))
    mirrored.try_out(mirror, Store(mirror, KEYS))
    listed = outside(mirror).list_objects_v2(Bucket=mirror.bucket)["Contents"]
    assert [one["Key"] for one in listed] == ["team/sandbox-mirror-check"]


# What may not go up.


def test_more_than_may_go_up_is_refused(mirror: Mirror, repo: Repository, tmp_path: Path) -> None:
    (repo.top / "big").write_bytes(os.urandom(1_200_000))
    git(repo.top, "add", ".")
    git(repo.top, "commit", "-qm", "big")
    git(repo.top, "update-ref", "refs/sandbox/job", "HEAD")
    with pytest.raises(MirrorError, match="max_object_mb is 1"):
        upload(mirror, repo, tmp_path)
    assert "Contents" not in outside(mirror).list_objects_v2(Bucket=mirror.bucket)


def test_a_shallow_clone_has_no_first_commit(mirror: Mirror, repo: Repository, tmp_path: Path) -> None:
    git(repo.top, "merge", "-q", "refs/sandbox/job")
    git(tmp_path, "clone", "-q", "--depth=1", repo.top.as_uri(), "shallow")
    git(tmp_path / "shallow", "update-ref", "refs/sandbox/job", "HEAD")
    with pytest.raises(MirrorError, match="shallow clone"):
        upload(mirror, discovered(tmp_path / "shallow"), tmp_path)


@pytest.mark.parametrize("gone", ["MIRROR_KEY", "MIRROR_SECRET"])
def test_a_variable_that_is_not_set_is_named(mirror: Mirror, gone: str) -> None:
    with pytest.raises(MirrorError, match=f"the variable {gone}, .* is not set here"):
        Store(mirror, {name: value for name, value in KEYS.items() if name != gone})


def test_a_store_that_does_not_answer_is_told_by_its_endpoint(mirror: Mirror) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(MirrorError) as caught:
        Store(replace(mirror, endpoint=address), KEYS).list("a/long/prefix")
    assert str(caught.value).endswith(f"endpoint URL: {address}; see mirror.s3.endpoint")


# A bucket that lies.


def other_history(repo: Repository, tmp: Path) -> str:
    git(tmp, "init", "-q", "orphan")
    git(tmp / "orphan", "commit", "-q", "--allow-empty", "-m", "another's first commit")
    return text(tmp / "orphan", "rev-parse", "HEAD")


def bundle(top: Path, *arguments: str) -> bytes:
    return git(top, "bundle", "create", "-q", "-", *arguments)


def two_heads(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    git(repo.top, "update-ref", "refs/sandbox/x", "HEAD")
    return text(repo.top, "rev-parse", "refs/sandbox/job"), bundle(repo.top, "refs/sandbox/job", "refs/sandbox/x")


def another_commit(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    return "d" * 40, bundle(repo.top, "refs/sandbox/job")


def anothers(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    commit = other_history(repo, tmp)
    return commit, bundle(tmp / "orphan", "HEAD")


def thin(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    commit = text(repo.top, "rev-parse", "refs/sandbox/job")
    return commit, bundle(repo.top, "refs/sandbox/job", "^HEAD")


def truncated(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    whole = bundle(repo.top, "refs/sandbox/job")
    return text(repo.top, "rev-parse", "refs/sandbox/job"), whole[:-40]


def damaged(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    whole = bytearray(bundle(repo.top, "refs/sandbox/job"))
    whole[-60] ^= 0xFF
    return text(repo.top, "rev-parse", "refs/sandbox/job"), bytes(whole)


def huge(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    commit, whole = text(repo.top, "rev-parse", "refs/sandbox/job"), bundle(repo.top, "refs/sandbox/job")
    return commit, whole + b"\0" * 2_000_000


def rubbish(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    return "e" * 40, b"# v2 git bundle\n\x1b[2J\n\n"


def nothing(repo: Repository, tmp: Path) -> tuple[str, bytes]:
    return "e" * 40, b""


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (two_heads, "refused"), (another_commit, "not dddddddd"), (anothers, "does not build on"),
        (thin, "which is not in it"), (truncated, "refused"), (damaged, "refused"), (huge, "larger than"),
        (rubbish, "refused"), (nothing, "refused"),
    ],
    ids=lambda value: value.__name__.replace("_", " ") if callable(value) else "",
)  # fmt: skip
def test_what_a_bucket_may_not_give(
    mirror: Mirror, repo: Repository, tmp_path: Path, lie: Callable[[Repository, Path], tuple[str, bytes]], said: str
) -> None:
    commit, content = lie(repo, tmp_path)
    made = bucket.name(mirror, mirrored.first_commit(repo), "sbx_1", "bring-back", commit, WHEN)
    outside(mirror).put_object(Bucket=mirror.bucket, Key=made.key, Body=content)
    before = state(repo)
    with pytest.raises(SandboxError, match=said) as caught:
        mirrored.fetch(mirror, Store(mirror, KEYS), repo, made, None)
    assert str(caught.value).isprintable()
    assert state(repo) == before


def test_an_object_of_another_repository_is_not_asked_for(mirror: Mirror, repo: Repository) -> None:
    made = bucket.name(mirror, "f" * 40, "sbx_1", "bring-back", "e" * 40, WHEN)
    with pytest.raises(MirrorError, match="is of another repository"):
        mirrored.fetch(mirror, Store(mirror, KEYS), repo, made, None)


def test_names_that_are_not_ours_are_passed_over(mirror: Mirror, repo: Repository) -> None:
    root = repo.head_commit[:16]
    for key in (f"team/{root}/../x", f"team/{root}/\u202e/evil", f"team/{root}/sbx_1/note.txt", "team/else"):
        outside(mirror).put_object(Bucket=mirror.bucket, Key=key, Body=b"")
    assert mirrored.objects(mirror, Store(mirror, KEYS), repo.head_commit) == ([], 3)


ANSWERS = {
    "no HTTP": b"\x00\xff" * 100,
    "HTML": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    "an error with control characters": b"HTTP/1.1 403 x\r\nContent-Length: 76\r\n\r\n<Error><Code>No\x9b2J</Code>"
    b"<Message>\xe2\x80\xaegnp and more of this text </Message></Error>",
    "a redirect elsewhere": b"HTTP/1.1 307 x\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "a size that is no number": b"HTTP/1.1 200 OK\r\nContent-Length: 84\r\n\r\n"
    b"<ListBucketResult><Contents><Key>a</Key><Size>x</Size></Contents></ListBucketResult>",
    "nothing": b"",
    "a page without end": b"HTTP/1.1 200 OK\r\n\r\n<ListBucketResult>" + b"<a>x</a>" * 3_000_000,
    "an error without end": b"HTTP/1.1 404 x\r\n\r\n<Error><Code>x</Code><Message>" + b"x" * 20_000_000,
    "nested without end": b"HTTP/1.1 200 OK\r\n\r\n" + b"<a>" * 20_000,
    "half a page": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n<ListBucketResult>",
    "a name longer than any": b"HTTP/1.1 200 OK\r\n\r\n<ListBucketResult><Contents><Key>" + b"k" * 1025
    + b"</Key><Size>1</Size></Contents></ListBucketResult>",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_store_that_answers_something_else_is_one_line(answer: bytes, tmp_path: Path) -> None:
    with trap(answer) as (port, _):
        mirror = Mirror("bkt", endpoint=f"http://127.0.0.1:{port}", path_style=True, access_key_env="MIRROR_KEY",
                        secret_key_env="MIRROR_SECRET")  # fmt: skip
        store = Store(mirror, KEYS)
        with pytest.raises(MirrorError) as caught:
            store.list("x")
        with contextlib.suppress(MirrorError):  # else it is the object, as far as this can tell
            assert store.get("x", io.BytesIO(), 1000) <= 1000
    assert str(caught.value).isprintable() and len(str(caught.value)) < 800


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("first", [b"", HEAD + b"X: ", HEAD + b"Content-Length: 999\r\n\r\n", HEAD + b"\r\n"],
                         ids=["its first line", "its head", "what it holds", "without an end"])  # fmt: skip
def test_a_store_that_trickles_is_given_up(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is in time for every timeout of a read."""
    monkeypatch.setattr(s3, "CALL_S", 0.2)
    with trap(first, trickling=True) as (port, seen):
        mirror = Mirror("bkt", endpoint=f"http://127.0.0.1:{port}", path_style=True, access_key_env="MIRROR_KEY",
                        secret_key_env="MIRROR_SECRET")  # fmt: skip
        store = Store(mirror, KEYS)
        calls = (
            (lambda: store.list("x"), "could not be listed: it took more than 0 s"),
            (lambda: store.put("x", b"y", 1), "did not take x: it took"),
            (lambda: store.get("x", io.BytesIO(), 1000), "did not give x: it took"),
        )
        for call, said in calls:
            with pytest.raises(MirrorError, match=f"the bucket bkt {said}"):
                call()
    assert len(seen) <= len(calls), "it was tried again"


class trap:  # noqa: N801 - reads as a statement
    """A listener that answers everything alike, and remembers who came."""

    def __init__(self, answer: bytes, *, trickling: bool = False) -> None:
        self._answer, self._trickling = answer, trickling
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.seen: list[bytes] = []

    def __enter__(self) -> tuple[int, list[bytes]]:
        threading.Thread(target=self._serve, daemon=True).start()
        return self._listener.getsockname()[1], self.seen

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.seen.append(connection.recv(65536))
                with contextlib.suppress(OSError):  # they have heard enough
                    connection.sendall(self._answer)
                    while self._trickling:
                        time.sleep(0.05)
                        connection.sendall(b"x")


def test_nobody_but_the_store_is_asked(
    mirror: Mirror, repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies, endpoints, profiles and the metadata service of the environment lead to a trap; a plain client falls
    into it, this one does not."""
    with trap(b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n") as (port, seen):
        address = f"http://127.0.0.1:{port}"
        (tmp_path / "aws").write_text(f"[default]\nendpoint_url = {address}\nregion = x\ncredential_process = false\n")
        names = (
            "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        )  # fmt: skip
        for name in names:
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
        monkeypatch.setenv("AWS_DEFAULTS_MODE", "auto")
        monkeypatch.setenv("AWS_PROFILE", "default")
        upload(mirror, repo, tmp_path / "config")
        mirrored.try_out(mirror, Store(mirror, KEYS))
        assert seen == []
        plain = botocore.session.Session().create_client("s3", aws_access_key_id="x", aws_secret_access_key="y")
        with pytest.raises(Exception, match="500"):
            plain.list_buckets()
        assert seen, "the trap catches nobody"


# From the command line.


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


@pytest.fixture
def person(rig: Rig, repo: Repository, mirror: Mirror, tmp_path: Path) -> Person:
    person = Person(tmp_path, rig.socket)
    write_settings(person, mirror, "bring-back")
    return person


def write_settings(person: Person, mirror: Mirror, what: str) -> None:
    directory = person.home / ".config/sandbox"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(
        f"mirror:\n  upload: {what}\n  s3: {{bucket: {mirror.bucket}, endpoint: '{mirror.endpoint}', prefix: team,\n"
        "       path_style: true, access_key_env: MIRROR_KEY, secret_key_env: MIRROR_SECRET}\n"
    )


def notes(done: Done) -> list[str]:
    return [line.removeprefix("sandbox-cli: ") for line in done.stderr.decode().splitlines()]


def test_a_run_uploads_and_another_clone_fetches(person: Person, repo: Repository, tmp_path: Path) -> None:
    top = repo.top
    done = person.run("run", "--name=up", "--", "sh", "-c", "echo x > Makefile", cwd=top, **KEYS)
    assert done.returncode == 0
    [key] = [line.removeprefix("mirrored: ") for line in notes(done) if line.startswith("mirrored: ")]
    sandbox, commit = key.split("/")[2], text(top, "rev-parse", "refs/sandbox/up")
    assert sandbox == "up"
    assert key.endswith(f"-{commit}.bundle")
    listed = json.loads(person.run("mirror", "ls", "--json", cwd=top, **KEYS).stdout)
    assert [(one["key"], one["sandbox"], one["kind"]) for one in listed] == [(key, sandbox, "bring-back")]
    table = person.run("mirror", "ls", sandbox, cwd=top, **KEYS).stdout.decode()
    assert table.splitlines()[0].split() == ["SANDBOX", "KIND", "TIME", "COMMIT", "SIZE"] and commit[:12] in table
    git(tmp_path, "clone", "-q", str(top), "elsewhere")
    fetched = person.run("mirror", "fetch", sandbox, cwd=tmp_path / "elsewhere", **KEYS)
    assert fetched.returncode == 0
    assert text(tmp_path / "elsewhere", "rev-parse", f"refs/sandbox/mirror/{sandbox}") == commit
    said = notes(fetched)
    assert said[0] == "nothing here remembers this upload: that it is what came back, only the bucket says"
    assert "- Makefile (added): make, just, task or another tool runs it" in said
    assert said[-1] == f"merge: git merge refs/sandbox/mirror/{sandbox}"
    assert f"or: git diff {repo.head_commit[:12]} refs/sandbox/mirror/{sandbox}" in said
    as_json = json.loads(person.run("mirror", "fetch", key, "--json", cwd=top, **KEYS).stdout)
    assert (as_json["key"], as_json["commit"], as_json["recorded"]) == (key, commit, False)
    pushed = person.run("mirror", "push", "up", cwd=top, **KEYS)
    assert pushed.returncode == 0 and pushed.stdout.decode().startswith(key.rpartition("bring-back")[0])
    checked = person.run("mirror", "check", cwd=top, **KEYS)
    assert checked.returncode == 0 and "listed, written and read with MIRROR_KEY" in checked.stdout.decode()
    everything = "".join(str(part) for one in (done, fetched, pushed, checked) for part in (one.stdout, one.stderr))
    assert KEYS["MIRROR_SECRET"] not in everything


def test_without_credentials_a_run_brings_back_and_says_what_is_missing(person: Person, repo: Repository) -> None:
    done = person.run("run", "--name=no", "--", "sh", "-c", "echo x > x", cwd=repo.top)
    assert done.returncode == 0
    missing = "the variable MIRROR_KEY, which is to hold the mirror's credentials, is not set here"
    assert notes(done)[-2:] == [f"not mirrored: {missing}", "try again with: sandbox-cli mirror push no"]
    assert person.run("mirror", "push", "no", cwd=repo.top, **KEYS).returncode == 0
    assert text(repo.top, "show", "refs/sandbox/no:x") == "x"
    checked = person.run("mirror", "check", cwd=repo.top)
    assert (checked.returncode, "MIRROR_KEY" in checked.stderr.decode()) == (1, True)


def test_settings_that_are_named_hold_for_bringing_back_too(person: Person, repo: Repository) -> None:
    named = (person.home / ".config/sandbox/config.yaml").rename(person.home / "other.yaml")
    made = person.run("run", "--keep", "--name=kept", "--no-bring-back", "--", "sh", "-c", "echo x > x", cwd=repo.top)
    assert made.returncode == 0, made.stderr
    done = person.run("bring-back", "--config", str(named), "kept", cwd=repo.top, **KEYS)
    assert notes(done)[-1].startswith("mirrored: team/"), done.stderr
    hint = notes(person.run("bring-back", "--config", str(named), "kept", cwd=repo.top))[-1]
    assert hint == f"try again with: sandbox-cli mirror push --config={named} kept"
    again = person.run("run", "--config", str(named), "--name=x", "--", "sh", "-c", "echo x > x", cwd=repo.top)
    assert notes(again)[-1] == f"try again with: sandbox-cli mirror push --config={named} x"
    left = person.run("run", "-d", "--config", str(named), "--name=bg", "--", "true", cwd=repo.top)
    assert f"bring its commits back: sandbox-cli bring-back --config={named} bg" in notes(left)
    without = person.run("bring-back", "kept", cwd=repo.top, **KEYS)
    assert (without.returncode, b"mirrored" in without.stderr) == (0, False)
    refused = person.run("attach", "--checkpoint-every=1s", "--config=absent.yaml", "kept", cwd=repo.top, **KEYS)
    assert refused.stderr == b"sandbox-cli: --config absent.yaml: no such file\n"


def test_what_a_task_of_a_fleet_made_can_be_uploaded_later(person: Person, repo: Repository) -> None:
    git(repo.top, "update-ref", "refs/sandbox/fleet/a/b", "HEAD")
    store = fleets.Store.of(str(person.home / ".config/sandbox"), repo.common_dir)
    store.prepare()
    task = fleets.Task("a/b", "codex", False, "fleet-a-b-1", fleets.VERIFIED, sandbox="sbx_1")
    now = session.now()
    store.write(fleets.Fleet(str(repo.top), repo.head_commit, "main", "unix:///s", now, 0, "", (task,)))
    pushed = person.run("mirror", "push", "fleet/a/b", cwd=repo.top, **KEYS)
    assert pushed.returncode == 0, pushed.stderr
    [listed] = json.loads(person.run("mirror", "ls", "sbx_1", "--json", cwd=repo.top, **KEYS).stdout)
    assert listed["commit"] == repo.head_commit


def test_checkpoints_go_up_too_where_that_is_asked_for(person: Person, repo: Repository, mirror: Mirror) -> None:
    write_settings(person, mirror, "all")
    script = "echo x > x; until git rev-parse -q --verify refs/sandbox/checkpoint; do sleep 0.2; done; sleep 3"
    done = person.run("run", "--checkpoint-every=1s", "--", "sh", "-c", script, cwd=repo.top, **KEYS)
    assert done.returncode == 0, done.stderr
    listed = json.loads(person.run("mirror", "ls", "--json", cwd=repo.top, **KEYS).stdout)
    assert [one["kind"] for one in listed] == ["checkpoint", "bring-back"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("fetch", "team/x"), "is not the name of an object that sandbox-cli uploads"),
        (("fetch", "a b"), "is neither a sandbox's name or id nor an object's name"),
        (("fetch", "sbx_none"), "holds nothing of sbx_none and this repository"),
        (("push", "none"), "refs/sandbox/none is not in this repository"),
        (("push", "fleet/none"), "the last fleet in this repository has no task none"),
        (("push", "mirror"), "the name 'mirror' is reserved"),
        (("ls", "a/b"), "'a/b' is neither a sandbox's name nor its id"),
    ],
)
def test_what_is_wrong_is_one_line(person: Person, repo: Repository, args: tuple[str, ...], said: str) -> None:
    done = person.run("mirror", *args, cwd=repo.top, **KEYS)
    assert (done.returncode, done.stdout) == (1, b"")
    assert said in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_without_a_mirror_the_command_says_where_to_write_one(rig: Rig, tmp_path: Path) -> None:
    done = Person(tmp_path, rig.socket).run("mirror", "check")
    assert (done.returncode, "no mirror is set up: write `mirror` into" in done.stderr.decode()) == (1, True)
