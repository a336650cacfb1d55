from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandboxd.assets import rootspace
from sandboxd.errors import SetupError


def test_root_needs_no_user_namespace() -> None:
    assert rootspace.enter(["true"], uid=0) == [
        "unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--", "true"
    ]


def test_a_user_is_root_there_with_subordinate_ids() -> None:
    assert rootspace.enter(["rm", Path("/x")], uid=1000)[1:4] == ["--user", "--map-root-user", "--map-auto"]


@pytest.mark.parametrize(
    ("table", "size"),
    [
        pytest.param("", 0, id="an empty table"),
        pytest.param("ann:100000:65536\n", 65536, id="by name"),
        pytest.param("1000:100000:65536\n", 65536, id="by number"),
        pytest.param("ann:100000:10\nbob:200000:65536\nann:300000:70000\n", 70000, id="the largest of several"),
        pytest.param("anna:100000:65536\n", 0, id="somebody with a longer name"),
        pytest.param("ann:x:65536\nann:1\n:::\nann:1:2:3\n", 0, id="rubbish"),
    ],
)
def test_what_a_table_grants(table: str, size: int) -> None:
    assert rootspace.granted(table, "ann", 1000) == size


@pytest.mark.parametrize(
    ("table", "free"),
    [
        pytest.param("", "100000-165535", id="nobody has any"),
        pytest.param("bob:100000:65536\n", "165536-231071", id="after the last"),
        pytest.param("bob:100000:10\n", "165536-231071", id="never inside somebody's range"),
        pytest.param("bob:5000:10\n", "100000-165535", id="a range below the usual ones"),
    ],
)
def test_the_next_free_range(table: str, free: str) -> None:
    assert rootspace.free_range(table) == free


def test_a_user_without_ids_gets_the_command_that_root_must_run(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("bob:100000:65536\n")
    with pytest.raises(SetupError) as refused:
        rootspace.require(65534, tmp_path)
    assert str(refused.value).splitlines()[-1].strip() == (
        "usermod --add-subuids 165536-231071 --add-subgids 100000-165535 nobody"
    )


def test_only_what_is_lacking_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("nobody:100000:65536\n")
    with pytest.raises(SetupError) as refused:
        rootspace.require(65534, tmp_path)
    assert str(refused.value).endswith("usermod --add-subgids 100000-165535 nobody")


def test_root_needs_nothing(tmp_path: Path) -> None:
    rootspace.require(0, tmp_path)


def test_a_tree_is_removed_and_what_it_links_to_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    (tree / "locked").mkdir(parents=True)
    (tree / "link").symlink_to(kept)
    (tree / "locked/file").touch()
    (tree / "locked").chmod(0)
    rootspace.remove(tree)
    assert not tree.exists()
    assert (kept / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_script_sees_the_owners_and_another_network(tmp_path: Path) -> None:
    (tmp_path / "given").touch()
    os.chown(tmp_path / "given", 1001, 1001)
    rootspace.shell(
        'stat -c %u given > "$1"; readlink /proc/self/ns/net >> "$1"', [tmp_path / "said"], step="look", cwd=tmp_path
    )
    owner, network = (tmp_path / "said").read_text().split()
    assert owner == "1001"
    assert network != os.readlink("/proc/self/ns/net")
