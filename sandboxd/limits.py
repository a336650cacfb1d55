"""How much a client may take of the daemon, and for how long. Each number once, with its reason.

Requests in work have no number of their own: a connection has one at a time, so the connections' numbers are theirs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds. A test may shorten them; the daemon runs with these."""

    connections: int = 1024
    """Several clients at their own limit fit; with the guest's end of each it stays far below the usual 4096+
    descriptors."""
    connections_per_client: int = 256
    """Of one uid, or of one token: a fleet of agents attached at once, and no more than a quarter of everything."""
    newcomers: int = 128
    """TCP connections that have shown no token yet, handshakes among them. A newcomer over it takes the place of the
    oldest from where most come, so a flood pushes out itself and not who comes from elsewhere."""
    newcomers_per_address: int = 64
    """As many handshakes as one machine may have under way: each costs about 2 ms of a processor."""
    lingering: int = 64
    """Refused connections that are kept for a moment so that their answer arrives; beyond it they are just closed."""

    handshake_s: float = 10.0
    """Like a request's head."""
    header_s: float = 10.0
    """API §1. A head is one packet or two."""
    header_bytes: int = 32 << 10
    """A path in a query may have 4 KiB, percent-encoded 12."""
    header_fields: int = 100
    """Clients send a dozen."""
    idle_s: float = 60.0
    """Between the requests of a connection that is kept."""

    json_s: float = 30.0
    """For the whole of a JSON body: 1 MiB in it is slower than any modem."""
    json_held_bytes: int = 32 << 20
    """JSON bodies in memory at once; parsed they take some ten times that."""
    json_held_per_client_bytes: int = 8 << 20
    """Of one uid or token, so that one client's do not keep out another's."""
    raw_stall_s: float = 60.0
    """A raw body may be large and slow; only one that stands still is ended."""

    answer_stall_s: float = 60.0
    """A plain answer that its client takes nothing of."""
    stream_stall_s: float = 600.0
    """A stream's reader may be a person who stopped a pager; what it follows goes on without it."""
    linger_s: float = 2.0
    """Closing with unread bytes would take the answer from a client that is still sending."""
    linger_bytes: int = 8 << 20
    grace_s: float = 10.0
    """What requests in work get when the daemon stops."""
