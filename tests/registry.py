"""A registry for tests: Debian's docker-registry on loopback, and images made by hand, byte by byte."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import shutil
import socket
import ssl
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def why_not() -> str:
    lacking = [name for name in ("docker-registry", "skopeo", "umoci", "mkfs.erofs") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True)
class Entry:
    """One of a tar: a file by default."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    size: int | None = None


def directory(name: str, **more: Any) -> Entry:
    return Entry(name, kind=tarfile.DIRTYPE, **more)


def link(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, target=target)


def hard_link(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.LNKTYPE, target=target)


def tar(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.linkname, info.mode = entry.kind, entry.target, entry.mode
            info.uid, info.gid = entry.uid, entry.gid
            info.size = len(entry.data) if entry.size is None else entry.size
            archive.addfile(info, io.BytesIO(entry.data) if entry.data else None)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-qc"], input=data, stdout=subprocess.PIPE, check=True).stdout


def squeezed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


class Registry:
    """One that runs until `close`. `name` is its HOST:PORT; `chain`, a certificate for localhost with its key, makes it
    speak TLS."""

    def __init__(self, place: Path, chain: Path | None = None) -> None:
        self.place = place
        self.data = place / "data"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.name = f"127.0.0.1:{port}" if chain is None else f"localhost:{port}"
        self._tls = chain is not None
        http: dict[str, Any] = {"addr": f"127.0.0.1:{port}"}
        if chain is not None:
            http["tls"] = {"certificate": str(chain), "key": str(chain)}
        config = {
            "version": 0.1, "log": {"level": "error", "accesslog": {"disabled": True}}, "http": http,
            "storage": {"filesystem": {"rootdirectory": str(self.data)}},
        }  # fmt: skip
        # JSON is YAML too.
        (place / "config.yml").write_text(json.dumps(config))
        self.start()

    def start(self) -> None:
        with (self.place / "log").open("ab") as log:
            command = ["docker-registry", "serve", str(self.place / "config.yml")]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(OSError):
                if self._call("GET", "/v2/").status == 200:
                    return
            time.sleep(0.05)
        raise AssertionError((self.place / "log").read_text())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def push(
        self, repository: str, tag: str, *layers: bytes, env: Sequence[str] = (),
        squeeze: Callable[[bytes], bytes] = squeezed, config: dict[str, Any] | None = None, **changed: Any,
    ) -> str:  # fmt: skip
        """Layers are tars. Returns the manifest's digest; `changed` replaces parts of the manifest."""
        rows = []
        for layer in layers:
            blob = squeeze(layer)
            rows.append({"mediaType": f"{LAYER}+gzip", **self.put_blob(repository, blob)})
        told = {
            "architecture": "amd64", "os": "linux", "config": {"Env": list(env), "User": "nobody", "WorkingDir": "/x"},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}, **(config or {}),
        }  # fmt: skip
        named = {"mediaType": CONFIG, **self.put_blob(repository, encode(told))}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": named, "layers": rows, **changed}
        return self.put_manifest(repository, tag, manifest)

    def put_blob(self, repository: str, blob: bytes) -> dict[str, Any]:
        where = urlsplit(self._call("POST", f"/v2/{repository}/blobs/uploads/", expect=202).headers["Location"])
        target = f"{where.path}?{where.query}&digest={digest(blob)}"
        self._call("PUT", target, blob, "application/octet-stream", expect=201)
        return {"digest": digest(blob), "size": len(blob)}

    def put_manifest(self, repository: str, tag: str, manifest: dict[str, Any]) -> str:
        raw = encode(manifest)
        self._call("PUT", f"/v2/{repository}/manifests/{tag}", raw, manifest["mediaType"], expect=201)
        return digest(raw)

    def blob_file(self, name: str) -> Path:
        hexes = name.removeprefix("sha256:")
        return self.data / "docker/registry/v2/blobs/sha256" / hexes[:2] / hexes / "data"

    def _call(
        self, method: str, path: str, body: bytes = b"", kind: str = "", expect: int | None = None
    ) -> http.client.HTTPResponse:
        connection = (
            http.client.HTTPSConnection(self.name, timeout=60, context=ssl._create_unverified_context())
            if self._tls
            else http.client.HTTPConnection(self.name, timeout=60)
        )
        try:
            connection.request(method, path, body, {"Content-Type": kind} if kind else {})
            response = connection.getresponse()
            text = response.read()
            assert expect in (None, response.status), text
            return response
        finally:
            connection.close()
