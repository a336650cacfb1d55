"""The stand-in's other half: what a Firecracker process does that needs no right of its jail.

    python -m tests.firecracker_standin.companion DIRECTORY

listens at DIRECTORY/companion.sock, where each `firecracker` (shim.c) comes to, and prints `ready`. For each it
answers the API: every request is held against the product's own table of calls, a call in the wrong state gets the
documented error, and InstanceStart runs the guest under emulation. A shim that dies takes its guest along, and the
other way round.

Beside the socket: `version` is what it answers as its version; `calls.jsonl` gets a line for each request;
`faults.json` says what goes wrong, a list of objects with `do` and any of `call` (counted from 1 in each process; 0 is
its start), `method`, `path` and `id`, of which the first that fits is taken.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import h11

from sandboxd.vm.firecracker_calls import State, fault, find
from sandboxd.vm.monitor import MonitorError
from tests.firecracker_standin.emulation import Disk, Guest, Parts

BODY_BYTES = 51200  # HTTP_MAX_PAYLOAD_SIZE
CONNECTIONS = 10  # as many as its server takes at once
START_S = 60.0
DEFAULT_VERSION = "1.16.1"
DEFAULT_MACHINE: dict[str, Any] = {
    "vcpu_count": 1,
    "mem_size_mib": 128,
    "smt": False,
    "track_dirty_pages": False,
    "huge_pages": "None",
}
DEFAULT_BOOT_ARGS = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux i8042.nomux i8042.dumbkbd swiotlb=noforce"
SNAPSHOT_FORMAT = "stand-in 1"
LEVELS = ("Off", "Error", "Warning", "Info", "Debug", "Trace")
FAULTS = ("refuse", "hang", "die", "garbage", "half", "headers", "continues", "large", "deaf")

Body = dict[str, Any]


class Refused(Exception):
    """The text of a `fault_message`."""


class Gone(Exception):
    """The process is to end, with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


@dataclass(frozen=True)
class Request:
    number: int
    method: str
    path: str
    body: bytes


@dataclass
class Opened:
    """A part of the machine: what the API was told of it, and the descriptors that came of it."""

    body: Body
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


class Shim:
    """The process in the jail, to be asked for descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._asking = anyio.Lock()
        self._answer_in, self._answers = anyio.create_memory_object_stream[tuple[bytes, list[int]]](1)

    async def greet(self) -> dict[str, str]:
        data, _ = await self._receive()
        words = data.decode().split("\0")
        return dict(zip(words[::2], words[1::2], strict=False))

    async def listen(self) -> None:
        """Returns when the process is gone."""
        while True:
            data, fds = await self._receive()
            if not data:
                return
            await self._answer_in.send((data, fds))

    async def ask(self, verb: str, argument: str = "") -> int:
        """A descriptor. Raises the OSError that the process met."""
        if "\0" in argument:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        async with self._asking:
            self._sock.send(f"{verb} {argument}".encode(), socket.MSG_NOSIGNAL)
            data, fds = await self._answers.receive()
        if fds:
            return fds[0]
        number = int(data.split()[1])
        raise OSError(number, os.strerror(number))

    def exit(self, code: int) -> None:
        with suppress(OSError):
            self._sock.send(f"exit {code}".encode(), socket.MSG_NOSIGNAL)

    async def _receive(self) -> tuple[bytes, list[int]]:
        await anyio.wait_readable(self._sock)
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 8192, 1)
        except ConnectionError:
            return b"", []
        return data, fds


class Vmm:
    """One Firecracker process."""

    def __init__(self, directory: Path, shim: Shim, options: Mapping[str, str]) -> None:
        self._directory = directory
        self._shim = shim
        self._options = options
        self.id = options.get("id", "anonymous-instance")
        self._state = State.NOT_STARTED
        self._machine: Body = {}
        self._boot: Opened | None = None
        self._drives: dict[str, Opened] = {}
        self._interfaces: dict[str, Opened] = {}
        self._vsock: Opened | None = None
        self._entropy: Body | None = None
        self._serial: Opened | None = None
        self._log: int | None = None
        self._logger: Body = {}
        self._metrics: int | None = None
        self._stdout: int | None = None
        self._saved: int | None = None
        self._guest: Guest | None = None
        self._configured = False
        self._calls = 0
        self._acting = anyio.Lock()
        self._group: anyio.abc.TaskGroup | None = None

    async def run(self) -> None:
        """Until the process is gone, or its guest has reset itself."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group

                async def until_gone() -> None:
                    await self._shim.listen()
                    group.cancel_scope.cancel()

                group.start_soon(until_gone)
                match self._find_fault(Request(0, "", "", b"")):
                    case "die":
                        raise Gone(1)
                    case "hang":
                        await anyio.sleep_forever()
                self._stdout = await self._shim.ask("stdout")
                os.set_blocking(self._stdout, False)
                if "log-path" in self._options:
                    self._log = await self._shim.ask("append", self._options["log-path"])
                if "metrics-path" in self._options:
                    self._metrics = await self._shim.ask("append", self._options["metrics-path"])
                if "config-file" in self._options:
                    await self._configure(self._options["config-file"])
                if "no-api" not in self._options:
                    await self._serve(self._options.get("api-sock", "/run/firecracker.socket"))
        except* Gone as gone:
            self._shim.exit(next(e.code for e in _leaves(gone) if isinstance(e, Gone)))
        except* (OSError, Refused) as failed:
            self._say(f"RunWithApiError error: {'; '.join(str(error) for error in _leaves(failed))}")
            self._shim.exit(1)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    # The API's server.

    async def _serve(self, path: str) -> None:
        assert self._group is not None
        listener = socket.socket(fileno=await self._shim.ask("listen", path))
        listener.setblocking(False)
        limit = anyio.CapacityLimiter(CONNECTIONS)
        with listener:
            while True:
                await anyio.wait_readable(listener)
                with suppress(BlockingIOError):
                    connection, _ = listener.accept()
                    stream = await anyio.abc.SocketStream.from_socket(connection)
                    self._group.start_soon(self._converse, stream, limit)

    async def _converse(self, stream: anyio.abc.SocketStream, limit: anyio.CapacityLimiter) -> None:
        wire = h11.Connection(h11.SERVER, max_incomplete_event_size=BODY_BYTES)
        async with stream, limit:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, h11.LocalProtocolError):
                while (request := await self._receive(wire, stream)) is not None:
                    status, answer = await self._answer(request, stream)
                    text = b"" if answer is None else json.dumps(answer, separators=(",", ":")).encode()
                    headers = [("Server", "Firecracker API"), ("Connection", "keep-alive")]
                    if answer is not None:
                        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(text)))]
                    await stream.send(wire.send(h11.Response(status_code=status, headers=headers)) or b"")
                    await stream.send(wire.send(h11.Data(data=text)) or b"") if text else None
                    await stream.send(wire.send(h11.EndOfMessage()) or b"")
                    wire.start_next_cycle()

    async def _receive(self, wire: h11.Connection, stream: anyio.abc.SocketStream) -> Request | None:
        request: h11.Request | None = None
        body = b""
        while True:
            try:
                event = wire.next_event()
                if len(body) > BODY_BYTES:
                    raise h11.RemoteProtocolError("Payload too large.")
            except h11.RemoteProtocolError as error:
                text = json.dumps({"error": f"{error}\nAll previous unanswered requests will be dropped."}).encode()
                head = f"HTTP/1.1 400 \r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
                await stream.send(head.encode() + text)
                return None
            match event:
                case h11.NEED_DATA:
                    if wire.they_are_waiting_for_100_continue:
                        await stream.send(wire.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                    try:
                        wire.receive_data(await stream.receive())
                    except anyio.EndOfStream:
                        return None
                case h11.Request():
                    request = event
                case h11.Data():
                    body += event.data
                case h11.EndOfMessage():
                    assert request is not None
                    self._calls += 1
                    return Request(self._calls, request.method.decode(), request.target.decode(), body)
                case _:
                    return None

    async def _answer(self, request: Request, stream: anyio.abc.SocketStream) -> tuple[int, Body | None]:
        async with self._acting:
            self._say(f'The API server received a {request.method.title()} request on "{request.path}".', "Info")
            kind = self._find_fault(request)
            if kind not in (None, "deaf"):
                self._note(request, kind)
                await self._misbehave(kind, stream)
                return 400, _message("The request was refused by the test.")
            status, answer = await self._carry_out(request)
            if kind == "deaf":
                self._running().deafen()
            self._note(request, status, answer)
            return status, answer

    async def _carry_out(self, request: Request) -> tuple[int, Body | None]:
        try:
            body = json.loads(request.body) if request.body else None
            if (why := self._refusal(request, body)) is not None:
                raise Refused(why)
            answer = await self._act(request.method, request.path.strip("/").split("/"), body or {})
        except (Refused, ValueError, RecursionError, MonitorError, TimeoutError) as refused:
            self._say(f"Received Error. Status code: 400 Bad Request. Message: {refused}")
            return 400, _message(str(refused))
        except OSError as error:
            text = f"{error.strerror} (os error {error.errno})"
            self._say(f"Received Error. Status code: 400 Bad Request. Message: {text}")
            return 400, _message(text)
        return (204, None) if answer is None else (200, answer)

    def _refusal(self, request: Request, body: object) -> str | None:
        major, minor, patch = (int(part) for part in re.findall(r"[0-9]+", self._version())[:3])
        number = (major, minor, patch)
        asked = request.method, request.path, body
        why = fault(*asked, self._state, number, self._configured)
        if why is None:
            return None
        elsewhere = {state for state in State if fault(*asked, state, number) is None}
        # Refused for the moment at which it comes: then in the real one's words.
        if self._state in elsewhere:
            return (
                "Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific resources."
            )
        if self._state is State.NOT_STARTED and elsewhere:
            return "The requested operation is not supported before starting the microVM."
        if State.NOT_STARTED in elsewhere:
            return "The requested operation is not supported after starting the microVM."
        if elsewhere:
            return (
                "Create snapshot error: Cannot save the microVM state: save and restore are unavailable while running."
            )
        return why

    # What the calls do.

    async def _act(self, method: str, path: list[str], body: Body) -> Body | None:
        match method, *path:
            case "GET", "":
                info = {"id": self.id, "state": self._state.value, "vmm_version": self._version()}
                return info | {"app_name": "Firecracker"}
            case "GET", "version":
                return {"firecracker_version": self._version()}
            case "GET", "vm", "config":
                return self._configuration()
            case "PUT", "logger":
                if "log_path" in body:
                    self._log = await self._exchange(self._log, "append", body["log_path"])
                self._logger |= body
            case "PUT", "metrics":
                if self._metrics is not None:
                    raise Refused("Metrics config error: Reinitialization of metrics not allowed.")
                self._metrics = await self._shim.ask("append", body["metrics_path"])
            case "PUT", "machine-config":
                self._machine = body
            case "PUT", "boot-source":
                await self._put_boot_source(body)
            case "PUT", "drives", id:
                await self._put_drive(id, body)
            case "PUT", "network-interfaces", id:
                self._close_part(self._interfaces.pop(id, None))
                tap = await self._open("Network config error: Open tap device failed", "tap", body["host_dev_name"])
                self._interfaces[id] = Opened(body, [tap])
            case "PUT", "vsock":
                await self._put_vsock(body)
            case "PUT", "entropy":
                self._entropy = body
            case "PUT", "serial":
                fds = [await self._shim.ask("append", body["serial_out_path"])] if body.get("serial_out_path") else []
                self._close_part(self._serial)
                self._serial = Opened(body, fds)
            case "PUT", "actions":
                await self._put_action(body["action_type"])
            case "PATCH", "vm":
                await self._patch_vm(body["state"])
            case "PATCH", "drives", id:
                await self._patch_drive(id, body)
            case "PATCH", "network-interfaces", id:
                if id not in self._interfaces:
                    raise Refused(f"Network config error: Invalid interface ID - not found: {id}")
            case "PUT", "snapshot", "create":
                await self._create_snapshot(body)
            case "PUT", "snapshot", "load":
                await self._load_snapshot(body)
            case _:
                raise Refused(f"Invalid request method and/or path: {method} {'/'.join(path)}.")
        called = find(method, "/" + "/".join(path))
        self._configured |= called is not None and called[0].configures
        return None

    async def _put_boot_source(self, body: Body) -> None:
        fds = [
            await self._open(
                "Boot source error: The kernel file cannot be opened", "open-ro", body["kernel_image_path"]
            )
        ]
        if body.get("initrd_path"):
            what = "Boot source error: The initrd file cannot be opened due to invalid path or invalid permissions"
            fds.append(await self._open(what, "open-ro", body["initrd_path"]))
        self._close_part(self._boot)
        self._boot = Opened(body, fds)

    async def _put_drive(self, id: str, body: Body) -> None:
        if body.get("is_root_device") and any(
            drive.body.get("is_root_device") for other, drive in self._drives.items() if other != id
        ):
            raise Refused("Drive config error: A root block device already exists!")
        new = Opened(body, [await self._open_drive(body["path_on_host"], bool(body.get("is_read_only")))])
        self._close_part(self._drives.get(id))
        self._drives[id] = new

    async def _open_drive(self, path: str, read_only: bool) -> int:
        what = "Drive config error: Unable to create the virtio block device: Error manipulating the backing file"
        return await self._open(what, "open-ro" if read_only else "open-rw", path)

    async def _put_vsock(self, body: Body) -> None:
        self._close_part(self._vsock)
        self._vsock = None
        what = "Vsock config error: Cannot create backend for vsock device: UnixBind"
        self._vsock = Opened(body, [await self._open(what, "listen", body["uds_path"])])

    async def _put_action(self, action: str) -> None:
        match action:
            case "InstanceStart":
                if self._boot is None:
                    raise Refused("Start microvm error: Cannot start microvm without kernel configuration.")
                await self._launch(None)
                self._state = State.RUNNING
            case "SendCtrlAltDel":
                await self._running().ctrl_alt_del()
            case "FlushMetrics":
                if self._metrics is not None:
                    line = {"utc_timestamp_ms": int(time.time() * 1000), "vmm": {"panic_count": 0}}
                    os.write(self._metrics, json.dumps(line).encode() + b"\n")

    async def _patch_vm(self, state: str) -> None:
        if state == "Paused" and self._state is State.RUNNING:
            await self._running().pause()
            self._state = State.PAUSED
        elif state == "Resumed" and self._state is State.PAUSED:
            if self._saved is not None:
                await self._launch(self._saved)
                os.close(self._saved)
                self._saved = None
            else:
                await self._running().resume()
            self._state = State.RUNNING

    async def _patch_drive(self, id: str, body: Body) -> None:
        drive = self._drives.get(id)
        if drive is None:
            raise Refused(f"Drive config error: Device not found: {id}")
        # Of a limiter, what is left out stays as it was.
        limiter = {**drive.body.get("rate_limiter", {}), **body.get("rate_limiter", {})}
        changed = drive.body | body | ({"rate_limiter": limiter} if limiter else {})
        if "path_on_host" in body:
            await self._exchange_drive(id, drive, body["path_on_host"])
        drive.body = changed
        if self._guest is not None:
            await self._guest.limit(list(self._drives).index(id), _limits(changed))

    async def _exchange_drive(self, id: str, drive: Opened, path: str) -> None:
        read_only = bool(drive.body.get("is_read_only"))
        fd = await self._open_drive(path, read_only)
        try:
            if self._guest is not None:
                await self._guest.exchange(list(self._drives).index(id), fd, read_only)
        except BaseException:
            os.close(fd)
            raise
        drive.close()
        drive.fds.append(fd)

    async def _create_snapshot(self, body: Body) -> None:
        if body.get("snapshot_type", "Full") != "Full":
            raise Refused("Create snapshot error: The stand-in knows full snapshots alone.")
        memory = await self._open("Create snapshot error: Cannot create memory file", "create", body["mem_file_path"])
        try:
            state = await self._open("Create snapshot error: Cannot create state file", "create", body["snapshot_path"])
            try:
                if self._saved is not None:
                    raise Refused("Create snapshot error: The stand-in cannot save a guest that was not resumed.")
                await self._running().save(memory)
                # What QEMU writes leaves out empty pages; the real file is as long as the memory.
                os.ftruncate(memory, (DEFAULT_MACHINE | self._machine)["mem_size_mib"] << 20)
                os.write(state, json.dumps({"format": SNAPSHOT_FORMAT, **self._configuration()}).encode())
            finally:
                os.close(state)
        finally:
            os.close(memory)

    async def _load_snapshot(self, body: Body) -> None:
        """QEMU itself starts with the resumption, with whatever drives are in place by then. As with the real one, what
        fails in here is the end of the process."""
        try:
            await self._restore(body)
        except (Refused, OSError, ValueError, KeyError) as error:
            assert self._group is not None
            self._group.start_soon(_end_soon, 1)
            raise Refused(f"Load snapshot error: Failed to restore from snapshot: {error}") from None
        self._state = State.PAUSED
        if body.get("resume_vm"):
            await self._patch_vm("Resumed")

    async def _restore(self, body: Body) -> None:
        state = await self._shim.ask("open-ro", body["snapshot_path"])
        with os.fdopen(state, "rb") as file:
            saved = json.loads(file.read(1 << 20))
        if saved.pop("format", None) != SNAPSHOT_FORMAT:
            raise ValueError("the state file is no snapshot")
        backend = body.get("mem_backend") or {"backend_type": "File", "backend_path": body.get("mem_file_path", "")}
        if backend["backend_type"] != "File":
            raise ValueError("the stand-in has no userfaultfd")
        taps = {entry["iface_id"]: entry["host_dev_name"] for entry in body.get("network_overrides", [])}
        unknown = taps.keys() - {entry["iface_id"] for entry in saved["network-interfaces"]}
        if unknown:
            raise ValueError(f"Unknown network device: {', '.join(sorted(unknown))}")
        memory = await self._shim.ask("open-ro", backend["backend_path"])
        self._saved = memory
        await self._put_boot_source(saved["boot-source"])
        self._machine = saved["machine-config"]
        self._entropy = saved["entropy"]
        for drive in saved["drives"]:
            await self._put_drive(drive["drive_id"], drive)
        for entry in saved["network-interfaces"]:
            entry["host_dev_name"] = taps.get(entry["iface_id"], entry["host_dev_name"])
            await self._act("PUT", ["network-interfaces", entry["iface_id"]], entry)
        if saved["vsock"] is not None:
            await self._put_vsock(saved["vsock"] | body.get("vsock_override", {}))

    async def _configure(self, path: str) -> None:
        """--config-file: the same parts under the same names, then a start."""
        fd = await self._shim.ask("open-ro", path)
        with os.fdopen(fd, "rb") as file:
            parts = json.loads(file.read(BODY_BYTES))
        for name, value in parts.items():
            for body in value if isinstance(value, list) else [value]:
                id = body.get("drive_id") or body.get("iface_id")
                await self._must("PUT", f"/{name}" + (f"/{id}" if id else ""), body)
        await self._must("PUT", "/actions", {"action_type": "InstanceStart"})

    async def _must(self, method: str, path: str, body: Body) -> None:
        status, answer = await self._carry_out(Request(0, method, path, json.dumps(body).encode()))
        if status >= 400:
            raise Refused(str(answer))

    async def _launch(self, saved: int | None) -> None:
        assert self._boot is not None and self._group is not None
        machine = DEFAULT_MACHINE | self._machine
        parts = Parts(
            kernel=self._boot.fds[0],
            initramfs=self._boot.fds[1] if len(self._boot.fds) > 1 else None,
            boot_args=self._boot.body.get("boot_args", DEFAULT_BOOT_ARGS),
            cpus=machine["vcpu_count"],
            memory_mib=machine["mem_size_mib"],
            # A root device comes first, the others in the order in which they were made known.
            disks=[
                Disk(drive.fds[0], bool(drive.body.get("is_read_only")), _limits(drive.body))
                for drive in sorted(self._drives.values(), key=lambda drive: not drive.body.get("is_root_device"))
            ],
            taps=[(entry.fds[0], entry.body.get("guest_mac", "")) for entry in self._interfaces.values()],
            vsock=None if self._vsock is None else (self._vsock.fds[0], self._vsock.body["guest_cid"]),
            entropy=self._entropy is not None,
        )
        guest = Guest(parts, self._print)
        try:
            with anyio.fail_after(START_S):
                await guest.start(saved)
        except BaseException:
            await guest.end()
            raise
        self._guest = guest
        self._group.start_soon(self._attend, guest)

    async def _attend(self, guest: Guest) -> None:
        raise Gone(await guest.run())

    # Small things.

    def _running(self) -> Guest:
        if self._guest is None:
            raise Refused("Internal VMM error: there is no guest.")
        return self._guest

    async def _open(self, what: str, verb: str, argument: str) -> int:
        try:
            return await self._shim.ask(verb, argument)
        except OSError as error:
            raise Refused(f"{what}: {error.strerror} (os error {error.errno}) {argument}") from None

    async def _exchange(self, old: int | None, verb: str, argument: str) -> int:
        new = await self._shim.ask(verb, argument)
        if old is not None:
            os.close(old)
        return new

    def _configuration(self) -> Body:
        return {
            "boot-source": self._boot.body if self._boot else None,
            "machine-config": DEFAULT_MACHINE | self._machine,
            "drives": [drive.body for drive in self._drives.values()],
            "network-interfaces": [entry.body for entry in self._interfaces.values()],
            "vsock": self._vsock.body if self._vsock else None,
            "entropy": self._entropy,
        }

    def _print(self, data: bytes) -> None:
        """To the serial device's file, or stdout; what does not fit is lost, as it is with the real one."""
        to = self._serial.fds[0] if self._serial is not None and self._serial.fds else self._stdout
        if to is not None:
            with suppress(OSError):
                os.write(to, data)

    def _say(self, text: str, level: str = "Error") -> None:
        if LEVELS.index(level) > LEVELS.index(self._logger.get("level", self._options.get("level", "Info")).title()):
            return
        shown = f":{level.upper()}" if self._logger.get("show_level") or "show-level" in self._options else ""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        to = self._stdout if self._log is None else self._log
        if to is not None:
            with suppress(OSError):
                os.write(to, f"{stamp}.{time.time_ns() % 10**9:09} [{self.id}:fc_api{shown}] {text}\n".encode())

    def _version(self) -> str:
        with suppress(FileNotFoundError):
            return (self._directory / "version").read_text().strip()
        return DEFAULT_VERSION

    def _note(self, request: Request, outcome: int | str, answer: Body | None = None) -> None:
        line = {
            "id": self.id, "call": request.number, "method": request.method, "path": request.path,
            "body": request.body.decode(errors="replace"), "outcome": outcome,
            "fault": (answer or {}).get("fault_message"),
        }  # fmt: skip
        with (self._directory / "calls.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _find_fault(self, request: Request) -> str | None:
        try:
            faults = json.loads((self._directory / "faults.json").read_bytes())
        except FileNotFoundError:
            return None
        seen = {"call": request.number, "method": request.method, "path": request.path, "id": self.id}
        for wanted in faults:
            # A process's start is a call of its own, and only meant where it is named.
            if (request.number or "call" in wanted) and all(
                seen[key] == value for key, value in wanted.items() if key != "do"
            ):
                assert wanted["do"] in FAULTS, wanted
                return str(wanted["do"])
        return None

    async def _misbehave(self, kind: str, stream: anyio.abc.SocketStream) -> None:
        """Returns where the request is to be refused."""
        match kind:
            case "hang":
                await anyio.sleep_forever()
            case "die":
                raise Gone(139)
            case "garbage":
                await stream.send(b"\xff\xfe\0 SSH-2.0-\r\n\r\n" * 64)
                await stream.aclose()
            case "half":
                await stream.send(b"HTTP/1.1 200 \r\nContent-Length: 100\r\n\r\n{")
                await anyio.sleep_forever()
            case "headers":
                await stream.send(b"HTTP/1.1 204 \r\n")
                while True:
                    await stream.send(b"X-More: " + b"a" * 1000 + b"\r\n")
            case "continues":
                while True:
                    await stream.send(b"HTTP/1.1 100 Continue\r\n\r\n" * 64)
            case "large":
                await stream.send(b"HTTP/1.1 200 \r\nContent-Length: 1000000000\r\n\r\n")
                while True:
                    await stream.send(b" " * 65536)

    @staticmethod
    def _close_part(part: Opened | None) -> None:
        if part is not None:
            part.close()

    async def _close(self) -> None:
        if self._guest is not None:
            await self._guest.end()
        parts = [self._boot, self._vsock, self._serial, *self._drives.values(), *self._interfaces.values()]
        for part in parts:
            self._close_part(part)
        for fd in (self._log, self._metrics, self._stdout, self._saved):
            if fd is not None:
                os.close(fd)


def _message(text: str) -> Body:
    return {"fault_message": text}


def _limits(drive: Body) -> dict[str, int]:
    """What the limiter's buckets let through in a second, as QEMU has it: 0, like a bucket of no size, is no limit."""
    found = {}
    for name, limit in (("bandwidth", "bps-total"), ("ops", "iops-total")):
        bucket = drive.get("rate_limiter", {}).get(name, {})
        found[limit] = math.ceil(bucket["size"] * 1000 / bucket["refill_time"]) if bucket.get("refill_time") else 0
    return found


async def _end_soon(code: int) -> None:
    """Once the answer is out."""
    await anyio.sleep(0.05)
    raise Gone(code)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [leaf for e in group.exceptions for leaf in (_leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]


async def _attend(directory: Path, connection: socket.socket) -> None:
    with connection:
        connection.setblocking(False)
        shim = Shim(connection)
        try:
            if options := await shim.greet():
                await Vmm(directory, shim, options).run()
        except Exception:
            # A mistake of this file's ends its own process alone, and is seen: see Standin.log.
            traceback.print_exc()


async def main(directory: Path) -> None:
    path = directory / "companion.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(path))
        listener.listen(64)
        print("ready", flush=True)
        async with anyio.create_task_group() as group:

            async def until_told() -> None:
                with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                    async for _ in signals:
                        group.cancel_scope.cancel()

            group.start_soon(until_told)
            while True:
                await anyio.wait_readable(listener)
                with suppress(BlockingIOError):
                    connection, _ = listener.accept()
                    group.start_soon(_attend, directory, connection)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
