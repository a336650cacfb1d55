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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import SandboxError, SetupError

LINES_KEPT = 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# $0 is the watched pipe; `$$` is the session's leader and so the group. The read returns only when our end is gone.
_WATCHED = '(read -r _ <"$0"; kill -KILL -$$) & w=$!; "$@"; c=$?; kill $w; exit $c'

# Which Debian package brings a program that builds need.
_PACKAGES = {
    "apt-get": "apt",
    "chroot": "coreutils",
    "dpkg-deb": "dpkg",
    "lz4": "lz4",
    "mkfs.erofs": "erofs-utils",
    "mmdebstrap": "mmdebstrap",
    "newgidmap": "uidmap",
    "newuidmap": "uidmap",
    "pip3": "python3-pip",
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
    require(words[:1])
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, _watched_pipe() as watched:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, f"/proc/self/fd/{watched}", *words],
            stdin=given, stdout=out, stderr=subprocess.PIPE, pass_fds=[watched],
            cwd=cwd, env={**environment(), **(env or {})}, start_new_session=True,
        )
        assert process.stderr is not None
        lines: list[str] = []
        try:
            with process.stderr:
                for raw in process.stderr:
                    line = raw.decode(errors="replace").rstrip()
                    lines.append(line)
                    del lines[:-LINES_KEPT]
                    if on_line is not None:
                        on_line(line)
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            raise BuildFailed(step, code, "\n".join(line for line in lines if line))
        out.seek(0)
        return Result(out.read(), "\n".join(lines))


@contextmanager
def _watched_pipe() -> Iterator[int]:
    """The reading end of a pipe whose writing end only this process has."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


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
        "PATH": _PATH,
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "DEBIAN_FRONTEND": "noninteractive",
    }


def require(programs: Sequence[str]) -> None:
    """Raise `SetupError` with the one command that installs whatever is missing of `programs`."""
    missing = sorted(
        {_PACKAGES.get(name, name) for name in programs if shutil.which(name, path=_PATH) is None}
    )
    if missing:
        raise SetupError(
            "This machine lacks programs that build a sandbox's kernel and disks. Run as root:\n"
            f"  apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)}"
        )


