"""The network in flags: what `run` and `update` ask for, what `why` and `egress` say, and the commands themselves
against a server that answers as scripted."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from docopt import docopt

from cli import egress, network, update, why
from cli.network import NO_NETWORK, Wanted
from sandboxd.client import Capabilities, Egress, EgressName, Event, Network, NetworkRequest, Sandbox
from sandboxd.errors import SandboxError
from tests.cli.person import Done, Person
from tests.cli.rawserver import ReadRequest, Step, serving
from tests.daemon import Daemon

SERVERS = Network("allowlist", ("pypi.test", "*.npm.test"), (), ("git.test:22",))


NEED_A_NETWORK = (
    "--network=open", "--network=allowlist", "--allow=a", "--allow-tcp=a:1", "--no-baseline",
)  # fmt: skip


def offering(default: Network = SERVERS, ceiling: str = "open") -> Capabilities:
    return Capabilities("1", "qemu", {}, {}, default, ceiling, ("*",), ("*",))


def wanted(*flags: str, command: str = "run") -> Wanted:
    tail = ("--", "x") if command == "run" else ("box",)
    usage = str(import_module(f"cli.{command}").__doc__)
    return network.wanted(dict(docopt(usage, argv=[command, *flags, *tail])))


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        pytest.param((), None, id="nothing: the server's"),
        pytest.param(("--network=none",), {"mode": "none"}, id="no network"),
        pytest.param(("--network=none", "--deny=a"), {"mode": "none"}, id="nothing to deny without a network"),
        pytest.param(("--network=open",), {"mode": "open"}, id="open"),
        pytest.param(("--network=default", "--deny=a"), {"mode": "open", "deny": ("a",)}, id="open's other name"),
        pytest.param(("--deny=a", "--deny=b"), {"deny": ("a", "b")}, id="deny alone leaves the rest to the server"),
        pytest.param(
            ("--allow=a", "--allow=b", "--allow=pypi.test"),
            {"mode": "allowlist", "allow": ("pypi.test", "*.npm.test", "a", "b"), "allow_tcp": ("git.test:22",)},
            id="allow adds to the server's",
        ),
        pytest.param(
            ("--allow-tcp=h:22", "--deny=d"),
            {"mode": "allowlist", "allow": SERVERS.allow, "deny": ("d",), "allow_tcp": ("git.test:22", "h:22")},
            id="another port adds to the server's",
        ),
        pytest.param(
            ("--network=allowlist",), {"mode": "allowlist", "allow": SERVERS.allow, "allow_tcp": SERVERS.allow_tcp},
            id="an allowlist of the server's names",
        ),
        pytest.param(
            ("--no-baseline", "--allow=a"), {"mode": "allowlist", "allow": ("a",), "allow_tcp": ()}, id="only mine"
        ),
        pytest.param(
            ("--no-baseline", "--allow-tcp=h:22"), {"mode": "allowlist", "allow": (), "allow_tcp": ("h:22",)},
            id="only another port",
        ),
    ],
)  # fmt: skip
def test_what_a_run_asks_for(flags: tuple[str, ...], asked: dict[str, Any] | None) -> None:
    request = network.of_run(wanted(*flags), offering())
    assert (request and request.body()) == asked


@pytest.mark.parametrize(
    ("flags", "offer", "said"),
    [
        (("--no-baseline",), offering(), "no name in it: --no-baseline leaves the server's names out"),
        (("--network=allowlist",), offering(Network("open")), "this sandboxd's own list is empty"),
        *(((flag,), offering(Network("none"), "none"), NO_NETWORK) for flag in NEED_A_NETWORK),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_run_cannot_ask_for(flags: tuple[str, ...], offer: Capabilities, said: str) -> None:
    with pytest.raises(SandboxError) as refused:
        network.of_run(wanted(*flags), offer)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "settings", "asked"),
    [
        pytest.param((), Wanted("none"), Wanted("none"), id="a file may close it"),
        pytest.param((), Wanted("open", allow=("a",), deny=("d",)), Wanted("open", deny=("d",)), id="or open it"),
        pytest.param((), Wanted(allow=("a",)), Wanted(allow=("a",)), id="or name hosts"),
        pytest.param(("--allow=b",), Wanted(allow=("a",)), Wanted(allow=("a", "b")), id="a flag adds to them"),
        pytest.param(
            ("--allow=b",), Wanted("open", allow=("a",)), Wanted("allowlist", allow=("a", "b")),
            id="a named host means an allowlist",
        ),
        pytest.param(
            ("--allow-tcp=b:1",), Wanted("open"), Wanted("allowlist", allow_tcp=("b:1",)), id="a service likewise"
        ),
        pytest.param(
            ("--no-baseline",), Wanted("open", allow=("a",)), Wanted("allowlist", allow=("a",), baseline=False),
            id="and so does leaving out the server's names",
        ),
        pytest.param(("--network=open",), Wanted("none"), Wanted("open"), id="the flag comes last"),
        pytest.param(("--network=none",), Wanted("open", allow=("a",), deny=("d",)), Wanted("none"), id="either way"),
        pytest.param(
            ("--network=allowlist", "--allow=b"), Wanted("none", allow=("a",)), Wanted("allowlist", allow=("a", "b")),
            id="what was closed can be opened on purpose",
        ),
        pytest.param(("--deny=e",), Wanted(deny=("d",)), Wanted(deny=("d", "e")), id="what is denied adds up"),
        pytest.param(
            ("--network=allowlist",), Wanted(baseline=False, allow=("a",)),
            Wanted("allowlist", baseline=False, allow=("a",)), id="no flag brings the server's names back",
        ),
    ],
)  # fmt: skip
def test_flags_over_settings(flags: tuple[str, ...], settings: Wanted, asked: Wanted) -> None:
    assert network.over(wanted(*flags), settings) == asked


@pytest.mark.parametrize("flag", ["--allow=a", "--allow-tcp=a:1", "--no-baseline"])
def test_a_name_opens_no_network_that_a_file_closed(flag: str) -> None:
    with pytest.raises(SandboxError, match=r"/f: network.mode is none, .*: add --network allowlist"):
        network.over(wanted(flag), Wanted("none"), "/f")


def test_no_network_can_be_asked_for_where_there_is_none() -> None:
    assert network.of_run(wanted("--network=none"), offering(Network("none"), "none")) == NetworkRequest("none")
    assert network.of_run(wanted("--deny=a"), offering(Network("none"), "none")) is None


@pytest.mark.parametrize("flag", ["--allow=a", "--deny=a", "--allow-tcp=a:1"])
def test_an_update_where_there_is_no_network(flag: str) -> None:
    with pytest.raises(SandboxError, match="gives sandboxes no network"):
        network.of_update(wanted(flag, command="update"), Network("none"), offering(Network("none"), "none"))


@pytest.mark.parametrize(
    "service", ["h", "h:", ":22", "h:0", "h:65536", "h:x", "h:22:1", "http://h:80", "h :22", "h:²"]
)
def test_what_is_no_service(service: str) -> None:
    with pytest.raises(SandboxError, match="it is HOST:PORT"):
        wanted(f"--allow-tcp={service}")


@pytest.mark.parametrize("mode", ["none", "open", "default"])
@pytest.mark.parametrize("flag", ["--allow=a", "--allow-tcp=a:1", "--no-baseline"])
def test_lists_go_with_an_allowlist(mode: str, flag: str) -> None:
    with pytest.raises(SandboxError, match="goes with --network allowlist"):
        wanted(f"--network={mode}", flag)


MINE = Network("allowlist", ("pypi.test", "mine.test"), ("bad.test",), ("db.test:5432",))


@pytest.mark.parametrize(
    ("now", "flags", "asked"),
    [
        pytest.param(
            MINE, ("--allow=new.test",),
            {"mode": "allowlist", "allow": ("pypi.test", "mine.test", "new.test"), "deny": ("bad.test",),
             "allow_tcp": ("db.test:5432",)},
            id="allow adds to what it has",
        ),
        pytest.param(
            MINE, ("--deny=mine.test", "--allow-tcp=h:22"),
            {"mode": "allowlist", "allow": MINE.allow, "deny": ("bad.test", "mine.test"),
             "allow_tcp": ("db.test:5432", "h:22")},
            id="deny and another port too",
        ),
        pytest.param(
            MINE, ("--network=allowlist", "--allow=a"),
            {"mode": "allowlist", "allow": ("pypi.test", "*.npm.test", "a"), "allow_tcp": ("git.test:22",)},
            id="a mode starts from the server's names",
        ),
        pytest.param(
            MINE, ("--no-baseline", "--allow=a"), {"mode": "allowlist", "allow": ("a",), "allow_tcp": ()},
            id="without the baseline from none",
        ),
        pytest.param(MINE, ("--network=none",), {"mode": "none"}, id="off"),
        pytest.param(
            Network("open", None, ("bad.test",)), ("--deny=a",), {"mode": "open", "deny": ("bad.test", "a")},
            id="deny in an open one",
        ),
        pytest.param(
            Network("none"), ("--allow=a",), {"mode": "allowlist", "allow": ("a",), "deny": (), "allow_tcp": ()},
            id="none to more: the server's to refuse",
        ),
    ],
)  # fmt: skip
def test_what_an_update_asks_for(now: Network, flags: tuple[str, ...], asked: dict[str, Any]) -> None:
    request = network.of_update(wanted(*flags, command="update"), now, offering())
    assert request is not None
    assert request.body() == asked


def test_an_open_network_is_not_narrowed_by_the_way() -> None:
    with pytest.raises(SandboxError, match="only with --network allowlist"):
        network.of_update(wanted("--allow=a", command="update"), Network("open"), offering())


@pytest.mark.parametrize(
    ("given", "removed", "labels"),
    [
        ((), (), {"a": "1", "b-": "2"}),
        (("a=3", "c="), (), {"a": "3", "b-": "2", "c": ""}),
        (("a-",), ("b-",), {}),
        (("b--", "x-"), ("a",), {}),
        (("a=1-",), ("a",), {"a": "1-", "b-": "2"}),
    ],
    ids=str,
)
def test_labels_that_change(given: tuple[str, ...], removed: tuple[str, ...], labels: dict[str, str]) -> None:
    assert update.labelled({"a": "1", "b-": "2"}, *update.label_changes(given, removed)) == labels


BOX = Sandbox("sbx_1", "box", "running", "i", 1, 1, 1, (), SERVERS, "2026-01-01T00:00:00Z", 0, {})
EVENT = Event(
    "2026-01-02T03:04:05Z", "egress.denied", "sbx_1", "abcdefgh", "x.test", 443, "not-listed", "tls", 3,
    "x.test is not on the list.", "--allow x.test", 0, 0,
)  # fmt: skip
TOLD = [
    "x.test:443 was refused, 3 times",
    "  sandbox  box",
    "  last at  2026-01-02T03:04:05Z",
    "  seen in  a TLS handshake (the server name in the ClientHello)",
    "  rule     not-listed",
    "  because  x.test is not on the list.",
]
RUN = ["to allow it in a run:", "  sandbox-cli run --allow x.test -- CMD"]


@pytest.mark.parametrize(
    ("event", "sandbox", "last"),
    [
        pytest.param(
            EVENT, BOX,
            [*TOLD, "to allow it now, in this sandbox:", "  sandbox-cli update --allow x.test box", *RUN],
            id="in a sandbox that runs",
        ),
        pytest.param(EVENT, None, [TOLD[0], "  sandbox  sbx_1", *TOLD[2:], *RUN], id="in one that is gone"),
        pytest.param(
            EVENT._replace(port=0, by="dns"), None,
            ["x.test was refused, 3 times", "  sandbox  sbx_1", TOLD[2], "  seen in  a query for its address",
             *TOLD[4:], *RUN, "that is for the web; for another port:", "  --allow-tcp x.test:PORT"],
            id="by a query, which says no port",
        ),
        pytest.param(EVENT, BOX._replace(network=Network("none")), [*TOLD, *RUN], id="in one without a network"),
        pytest.param(EVENT._replace(remedy=""), BOX, [*TOLD, "no flag allows it"], id="nothing allows it"),
        pytest.param(
            EVENT._replace(name="", port=0, count=1, why="", by="quic", remedy=""), BOX,
            ["what named no host was refused", TOLD[1], "  at       2026-01-02T03:04:05Z", "  seen in  quic",
             TOLD[4], "no flag allows it"],
            id="without a name",
        ),
        pytest.param(
            EVENT._replace(name="", port=80, rule="address", remedy=""), None,
            ["what named no host, on port 80, was refused, 3 times", "  sandbox  sbx_1", *TOLD[2:4],
             "  rule     address", TOLD[5], "no flag allows it"],
            id="by an address",
        ),
        pytest.param(
            EVENT._replace(
                type="egress.allowed", rule="allow x.test", count=1, why="", remedy="", bytes_in=2048, bytes_out=7
            ),
            BOX,
            ["x.test:443 was allowed", TOLD[1], "  at       2026-01-02T03:04:05Z", TOLD[3], "  rule     allow x.test",
             "  bytes    2.0 KiB in, 7 B out"],
            id="allowed",
        ),
    ],
)  # fmt: skip
def test_why(event: Event, sandbox: Sandbox | None, last: list[str]) -> None:
    assert list(why.explained(event, sandbox, None)) == last


def test_why_knows_what_was_changed_since() -> None:
    def told(network: Network, event: Event = EVENT) -> list[str]:
        return list(why.explained(event, BOX._replace(network=network), None))[-3:]

    run = ["to allow it in a run:", "  sandbox-cli run --allow x.test -- CMD"]
    allowed = ["it is allowed in this sandbox since", *run]
    assert told(SERVERS._replace(mode="allowlist", allow=("x.test",))) == allowed
    assert told(Network("open", None, (), ())) == allowed
    denied = Network("allowlist", ("x.test",), ("*.test",), ())
    assert told(denied) == ["this sandbox's deny list names it since, and beats what is allowed", *run]
    ssh = EVENT._replace(port=22, remedy="--allow-tcp x.test:22")
    assert told(Network("allowlist", (), (), ("x.test:22",)), ssh)[0] == allowed[0]


def test_no_flag_for_what_is_denied_or_has_no_network() -> None:
    names = (name("a.test", 443), name("b.test", 443))
    found = Egress("allowlist", (), ("a.test",), (), names)
    assert egress.allowing(found) == ["--allow", "b.test"]
    assert egress.allowing(found._replace(mode="none")) == []


def test_what_can_be_pasted_is_quoted_and_meant_for_the_same_daemon() -> None:
    lines = list(why.explained(EVENT._replace(remedy="--allow $(reboot);x"), BOX, "unix:///a b"))
    assert lines[-1] == "  sandbox-cli run --context='unix:///a b' --allow '$(reboot);x' -- CMD"
    assert lines[-3] == "  sandbox-cli update --context='unix:///a b' --allow '$(reboot);x' box"


def name(text: str, port: int, rule: str = "not-listed", by: str = "tls", decision: str = "denied") -> EgressName:
    return EgressName("abcdefgh", text, port, decision, rule, by, 1, 0, 0, 0, "", "")


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param([name("a", 443, decision="allowed")], "", id="what was allowed"),
        pytest.param(
            [name("a", 443), name("a", 80, by="http"), name("b", 0, by="dns")], "--allow a --allow b", id="once"
        ),
        pytest.param([name("h", 22, "port"), name("h", 53, by="dns")], "--allow h --allow-tcp h:22", id="another port"),
        pytest.param(
            [name("a", 443, rule) for rule in ("deny-list", "private-address", "malformed", "mode-none")]
            + [name("", 443, "no-name"), name("", 443)], "", id="what no flag allows",
        ),
        pytest.param(
            [name("pypi.test", 443), name("deep.npm.test", 443), name("npm.test", 443), name("git.test", 22, "port")],
            "--allow npm.test", id="what has been allowed since",
        ),
        pytest.param([name("$(x)", 443)], "--allow '$(x)'", id="quoted"),
    ],
)  # fmt: skip
def test_flags_for_what_was_refused(tmp_path: Path, names: list[EgressName], flags: str) -> None:
    raw = {**SERVERS._asdict(), "names": [one._asdict() for one in names]}
    done = asked(tmp_path, "egress", "box", "--json", answers=[raw])
    assert json.loads(done.stdout)["flags"] == flags
    last = asked(tmp_path, "egress", "box", answers=[raw]).stdout.decode().splitlines()[-1]
    assert (last == flags) is bool(flags)


def test_egress_as_a_table() -> None:
    assert egress.network(Egress(*SERVERS, ())) == [
        ("network", ("allowlist",)), ("allow", SERVERS.allow), ("allow-tcp", SERVERS.allow_tcp),
    ]  # fmt: skip
    assert egress.network(Egress("none", None, (), (), ())) == [("network", ("none",))]
    one = name("x.test", 443)._replace(connections=2, bytes_in=10, bytes_out=2048, last_at="2026-01-02T03:04:05.678Z")
    assert egress.row(one) == (
        "abcdefgh", "x.test", "443", "denied", "not-listed", "tls", "1", "2", "10 B", "2.0 KiB", "2026-01-02T03:04:05Z",
    )  # fmt: skip


def asked(tmp_path: Path, *args: str, answers: list[dict[str, Any]], status: str = "200 OK") -> Done:
    """The command's end against a server that gives these answers, one to a request."""
    done, _ = talked(tmp_path, *args, answers=answers, status=status)
    return done


def talked(
    tmp_path: Path, *args: str, answers: list[dict[str, Any]], status: str = "200 OK"
) -> tuple[Done, list[tuple[str, Any]]]:
    scripts: list[list[Step]] = [[]]  # the first connection only looks who serves
    for answer in answers:
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(body))
        scripts.append([ReadRequest(), head, body])
    path = tmp_path / "s"
    path.unlink(missing_ok=True)
    with serving(path, *scripts) as server:
        done = Person(tmp_path, path).run(*args)
        requests = []
        for seen in server.seen[1 : len(answers) + 1]:
            head, _, body = bytes(seen).partition(b"\r\n\r\n")
            line = head.split(b"\r\n")[0].decode().rpartition(" ")[0]
            requests.append((line, json.loads(body) if body else None))
    return done, requests


OFFER = {"network": {"default": SERVERS._asdict(), "ceiling": "open", "may_allow": ["*"]}, "capabilities": {}}
SANDBOX = {**BOX._asdict(), "network": MINE._asdict(), "labels": {"a": "1"}}


def test_update_on_the_wire(tmp_path: Path) -> None:
    done, requests = talked(
        tmp_path, "update", "box", "--allow=new.test", "--name=", "--label=b=2", "--idle=0",
        answers=[SANDBOX, OFFER, SANDBOX],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"box: network allowlist (3)\n"), done.stderr
    assert [line for line, _ in requests] == [
        "GET /v1/sandboxes/box", "GET /v1/capabilities", "PATCH /v1/sandboxes/sbx_1",
    ]  # fmt: skip
    assert requests[-1][1] == {
        "name": "", "labels": {"a": "1", "b": "2"}, "idle_timeout_secs": 0,
        "network": {
            "mode": "allowlist", "allow": ["pypi.test", "mine.test", "new.test"], "deny": ["bad.test"],
            "allow_tcp": ["db.test:5432"],
        },
    }  # fmt: skip


def test_update_leaves_out_what_is_not_named(tmp_path: Path) -> None:
    done, requests = talked(tmp_path, "update", "box", "--unlabel=a", "--json", answers=[SANDBOX, SANDBOX])
    assert json.loads(done.stdout)["network"]["allow_tcp"] == ["db.test:5432"]
    assert [body for _, body in requests] == [None, {"labels": {}}]


def test_why_by_its_id(tmp_path: Path) -> None:
    done, requests = talked(tmp_path, "why", "abcdefgh", answers=[EVENT._asdict(), SANDBOX])
    assert done.stdout.decode().splitlines()[-1] == "  sandbox-cli run --allow x.test -- CMD"
    assert [line for line, _ in requests] == ["GET /v1/events/abcdefgh", "GET /v1/sandboxes/sbx_1"]
    as_json = asked(tmp_path, "why", "abcdefgh", "--json", answers=[EVENT._asdict()])
    assert json.loads(as_json.stdout) == EVENT._asdict()


def test_an_id_that_nobody_knows(tmp_path: Path) -> None:
    gone = asked(
        tmp_path, "why", "a\x1b[2J", answers=[{"error": {"code": "not_found", "message": "no"}}], status="404 X"
    )
    assert gone.returncode == 1
    assert gone.stderr == b"sandbox-cli: no decision has the id a [2J: it is another sandboxd's, or no longer kept\n"


GUEST = "getent hosts refused.example || echo none; ls /sys/class/net | tr '\\n' ' '"


@pytest.mark.vm
def test_from_a_refusal_to_what_allows_it_in_a_real_sandbox(daemon: Daemon) -> None:
    """Nothing outside is needed: an allowed name is answered with an address of the sandbox's own."""
    if daemon.client.capabilities().network_ceiling == "none":
        pytest.skip("this sandboxd gives sandboxes no network: it is not root's")
    made = daemon.cli("run", "--no-workspace", "--name=asks", "--allow-tcp=git.example:22", "-d", "--", "sleep", "300")
    assert made.returncode == 0, made.stderr
    look = ("exec", "asks", "--", "sh", "-c", GUEST)
    assert daemon.cli(*look).stdout == b"none\neth0 lo "
    found = json.loads(daemon.cli("egress", "asks", "--json").stdout)
    assert (found["mode"], found["allow_tcp"]) == ("allowlist", ["git.example:22"])
    assert found["flags"] == "--allow refused.example"
    [one] = found["names"]
    why = daemon.cli("why", one["id"]).stdout.decode().splitlines()
    assert why[0].startswith("refused.example was refused")
    command = why[why.index("to allow it now, in this sandbox:") + 1].split()
    assert command == ["sandbox-cli", "update", "--allow", "refused.example", "asks"]
    assert daemon.cli(*command[1:]).returncode == 0
    assert daemon.cli(*look).stdout.startswith(b"198.18.")
    assert json.loads(daemon.cli("egress", "asks", "--json").stdout)["flags"] == ""
    # What is left of the server's own names after an update that adds, and after one that starts anew.
    baseline = daemon.client.capabilities().network_default.allow or ()
    assert set(daemon.client.get("asks").network.allow or ()) == {*baseline, "refused.example"}
    assert daemon.cli("update", "asks", "--no-baseline", "--allow=only.example").returncode == 0
    assert daemon.client.get("asks").network == Network("allowlist", ("only.example",))
    assert daemon.cli(*look).stdout.startswith(b"none")
    assert daemon.cli("update", "asks", "--network=none").stdout == b"asks: network none\n"
    again = daemon.cli("update", "asks", "--allow=only.example")
    assert (again.returncode, b"has no network and cannot be given one" in again.stderr) == (1, True)
    assert daemon.cli("kill", "asks").returncode == 0
    assert json.loads(daemon.cli("why", one["id"], "--json").stdout)["name"] == "refused.example"
