"""Whether an agent's provider answers: one HEAD request to its host, without any credential.

In: a host. Out: "" where it answers, else why not, for a person. Any status below 500 is an answer: 401, 404 and 429
come from a provider that is there. It goes through the person's own proxy where one is set (HTTPS_PROXY).
"""

from __future__ import annotations

import ssl
from http.client import HTTPException, HTTPMessage
from threading import Thread
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

PATIENCE_S = 3.0
TIMED_OUT = f"no answer within {PATIENCE_S:.0f} s"
_THEIR_FAULT = 500


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an answer; what it leads to was not asked about."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def probe(host: str) -> str:
    """`host` may have a port behind a colon. Takes three seconds at most."""
    told: list[str] = []
    # A name server that does not answer is waited for without regard to any timeout of a socket.
    asking = Thread(target=lambda: told.append(_ask(host)), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return told[0] if told else TIMED_OUT


def _ask(host: str) -> str:
    try:
        with build_opener(_NoRedirect).open(Request(f"https://{host}/", method="HEAD"), timeout=PATIENCE_S):
            return ""
    except HTTPError as answer:
        answer.close()
        return "" if answer.code < _THEIR_FAULT else f"it answers with status {answer.code}"
    except URLError as fault:
        return _why(fault.reason)
    except (OSError, HTTPException, ValueError) as fault:
        return _why(fault)


def _why(fault: object) -> str:
    if isinstance(fault, TimeoutError):
        return TIMED_OUT
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {fault.verify_message}"
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return str(fault) or type(fault).__name__
