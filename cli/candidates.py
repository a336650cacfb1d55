"""What may come next on a command line, read from the usage texts. Pure.

In: the words so far, the one being typed last, and where names come from. Out: an `Offer`. A usage
line is taken apart into what stands in order behind the command: a choice of words, or a name in capitals for which
`Names` may know values. Options are those of the text's options section.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Names = Callable[[str], Sequence[str]]
"""From a name in capitals, or an option, to its values; empty for what is not known."""

_OPTION = re.compile(r"^ {2,8}(?:(-[A-Za-z])(?: ([A-Z]+))?, )?(--[a-z][a-z-]*)(?:=(\S+))?", re.MULTILINE)
_IN_LINE = re.compile(r"\[?--?[A-Za-z][A-Za-z-]*(?:=[A-Z:=]+)?\]?(?:\.\.\.)?|\[options\]|\[--\]")
_SLOT = re.compile(r"\(([^)]*)\)(?:\.\.\.)?|(\S+)")


FILES = ("FILE", "DIR")
"""What stands in usage texts for a path of this machine."""


class Offer(NamedTuple):
    """Words that begin as the one being typed does, and whether it may be the name of a file as well."""

    words: list[str]
    files: bool = False


class Options(NamedTuple):
    """The options of a usage text, and of those that take a value what stands for it."""

    all: tuple[str, ...]
    valued: Mapping[str, str]


class Usages(NamedTuple):
    """Commands and the texts of those that are asked for; `flags_of` names the command whose options another has."""

    commands: Sequence[str]
    text: Callable[[str], str]
    flags_of: Mapping[str, str]


def options(usage: str) -> Options:
    """From the options section; `-x V` and `--long=V` take a value."""
    found: list[str] = []
    valued: dict[str, str] = {}
    for short, short_value, long, value in _OPTION.findall(usage.partition("Options:")[2]):
        found += [long]
        if value or short_value:
            valued |= dict.fromkeys({long, short} - {""}, value or short_value)
    return Options(tuple(found), valued)


def forms(usage: str, command: str) -> list[list[tuple[str, ...]]]:
    """What stands behind the command in each usage line: choices of words, or one name in capitals. A last one that
    may be repeated stands there as `...` too. What comes behind ` -- ` is not ours."""
    block = usage.partition("Usage:\n")[2].partition("\n\n")[0]
    lines = re.sub(r"\n {6,}", " ", block).splitlines()
    found = []
    for line in lines:
        rest = line.strip().removeprefix("sandbox-cli ").removeprefix(command)
        rest = _IN_LINE.sub(" ", re.split(r" \[?--\]?(?: |$)", rest)[0])
        slots: list[tuple[str, ...]] = []
        for choice, word in _SLOT.findall(rest):
            if "-h" in choice:
                continue
            one = word.strip("[]()").removesuffix("...").rstrip("]")
            slots.append(tuple(part.strip() for part in choice.split("|") if part.strip()) if choice else (one,))
            if word.endswith(("...", "...]")):
                slots.append(("...",))
        found.append([slot for slot in slots if slot and slot != ("",)])
    return found


def complete(words: Sequence[str], usages: Usages, names: Names) -> Offer:
    """`words` are those behind the program's name, the last of them the one being typed, which may be empty."""
    *before, current = words or [""]
    top = [name for name in usages.commands if " " not in name]
    if not before:
        return Offer(_fitting([*top, "help", *(["--help", "--version"] if current.startswith("-") else [])], current))
    command, rest = before[0], before[1:]
    if command == "help":
        return Offer(_fitting(top, current) if not rest else [])
    below = [name.split()[1] for name in usages.commands if name.startswith(f"{command} ")]
    if rest and f"{command} {rest[0]}" in usages.commands:
        command, rest, below = f"{command} {rest[0]}", rest[1:], []
    if command not in usages.commands:
        return Offer([])
    if "--" in rest:
        return Offer([], files=True)
    usage = usages.text(command)
    flagged = options(usages.text(usages.flags_of[command])) if command in usages.flags_of else options(usage)
    if current.startswith("--") and "=" in current:
        option, _, value = current.partition("=")
        fits = _fitting(names(option), value) if option in flagged.valued else []
        return Offer([f"{option}={fit}" for fit in fits], flagged.valued.get(option) in FILES)
    if rest and rest[-1] in flagged.valued:
        return Offer(_fitting(names(rest[-1]), current), flagged.valued[rest[-1]] in FILES)
    placed = _placed(rest, flagged)
    if command in usages.flags_of and (len(placed) > 1 or not _known(rest, flagged)):
        return Offer([], files=True)  # the words have begun that are not ours
    if current.startswith("-"):
        if command in usages.flags_of and not placed:
            return Offer(_fitting(["--help"], current))
        return Offer(_fitting([*(one for one in flagged.all if one not in rest), "--help"], current))
    found, files = _next(placed, forms(usage, command), names)
    return Offer(_fitting([*(below if not rest else []), *found], current), files)


def _known(words: Sequence[str], flagged: Options) -> bool:
    given = (word.partition("=")[0] for word in words if word.startswith("-"))
    return all(word in flagged.all for word in given)


def _placed(words: Sequence[str], flagged: Options) -> list[str]:
    """The words that are neither options nor values of options."""
    found, is_value = [], False
    for word in words:
        if not is_value and not word.startswith("-"):
            found.append(word)
        is_value = not is_value and word in flagged.valued
    return found


def _next(placed: Sequence[str], lines: Sequence[Sequence[tuple[str, ...]]], names: Names) -> Offer:
    found: list[str] = []
    files = False
    for slots in lines:
        fixed = [slot for slot in slots if slot != ("...",)]
        repeats = bool(slots) and slots[-1] == ("...",)
        if not fixed or (len(placed) >= len(fixed) and not repeats):
            continue
        reached = [fixed[min(index, len(fixed) - 1)] for index in range(len(placed) + 1)]
        if all(_is_name(slot) or word in slot for word, slot in zip(placed, reached, strict=False)):
            here = reached[-1]
            found += names(_name(here, fixed)) if _is_name(here) else here
            files = files or here[0] in FILES
    return Offer(list(dict.fromkeys(found)), files)


def _is_name(slot: tuple[str, ...]) -> bool:
    return len(slot) == 1 and not slot[0].islower()


def _name(slot: tuple[str, ...], fixed: Sequence[tuple[str, ...]]) -> str:
    """With the word before it, where there is one: `rm NAME` of one command is not that of another."""
    before = fixed[0][0] if fixed[0] != slot else ""
    return f"{before} {slot[0]}".strip()


def _fitting(found: Sequence[str], current: str) -> list[str]:
    return list(dict.fromkeys(one for one in found if one.startswith(current)))
