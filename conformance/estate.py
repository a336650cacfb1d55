"""What a run of the suite makes on the endpoint, and its end: everything carries the run's mark and is deleted."""

from __future__ import annotations

import base64
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from conformance import shape
from conformance.endpoint import Answer, Endpoint

PREPARING_S = 600.0
MEMORY_MB = 256
POLL_S = 0.2


@dataclass(frozen=True)
class Ran:
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool


class Offer:
    """The endpoint's capabilities as it states them."""

    def __init__(self, body: Any) -> None:
        self.capabilities: dict[str, bool] = body["capabilities"]
        self.limits: dict[str, int] = body["limits"]
        self.network: dict[str, Any] = body["network"]

    def has(self, capability: str) -> bool:
        """Absent means false."""
        return self.capabilities.get(capability, False) is True

    def above_ceiling(self) -> list[str]:
        return list(shape.MODES[shape.MODES.index(self.network["ceiling"]) + 1 :])

    @property
    def networked(self) -> bool:
        return bool(self.network["default"]["mode"] != "none")


class Estate:
    """Makes sandboxes and volumes, and knows how to be rid of them."""

    def __init__(self, endpoint: Endpoint, offer: Offer) -> None:
        self.endpoint, self.offer = endpoint, offer
        self.mark = f"conformance-{secrets.token_hex(4)}"
        self.labels = {"conformance": self.mark}
        self.boot_s = 0.0
        self.boots = 0
        self._snapshots: list[str] = []

    def name(self, suffix: str) -> str:
        return f"{self.mark}-{suffix}"

    def ask(self, **given: Any) -> Answer:
        """A create. While the server is still getting its images ready, it is asked again."""
        body = {"memory_mb": min(MEMORY_MB, self.offer.limits["max_memory_mb"]), **given}
        body["labels"] = {**self.labels, **given.get("labels", {})}
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            answer = self.endpoint.call("POST", "/v1/sandboxes", body)
            if answer.status != 503 or time.monotonic() - began > PREPARING_S:
                break
            time.sleep(1)
        if answer.status == 201:
            self.boots += 1
            self.boot_s = max(self.boot_s, time.monotonic() - asked)
        return answer

    def create(self, **given: Any) -> Sandbox:
        answer = self.ask(**given)
        assert answer.status == 201, f"a sandbox could not be made: {answer}"
        return Sandbox(self, answer)

    def refuse(self, status: int, code: str | None = None, **given: Any) -> str:
        """A create that must be refused. Returns the message."""
        return shape.refused(self.ask(**given), status, code)

    def snapshot(self, sandbox: Sandbox) -> Answer:
        answer = sandbox.call("POST", "/snapshots")
        if answer.status == 201:
            self._snapshots.append(answer.json["id"])
        return answer

    def needs(self, capability: str, *calls: tuple[str, str, Any]) -> None:
        """Skips where the endpoint says that it lacks the capability; then its calls must say 501."""
        if not self.offer.has(capability):
            for method, target, body in calls:
                shape.refused(self.endpoint.call(method, target, body), 501)
            pytest.skip(f"the endpoint lacks the capability {capability}; its calls answer 501")

    def clear(self) -> list[str]:
        """Deletes all of it. Returns what could not be deleted."""
        left = []
        query = quote(f"conformance={self.mark}", safe="")
        for body in self.endpoint.call("GET", f"/v1/sandboxes?label={query}").json["sandboxes"]:
            if body["state"] != "terminated":
                left.append(self._delete(f"/v1/sandboxes/{body['id']}"))
        left.extend(self._delete(f"/v1/snapshots/{snapshot}") for snapshot in self._snapshots)
        if self.offer.has("volumes"):
            for body in self.endpoint.call("GET", "/v1/volumes").json["volumes"]:
                if body["name"].startswith(self.mark):
                    left.append(self._delete(f"/v1/volumes/{body['name']}"))
        return [text for text in left if text]

    def _delete(self, target: str) -> str:
        answer = self.endpoint.call("DELETE", target)
        return "" if answer.status in (204, 404) else f"{target}: {answer}"


class Sandbox:
    """A sandbox of ours, by its id. `created` is the answer to its create."""

    def __init__(self, estate: Estate, created: Answer) -> None:
        self.estate, self.created = estate, created
        self.body: dict[str, Any] = created.json
        self.id: str = self.body["id"]
        self.path = f"/v1/sandboxes/{self.id}"

    def call(self, method: str, below: str = "", body: Any = None, **more: Any) -> Answer:
        return self.estate.endpoint.call(method, self.path + below, body, **more)

    def get(self) -> dict[str, Any]:
        return shape.sandbox(shape.ok(self.call("GET")))

    def run(self, *argv: str, stdin: bytes = b"", **more: Any) -> Ran:
        body: dict[str, Any] = {"argv": list(argv), **more}
        if stdin:
            body["stdin"] = base64.b64encode(stdin).decode()
        said = shape.ok(self.call("POST", "/run", body))
        shape.fields(said, {"exit_code": int, "truncated": bool, "timed_out": bool})
        return Ran(
            said["exit_code"], _octets(said["stdout"]), _octets(said["stderr"]), said["truncated"], said["timed_out"]
        )

    def start(self, *argv: str, **more: Any) -> str:
        """The path of a new process."""
        body = shape.process(shape.ok(self.call("POST", "/processes", {"argv": list(argv), **more}), 201))
        return f"{self.path}/processes/{body['pid']}"

    def output(self, process: str) -> tuple[bytes, bytes, int]:
        """Follows a process to its end: (stdout, stderr, exit code)."""
        answer = self.estate.endpoint.call("GET", f"{process}/output")
        assert answer.status == 200 and answer.media_type == "application/x-ndjson", answer
        assert answer.body.endswith(b"\n"), "every line ends with a newline"
        *lines, last = [json.loads(line) for line in answer.body.splitlines()]
        assert set(last) == {"exit_code"}, f"the exit code is the last line: {last}"
        streams = {"stdout": b"", "stderr": b""}
        for line in lines:
            streams[line["stream"]] += _octets(line["data"])
        return streams["stdout"], streams["stderr"], last["exit_code"]

    def read(self, path: str) -> Answer:
        return self.call("GET", f"/files?path={quote(path)}")

    def write(self, path: str, data: bytes) -> Answer:
        return self.call("PUT", f"/files?path={quote(path)}", data)

    def remove(self, path: str) -> Answer:
        return self.call("DELETE", f"/files?path={quote(path)}")

    def entries(self, path: str) -> list[dict[str, Any]]:
        found = shape.ok(self.call("GET", f"/dirs?path={quote(path)}"))["entries"]
        assert isinstance(found, list)
        return found

    def delete(self) -> None:
        shape.done(self.call("DELETE"))

    def listed(self) -> dict[str, Any]:
        """As the list shows it, which is no activity."""
        for body in self.estate.endpoint.call("GET", "/v1/sandboxes").json["sandboxes"]:
            if body["id"] == self.id:
                return shape.sandbox(body)
        raise AssertionError(f"{self.id} is not in the list")

    def wait_for(self, state: str, limit_s: float) -> float:
        """Watches the list until it is in this state. Returns when that was, in seconds since 1970."""
        deadline = time.monotonic() + limit_s
        while self.listed()["state"] != state:
            assert time.monotonic() < deadline, f"it is not {state} after {limit_s} s"
            time.sleep(POLL_S)
        return time.time()


def _octets(text: str | None) -> bytes:
    """Standard base64 with padding; null and the empty string are both nothing."""
    return base64.b64decode(text or "", validate=True)
