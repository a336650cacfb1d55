"""Programs that build assets: started, watched, and ended together with us.

A build program gets its own session and a watcher that reads a pipe from this process. When this process goes away,
however it goes, the pipe ends and the watcher kills the whole group, so that a killed build leaves no program at
work. Nothing is inherited but a clean environment; what a program prints is kept only as far as an error needs it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import SandboxError, SetupError

TAIL_LINES = 12

# `$$` is the session's leader and so the group; the read returns only when our end of the pipe is gone.
_WATCHED = 'exec 3<&0; (read -r _ <&3; kill -KILL -- -$$) & w=$!; "$@" <"$STDIN" 3<&-; c=$?; kill $w; exit $c'

# Which Debian package brings a program that builds need.
_PACKAGES = {
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "lz4": "lz4",
    "mkfs.erofs": "erofs-utils",
    "mmdebstrap": "mmdebstrap",
    "newgidmap": "uidmap",
    "newuidmap": "uidmap",
    "pip": "python3-pip",
    "tar": "tar",
    "unshare": "util-linux",
    "zstd": "zstd",
}


class BuildFailed(SandboxError):
    """A step of building an asset failed; `tail` is the end of what the program printed."""

    def __init__(self, step: str, exit_code: int, tail: str) -> None:
        super().__init__(f"could not {step} (exit {exit_code}){': ' + tail if tail else ''}")
        self.step = step
        self.exit_code = exit_code
        self.tail = tail


@dataclass(frozen=True, slots=True)
class Result:
    stdout: bytes
    stderr: str


def run(
    argv: Sequence[str | Path],
    *,
    step: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    on_line: Callable[[str], None] | None = None,
) -> Result:
    """Run a program to its end; `on_line` is told each line of its stderr as it comes.

    Raises `BuildFailed` with the step and the last lines of stderr, and `SetupError` when the program is missing.
    """
    words = [str(word) for word in argv]
    require([words[0]])
    with tempfile.TemporaryFile() as out, tempfile.NamedTemporaryFile() as given:
        given.write(stdin)
        given.flush()
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", *words],
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE,
            cwd=cwd, env={**environment(), **(env or {}), "STDIN": given.name}, start_new_session=True,
        )
        assert process.stderr is not None and process.stdin is not None
        lines: list[str] = []
        try:
            for raw in process.stderr:
                line = raw.decode(errors="replace").rstrip()
                lines.append(line)
                del lines[:-200]
                if on_line is not None:
                    on_line(line)
            code = process.wait()
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdin.close()
            process.stderr.close()
        if code != 0:
            raise BuildFailed(step, code, "\n".join(line for line in lines if line)[-2000:])
        out.seek(0)
        return Result(out.read(), "\n".join(lines))


def environment() -> dict[str, str]:
    """What build programs see: no locale, no time zone, nothing of ours but proxies, pip's settings and HOME."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.lower() in ("http_proxy", "https_proxy", "no_proxy", "home", "ssl_cert_file")
        or name.startswith("PIP_")
    }
    return {
        **passed,
        "PATH": os.pathsep.join(_PATH),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "DEBIAN_FRONTEND": "noninteractive",
    }


def require(programs: Sequence[str]) -> None:
    """Raise `SetupError` with the one command that installs whatever is missing of `programs`."""
    missing = sorted(
        {_PACKAGES.get(name, name) for name in programs if shutil.which(name, path=os.pathsep.join(_PATH)) is None}
    )
    if missing:
        raise SetupError(
            "This machine lacks programs that build a sandbox's kernel and disks. Run as root:\n"
            f"  apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)}"
        )


_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
