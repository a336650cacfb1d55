"""What the relay accepted, put before the policy; what the policy said, done by the relay.

In: batches of the relay's events, and the daemon's verbs (`add`, `update`, `remove`, `report`). Out: commands to the
relay, look-ups, entries in the ledger. A guest's bytes go to `flow` unread; nothing is opened that the policy in force
at that moment does not allow, and nothing but an address that was vetted for it a moment before.

    Accepted, Data ── flow ── Open ── look-up ── decided again, addresses vetted ── relay.open ── Opened ── passed
                        └──── Refuse ── ledger ── id ── what the guest is told
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from egress import flow, vet
from egress.answer import Answers
from egress.ledger import Ledger
from egress.local import Local
from egress.log import Log
from egress.lookup import Lookups
from egress.loop import Loop
from egress.policy import Allow, Ask, By, Deny, Policy
from egress.questions import Questions
from egress.sandbox import Connection, Sandbox
from egress.turns import Turns
from native import relay as data_path
from native.relay import Accepted, Closed, Data, Ended, Failed, Limits, Opened, Reason, Refused, Relay

ADDRESSES: Final = 16  # tried for one connection
EVENTS: Final = 256  # handled between two looks at the other descriptors, within this time and one event's
WORK_S: Final = 0.01
MOST_TAKEN: Final = 256  # events the relay gives at a time
TAKES: Final = 16
SHARES: Final = 4  # so many sandboxes at least have a part of the connections that there can be
LEAVING_S: Final = 2.0
EARLY_BYTES: Final = 16 << 20  # of one sandbox: undecided, or part of a message that is not whole

_WAY: Final = (data_path.Direction.UP, data_path.Direction.DOWN)
_FLOW_WAY: Final = (flow.Direction.UP, flow.Direction.DOWN)


class Proxy:
    """`ledger` is read by whoever tells the daemon. Everything runs on the loop's one thread."""

    def __init__(self, loop: Loop, relay: Relay, lookups: Lookups, local: Local, ledger: Ledger, log: Log) -> None:
        self._log = log
        self._loop, self._relay, self._lookups, self._local, self._ledger = loop, relay, lookups, local, ledger
        self._sandboxes: dict[str, Sandbox] = {}
        self._by_number: dict[int, Sandbox] = {}
        self._connections: dict[int, Connection] = {}
        self._turns: Turns[data_path.Event] = Turns()
        self._whose: dict[int, int] = {}  # the sandbox of each pair whose Accepted was taken and whose Closed was not
        self._questions = Questions(lookups, ledger)
        self._next = 1
        self._now = time.monotonic()
        self._at = time.time()
        loop.watch(relay.fd, self.relay_ready)

    # The daemon's verbs

    @property
    def sandboxes(self) -> list[str]:
        return [id for id, sandbox in self._sandboxes.items() if sandbox.leaving_at is None]

    def add(self, id: str, policy: Policy, limits: Limits, fds: Sequence[int]) -> None:
        """Takes the descriptors over, whatever comes of it. ValueError, OSError."""
        proxy_fd, udp_fd, tcp_fd, names_fd = fds
        proxy, udp, tcp = (socket.socket(fileno=fd) for fd in (proxy_fd, udp_fd, tcp_fd))
        try:
            if id in self._sandboxes:
                raise ValueError("this sandbox is here already")
            sandbox = Sandbox(id, self._next, policy, names_fd)
            proxy.setblocking(False)
            pairs = min(limits.pairs, max(1, self._relay.max_pairs // SHARES))
            self._relay.listen(sandbox.number, proxy.fileno(), replace(limits, pairs=pairs))
        except BaseException:
            udp.close()
            tcp.close()
            os.close(names_fd)
            raise
        finally:
            proxy.close()
        self._next += 1
        self._sandboxes[id] = self._by_number[sandbox.number] = sandbox
        decide = partial(self._questions.decide, sandbox)
        sandbox.answers = Answers(self._loop, udp, tcp, decide, time.monotonic)

    def update(self, id: str, policy: Policy) -> None:
        """From here on the new policy decides; what is open and no longer allowed is reset."""
        sandbox = self._here(id)
        sandbox.obey(policy)
        self._at = time.time()
        for connection in sandbox.connections.values():
            ask = connection.ask
            if ask is None:
                continue
            verdict = sandbox.decide(ask)
            if isinstance(verdict, Deny):
                self._count(sandbox, ask, verdict)
            elif connection.private <= verdict.private:
                continue
            self._cut(connection)

    def remove(self, id: str, gone: Callable[[], None]) -> None:
        """Nothing passes from here on; `gone` is called when the last connection has ended."""
        sandbox = self._here(id)
        sandbox.leaving_at, sandbox.gone = time.monotonic(), gone
        self._relay.unlisten(sandbox.number)
        self._lookups.forget(sandbox.share)
        sandbox.close()
        if not sandbox.connections:
            self._gone(sandbox)

    def report(self, id: str) -> list[dict[str, object]]:
        return self._ledger.report(self._here(id).id)

    def tick(self) -> None:
        """From time to time: what has waited too long."""
        self._now, self._at = time.monotonic(), time.time()
        self._lookups.expire(self._now)
        for sandbox in list(self._sandboxes.values()):
            if sandbox.leaving_at is not None:
                if self._now - sandbox.leaving_at > LEAVING_S:
                    self._gone(sandbox)
            elif sandbox.answers is not None:
                sandbox.answers.expire(self._now)
        self._lookups.flush()

    def lookups_ready(self) -> bool:
        """False once the resolver has gone."""
        self._at = time.time()
        alive = self._lookups.ready()
        self._lookups.flush()
        return alive

    # The relay's events

    @property
    def busy(self) -> bool:
        return bool(self._turns)

    def relay_ready(self) -> None:
        """Takes what there is and puts it in order; `work` does it."""
        whose, add = self._whose, self._turns.add
        for _ in range(TAKES):
            events = self._relay.take()
            for event in events:
                if isinstance(event, Accepted):
                    whose[event.pair] = event.sandbox
                    add(event.sandbox, event)
                elif isinstance(event, Closed):
                    whose.pop(event.pair, None)
                    add(event.sandbox, event)
                elif isinstance(event, Refused):
                    add(event.sandbox, event)
                else:
                    add(whose.get(event.pair, 0), event)
            if len(events) < MOST_TAKEN:
                break

    def work(self) -> None:
        """A bounded number of events, each sandbox's by turns."""
        turns = self._turns
        if not turns:
            return
        self._now, self._at = time.monotonic(), time.time()
        connections = self._connections
        until = self._now + WORK_S
        for _ in range(EVENTS):
            if not turns or time.monotonic() > until:
                break
            event = turns.next()
            try:
                if isinstance(event, Accepted):
                    self._accepted(event)
                elif isinstance(event, Closed):
                    self._closed(event)
                elif isinstance(event, Refused):
                    self._full(event)
                elif (connection := connections.get(event.pair)) is None:
                    continue
                elif isinstance(event, Data):
                    self._data(connection, event)
                elif isinstance(event, Opened):
                    self._opened(connection, event)
                elif isinstance(event, Ended):
                    self._apply(connection, connection.flow.ended(_FLOW_WAY[event.direction]))
                elif isinstance(event, Failed):
                    self._failed(connection, event)
            except Exception as fault:
                self._fault(0 if isinstance(event, Refused) else event.pair, fault)
        self._lookups.flush()

    def _accepted(self, event: Accepted) -> None:
        sandbox = self._by_number.get(event.sandbox)
        if sandbox is None or sandbox.leaving_at is not None:
            self._relay.close(event.pair, True)
            return
        port = event.port
        name = sandbox.names.name(event.address) or ""
        told = flow.Flow(flow.Destination(event.address, port, name), sandbox.decide, sandbox.open)
        connection = Connection(event.pair, sandbox, "" if name else event.address, port, told)
        self._connections[event.pair] = sandbox.connections[event.pair] = connection
        if event.redirected:
            self._apply(connection, told.start())
        else:
            why = "The connection was made to the proxy itself, not to a host."
            self._count(sandbox, Ask("", port, By.ADDRESS), Deny("not-redirected", why))
            self._cut(connection)

    def _closed(self, event: Closed) -> None:
        connection = self._connections.pop(event.pair, None)
        if connection is None:
            if event.reason is Reason.DEADLINE and not event.said:
                self._silent(self._by_number.get(event.sandbox), 0, "no bytes came")
            return
        sandbox = connection.sandbox
        del sandbox.connections[event.pair]
        sandbox.early -= connection.early
        if connection.opening is not None and connection.found is not None:
            # Nothing that was held for a connection outlives it, however long its name takes.
            self._lookups.drop(sandbox.share, connection.opening.name, connection.found)
        connection.opening = connection.found = None
        if connection.counted is not None:
            self._ledger.closed(sandbox.id, *connection.counted, event.up_bytes, event.down_bytes, self._at)
        elif event.reason is Reason.DEADLINE and connection.ask is None:
            self._silent(sandbox, connection.port, "no name came")
        if sandbox.leaving_at is not None and not sandbox.connections:
            self._gone(sandbox)

    def _silent(self, sandbox: Sandbox | None, port: int, what: str) -> None:
        if sandbox is not None:
            why = f"The connection was open until its deadline and {what}."
            self._ledger.denied(sandbox.id, "", port, "no-name", "", why, self._at)

    def _full(self, event: Refused) -> None:
        sandbox = self._by_number.get(event.sandbox)
        if sandbox is not None:
            why = "The sandbox has as many connections open as it may; further ones are refused."
            self._ledger.denied(sandbox.id, "", 0, "too-many-connections", "", why, self._at, event.count)

    def _data(self, connection: Connection, event: Data) -> None:
        told = connection.flow
        if connection.ask is None and self._is_too_early(connection, connection.early + len(event.data)):
            return
        self._apply(connection, told.data(_FLOW_WAY[event.direction], event.data))
        if connection.ask is not None and told.held != connection.early:
            self._is_too_early(connection, told.held)

    def _is_too_early(self, connection: Connection, held: int) -> bool:
        """Ends the connection where it holds more than before, and its sandbox more than it may."""
        sandbox, more = connection.sandbox, held - connection.early
        connection.early = held
        sandbox.early += more
        if more <= 0 or sandbox.early <= EARLY_BYTES:
            return False
        why = "The sandbox has more bytes waiting on its connections than it may."
        self._ledger.denied(sandbox.id, "", connection.port, "too-many-connections", "", why, self._at)
        self._cut(connection)
        return True

    def _opened(self, connection: Connection, event: Opened) -> None:
        ask, sandbox = connection.ask, connection.sandbox
        if ask is None:
            return
        name = ask.name or event.address
        if connection.counted is not None:  # an upstream before this one: its bytes go to the last
            self._ledger.closed(sandbox.id, *connection.counted, 0, 0, self._at)
        connection.counted = (name, ask.port)
        self._ledger.allowed(sandbox.id, name, ask.port, connection.rule, ask.by.value, self._at)
        self._apply(connection, connection.flow.opened())

    def _failed(self, connection: Connection, event: Failed) -> None:
        ask, connection.ask = connection.ask, None
        if ask is not None:
            what = ask.name or "The address"
            self._fail(connection, ask, "unreachable", f"{what} could not be reached: {os.strerror(event.error)}.")

    # The flow's commands

    def _apply(self, connection: Connection, commands: list[flow.Command]) -> None:
        relay, pair = self._relay, connection.pair
        for command in commands:
            if connection.opening is not None and not isinstance(command, _AT_ONCE):
                connection.held.append(command)
            elif isinstance(command, flow.Open):
                self._open(connection, command)
            elif isinstance(command, flow.Pass):
                relay.pass_(pair, _WAY[command.direction], command.count)
            elif isinstance(command, flow.Read):
                relay.read(pair, _WAY[command.direction], command.most)
            elif isinstance(command, flow.Send):
                relay.send(pair, _WAY[command.direction], command.data)
            elif isinstance(command, flow.Finish):
                relay.finish(pair, _WAY[command.direction])
            elif isinstance(command, flow.Deadline):
                relay.deadline(pair, command.ms)
            elif isinstance(command, flow.Close):
                connection.opening = None
                relay.close(pair, command.reset)
            else:
                connection.opening = None
                id = self._count(connection.sandbox, command.ask, command.deny, connection.address)
                self._apply(connection, connection.flow.refused(id))

    def _cut(self, connection: Connection) -> None:
        connection.opening = connection.ask = None
        self._relay.close(connection.pair, True)

    def _open(self, connection: Connection, command: flow.Open) -> None:
        connection.opening, connection.held, connection.decider = command, [], connection.sandbox.decider
        if not command.name:
            self._found(connection, command, [command.address], "")
            return
        found = connection.found = partial(self._found, connection, command)
        if not self._lookups.want(connection.sandbox.share, command.name, found, self._now):
            found([], "too many look-ups at once")

    def _found(self, connection: Connection, command: flow.Open, addresses: list[str], reason: str) -> None:
        connection.found = None
        if connection.opening is command:
            try:
                self._dial(connection, command, addresses, reason)
            except Exception as fault:
                self._fault(connection.pair, fault)

    def _dial(self, connection: Connection, command: flow.Open, addresses: list[str], reason: str) -> None:
        sandbox, name = connection.sandbox, command.name
        ask = Ask(name, command.port, command.by)
        verdict: Allow | Deny = command.allow
        if connection.decider is not sandbox.decider:  # the policy is another one by now
            verdict = sandbox.decide(ask)
        if isinstance(verdict, Deny):
            self._fail(connection, ask, verdict.rule, verdict.why)
            return
        if not addresses:
            self._fail(connection, ask, "unresolved", f"{name} does not resolve ({reason}).")
            return
        delivers = self._local.delivers
        good = [text for text in _usable(tuple(addresses[:ADDRESSES]), verdict.private) if not delivers(text)]
        if not good:
            self._fail(connection, ask, "private-address", _private(name, addresses[0]))
            return
        connection.ask, connection.rule, connection.private = ask, verdict.rule, verdict.private
        sandbox.early -= connection.early
        connection.early = 0
        port = command.port
        self._relay.open(connection.pair, [(text, port) for text in good], command.first, command.up, command.down)
        self._let_go(connection)

    def _fail(self, connection: Connection, ask: Ask, rule: str, why: str) -> None:
        id = self._count(connection.sandbox, ask, Deny(rule, why))
        connection.opening, connection.held = None, []
        self._apply(connection, connection.flow.failed(rule, why, id))

    def _let_go(self, connection: Connection) -> None:
        held, connection.opening, connection.held = connection.held, None, []
        if held:
            self._apply(connection, held)

    # The rest

    def _count(self, sandbox: Sandbox, ask: Ask, deny: Deny, address: str = "") -> str:
        """Under the address where it went, if there is no name and that is what is wrong."""
        name = ask.name or (address if deny.rule in ("address", "no-name") else "")
        return self._ledger.denied(sandbox.id, name, ask.port, deny.rule, ask.by.value, deny.why, self._at)

    def _here(self, id: str) -> Sandbox:
        sandbox = self._sandboxes.get(id)
        if sandbox is None or sandbox.leaving_at is not None:
            raise ValueError("this sandbox is not here")
        return sandbox

    def _gone(self, sandbox: Sandbox) -> None:
        if self._by_number.pop(sandbox.number, None) is not None:
            del self._sandboxes[sandbox.id]
            self._turns.forget(sandbox.number)
            if sandbox.gone is not None:
                sandbox.gone()

    def _fault(self, pair: int, fault: Exception) -> None:
        """A guest's bytes brought us here: its connection ends, and one line says where to look."""
        self._relay.close(pair, True)
        self._log.fault("with a connection, which was ended", fault)


_AT_ONCE: Final = (flow.Close, flow.Refuse, flow.Deadline)


@lru_cache(maxsize=4096)
def _usable(addresses: tuple[str, ...], private: bool) -> list[str]:
    """The same few answers come again and again, and what is said of an address never changes."""
    return vet.usable(addresses, private)


def _private(name: str, address: str) -> str:
    if name:
        return f"{name} resolves to a private address ({address[:45]})."
    return f"{address[:45]} is a private address."
