"""The API's document says what the API does, and docs/api.md says what the document does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandboxd import errors, lifecycle, openapi, reference, wire
from sandboxd.routes.table import ROUTES, SWITCH
from tests.sandboxd.rig import Rig

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- From here on written by `GOLDEN=write pytest tests/sandboxd/test_openapi.py`. -->\n"
HOW = "run GOLDEN=write pytest tests/sandboxd/test_openapi.py and look at the difference"


def test_the_page_is_what_the_document_says() -> None:
    path = ROOT / "docs" / "api.md"
    written, _, _ = path.read_text().partition(MARK)
    page = f"{written}{MARK}\n{reference.page()}"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(page)
    assert path.read_text() == page, HOW


def test_the_document_is_the_same_bytes_each_time() -> None:
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "sandboxd.openapi"]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        said = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
        assert said.stdout == openapi.document()


def test_every_route_is_in_it_with_its_parameters() -> None:
    built = openapi.build()
    assert sum(map(len, built["paths"].values())) == len(ROUTES)
    for route in ROUTES:
        said = built["paths"][route.path][route.method.lower()]
        names = {one["name"] for one in said["parameters"]}
        assert names == set(re.findall(r"\{(\w+)\}", route.path)) | {one.name for one in route.query}
        assert str(route.status) in said["responses"]
        assert ("requestBody" in said) == (route.request is not None or route.body.name != "JSON")
        assert (route.status == SWITCH) == bool(route.protocol)


def test_every_field_of_the_wire_has_a_meaning() -> None:
    for name, said in openapi.schemas().items():
        for field, schema in said["properties"].items():
            assert schema.get("description"), f"{name}.{field}"


def test_what_the_document_repeats_is_what_the_daemon_means() -> None:
    assert tuple(state.value for state in lifecycle.State) == wire.STATES
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ApiError)]
    for kind in kinds:
        assert 400 <= kind.status < 600 and errors.BY_CODE[kind.code].code == kind.code


@pytest.mark.parametrize("name", reference.EXAMPLES)
def test_an_example_is_what_the_wire_takes_and_gives(name: str) -> None:
    (route,) = [route for route in ROUTES if route.name == name]
    sent, came = reference.EXAMPLES[name]
    if sent is not None:
        assert route.request is not None
        wire.decode(json.dumps(sent).encode(), route.request)
    if came is not None:
        assert route.answer is not None
        value: Any = msgspec.convert(came, route.answer)
        assert json.loads(wire.encode(value)) == came


def test_it_is_served_with_a_tag(rig: Rig) -> None:
    answer = rig.call("GET", "/v1/openapi.json")
    assert answer.status == 200 and answer.body == openapi.document()
    again = rig.call("GET", "/v1/openapi.json", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
