"""Scripted models that speak their vendors' APIs: Anthropic's Messages and OpenAI's Responses, both as event streams.

In: requests as the world's servers hand them over. Out: an answer in events, each a piece of its own on the wire; the
act in it is `task.act`'s. Everything that was asked is kept, as the evidence of what the agent read and did. Sources:
the vendors' API references for streaming, and what the agents send.
"""

from __future__ import annotations

import gzip
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.agents.task import Act, Edit, Read, Say, Shell, act
from tests.world.origin import Request

Event = dict[str, Any]
Reply = tuple[int, dict[str, str], bytes] | None
JSON = {"Content-Type": "application/json"}
MAX_ACTS = 12


class Model(ABC):
    """One vendor's API. `requests` are those a model answered, `asked` all of them, as (method, path, headers)."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []

    def __call__(self, request: Request) -> Reply:
        self.asked.append((request.method, request.path, request.headers))
        return self.answer(request)

    @abstractmethod
    def answer(self, request: Request) -> Reply:
        """What the vendor's server would say, to this request."""

    @abstractmethod
    def outcomes(self, body: Mapping[str, Any]) -> list[str]:
        """What came of the acts so far, as the agent tells it."""

    def next(self, body: Mapping[str, Any]) -> Act:
        self.requests.append(body)
        outcomes = self.outcomes(body)
        return act(outcomes) if len(outcomes) < MAX_ACTS else Say("STOPPED: too many acts")

    @property
    def story(self) -> str:
        """What was asked and told, for whoever looks into a failure."""
        lines = [f"{method} {path}" for method, path, _ in self.asked]
        return "\n".join(lines + (["outcomes:", *self.last] if self.requests else []))

    @property
    def last(self) -> list[str]:
        """The outcomes of all acts, as the last request tells them."""
        return self.outcomes(self.requests[-1])


class Messages(Model):
    """Anthropic's, with the tools of Claude Code: Bash, Read and Edit."""

    def answer(self, request: Request) -> Reply:
        path = request.path.partition("?")[0]
        if path == "/v1/messages/count_tokens":
            return 200, JSON, b'{"input_tokens": 1000}'
        if (request.method, path) != ("POST", "/v1/messages"):
            return 404, JSON, b'{"type": "error", "error": {"type": "not_found_error", "message": "not here"}}'
        body = _body(request)
        tools = {tool["name"] for tool in body.get("tools", ())}
        # Titles and summaries are asked for beside the conversation, without tools.
        wanted = self.next(body) if {"Bash", "Read", "Edit"} <= tools else Say("A sum")
        _stream(request, _messages(wanted, len(self.requests), str(body["model"])))
        return None

    def outcomes(self, body: Mapping[str, Any]) -> list[str]:
        contents = [one["content"] for one in body["messages"] if isinstance(one["content"], list)]
        blocks = [block for content in contents for block in content]
        return [_text(block["content"]) for block in blocks if block.get("type") == "tool_result"]


class Responses(Model):
    """OpenAI's, with Codex's tool `exec`, which runs JavaScript that calls the tools proper."""

    def answer(self, request: Request) -> Reply:
        if request.headers.get("upgrade", "").lower() == "websocket":
            return 426, JSON, b'{"error": {"message": "no WebSocket here"}}'  # RFC 9110 15.5.22; it then sends a POST
        if (request.method, request.path) != ("POST", "/v1/responses"):
            return 404, JSON, b'{"error": {"message": "not here"}}'
        wanted = self.next(_body(request))
        _stream(request, _responses(wanted, len(self.requests)))
        return None

    def outcomes(self, body: Mapping[str, Any]) -> list[str]:
        return [_text(one["output"]) for one in body["input"] if one.get("type") == "custom_tool_call_output"]


def _body(request: Request) -> Event:
    packed = request.headers.get("content-encoding", "") == "gzip"  # as Claude Code sends it to its vendor's host
    return dict(json.loads(gzip.decompress(request.body) if packed else request.body))


def _messages(wanted: Act, number: int, model: str) -> Iterator[Event]:
    usage = {"input_tokens": 1000, "output_tokens": 1}
    message = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    yield {"type": "message_start", "message": message}
    if isinstance(wanted, Say):
        block: Event = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": wanted.text}
    else:
        name, given = _claudes(wanted)
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(given)}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    reason = "end_turn" if isinstance(wanted, Say) else "tool_use"
    yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
    yield {"type": "message_stop"}


def _claudes(wanted: Act) -> tuple[str, Event]:
    if isinstance(wanted, Read):
        return "Read", {"file_path": f"/workspace/{wanted.path}"}
    if isinstance(wanted, Edit):
        return "Edit", {
            "file_path": f"/workspace/{wanted.path}", "old_string": wanted.old, "new_string": wanted.new,
        }  # fmt: skip
    assert isinstance(wanted, Shell)
    return "Bash", {"command": f"{wanted.command} 2>&1 || true", "description": "Run it"}


def _responses(wanted: Act, number: int) -> Iterator[Event]:
    response = {"id": f"resp_{number}", "object": "response", "status": "in_progress", "output": []}
    yield {"type": "response.created", "response": response}
    if isinstance(wanted, Say):
        content = [{"type": "output_text", "text": wanted.text}]
        item: Event = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
    else:
        item = {
            "type": "custom_tool_call", "id": f"ctc_{number}", "call_id": f"call_{number}", "name": "exec",
            "input": _codexs(wanted),
        }  # fmt: skip
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {
        "input_tokens": 1000, "input_tokens_details": None, "output_tokens": 1, "output_tokens_details": None,
        "total_tokens": 1001,
    }  # fmt: skip
    yield {"type": "response.completed", "response": response | {"status": "completed", "usage": usage}}


def _codexs(wanted: Act) -> str:
    if isinstance(wanted, Edit):
        # Its patches name whole lines; which ones, its own reading says.
        patch = (
            f"*** Begin Patch\n*** Update File: {wanted.path}\n@@\n-    {wanted.old}\n+    {wanted.new}\n*** End Patch"
        )
        return f"text(await tools.apply_patch({json.dumps(patch)}))"
    command = f"cat {wanted.path}" if isinstance(wanted, Read) else f"{wanted.command} 2>&1"  # type: ignore[union-attr]
    return f"text((await tools.exec_command({{cmd: {json.dumps(command)}}})).output)"


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _stream(request: Request, events: Iterator[Event]) -> None:
    """Server-sent events in chunks (RFC 9112 7.1), one at a time; the connection ends with them."""
    head = ("HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked", "Connection: close")
    request.stream.sendall("\r\n".join([*head, "", ""]).encode())
    for event in events:
        data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        request.stream.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    request.stream.sendall(b"0\r\n\r\n")
