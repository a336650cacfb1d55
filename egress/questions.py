"""What a guest is told about names: the questions of its DNS sockets, put before its policy.

In: a sandbox and a question. Out: its outcome, at once or when the resolver has answered, and entries in the ledger.
Under an allowlist nothing is looked up: an allowed name has the address that stands for it here, and no other exists.
Where everything is allowed, the resolver says what exists, and the address is one of ours all the same.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from egress import dns
from egress.answer import Done
from egress.ledger import Ledger
from egress.lookup import Lookups
from egress.names import Full
from egress.policy import By, Deny
from egress.sandbox import Sandbox

_NOT_FOUND: Final = ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")
_NO_SUCH_NAME: Final = dns.NoSuchName()
_FAILURE: Final = dns.Failure()
_EMPTY: Final = dns.Empty()


class Questions:
    def __init__(self, lookups: Lookups, ledger: Ledger) -> None:
        self._lookups, self._ledger = lookups, ledger

    def decide(self, sandbox: Sandbox, question: dns.Question, done: Done) -> None:
        name = question.name
        if name is None:
            self._refused(sandbox, question.shown[:253], "malformed", "What was asked for is not a host name.")
            done(_NO_SUCH_NAME)
            return
        verdict = sandbox.decider.answers(name)
        if isinstance(verdict, Deny):
            self._refused(sandbox, name, verdict.rule, verdict.why)
            done(_NO_SUCH_NAME)
        elif sandbox.open:
            heard = partial(self._heard, sandbox, question, name, done)
            if not self._lookups.want(sandbox.share, name, heard, time.monotonic()):
                done(_FAILURE)
            self._lookups.flush()
        else:
            done(self._address(sandbox, question, name))

    def _heard(
        self, sandbox: Sandbox, question: dns.Question, name: str, done: Done, addresses: list[str], reason: str
    ) -> None:
        # The policy may be another one by now.
        if isinstance(sandbox.decider.answers(name), Deny):
            done(_NO_SUCH_NAME)
        elif addresses:
            done(self._address(sandbox, question, name))
        else:
            done(_NO_SUCH_NAME if reason in _NOT_FOUND else _FAILURE)

    def _address(self, sandbox: Sandbox, question: dns.Question, name: str) -> dns.Outcome:
        if question.type != dns.A_TYPE:
            return _EMPTY
        try:
            address = sandbox.address(name)
        except Full:
            self._refused(sandbox, name, "too-many-names", "The sandbox has used as many names as it gets in its life.")
            return _NO_SUCH_NAME
        return dns.Address(address) if address else _FAILURE

    def _refused(self, sandbox: Sandbox, name: str, rule: str, why: str) -> None:
        self._ledger.denied(sandbox.id, name, 0, rule, By.DNS.value, why, time.time())
