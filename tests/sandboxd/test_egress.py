"""Networks as the API gives, changes, takes back and reports them. What would enforce them is a stand-in."""

from __future__ import annotations

import json
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sandboxd.client import Client, NetworkRequest
from sandboxd.errors import Conflict, NotFound, Refused
from sandboxd.policy import BASELINE
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig

S = "/v1/sandboxes"
LIST = sorted({*BASELINE, "registry.test"})
POLICY = """
network:
  ceiling: open
  default: {allow: [a.test, b.test], deny: [bad.test], allow_tcp: ['git.test:22']}
  may_allow: ['*.wide.test']
  may_allow_tcp: ['*.wide.test:5432']
  private: [home.test]
"""


def start(place: Path) -> Rig:
    """A daemon with a network and an operator's policy."""
    if reason := why_not():
        pytest.skip(reason)
    (place / "policy.yaml").write_text(POLICY)
    return Rig(place, "--network", "--policy", str(place / "policy.yaml"))


@pytest.fixture
def net(place: Path) -> Iterator[Rig]:
    """One for a test that restarts it."""
    with start(place) as rig:
        yield rig


@pytest.fixture(scope="module")
def _running() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name, start(Path(name)) as rig:
        rig.create(name="warm")
        rig.call("DELETE", f"{S}/warm")
        yield rig


@pytest.fixture
def shared(_running: Rig) -> Iterator[Rig]:
    """One that tests share, and leave as they found it."""
    (_running.directory / "net" / "calls").write_text("")
    yield _running
    for knob in _running.knobs.iterdir():
        knob.unlink()
    for sandbox in _running.call("GET", S).json["sandboxes"]:
        if sandbox["state"] != "terminated":
            _running.call("DELETE", f"{S}/{sandbox['id']}")
    assert links(_running) == []


def told(rig: Rig, ref: str) -> dict[str, Any]:
    """What egress was told of a sandbox last."""
    sandbox_id = rig.call("GET", f"{S}/{ref}").json["id"]
    said: dict[str, Any] = json.loads((rig.directory / "net" / f"{sandbox_id}.json").read_text())
    return said


def links(rig: Rig) -> list[str]:
    return [path.stem for path in (rig.directory / "net").glob("*.json")]


def calls(rig: Rig) -> list[str]:
    return (rig.directory / "net" / "calls").read_text().splitlines()


def until(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def event(**fields: Any) -> dict[str, Any]:
    return {
        "number": 1, "at": 1700000000.5, "kind": "denied", "sandbox": "", "id": "abcdefg2", "name": "x.wide.test",
        "port": 443, "rule": "not-listed", "by": "tls", "why": "x.wide.test is not listed.", "count": 1, "up_bytes": 0,
        "down_bytes": 0, "connections": 0,
    } | fields  # fmt: skip


def tell(rig: Rig, *events: dict[str, Any]) -> None:
    (rig.knobs / "events.new").write_text(json.dumps(events))
    (rig.knobs / "events.new").rename(rig.knobs / "events")
    until("the events are taken", lambda: not (rig.knobs / "events").exists())


# -- what is offered


def test_the_built_in_policy_is_offered_where_there_is_a_network(place: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Rig(place, "--network") as rig:
        said = rig.call("GET", "/v1/capabilities").json
        assert said["network"] == {
            "default": {"mode": "allowlist", "allow": LIST}, "ceiling": "allowlist", "may_allow": ["*"],
            "may_allow_tcp": ["*"],
        }  # fmt: skip
        have = {name for name, there in said["capabilities"].items() if there}
        assert have >= {"network_policy_update", "egress_allowlist", "egress_open", "egress_tcp"}
        assert "network ceiling allowlist (built-in policy)" in rig.log.read_text()
        assert rig.call("POST", S, {"network": {"mode": "open"}}).code == "refused"
        rig.create(name="a")
        assert told(rig, "a") == {
            "mode": "allowlist", "allow": LIST, "deny": [], "allow_tcp": [], "private": ["registry.test"],
        }  # fmt: skip


def test_without_a_network_it_is_said_and_nothing_above_none_is_given(rig: Rig, box: str) -> None:
    said = rig.call("GET", "/v1/capabilities").json
    assert not any(said["capabilities"][name] for name in ("network_policy_update", "egress_allowlist", "egress_tcp"))
    assert said["lacking"]["egress_allowlist"] == "a stand-in without one"
    assert "network ceiling none (a stand-in without one)" in rig.log.read_text()
    assert rig.call("PATCH", f"{S}/{box}", {"network": {"mode": "none"}}).code == "unsupported"
    assert rig.call("GET", f"{S}/{box}/egress").json == {"mode": "none", "allow": None, "names": []}
    assert rig.call("GET", "/v1/events/abcdefg2").code == "not_found"


def test_a_policy_that_is_not_in_order_stops_the_start(place: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (place / "policy.yaml").write_text("network: {ceiling: all}\n")
    rig = Rig(place, "--network", "--policy", str(place / "policy.yaml"))
    with pytest.raises(AssertionError, match=r"network\.ceiling: it must be one of none, allowlist, open"):
        rig.start()


# -- given


@pytest.mark.parametrize(
    ("asked", "network"),
    [
        pytest.param(
            {},
            {"mode": "allowlist", "allow": ["a.test", "b.test"], "deny": ["bad.test"], "allow_tcp": ["git.test:22"]},
            id="the operator's default",
        ),
        pytest.param(
            {"network": {"allow": ["B.Test."], "allow_tcp": [], "deny": ["c.test"]}},
            {"mode": "allowlist", "allow": ["b.test"], "deny": ["bad.test", "c.test"]}, id="less than it",
        ),
        pytest.param(
            {"network": {"allow": ["x.wide.test"], "allow_tcp": ["db.wide.test:5432"]}},
            {
                "mode": "allowlist", "allow": ["x.wide.test"], "deny": ["bad.test"],
                "allow_tcp": ["db.wide.test:5432"],
            },
            id="what may be allowed",
        ),
        pytest.param(
            {"network": {"mode": "open"}}, {"mode": "open", "allow": None, "deny": ["bad.test"]}, id="open",
        ),
    ],
)  # fmt: skip
def test_a_network_is_made_before_the_machine_and_goes_with_it(
    shared: Rig, asked: dict[str, Any], network: dict[str, Any]
) -> None:
    ref = shared.create(**asked)
    assert shared.call("GET", f"{S}/{ref}").json["network"] == network
    assert told(shared, ref) == {"allow": [], "deny": [], "allow_tcp": []} | network | {
        "allow": network["allow"] or [], "private": ["home.test", "registry.test"],
    }  # fmt: skip
    assert links(shared) == [ref] and shared.run(ref, "true").exit_code == 0
    names = shared.state / "sandboxes" / ref / "names"
    assert stat.S_IMODE(names.stat().st_mode) == 0o600
    assert shared.call("DELETE", f"{S}/{ref}").status == 204
    assert links(shared) == [] and calls(shared) == [f"open {ref} {network['mode']}", f"close {ref}"]
    assert shared.descriptors() < 40


def test_none_has_no_link(shared: Rig) -> None:
    ref = shared.create(network={"mode": "none"})
    assert links(shared) == [] and shared.run(ref, "true").exit_code == 0
    answer = shared.call("PATCH", f"{S}/{ref}", {"network": {"mode": "allowlist"}})
    assert (answer.status, answer.message) == (409, "the sandbox has no network and cannot be given one; start another")
    assert shared.call("PATCH", f"{S}/{ref}", {"network": {"mode": "none"}}).json["network"]["mode"] == "none"
    shared.call("DELETE", f"{S}/{ref}")
    assert calls(shared) == []


def test_what_a_failed_create_set_up_is_undone(shared: Rig) -> None:
    shared.create()
    shared.knob("no_open", "1")
    answer = shared.call("POST", S, {"name": "never"})
    assert (answer.status, answer.message) == (500, "the sandbox's network could not be made")
    assert "its network could not be made: the namespace: no room [31m" in shared.log.read_text()
    shared.knob("no_open", None)
    shared.knob("no_boot", "1")
    before, descriptors = links(shared), shared.descriptors()
    assert shared.call("POST", S, {"name": "never"}).status == 500
    assert links(shared) == before and shared.call("GET", f"{S}/never").status == 404
    shared.knob("no_boot", None)
    shared.knob("boot_s", "30")
    with ThreadPoolExecutor(1) as pool:
        create = pool.submit(lambda: shared.call("POST", S, {"name": "never"}))
        until("its link is there", lambda: len(links(shared)) == 2)
        assert shared.call("DELETE", f"{S}/never").status == 204
        assert create.result().code == "conflict"
    assert links(shared) == before
    until("no descriptor stays", lambda: shared.descriptors() <= descriptors)


# -- changed


def test_a_change_is_in_force_when_it_is_answered(shared: Rig) -> None:
    ref = shared.create(name="a")
    client = Client(str(shared.socket))
    said = client.update("a", network=NetworkRequest(allow=("x.wide.test",), allow_tcp=()), name="b")
    assert (said.name, said.network.allow, said.network.allow_tcp) == ("b", ("x.wide.test",), ())
    assert told(shared, "b")["allow"] == ["x.wide.test"]
    assert client.update("b", network=NetworkRequest("open")).network.mode == told(shared, "b")["mode"] == "open"
    assert client.update("b", labels={"k": "v"}, idle_timeout_secs=99).labels == {"k": "v"}
    assert client.update("b", network=NetworkRequest("none")).network == client.get("b").network
    assert told(shared, "b")["mode"] == "none"
    with pytest.raises(Conflict, match="cannot be given one"):
        client.update("b", network=NetworkRequest("allowlist"))
    client.delete("b")
    assert links(shared) == [] and calls(shared)[-1] == f"close {ref}"
    with pytest.raises(Conflict, match="terminated"):
        client.update("b", network=NetworkRequest("none"))


@pytest.mark.parametrize(
    "body",
    [
        {"network": {"allow": ["other.test"]}},
        {"network": {"allow": ["x.wide.test"]}, "name": "Bad Name"},
        {"network": {"allow": ["x.wide.test"]}, "labels": {"Bad": ""}},
        {"network": {"allow": ["x.wide.test"]}, "idle_timeout_secs": -1},
        {"network": {"allow": ["x.wide.test"]}, "name": "taken"},
        {"network": {"allow": ["x.wide.test"], "mode": "none"}},
        {"network": {"allow": ["1.2.3.4"]}},
        {"network": {"private": ["x.test"]}},
        {},
    ],
    ids=json.dumps,
)
def test_a_part_that_is_refused_changes_nothing(shared: Rig, body: dict[str, Any]) -> None:
    shared.create(name="taken", network={"mode": "none"})
    shared.create(name="a")
    before = shared.call("GET", f"{S}/a").json
    assert shared.call("PATCH", f"{S}/a", body).status in (400, 403, 409)
    assert shared.call("GET", f"{S}/a").json == before
    assert not any(call.startswith("update") for call in calls(shared))


def test_a_change_that_cannot_be_enforced_is_taken_back(shared: Rig) -> None:
    shared.create(name="a")
    before = shared.call("GET", f"{S}/a").json
    shared.knob("no_update", "1")
    answer = shared.call("PATCH", f"{S}/a", {"network": {"allow": ["x.wide.test"]}, "name": "b"})
    assert (answer.status, answer.message) == (500, "the network could not be changed")
    assert shared.call("GET", f"{S}/a").json == before and told(shared, "a")["allow"] == ["a.test", "b.test"]
    shared.knob("no_update", None)
    assert shared.call("PATCH", f"{S}/a", {"network": {"allow": ["x.wide.test"]}}).status == 200


def test_changes_at_once_leave_one_of_them(shared: Rig) -> None:
    ref = shared.create(name="a")
    lists = [[f"n{number}.wide.test"] for number in range(8)]
    with ThreadPoolExecutor(9) as pool:
        changes = [pool.submit(shared.call, "PATCH", f"{S}/{ref}", {"network": {"allow": one}}) for one in lists]
        assert {change.result().status for change in changes} == {200}
        assert shared.call("GET", f"{S}/a").json["network"]["allow"] == told(shared, "a")["allow"]
        changes = [pool.submit(shared.call, "PATCH", f"{S}/{ref}", {"network": {"allow": one}}) for one in lists]
        assert pool.submit(shared.call, "DELETE", f"{S}/{ref}").result().status == 204
        assert {change.result().status for change in changes} <= {200, 409}
    assert links(shared) == []


# -- taken back


def test_a_restart_keeps_what_is_permitted_and_narrows_the_rest(net: Rig) -> None:
    for name, network in (
        ("same", {}), ("open", {"mode": "open"}), ("less", {"allow": ["b.test", "x.wide.test"]}),
        ("gone", {"allow": ["x.wide.test"], "allow_tcp": []}), ("none", {"mode": "none"}), ("taken", {}),
    ):  # fmt: skip
        net.create(name=name, network=network)
    net.call("PATCH", f"{S}/taken", {"network": {"mode": "none"}})
    gone = net.call("GET", f"{S}/gone").json["id"]
    process = net.start_process("less", "sh", "-c", "while ! test -e /tmp/go; do sleep 0.05; done; echo on")
    net.kill()
    (net.directory / "policy.yaml").write_text(
        "network: {default: {allow: [a.test, b.test], deny: [evil.test]}, may_allow: [], may_allow_tcp: [git.test:22]}"
    )
    net.start()
    networks = {one["name"]: one["network"] for one in net.call("GET", S).json["sandboxes"]}
    denied = {"deny": ["bad.test", "evil.test"]}
    assert networks == {
        "same": {"mode": "allowlist", "allow": ["a.test", "b.test"], "allow_tcp": ["git.test:22"]} | denied,
        "open": {"mode": "allowlist", "allow": ["a.test", "b.test"]} | denied,
        "less": {"mode": "allowlist", "allow": ["b.test"]} | denied,
        "gone": {"mode": "none", "allow": None},
        "none": {"mode": "none", "allow": None},
        "taken": {"mode": "none", "allow": None},
    }
    assert {told(net, name)["mode"] for name in ("same", "open", "less")} == {"allowlist"}
    assert told(net, "less")["allow"] == ["b.test"] and told(net, "less")["private"] == ["registry.test"]
    assert sorted(links(net)) == sorted(net.call("GET", f"{S}/{name}").json["id"] for name in ("same", "open", "less"))
    assert f"{gone}: sandbox.network_updated, reason policy: none" in net.log.read_text()
    assert net.run("less", "touch", "/tmp/go").exit_code == 0
    assert net.output(process) == (b"on\n", b"", 0), "the sandbox itself was not touched"
    assert net.call("PATCH", f"{S}/gone", {"network": {}}).code == "conflict"
    net.kill()
    net.start()
    assert {one["name"]: one["network"] for one in net.call("GET", S).json["sandboxes"]} == networks


def test_a_daemon_without_a_network_leaves_none_to_anybody(net: Rig) -> None:
    net.create(name="a")
    net.kill()
    net.flags = ()
    net.start()
    assert net.call("GET", f"{S}/a").json["network"] == {"mode": "none", "allow": None}
    assert net.run("a", "true").exit_code == 0


def test_a_link_that_is_gone_or_cannot_be_told_is_none_and_strays_are_removed(net: Rig) -> None:
    lost, kept = net.create(name="lost"), net.create(name="kept")
    net.kill()
    (net.directory / "net" / f"{lost}.json").unlink()
    (net.directory / "net" / "sbx_00000000000000aa.json").write_text("{}")
    net.start()
    assert net.call("GET", f"{S}/lost").json["network"]["mode"] == "none"
    assert "reason its link is gone" in net.log.read_text()
    assert links(net) == [kept]
    net.kill()
    net.knob("no_update", "1")
    net.start()
    assert net.call("GET", f"{S}/kept").json["network"]["mode"] == "none"
    assert links(net) == [] and net.run("kept", "true").exit_code == 0


def test_end_sandboxes_ends_the_network_too(net: Rig) -> None:
    ref = net.create()
    net.stop()
    assert links(net) == [ref]
    net.flags = (*net.flags, "--end-sandboxes")
    net.start()
    net.stop()
    assert links(net) == [] and calls(net)[-1].strip() == "end"


# -- what they were used for


def test_a_decision_is_explained_by_its_id(net: Rig) -> None:
    ref = net.create(name="a")
    client = Client(str(net.socket))
    tell(
        net,
        event(sandbox=ref),
        event(sandbox=ref, id="bbbbbbb2", name="other.test", why="other.test is not listed."),
        event(sandbox=ref, id="ccccccc2", name="db.wide.test", port=5432, rule="port", by="address"),
        event(sandbox=ref, id="ddddddd2", name="bad.test", rule="deny-list", why="bad.test is on the deny list."),
        event(
            sandbox=ref, id="eeeeeee2", kind="allowed", name="a.test", rule="allow a.test", why="", count=2,
            connections=2, up_bytes=10, down_bytes=5000,
        ),
        event(sandbox=ref, count=3, at=1700000060.0),
    )  # fmt: skip
    first = net.call("GET", "/v1/events/abcdefg2").json
    assert first == {
        "time": "2023-11-14T22:14:20.000000Z", "type": "egress.denied", "sandbox": ref, "id": "abcdefg2",
        "name": "x.wide.test", "port": 443, "rule": "not-listed", "by": "tls", "count": 3,
        "why": "x.wide.test is not listed.", "remedy": "--allow x.wide.test",
    }  # fmt: skip
    other = client.event("bbbbbbb2")
    assert other.remedy == "" and other.why.startswith("other.test is not listed. This server's policy does not")
    assert client.event("ccccccc2").remedy == "--allow-tcp db.wide.test:5432"
    assert client.event("ddddddd2").remedy == "" and "whatever else is allowed" in client.event("ddddddd2").why
    used = client.event("eeeeeee2")
    assert (used.type, used.bytes_in, used.bytes_out, used.remedy) == ("egress.allowed", 5000, 10, "")
    for unknown in ("zzzzzzz2", "ABCDEFG2", "..", "a" * 9, "abcdefg2%0a"):
        with pytest.raises(NotFound):
            client.event(unknown)
    net.call("DELETE", f"{S}/a")
    assert client.event("abcdefg2").sandbox == ref, "the file outlives the sandbox"
    net.kill()
    net.start()
    assert client.event("abcdefg2").count == 3


def test_the_names_of_a_sandbox_while_it_lives_and_after(shared: Rig) -> None:
    ref, other = shared.create(name="a"), shared.create(name="b")
    client = Client(str(shared.socket))
    assert client.egress("a").names == ()
    tell(shared, event(sandbox=ref), event(sandbox=other, id="bbbbbbb2", name="y.wide.test"))
    fresher = {
        "id": "abcdefg2", "name": "x.wide.test", "port": 443, "decision": "denied", "rule": "not-listed", "by": "tls",
        "why": "w", "count": 9, "connections": 0, "bytes_in": 0, "bytes_out": 0, "first_at": 1700000000.5,
        "last_at": 1700000090.0,
    }  # fmt: skip
    shared.knob("report", json.dumps([fresher, {"rubbish": 1}]))
    said = client.egress("a")
    assert (said.mode, said.allow, said.deny) == ("allowlist", ("a.test", "b.test"), ("bad.test",))
    (name,) = said.names
    assert (name.name, name.decision, name.count, name.first_at) == (
        "x.wide.test", "denied", 9, "2023-11-14T22:13:20.500000Z",
    )  # fmt: skip
    shared.knob("report", None)
    shared.call("DELETE", f"{S}/a")
    assert [(found.name, found.count) for found in client.egress(ref).names] == [("x.wide.test", 1)]
    assert [found.name for found in client.egress("b").names] == ["y.wide.test"]
    with pytest.raises(NotFound):
        client.egress("nobody")


def test_looking_at_a_network_is_no_activity(shared: Rig) -> None:
    ref = shared.create(idle_timeout_secs=2)
    deadline = time.monotonic() + 20
    while shared.call("GET", f"{S}/{ref}/egress").status == 200 and time.monotonic() < deadline:
        if {"id": ref, "state": "terminated"}.items() <= shared.call("GET", S).json["sandboxes"][0].items():
            break
        time.sleep(0.1)
    assert shared.call("GET", f"{S}/{ref}").json["state"] == "terminated"


def test_the_client_raises_what_the_daemon_refused(shared: Rig) -> None:
    shared.create(name="a")
    with pytest.raises(Refused, match=r"network\.may_allow"):
        Client(str(shared.socket)).update("a", network=NetworkRequest(allow=("other.test",)))
