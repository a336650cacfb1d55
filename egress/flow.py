"""One connection of a guest: what is said on it, and what is done with it.

In: where it was dialled to, its bytes in pieces of any size, what became of the dial. Out: commands for the relay.
Nothing is dialled before a name was decided by `decide`, and bytes go on as they came or not at all.

    FIRST     the first flight. TLS: the ClientHello's name is decided, then the server is asked (HELLO).
              HTTP: every request is decided (WEB). CONNECT: its target is decided, the guest gets its 200, and what
              comes through is a first flight again, which has to name the same host.
    DIALLING  between Open and opened() or failed().
    WEB       plain HTTP. Requests to the present host go on at once. One to another host waits until the responses
              due have come, is then decided and dialled; one that is refused has its answer after them too.
    HELLO     TLS, until the server has answered. If it asks for a second hello, that has to name the same; everything
              else the guest has to say waits so long. Then all of it passes (OPAQUE).
    OPAQUE    TLS, whatever follows a 101, any port other than 80 and 443: passes without us.
    OVER      refused or closed.

Where the policy is open, a connection that names no host may be decided by its address.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from egress import http1, tls
from egress.command import FREE, Close, Command, Deadline, Direction, Finish, Open, Pass, Read, Refuse, Send
from egress.policy import WEB_PORTS, Allow, Ask, By, Deny, remedy
from egress.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FREE", "Close", "Command", "Deadline", "Destination", "Direction", "Finish", "Flow", "Open", "Pass", "Read",
    "Refuse", "Send",
]  # fmt: skip

FIRST_BYTES: Final = 17 << 10           # read credit with which a connection to port 80 or 443 begins
HEAD_MS: Final = 15_000                 # for a later head on its connection, from its first byte
HELLO_MS: Final = 60_000                # for a server's first words, and a second hello
MAX_SECOND: Final = tls.MAX_HELLO + (16 << 10)   # held: early data, then a second hello
MAX_DUE: Final = 64                     # requests sent on before their responses came

UP, DOWN = Direction.UP, Direction.DOWN

_MORE_REQUESTS: Final = (b"h2", b"http/", b"tls/")     # what may be switched to and has names of its own
_TLS: Final = 0x16                      # the first byte of a handshake record
_STATUS: Final = {"malformed": 400, "names-disagree": 400, "no-name": 400}
_REASONS: Final = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}
_ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the guest dialled to."""

    address: str
    port: int
    name: str                           # the one the address was given for, else ""


class _Stage(Enum):
    FIRST = auto()
    DIALLING = auto()
    WEB = auto()
    HELLO = auto()
    OPAQUE = auto()
    OVER = auto()


class Flow:
    def __init__(self, destination: Destination, decide: Callable[[Ask], Allow | Deny], open_mode: bool) -> None:
        self.current: Ask | None = None
        """What the upstream, or the tunnel before it has one, was allowed for."""
        self._destination = destination
        self._port = destination.port
        self._decide = decide
        self._open_mode = open_mode
        self._stage = _Stage.FIRST
        self._then = _Stage.OPAQUE              # the stage after DIALLING
        self._tunnel: Ask | None = None         # the CONNECT we are in
        self._hello: tls.Hello | None = None
        self._named: tls.Outcome | None = None  # what the hello said
        self._server = tls.Answer()
        self._again: tls.Again | None = None    # the server wants a second hello
        self._refusal: tuple[Ask, Deny] | None = None
        self._readable = False                  # an HTTP answer of ours would stand where one is expected
        self._method = ""                       # of the request such an answer is to
        self._up = Stream(UP, FIRST_BYTES if destination.port in WEB_PORTS else 0)
        self._down = Stream(DOWN, 0)
        self._up_ended = False
        self._due: deque[http1.Request] = deque()       # sent on, not answered
        self._answering = False                 # DOWN is within the response to the first of them
        self._last = False                      # that response is the last of this connection
        self._held = False                      # the next request waits for the responses due
        self._clock = False                     # a deadline for a head runs

    @property
    def held(self) -> int:
        """Bytes that are kept until more have come."""
        return len(self._up.buffer) + len(self._down.buffer)

    def start(self) -> list[Command]:
        if self._port in WEB_PORTS:
            return []
        return self._by_address(Ask(self._destination.name, self._port, By.ADDRESS))

    def data(self, direction: Direction, data: bytes) -> list[Command]:
        stream = self._up if direction is UP else self._down
        match self._stage:
            case _Stage.FIRST if direction is UP:
                stream.add(data)
                return self._first(data)
            case _Stage.DIALLING if direction is UP:
                stream.add(data)
            case _Stage.WEB:
                stream.add(data)
                return self._requests() if direction is UP else self._responses()
            case _Stage.HELLO:
                stream.add(data)
                return self._second(data) if direction is UP else self._answered(data)
            case _Stage.OPAQUE:
                return [Send(direction, data), Pass(direction, FREE)]
        return []       # over; or from the upstream before the one being dialled

    def ended(self, direction: Direction) -> list[Command]:
        if direction is UP:
            self._up_ended = True
        match self._stage:
            case _Stage.FIRST:
                return self._close(reset=False)
            case _Stage.WEB if direction is DOWN:
                return self._close(reset=False)
            case _Stage.WEB if not self._held:
                return self._no_more_requests()
            case _Stage.HELLO if direction is DOWN:
                self._stage = _Stage.OPAQUE
                return [*self._let_go(DOWN), Finish(DOWN), *self._let_go(UP)]
            case _Stage.HELLO | _Stage.OPAQUE:
                return [Finish(direction)]
        return []

    def opened(self) -> list[Command]:
        if self._stage is not _Stage.DIALLING:
            return []
        self._stage = self._then
        if self._stage is _Stage.HELLO:
            return [Deadline(HELLO_MS), self._down.read()]
        return [self._down.read(), *self._requests()] if self._stage is _Stage.WEB else []

    def failed(self, rule: str, why: str, id: str) -> list[Command]:
        """Nothing could be dialled."""
        if self._stage is not _Stage.DIALLING or self.current is None:
            return []
        return self._answer(502, self.current, Deny(rule, why), id)

    def refused(self, id: str) -> list[Command]:
        if self._refusal is None:
            return []
        ask, deny = self._refusal
        self._refusal = None
        return self._answer(_STATUS.get(deny.rule, 403), ask, deny, id)

    # The first flight

    def _first(self, data: bytes) -> list[Command]:
        buffer = self._up.buffer
        if self._hello is None and buffer[0] != _TLS:
            if not chr(buffer[0] & 0xDF).isupper() or buffer[0] > 0x7F:
                why = "The connection speaks neither TLS nor HTTP, so it names no host."
                return self._nameless(By.ADDRESS, Deny("malformed", why))
            return self._first_request()
        if self._hello is None:
            self._hello = tls.Hello()
        self._named = self._hello.feed(data)
        match self._named:
            case tls.ServerName(name):
                ask = Ask(name, self._port, By.CONNECT if self._tunnel else By.TLS)
                verdict = self._verdict(ask)
                return self._refuse(ask, verdict) if isinstance(verdict, Deny) else self._open(ask, verdict)
            case tls.Bad(rule, why):
                return self._nameless(By.TLS, Deny(rule, why))
        return [self._up.read()]

    def _first_request(self) -> list[Command]:
        self._readable = True
        try:
            head = self._up.head()
            if head is None:
                return [self._up.read()]
            request = http1.request(head)
        except http1.Malformed as fault:
            return self._nameless(By.HTTP, _deny(fault), fault.name)
        return self._connect(request) if request.method == "CONNECT" else self._dial(request)

    def _connect(self, request: http1.Request) -> list[Command]:
        ask = self._ask(request)
        if self._tunnel is not None:
            return self._refuse(ask, Deny("malformed", "There is no CONNECT within a CONNECT."))
        verdict = self._verdict(ask)
        if isinstance(verdict, Deny):
            return self._refuse(ask, verdict)
        self.current = self._tunnel = ask
        self._port = ask.port
        self._readable = False
        self._up.drop_head()
        inner = bytes(self._up.buffer)
        return [Send(DOWN, _ESTABLISHED), *(self._first(inner) if inner else [self._up.read()])]

    def _ask(self, request: http1.Request) -> Ask:
        return Ask(request.name, request.port or self._port, By.CONNECT if request.method == "CONNECT" else By.HTTP)

    def _verdict(self, ask: Ask) -> Allow | Deny:
        """Of a name read from the wire."""
        tunnel = self._tunnel
        if tunnel is not None and (ask.name, ask.port) != (tunnel.name, tunnel.port):
            why = f"CONNECT was for {tunnel.name}:{tunnel.port}, what came through it is for {ask.name}:{ask.port}."
            return Deny("names-disagree", why)
        verdict = self._decide(ask)
        if isinstance(verdict, Allow) and ask.port not in WEB_PORTS:
            return Deny("malformed", f"A proxy serves ports 80 and 443 only; dial {ask.name}:{ask.port} directly.")
        return verdict

    def _nameless(self, by: By, deny: Deny, name: str = "") -> list[Command]:
        """No name stands on the wire. Where all is allowed but what is denied, the address may do."""
        by_address = Ask(self._destination.name, self._port, By.ADDRESS)
        if self._open_mode:
            if by is By.TLS:
                if deny.rule in ("no-name", "address"):
                    return self._by_address(self._tunnel or by_address)
            # Unlike TLS, what we cannot read the server might read: as a request for a name that is denied.
            elif self._tunnel is None and isinstance(self._decide(Ask("", self._port, By.ADDRESS)), Allow):
                return self._by_address(by_address)
        return self._refuse(Ask(name, self._port, by), deny)

    def _by_address(self, ask: Ask) -> list[Command]:
        self._readable = False
        verdict = self._decide(ask)
        return self._refuse(ask, verdict) if isinstance(verdict, Deny) else self._open(ask, verdict)

    def _open(self, ask: Ask, allow: Allow) -> list[Command]:
        """Everything passes, behind what has come already; with TLS, once the server has answered the hello."""
        self.current, self._stage = ask, _Stage.DIALLING
        address = "" if ask.name else self._destination.address
        first = self._up.everything()
        if self._hello is None:
            self._then = _Stage.OPAQUE
            return [Open(ask.name, address, ask.port, allow, first, FREE, FREE, ask.by)]
        self._then = _Stage.HELLO
        self._up.buffer += self._hello.behind
        first = first[: len(first) - len(self._hello.behind)]
        return [Open(ask.name, address, ask.port, allow, first, 0, 0, ask.by)]

    # TLS, until nothing more is said in the clear

    def _answered(self, data: bytes) -> list[Command]:
        again = self._server.feed(data)
        if again is None:
            return [self._down.read()]
        if not again:
            self._stage = _Stage.OPAQUE
            return [Deadline(0), *self._let_go(DOWN), *self._let_go(UP)]
        self._again = tls.Again()
        return [*self._let_go(DOWN), *self._second(bytes(self._up.buffer))]

    def _second(self, data: bytes) -> list[Command]:
        if self._again is None or self.current is None:
            return []
        named = self._again.feed(data)
        if isinstance(named, tls.NeedMore):
            if len(self._up.buffer) <= MAX_SECOND:
                return [self._up.read()]
            named = tls.Bad("malformed", "There is too much before the second TLS hello.")
        if named == self._named:
            self._stage = _Stage.OPAQUE
            return [Deadline(0), *self._let_go(UP)]
        name = named.name if isinstance(named, tls.ServerName) else ""
        why = "The second TLS hello of a connection does not name the server that the first one named."
        return self._refuse(Ask(name, self._port, self.current.by), Deny("names-disagree", why))

    def _let_go(self, direction: Direction) -> list[Command]:
        """What is held goes on, and everything behind it."""
        stream = self._up if direction is UP else self._down
        held = stream.everything()
        commands: list[Command] = [Send(direction, held)] if held else []
        # Where it is not resting it passes behind its next Data.
        return [*commands, Pass(direction, FREE)] if stream.resting else commands

    # Plain HTTP

    def _dial(self, request: http1.Request) -> list[Command]:
        """A request to another host than the present one. Nothing is due."""
        ask = self._ask(request)
        self._method = request.method
        verdict = self._verdict(ask)
        if isinstance(verdict, Deny):
            return self._refuse(ask, verdict)
        self._up.accept(request.body)
        try:
            self._up.advance()
        except http1.Malformed as fault:
            return self._refuse(ask, _deny(fault))
        self._due.append(request)
        self._down = Stream(DOWN, 0)
        self.current, self._stage, self._then = ask, _Stage.DIALLING, _Stage.WEB
        first, ahead = self._up.accepted(), self._up.ahead()
        self._up.resting = self._up.resting and not ahead
        return [Open(ask.name, "", ask.port, verdict, first, ahead, 0, ask.by)]

    def _requests(self) -> list[Command]:
        """Goes through what the guest sent, as far as it can be decided about."""
        up = self._up
        self._held = False
        try:
            while up.advance():
                commands = self._next_request()
                if commands is not None:
                    return [*up.send(), *self._head_clock(commands), *commands]
        except http1.Malformed as fault:                    # within a body
            self._readable = len(self._due) == 1 and not self._answering and not self._down.buffer
            return self._refuse(Ask("", self._port, By.HTTP), _deny(fault))
        if self._up_ended:
            return [*up.send(), Finish(UP)]
        commands = up.go_on()
        return [*self._head_clock(commands), *commands]

    def _next_request(self) -> list[Command] | None:
        """Between two messages. None: a request goes on, and its body is next."""
        up = self._up
        if self._last and not self._due and up.buffer:
            return self._close(reset=False)                 # it can have no answer on this connection any more
        try:
            head = up.head()
            if head is None:
                return self._no_more_requests() if self._up_ended else [up.read()]
            request = http1.request(head)
        except http1.Malformed as fault:
            return self._hold() if self._due else self._refuse(Ask(fault.name, self._port, By.HTTP), _deny(fault))
        ask = self._ask(request)
        if (
            ask == self.current
            and not self._last
            and len(self._due) < MAX_DUE
            and isinstance(self._verdict(ask), Allow)
        ):
            up.accept(request.body)
            self._due.append(request)
            return None
        if self._due:
            return self._hold()
        if request.method == "CONNECT":
            return self._refuse(ask, Deny("malformed", "CONNECT has to come first on its connection."))
        return self._dial(request)

    def _hold(self) -> list[Command]:
        self._held = True
        return []

    def _no_more_requests(self) -> list[Command]:
        return [Finish(UP)] if self._due else self._close(reset=False)

    def _head_clock(self, commands: list[Command]) -> list[Command]:
        """A deadline runs while part of a head is there and more is asked for."""
        begun = self._up.begun and any(isinstance(command, Read) for command in commands)
        if begun == self._clock:
            return []
        self._clock = begun
        return [Deadline(HEAD_MS if begun else 0)]

    def _responses(self) -> list[Command]:
        down = self._down
        try:
            while down.advance():
                if self._answering:
                    self._answering = False
                    self._due.popleft()
                if not self._due:
                    if down.buffer:                         # nothing was asked: a server's last word, mostly
                        self._last = True
                        down.accept_rest()
                        continue
                    break
                head = down.head()
                if head is None:
                    break
                response = http1.response(head, self._due[0].method)
                if response.status == 101:
                    return self._switch(response)
                if response.status >= 200:
                    self._answering, self._last = True, response.close
                down.accept(response.body)
        except http1.Malformed:                             # it ends with the connection, then
            self._last = True
            down.accept_rest()
            down.advance()
        commands = down.go_on()
        if self._held:
            commands += self._requests()
        elif not self._due and self._up_ended:
            commands += self._close(reset=False)
        return commands

    def _switch(self, response: http1.Response) -> list[Command]:
        """101: another protocol from here on."""
        asked = self._due[0].upgrade
        if not asked or any(token.strip().startswith(_MORE_REQUESTS) for token in response.upgrade.split(b",")):
            why = "The server went over to a protocol in which requests could not be told apart."
            self._readable = len(self._due) == 1
            return self._down.send() + self._refuse(Ask("", self._port, By.HTTP), Deny("malformed", why))
        self._stage = _Stage.OPAQUE
        commands: list[Command] = [Send(DOWN, self._down.everything()), Pass(DOWN, FREE)]
        if left := self._up.everything():
            commands.append(Send(UP, left))
        if self._up.resting:                                # else it may pass behind its next Data
            commands.append(Pass(UP, FREE))
        return commands

    # The end

    def _refuse(self, ask: Ask, deny: Deny) -> list[Command]:
        self._stage = _Stage.OVER
        self._refusal = ask, deny
        return [Refuse(ask, deny)]

    def _close(self, reset: bool) -> list[Command]:
        self._stage = _Stage.OVER
        return [Close(reset)]

    def _answer(self, status: int, ask: Ask, deny: Deny, id: str) -> list[Command]:
        self._stage = _Stage.OVER
        if not self._readable:
            return [Close(reset=True)]
        page = _page(status, ask, deny, id, self._method != "HEAD")
        return [Send(DOWN, page), Close(reset=False)]


def _deny(fault: http1.Malformed) -> Deny:
    whole = fault.why.endswith(".")         # the fault is the name itself
    return Deny(fault.rule, fault.why if whole else f"The HTTP request cannot be passed on: {fault.why}.")


def _page(status: int, ask: Ask, deny: Deny, id: str, body: bool) -> bytes:
    host = (ask.name if ask.port in WEB_PORTS else f"{ask.name}:{ask.port}") if ask.name else "This request"
    what = "could not be reached from the sandbox" if status == 502 else "was blocked by sandbox policy"
    lines = [f"{host} {what} ({deny.rule}). {deny.why}"]
    if flag := remedy(deny.rule, ask.name, ask.port):
        lines.append(f"Whoever runs this sandbox can allow it: {flag}")
    lines.append(f"More about this refusal: sandbox-cli why {id}")
    text = "".join(line + "\n" for line in lines).encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(text)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + (text if body else b"")
