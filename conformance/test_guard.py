"""Who is let in, and with what."""

from __future__ import annotations

import json

from conformance import shape
from conformance.endpoint import Endpoint


def test_foreign_hosts_origins_media_types_and_sizes_are_refused(endpoint: Endpoint) -> None:
    """C50"""
    plain = endpoint.call("POST", "/v1/sandboxes", b"{}", {"Content-Type": "text/plain"})
    shape.refused(plain, 415)
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        shape.refused(endpoint.call("GET", "/v1/sandboxes", headers={"Origin": origin}), 403, "forbidden_origin")
    for host in ("evil.example", "localhost.evil.example", "evil.example:80"):
        head = endpoint.head("GET", "/v1/sandboxes", {"Host": host})
        shape.refused(endpoint.say(head), 403, "forbidden_origin")
        shape.refused(endpoint.say(endpoint.head("GET", "/v1/health", {"Host": host})), 403, "forbidden_origin")
    big = json.dumps({"name": "x" * (2 << 20)}).encode()
    shape.refused(endpoint.call("POST", "/v1/sandboxes", big, {"Content-Type": "application/json"}), 400)
    if endpoint.token:
        for given in ("", "Bearer", "Bearer wrong-wrong-wrong-wrong", f"Basic {endpoint.token}", endpoint.token):
            answer = endpoint.call("GET", "/v1/sandboxes", headers={"Authorization": given})
            shape.refused(answer, 401)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        in_query = endpoint.call("GET", f"/v1/sandboxes?token={endpoint.token}", headers={"Authorization": ""})
        shape.refused(in_query, 401)


def test_an_origin_that_is_the_endpoint_itself_is_let_in(endpoint: Endpoint) -> None:
    scheme = "https" if endpoint.is_tls else "http"
    shape.ok(endpoint.call("GET", "/v1/capabilities", headers={"Origin": f"{scheme}://{endpoint.host}"}))


def test_a_refused_origin_learns_nothing_about_the_token(endpoint: Endpoint) -> None:
    origin = {"Origin": "https://evil.example", "Authorization": "Bearer wrong-wrong-wrong-wrong"}
    shape.refused(endpoint.call("GET", "/v1/sandboxes", headers=origin), 403, "forbidden_origin")
