"""Small programs for the guest, where a row needs one that listens or dials: in Python or Perl, whichever is there.

The image is the endpoint's own choice, so a test that finds neither is skipped, and says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Sandbox

DIAL_S = 3
DIALS = 8

LISTEN = {
    "python3": """
import socket, sys
secret = bytes.fromhex(sys.argv[1])
s = socket.socket()
s.bind((sys.argv[2], 0))
s.listen(16)
print(s.getsockname()[1], flush=True)
while True:
    c, _ = s.accept()
    data = b""
    while not data.endswith(b"\\n") and (more := c.recv(65536)):
        data += more
    try:
        c.sendall(secret + data)
    except OSError:
        pass
    c.close()
""",
    "perl": """
use IO::Socket::INET;
my $secret = pack("H*", $ARGV[0]);
my $s = IO::Socket::INET->new(LocalAddr => $ARGV[1], LocalPort => 0, Listen => 16, Proto => "tcp") or die $!;
$| = 1;
$SIG{PIPE} = "IGNORE";
print $s->sockport, "\\n";
while (my $c = $s->accept) {
    my $data = "";
    while ($data !~ /\\n\\z/ && sysread($c, my $more, 65536)) { $data .= $more }
    syswrite($c, $secret . $data);
    close $c;
}
""",
}

DIAL = {
    "python3": """
import socket, sys
try:
    c = socket.create_connection((sys.argv[1], int(sys.argv[2])), int(sys.argv[3]))
    print("open", flush=True)
    c.settimeout(int(sys.argv[3]))
    c.sendall(bytes.fromhex(sys.argv[4]))
    while more := c.recv(65536):
        sys.stdout.buffer.write(more)
        sys.stdout.flush()
except OSError as fault:
    print(fault, file=sys.stderr)
""",
    "perl": """
use IO::Socket::INET;
my ($host, $port, $wait, $data) = @ARGV;
$| = 1;
$SIG{ALRM} = sub { exit 0 };
alarm $wait;
my $c = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port, Proto => "tcp", Timeout => $wait);
if (!$c) { print STDERR $@; exit 0 }
print "open\\n";
syswrite($c, pack("H*", $data));
while (sysread($c, my $more, 65536)) { print $more }
""",
}

ADDRESS = {
    "python3": """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("192.0.2.1", 9))
print(s.getsockname()[0])
""",
    "perl": """
use IO::Socket::INET;
my $s = IO::Socket::INET->new(PeerAddr => "192.0.2.1", PeerPort => 9, Proto => "udp") or die $!;
print $s->sockhost, "\\n";
""",
}

FLAG = {"python3": "-c", "perl": "-e"}


def speaker(sandbox: Sandbox) -> str:
    """A language of the image that can open sockets."""
    for language in FLAG:
        answer = sandbox.call("POST", "/run", {"argv": [language, FLAG[language], ""]})
        if answer.status == 200 and answer.json["exit_code"] == 0:
            return language
    pytest.skip(f"the image has none of {', '.join(FLAG)}")


@dataclass(frozen=True)
class Reached:
    """`opened`: something took the connection. `reply`: what came back on it."""

    opened: bool
    reply: bytes
    fault: str

    @property
    def refusal(self) -> bool:
        """Nothing was reached: no answer at all, or one that is an HTTP error (a proxy that says no)."""
        status = self.reply.split(b" ")[1:2] if self.reply.startswith(b"HTTP/") else [b""]
        return not self.reply or (bool(status) and status[0][:1] in (b"4", b"5"))


def reach(sandbox: Sandbox, language: str, host: str, port: int, data: bytes = b"hello\n") -> Reached:
    """Dials from inside the sandbox, sends `data`, and takes what comes for a few seconds."""
    said = sandbox.run(language, FLAG[language], DIAL[language], host, str(port), str(DIAL_S), data.hex())
    opened, _, reply = said.stdout.partition(b"\n")
    return Reached(opened == b"open", reply, said.stderr.decode(errors="replace").strip())


def reach_each(
    sandbox: Sandbox, language: str, targets: Iterable[tuple[str, int]], data: bytes = b"hello\n"
) -> dict[str, Reached]:
    """Dials all of them, several at a time: what leads nowhere takes its time. `%h` in `data` is the host."""
    wanted = list(dict.fromkeys(targets))
    with ThreadPoolExecutor(DIALS) as pool:
        found = pool.map(
            lambda one: reach(sandbox, language, one[0], one[1], data.replace(b"%h", one[0].encode())), wanted
        )
        return {f"{host}:{port}": reached for (host, port), reached in zip(wanted, found, strict=True)}


def own_address(sandbox: Sandbox, language: str) -> str:
    """The address a sandbox with a network has in it."""
    said = sandbox.run(language, FLAG[language], ADDRESS[language])
    assert said.exit_code == 0, f"a sandbox with a network has no address: {said.stderr!r}"
    return said.stdout.decode().strip()


class Listener:
    """A process in the guest that answers each connection with `secret` and what it was sent, once that ended with a
    newline or the other side's half-close."""

    def __init__(self, sandbox: Sandbox, language: str, secret: bytes, *, everywhere: bool = False) -> None:
        self._endpoint: Endpoint = sandbox.estate.endpoint
        where = "0.0.0.0" if everywhere else "127.0.0.1"
        self._process = sandbox.start(language, FLAG[language], LISTEN[language], secret.hex(), where)

    def __enter__(self) -> Listener:
        text = b""
        with self._endpoint.upgrade(f"{self._process}/attach", "sbx-stream/1") as attached:
            while b"\n" not in text:
                frame = attached.frame()
                assert frame is not None and frame[0] == b"o", f"the listener did not start: {frame}"
                text += frame[1]
        self.port = int(text)
        return self

    def __exit__(self, *_: object) -> None:
        shape.done(self._endpoint.call("POST", f"{self._process}/signal", {"signal": "KILL"}))
