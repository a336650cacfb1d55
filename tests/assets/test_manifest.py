"""What registries say, true and untrue."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandboxd.assets.manifest import Blob, Manifest, Unusable, check, digest_of, read, read_config
from tests.registry import CONFIG, INDEX, LAYER, MANIFEST

ONE, TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64
CONFIG_ROW = {"mediaType": CONFIG, "digest": ONE, "size": 10}
LAYER_ROW = {"mediaType": LAYER, "digest": TWO, "size": 20}


def manifest(**changed: Any) -> bytes:
    told = {"schemaVersion": 2, "mediaType": MANIFEST, "config": CONFIG_ROW, "layers": [LAYER_ROW]}
    return json.dumps({**told, **changed}).encode()


def index(*rows: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}).encode()


def platform(architecture: str, digest: str = ONE, system: str = "linux") -> dict[str, Any]:
    return {"digest": digest, "size": 1, "platform": {"os": system, "architecture": architecture}}


def config(**changed: Any) -> bytes:
    told = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [ONE]}, "config": {}}
    return json.dumps({**told, **changed}).encode()


def test_a_manifest() -> None:
    raw = manifest()
    assert read(raw, "amd64") == Manifest(digest_of(raw), Blob(ONE, 10), (Blob(TWO, 20),))


def test_a_manifest_without_a_media_type() -> None:
    raw = json.dumps({"schemaVersion": 2, "config": CONFIG_ROW, "layers": [LAYER_ROW]}).encode()
    assert isinstance(read(raw, "amd64"), Manifest)


def test_an_index_leads_to_this_machines() -> None:
    raw = index(platform("arm64"), platform("amd64", system="windows"), platform("amd64", TWO))
    assert read(raw, "amd64") == TWO


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep nesting"),
        pytest.param(b"[]", "malformed", id="a list"),
        pytest.param(b'{"schemaVersion": 1, "fsLayers": []}', "not supported", id="schema 1"),
        pytest.param(manifest(mediaType="text/html"), "not supported", id="another kind"),
        pytest.param(index(platform("arm64")), "linux/amd64, only for: arm64", id="another architecture"),
        pytest.param(index(platform("\x1b[2J")), "only for: none", id="an architecture to spoil a terminal"),
        pytest.param(index(platform("amd64", "sha256:../../etc")), "no SHA-256", id="a digest like a path"),
        pytest.param(index("x"), "malformed", id="an entry that is none"),
        pytest.param(manifest(layers=[]), "0 layers", id="no layer"),
        pytest.param(manifest(layers=[LAYER_ROW] * 128), "128 layers", id="many layers"),
        pytest.param(manifest(layers={}), "malformed", id="layers that are no list"),
        pytest.param(manifest(layers=[{**LAYER_ROW, "size": -1}]), "no size", id="a negative size"),
        pytest.param(manifest(layers=[{**LAYER_ROW, "size": True}]), "no size", id="a size that is no number"),
        pytest.param(manifest(layers=[{**LAYER_ROW, "size": 1 << 60}]), "no size", id="an exabyte"),
        pytest.param(manifest(layers=[{**LAYER_ROW, "urls": ["http://x"]}]), "outside", id="a layer elsewhere"),
        pytest.param(manifest(config={**CONFIG_ROW, "mediaType": "application/x"}), "another kind", id="an artefact"),
    ],
)
def test_what_is_no_image_for_us(raw: bytes, says: str) -> None:
    with pytest.raises(Unusable, match=says):
        read(raw, "amd64")


def test_another_manifest_than_the_digest_names() -> None:
    check(b"x", digest_of(b"x"))
    with pytest.raises(Unusable, match="is not what sha256:1111"):
        check(b"x", ONE)


def test_the_environment_without_what_is_ours() -> None:
    rows = ["A=b=c", "HOME=/x", "USER=x", "LD_PRELOAD=/x", "=x", "B", "C-D=1", "E=\0", 7, "F="]
    found = read_config(config(config={"Env": rows}), read_one(), "amd64", {"LD_PRELOAD"})
    assert found.env == {"A": "b=c", "F": ""}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(config(architecture="arm64"), "for linux/arm64", id="another architecture"),
        pytest.param(config(architecture="\x1b[2J"), r"for linux/\?", id="an architecture to spoil a terminal"),
        pytest.param(config(os="windows"), "for windows/amd64", id="another system"),
        pytest.param(config(rootfs={"diff_ids": []}), "does not name its layers", id="fewer layers"),
        pytest.param(config(rootfs={"diff_ids": ["x"]}), "does not name its layers", id="a digest that is none"),
        pytest.param(config(rootfs=None), "malformed", id="no layers"),
        pytest.param(config(config={"Env": {"A": "b"}}), "malformed", id="an environment that is no list"),
        pytest.param(config(config={"Env": [f"A{n}=" for n in range(600)]}), "too large", id="many names"),
        pytest.param(config(config={"Env": ["A=" + "x" * 200_000]}), "too large", id="a long value"),
    ],
)
def test_configurations_that_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(Unusable, match=says):
        read_config(raw, read_one(), "amd64", ())


def read_one() -> Manifest:
    found = read(manifest(), "amd64")
    assert isinstance(found, Manifest)
    return found
