"""Tiny package registries as plain files: one wheel, one npm package, one Debian package, and one git repository."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path


def wheel(top: Path, files_url: str) -> None:
    """A simple index (PEP 503) in `top/simple/` whose one file lies under another host: `top/files/`."""
    name = "worldparcel-1.0-py3-none-any.whl"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        info = "worldparcel-1.0.dist-info"
        archive.writestr("worldparcel.py", "WORD = 'from the index'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: worldparcel\nVersion: 1.0\n")
        kind = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{info}/RECORD", "")
    (top / "files").mkdir(parents=True)
    (top / "files" / name).write_bytes(data.getvalue())
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    project = top / "index" / "simple" / "worldparcel"
    project.mkdir(parents=True)
    (project / "index.html").write_text(f'<!doctype html><a href="{files_url}/{name}#sha256={digest}">{name}</a>\n')


def npm(top: Path, url: str) -> None:
    """A registry with one package."""
    name = "worldparcel-1.0.0.tgz"
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for path, text in (
            ("package/package.json", json.dumps({"name": "worldparcel", "version": "1.0.0", "main": "index.js"})),
            ("package/index.js", "module.exports = 'from the registry'\n"),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    tarball = data.getvalue()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    version = {
        "name": "worldparcel", "version": "1.0.0", "main": "index.js",
        "dist": {"tarball": f"{url}/-/{name}", "integrity": integrity, "shasum": hashlib.sha1(tarball).hexdigest()},
    }
    (top / "-").mkdir(parents=True)
    (top / "-" / name).write_bytes(tarball)
    packument = {"name": "worldparcel", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (top / "worldparcel").write_text(json.dumps(packument))


def apt(top: Path) -> None:
    """A flat repository with one package, unsigned: `deb [trusted=yes] URL ./`."""
    build = top / "build" / "worldparcel"
    (build / "DEBIAN").mkdir(parents=True)
    (build / "usr" / "share" / "worldparcel").mkdir(parents=True)
    (build / "usr" / "share" / "worldparcel" / "word").write_text("from the archive\n")
    (build / "DEBIAN" / "control").write_text(
        "Package: worldparcel\nVersion: 1.0\nArchitecture: all\nMaintainer: alice <alice@localhost>\n"
        "Description: a parcel\n"
    )
    name = "worldparcel_1.0_all.deb"
    command = ["dpkg-deb", "-b", "--root-owner-group", str(build), str(top / name)]
    subprocess.run(command, check=True, capture_output=True)
    data = (top / name).read_bytes()
    control = (build / "DEBIAN" / "control").read_text()
    entry = f"Filename: ./{name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    packages = (control + entry).encode()
    (top / "Packages").write_bytes(packages)
    (top / "Packages.gz").write_bytes(gzip.compress(packages))
    digest = hashlib.sha256(packages).hexdigest()
    zipped = (top / "Packages.gz").read_bytes()
    (top / "Release").write_text(
        "Suite: world\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n"
        f" {digest} {len(packages)} Packages\n {hashlib.sha256(zipped).hexdigest()} {len(zipped)} Packages.gz\n"
    )


def repository(top: Path) -> None:
    """A bare repository `top/world.git` with one commit."""
    work = top / "work"
    work.mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_NAME": "alice", "GIT_AUTHOR_EMAIL": "alice@localhost",
        "GIT_COMMITTER_NAME": "alice", "GIT_COMMITTER_EMAIL": "alice@localhost",
    }  # fmt: skip

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=work, env=environment, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (work / "word.txt").write_text("from the repository\n")
    git("add", ".")
    git("commit", "-q", "-m", "One")
    git("clone", "-q", "--bare", ".", str(top / "world.git"))
