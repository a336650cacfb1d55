"""The endpoint under test, and the sandboxes that the tests share.

Each shared sandbox is made when the first test asks for it, so that one row can be run by itself. Fixtures take down
what happened and judge nothing; the tests do.
"""

from __future__ import annotations

import re
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conformance import shape
from conformance.endpoint import Answer, Endpoint, token_of
from conformance.estate import Estate, Offer, Sandbox

ROW = re.compile(r"C(?:[1-9]|[1-4][0-9]|50)\Z")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("endpoint")
    group.addoption("--endpoint", metavar="URL", help="unix:///path, http://host:port or https://host:port")
    group.addoption("--token-file", metavar="FILE", help="the bearer token")
    group.addoption("--ca", metavar="FILE", help="certificates that an https endpoint's must come from")
    group.addoption("--cert", metavar="FILE", help="our certificate, for an endpoint that wants one")
    group.addoption("--key", metavar="FILE", help="its key")
    group.addoption("--row", metavar="ROW", action="append", default=[], help="one row only: C1 to C50; repeatable")


def pytest_configure() -> None:
    # So that a run that is told to stop deletes its sandboxes, as one does that is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def row(item: pytest.Item) -> str:
    """The row of the specification's table that a test is for; empty for one that is beyond them."""
    text = (getattr(getattr(item, "obj", None), "__doc__", None) or "").strip().partition("\n")[0]
    return text if ROW.match(text) else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("--row"))
    if unknown := sorted(name for name in wanted if not ROW.match(name)):
        raise pytest.UsageError(f"{', '.join(unknown)}: a row is C1 to C50")
    if wanted:
        config.hook.pytest_deselected(items=[item for item in items if row(item) not in wanted])
        items[:] = [item for item in items if row(item) in wanted]


@pytest.fixture(scope="session")
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    option = request.config.getoption
    if not option("--endpoint"):
        raise pytest.UsageError("which endpoint? --endpoint unix:///path, http://host:port or https://host:port")
    try:
        return Endpoint(
            option("--endpoint"), token_of(option("--token-file")), option("--ca"), option("--cert"), option("--key")
        )
    except (OSError, ValueError) as fault:
        raise pytest.UsageError(str(fault)) from None


@pytest.fixture(scope="session")
def offer(endpoint: Endpoint) -> Offer:
    return Offer(shape.ok(endpoint.call("GET", "/v1/capabilities")))


@pytest.fixture(scope="session")
def estate(endpoint: Endpoint, offer: Offer, request: pytest.FixtureRequest) -> Iterator[Estate]:
    made = Estate(endpoint, offer)
    try:
        yield made
    finally:
        left = made.clear()
        terminal = request.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"\n{made.boots} sandboxes made, the slowest in {made.boot_s:.1f} s")
    assert left == [], "not everything could be deleted"


@dataclass(frozen=True)
class Box:
    """The sandbox most tests share: made without a word about its network, with a value in its environment. Three
    asked for its name at once; `answers` are what they were told."""

    sandbox: Sandbox
    value: str
    name: str
    answers: list[Answer]


@pytest.fixture(scope="session")
def shared(estate: Estate) -> Box:
    value = f"value-{secrets.token_hex(16)}"
    name = estate.name("box")
    answers: list[Answer] = []

    def ask() -> None:
        answers.append(estate.ask(name=name, env={"API_TOKEN": value}, labels={"part": "box"}))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [answer for answer in answers if answer.status == 201]
    assert made, f"a sandbox could not be made: {[str(answer) for answer in answers]}"
    return Box(Sandbox(estate, made[0]), value, name, answers)


@pytest.fixture(scope="session")
def box(shared: Box) -> Sandbox:
    return shared.sandbox


@dataclass(frozen=True)
class Past:
    """A sandbox's life, as it was told."""

    sandbox: Sandbox
    name: str
    got: tuple[Answer, Answer]
    listed: Answer
    again: Answer
    opened: Answer | None
    still: Answer
    narrowed: Answer
    narrow: Answer
    deleted: Answer
    after: Answer


@pytest.fixture(scope="session")
def past(estate: Estate, endpoint: Endpoint) -> Past:
    """Made, asked for, changed, used and deleted."""
    name = estate.name("past")
    one = estate.create(name=name, env={"GREETING": "hello-from-the-environment"})
    got = (one.call("GET"), endpoint.call("GET", f"/v1/sandboxes/{name}"))
    listed = endpoint.call("GET", "/v1/sandboxes")
    again = estate.ask(name=name)
    above = estate.offer.above_ceiling()
    opened = one.call("PATCH", body={"network": {"mode": above[-1]}}) if above else None
    still = one.call("GET")
    narrowed = one.call("PATCH", body={"network": {"mode": "none"}})
    narrow = one.call("GET")
    one.call("POST", "/run", {"argv": ["false"]})
    one.write("/tmp/five", b"12345")
    one.remove("/tmp/five")
    deleted = one.call("DELETE")
    return Past(one, name, got, listed, again, opened, still, narrowed, narrow, deleted, one.call("GET"))


@dataclass(frozen=True)
class Heir:
    """A second sandbox with the name of one that is gone, and the answer to that name right after it was made."""

    sandbox: Sandbox
    by_name: Answer


DENIED = ("Gist.GitHub.com.", "gist.github.com")


@pytest.fixture(scope="session")
def heir(past: Past, estate: Estate, endpoint: Endpoint) -> Heir:
    one = estate.create(name=past.name, network={"deny": list(DENIED)}, labels={"part": "heir"})
    return Heir(one, endpoint.call("GET", f"/v1/sandboxes/{past.name}"))


@pytest.fixture(scope="session")
def closed(estate: Estate) -> Sandbox:
    """A sandbox that asked for no network."""
    return estate.create(network={"mode": "none"})
