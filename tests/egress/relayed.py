"""A flow between a guest and servers, with the relay's rules kept by a model instead of sockets.

The model is strict where the relay relies on the flow: bytes are let past only while their direction rests, a refusal
ends its list, and nothing is done on a connection that is over.
"""

from __future__ import annotations

from egress.flow import (
    FREE,
    Close,
    Command,
    Deadline,
    Destination,
    Direction,
    Finish,
    Flow,
    Open,
    Pass,
    Read,
    Refuse,
    Send,
)
from egress.policy import Allow, Ask, Decider, Deny, Mode, Policy

UP, DOWN = Direction.UP, Direction.DOWN

LISTED = Policy(Mode.ALLOWLIST, allow=("allowed.test", "second.test"), allow_tcp=("git.test:22", "allowed.test:8080"))


class Relayed:
    def __init__(
        self,
        policy: Policy = LISTED,
        port: int = 80,
        name: str = "allowed.test",
        address: str = "198.18.0.1",
        piece: int = 1 << 16,
        connects: bool = True,
    ) -> None:
        self.decider = Decider(policy)
        self.asked: list[Ask] = []
        self.piece = piece
        self.connects = connects
        self.opens: list[Open] = []
        self.received: list[bytearray] = []         # by each upstream
        self.finished: list[bool] = []              # each upstream was sent the end of the stream
        self.to_guest = bytearray()
        self.guest_finished = False
        self.closed = ""                            # "reset" or "gently"
        self.refusals: list[Refuse] = []
        self.deadline = 0
        self.passed = [0, 0]                        # bytes that Python never saw
        self.events = 0
        self._in = [bytearray(), bytearray()]
        self._ends = [False, False]
        self._told = [False, False]
        self._read = [17 << 10 if port in (80, 443) else 0, 0]
        self._pass = [0, 0]
        self._still = [False, False]
        self._dialling = False
        self.flow = Flow(Destination(address, port, name), self._decide, policy.mode is Mode.OPEN)
        self._apply(self.flow.start())

    def _decide(self, ask: Ask) -> Allow | Deny:
        self.asked.append(ask)
        return self.decider.decide(ask)

    # The two ends

    def guest(self, data: bytes) -> Relayed:
        self._in[UP] += data
        return self._run()

    def server(self, data: bytes) -> Relayed:
        self._in[DOWN] += data
        return self._run()

    def guest_ends(self) -> Relayed:
        self._ends[UP] = True
        return self._run()

    def server_ends(self) -> Relayed:
        self._ends[DOWN] = True
        return self._run()

    def connected(self) -> Relayed:
        assert self._dialling
        self._dialling = False
        self._apply(self.flow.opened())
        return self._run()

    def fails(self, rule: str, why: str) -> Relayed:
        assert self._dialling
        self._dialling = False
        self._apply(self.flow.failed(rule, why, "abcd2345"))
        return self._run()

    @property
    def page(self) -> str:
        return self.to_guest.decode()

    @property
    def rule(self) -> str:
        return self.refusals[-1].deny.rule if self.refusals else ""

    # The relay

    def _run(self) -> Relayed:
        while not self.closed and (self._move(UP) or self._move(DOWN)):
            pass
        return self

    def _move(self, direction: Direction) -> bool:
        if direction is DOWN and (not self.opens or self._dialling):
            return False
        waiting = self._in[direction]
        if waiting and self._pass[direction]:
            if self._dialling or not self.opens:
                return False
            count = min(self._pass[direction], len(waiting))
            if self._pass[direction] != FREE:
                self._pass[direction] -= count
            self._deliver(direction, bytes(waiting[:count]))
            self.passed[direction] += count
            del waiting[:count]
            return True
        if waiting and self._read[direction] and not self._still[direction]:
            count = min(self._read[direction], len(waiting), self.piece)
            data = bytes(waiting[:count])
            del waiting[:count]
            self._read[direction] -= count
            self._still[direction] = True
            self.events += 1
            self._apply(self.flow.data(direction, data))
            return True
        if not waiting and self._ends[direction] and not self._told[direction]:
            if self._pass[direction] == FREE:
                self._told[direction] = True
                self._finish(direction)
                return True
            if self._pass[direction] or (self._read[direction] and not self._still[direction]):
                self._told[direction] = True
                self._apply(self.flow.ended(direction))
                return True
        return False

    def _deliver(self, direction: Direction, data: bytes) -> None:
        if direction is DOWN:
            self.to_guest += data
        else:
            self.received[-1] += data

    def _finish(self, direction: Direction) -> None:
        if direction is DOWN:
            self.guest_finished = True
        else:
            self.finished[-1] = True

    def _apply(self, commands: list[Command]) -> None:
        for position, command in enumerate(commands):
            assert not self.closed, "a command on a connection that is over"
            match command:
                case Open():
                    assert not self._dialling
                    self.opens.append(command)
                    self.received.append(bytearray(command.first))
                    self.finished.append(False)
                    self._pass = [command.up, command.down]
                    self._read[DOWN] = 0
                    if command.up:
                        self._still[UP] = False
                    self._still[DOWN] = self._ends[DOWN] = self._told[DOWN] = False
                    self._in[DOWN].clear()
                    self._dialling = True
                case Send(direction, data):
                    assert data
                    self._deliver(direction, data)
                case Read(direction, most):
                    self._read[direction] += most
                    assert self._read[direction] <= 32 << 10, "credit without bound"
                    self._still[direction] = False
                case Pass(direction, count):
                    assert self._still[direction], "let past while more may be on its way here"
                    self._pass[direction] = FREE if count == FREE else self._pass[direction] + count
                    self._still[direction] = False
                case Finish(direction):
                    self._finish(direction)
                case Deadline(ms):
                    self.deadline = ms
                case Close(reset):
                    assert position == len(commands) - 1
                    self.closed = "reset" if reset else "gently"
                case Refuse():
                    assert position == len(commands) - 1
                    self.refusals.append(command)
                    self._apply(self.flow.refused("abcd2345"))
        if self._dialling and self.connects:
            self.connected()


