"""The machine itself, and what its sandboxes use of it."""

from __future__ import annotations

from sandboxd import node as nodes
from sandboxd import wire
from sandboxd.errors import InvalidRequest
from sandboxd.lifecycle import State
from sandboxd.routes.reply import Handler, Reply, Request, ok, read_json, timestamp
from sandboxd.routes.sandboxes import capabilities
from sandboxd.service import Service
from sandboxd.usage import INTERVAL_S, Sample


async def _metrics(service: Service, request: Request) -> Reply:
    record, samples = service.usage(request.path["ref"])
    limit = record.memory_mb << 20
    return ok(wire.Metrics(interval_secs=INTERVAL_S, samples=[_sample(one, limit) for one in samples]))


async def _node(service: Service, _: Request) -> Reply:
    return ok(_status(service))


async def _cordon(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.CordonRequest)
    if asked.cordoned is None:
        raise InvalidRequest("cordoned must be true or false")
    service.cordon(asked.cordoned)
    return ok(_status(service))


def _status(service: Service) -> wire.Node:
    node = service.node
    pooled = {pool.shape.image: len(pool.ready) for pool in service.pools.all}
    images = tuple(one.image for one in service.images() if one.state == "installed")
    return wire.Node(
        node=node.id, version=node.version, capabilities=capabilities(service), capacity=_resources(node.capacity),
        free=_resources(service.free()), running=service.counts()[State.RUNNING], pooled=pooled,
        images=images, labels=node.labels, cordoned=node.cordoned,
    )  # fmt: skip


def _resources(of: nodes.Resources) -> wire.Resources:
    return wire.Resources(cpus=of.cpus, memory_mb=of.memory_mb, disk_mb=of.disk_mb)


def _sample(one: Sample, limit_bytes: int) -> wire.Sample:
    return wire.Sample(
        time=timestamp(one.at), cpu_percent=round(one.cpu_percent, 2), memory_bytes=one.memory_bytes,
        memory_limit_bytes=limit_bytes, net_rx_bytes=one.net_rx_bytes, net_tx_bytes=one.net_tx_bytes,
        disk_read_bytes=one.disk_read_bytes, disk_write_bytes=one.disk_write_bytes, processes=one.processes,
    )  # fmt: skip


HANDLERS: dict[str, Handler] = {
    "metrics": _metrics,
    "node": _node,
    "cordon": _cordon,
}
