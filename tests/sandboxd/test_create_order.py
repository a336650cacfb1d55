"""A create that is wrong in two ways is refused for the one that the API's specification looks at first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sandboxd.rig import Rig

S = "/v1/sandboxes"
STEPS: tuple[tuple[dict[str, Any], int, str, str], ...] = (
    ({"nonsense": 1}, 400, "invalid_request", "nonsense"),
    ({"snapshot_id": "snp_0000000000000000"}, 501, "unsupported", "snapshots"),
    ({"name": "Upper"}, 400, "invalid_request", "name"),
    ({"labels": {"Upper": "x"}}, 400, "invalid_request", "label"),
    ({"image": "-x"}, 400, "invalid_request", "image"),
    ({"cpus": -1}, 400, "invalid_request", "cpus"),
    ({"memory_mb": -1}, 400, "invalid_request", "memory_mb"),
    ({"disk_mb": -1}, 400, "invalid_request", "disk_mb"),
    ({"idle_timeout_secs": -1}, 400, "invalid_request", "idle_timeout_secs"),
    ({"lifetime_secs": -1}, 400, "invalid_request", "lifetime_secs"),
    ({"env": {"LD_PRELOAD": "x"}}, 403, "refused", "LD_PRELOAD"),
    ({"network": {"mode": "open"}}, 403, "refused", "ceiling"),
    ({"bind": {"host_path": "/"}}, 403, "refused", "bind"),
    ({"snapshot_every_secs": 1}, 501, "unsupported", "snapshots"),
    ({"volumes": [{"name": "absent", "path": "/etc"}]}, 400, "invalid_request", "volumes"),
)
"""Of what a body says by itself: what is wrong, and how it is refused."""


@pytest.mark.parametrize("first", range(len(STEPS)), ids=[next(iter(step[0])) for step in STEPS])
def test_what_comes_first_is_told(rig: Rig, first: int) -> None:
    fields, status, code, said = STEPS[first]
    for later in ({}, *(step[0] for step in STEPS[first + 1:])):
        answer = rig.call("POST", S, fields | later)
        assert (answer.status, answer.code) == (status, code), later
        assert said in answer.message, (later, answer.message)


def test_what_the_server_has_comes_after_what_the_body_says(own: Rig) -> None:
    """A volume that is absent before the node's state, that before the name's, that before the volumes' use."""
    own.create(name="first")
    for name in ("busy", "free"):
        assert own.call("POST", "/v1/volumes", {"name": name, "size_mb": 16}).status == 201
    own.create(name="writer", volumes=[{"name": "busy", "path": "/data"}])

    def wanted(name: str, volume: str) -> dict[str, Any]:
        return {"name": name, "volumes": [{"name": volume, "path": "/data"}]}

    told = [
        (wanted("first", "absent"), True, 404, "no such volume"),
        (wanted("first", "busy"), True, 503, "cordoned"),
        (wanted("first", "absent"), False, 404, "no such volume"),
        (wanted("first", "busy"), False, 409, "a sandbox named first exists"),
        (wanted("other", "busy"), False, 409, "is attached to"),
    ]
    for body, cordoned, status, said in told:
        assert own.call("POST", "/v1/node/cordon", {"cordoned": cordoned}).status == 200
        answer = own.call("POST", S, body)
        assert (answer.status, said in answer.message) == (status, True), (body, answer.body)
    assert own.call("POST", S, wanted("other", "free")).status == 201
