"""doctor's order of things, with a server that stands in for one: what is started is ended, what failed is said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cli import doctor
from sandboxd.client import (
    Capabilities,
    Client,
    Create,
    Egress,
    EgressName,
    Endpoint,
    Network,
    Node,
    Output,
    Process,
    Resources,
    RunResult,
    Sandbox,
)
from sandboxd.errors import Internal, NotFound
from tests.daemon import Daemon

REFUSED = {check: ["refused", "at once"] for check in ("denied name", "raw address", "outside DNS", "UDP/443")}
NONE = Capabilities("1", "qemu", {}, {}, Network("none"), "none", ())
# A name that this machine can reach is not to be counted on in a test; the verdict on it is a table of its own.
SOME = NONE._replace(
    capabilities={"egress_allowlist": True}, network_default=Network("allowlist", ("nobody.invalid",)),
    network_ceiling="allowlist",
)  # fmt: skip
UNTRIED = "not tested: no name of the server's list can be reached from this machine"


class Server(Client):
    """Its machines say what the test wants them to have seen."""

    def __init__(self, seen: dict[str, Any], heard: str = '{"another sandbox": ["refused", "nobody came"]}') -> None:
        super().__init__("/nowhere")
        self.seen, self.heard = seen, heard
        self.asked: list[Create] = []
        self.alive: set[str] = set()
        self.room = True

    def create(self, asked: Create) -> Sandbox:
        self.asked.append(asked)
        if not self.room and (asked.labels or {})["doctor"] == "neighbour":
            raise Internal("no room")
        self.alive.add(f"sbx_{len(self.asked)}")
        network = Network(*asked.network[:2]) if asked.network else Network("none")  # type: ignore[arg-type]
        return Sandbox(f"sbx_{len(self.asked)}", "", "running", "", 1, 1, 1, (), network, "", 0, {})

    def delete(self, ref: str) -> None:
        self.alive.remove(ref)

    def run(self, ref: str, argv: Sequence[str], **_: Any) -> RunResult:
        return RunResult(0, b"6.1.0\n" if argv[0] == "uname" else json.dumps(self.seen).encode(), b"", False, False)

    def start(self, ref: str, argv: Sequence[str], **_: Any) -> Process:
        return Process(7, False, tuple(argv), "running", None, "")

    def write_stdin(self, ref: str, pid: int, data: bytes, *, close: bool = False) -> None:
        assert (pid, data, close) == (7, b"", True)

    def output(self, ref: str, pid: int) -> Iterator[Output]:
        yield Output("stdout", b"ready\n" + self.heard.encode() + b"\n", None)
        yield Output("", b"", 0)

    def egress(self, ref: str) -> Egress:
        one = EgressName("abcdefgh", "nobody.invalid", 443, "denied", "unresolved", "tls", 1, 0, 0, 0, "", "")
        return Egress("allowlist", (), (), (), (one,))


def report(server: Server, found: Capabilities) -> tuple[int, dict[str, Any]]:
    facts = doctor.Report(quiet=True)
    for part, fact in doctor.probe(server, found):
        facts.add(part, fact)
    code = facts.end()
    assert server.alive == set()
    return code, facts.found


def test_without_a_network_one_machine_is_tried() -> None:
    server = Server({})
    code, found = report(server, NONE)
    assert (code, found["network"]) == (0, {"trial": "not tested: this sandboxd gives sandboxes no network"})
    assert [one.network for one in server.asked] == [None]


def test_with_one_two_are_and_each_line_says_what_became_of_it() -> None:
    server = Server(REFUSED)
    code, found = report(server, SOME)
    assert code == 0, found
    assert found["network"] == {
        "allowed name": UNTRIED, "denied name": "refused: example.com: at once", "raw address": "refused: at once",
        "outside DNS": "refused: at once", "UDP/443": "refused: at once", "another sandbox": "refused: nobody came",
    }  # fmt: skip
    assert [one.network and one.network.allow for one in server.asked] == [("nobody.invalid",)] * 2


@pytest.mark.parametrize("check", REFUSED)
def test_one_that_got_through_fails_the_whole(check: str) -> None:
    code, found = report(Server({**REFUSED, check: ["open", "hello"]}), SOME)
    assert code == 1
    assert found["network"][check].startswith("FAILED: ")
    assert found["error"] == f"a sandbox's network is not what it should be: {check}"


def test_a_neighbour_that_heard_something_fails_the_whole() -> None:
    code, found = report(Server(REFUSED, '{"another sandbox": ["open", "1 came that should not"]}'), SOME)
    assert (code, found["network"]["another sandbox"]) == (1, "FAILED: 1 came that should not")


def test_a_second_machine_that_cannot_be_had_is_said() -> None:
    server = Server(REFUSED)
    server.room = False
    code, found = report(server, SOME)
    assert (code, found["network"]["another sandbox"]) == (0, "not tested: no room")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (Endpoint.of("unix:///run/x.sock"), {"socket": "/run/x.sock", "token": "none: the socket is its owner's"}),
        (Endpoint.of("unix:///run/x.sock", token_file="/t"), {"socket": "/run/x.sock", "token": "the one in /t"}),
        (
            Endpoint.of("http://127.0.0.1:8443", token_file="/t"),
            {
                "address": "http://127.0.0.1:8443", "transport": "no TLS: loopback of this machine",
                "token": "the one in /t",
            },
        ),
        (
            Endpoint.of("https://build.test:8443", token_file="/t", cert_file="/c", key_file="/k"),
            {
                "address": "https://build.test:8443", "transport": "TLS, with a certificate of ours",
                "token": "the one in /t",
            },
        ),
    ],
    ids=["a socket", "a socket that wants a token", "a loopback port", "another machine"],
)  # fmt: skip
def test_how_it_is_reached(endpoint: Endpoint, said: dict[str, str]) -> None:
    assert dict(doctor.link(endpoint)) == said


def test_why_a_profile_cannot_be_had_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    facts = doctor.Report(quiet=False)
    facts.deliver("prod", doctor.undeliverable("prod", NONE))
    assert facts.end() == 1
    out, err = capfd.readouterr()
    assert (out + err).count("ceiling is none") == 1 and "profile prod" in err.splitlines()[-1]


def test_what_it_does_not_give_is_said_with_the_reason() -> None:
    assert "without" not in dict(doctor.offer(SOME))
    lacking = {"images": "let root run: apt-get install -y umoci", "bind_workspace": "it takes a flag"}
    said = dict(doctor.offer(SOME._replace(lacking=lacking)))["without"]
    assert said == ["bind_workspace: it takes a flag", "images: let root run: apt-get install -y umoci"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [(None, ["one two three four"]), (35, ["one two three", "four"]), (10, ["one two three", "four"])],
    ids=["no terminal", "narrow", "narrower than the names of facts"],
)
def test_long_facts_are_broken_between_words(
    width: int | None, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.show, "columns", lambda: width)
    assert list(doctor.fitted(["one two three four"])) == lines


class Machine(Client):
    def __init__(self, node: Node | None) -> None:
        super().__init__("/nowhere")
        self._node = node

    def node(self) -> Node:
        if self._node is None:
            raise NotFound("no such endpoint")
        return self._node


def test_what_its_machine_has() -> None:
    has, left = Resources(1.5, 4096, 100), Resources(0.5, 1024, 50)
    idle = Node("", "1", NONE, has, left, 2, {}, ("sandbox-base",), {}, False)
    said = {
        "version": "1", "capacity": "1.5 cpus, 4096 MiB of memory, 100 MiB of disk",
        "free": "0.5 cpus, 1024 MiB of memory, 50 MiB of disk", "running": "2", "its images": ["sandbox-base"],
    }  # fmt: skip
    assert dict(doctor.machine(Machine(idle))) == said
    busy = idle._replace(cordoned=True, pooled={"b": 2, "a": 0})
    more = {"cordoned": "it takes no new sandboxes", "waiting": {"a": 0, "b": 2}}
    assert dict(doctor.machine(Machine(busy))) == said | more
    assert dict(doctor.machine(Machine(None))) == {}


@pytest.mark.vm
def test_in_real_machines(daemon: Daemon) -> None:
    done = daemon.cli("doctor", "--json", timeout_s=280)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    if daemon.client.capabilities().network_ceiling == "none":
        assert found["network"] == {"trial": "not tested: this sandboxd gives sandboxes no network"}
        pytest.skip("this sandboxd gives sandboxes no network: it is not root's")
    words = {check: text.partition(":")[0] for check, text in found["network"].items()}
    assert words.pop("allowed name") in ("passed", "not tested")
    assert words == dict.fromkeys([*REFUSED, "another sandbox"], "refused")
