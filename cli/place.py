"""Where the person's own files are."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sandboxd.errors import SandboxError


def config_dir(environ: Mapping[str, str] = os.environ) -> str:
    """`$XDG_CONFIG_HOME/sandbox`, else `~/.config/sandbox`."""
    return os.path.join(base(environ, "XDG_CONFIG_HOME", ".config"), "sandbox")


def base(environ: Mapping[str, str], variable: str, else_below_home: str) -> str:
    """A directory of the XDG base directory specification, by which a relative path counts for nothing."""
    given = environ.get(variable, "")
    return given if os.path.isabs(given) else os.path.join(home(environ), else_below_home)


def home(environ: Mapping[str, str] = os.environ) -> str:
    """HOME, else what the system knows: one that is empty or relative would be / or whatever directory this is."""
    given = environ.get("HOME", "")
    if os.path.isabs(given):
        return given
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise SandboxError("no home directory is known here: set HOME to one, as an absolute path") from None
