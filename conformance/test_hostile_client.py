"""What a client tries to get and must not: values, the server's own paths, another sandbox's things, a request that is
read in two ways."""

from __future__ import annotations

import json
import secrets

import pytest

from conformance import shape
from conformance.conftest import Box, Heir
from conformance.endpoint import Answer, Endpoint
from conformance.estate import Sandbox

SERVER_PATHS = ("/var/lib", "/run/", "/home/", "/root", "site-packages", "Traceback", ".py", ".sock")


def inside(answer: Answer) -> None:
    """A refusal that says nothing of the server's insides."""
    assert 400 <= answer.status < 500, answer
    text = shape.refused(answer, answer.status, answer.json["error"]["code"])
    for word in SERVER_PATHS:
        assert word not in text, f"{word} in {text}"


def test_no_answer_holds_a_value_of_an_environment(shared: Box, endpoint: Endpoint) -> None:
    box, once = shared.sandbox, f"once-{secrets.token_hex(16)}"
    process = box.start("sleep", "600", env={"ONCE": once})
    paths = [
        "/v1/capabilities", "/v1/sandboxes", box.path, f"{box.path}/processes", process, f"{box.path}/events",
        f"{box.path}/metrics", f"{box.path}/dirs?path=/sandbox/home",
    ]
    for path in paths:
        body = endpoint.call("GET", path).body
        assert shared.value.encode() not in body and once.encode() not in body, path
    for bad in ({"env": {"A": once, "B-": once}}, {"env": {"A": once, "LD_PRELOAD": once}}, {"env": [once]}):
        assert once.encode() not in endpoint.call("POST", "/v1/sandboxes", bad).body
        assert once.encode() not in box.call("POST", "/run", {"argv": ["true"], **bad}).body
    shape.done(endpoint.call("POST", f"{process}/signal", {"signal": "KILL"}))


def test_a_path_of_one_sandbox_never_leads_to_another(box: Sandbox, heir: Heir, endpoint: Endpoint) -> None:
    other, name = heir.sandbox, secrets.token_hex(8)
    shape.done(other.write(f"/tmp/{name}", b"the other's"))
    shape.refused(box.read(f"/tmp/{name}"), 404)
    pid = other.start("echo", "the other's").rpartition("/")[2]
    for below in (
        f"../{other.id}/files?path=/tmp/{name}", f"%2e%2e/{other.id}/files?path=/tmp/{name}",
        f"..%2f{other.id}%2ffiles?path=/tmp/{name}", f"processes/..%2f..%2f{other.id}%2fprocesses%2f{pid}/output",
        f"processes/../../{other.id}/processes/{pid}/output", f"./../{other.id}/processes/{pid}/output",
    ):  # fmt: skip
        head = endpoint.head("GET", f"{box.path}/{below}", {"Connection": "close"})
        answer = endpoint.say(head)
        assert answer.status in (400, 404), answer
        assert b"the other's" not in answer.body


REFS = (
    "..", ".", "%2e%2e", "%2e%2e%2f%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "sbx_%00", "sbx_*", "sbx_../x", "sbx_",
    "sbx_0000000000000000%2f..", "%2fetc%2fpasswd", "%ff", "%", "%zz", "%25", "sbx_" + 400 * "0", "SBX_0000",
    "-", "--help", "$(id)", "%0d%0aX-Injected:%20yes", "%E2%80%AE", "*",
)  # fmt: skip


@pytest.mark.parametrize("ref", REFS)
def test_a_strange_reference_is_not_found(ref: str, endpoint: Endpoint, box: Sandbox) -> None:
    for target in (f"/v1/sandboxes/{ref}", f"/v1/sandboxes/{ref}/processes", f"{box.path}/processes/{ref}"):
        for method in ("GET", "DELETE"):
            answer = endpoint.say(endpoint.head(method, target, {"Connection": "close"}))
            assert answer.status in (400, 404), answer
            inside(answer)
            assert "X-Injected" not in answer.headers
    assert box.get()["state"] == "running"


def test_a_name_of_the_form_of_an_id_is_never_taken_for_one(box: Sandbox, endpoint: Endpoint) -> None:
    for ref in (box.id.upper(), f"{box.id}%20", f"%20{box.id}", f"{box.id}/", f"{box.id}%00", f"{box.id[:-1]}"):
        shape.refused(endpoint.call("GET", f"/v1/sandboxes/{ref}"), 404)


TARGETS = (
    "http://evil.example/v1/sandboxes", "file:///v1/sandboxes", "*", "v1/sandboxes", "//evil.example/v1/sandboxes",
    "/v1/../v1/sandboxes", "/v1//sandboxes", "\\v1\\sandboxes",
)  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_the_path_of_an_endpoint_and_nothing_else(target: str, endpoint: Endpoint) -> None:
    answer = endpoint.say(endpoint.head("GET", target, {"Connection": "close"}))
    assert 400 <= answer.status < 500, answer
    inside(answer)


def test_no_error_tells_a_path_of_the_server(box: Sandbox, endpoint: Endpoint) -> None:
    for answer in (
        box.read("/no/such/file"), box.read("/"), box.write("/etc/passwd/x", b"x"),
        box.call("POST", "/run", {"argv": ["no-such-command"]}), box.call("POST", "/workspace?branch=x", b"rubbish"),
        box.call("GET", "/workspace/bundle?base=0000000&branch=x"), endpoint.call("DELETE", "/v1/volumes/..%2fx"),
        box.call("GET", "/dirs?path=/no/such/directory"),
    ):  # fmt: skip
        # A guest's own paths are the client's business; the server's never are.
        assert answer.status in (400, 403, 404, 409, 501), answer
        message = shape.refused(answer, answer.status)
        assert not [word for word in ("/var/lib", "site-packages", "Traceback", ".sock") if word in message], message


def heads(host: str) -> dict[str, str]:
    """Requests that two readers would end in different places."""
    start = f"POST /v1/sandboxes HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return {
        "two lengths": f"{start}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}",
        "a length and chunks": f"{start}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "an unknown coding": f"{start}Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "a negative length": f"{start}Content-Length: -1\r\n\r\n",
        "a length with a sign": f"{start}Content-Length: +2\r\n\r\n{{}}",
        "a blank before the colon": f"{start}Content-Length : 2\r\n\r\n{{}}",
        "a length that is no number": f"{start}Content-Length: 0x2\r\n\r\n{{}}",
        "two hosts": f"{start}Host: {host}\r\n\r\n",
        "no host": "GET /v1/sandboxes HTTP/1.1\r\nConnection: close\r\n\r\n",
        "a blank in the target": f"GET /v1/health /x HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "no HTTP at all": "\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
        "a header without end": f"GET /v1/health HTTP/1.1\r\nHost: {host}\r\nX-A: {'a' * (1 << 20)}\r\n\r\n",
    }


@pytest.mark.parametrize("kind", heads(""))
def test_a_request_that_can_be_read_in_two_ways_is_not_read(kind: str, endpoint: Endpoint) -> None:
    """It gets one error, or the connection is closed; what is behind it is no request."""
    before = {one["id"] for one in shape.ok(endpoint.call("GET", "/v1/sandboxes"))["sandboxes"]}
    authority = f"Authorization: Bearer {endpoint.token}\r\n" if endpoint.token else ""
    second = f"GET /v1/capabilities HTTP/1.1\r\nHost: {endpoint.host}\r\n{authority}\r\n"
    text = heads(endpoint.host)[kind].replace("\r\n", f"\r\n{authority}", 1)
    said = b""
    with endpoint.dial(10) as sock:
        try:
            sock.sendall(text.encode("latin-1") + second.encode())
            while len(said) < 1 << 20 and (more := sock.recv(65536)):
                said += more
        except (ConnectionResetError, BrokenPipeError):
            pass
        except TimeoutError:
            raise AssertionError(f"the connection hangs after {said[:200]!r}") from None
    assert not said or said.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4", b"HTTP/1.1 501")), said[:200]
    assert b"api_version" not in said, "what was behind it was read as a request"
    after = {one["id"] for one in shape.ok(endpoint.call("GET", "/v1/sandboxes"))["sandboxes"]}
    assert after <= before, "it was read as a create"


def test_a_mistake_in_a_header_reaches_no_other_header(endpoint: Endpoint, box: Sandbox) -> None:
    answer = box.read("/tmp/\r\nX-Injected: yes")
    assert "X-Injected" not in answer.headers
    shape.refused(answer, 404)
    assert json.loads(answer.body)
