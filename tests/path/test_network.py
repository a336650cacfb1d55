"""What a networked sandbox is for: ordinary programs reach what is allowed with no setting at all, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandboxd.client import Create, NetworkRequest
from sandboxd.errors import Conflict
from tests.daemon import Daemon
from tests.path.conftest import ALLOWED, ALLOWED_TCP, Opener
from tests.world import world as place
from tests.world.guest import HOME, Guest, get, stream
from tests.world.hello import hello
from tests.world.origin import drip, quiet
from tests.world.world import World

pytestmark = pytest.mark.vm

TLS_ANSWER = (0x15, 0x16)       # an alert or a handshake: bytes of the server, whatever it thought of the hello


# Programs without a proxy setting

WORKING = [
    pytest.param("curl -sS https://allowed.test/word", "hello from allowed.test", id="curl over https"),
    pytest.param("curl -sS http://allowed.test/word", "hello from allowed.test", id="curl over http"),
    pytest.param("curl -sS https://www.wild.test/", "hello from www.wild.test", id="a name below a wildcard"),
    pytest.param("curl -sS https://lan.test/", "hello from lan.test", id="a private address the operator opened"),
    pytest.param("curl -sS https://both.test/", "hello from both.test", id="a name with both families"),
    pytest.param(
        "rm -rf c && git clone -q https://git.test/world.git c && cat c/word.txt", "from the repository",
        id="git over https",
    ),
    pytest.param(
        "rm -rf c && git clone -q ssh://git@git.test/~/world.git c && cat c/word.txt", "from the repository",
        id="git over ssh, by allow_tcp",
    ),
    pytest.param(
        "python3 -c 'import socket; print(socket.create_connection((\"db.test\", 5432)).recv(9))'", "sink",
        id="another port by name, by allow_tcp",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("script", "word"), WORKING)
def test_what_is_allowed_works_without_a_setting(guest: Guest, script: str, word: str) -> None:
    done = guest.sh(script)
    assert (done.exit_code, word in done.stdout.decode()) == (0, True), done.stderr.decode()


REGISTRIES = [
    pytest.param(
        ("index.test", "files.test"),
        "python3 -m pip install -q --break-system-packages --user --disable-pip-version-check --retries 0 "
        "--index-url https://index.test/simple/ worldparcel && python3 -c 'import worldparcel as w; print(w.WORD)'",
        "from the index", id="pip",
    ),
    pytest.param(
        ("npm.test",),
        "npm cache add --registry https://npm.test/ worldparcel@1.0.0 && echo fetched and checked",
        "fetched and checked", id="npm",
    ),
    pytest.param(
        ("npm.test",),
        "rm -rf n && mkdir n && cd n && npm install --no-audit --no-fund --registry https://npm.test/ worldparcel && "
        "node -p 'require(\"worldparcel\")'",
        "from the registry", id="npm, installed", marks=pytest.mark.soak,
    ),
    pytest.param(
        ("deb.test",),
        "rm -rf a && mkdir -p a/lists/partial a/cache/archives/partial && cd a && "
        "echo 'deb [trusted=yes] http://deb.test/ ./' >list && O='-o Dir::Etc::SourceList='$PWD'/list "
        "-o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists='$PWD'/lists -o Dir::Cache='$PWD'/cache' && "
        "apt-get $O -qq update && apt-get $O -qq download worldparcel && "
        "dpkg-deb --fsys-tarfile worldparcel_1.0_all.deb | tar -xO ./usr/share/worldparcel/word",
        "from the archive", id="apt",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("names", "script", "word"), REGISTRIES)
def test_package_managers_work_with_their_registry_allowed(
    guest: Guest, names: tuple[str, ...], script: str, word: str
) -> None:
    guest.allow(*ALLOWED, *names, tcp=ALLOWED_TCP)
    done = guest.sh(script)
    guest.allow(*ALLOWED, tcp=ALLOWED_TCP)
    assert (done.exit_code, word in done.stdout.decode()) == (0, True), done.stderr.decode()


# What is not allowed

REFUSED = [
    pytest.param("curl -sS https://other.test/", id="curl over https"),
    pytest.param("curl -sS http://other.test/", id="curl over http"),
    pytest.param("git clone -q https://other.test/world.git d", id="git over https"),
    pytest.param("git clone -q ssh://git@other.test/world.git d", id="git over ssh"),
    pytest.param(
        "python3 -m pip download --disable-pip-version-check --retries 0 --index-url https://other.test/simple/ x",
        id="pip",
    ),
    pytest.param(
        "node -e 'fetch(\"https://other.test/\").catch(e => { console.log(e.cause.message); process.exit(1) })'",
        id="node's fetch",
    ),
    pytest.param(
        "npm install --no-audit --no-fund --fetch-retries 0 --registry https://other.test/ x", id="npm",
        marks=pytest.mark.soak,
    ),
    pytest.param(
        "mkdir -p b/lists/partial && cd b && echo 'deb [trusted=yes] http://other.test/ ./' >list && "
        "apt-get -o Dir::Etc::SourceList=$PWD/list -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=$PWD/lists "
        "-o APT::Update::Error-Mode=any update", id="apt",
    ),
]  # fmt: skip


@pytest.mark.parametrize("script", REFUSED)
def test_what_is_not_allowed_fails_within_a_second_and_names_it(guest: Guest, script: str) -> None:
    """The quickest of three, since a busy machine can hold up any of them. Programs that do little besides end within a
    second of their first question for the name. What the others compute under emulation is not the refusal's: from that
    question to their last packet they wait for nothing, since a stub resolver asks again after five seconds."""
    quick = script.startswith(("curl", "git"))
    took = []
    for _ in range(3):
        with guest.link() as link:
            process = guest.daemon.client.start(guest.id, ["sh", "-c", script], env=guest.env, cwd=HOME)
            pieces = list(guest.daemon.client.output(guest.id, process.pid))
            ended = time.monotonic()
        said = b"".join(piece.data for piece in pieces).decode()
        assert pieces[-1].exit_code != 0
        assert "other.test" in said
        asked = next(packet.at for packet in link.packets if packet.port == 53)
        took.append((ended if quick else link.packets[-1].at) - asked)
        if took[-1] < (1 if quick else 4):
            return
    raise AssertionError(took)


def test_a_refusal_says_who_can_allow_it_and_its_id_leads_to_the_command(guest: Guest, networked: Daemon) -> None:
    refused = guest.ask(stream(place.PUBLIC, 80, get("other.test")))[0]
    assert refused.came.startswith(b"HTTP/1.1 403 ")
    page = refused.came.decode()
    assert "other.test" in page and "blocked by sandbox policy" in page and "--allow other.test" in page
    event_id = page.partition("sandbox-cli why ")[2].split()[0]
    why = networked.cli("why", event_id)
    assert why.returncode == 0, why.stderr
    assert "other.test" in why.stdout.decode() and "--allow" in why.stdout.decode()
    event = networked.client.event(event_id)
    assert (event.type, event.name, event.port, event.by, event.rule) == (
        "egress.denied", "other.test", 80, "http", "not-listed"
    )  # fmt: skip
    assert event_id in networked.log.read_text(errors="replace") or event_id in guest_log(networked)


def guest_log(daemon: Daemon) -> str:
    return "".join(path.read_text(errors="replace") for path in (daemon.state / "audit").glob("egress*.jsonl"))


def test_repeats_are_counted_not_repeated(guest: Guest) -> None:
    ask = stream(place.PUBLIC, 80, get("repeated.test"))
    guest.ask(*[ask] * 12)
    names = guest.daemon.client.egress(guest.id).names
    rows = [row for row in names if (row.name, row.by) == ("repeated.test", "http")]
    assert [row.count for row in rows] == [12]
    deadline = time.monotonic() + 30
    while (event := guest.daemon.client.event(rows[0].id)).count != 12 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert event.count == 12, "the log has it within seconds"


def test_egress_shows_names_decisions_bytes_and_a_line_to_paste(guest: Guest, networked: Daemon) -> None:
    assert guest.sh("curl -sS https://allowed.test/bytes/100000 | wc -c").stdout == b"100000\n"
    guest.sh("curl -sS https://pasted.test/")
    shown = networked.cli("egress", guest.id)
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout.decode()
    assert "allowed.test" in text and "pasted.test" in text
    assert "--allow pasted.test" in text.strip().splitlines()[-1]
    found = json.loads(networked.cli("egress", "--json", guest.id).stdout)
    rows = {(row["name"], row["port"], row["decision"]): row for row in found["names"]}
    assert rows["allowed.test", 443, "allowed"]["bytes_in"] >= 100_000


def test_a_registry_that_hands_downloads_to_another_name_says_which(guest: Guest, networked: Daemon) -> None:
    """index.test is allowed, files.test, where its files are, is not."""
    done = guest.sh(
        "python3 -m pip download -q --disable-pip-version-check --retries 0 --no-cache-dir "
        "--index-url https://index.test/simple/ worldparcel"
    )
    assert done.exit_code != 0 and b"files.test" in done.stderr
    assert "--allow files.test" in networked.cli("egress", guest.id).stdout.decode()


# Names

def test_one_answer_for_a_name_and_its_own(guest: Guest) -> None:
    one, other, again, denied = guest.ask(
        *({"do": "resolve", "name": name} for name in ("allowed.test", "second.test", "ALLOWED.test.", "other.test"))
    )
    assert one.came.startswith(b"198.18.") and b"\n" not in one.came, "one address, and no IPv6"
    assert one.came == again.came != other.came
    assert denied.end == "gaierror" and denied.ms < 4000, "a stub resolver asks again after five seconds"


def test_the_image_has_no_search_list_and_one_interface_without_ipv6(guest: Guest) -> None:
    seen = guest.ask({"do": "interfaces"})[0].figures
    assert seen["names"] == ["eth0", "lo"]
    assert "eth0" not in seen["six"]
    assert seen["resolver"].split() == ["nameserver", "172.16.0.1"]


def test_an_address_that_changes_under_a_running_sandbox(guest: Guest, world: World) -> None:
    ask = stream("198.18.0.1", 80, get("second.test"))
    with quiet(world.origin) as ledger:
        guest.ask(ask)
        world.names.set("second.test", place.PUBLIC)
        guest.ask(ask)
        world.names.set("second.test", place.PUBLIC_2)
    assert [visit.address for visit in ledger.visits] == [place.PUBLIC_2, place.PUBLIC]


def test_ipv6_that_leads_nowhere_does_not_hold_up_a_name(guest: Guest, world: World) -> None:
    world.names.set("both.test", "2a0e:7::dead", place.PUBLIC)
    told = guest.ask(stream("198.18.0.1", 80, get("both.test")))[0]
    world.names.set("both.test", *place.NAMES["both.test"])
    assert told.came.startswith(b"HTTP/1.1 200") and told.ms < 10_000, "a connect may take twenty seconds"


def test_a_name_that_does_not_resolve_fails_alone(guest: Guest) -> None:
    guest.allow("nowhere.test", *ALLOWED, tcp=ALLOWED_TCP)
    bad, good = guest.ask(stream(place.PUBLIC, 80, get("nowhere.test")), stream(place.PUBLIC, 80, get("allowed.test")))
    guest.allow(*ALLOWED, tcp=ALLOWED_TCP)
    assert bad.came.startswith(b"HTTP/1.1 502") and b"does not resolve" in bad.came
    assert good.came.startswith(b"HTTP/1.1 200")


def test_a_quiet_stream_goes_on(guest: Guest, world: World) -> None:
    world.origin.answers["allowed.test"] = drip(pause_s=2, times=2)
    try:
        told = guest.ask(stream(place.PUBLIC, 80, get("allowed.test"), wait_s=10))[0]
    finally:
        del world.origin.answers["allowed.test"]
    assert told.came.endswith(b"0\n1\n")


def test_an_upload_that_waits_to_be_asked_for_it(guest: Guest) -> None:
    """Expect: 100-continue, a chunked body, and another request on the same connection."""
    head = b"PUT /x HTTP/1.1\r\nHost: allowed.test\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    told = guest.ask(
        stream(place.PUBLIC, 80, head, "100 Continue", b"5\r\nhello\r\n0\r\n\r\n", "hello from", get("allowed.test"))
    )[0]
    assert told.came.count(b"HTTP/1.1 200 ") == 2


# Changing it

def test_an_update_holds_at_once_and_cuts_what_it_forbids(guest: Guest, world: World) -> None:
    before = guest.ask(stream(place.PUBLIC, 443, hello("other.test")))[0]
    assert before.end == "reset" and before.ms < 10_000
    world.origin.answers["allowed.test"] = drip(pause_s=0.2, times=100)
    world.origin.ledger.clear()
    try:
        running = guest.begin(stream(place.PUBLIC, 80, get("allowed.test"), wait_s=30))
        deadline = time.monotonic() + 20
        while not world.origin.ledger.visits and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        changed = time.monotonic()
        guest.allow("other.test", tcp=ALLOWED_TCP)
        told = guest.finish(running)
        took = time.monotonic() - changed
    finally:
        del world.origin.answers["allowed.test"]
    assert told.came.startswith(b"HTTP/1.1 200"), "it was running when the policy changed"
    assert told.end == "reset" and took < 10, f"cut after {took:.1f} s"
    now, old = guest.ask(
        stream(place.PUBLIC, 443, hello("other.test"), enough=1), stream(place.PUBLIC, 443, hello("allowed.test"))
    )
    guest.allow(*ALLOWED, tcp=ALLOWED_TCP)
    assert now.end == "data" and now.came[0] in TLS_ANSWER
    assert old.end == "reset"


def test_a_name_denied_a_moment_ago_works_within_a_second_of_being_allowed(guest: Guest) -> None:
    """The negative answer is not remembered by anybody, in one process."""
    script = (
        "import socket\n"
        "for n in range(10**6):\n"
        "    try:\n"
        "        socket.create_connection(('other.test', 443))\n"
        "    except OSError:\n"
        "        if n == 5:\n"
        "            print('denied', flush=True)\n"
        "    else:\n"
        "        print('reached', flush=True)\n"
        "        break\n"
    )
    running = guest.daemon.client.start(guest.id, ["python3", "-c", script])
    output = guest.daemon.client.output(guest.id, running.pid)
    assert next(output).data == b"denied\n"
    guest.allow(*ALLOWED, "other.test", tcp=ALLOWED_TCP)
    changed = time.monotonic()
    assert next(output).data == b"reached\n"
    took = time.monotonic() - changed
    guest.allow(*ALLOWED, tcp=ALLOWED_TCP)
    assert took < 1 + 4, "the second, and what a busy machine adds"


def test_the_command_line_changes_it_too(guest: Guest, networked: Daemon) -> None:
    changed = networked.cli("update", guest.id, "--allow", "other.test")
    assert changed.returncode == 0, changed.stderr
    assert guest.ask(stream(place.PUBLIC, 80, get("other.test")))[0].came.startswith(b"HTTP/1.1 200")
    guest.allow(*ALLOWED, tcp=ALLOWED_TCP)
    assert guest.ask(stream(place.PUBLIC, 80, get("other.test")))[0].came.startswith(b"HTTP/1.1 403")


# Modes

def test_open_reaches_what_is_public_and_nothing_denied_private_or_own(neighbour: Guest, world: World) -> None:
    world.names.set("metadata.test", place.METADATA)
    with world.uplink() as uplink:
        public, port, lan, host, metadata, denied, tls = neighbour.ask(
            stream(place.PUBLIC, 80, get("sub.allowed.test")),
            stream(place.PUBLIC, place.SINK, enough=4),
            stream(place.LAN, place.SINK, enough=4),
            stream(place.HOST, place.SINK, enough=4),
            stream(place.METADATA, 80, get("metadata.test")),
            stream(place.PUBLIC, 80, get("other.test")),
            stream(place.PUBLIC, 443, hello("other.test")),
        )
    world.names.drop("metadata.test")
    assert public.came.startswith(b"HTTP/1.1 200")
    # With something on the deny list a connection has to name its host.
    assert port.end in ("reset", "ECONNREFUSED")
    assert lan.end in ("reset", "ECONNREFUSED") and host.end in ("reset", "ECONNREFUSED")
    assert metadata.came.startswith(b"HTTP/1.1 502") and b"private" in metadata.came
    assert denied.came.startswith(b"HTTP/1.1 403") and tls.end == "reset"
    assert uplink.outgoing(place.LAN) == uplink.outgoing(place.METADATA) == []
    neighbour.daemon.client.update(neighbour.id, network=NetworkRequest(mode="open", deny=()))
    bare, lan, host, udp = neighbour.ask(
        stream(place.PUBLIC, place.SINK, enough=4), stream(place.LAN, place.SINK, enough=4),
        stream(place.HOST, place.SINK, enough=4), {"do": "datagram", "to": [place.PUBLIC, place.SINK], "data": "eA=="},
    )  # fmt: skip
    neighbour.daemon.client.update(neighbour.id, network=NetworkRequest(mode="open", deny=("other.test",)))
    assert bare.came == b"sink\n"
    assert lan.end in ("reset", "ECONNREFUSED") and host.end in ("reset", "ECONNREFUSED")
    assert udp.end == "ECONNREFUSED", "open has no UDP but DNS"


def test_none_has_no_interface_and_cannot_be_opened(opened: Opener, networked: Daemon) -> None:
    shut = opened(NetworkRequest(mode="none"), "shut")
    assert shut.ask({"do": "interfaces"})[0].figures["names"] == ["lo"]
    assert shut.ask({"do": "resolve", "name": "allowed.test"})[0].end == "gaierror"
    with pytest.raises(Conflict):
        networked.client.update(shut.id, network=NetworkRequest(mode="allowlist", allow=("allowed.test",)))


def test_from_an_allowlist_to_none_takes_the_link_down_at_once(opened: Opener, world: World, networked: Daemon) -> None:
    one = opened(NetworkRequest(mode="allowlist", allow=("allowed.test",)), "narrowed")
    assert one.ask(stream(place.PUBLIC, 80, get("allowed.test")))[0].came.startswith(b"HTTP/1.1 200")
    networked.client.update(one.id, network=NetworkRequest(mode="none"))
    with world.uplink() as uplink:
        after = one.ask(stream(place.PUBLIC, 80, get("allowed.test"), wait_s=1))[0]
    assert after.end != "data"
    assert uplink.outgoing(place.PUBLIC) == []


def test_a_request_beyond_the_policy_is_refused_by_its_rule(networked: Daemon) -> None:
    refused = networked.cli("run", "--network", "none", "--allow", "allowed.test", "--", "true")
    assert refused.returncode != 0 and b"allow" in refused.stderr


# The host's own registries

def test_the_hosts_own_index_is_reached_where_the_host_reaches_it(daemon: Daemon, tmp_path: Path) -> None:
    """The machine's own network, no world: what pip is configured for here is among the names a sandbox starts with."""
    if not daemon.client.capabilities().capabilities.get("egress_allowlist"):
        pytest.skip("this daemon gives sandboxes no network")
    pip = ["-m", "pip", "download", "-q", "--disable-pip-version-check", "--retries=0", "--no-deps", "--no-cache-dir"]
    tried = subprocess.run(
        [sys.executable, *pip, "-d", str(tmp_path), "six"], capture_output=True, check=False, timeout=60
    )
    if tried.returncode != 0:
        pytest.skip(f"the host does not reach its own index: {tried.stderr.decode(errors='replace')[-200:]}")
    sandbox = daemon.client.create(Create(name="registries", memory_mb=768))
    try:
        done = daemon.client.run(sandbox.id, ["python3", *pip, "-d", "/tmp", "six"], timeout_secs=100)
        assert done.exit_code == 0, done.stderr.decode()
    finally:
        daemon.client.delete(sandbox.id)
