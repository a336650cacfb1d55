"""Lines for whoever looks after this process. Bounded: however many a guest could cause, there are only so many."""

from __future__ import annotations

import sys
import time
from typing import Final

_QUIET_S: Final = 1.0


class Log:
    """To stderr. Once that takes no more, silence: what was decided is in the ledger too."""

    def __init__(self) -> None:
        self._fault_at = float("-inf")

    def line(self, text: str) -> None:
        try:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except OSError:
            return

    def fault(self, what: str, fault: Exception) -> None:
        """A fault of ours, met while doing `what`: one line, at most one a second."""
        now = time.monotonic()
        if now - self._fault_at < _QUIET_S:
            return
        self._fault_at = now
        at = fault.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at else "?"
        self.line(f"a fault of ours, {what}: {type(fault).__name__} at {where}: {str(fault)[:200]!r}")
