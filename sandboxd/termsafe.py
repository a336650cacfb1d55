"""Text from outside, made fit to stand in a line that a person reads.

In: any text a guest, a server or a repository wrote (names, labels, paths, git's messages, console tails),
surrogates from undecodable bytes included. Out: one line of printable characters and single blanks. A
terminal given that line cannot be made to move its cursor, change its title, reorder what follows or start
a second line. Never used on a process's own output stream, which is the person's to interpret, nor on JSON,
which escapes.

What is printable is Unicode's classification as `str.isprintable` reads it: not Other (control C0 and C1,
format characters such as bidi overrides and isolates, zero-width joiners and tag characters, surrogates,
private use, unassigned) and not Separator (line and paragraph separators, wide and no-break blanks).
"""

from __future__ import annotations


def clean(text: str) -> str:
    """Every character that is not printable becomes a blank; blanks are collapsed and trimmed."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())


def first_line(text: str) -> str:
    """What stands before the first CR or LF, cleaned."""
    return clean(text.split("\n", 1)[0].split("\r", 1)[0])
