"""YAML that two readers cannot read differently, and a mapping whose every key must be taken.

In: a file's bytes. Out: mappings, lists, texts, numbers and truth values, or a line for each fault with its place.
Read is the core schema of YAML 1.2 and less: a key that stands twice, anchors, aliases, merge keys, tags, a second
document, `yes` and `no` as truth values and numbers with a leading zero are faults. The bytes are not trusted; their
number, the depth and so the work are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from sandboxd.errors import InvalidRequest
from sandboxd.termsafe import clean

MAX_DEPTH = 16
MAX_KEY_SHOWN = 80
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,15})\Z")
_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]{0,15})\.[0-9]{1,15}\Z")
_DOUBTFUL = re.compile(r"(?:y|n|yes|no|on|off)\Z|[-+]?0[0-9]+\Z", re.IGNORECASE)
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}


def document(data: bytes, max_bytes: int, faults: list[str]) -> Any:
    """What the text says; `faults` gets a line for each that was found, and the result is then of no use."""
    if len(data) > max_bytes:
        faults.append(f"it is longer than {max_bytes >> 10} KiB")
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError as fault:
        faults.append(f"line {data.count(10, 0, fault.start) + 1}: it is not UTF-8")
        return None
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as fault:
        line = text.count("\n", 0, fault.position) + 1
        faults.append(f"line {line}: it is not YAML: a character that may not stand")
        return None
    try:
        return _Tree(loader, faults).document()
    except yaml.MarkedYAMLError as fault:
        hint = "; what begins with * must be in quotes" if fault.context == "while scanning an alias" else ""
        mark = fault.problem_mark or loader.get_mark()
        faults.append(f"line {mark.line + 1}: it is not YAML: {fault.problem}{hint}")
    except (ValueError, OverflowError):
        # PyYAML makes characters and versions of any number without looking at it.
        faults.append(f"line {loader.line + 1}: it is not YAML: a number that is too large")
    return None


class _Tree:
    """Parser events to mappings, lists, texts, numbers and truth values (the core schema of YAML 1.2, and less)."""

    def __init__(self, loader: yaml.SafeLoader, faults: list[str]) -> None:
        self._events: Iterator[Any] = iter(loader.get_event, None)
        self._faults = faults

    def document(self) -> Any:
        value = None
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents == 2:
                    self._fault(event, "", "a second document")
                    break
            elif isinstance(event, yaml.NodeEvent):
                value = self._node(event, "", 0)
        return value

    def _node(self, event: Any, path: str, depth: int) -> Any:
        if getattr(event, "anchor", None) is not None:
            self._fault(event, path, "anchors and aliases are not read; what begins with * or & must be in quotes")
        if getattr(event, "tag", None) is not None:
            self._fault(event, path, "tags are not read")
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="it is too deep", problem_mark=event.start_mark)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(event, f"{path}[{len(items)}]", depth + 1))
            return items
        return self._scalar(event, path) if isinstance(event, yaml.ScalarEvent) else None

    def _mapping(self, path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, path, depth + 1)
            name = shown(key) if isinstance(key, str) else "?"
            place = f"{path}.{name}" if path else name
            value = self._node(next(self._events), place, depth + 1)
            if not isinstance(key, str):
                self._fault(event, path, "a key that is not text")
            elif key == "<<":
                self._fault(event, path, "merge keys are not read")
            elif key in found:
                self._fault(event, place, "it stands twice")
            else:
                found[key] = value
        return found

    def _scalar(self, event: Any, path: str) -> Any:
        text: str = event.value
        if _SURROGATE.search(text):
            self._fault(event, path, "an escape that is no character")
        if event.style is not None:
            return text
        if _DOUBTFUL.match(text):
            self._fault(event, path, f"{text} is read as different things; write true or false, or put it in quotes")
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.match(text):
            return int(text)
        return float(text) if _DECIMAL.match(text) else text

    def _fault(self, event: Any, path: str, what: str) -> None:
        self._faults.append(f"line {event.start_mark.line + 1}: {_at(path)}{what}")


class Section:
    """A mapping whose keys are taken one by one; `done` faults those that nobody took."""

    def __init__(self, path: str, value: Any, faults: list[str]) -> None:
        self.path, self.faults = path, faults
        self.known: list[str] = []
        if not isinstance(value, dict):
            self.fault("", "it must be a mapping")
        self.value: dict[str, Any] = dict(value) if isinstance(value, dict) else {}

    def fault(self, key: str, what: str) -> None:
        place = ".".join(part for part in (self.path, key) if part)
        self.faults.append(f"{_at(place)}{what}")

    def section(self, key: str) -> Section:
        given = self._given(key)
        path = f"{self.path}.{key}" if self.path else key
        return Section(path, {} if given is None else given, self.faults)

    def take(self, key: str, default: Any, check: Callable[[Any], bool], what: str) -> Any:
        """What stands there if `check` says so; the default where nothing does."""
        value = self._given(key)
        if value is None:
            return default
        if check(value):
            return value
        self.fault(key, f"it must be {what}")
        return default

    def names(self, key: str, normal: Callable[[str, list[str]], tuple[str, ...]]) -> tuple[str, ...] | None:
        """A list of names in normal form; None where none is given. Each that is wrong is a fault of its own."""
        given = self._given(key)
        if given is None:
            return None
        if not isinstance(given, list):
            self.fault(key, "it must be a list")
            return None
        found: set[str] = set()
        for position, entry in enumerate(given):
            if not isinstance(entry, str):
                self.fault(f"{key}[{position}]", "it must be text")
                continue
            try:
                found.update(normal(key, [entry]))
            except InvalidRequest as fault:
                self.fault(f"{key}[{position}]", fault.message.removeprefix(f"{key}: "))
        return tuple(sorted(found))

    def done(self) -> None:
        for key in self.value:
            self.fault(shown(key), f"it is not known; known here: {', '.join(sorted(self.known))}")

    def _given(self, key: str) -> Any:
        self.known.append(key)
        return self.value.pop(key, None)


def shown(key: str) -> str:
    """A key as it stands in a message."""
    text = clean(key)
    return text if len(text) <= MAX_KEY_SHOWN else text[:MAX_KEY_SHOWN] + "…"


def _at(path: str) -> str:
    return f"{path}: " if path else ""
