"""Which versions of Firecracker are taken. Each bad one that is known, and its neighbours."""

from __future__ import annotations

import pytest

from sandboxd.vm import firecracker_calls
from sandboxd.vm.firecracker_versions import KNOWN, Feature, Version, fault, has, parse, read, resumes

NEW = Version((1, 16, 1))


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("Firecracker v1.16.1\n\n2026-07-02T09:00:00 [anonymous-instance:main] exit code=0\n", Version((1, 16, 1))),
        ("Firecracker v1.14.4", Version((1, 14, 4))),
        ("Jailer v1.15.1\n", Version((1, 15, 1))),
        ("Firecracker v1.17.0-dev\n", Version((1, 17, 0), "-dev")),
        ("Firecracker v1.14.4-12-g0a1b2c3-dirty\n", Version((1, 14, 4), "-12-g0a1b2c3-dirty")),
    ],
)
def test_a_version_is_read_from_what_the_program_prints(printed: str, version: Version) -> None:
    assert parse(printed) == version
    assert read(str(version)) == version


@pytest.mark.parametrize(
    "printed",
    [
        "", "\n", "Firecracker", "QEMU emulator version 7.2.1", "firecracker v1.16.1", "Firecracker v1.16",
        "Firecracker v1.16.1 ; rm", "Firecracker v1.16.1\x1b[31m", "Firecracker v99999.0.0", "Firecracker v1.\u0661.0",
        "x\nFirecracker v1.16.1", "Firecracker v1.16.1-" + "a" * 65, "Firecracker v1.16.1-", "Firecracker v-1.0.0",
    ],
)  # fmt: skip
def test_what_is_no_version_is_not_guessed_at(printed: str) -> None:
    with pytest.raises(ValueError, match="did not say"):
        parse(printed)


@pytest.mark.parametrize("text", ["", "1.16", "latest", "1.16.1.1", " 1.16.1", "1.16.1\n"])
def test_a_person_who_writes_no_version_is_told_what_one_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"three numbers, such as 1\.16\.1"):
        read(text)


@pytest.mark.parametrize("text", ["1.14.4", "1.14.9", "1.15.1", "1.15.2", "1.16.1", "1.17.0", "2.0.0"])
def test_a_version_without_a_known_fault_is_taken(text: str) -> None:
    assert fault(read(text)) is None


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("0.25.2", ("ACPI", "CVE-2026-1386")),
        ("1.7.0", ("ACPI", "CVE-2026-1386")),
        ("1.8.0", ("CVE-2026-1386",)),
        ("1.12.1", ("CVE-2026-1386",)),
        ("1.13.1", ("CVE-2026-1386", "CVE-2026-5747")),
        ("1.13.2", ("CVE-2026-5747",)),
        ("1.14.0", ("CVE-2026-1386", "CVE-2026-5747")),
        ("1.14.1", ("CVE-2026-5747",)),
        ("1.14.3", ("CVE-2026-5747",)),
        ("1.15.0", ("CVE-2026-5747",)),
        ("1.16.0", ("vsock",)),
        ("1.16.1-dev", ("not a release",)),
        ("1.17.0-dev", ("not a release",)),
        ("1.16.0-dev", ("vsock",)),
    ],
)
def test_a_known_bad_version_is_refused_with_each_reason_and_the_remedy(text: str, reasons: tuple[str, ...]) -> None:
    why = fault(read(text))
    assert why is not None and why.startswith(f"Firecracker {text} is refused: ")
    for known in ("ACPI", "CVE-2026-1386", "CVE-2026-5747", "vsock", "not a release"):
        assert (known in why) == (known in reasons), known
    assert why.endswith(f"or start sandboxd with --allow-firecracker {text}")
    assert "(1.14.4, 1.15.1, 1.16.1, or a later one of these)" in why
    assert "\n" not in why


def test_every_row_names_its_source() -> None:
    for row in KNOWN:
        assert row.first < row.fixed
        assert row.source.startswith("https://")


def test_what_came_with_a_version_is_what_the_table_of_calls_says() -> None:
    since = {(call.path, ""): call.since for call in firecracker_calls.CALLS} | {
        (call.path, field.name): field.since for call in firecracker_calls.CALLS for field in call.fields
    }
    assert {feature: feature.value for feature in Feature} == {
        Feature.ENTROPY: since["/entropy", ""],
        Feature.NETWORK_OVERRIDES: since["/snapshot/load", "network_overrides"],
        Feature.VSOCK_OVERRIDE: since["/snapshot/load", "vsock_override"],
    }


def test_a_feature_is_there_from_its_version_on() -> None:
    assert has(read("1.16.0"), Feature.VSOCK_OVERRIDE) and not has(read("1.15.9"), Feature.VSOCK_OVERRIDE)
    assert all(has(NEW, feature) for feature in Feature)


def test_which_versions_can_be_paused_and_resumed_in_place() -> None:
    assert [resumes(read(text)) for text in ("1.15.9", "1.16.0", "1.16.1", "1.16.2")] == [True, False, False, True]
