"""Where the person's own files are."""

from __future__ import annotations

import os


def config_dir() -> str:
    """`$XDG_CONFIG_HOME/sandbox`, else `~/.config/sandbox`."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.config"), "sandbox")
