"""guestd's socket: takes connections, reads one request from each, and hands it to the part that serves it.

Threads wait in `accept` themselves, so a request costs no thread of its own; when the last waiting one is
taken, another is started. On AF_VSOCK only the host is spoken to. A request that fails ends its connection
with one error line; what fails unexpectedly is written to the console and answered "internal".
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from guestd import protocol, session
from guestd.place import HOME
from guestd.process import Refused, start
from guestd.pump import Link, Pump
from guestd.session import Feed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from guestd.place import Place
    from guestd.protocol import Request

_SPARE_THREADS: Final = 4
_BACKLOG: Final = 128
_STACK_BYTES: Final = 512 << 10
_RECEIVE_BYTES: Final = 64 << 10
_FAREWELL_BYTES: Final = 64 << 20
_FAREWELL_S: Final = 2.0


def listen_vsock() -> socket.socket:
    listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listener.bind((socket.VMADDR_CID_ANY, protocol.PORT))
    listener.listen(_BACKLOG)
    return listener


def listen_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(_BACKLOG)
    return listener


class Server:
    """The machine as the host sees it. `configure` makes a Place of its request; `place` is there already
    when guestd was restarted."""

    def __init__(self, configure: Callable[[Request], Place], place: Place | None) -> None:
        self._configure_place = configure
        self._place = place
        self._lock = threading.Lock()
        self._configuring = threading.Lock()
        self._sessions: dict[str, Pump | None] = {}     # None: being started
        self._waiting = 0
        self._serve: Final[dict[str, Callable[[Place, Request, socket.socket, bytes], None]]] = {
            "sessions": self._list_sessions,
            "forget": self._forget,
            "read": _read,
            "write": _write,
            "remove": _remove,
            "list": _list,
            "bundle_in": _bundle_in,
            "bundle_out": _bundle_out,
            "dial": _dial,
            "sync": _sync,
        }

    # ---- connections

    def run(self, listener: socket.socket) -> None:
        """For ever."""
        threading.stack_size(_STACK_BYTES)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        threading.Event().wait()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with self._lock:
                if self._waiting >= _SPARE_THREADS:
                    return
                self._waiting += 1
            try:
                sock, peer = listener.accept()
            except ConnectionError:
                with self._lock:
                    self._waiting -= 1
                continue
            with self._lock:
                self._waiting -= 1
                alone = self._waiting == 0
            if alone:
                threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            if listener.family == socket.AF_VSOCK and peer[0] != protocol.HOST_CID:
                sock.close()
            else:
                self.serve(sock)

    def serve(self, sock: socket.socket) -> None:
        """One connection, to its end."""
        try:
            if not self._request(sock):
                return
        except Refused as why:
            _refuse(sock, why.code, str(why))
        except protocol.GuestProtocolFault as fault:
            _refuse(sock, fault.code, str(fault))
        except ConnectionError:
            pass
        except Exception as why:
            import traceback  # only when there is something to trace

            traceback.print_exc(file=sys.stderr)
            _refuse(sock, "internal", f"guestd failed: {type(why).__name__}")
        sock.close()

    def _request(self, sock: socket.socket) -> bool:
        """Serves it. False: the socket belongs to a pump now."""
        reader = protocol.LineReader()
        line = None
        while line is None:
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                return True
            line = reader.feed(data)
        request = protocol.decode_request(line)
        place = self._place
        why = session.refusal(request.op, place is not None)
        if why is not None:
            raise Refused("bad_request", why)
        if request.op == "ping":
            sock.sendall(protocol.encode_ok(version=protocol.VERSION, configured=place is not None))
        elif place is None or request.op == "configure":
            self._configure(request, sock)
        elif request.op == "exec":
            self._exec(place, request, sock, reader.rest())
            return False
        elif request.op == "attach":
            self._attach(request, sock, reader.rest())
            return False
        else:
            self._serve[request.op](place, request, sock, reader.rest())
        return True

    def _configure(self, request: Request, sock: socket.socket) -> None:
        with self._configuring:
            why = session.refusal(request.op, self._place is not None)
            if why is not None:
                raise Refused("bad_request", why)
            self._place = self._configure_place(request)
        sock.sendall(protocol.encode_ok())

    # ---- processes

    def _exec(self, place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
        if request.keep:
            self._reserve(request.session)
        pump = None
        try:
            size = (request.rows, request.cols) if request.tty else None
            process = start(place, request.argv, request.env, request.cwd or HOME, size)
            pump = Pump(process, kept=request.keep)
        finally:
            if request.keep:
                with self._lock:
                    if pump is None:
                        del self._sessions[request.session]
                    else:
                        self._sessions[request.session] = pump
        pump.attach(Link(sock, Feed(pinned=True), received))
        pump.run()

    def _reserve(self, name: str) -> None:
        with self._lock:
            if name in self._sessions:
                raise Refused("bad_request", f"the session {name} exists")
            if len(self._sessions) >= protocol.MAX_SESSIONS:
                over = next((old for old, pump in self._sessions.items() if pump and pump.session.over), None)
                if over is None:
                    raise Refused("bad_request", "too many kept processes")
                del self._sessions[over]
            self._sessions[name] = None

    def _session(self, name: str) -> Pump:
        with self._lock:
            pump = self._sessions.get(name)
        if pump is None:
            raise Refused("not_found", f"no session {name}")
        return pump

    def _attach(self, request: Request, sock: socket.socket, received: bytes) -> None:
        pump = self._session(request.session)
        if pump.attach(Link(sock, Feed(request.offset_o, request.offset_E), received)):
            pump.run()

    def _list_sessions(self, place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
        with self._lock:
            found = [(name, pump.session) for name, pump in self._sessions.items() if pump is not None]
        states = [
            protocol.SessionState(
                name, not state.over, state.exit_code if state.over else None,
                state.rings["o"].end, state.rings["E"].end,
            )
            for name, state in found
        ]
        sock.sendall(protocol.encode_ok(sessions=states))

    def _forget(self, place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
        pump = self._session(request.session)
        if not pump.session.over:
            raise Refused("bad_request", f"the session {request.session} is running")
        with self._lock:
            self._sessions.pop(request.session, None)
        sock.sendall(protocol.encode_ok())


# ---- everything else: loaded when it is first asked for, a boot does not wait for it

def _read(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import files

    files.read(place, request.path, sock)


def _write(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import files

    files.write(place, request.path, request.size, sock, received)


def _remove(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import files

    files.remove(place, request.path)
    sock.sendall(protocol.encode_ok())


def _list(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import files

    listing = files.listing(place, request.path)
    sock.sendall(protocol.encode_ok(size=len(listing)) + listing)


def _bundle_in(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import bundle

    bundle.take_in(place, request.branch, request.size, sock, received)


def _bundle_out(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import bundle

    bundle.give_out(place, request.base, request.branch, sock)


def _dial(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    from guestd import tunnel

    tunnel.dial(request.port, sock, received)


def _sync(place: Place, request: Request, sock: socket.socket, received: bytes) -> None:
    if request.final:
        from guestd import volumes

        volumes.freeze()
    else:
        os.sync()
    sock.sendall(protocol.encode_ok())


def _refuse(sock: socket.socket, code: str, message: str) -> None:
    """The error line. Then what the host still sends is read and dropped: closing on unread bytes would reset
    the connection, and the line could be lost with it."""
    try:
        sock.settimeout(_FAREWELL_S)
        sock.sendall(protocol.encode_error(code, message))
        sock.shutdown(socket.SHUT_WR)
        left = _FAREWELL_BYTES
        while left > 0:
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                break
            left -= len(data)
    except OSError:
        return
