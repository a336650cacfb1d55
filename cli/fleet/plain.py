"""A frozen value as what JSON can hold, and back by the types of its fields.

In: named tuples and dataclasses of texts, numbers, truth values, paths, lists, mappings and each other. Out: the same
value, or a ValueError that names the field. What crosses here is written and read by this program alone; a field that
is not known, missing or of another type is a fault all the same. An agent travels as its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cli.agents.table import Agent, named

T = TypeVar("T")
_PLAIN = (str, int, bool)


def dump(value: Any) -> Any:
    if isinstance(value, Agent):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_fields"):
        return {name: dump(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {key: dump(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [dump(one) for one in value]
    return value


def load(kind: type[T], raw: Any, place: str = "") -> T:
    """Raises ValueError."""
    loaded: T = _load(kind, raw, place)
    return loaded


def _load(kind: Any, raw: Any, place: str) -> Any:
    if isinstance(kind, UnionType):
        if raw is None and NoneType in get_args(kind):
            return None
        (only,) = (one for one in get_args(kind) if one is not NoneType)
        return _load(only, raw, place)
    if get_origin(kind) is tuple:
        return tuple(_load(get_args(kind)[0], one, f"{place}[]") for one in _a(list, raw, place))
    if get_origin(kind) is Mapping:
        return {key: _load(get_args(kind)[1], one, f"{place}.{key}") for key, one in _a(dict, raw, place).items()}
    if kind is object:
        return raw
    if kind is Path:
        return Path(_a(str, raw, place))
    if kind is Agent:
        return named(_a(str, raw, place))
    if kind is float:
        return float(_a((int, float), raw, place))
    if kind in _PLAIN:
        return _a(kind, raw, place)
    return _object(kind, _a(dict, raw, place), place)


def _object(kind: Any, raw: dict[str, Any], place: str) -> Any:
    types = get_type_hints(kind)
    if unknown := sorted(set(raw) - set(types)):
        raise ValueError(f"{place}.{unknown[0]} is not known")
    try:
        return kind(**{name: _load(types[name], one, f"{place}.{name}") for name, one in raw.items()})
    except TypeError:
        raise ValueError(f"{place or kind.__name__}: fields are missing") from None


def _a(kind: Any, raw: Any, place: str) -> Any:
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is not bool):
        raise ValueError(f"{place or 'it'} is of another type")
    return raw
