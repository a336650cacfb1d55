"""Directories of the host in sandboxes: who may have which. The machines are stand-ins; what a real one can do with a
directory is in tests/path/test_bind.py, what its jail is in tests/vm/test_virtiofs.py."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandboxd import bind
from sandboxd.address import TcpPeer, UnixPeer
from sandboxd.bind import Kept
from sandboxd.errors import InvalidRequest, Refused
from tests.sandboxd.rig import ROOT, Answer, Rig

S = "/v1/sandboxes"
TOKEN = "a-token-of-the-tests-own"
NOBODY = 65534
US = UnixPeer(os.geteuid())

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, and other users, need root")


@pytest.fixture(scope="module")
def place(short_tmp: Path) -> Path:
    """A person's home, the daemon's things in it, and ways to reach both by other names."""
    top = short_tmp / "bind-who"
    for name in ("home/project/deep", "home/real", "around/home", "assets", "tokens", "policy/inside", "elsewhere"):
        (top / name).mkdir(parents=True)
    (top / "tokens").chmod(0o700)
    (top / "tokens" / "one").write_text(TOKEN)
    (top / "tokens" / "one").chmod(0o600)
    (top / "policy" / "policy.yaml").write_text("allow_bind: true\n")
    (top / "file").write_text("")
    for name, target in {
        "to-home": "home", "to-root": "/", "to-state": "state", "to-proc": "/proc/self/root", "to-above": "..",
        "broken": "nowhere", "home/to-project": "project", "home/loop": "loop",
    }.items():  # fmt: skip
        (top / name).symlink_to(target)
    return top


@pytest.fixture(scope="module")
def rig(place: Path) -> Iterator[Rig]:
    """Its home is mounted a second time, and a part of its state, where it may make mounts."""
    flags = ["--policy", str(place / "policy/policy.yaml"), "--assets-dir", str(place / "assets")]
    flags += ["--token-dir", str(place / "tokens"), "--listen", "127.0.0.1:0"]
    mounts = f"mount --bind {place}/home {place}/around/home && mkdir -p {place}/state/images {place}/state-part"
    mounts += f" && mount --bind {place}/state/images {place}/state-part && mkdir -p {place}/mounted/below/it"
    mounts += f" && chmod 700 {place}/state"
    mounts += f" && mount -t tmpfs tmpfs {place}/mounted/below/it"
    prefix = ("unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh") if os.geteuid() == 0 else ()
    rig = Rig(place, *flags, prefix=prefix)
    rig.environment = {"HOME": str(place / "home")}
    rig.headers = {"Authorization": f"Bearer {TOKEN}"}
    with rig:
        yield rig


def ask(rig: Rig, path: object, **more: object) -> Answer:
    return rig.call("POST", S, {"bind": {"host_path": path} | more})


def over_tcp(rig: Rig, body: dict[str, Any]) -> Answer:
    said = next(line for line in reversed(rig.log.read_text().splitlines()) if "listening on" in line)
    port = int(said.partition("http://127.0.0.1:")[2].partition(",")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", S, json.dumps(body), rig.headers | {"Content-Type": "application/json"})
    response = connection.getresponse()
    return Answer(response.status, {}, response.read())


REFUSED = {
    "the root": "/",
    "the root with slashes": "///",
    "the root by dots": "/usr/..",
    "a link to the root": "{}/to-root",
    "home": "{}/home",
    "home with trailing slashes": "{}/home//",
    "home by dots": "{}/home/project/..",
    "a link to home": "{}/to-home",
    "a link to home and dots": "{}/to-home/project/../.",
    "home's parent": "{}",
    "a link to what holds home": "{}/to-above",
    "what holds everything": "/tmp",
    "/proc/self/root": "/proc/self/root",
    "a project through /proc/self/root": "/proc/self/root{}/home/project",
    "a link to /proc/self/root": "{}/to-proc",
    "another process's directory": f"/proc/{os.getpid()}/cwd",
    "a descriptor": "/dev/fd/0",
    "the state directory": "{}/state",
    "a link to the state directory": "{}/to-state",
    "a sandbox's own files": "{}/state/sandboxes",
    "the kernel and the images": "{}/assets",
    "where the tokens are": "{}/tokens",
    "where the policy is": "{}/policy",
    "the daemon's code": f"{ROOT}/sandboxd",
    "a part of the daemon's code": f"{ROOT}/sandboxd/vm",
    "what holds the daemon's code": str(ROOT),
    "the native programs": f"{ROOT}/build",
}
MOUNTED = {
    "another mount of home": "{}/around/home",
    "what holds another mount of home": "{}/around",
    "another mount of a part of the state": "{}/state-part",
    "a directory below which something is mounted": "{}/mounted",
    "a directory directly below which something is mounted": "{}/mounted/below",
}


@pytest.mark.parametrize("path", REFUSED.values(), ids=REFUSED)
def test_no_request_gets(rig: Rig, place: Path, path: str) -> None:
    answer = ask(rig, path.format(place))
    assert (answer.status, answer.code) == (403, "refused"), answer.body
    assert "is refused: " in answer.message
    assert not [one for one in rig.call("GET", S).json["sandboxes"] if one["state"] != "terminated"]


@needs_root
@pytest.mark.parametrize("path", MOUNTED.values(), ids=MOUNTED)
def test_no_request_gets_through_a_mount(rig: Rig, place: Path, path: str) -> None:
    answer = ask(rig, path.format(place))
    assert (answer.status, answer.code) == (403, "refused"), answer.body


@pytest.mark.parametrize(
    ("path", "said"),
    [
        pytest.param("home/project", "absolute", id="a relative path"),
        pytest.param("~/project", "absolute", id="a home that the client did not fill in"),
        pytest.param("", "absolute", id="no path"),
        pytest.param(None, "absolute", id="null"),
        pytest.param("{}/nowhere", "No such file", id="what is not there"),
        pytest.param("{}/broken", "No such file", id="a link that leads nowhere"),
        pytest.param("{}/file", "Not a directory", id="a file"),
        pytest.param("{}/home\0/x", "NUL", id="a NUL"),
        pytest.param(1, "host_path", id="a number"),
    ],
)
def test_what_is_no_directory_is_a_bad_request(rig: Rig, place: Path, path: object, said: str) -> None:
    answer = ask(rig, path.format(place) if isinstance(path, str) else path)
    assert (answer.status, answer.code) == (400, "invalid_request"), answer.body
    assert said in answer.message


@pytest.mark.parametrize(
    ("name", "read_only"),
    [
        pytest.param("home/project", False, id="to be written to"),
        pytest.param("home/project", True, id="only to be read"),
        pytest.param("home/to-project/", False, id="by a link and with a slash"),
        pytest.param("around/../home/project", False, id="by dots"),
    ],
)
def test_a_project_in_a_home_is_given(rig: Rig, place: Path, name: str, read_only: bool) -> None:
    (place / "home/project").chmod(0o777)
    (place / "home/project/there").write_text("x")
    answer = ask(rig, f"{place}/{name}", read_only=read_only)
    assert answer.status == 201, answer.body
    sandbox = answer.json["id"]
    given = {"host_path": f"{place}/home/project", "read_only": read_only}
    assert answer.json["bind"] == given
    ran = rig.run(sandbox, "sh", "-c", "cat there; echo y > made", cwd="/workspace")
    assert (ran.stdout, ran.exit_code == 0) == (b"x", not read_only)
    assert (place / "home/project/made").exists() is not read_only
    (place / "home/project/made").unlink(missing_ok=True)
    assert rig.call("DELETE", f"{S}/{sandbox}").status == 204
    events = rig.call("GET", f"{S}/{sandbox}/events").json["events"]
    assert [event["bind"] for event in events if event["type"] == "sandbox.created"] == [given]
    assert (place / "home/project/there").read_text() == "x"


def test_no_bundle_goes_over_a_directory_of_the_host(rig: Rig, place: Path) -> None:
    sandbox = ask(rig, f"{place}/home/project").json["id"]
    for method, path in (("POST", "workspace?branch=x"), ("GET", "workspace/bundle?base=main&branch=x")):
        answer = rig.call(method, f"{S}/{sandbox}/{path}", b"x" if method == "POST" else None)
        assert (answer.status, answer.code) == (409, "conflict"), answer.body
        assert "directory of the host" in answer.message
    rig.call("DELETE", f"{S}/{sandbox}")


@pytest.mark.parametrize(
    "path", ["/", "{}/home/project", "{}/nowhere", "relative"],
    ids=["the root", "a project", "what is not there", "a relative path"],
)  # fmt: skip
def test_over_the_network_nobody_is_told_of_a_path(rig: Rig, place: Path, path: str) -> None:
    answer = over_tcp(rig, {"bind": {"host_path": path.format(place)}})
    assert (answer.status, answer.code) == (403, "refused"), answer.body
    assert "unix socket" in answer.message and str(place) not in answer.message


def test_over_the_network_everything_else_is_taken(rig: Rig) -> None:
    answer = over_tcp(rig, {})
    assert answer.status == 201, answer.body
    assert "bind" not in answer.json
    rig.call("DELETE", f"{S}/{answer.json['id']}")


def test_a_sandbox_keeps_its_directory_when_the_daemon_is_killed(rig: Rig, place: Path) -> None:
    answer = ask(rig, f"{place}/home/project", read_only=True)
    sandbox = answer.json["id"]
    rig.kill()
    rig.start()
    assert rig.call("GET", f"{S}/{sandbox}").json["bind"] == answer.json["bind"]
    assert rig.run(sandbox, "ls", "/workspace").exit_code == 0
    rig.call("DELETE", f"{S}/{sandbox}")


def test_a_machine_that_waits_in_a_pool_is_not_taken(short_tmp: Path) -> None:
    top = short_tmp / "bind-pool"
    (top / "project").mkdir(parents=True)
    (top / "policy.yaml").write_text("allow_bind: true\npools: [{size: 1}]\n")
    with Rig(top, "--policy", str(top / "policy.yaml")) as rig:
        sandbox = rig.create(bind={"host_path": str(top / "project")})
        created = rig.call("GET", f"{S}/{sandbox}/events").json["events"][0]
        assert (created["type"], created.get("reason")) == ("sandbox.created", None)


@contextmanager
def daemon(place: Path, *flags: str, no_bind: str | None = None) -> Iterator[Rig]:
    (place / "project").mkdir(exist_ok=True)
    rig = Rig(place, *flags)
    rig.knob("no_bind", no_bind)
    with rig:
        yield rig


@pytest.mark.parametrize(
    ("flags", "no_bind", "allowed"),
    [
        pytest.param((), None, False, id="an operator who said nothing"),
        pytest.param(("--allow-bind",), None, True, id="an operator who allows it"),
        pytest.param(("--allow-bind",), "no virtiofsd\x1b[31m", False, id="a host that cannot"),
    ],
)
def test_it_is_there_where_policy_and_host_have_it(
    short_tmp: Path, request: pytest.FixtureRequest, flags: tuple[str, ...], no_bind: str | None, allowed: bool
) -> None:
    place = short_tmp / f"bind-allow-{len(flags)}-{no_bind is None}"
    place.mkdir()
    with daemon(place, *flags, no_bind=no_bind) as rig:
        offered = rig.call("GET", "/v1/capabilities").json
        assert offered["capabilities"]["bind_workspace"] is allowed
        why = "no directory can be shared here: no virtiofsd [31m" if no_bind else "it takes `sandboxd --allow-bind`"
        assert offered.get("lacking", {}).get("bind_workspace", why).startswith(why)
        assert ("bind_workspace" in offered.get("lacking", {})) is not allowed
        for path in ("/", "relative", str(place / "nowhere"), str(place / "project")):
            answer = ask(rig, path)
            if not allowed:
                assert (answer.status, answer.message) == (403, "the server's policy does not allow bind"), path
        assert (answer.status == 201) is allowed
        log = rig.log.read_text(errors="replace")
        assert ("allow_bind has no effect" in log) is (no_bind is not None)
        assert "\x1b" not in log


@needs_root
def test_root_gets_no_directory_from_somebody_elses_daemon(short_tmp: Path) -> None:
    """What is made there could not be root's."""
    ids = f"--reuid={NOBODY}", f"--regid={NOBODY}"
    tried = subprocess.run(["setpriv", *ids, "--clear-groups", sys.executable, "-c", "0"], check=False)
    if tried.returncode:
        pytest.skip(f"an ordinary user cannot run {sys.executable}")
    place = short_tmp / "bind-other"
    (place / "project").mkdir(parents=True)
    for path in (place, place / "project"):
        shutil.chown(path, NOBODY, NOBODY)
    with Rig(place, "--allow-bind", prefix=("setpriv", *ids, "--clear-groups", "env", f"HOME={place}/home")) as rig:
        answer = ask(rig, str(place / "project"))
        assert (answer.status, answer.code) == (403, "refused"), answer.body
        assert f"uid {NOBODY}" in answer.message


# -- without a daemon


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@needs_root
@pytest.mark.parametrize(
    ("mode", "given"),
    [
        pytest.param(0o755, True, id="one that may be read"),
        pytest.param(0o711, False, id="one that may be passed through"),
        pytest.param(0o700, False, id="one of somebody else's"),
    ],
)
def test_a_directory_is_opened_with_the_rights_of_who_asks(tmp_path: Path, mode: int, given: bool) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and not path.stat().st_mode & 0o001:
            path.chmod(0o711)
    (tmp_path / "project").mkdir(mode=0o755)
    (tmp_path / "project").chmod(mode)
    with as_nobody():
        if given:
            os.close(bind.open_directory(f"{tmp_path}/project", UnixPeer(NOBODY), Kept((), (), ())).fd)
        else:
            with pytest.raises(Refused, match="Permission denied"):
                bind.open_directory(f"{tmp_path}/project", UnixPeer(NOBODY), Kept((), (), ()))


@pytest.mark.parametrize("peer", [TcpPeer("127.0.0.1"), UnixPeer(os.geteuid() + 1)], ids=["the network", "another"])
def test_nobody_but_the_daemons_user_has_a_path_looked_at(peer: TcpPeer | UnixPeer) -> None:
    with pytest.raises(Refused, match="alone"):
        bind.open_directory("/nowhere/at/all", peer, Kept((), (), ()))


def test_what_is_opened_stays_the_directory_whatever_its_name_becomes(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    wanted = (tmp_path / "project").stat()
    with bind.open_directory(str(tmp_path / "project"), US, Kept((), (), ())) as directory:
        (tmp_path / "project").rename(tmp_path / "away")
        (tmp_path / "project").symlink_to("/")
        held = os.fstat(directory.fd)
        assert (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino)
        assert bind.place(directory) == str(tmp_path / "away")


def test_no_descriptor_is_left_by_a_refusal(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for path, kept in ((tmp_path, Kept((tmp_path,), (), ())), (tmp_path, Kept((), (), (tmp_path,)))):
        with pytest.raises(Refused):
            bind.open_directory(str(path), US, kept)
    with pytest.raises(InvalidRequest):
        bind.open_directory(str(tmp_path / "none"), US, Kept((), (), ()))
    assert os.listdir("/proc/self/fd") == before


def test_a_home_that_is_not_there_keeps_nothing_back(tmp_path: Path) -> None:
    gone = tmp_path / "no/home"
    (tmp_path / "project").mkdir()
    bind.open_directory(str(tmp_path / "project"), US, Kept((gone,), (gone,), (gone,))).__exit__(None, None, None)
