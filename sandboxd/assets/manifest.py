"""What a registry says an image is made of, read as text that may say anything. Pure: bytes in, frozen values out.

Manifests are those of the OCI image specification and Docker's schema 2, which are alike where it matters here.
`Unusable` says in a person's words what is wrong with one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sandboxd.assets.reference import DIGEST
from sandboxd.errors import SandboxError

MAX_LAYERS = 127
MAX_ENV = 512
MAX_ENV_BYTES = 128 << 10
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""uname(2)'s machine to the specification's."""
INDEXES = (
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
)  # fmt: skip
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
)  # fmt: skip
CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")


class Unusable(SandboxError):
    """An image that cannot be used, or had; the text follows the image's name."""


@dataclass(frozen=True, slots=True)
class Blob:
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    digest: str
    config: Blob
    layers: tuple[Blob, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Config:
    """`diff_ids` are the digests of what the layers decompress to."""

    env: dict[str, str]
    diff_ids: tuple[str, ...]


def digest_of(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def check(raw: bytes, digest: str) -> None:
    if digest_of(raw) != digest:
        raise Unusable(f"what the registry sent is not what {digest} names")


def read(raw: bytes, architecture: str) -> Manifest | str:
    """The manifest, or the digest of the one that an index has for this architecture."""
    told = _object(_json(raw), "the manifest")
    kind = told.get("mediaType") or (INDEXES[0] if "manifests" in told else MANIFESTS[0])
    if told.get("schemaVersion") != 2 or kind not in (*INDEXES, *MANIFESTS):
        raise Unusable("its manifest is of a kind that is not supported: OCI or Docker schema 2 is")
    return _choose(told, architecture) if kind in INDEXES else _manifest(told, digest_of(raw))


def _choose(index: dict[str, Any], architecture: str) -> str:
    found: list[str] = []
    for position, entry in enumerate(_list(index.get("manifests"), "manifests")):
        row = _object(entry, f"manifests[{position}]")
        platform = _object(row.get("platform") or {}, f"manifests[{position}].platform")
        if platform.get("os") == "linux" and isinstance(platform.get("architecture"), str):
            found.append(platform["architecture"])
            if found[-1] == architecture:
                return _blob(row, f"manifests[{position}]").digest
    there = ", ".join(sorted({name for name in found if name.isalnum()}))[:100] or "none"
    raise Unusable(f"it is not there for linux/{architecture}, only for: {there}")


def _manifest(told: dict[str, Any], digest: str) -> Manifest:
    config = _object(told.get("config"), "config")
    if config.get("mediaType") not in CONFIGS:
        raise Unusable("it is an artefact of another kind and no image of a file system")
    rows = _list(told.get("layers"), "layers")
    if not 0 < len(rows) <= MAX_LAYERS:
        raise Unusable(f"it has {len(rows)} layers; from 1 to {MAX_LAYERS} are supported")
    layers = []
    for position, entry in enumerate(rows):
        row = _object(entry, f"layers[{position}]")
        kind = row.get("mediaType")
        if row.get("urls") or not isinstance(kind, str) or "foreign" in kind or "nondistributable" in kind:
            raise Unusable("one of its layers is kept outside the registry, which is not supported")
        if "encrypted" in kind:
            raise Unusable("one of its layers is encrypted, which is not supported")
        layers.append(_blob(row, f"layers[{position}]"))
    return Manifest(digest, _blob(config, "config"), tuple(layers))


def read_config(raw: bytes, manifest: Manifest, architecture: str, reserved: Collection[str]) -> Config:
    """`reserved` are names of the environment that nobody gives a sandbox."""
    told = _object(_json(raw), "the configuration")
    here = (told.get("os"), told.get("architecture"))
    if here != ("linux", architecture):
        named = "/".join(part if isinstance(part, str) and part.isalnum() else "?" for part in here)[:60]
        raise Unusable(f"it is for {named}, and this server is linux/{architecture}")
    rootfs = _object(told.get("rootfs"), "rootfs")
    diff_ids = _list(rootfs.get("diff_ids"), "rootfs.diff_ids")
    if len(diff_ids) != len(manifest.layers) or not all(isinstance(one, str) and DIGEST.match(one) for one in diff_ids):
        raise Unusable("its configuration does not name its layers")
    process = _object(told.get("config") or {}, "config")
    return Config(_environment(_list(process.get("Env") or [], "config.Env"), reserved), tuple(diff_ids))


def _environment(rows: list[Any], reserved: Collection[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for row in rows:
        name, equals, value = row.partition("=") if isinstance(row, str) else ("", "", "")
        named = name.isascii() and name.isidentifier()
        if equals and named and name not in reserved and name not in ("HOME", "USER") and "\0" not in value:
            env[name] = value
    if len(env) > MAX_ENV or sum(len(name) + len(value) for name, value in env.items()) > MAX_ENV_BYTES:
        raise Unusable("it sets too large an environment")
    return env


def _blob(row: dict[str, Any], where: str) -> Blob:
    digest, size = row.get("digest"), row.get("size")
    if not isinstance(digest, str) or not DIGEST.match(digest):
        raise Unusable(f"its manifest names no SHA-256 digest at {where}")
    if type(size) is not int or not 0 <= size < 1 << 48:
        raise Unusable(f"its manifest tells no size at {where}")
    return Blob(digest, size)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise Unusable("what the registry sent is not JSON") from None


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unusable(f"what the registry sent is malformed at {what}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unusable(f"what the registry sent is malformed at {what}")
    return value
