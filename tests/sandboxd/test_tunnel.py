"""`sandbox-cli tunnel` against a daemon: loopback only, half-close, refusals in one line."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from cli import tunnel
from sandboxd.errors import SandboxError
from tests.sandboxd.rig import ROOT, Rig


@contextmanager
def running(rig: Rig, ports: str, *prefix: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, and where it listens."""
    # Whoever starts the tests in the background has them ignore the signal that ends the command.
    command = [*prefix, "env", "--default-signal=INT", sys.executable, "-m", "cli", "tunnel"]
    command += [f"--context=unix://{rig.socket}", "box", ports]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("127.0.0.1:"), line
            yield process, int(line.split()[0].rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(20) == 130
            finally:
                process.kill()


def test_a_connection_with_its_half_close(rig: Rig, box: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inside, running(rig, f"0:{inside.getsockname()[1]}") as (_, port):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), 20) as ours:
                ours.sendall(b"request")
                ours.shutdown(socket.SHUT_WR)
                served, _ = inside.accept()
                with served:
                    heard = b""
                    while piece := served.recv(100):
                        heard += piece
                    served.sendall(b"answer")
                said = b""
                while piece := ours.recv(100):
                    said += piece
            assert (heard, said) == (b"request", b"answer")


@pytest.mark.parametrize("files", [64, 1024], ids=["few descriptors", "usual"])
def test_a_flood_of_connections_ends_nothing(rig: Rig, box: str, files: int) -> None:
    """Any local user can make one."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as inside, ExitStack() as held:
        Thread(target=echo, args=(inside,), daemon=True).start()
        limit = ("prlimit", f"--nofile={files}:{files}")
        with running(rig, f"0:{inside.getsockname()[1]}", *limit) as (process, port):
            for _ in range(160):
                sock = held.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
            time.sleep(1)
            assert len(connections(rig)) <= tunnel.AT_ONCE
            held.close()
            said = b""
            deadline = time.monotonic() + 30
            while said != b"after" and time.monotonic() < deadline:
                # What is left of the flood may still take the descriptors of this one.
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as ours:
                    ours.sendall(b"after")
                    said = ours.recv(100)
            assert said == b"after" and process.poll() is None


def echo(inside: socket.socket) -> None:
    with suppress(OSError):
        while True:
            served, _ = inside.accept()
            with served, suppress(OSError):
                served.settimeout(5)
                served.sendall(served.recv(100))


def connections(rig: Rig) -> list[str]:
    """Those that the daemon has accepted."""
    with open("/proc/net/unix") as table:
        return [line for line in table if line.rstrip().endswith(f" {rig.socket}") and line.split()[5] == "03"]


def test_nobody_listens_inside_yet(rig: Rig, box: str) -> None:
    """It is said, the connection is reset, and the next one may do better."""
    with socket.socket() as inside:
        inside.bind(("127.0.0.1", 0))
        with running(rig, f"0:{inside.getsockname()[1]}") as (process, port):
            with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", port), 20) as ours:
                assert ours.recv(1) and False
            assert process.stderr is not None and process.stderr.readline().startswith(b"sandbox-cli: ")
            inside.listen()
            with socket.create_connection(("127.0.0.1", port), 20) as ours:
                served, _ = inside.accept()
                with served:
                    served.sendall(b"!")
                assert ours.recv(1) == b"!"


def test_in_the_background_of_a_script_term_ends_it_and_ctrl_c_does_not(rig: Rig, box: str, tmp_path: Path) -> None:
    """As docs/cli.md has it."""
    words = [sys.executable, "-m", "cli", "tunnel", f"--context=unix://{rig.socket}", "box", "0:80"]
    # It is at work once its first line is there.
    begin = '"$@" > "$0" & for n in $(seq 400); do if [ -s "$0" ]; then break; fi; sleep 0.05; done'
    script = f"{begin}; kill -INT $!; sleep 0.3; kill $!; wait $!; echo $?"
    lines = tmp_path / "lines"
    done = subprocess.run(["sh", "-c", script, lines, *words], cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert (done.stdout, lines.read_text()[:10]) == (b"143\n", "127.0.0.1:"), done.stderr


def test_a_port_that_is_taken(rig: Rig, box: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "cli", "tunnel", f"--context=unix://{rig.socket}", "box"]
        command.append(f"{taken.getsockname()[1]}:80")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == 1 and b"in use" in done.stderr and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("text", "found"), [("80", (80, 80)), ("8080:80", (8080, 80)), ("0:80", (0, 80))])
def test_ports(text: str, found: tuple[int, int]) -> None:
    assert tunnel.ports(text) == found


@pytest.mark.parametrize("text", ["", "0", "65536", "x", ":80", "80:", "1:2:3", "-1", "80:0", "99999:80", "٣", "1 "])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(SandboxError, match="not a port"):
        tunnel.ports(text)
