"""Images an endpoint keeps."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from conformance import shape
from conformance.endpoint import Answer, Endpoint
from conformance.estate import Estate, Sandbox

INSTALL_S = 600.0
UNKNOWN = "registry.invalid/nobody/nothing:never"


def test_images_are_listed_kept_while_used_and_installed_again(
    box: Sandbox, estate: Estate, endpoint: Endpoint
) -> None:
    """C29"""
    default = box.body["image"]
    estate.needs(
        "images", ("GET", "/v1/images", None), ("POST", "/v1/images", {"image": default}),
        ("DELETE", f"/v1/images?image={quote(default, safe='')}", None),
    )  # fmt: skip
    ours = _listed(endpoint, default)
    assert ours["state"] == "installed" and ours["in_use"] is True and ours["default"] is True
    shape.refused(_remove(endpoint, default), 409)
    again = endpoint.call("POST", "/v1/images", {"image": default})
    assert shape.ok(again, 202)["state"] in ("installed", "installing")
    deadline = time.monotonic() + INSTALL_S
    while _listed(endpoint, default)["state"] != "installed":
        assert time.monotonic() < deadline, "the image is not installed"
        time.sleep(0.5)
    for bad in ("-lead", "", "has blank", "a" * 256, "../up"):
        shape.refused(endpoint.call("POST", "/v1/images", {"image": bad}), 400)
    shape.refused(_remove(endpoint, UNKNOWN), 404)


def _remove(endpoint: Endpoint, image: str) -> Answer:
    return endpoint.call("DELETE", f"/v1/images?image={quote(image, safe='')}")


def _listed(endpoint: Endpoint, image: str) -> dict[str, Any]:
    images = shape.ok(endpoint.call("GET", "/v1/images"))["images"]
    for body in images:
        shape.fields(
            body, {"image": str, "state": str, "in_use": bool},
            {"digest": str, "bytes": int, "installed_at": str, "default": bool, "pooled": bool, "error": str},
        )  # fmt: skip
    assert [body["image"] for body in images] == sorted(body["image"] for body in images)
    (found,) = [body for body in images if body["image"] == image]
    assert isinstance(found, dict)
    return found
