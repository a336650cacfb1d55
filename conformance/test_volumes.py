"""Volumes: disks with a name, for one who writes or many who read."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Offer, Sandbox

SIZE_MB = 64
PLACE = "/data"


@pytest.fixture
def volumes(estate: Estate, box: Sandbox) -> Estate:
    """Skips where there are none."""
    estate.needs(
        "volumes", ("POST", "/v1/volumes", {"name": estate.name("none")}), ("GET", "/v1/volumes", None),
        ("DELETE", f"/v1/volumes/{estate.name('none')}", None),
        ("POST", "/v1/sandboxes", {"volumes": [{"name": estate.name("none"), "path": PLACE}]}),
    )  # fmt: skip
    return estate


def make(estate: Estate, suffix: str) -> str:
    name = estate.name(suffix)
    body = shape.ok(estate.endpoint.call("POST", "/v1/volumes", {"name": name, "size_mb": SIZE_MB}), 201)
    shape.fields(body, {"name": str, "size_mb": int, "created_at": str})
    assert (body["name"], body["size_mb"]) == (name, SIZE_MB) and "attached_to" not in body
    return name


def mount(name: str, *, read_only: bool, path: str = PLACE) -> dict[str, Any]:
    return {"name": name, "path": path, "read_only": read_only}


def using(estate: Estate, name: str, *, read_only: bool) -> Sandbox:
    return estate.create(network={"mode": "none"}, volumes=[mount(name, read_only=read_only)])


def test_a_volume_outlives_its_writer_and_is_read_only_to_a_reader(
    volumes: Estate, endpoint: Endpoint, offer: Offer
) -> None:
    """C45"""
    name = make(volumes, "kept")
    shape.refused(endpoint.call("POST", "/v1/volumes", {"name": name, "size_mb": SIZE_MB}), 409)
    writer = using(volumes, name, read_only=False)
    assert writer.body["volumes"] == [mount(name, read_only=False)]
    shape.done(writer.write(f"{PLACE}/file", b"kept in the volume\n"))
    volumes.refuse(409, volumes=[mount(name, read_only=False)])
    shape.refused(endpoint.call("DELETE", f"/v1/volumes/{name}"), 409)
    (listed,) = [one for one in shape.ok(endpoint.call("GET", "/v1/volumes"))["volumes"] if one["name"] == name]
    assert listed["attached_to"] == writer.id
    if offer.has("memory_snapshot") or offer.has("disk_snapshot"):
        shape.refused(writer.call("POST", "/snapshots"), 409)
    writer.delete()
    reader = using(volumes, name, read_only=True)
    assert reader.run("cat", f"{PLACE}/file").stdout == b"kept in the volume\n"
    shape.refused(reader.write(f"{PLACE}/file", b"changed"), 409)
    shape.refused(reader.remove(f"{PLACE}/file"), 409)
    assert reader.read(f"{PLACE}/file").body == b"kept in the volume\n"
    reader.delete()
    shape.done(endpoint.call("DELETE", f"/v1/volumes/{name}"))
    shape.refused(endpoint.call("DELETE", f"/v1/volumes/{name}"), 404)


def test_a_volume_is_not_mounted_just_anywhere(volumes: Estate, endpoint: Endpoint) -> None:
    """C46"""
    name, other = make(volumes, "place"), make(volumes, "other")
    for path in (
        "/usr/local", "/tmp/cache", "/proc/x", "/etc", "/tmp", "/sys", "/dev/shm", "/run/x", "/bin", "/sbin", "/boot",
        "/lib", "/lib64/x", "/workspace", "relative", "/data/../etc", "/", "", "/with blank", "/da\0ta",
    ):  # fmt: skip
        volumes.refuse(400, volumes=[mount(name, read_only=False, path=path)])
    nested = [mount(name, read_only=False), mount(other, read_only=False, path=f"{PLACE}/below")]
    volumes.refuse(400, volumes=nested)
    volumes.refuse(400, volumes=list(reversed(nested)))
    volumes.refuse(400, volumes=[mount(name, read_only=False), mount(name, read_only=False, path="/elsewhere")])
    volumes.refuse(400, volumes=[mount("Bad Name", read_only=False)])
    volumes.refuse(404, volumes=[mount(volumes.name("unknown"), read_only=False)])
    for size in (-1, volumes.offer.limits["max_disk_mb"] + 1):
        asked = {"name": volumes.name("size"), "size_mb": size}
        shape.refused(endpoint.call("POST", "/v1/volumes", asked), 400)
    shape.refused(endpoint.call("POST", "/v1/volumes", {"name": "Bad Name"}), 400)
    shape.refused(endpoint.call("DELETE", "/v1/volumes/Bad%20Name"), 404)
    for one in (name, other):
        shape.done(endpoint.call("DELETE", f"/v1/volumes/{one}"))


def test_a_volume_has_one_writer_or_any_number_of_readers(volumes: Estate, endpoint: Endpoint) -> None:
    """C47"""
    name = make(volumes, "many")
    writer = using(volumes, name, read_only=False)
    volumes.refuse(409, volumes=[mount(name, read_only=True)])
    writer.delete()
    readers = [using(volumes, name, read_only=True) for _ in range(2)]
    volumes.refuse(409, volumes=[mount(name, read_only=False)])
    for reader in readers:
        shape.refused(endpoint.call("DELETE", f"/v1/volumes/{name}"), 409)
        reader.delete()
    shape.done(endpoint.call("DELETE", f"/v1/volumes/{name}"))
