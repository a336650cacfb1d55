"""Where the person's own files are, whatever the environment says of it."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from cli import place
from sandboxd.errors import SandboxError

KNOWN = pwd.getpwuid(os.getuid()).pw_dir


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        pytest.param({"HOME": "/h"}, "/h/.config/sandbox", id="below HOME"),
        pytest.param({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}, "/c/sandbox", id="in XDG_CONFIG_HOME"),
        pytest.param({"HOME": "/h", "XDG_CONFIG_HOME": "c"}, "/h/.config/sandbox", id="a relative one is none"),
        pytest.param({"HOME": "/h", "XDG_CONFIG_HOME": ""}, "/h/.config/sandbox", id="an empty one is none"),
        pytest.param({}, f"{KNOWN}/.config/sandbox", id="HOME is not set"),
        pytest.param({"HOME": ""}, f"{KNOWN}/.config/sandbox", id="HOME is empty"),
        pytest.param({"HOME": "h"}, f"{KNOWN}/.config/sandbox", id="HOME is relative"),
        pytest.param({"HOME": "."}, f"{KNOWN}/.config/sandbox", id="HOME is the working directory"),
    ],
)
def test_the_directory_of_settings(environ: dict[str, str], found: str) -> None:
    assert place.config_dir(environ) == found


def test_a_user_the_system_does_not_know_is_told_to_set_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert place.home({"HOME": "/h"}) == "/h"
    with pytest.raises(SandboxError, match="no home directory is known here: set HOME to one"):
        place.home({"HOME": ""})


@pytest.mark.parametrize("home", ["", ".", "h"])
def test_nothing_of_the_working_directory_is_taken_for_settings(tmp_path: Path, home: str) -> None:
    for below in (".config/sandbox", "h/.config/sandbox"):
        (tmp_path / below).mkdir(parents=True)
        (tmp_path / below / "config.yaml").write_text("planted: 1\n")
        (tmp_path / below / "contexts.json").write_text("planted")
    environ = os.environ | {"HOME": home, "XDG_CONFIG_HOME": ".config", "XDG_RUNTIME_DIR": ""}
    for argv in (["context", "ls"], ["run", "--endpoint", f"unix://{tmp_path}/none", "--", "true"]):
        done = subprocess.run(
            [sys.executable, "-m", "cli", *argv], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert "planted" not in done.stdout + done.stderr and str(tmp_path / ".config") not in done.stderr
