"""Small programs for the guest, where a row needs one that listens or dials: in Python or Perl, whichever is there.

The image is the endpoint's own choice, so a test that finds neither is skipped, and says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Sandbox

DIAL_S = 3

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

# Each target is three arguments: host, port, what to send in hexadecimal. Each has a line of the output: its number,
# whether something took the connection, and what came back. All are dialled at once: what leads nowhere takes its time.
DIAL = {
    "python3": """
import socket, sys, threading
wait, words = int(sys.argv[1]), sys.argv[2:]

def dial(number, host, port, data):
    opened, reply = 0, b""
    try:
        c = socket.create_connection((host, int(port)), wait)
        opened = 1
        c.settimeout(wait)
        c.sendall(bytes.fromhex(data))
        while len(reply) < 65536 and (more := c.recv(65536)):
            reply += more
    except OSError:
        pass
    sys.stdout.write(f"{number} {opened} ={reply.hex()}\\n")

for number in range(len(words) // 3):
    threading.Thread(target=dial, args=(number, *words[3 * number : 3 * number + 3])).start()
""",
    "perl": """
use IO::Socket::INET;
my ($wait, @words) = @ARGV;
my $number = -1;
while (my ($host, $port, $data) = splice(@words, 0, 3)) {
    $number++;
    next if fork;
    my ($opened, $reply) = (0, "");
    my $tell = sub { syswrite(STDOUT, "$number $opened =" . unpack("H*", $reply) . "\\n"); exit 0 };
    $SIG{ALRM} = $tell;
    $SIG{PIPE} = "IGNORE";
    alarm $wait;
    my $c = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port, Proto => "tcp", Timeout => $wait);
    $tell->() unless $c;
    $opened = 1;
    alarm $wait;
    syswrite($c, pack("H*", $data));
    while (length($reply) < 65536 && sysread($c, my $more, 65536)) { $reply .= $more }
    $tell->();
}
1 while wait > 0;
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

    @property
    def refusal(self) -> bool:
        """Nothing was reached: no answer at all, or one that is an HTTP error (a proxy that says no)."""
        status = self.reply.split(b" ")[1:2] if self.reply.startswith(b"HTTP/") else [b""]
        return not self.reply or (bool(status) and status[0][:1] in (b"4", b"5"))


def reach(sandbox: Sandbox, language: str, host: str, port: int, data: bytes = b"hello\n") -> Reached:
    """Dials from inside the sandbox, sends `data`, and takes what comes for a few seconds."""
    (found,) = reach_each(sandbox, language, [(host, port)], data).values()
    return found


def reach_each(
    sandbox: Sandbox, language: str, targets: Iterable[tuple[str, int]], data: bytes = b"hello\n"
) -> dict[str, Reached]:
    """Dials all of them at once. `%h` in `data` is the host. The keys of the result are `host:port`."""
    wanted = list(dict.fromkeys(targets))
    words = [word for host, port in wanted for word in (host, str(port), data.replace(b"%h", host.encode()).hex())]
    said = sandbox.run(language, FLAG[language], DIAL[language], str(DIAL_S), *words)
    found = {}
    for line in said.stdout.decode().splitlines():
        number, opened, reply = line.split(" ")
        host, port = wanted[int(number)]
        found[f"{host}:{port}"] = Reached(opened == "1", bytes.fromhex(reply.removeprefix("=")))
    assert len(found) == len(wanted), f"the dialler did not tell of everything: {said}"
    return found


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
