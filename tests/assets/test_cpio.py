"""The archive is read back by a parser written from the format's description, and by cpio itself."""

from __future__ import annotations

import stat
import subprocess

import pytest

from sandboxd.assets.cpio import Entry, archive

FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755


def parse(raw: bytes) -> list[tuple[str, dict[str, int], bytes]]:
    names = (
        "inode", "mode", "uid", "gid", "links", "mtime", "size", "major", "minor", "rmajor", "rminor", "name", "check"
    )
    found, at = [], 0
    while True:
        assert raw[at : at + 6] == b"070701" and at % 4 == 0
        fields = dict(zip(names, (int(raw[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)), strict=True))
        name = raw[at + 110 : at + 110 + fields["name"] - 1].decode()
        assert raw[at + 109 + fields["name"]] == 0
        data_at = (at + 110 + fields["name"] + 3) & ~3
        data = raw[data_at : data_at + fields["size"]]
        at = (data_at + fields["size"] + 3) & ~3
        if name == "TRAILER!!!":
            assert at == len(raw)
            return found
        found.append((name, fields, data))


def test_entries_come_back_in_order_with_their_bytes() -> None:
    entries = [Entry("a", DIRECTORY)] + [Entry(f"a/{'n' * size}", FILE, b"x" * size) for size in range(1, 10)]
    found = parse(archive(entries))
    assert [(name, data) for name, _, data in found] == [(entry.name, entry.data) for entry in entries]
    assert [fields["mode"] for _, fields, _ in found] == [entry.mode for entry in entries]
    assert len({fields["inode"] for _, fields, _ in found}) == len(entries)


def test_owner_and_time_are_nobodys() -> None:
    [(_, fields, _)] = parse(archive([Entry("init", stat.S_IFREG | 0o755, b"\x7fELF")]))
    assert (fields["uid"], fields["gid"], fields["mtime"], fields["check"]) == (0, 0, 0, 0)


def test_a_device_node_keeps_its_numbers() -> None:
    [(_, fields, _)] = parse(archive([Entry("console", stat.S_IFCHR | 0o600, device=(5, 1))]))
    assert (fields["rmajor"], fields["rminor"]) == (5, 1)


def test_an_empty_archive_is_its_trailer() -> None:
    assert parse(archive([])) == []


def test_cpio_lists_what_was_put_in() -> None:
    raw = archive([Entry("modules", DIRECTORY), Entry("modules/order", FILE, b"a.ko\n")])
    listed = subprocess.run(["cpio", "-t", "--quiet"], input=raw, capture_output=True, check=True)
    assert listed.stdout.decode().split() == ["modules", "modules/order"]


@pytest.mark.parametrize("name", ["", "/init", "a//b", "a/", ".", "../a", "a/../b", "a\0b", "n" * 4096], ids=repr)
def test_a_name_that_is_no_plain_relative_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"path|large"):
        Entry(name, FILE)


def test_only_a_file_holds_data() -> None:
    with pytest.raises(ValueError, match="data"):
        Entry("a", DIRECTORY, b"x")
