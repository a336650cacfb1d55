"""Tunnels to what listens on the loopback of a sandbox."""

from __future__ import annotations

import secrets
import socket

from conformance import shape
from conformance.conftest import Past
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Sandbox
from conformance.guest import Listener, speaker

TUNNEL = "sbx-tunnel/1"


def test_a_tunnel_carries_both_ways_and_the_half_close(box: Sandbox, estate: Estate, endpoint: Endpoint) -> None:
    """C39"""
    estate.needs("tunnel", ("GET", f"{box.path}/tunnel?port=80", None))
    for port in ("0", "65536", "-1", "x", "", "80,81"):
        with endpoint.upgrade(f"{box.path}/tunnel?port={port}", TUNNEL) as tunnel:
            shape.refused(tunnel.refusal(), 400)
    secret = secrets.token_hex(8).encode()
    with Listener(box, speaker(box), secret) as listener:
        target = f"{box.path}/tunnel?port={listener.port}"
        # Python's TLS has no half-close; there the end of the line says as much to the listener.
        end = b"\n" if endpoint.is_tls else b""
        with endpoint.upgrade(target, TUNNEL, behind=b"right behind, ") as tunnel:
            assert tunnel.line.startswith("HTTP/1.1 101"), tunnel.line
            assert tunnel.headers["Upgrade"] == TUNNEL and tunnel.headers["Connection"].lower() == "upgrade"
            tunnel.sock.sendall(b"and later" + end)
            if not endpoint.is_tls:
                tunnel.end()
            assert tunnel.rest() == secret + b"right behind, and later" + end
        shape.refused(endpoint.call("GET", target), 400)
        with endpoint.upgrade(target, TUNNEL, behind=b"\n") as tunnel:
            assert tunnel.rest() == secret + b"\n", "the guest's end is the end of the tunnel"


def test_a_port_where_nothing_listens_is_not_found(box: Sandbox, estate: Estate, endpoint: Endpoint) -> None:
    estate.needs("tunnel", ("GET", f"{box.path}/tunnel?port=80", None))
    with endpoint.upgrade(f"{box.path}/tunnel?port=1", TUNNEL) as tunnel:
        shape.refused(tunnel.refusal(), 404)


def test_a_terminated_sandbox_has_no_tunnel(past: Past, estate: Estate, endpoint: Endpoint) -> None:
    estate.needs("tunnel", ("GET", f"{past.sandbox.path}/tunnel?port=80", None))
    with endpoint.upgrade(f"{past.sandbox.path}/tunnel?port=80", TUNNEL) as tunnel:
        assert tunnel.status in (404, 409)
        shape.refused(tunnel.refusal(), tunnel.status)


def test_a_tunnel_leads_to_the_guest_and_not_to_the_host(box: Sandbox, estate: Estate, endpoint: Endpoint) -> None:
    """Something listens on this machine's loopback, where an endpoint that confused the two would look."""
    estate.needs("tunnel", ("GET", f"{box.path}/tunnel?port=80", None))
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ours.settimeout(0.2)
        port = ours.getsockname()[1]
        with endpoint.upgrade(f"{box.path}/tunnel?port={port}", TUNNEL) as tunnel:
            shape.refused(tunnel.refusal(), 404)
        socket.create_connection(("127.0.0.1", port)).close()
        ours.accept()[0].close()
        try:
            ours.accept()
        except TimeoutError:
            return
    raise AssertionError("the tunnel reached a listener of the host")
