"""An image that holds one program, from a registry into a real VM."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Create
from sandboxd.errors import InvalidRequest
from tests import registry
from tests.daemon import Daemon
from tests.registry import Entry, Registry, directory, link, tar

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int main(void)
{
    const char *names[] = {"GREETING", "OWN", "HOME", "USER", "LD_PRELOAD"};
    struct stat info;

    for (int i = 0; i < 5; i++) {
        const char *value = getenv(names[i]);
        printf("%s=%s\\n", names[i], value ? value : "-");
    }
    if (stat("/srv/theirs", &info) == 0)
        printf("owner %u:%u mode %o\\n", info.st_uid, info.st_gid, info.st_mode & 07777);
    FILE *file = fopen("/workspace/written", "w");
    printf("workspace %s\\n", file && fputs("x", file) >= 0 && fclose(file) == 0 ? "writable" : "not writable");
    return 7;
}
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Registry, str]]:
    if reason := registry.why_not():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("image")
    (place / "hello.c").write_text(PROGRAM)
    subprocess.run(["cc", "-static", "-Os", "-o", place / "hello", place / "hello.c"], check=True)
    with tempfile.TemporaryDirectory(prefix="reg-", dir="/tmp") as name:
        store = Registry(Path(name))
        layers = (
            tar(directory("bin"), Entry("bin/hello", (place / "hello").read_bytes()), Entry("gone", b"x")),
            tar(Entry(".wh.gone"), Entry("srv/theirs", b"x", uid=1234, gid=5, mode=0o4755), link("tmp", "var/tmp"),
                directory("var/tmp"), link("workspace", "/home/work"), directory("home/work"), link("etc", "/usr/etc"),
                directory("usr/etc")),
        )  # fmt: skip
        env = ["GREETING=from the image", "OWN=image", "HOME=/evil", "USER=root", "LD_PRELOAD=/evil.so"]
        store.push("t/hello", "v1", *layers, env=env)
        yield store, f"{store.name}/t/hello:v1"
        store.close()


def test_an_image_of_one_program_runs(image: tuple[Registry, str], short_tmp: Path) -> None:
    store, name = image
    with Daemon(short_tmp / "images", flags=("--insecure-registry", store.name)) as daemon:
        made = daemon.client.create(Create(image=name, memory_mb=256, disk_mb=256, env={"OWN": "request"}))
        assert made.image == name
        done = daemon.client.run(made.id, ["/bin/hello"])
        assert done.exit_code == 7
        assert done.stdout.decode().splitlines() == [
            "GREETING=from the image", "OWN=request", "HOME=/sandbox/home", "USER=sandbox", "LD_PRELOAD=-",
            "owner 1234:5 mode 755", "workspace writable",
        ]  # fmt: skip
        assert "gone" not in {entry.name for entry in daemon.client.list_dir(made.id, "/")}
        assert daemon.client.read_file(made.id, "/home/work/written") == b"x"
        with pytest.raises(InvalidRequest, match="no such command"):
            daemon.client.run(made.id, ["/bin/sh"])
        # Nobody takes from a machine what it started from.
        drive = next((daemon.state / "images" / "drives").iterdir())
        drive.unlink()
        assert daemon.client.run(made.id, ["/bin/hello"]).exit_code == 7
        daemon.client.delete(made.id)
    assert daemon.leftovers() == []
