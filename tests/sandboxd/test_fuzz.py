"""The API against its own document: schemathesis makes requests from it, right ones and wrong ones.

Every answer must be one the document tells of: its status, its media type, its shape, and never a fault of the
server. `SEED=n` repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, seed, settings
from requests.adapters import HTTPAdapter
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from sandboxd import openapi
from tests.conftest import counts
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig

SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
PATIENCE_S = 30
CHECKS = [
    status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance,
]  # fmt: skip
ENDS = ("delete", "delete_volume", "delete_image", "delete_snapshot", "cordon")
"""Asked of what is not there, or left out: the daemon is to be the same for every request."""

schema = schemathesis.openapi.from_dict(openapi.build()).exclude(operation_id="cordon")
# Its systematic part repeats what test_bad_input does with more.
schema.config.phases.coverage.enabled = False


class UnixAdapter(HTTPAdapter):
    """HTTP on the rig's socket, whatever the address says."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> HTTPConnectionPool:
        return self._pool()

    def _pool(self) -> HTTPConnectionPool:
        path = self._path

        class Connection(HTTPConnection):
            def connect(self) -> None:
                self.sock = socket.socket(socket.AF_UNIX)
                self.sock.settimeout(PATIENCE_S)
                self.sock.connect(path)

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        return Pool("localhost")


@pytest.fixture(scope="module")
def rig(short_tmp: Path) -> Iterator[Rig]:
    """A daemon of this module's own: what is sent to it renames and changes what is there."""
    if reason := why_not():
        pytest.skip(reason)
    directory = short_tmp / "fuzzed"
    directory.mkdir()
    with Rig(directory) as running:
        yield running


@pytest.fixture(scope="module")
def box(rig: Rig) -> str:
    return rig.create(name="box")


@pytest.fixture(scope="module")
def session(rig: Rig, box: str) -> Iterator[requests.Session]:
    print(f"\nSEED={SEED}")
    rig.start_process(box, "echo", "hello")
    with requests.Session() as made:
        made.trust_env = False
        made.mount("http://", UnixAdapter(str(rig.socket)))
        yield made


@schema.parametrize()
@seed(SEED)
@settings(
    max_examples=counts(6, 400), deadline=None, database=None, suppress_health_check=list(HealthCheck),
    print_blob=False,
)  # fmt: skip
def test_an_answer_is_one_the_document_tells_of(case: Any, session: requests.Session, rig: Rig, box: str) -> None:
    name = case.operation.definition.raw["operationId"]
    if "ref" in case.path_parameters and name not in ENDS:
        case.path_parameters["ref"] = box
        if "pid" in case.path_parameters:
            case.path_parameters["pid"] = 1
    answer = case.call(base_url="http://localhost", session=session, timeout=PATIENCE_S)
    case.validate_response(answer, checks=CHECKS)
    assert answer.status_code < 500 or answer.status_code in (501, 503), answer.content
    if answer.status_code >= 400 and case.method != "HEAD":
        error = json.loads(answer.content)["error"]
        assert error["code"] and error["message"] and error["code"] != "internal"
    if name == "create" and answer.status_code == 201:
        assert rig.call("DELETE", f"/v1/sandboxes/{answer.json()['id']}").status == 204
