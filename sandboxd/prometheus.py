"""What the daemon counts, for Prometheus: the series, and the small HTTP listener that serves them.

In: `GET /metrics` on a loopback address, without a credential. Out: sums over sandboxes; no label names a user, a
tenant or a sandbox. Any local user and any page in a local browser can reach the port, so the Host header is checked as
the API checks its own, a connection carries one request and has a few seconds, and there are few at a time.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable

import anyio
import anyio.abc
import h11
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sandboxd.address import TcpAddress
from sandboxd.errors import ForbiddenOrigin, SetupError
from sandboxd.guard import check_origin
from sandboxd.node import BUCKETS_S, Creates, Resources
from sandboxd.service import Service

PATH = "/metrics"
REQUEST_S = 5.0
REQUEST_BYTES = 8 << 10
MAX_CONNECTIONS = 8
BACKLOG = 16
RESOURCES = (("cpus", "processors"), ("memory_mb", "MiB of memory"), ("disk_mb", "MiB of disk"))

log = logging.getLogger("sandboxd")


class Exposition(Collector):
    """Read anew from the service at each scrape; in a registry of its own, so there is no state of the process's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        service = self._service
        states = GaugeMetricFamily("sandboxd_sandboxes", "Sandboxes by state.", labels=["state"])
        for state, count in service.counts().items():
            states.add_metric([state.value], count)
        yield states
        yield GaugeMetricFamily(
            "sandboxd_processes_running", "Running processes in all sandboxes.", service.processes_running()
        )
        yield from self._pools()
        node = service.node
        yield from _resources("sandboxd_capacity", "What the node has", node.capacity)
        yield from _resources("sandboxd_free", "What is left beside all sandboxes", service.free())
        yield GaugeMetricFamily(
            "sandboxd_cordoned", "1 while the node takes no new sandboxes.", 1 if node.cordoned else 0
        )
        yield from _creates(node.creates)

    def _pools(self) -> Iterable[Metric]:
        pools = self._service.pools.all
        for name, what, values in (
            ("target", "Machines that are to wait.", [pool.size for pool in pools]),
            ("ready", "Machines that wait for a create.", [len(pool.ready) for pool in pools]),
            ("booting", "Machines that boot for a pool.", [pool.booting for pool in pools]),
        ):
            family = GaugeMetricFamily(f"sandboxd_pool_{name}", what, labels=["image"])
            for pool, value in zip(pools, values, strict=True):
                family.add_metric([pool.shape.image], value)
            yield family


def _resources(prefix: str, what: str, of: Resources) -> Iterable[Metric]:
    for name, unit in RESOURCES:
        yield GaugeMetricFamily(f"{prefix}_{name}", f"{what}: {unit}.", getattr(of, name))


def _creates(creates: Creates) -> Iterable[Metric]:
    ended = CounterMetricFamily(
        "sandboxd_creates", "Creates by how they ended: ok, an error's code, or abandoned.", labels=["status"]
    )
    for status, count in sorted(creates.ended.items()):
        ended.add_metric([status], count)
    yield ended
    took = HistogramMetricFamily("sandboxd_create_seconds", "Time from request to running, of creates that succeeded.")
    total = 0
    buckets = []
    for most, count in zip((*map(str, BUCKETS_S), "+Inf"), creates.buckets, strict=True):
        total += count
        buckets.append((most, total))
    took.add_metric([], buckets, creates.sum_s)
    yield took


def listen(address: TcpAddress) -> socket.socket:
    """Bound and listening. `SetupError` where that cannot be; that it is loopback the flags have checked."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
    except OSError as fault:
        listener.close()
        raise SetupError(f"--metrics-listen {address} cannot be listened on: {fault.strerror}") from None
    return listener


async def serve(listener: socket.socket, exposition: Exposition) -> None:
    """Until cancelled. One connection more than MAX_CONNECTIONS takes the place of the oldest: who only holds
    connections, and any local user can, keeps nobody out."""
    room: list[anyio.CancelScope] = []

    async def one(stream: anyio.abc.SocketStream, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                async with stream:
                    await _answer(stream, exposition)
        except (anyio.BrokenResourceError, anyio.EndOfStream, h11.ProtocolError):
            pass
        except Exception:
            log.exception("metrics could not be served")
        finally:
            if scope in room:
                room.remove(scope)

    async with await anyio.abc.SocketListener.from_socket(listener) as accepting, anyio.create_task_group() as tasks:
        while True:
            try:
                stream = await accepting.accept()
            except OSError as fault:
                log.error("a connection for metrics could not be accepted: %s", fault.strerror)
                await anyio.sleep(0.1)
                continue
            if len(room) >= MAX_CONNECTIONS:
                room.pop(0).cancel()
            room.append(anyio.CancelScope(deadline=anyio.current_time() + REQUEST_S))
            tasks.start_soon(one, stream, room[-1])


async def _answer(stream: anyio.abc.SocketStream, exposition: Exposition) -> None:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES)
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await stream.receive(REQUEST_BYTES))
    if not isinstance(event, h11.Request):
        return
    status, body = _reply(event, exposition)
    headers = [
        ("content-type", CONTENT_TYPE_LATEST if status == 200 else "text/plain; charset=utf-8"),
        ("content-length", str(len(body))), ("connection", "close"), ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"), *([("allow", "GET")] if status == 405 else []),
    ]  # fmt: skip
    head = http.send(h11.Response(status_code=status, headers=headers)) or b""
    await stream.send(head + (http.send(h11.Data(data=body)) or b""))


def _reply(request: h11.Request, exposition: Exposition) -> tuple[int, bytes]:
    target = request.target.decode("latin-1")
    try:
        check_origin(target, list(request.headers), frozenset())
    except ForbiddenOrigin as no:
        return 403, no.message.encode() + b"\n"
    if target.partition("?")[0] != PATH:
        return 404, b"only /metrics is here\n"
    if request.method != b"GET":
        return 405, b"only GET\n"
    return 200, exposition.text()
