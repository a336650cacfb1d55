"""A length of time as a person types it: `30s`, `5m`, `1h30m`, `500ms`; `0` alone needs no unit."""

from __future__ import annotations

import re

from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_TEXT = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?(?:ms|[hms]))+")
_PART = re.compile(r"([\d.]+)(ms|[hms])")


def seconds(flag: str, text: str) -> float:
    """Raises SandboxError, which names the flag, for what is no length of time."""
    if text == "0":
        return 0.0
    if not text.isascii() or not _TEXT.fullmatch(text):
        raise SandboxError(f"{flag} {clean(text)}: not a length of time such as 30s, 5m or 1h30m")
    return sum(float(number) * UNIT_S[unit] for number, unit in _PART.findall(text))
