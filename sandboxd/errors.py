"""Errors that cross the API, and the few that stay on this side of it.

Every `ApiError` has a `code` that is written on the wire (`{"error": {"code", "message"}}`). The daemon raises
these classes and the client raises the same ones again from the code it read, so a caller on either side catches
one type. Messages are for the person at the terminal: they say what is wrong and what to do, and never hold a path
of the daemon's state or a value from an environment.
"""

from __future__ import annotations


class SandboxError(Exception):
    """Anything this project reports to a person in one line."""


class ApiError(SandboxError):
    """An answer of the API other than success. `code` is the wire name, `status` the HTTP status it comes with."""

    code = "internal"
    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(ApiError):
    """Malformed, unknown field, or out of range."""

    code = "invalid_request"
    status = 400


class MediaTypeRefused(InvalidRequest):
    """The body is not of the media type the route takes (415)."""

    status = 415


class BodyTooLarge(InvalidRequest):
    """A raw body over the route's limit (413)."""

    status = 413


class Unauthorized(ApiError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"
    status = 401


class Refused(ApiError):
    """Well formed and forbidden by policy; a retry is pointless."""

    code = "refused"
    status = 403


class ForbiddenOrigin(ApiError):
    """The request guard refused Host or Origin."""

    code = "forbidden_origin"
    status = 403


class NotFound(ApiError):
    """No such sandbox, process, file or endpoint."""

    code = "not_found"
    status = 404


class Conflict(ApiError):
    """Name taken, wrong state, directory not empty, read-only file system, stdin closed."""

    code = "conflict"
    status = 409


class Unsupported(ApiError):
    """A capability this endpoint lacks."""

    code = "unsupported"
    status = 501


class Unavailable(ApiError):
    """Not now: assets are being built, or the node takes no new sandboxes."""

    code = "unavailable"
    status = 503


class Internal(ApiError):
    """A fault of the daemon. The message on the wire is a fixed one."""

    code = "internal"
    status = 500


BY_CODE: dict[str, type[ApiError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, Unauthorized, Refused, ForbiddenOrigin, NotFound, Conflict, Unsupported, Unavailable, Internal
    )
}


class SetupError(SandboxError):
    """This machine lacks something; the message lists the commands that bring it."""


class BootFailed(SandboxError):
    """A machine did not come up.

    `step` names what was under way, `exit_code` is the VMM's (None while it runs), `console_tail` is the end of the
    guest's console: bytes a guest wrote, so whoever shows them passes them through termsafe.
    """

    def __init__(self, step: str, exit_code: int | None, console_tail: bytes) -> None:
        ended = "" if exit_code is None else f" (the VMM exited with {exit_code})"
        super().__init__(f"the machine did not start: {step}{ended}")
        self.step = step
        self.exit_code = exit_code
        self.console_tail = console_tail


class GuestProtocolError(SandboxError):
    """A guest broke the protocol: its connection is closed, whatever it asked for is refused."""
