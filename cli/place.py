"""Where the person's own files are."""

from __future__ import annotations

import os
from collections.abc import Mapping


def config_dir(environ: Mapping[str, str] = os.environ) -> str:
    """`$XDG_CONFIG_HOME/sandbox`, else `~/.config/sandbox`."""
    base = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home, ".config"), "sandbox")
