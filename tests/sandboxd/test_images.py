"""Images from a real registry, in a daemon with stand-in machines."""

from __future__ import annotations

import gzip
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import registry
from tests.registry import INDEX, Entry, Registry, tar
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Answer, Rig
from tests.world.authority import issue

SMALL = tar(Entry("bin/hello", b"#!"))
MIB = 1 << 20

if lacking := why_not() or registry.why_not():
    pytest.skip(lacking, allow_module_level=True)


@pytest.fixture(scope="session")
def store() -> Iterator[Registry]:
    with tempfile.TemporaryDirectory(prefix="reg-", dir="/tmp") as name:
        running = Registry(Path(name))
        yield running
        running.close()


@pytest.fixture(scope="session")
def warm(store: Registry) -> Iterator[Rig]:
    """A daemon for tests that use repositories of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name,
        Rig(Path(name), "--insecure-registry", store.name) as rig,
    ):
        rig.create(name="warm")
        yield rig


@pytest.fixture
def cold(store: Registry, place: Path) -> Iterator[Rig]:
    """A daemon for one test."""
    with Rig(place, "--insecure-registry", store.name) as rig:
        rig.create(name="cold")
        yield rig


def post(rig: Rig, image: str) -> Answer:
    return rig.call("POST", "/v1/images", {"image": image})


def listed(rig: Rig) -> dict[str, dict[str, Any]]:
    found = rig.call("GET", "/v1/images").json["images"]
    assert [one["image"] for one in found] == sorted(one["image"] for one in found)
    return {one["image"]: one for one in found}


def settled(rig: Rig, image: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (found := listed(rig)[image])["state"] == "installing":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def install(rig: Rig, image: str) -> dict[str, Any]:
    answer = post(rig, image)
    assert (answer.status, answer.json["image"]) == (202, image), answer.body
    return settled(rig, image)


def remove(rig: Rig, image: str) -> Answer:
    return rig.call("DELETE", f"/v1/images?image={quote(image, safe='')}")


def drives(rig: Rig) -> list[str]:
    return sorted(os.listdir(rig.state / "images" / "drives"))


def test_a_create_installs_what_it_names_and_the_next_one_finds_it(warm: Rig, store: Registry) -> None:
    digest = store.push("t/first", "v1", SMALL, env=["GREETING=hello"])
    image = f"{store.name}/t/first:v1"
    made = warm.call("POST", "/v1/sandboxes", {"image": image})
    assert (made.status, made.json["image"]) == (201, image), made.body
    found = listed(warm)[image]
    assert (found["state"], found["digest"], found["in_use"]) == ("installed", digest, True)
    assert found["bytes"] > 0 and "default" not in found
    drive = warm.state / "sandboxes" / made.json["id"] / "image.erofs"
    assert drive.stat().st_mode & 0o777 == 0o444 and drive.stat().st_nlink == 2
    warm.call("DELETE", f"/v1/sandboxes/{made.json['id']}")
    assert not listed(warm)[image]["in_use"]
    assert remove(warm, image).json["freed_bytes"] > found["bytes"]


def test_c29_the_default_image_stays_and_may_be_asked_for_again(warm: Rig) -> None:
    base = listed(warm)["sandbox-base"]
    assert (base["state"], base["default"], base["in_use"]) == ("installed", True, True)
    file = warm.state / "assets" / "image"
    os.link(file, warm.state / "link")
    (warm.state / "link").unlink()
    assert listed(warm)["sandbox-base"]["installed_at"] == base["installed_at"], "when it was made, not last linked to"
    assert (remove(warm, "sandbox-base").status, remove(warm, "sandbox-base").code) == (409, "conflict")
    assert (post(warm, "sandbox-base").status, post(warm, "sandbox-base").json["state"]) == (202, "installed")
    assert (remove(warm, "r.test/nothing:1").status, remove(warm, "r.test/nothing:1").code) == (404, "not_found")


@pytest.mark.parametrize(
    "image", ["", "-x", "debian", "debian:12", "r.test/A", "a b", "r.test/a@sha256:0", "u:p@r.test/a"]
)
def test_references_that_are_refused(warm: Rig, image: str) -> None:
    assert (post(warm, image).status, post(warm, image).code) == (400, "invalid_request")
    if image:
        assert warm.call("POST", "/v1/sandboxes", {"image": image}).status == 400


def test_images_that_are_not_there(warm: Rig, store: Registry) -> None:
    store.push("t/there", "v1", SMALL)
    for name in ("t/there:v2", "t/nothing:v1"):
        image = f"{store.name}/{name}"
        made = warm.call("POST", "/v1/sandboxes", {"image": image})
        assert (made.status, made.code, made.message) == (
            404, "not_found", f"image {image}: the registry does not have it",
        )  # fmt: skip
        found = listed(warm)[image]
        assert (found["state"], found["error"]) == ("failed", "the registry does not have it")
        assert remove(warm, image).json == {"image": image, "freed_bytes": 0}
        assert remove(warm, image).status == 404


def test_a_registry_that_is_not_there(warm: Rig) -> None:
    made = warm.call("POST", "/v1/sandboxes", {"image": "127.0.0.1:1/a:1"})
    assert (made.status, made.code) == (409, "conflict")
    assert "connection refused" in made.message


def test_a_digest_pins_what_is_meant(warm: Rig, store: Registry) -> None:
    old = store.push("t/pinned", "v1", SMALL)
    store.push("t/pinned", "v1", tar(Entry("bin/other", b"x")))
    image = f"{store.name}/t/pinned@{old}"
    assert install(warm, image)["digest"] == old
    # The registry turns against us: other bytes than the digest names.
    bad = store.push("t/pinned", "v2", tar(Entry("bin/third", b"x")))
    file = store.blob_file(bad)
    file.write_bytes(file.read_bytes() + b" ")
    found = install(warm, f"{store.name}/t/pinned@{bad}")
    assert found["state"] == "failed" and "is not what sha256:" in found["error"], found


def test_layers_that_were_changed_in_the_registry(warm: Rig, store: Registry) -> None:
    layer = tar(Entry("bin/changed", os.urandom(1000)))
    store.push("t/changed", "v1", layer)
    file = store.blob_file(registry.digest(registry.squeezed(layer)))
    file.write_bytes(file.read_bytes()[:-9] + b"x" * 9)
    made = warm.call("POST", "/v1/sandboxes", {"image": f"{store.name}/t/changed:v1"})
    assert made.status == 409 and "could not be pulled" in made.message, made.body


def test_an_index_leads_to_this_machines_image(warm: Rig, store: Registry) -> None:
    wanted = store.push("t/many", "amd64", SMALL)
    other = store.push("t/many", "arm64", SMALL, config={"architecture": "arm64"})
    rows = [
        {"mediaType": registry.MANIFEST, "digest": digest, "size": store.blob_file(digest).stat().st_size,
         "platform": {"os": "linux", "architecture": name}}
        for name, digest in (("arm64", other), ("amd64", wanted))
    ]  # fmt: skip
    both = store.put_manifest("t/many", "both", {"schemaVersion": 2, "mediaType": INDEX, "manifests": rows})
    store.put_manifest("t/many", "one", {"schemaVersion": 2, "mediaType": INDEX, "manifests": rows[:1]})
    assert install(warm, f"{store.name}/t/many:both")["digest"] == both
    assert "not there for linux/amd64, only for: arm64" in install(warm, f"{store.name}/t/many:one")["error"]
    assert "it is for linux/arm64" in install(warm, f"{store.name}/t/many:arm64")["error"]


def test_what_two_want_at_once_is_installed_once(warm: Rig, store: Registry) -> None:
    store.push("t/wanted", "v1", tar(Entry("bin/x", os.urandom(4 * MIB))))
    image = f"{store.name}/t/wanted:v1"
    answers: list[Answer] = []
    ask = [threading.Thread(target=lambda: answers.append(post(warm, image))) for _ in range(3)]
    create = threading.Thread(target=lambda: answers.append(warm.call("POST", "/v1/sandboxes", {"image": image})))
    for thread in (*ask, create):
        thread.start()
    deadline = time.monotonic() + 30
    while remove(warm, image).status == 404:
        assert time.monotonic() < deadline
    for thread in (*ask, create):
        thread.join()
    assert sorted(answer.status for answer in answers) == [201, 202, 202, 202]
    assert warm.log.read_text().count(f"image {image}: installed") == 1
    in_use = remove(warm, image)
    assert (in_use.status, in_use.code) == (409, "conflict") and "in use" in in_use.message
    made = next(answer for answer in answers if answer.status == 201)
    warm.call("DELETE", f"/v1/sandboxes/{made.json['id']}")


def test_a_moved_tag_is_followed_when_asked_and_running_sandboxes_keep_theirs(cold: Rig, store: Registry) -> None:
    old = store.push("t/moving", "v1", SMALL)
    image = f"{store.name}/t/moving:v1"
    sandbox = cold.create(image=image)
    new = store.push("t/moving", "v1", SMALL, tar(Entry("more", b"x")))
    assert cold.create(image=image) and listed(cold)[image]["digest"] == old
    assert install(cold, image)["digest"] == new
    assert drives(cold) == [f"{new.removeprefix('sha256:')}-1.erofs"]
    assert (cold.state / "sandboxes" / sandbox / "image.erofs").stat().st_nlink == 2     # the other one's


def test_offline_what_is_installed_works_and_is_even_built_again(place: Path, tmp_path: Path) -> None:
    own = Registry(tmp_path)
    own.push("t/kept", "v1", SMALL)
    image, same = f"{own.name}/t/kept:v1", f"{own.name}/t/kept:latest"
    own.push("t/kept", "latest", SMALL)
    with Rig(place, "--insecure-registry", own.name) as rig:
        rig.create()
        assert [install(rig, one)["state"] for one in (image, same)] == ["installed"] * 2
        (drive,) = drives(rig)
        own.close()
        rig.create(image=image)
        rig.stop()
        rig.start()
        rig.create(image=image)
        for damage in (lambda path: path.unlink(), lambda path: os.truncate(path, 0)):
            damage(rig.state / "images" / "drives" / drive)
            rig.create(image=image)
            assert drives(rig) == [drive]
        again = install(rig, image)
        assert again["state"] == "installed" and "connection refused" in again["error"]
        # Without its blobs there is no way but the registry, and the answer says so.
        for path in (*(rig.state / "images" / "drives").iterdir(), *(rig.state / "images" / "blobs").iterdir()):
            path.unlink()
        made = rig.call("POST", "/v1/sandboxes", {"image": same})
        assert made.status == 409 and "connection refused" in made.message
        own.start()
        rig.create(image=same)
        own.close()


def test_references_to_the_same_image_share_its_drive(cold: Rig, store: Registry) -> None:
    for tag in ("a", "b"):
        store.push("t/shared", tag, SMALL)
        install(cold, f"{store.name}/t/shared:{tag}")
    assert len(drives(cold)) == 1
    assert remove(cold, f"{store.name}/t/shared:a").json["freed_bytes"] == 0
    assert len(drives(cold)) == 1 and cold.create(image=f"{store.name}/t/shared:b")


def test_a_daemon_that_is_killed_leaves_nothing_half(cold: Rig, store: Registry) -> None:
    store.push("t/killed", "v1", tar(Entry("bin/x", os.urandom(24 * MIB))))
    image = f"{store.name}/t/killed:v1"
    for wait_s in (0.1, 0.4, 1.0):
        post(cold, image)
        time.sleep(wait_s)
        cold.kill()
        deadline = time.monotonic() + 30
        while left := jailed(cold.state):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        cold.start()
        assert not list((cold.state / "images").glob("work-*"))
        cold.create()
    assert cold.create(image=image)


def jailed(state: Path) -> list[str]:
    """Programs that have the state directory's images open or mounted."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            mounts = Path(f"/proc/{pid}/mountinfo").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{state}/images/work-" in mounts or f"{state}/images/work-" in command:
            found.append(f"{pid} {command}")
    return found


def test_a_create_that_is_deleted_stops_waiting_and_the_install_goes_on(cold: Rig, store: Registry) -> None:
    store.push("t/slow", "v1", tar(Entry("bin/x", os.urandom(24 * MIB))))
    image = f"{store.name}/t/slow:v1"
    answers: list[Answer] = []
    create = threading.Thread(
        target=lambda: answers.append(cold.call("POST", "/v1/sandboxes", {"image": image, "name": "waiting"}))
    )
    create.start()
    deadline = time.monotonic() + 30
    while cold.call("DELETE", "/v1/sandboxes/waiting").status == 404:
        assert time.monotonic() < deadline
    create.join()
    assert (answers[0].status, answers[0].code) == (409, "conflict")
    assert settled(cold, image)["state"] == "installed"


def test_a_full_disk_is_told_and_leaves_nothing(store: Registry, place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    state = place / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m,mode=700", "none", str(state)], check=True)
    try:
        layers = [tar(Entry(f"x{n}", os.urandom(12 * MIB))) for n in range(4)]
        store.push("t/large", "v1", *layers, squeeze=lambda layer: gzip.compress(layer, 0))
        with Rig(place, "--insecure-registry", store.name) as rig:
            rig.create(disk_mb=64)
            found = install(rig, f"{store.name}/t/large:v1")
            assert (found["state"], found["error"]) == ("failed", "the server's disk is full")
            assert drives(rig) == [] and not list((state / "images").glob("work-*"))
            rig.create(disk_mb=64)
    finally:
        subprocess.run(["umount", str(state)], check=True)


def test_the_policys_list_is_compared_exactly(store: Registry, place: Path) -> None:
    store.push("t/listed", "v1", SMALL)
    image = f"{store.name}/t/listed:v1"
    policy = place / "policy.yaml"
    policy.write_text(f'images: ["sandbox-base", "{image}"]\n')
    with Rig(place, "--insecure-registry", store.name, "--policy", str(policy)) as rig:
        rig.create(image=image)
        for other in (f"{store.name}/t/listed", f"{store.name}/t/listed:v2", f"{image}@sha256:{'0' * 64}"):
            assert (post(rig, other).status, post(rig, other).code) == (403, "refused")
            assert rig.call("POST", "/v1/sandboxes", {"image": other}).status == 403


def test_another_default_image(store: Registry, place: Path) -> None:
    store.push("t/default", "v1", SMALL)
    image = f"{store.name}/t/default:v1"
    with Rig(place, "--insecure-registry", store.name, "--default-image", image) as rig:
        sandbox = rig.create()
        assert rig.call("GET", f"/v1/sandboxes/{sandbox}").json["image"] == image
        rig.call("DELETE", f"/v1/sandboxes/{sandbox}")
        assert listed(rig)[image]["default"] and "default" not in listed(rig)["sandbox-base"]
        assert remove(rig, image).status == 409
        assert rig.create(image="sandbox-base")


def test_a_registry_with_a_certificate_of_an_authority_the_host_trusts(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, chain = issue(tmp_path / "certificates", ["localhost"])
    own = Registry(tmp_path, chain)
    try:
        own.push("t/secure", "v1", SMALL)
        image = f"{own.name}/t/secure:v1"
        with Rig(place) as rig:
            rig.create()
            assert "certificate" in install(rig, image)["error"]
            rig.stop()
            monkeypatch.setenv("SSL_CERT_FILE", str(authority))
            rig.start()
            rig.create()
            assert install(rig, image)["state"] == "installed"
    finally:
        own.close()
