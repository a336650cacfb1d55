"""Images that sandboxes start from."""

from __future__ import annotations

from sandboxd.routes.reply import Handler, without

HANDLERS: dict[str, Handler] = {
    "images": without("images", of_sandbox=False),
    "install_image": without("images", of_sandbox=False),
    "delete_image": without("images", of_sandbox=False),
}
