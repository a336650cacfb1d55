"""Named volumes."""

from __future__ import annotations

from sandboxd.routes.reply import Handler, without

HANDLERS: dict[str, Handler] = {
    "create_volume": without("volumes", of_sandbox=False),
    "volumes": without("volumes", of_sandbox=False),
    "delete_volume": without("volumes", of_sandbox=False),
}
