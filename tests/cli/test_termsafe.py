"""A terminal given cleaned text shows that text and does nothing else."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.termsafe import clean, first_line

CLEANED = [
    ("plain", "agent-1", "agent-1"),
    ("empty", "", ""),
    ("only blanks", " \t \n ", ""),
    ("blanks collapse and are trimmed", "  a \t  b  ", "a b"),
    ("printable beyond ASCII stays", "naïve – 東京 ñ 🦀 é", "naïve – 東京 ñ 🦀 é"),
    ("a combining mark stays", "e\u0301", "e\u0301"),
    ("an emoji's variation selector stays", "\u2764\ufe0f", "\u2764\ufe0f"),
    ("a colour sequence loses its ESC", "\x1b[31mred\x1b[0m", "[31mred [0m"),
    ("a title sequence loses ESC and BEL", "\x1b]0;owned\x07x", "]0;owned x"),
    ("a C1 CSI goes", "\x9b2Jx", "2Jx"),
    ("a C1 string terminator goes", "a\x9cb", "a b"),
    ("NUL and DEL go", "a\x00b\x7fc", "a b c"),
    ("a carriage return cannot overwrite the line", "safe\rrm -rf", "safe rm -rf"),
    ("newlines become one line", "one\r\ntwo\nthree", "one two three"),
    ("a right-to-left override goes", "a\u202egnp.exe", "a gnp.exe"),
    ("every bidi embedding and override goes", "\u202a\u202b\u202c\u202d\u202ex", "x"),
    ("every bidi isolate goes", "\u2066\u2067\u2068\u2069x", "x"),
    ("bidi marks go", "a\u200eb\u200fc\u061cd", "a b c d"),
    ("zero-width characters go", "a\u200bb\u200cc\u200dd\ufeffe\u2060f", "a b c d e f"),
    ("a soft hyphen goes", "a\u00adb", "a b"),
    ("tag characters go", "a\U000e0041\U000e007fb", "a b"),
    ("interlinear annotation goes", "a\ufff9b\ufffac\ufffbd", "a b c d"),
    ("line and paragraph separators go", "a\u2028b\u2029c", "a b c"),
    ("a no-break blank is a blank", "a\u00a0\u3000b", "a b"),
    ("surrogates of undecodable bytes go", b"a\xff\xfeb".decode("utf-8", "surrogateescape"), "a b"),
    ("a lone high surrogate goes", "a\ud83db", "a b"),
    ("private use goes", "a\ue000b", "a b"),
    ("the replacement mark stays", "a\ufffdb", "a\ufffdb"),
]


@pytest.mark.parametrize(("text", "line"), [row[1:] for row in CLEANED], ids=[row[0] for row in CLEANED])
def test_clean(text: str, line: str) -> None:
    assert clean(text) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("one\ntwo", "one", id="cut at LF"),
        pytest.param("one\rtwo\nthree", "one", id="cut at CR"),
        pytest.param("one\r\ntwo", "one", id="cut at CRLF"),
        pytest.param("\ntwo", "", id="an empty first line is empty"),
        pytest.param("  a\x1b[1m b\nc", "a [1m b", id="then cleaned"),
        pytest.param("", "", id="empty"),
    ],
)
def test_first_line(text: str, line: str) -> None:
    assert first_line(text) == line


@given(st.text(st.characters(codec=None)))
def test_nothing_but_printable_characters_and_single_blanks_is_left(text: str) -> None:
    line = clean(text)
    assert not any(unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for char in line)
    assert "  " not in line
    assert line == line.strip()
    assert clean(line) == line
    line.encode()
