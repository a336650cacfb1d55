"""The machine itself, and what its sandboxes use of it."""

from __future__ import annotations

from sandboxd.routes.reply import Handler, without

HANDLERS: dict[str, Handler] = {
    "metrics": without("metrics"),
    "node": without("node", of_sandbox=False),
    "cordon": without("node", of_sandbox=False),
}
