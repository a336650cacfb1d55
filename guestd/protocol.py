"""The guest protocol: what sandboxd and guestd say to each other. Both ends import this one file.

The host dials, the guest never does. One connection carries one request:

    host   one JSON object on one line (a request: "op" and its fields, see FIELDS)
    guest  one JSON object on one line: {"ok": true, ...} or {"ok": false, "error": {"code", "message"}}
    then, depending on the op:

    exec, attach   frames both ways: 1 byte kind, 4 bytes big-endian length, payload
        to the guest   i stdin bytes     e end of stdin    s signal name    r rows, cols (2 x u16)
        to the host    o stdout bytes    E stderr bytes    x exit code (i32), the last frame
                       d a gap: the stream's kind (1 byte) and how many bytes are lost (u64); the stream goes
                         on behind them
    read, list, bundle_out   the answer's "size", then that many bytes (of `list`: JSON {"entries": [...]})
    write, bundle_in         the answer is the go-ahead; the host sends the request's "size" bytes, the guest
                             a second answer line
    dial                     raw bytes of a TCP connection both ways; half-close is passed on

`configure` comes once, before any process. Its "network" is null, or {"address": "a.b.c.d/n", "gateway",
"resolver", "mtu"} for the machine's one interface; its "files" are written as root: [{"path", "mode", "data"}],
data in base64. Its "volumes" are [{"path", "read_only"}], one for each drive behind the first three, in their
order; its "bind" is null, or {"read_only"} for a directory of the host that the machine has as a virtio file system,
at /workspace. `sync` writes out what processes wrote; with "final" nothing can be written to the volumes afterwards,
and they are whole on their drives.

The guest closes after `x`, which is there to be read although sending may fail by then. The host's end of
stream, half-closed or whole, is a hang-up: it ends everything the process started, unless the process is
kept; then it only detaches. So stdin ends with `e`, never with shutdown. Frames are taken in order: a
signal behind stdin that the process does not read waits with it; another connection (attach) does not wait,
and hanging up neither.

Strings are UTF-8; bytes that are none (argv, environment, paths) travel as the lone surrogates of Python's
`surrogateescape`, written as JSON escapes. Every limit is a constant here and is checked before anything is
allocated for what it limits. Neither end trusts the other: whatever does not fit raises GuestProtocolFault,
and the connection is good for nothing more than one error line. This file does no input or output, and
imports little, because it is loaded while a machine boots.
"""

from __future__ import annotations

import binascii
import json
import re
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Final

VERSION: Final = 1
EVERY_VERSION: Final = frozenset({"ping", "sessions", "attach", "forget", "bundle_out"})
"""Ops that no version may change: what runs can be looked at, ended and brought back, however old guestd is."""
SINCE: Final[dict[str, int]] = {}
"""Later ops, and later fields as "op.field", with the VERSION that brought them. Versions only add."""
PORT: Final = 5000                      # AF_VSOCK port guestd listens on
HOST_CID: Final = 2                     # VMADDR_CID_HOST, linux/vm_sockets.h: the only peer guestd talks to

MAX_LINE_BYTES: Final = 1 << 20         # a JSON line, its newline included
MAX_FRAME_BYTES: Final = 1 << 20        # a frame's payload
CHUNK_BYTES: Final = 64 << 10           # what a well-behaved end puts into one frame
MAX_FILE_BYTES: Final = 64 << 20        # read, write
MAX_LISTING_BYTES: Final = 16 << 20     # list, as JSON
MAX_BUNDLE_BYTES: Final = 4 << 30       # bundle_in, bundle_out
RING_BYTES: Final = 1 << 20             # output a kept process's streams remember, each
MAX_SESSIONS: Final = 128               # kept processes, finished ones included
MAX_PATH_BYTES: Final = 4095            # PATH_MAX without its NUL, linux/limits.h
MAX_CONFIG_FILES: Final = 32            # files of `configure`
MAX_CONFIG_BYTES: Final = 256 << 10     # of all of them together
MAX_VOLUMES: Final = 8

STDIN: Final = "i"
STDIN_END: Final = "e"
SIGNAL: Final = "s"
RESIZE: Final = "r"
STDOUT: Final = "o"
STDERR: Final = "E"
EXIT: Final = "x"
GAP: Final = "d"

TO_GUEST: Final[dict[int, int]] = {ord("i"): MAX_FRAME_BYTES, ord("e"): 0, ord("s"): 16, ord("r"): 4}
TO_HOST: Final[dict[int, int]] = {
    ord("o"): MAX_FRAME_BYTES, ord("E"): MAX_FRAME_BYTES, ord("x"): 4, ord("d"): 9,
}
"""Which kinds of frame travel in a direction, and the longest payload of each."""

_EXACT: Final = {ord("r"), ord("x"), ord("d")}      # these have that length and no other

SIGNALS: Final = ("INT", "TERM", "KILL", "HUP")     # others are ignored

ERROR_CODES: Final = (
    "not_found", "is_dir", "not_dir", "not_empty", "read_only", "no_such_command", "no_such_cwd",
    "bad_request", "too_large", "nothing_new", "disk_full", "bad_volume", "internal",
)

_HEAD: Final = struct.Struct(">BI")
_SIZE: Final = struct.Struct(">HH")
_CODE: Final = struct.Struct(">i")
_GAP: Final = struct.Struct(">BQ")


class GuestProtocolFault(Exception):
    """The other end broke the protocol. `code` is "bad_request" or "too_large"."""

    def __init__(self, message: str, code: str = "bad_request") -> None:
        super().__init__(message)
        self.code = code


# ---- lines ---------------------------------------------------------------------------------------

class LineReader:
    """Cuts one line off the front of a stream: bytes in, the line out once it is whole, what follows kept."""

    __slots__ = ("_buffer", "_done", "_limit")

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = limit_bytes
        self._done = False

    def feed(self, data: bytes) -> bytes | None:
        """The line without its newline, or None while it is not whole."""
        buffer = self._buffer
        if self._done:
            raise ValueError("the line has been read; what follows is in rest()")
        seen = len(buffer)
        end = data.find(b"\n", 0, max(0, self._limit - seen))
        if end < 0:
            if seen + len(data) >= self._limit:
                raise GuestProtocolFault(f"a line longer than {self._limit} bytes", "too_large")
            buffer += data
            return None
        self._done = True
        line = bytes(buffer) + data[:end] if seen else bytes(data[:end])
        self._buffer = bytearray(data[end + 1:])
        return line

    def rest(self) -> bytes:
        """What came behind the line. Taken once."""
        rest = bytes(self._buffer) if self._done else b""
        if self._done:
            self._buffer = bytearray()
        return rest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise GuestProtocolFault("a name occurs twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise GuestProtocolFault(f"{name} is no JSON")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(
            line.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as why:
        raise GuestProtocolFault(f"not a JSON line: {type(why).__name__}") from None
    if type(value) is not dict:
        raise GuestProtocolFault("not a JSON object")
    return value


def _line(value: dict[str, Any]) -> bytes:
    # UTF-8 cannot hold a lone surrogate; `backslashreplace` writes it as the JSON escape it needs.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    line = text.encode("utf-8", "backslashreplace") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise GuestProtocolFault(f"a line longer than {MAX_LINE_BYTES} bytes", "too_large")
    return line


# ---- what a field may hold -----------------------------------------------------------------------

_BRANCH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_SESSION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOSTNAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HEX: Final = re.compile(r"[0-9a-f]*")
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = re.compile(rf"{_OCTET}(?:\.{_OCTET}){{3}}")
_SUBNET: Final = re.compile(rf"{_IPV4.pattern}/(?:3[01]|[12][0-9]|[89])")


def _text(value: Any) -> bool:
    """A string that stands for bytes, none of them NUL."""
    if type(value) is not str or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _path(value: Any) -> bool:
    return (
        _text(value) and value.startswith("/")
        and len(value.encode("utf-8", "surrogateescape")) <= MAX_PATH_BYTES
        and ".." not in value.split("/")
    )


def _argv(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 0 and all(map(_text, value)) and value[0] != ""


def _env(value: Any) -> bool:
    return type(value) is dict and all(
        name and "=" not in name and _text(name) and _text(content) for name, content in value.items()
    )


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _flag(value: Any) -> bool:
    return type(value) is bool


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and pattern.fullmatch(value) is not None


def _hex(digits: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and len(value) == digits and _HEX.fullmatch(value) is not None


def _network(value: Any) -> bool:
    return value is None or (
        type(value) is dict and value.keys() == _NETWORK.keys()
        and all(check(value[name]) for name, check in _NETWORK.items())
    )


def _config_files(value: Any) -> bool:
    if type(value) not in (list, tuple) or len(value) > MAX_CONFIG_FILES:
        return False
    left = MAX_CONFIG_BYTES
    for file in value:
        if type(file) is not dict or file.keys() != {"path", "mode", "data"}:
            return False
        if not _path(file["path"]) or type(file["mode"]) is not int or not 0 <= file["mode"] <= 0o777:
            return False
        data = file["data"]
        if type(data) is not str or len(data) > 4 * MAX_CONFIG_BYTES // 3 + 4:
            return False
        try:
            left -= len(binascii.a2b_base64(data, strict_mode=True))
        except (binascii.Error, ValueError):    # ValueError: not ASCII
            return False
    return left >= 0


def _volumes(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= MAX_VOLUMES and all(
        type(one) is dict and one.keys() == {"path", "read_only"} and _path(one["path"]) and _flag(one["read_only"])
        for one in value
    )


def _bind(value: Any) -> bool:
    return value is None or (type(value) is dict and value.keys() == {"read_only"} and _flag(value["read_only"]))


def branch_name(value: Any) -> bool:
    """Whether a name may be a branch, or the base of a bundle (hex digits pass too): API section 9."""
    return (
        type(value) is str and _BRANCH.fullmatch(value) is not None
        and ".." not in value and "//" not in value and not value.endswith((".lock", "/", "."))
    )


_OFFSET: Final = _whole(0, (1 << 53) - 1)
_CELLS: Final = _whole(0, 65535)
_NETWORK: Final[dict[str, Callable[[Any], bool]]] = {
    "address": _matches(_SUBNET),
    "gateway": _matches(_IPV4),
    "resolver": _matches(_IPV4),
    "mtu": _whole(576, 65535),          # RFC 791's least that every host takes
}
_REQUIRED: Final = True
_OPTIONAL: Final = False

FIELDS: Final[dict[str, dict[str, tuple[Callable[[Any], bool], bool]]]] = {
    "ping": {},
    "configure": {
        "hostname": (_matches(_HOSTNAME), _REQUIRED),
        "machine_id": (_hex(32), _REQUIRED),
        "time_ns": (_whole(0, (1 << 63) - 1), _REQUIRED),
        "entropy": (_hex(64), _REQUIRED),
        "env": (_env, _OPTIONAL),
        "network": (_network, _OPTIONAL),
        "files": (_config_files, _OPTIONAL),
        "volumes": (_volumes, _OPTIONAL),
        "bind": (_bind, _OPTIONAL),
    },
    "exec": {
        "argv": (_argv, _REQUIRED),
        "env": (_env, _OPTIONAL),
        "cwd": (_path, _OPTIONAL),
        "tty": (_flag, _OPTIONAL),
        "rows": (_CELLS, _OPTIONAL),
        "cols": (_CELLS, _OPTIONAL),
        "keep": (_flag, _OPTIONAL),
        "session": (_matches(_SESSION), _OPTIONAL),
    },
    "attach": {
        "session": (_matches(_SESSION), _REQUIRED),
        "offset_o": (_OFFSET, _OPTIONAL),
        "offset_E": (_OFFSET, _OPTIONAL),
    },
    "sessions": {},
    "forget": {"session": (_matches(_SESSION), _REQUIRED)},
    "read": {"path": (_path, _REQUIRED)},
    "write": {"path": (_path, _REQUIRED), "size": (_whole(0, MAX_FILE_BYTES), _REQUIRED)},
    "remove": {"path": (_path, _REQUIRED)},
    "list": {"path": (_path, _REQUIRED)},
    "bundle_in": {"branch": (branch_name, _REQUIRED), "size": (_whole(0, MAX_BUNDLE_BYTES), _REQUIRED)},
    "bundle_out": {"base": (branch_name, _REQUIRED), "branch": (branch_name, _REQUIRED)},
    "dial": {"port": (_whole(1, 65535), _REQUIRED)},
    "sync": {"final": (_flag, _OPTIONAL)},
}
"""Every op, its fields, what each may hold, and whether it must be there. Nothing else is accepted."""


class Request:
    """One request, checked when it is made; the fields an op does not have keep their defaults.

    Strings are as `os.fsdecode` makes them. `size` is in bytes, `time_ns` since 1970, `rows` and `cols` in
    cells (0: not known), offsets in bytes of a stream since its process began.
    """

    __slots__ = (
        "argv", "base", "bind", "branch", "cols", "cwd", "entropy", "env", "files", "final", "hostname", "keep",
        "machine_id", "network", "offset_E", "offset_o", "op", "path", "port", "rows", "session", "size", "time_ns",
        "tty", "volumes",
    )
    op: str
    argv: Sequence[str]
    base: str
    bind: Mapping[str, Any] | None
    branch: str
    cols: int
    cwd: str
    entropy: str
    env: Mapping[str, str]
    files: Sequence[Mapping[str, Any]]
    final: bool
    hostname: str
    keep: bool
    machine_id: str
    network: Mapping[str, Any] | None
    offset_E: int  # noqa: N815 (named as the frame)
    offset_o: int
    path: str
    port: int
    rows: int
    session: str
    size: int
    time_ns: int
    tty: bool
    volumes: Sequence[Mapping[str, Any]]

    def __init__(self, op: str, **fields: Any) -> None:
        known = FIELDS.get(op) if type(op) is str else None
        if known is None:
            raise GuestProtocolFault("an op that this version does not have")
        for name, value in fields.items():
            check = known.get(name)
            if check is None:
                raise GuestProtocolFault(f"{op} has no field {name[:40]!r}")
            if not check[0](value):
                if name == "size" and type(value) is int and value > 0:
                    raise GuestProtocolFault(f"{op}: more bytes than are taken", "too_large")
                raise GuestProtocolFault(f"{op}: {name} is not what it may be")
        for name, (_, required) in known.items():
            if required and name not in fields:
                raise GuestProtocolFault(f"{op}: {name} is missing")
        if fields.get("keep", False) != ("session" in fields) and op == "exec":
            raise GuestProtocolFault("exec: keep and session go together")
        put = object.__setattr__
        put(self, "op", op)
        for name, default in _DEFAULTS.items():
            put(self, name, fields.get(name, default))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a request does not change")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    __hash__ = None  # type: ignore[assignment]


_DEFAULTS: Final[dict[str, Any]] = {
    "argv": (), "base": "", "bind": None, "branch": "", "cols": 0, "cwd": "", "entropy": "", "env": {}, "files": (),
    "final": False, "hostname": "", "keep": False, "machine_id": "", "network": None, "offset_E": 0, "offset_o": 0,
    "path": "", "port": 0, "rows": 0, "session": "", "size": 0, "time_ns": 0, "tty": False, "volumes": (),
}


def encode_request(request: Request) -> bytes:
    """The line that carries a request; GuestProtocolFault "too_large" when a line cannot hold it."""
    value: dict[str, Any] = {"op": request.op}
    for name, (_, required) in FIELDS[request.op].items():
        content = getattr(request, name)
        if required or content != _DEFAULTS[name]:
            value[name] = content
    return _line(value)


def decode_request(line: bytes) -> Request:
    """A request from its line (without newline)."""
    fields = _parse(line)
    return Request(fields.pop("op", None), **fields)


# ---- answers -------------------------------------------------------------------------------------

class SessionState:
    """What the guest says of one kept process: `exit_code` is None while it runs."""

    __slots__ = ("bytes_E", "bytes_o", "exit_code", "running", "session")

    def __init__(
        self, session: str, running: bool, exit_code: int | None, bytes_o: int, bytes_E: int,  # noqa: N803
    ) -> None:
        self.session = session
        self.running = running
        self.exit_code = exit_code
        self.bytes_o = bytes_o
        self.bytes_E = bytes_E


class Answer:
    """One answer line. `code` is "" for success, else one of ERROR_CODES, and `message` is the guest's text
    (hostile: it goes through termsafe before a person sees it). The others are those of the op asked for."""

    __slots__ = ("code", "configured", "message", "sessions", "size", "version")

    def __init__(
        self, code: str = "", message: str = "", *, version: int = 0, configured: bool = False, size: int = 0,
        sessions: tuple[SessionState, ...] = (),
    ) -> None:
        self.code = code
        self.message = message
        self.version = version
        self.configured = configured
        self.size = size
        self.sessions = sessions

    @property
    def ok(self) -> bool:
        return self.code == ""


_ANSWERS: Final[dict[str, Callable[[Any], bool]]] = {
    "version": _whole(1, 1 << 16),
    "configured": _flag,
    "size": _whole(0, MAX_BUNDLE_BYTES),
    "sessions": lambda value: type(value) is list and len(value) <= MAX_SESSIONS,
}

_SESSION_FIELDS: Final[dict[str, Callable[[Any], bool]]] = {
    "session": _matches(_SESSION),
    "running": _flag,
    "exit_code": lambda value: value is None or _whole(-(1 << 31), (1 << 31) - 1)(value),
    "bytes_o": _OFFSET,
    "bytes_E": _OFFSET,
}


def encode_ok(**fields: Any) -> bytes:
    """{"ok": true, ...}. `sessions` is given as SessionState values."""
    if "sessions" in fields:
        fields["sessions"] = [
            {name: getattr(state, name) for name in _SESSION_FIELDS} for state in fields["sessions"]
        ]
    return _line({"ok": True, **fields})


def encode_error(code: str, message: str) -> bytes:
    """{"ok": false, ...}: a code that is not in ERROR_CODES becomes "internal", a long message is cut."""
    if code not in ERROR_CODES:
        code = "internal"
    return _line({"ok": False, "error": {"code": code, "message": message[:4096]}})


def decode_answer(line: bytes) -> Answer:
    """An answer from its line (without newline)."""
    fields = _parse(line)
    ok = fields.pop("ok", None)
    if ok is False:
        error = fields.pop("error", None)
        if fields or type(error) is not dict or error.keys() != {"code", "message"}:
            raise GuestProtocolFault("an error that is not as errors are")
        code, message = error["code"], error["message"]
        if type(code) is not str or type(message) is not str:
            raise GuestProtocolFault("an error that is not as errors are")
        return Answer(code if code in ERROR_CODES else "internal", message[:4096])
    if ok is not True:
        raise GuestProtocolFault("an answer without ok")
    for name, value in fields.items():
        check = _ANSWERS.get(name)
        if check is None or not check(value):
            raise GuestProtocolFault(f"an answer with a field {name[:40]!r} that it may not have")
    if "sessions" in fields:
        fields["sessions"] = tuple(map(_session_state, fields["sessions"]))
    return Answer(**fields)


def _session_state(value: Any) -> SessionState:
    if type(value) is not dict or value.keys() != _SESSION_FIELDS.keys():
        raise GuestProtocolFault("a session that is not as sessions are")
    for name, check in _SESSION_FIELDS.items():
        if not check(value[name]):
            raise GuestProtocolFault(f"a session whose {name} is not what it may be")
    return SessionState(**value)


# ---- frames --------------------------------------------------------------------------------------

def encode_frame(kind: str, payload: bytes = b"") -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise GuestProtocolFault(f"a frame longer than {MAX_FRAME_BYTES} bytes", "too_large")
    return _HEAD.pack(ord(kind), len(payload)) + payload


def frame_head(kind: str, length: int) -> bytes:
    """The five bytes before a payload, for a sender that does not want to copy the payload."""
    return _HEAD.pack(ord(kind), length)


def encode_signal(name: str) -> bytes:
    return encode_frame(SIGNAL, name.encode("ascii"))


def encode_resize(rows: int, cols: int) -> bytes:
    return encode_frame(RESIZE, _SIZE.pack(rows, cols))


def encode_exit(code: int) -> bytes:
    return encode_frame(EXIT, _CODE.pack(code))


def encode_gap(stream: str, lost_bytes: int) -> bytes:
    return encode_frame(GAP, _GAP.pack(ord(stream), lost_bytes))


def decode_signal(payload: bytes) -> str | None:
    """A name of SIGNALS, or None: others are ignored."""
    name = payload.decode("ascii", "replace")
    return name if name in SIGNALS else None


def decode_resize(payload: bytes) -> tuple[int, int]:
    """(rows, cols)"""
    rows, cols = _SIZE.unpack(payload)
    return rows, cols


def decode_exit(payload: bytes) -> int:
    code: int = _CODE.unpack(payload)[0]
    return code


def decode_gap(payload: bytes) -> tuple[str, int]:
    """(stream, lost bytes)"""
    kind, lost = _GAP.unpack(payload)
    if kind not in b"oE":
        raise GuestProtocolFault("a gap in a stream that does not exist")
    return chr(kind), lost


class FrameDecoder:
    """Cuts a stream into frames. `kinds` is TO_GUEST or TO_HOST: what may come from the other end.

    A head that announces an unknown kind or a payload of a wrong length raises at once, before its payload is
    awaited; the decoder is useless afterwards. It never holds more than one frame and what one feed brought.
    """

    __slots__ = ("_buffer", "_kinds")

    def __init__(self, kinds: dict[int, int]) -> None:
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """The frames that are whole now: (kind, payload) each."""
        buffer = self._buffer
        buffer += data
        have = len(buffer)
        frames: list[tuple[str, bytes]] = []
        at = 0
        while have - at >= 5:
            kind, length = _HEAD.unpack_from(buffer, at)
            longest = self._kinds.get(kind)
            if longest is None:
                raise GuestProtocolFault(f"a frame of kind {kind:#04x}, which does not travel this way")
            if length > longest or (kind in _EXACT and length != longest):
                raise GuestProtocolFault(f"a frame {chr(kind)!r} of {length} bytes", "too_large")
            if have - at - 5 < length:
                break
            frames.append((chr(kind), bytes(memoryview(buffer)[at + 5:at + 5 + length])))
            at += 5 + length
        if at:
            del buffer[:at]
        return frames

    @property
    def idle(self) -> bool:
        """Whether the stream may end here: no frame has begun."""
        return not self._buffer
