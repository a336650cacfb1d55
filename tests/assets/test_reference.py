from __future__ import annotations

import pytest

from sandboxd.assets.reference import Reference, parse
from sandboxd.errors import InvalidRequest

SHA = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("r.test/a", "r.test/a:latest", id="no tag is latest"),
        pytest.param("r.test:5000/a/b_c/d-e:v1.2", "r.test:5000/a/b_c/d-e:v1.2", id="a port, a path, a tag"),
        pytest.param("localhost/a:1", "localhost/a:1", id="localhost is a registry"),
        pytest.param(f"r.test/a@{SHA}", f"r.test/a@{SHA}", id="a digest"),
        pytest.param(f"r.test/a:1@{SHA}", f"r.test/a@{SHA}", id="a digest decides, not the tag"),
    ],
)
def test_what_is_asked_for(text: str, wanted: str) -> None:
    assert parse(text).wanted == wanted


def test_a_part_by_its_digest() -> None:
    assert parse("r.test/a:1").by_digest(SHA) == f"r.test/a@{SHA}"
    assert parse("r.test/a:1") == Reference("r.test", "a", "1", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("debian", "name the registry", id="one word"),
        pytest.param("debian:12", "name the registry", id="one word and a tag"),
        pytest.param("library/debian", "name the registry", id="two words"),
        pytest.param("r.test/A", "lower-case", id="capitals"),
        pytest.param("r.test/", "lower-case", id="no repository"),
        pytest.param("r.test//a", "lower-case", id="an empty part"),
        pytest.param("r.test/../a", "lower-case", id="two dots"),
        pytest.param("r.test/a:", "a tag", id="an empty tag"),
        pytest.param("r.test/a:-x", "a tag", id="a tag like a flag"),
        pytest.param("r.test/a:b:c", "a tag", id="two tags"),
        pytest.param("r.test/a@sha256:00", "a digest", id="a short digest"),
        pytest.param(f"r.test/a@{SHA.upper()}", "a digest", id="a digest in capitals"),
        pytest.param(f"r.test/a@{SHA}@{SHA}", "a digest", id="two digests"),
        pytest.param("r.test:x/a", "HOST", id="a port that is no number"),
        pytest.param("user:secret@r.test/a", "a digest", id="credentials"),
        pytest.param("-r.test/a", "HOST", id="a host like a flag"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(text)
