"""What doctor says of this machine: versions that are known to be bad, other firewalls, room on the disk."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import native
from cli import advisories, doctor, facts
from cli.advisories import ADVISORIES
from cli.facts import Chain
from native import KvmAnswer, KvmState
from sandboxd.client import Capabilities, Network
from sandboxd.vm import firecracker_versions, kvm
from tests.cli.person import Person
from tests.sandboxd.rig import ROOT

VERSIONS = [
    ("git", "git version 2.39.5", ["CVE-2025-48384"]),
    ("git", "git version 2.39.3 (Apple Git-145)", ["CVE-2024-32002", "CVE-2024-32004", "CVE-2025-48384"]),
    ("git", "git version 2.50.1.windows.1", []),
    ("git", "git version 2.43.7", []),
    ("git", "git version 2.50.0-rc1", ["CVE-2025-48384"]),
    ("git", "git version 2.51.0", []),
    ("git", "git version 2.29.3", ["CVE-2022-41903", "CVE-2024-32002", "CVE-2024-32004", "CVE-2025-48384"]),
    ("qemu", "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", []),
    ("qemu", "QEMU emulator version 7.2.8", ["CVE-2023-6693"]),
    ("qemu", "QEMU emulator version 8.2.0", ["CVE-2023-6693"]),
    ("qemu", "QEMU emulator version 8.2.1", []),
    ("qemu", "QEMU emulator version 5.0.0", ["CVE-2021-3748"]),
    ("qemu", "QEMU emulator version 6.1.0", ["CVE-2021-3748", "CVE-2023-6693"]),
    ("qemu", "QEMU emulator version 10.0.2", []),
    ("qemu", "no number at all", None),
]


@pytest.mark.parametrize("path", [None, "", ".", "bin:/usr/bin", "/usr/bin::"])
def test_no_program_of_the_working_directory_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bwrap", "qemu-system-x86_64", "firecracker", "nft", "bin/bwrap", "bin/firecracker"):
        (tmp_path / name).write_text(f"#!/bin/sh\n>>{tmp_path}/ran\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PATH") if path is None else monkeypatch.setenv("PATH", path)
    for name, command in (("bubblewrap", "bwrap"), ("qemu", "qemu-system-x86_64")):
        list(facts.program(name, command))
    list(facts.firecracker())
    list(facts.forwarding(os.geteuid()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("Firecracker v1.16.1", None),
        ("Firecracker v1.15.0", "CVE-2026-5747"),
        ("Firecracker v1.14.0", "CVE-2026-1386"),
        ("Firecracker", "did not say which version"),
    ],
)
def test_a_firecracker_that_sandboxd_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, part: str | None
) -> None:
    says(tmp_path / "firecracker", said)
    says(tmp_path / "jailer", said.replace("Firecracker", "Jailer"))
    monkeypatch.setattr(firecracker_versions, "PLACES", str(tmp_path))
    told = dict(facts.firecracker())
    assert told.pop("firecracker") == said
    assert [part in line for lines in told.values() for line in lines] == ([] if part is None else [True])


def says(program: Path, version: str) -> None:
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxd needs the jailer")
@pytest.mark.parametrize(
    ("jailer", "part"),
    [
        (None, "there is no jailer beside it"),
        ("Jailer v1.15.1", "says: Jailer v1.15.1; it and Firecracker belong together: install both of one release"),
        ("no version", "it and Firecracker belong together"),
    ],
)
def test_a_jailer_that_is_lacking_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jailer: str | None, part: str
) -> None:
    says(tmp_path / "firecracker", "Firecracker v1.16.1")
    if jailer is not None:
        says(tmp_path / "jailer", jailer)
    monkeypatch.setattr(firecracker_versions, "PLACES", str(tmp_path))
    told = dict(facts.firecracker())
    assert part in told["firecracker is not used"][0]
    (tmp_path / "jailer").unlink(missing_ok=True)
    (tmp_path / "firecracker").unlink()
    assert dict(facts.firecracker()) == {"firecracker": f"none in {tmp_path}: QEMU runs machines"}


@pytest.mark.parametrize(
    ("state", "uid", "helps"),
    [(KvmState.NO_ACCESS, 1000, True), (KvmState.NO_ACCESS, 0, False), (KvmState.ABSENT, 1000, False)],
)
def test_what_gives_a_user_the_right_to_kvm_is_told(
    monkeypatch: pytest.MonkeyPatch, state: KvmState, uid: int, helps: bool
) -> None:
    answer = KvmAnswer(state, "the very reason", 0, 0.0)
    monkeypatch.setattr(native, "kvm_probe", lambda: answer)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    told = dict(facts.kvm())
    assert (told["kvm"], told["because"]) == (state.value, "the very reason")
    assert ("usermod -aG kvm USER" in str(told.get("to change that"))) is helps
    assert kvm.unusable(answer).endswith("usermod -aG kvm USER, and log in again" if helps else "the very reason")


@pytest.mark.parametrize(("program", "said", "bad"), VERSIONS, ids=[row[1] for row in VERSIONS])
def test_versions(program: str, said: str, bad: list[str] | None) -> None:
    version = advisories.version_in(said)
    if bad is None:
        assert version is None
    else:
        assert version is not None
        assert [one.id for one in advisories.of(program, version)] == bad


@pytest.mark.parametrize("one", ADVISORIES, ids=[one.id for one in ADVISORIES])
def test_each_row_is_whole(one: advisories.Advisory) -> None:
    assert one.source.startswith("https://") and one.what and one.fixed == tuple(sorted(one.fixed))
    assert all(not one.holds(fix) for fix in one.fixed)
    assert one.holds((*one.fixed[-1][:2], one.fixed[-1][2] - 1)) or one.fixed[-1][2] == 0


def changelog(docs: Path, text: str) -> None:
    (docs / "git").mkdir(parents=True)
    with gzip.open(docs / "git" / "changelog.Debian.gz", "wb") as file:
        file.write(text.encode())


def test_what_a_distribution_mended_is_read_in_its_changelog(tmp_path: Path) -> None:
    changelog(tmp_path, "git (1:2.39.5-0+deb12u3) bookworm\n  * Fix CVE-2025-48384\n  * Fix CVE-2024-320020\n")
    mended = dict(facts.known("git", (2, 39, 5), "/usr/bin/git", str(tmp_path)))
    assert mended == {"git mended": "CVE-2025-48384: by the distribution, as its changelog says"}
    both = dict(facts.known("git", (2, 39, 3), "/usr/bin/git", str(tmp_path)))
    assert [line.partition(":")[0] for line in both["git is BAD"]] == ["CVE-2024-32002", "CVE-2024-32004"]
    assert "mended in 2.44.1 or 2.45.1" in both["git is BAD"][0]
    own = dict(facts.known("git", (2, 39, 5), "/usr/local/bin/git", str(tmp_path)))
    assert list(own) == ["git is BAD"], "a changelog tells of the package's program alone"


@pytest.mark.parametrize("what", ["none", "damaged"])
def test_without_a_changelog_it_is_bad_and_the_doubt_is_said(tmp_path: Path, what: str) -> None:
    if what == "damaged":
        (tmp_path / "git").mkdir()
        (tmp_path / "git" / "changelog.Debian.gz").write_bytes(b"\x1f\x8b\x08\0nothing of it")
    lines = dict(facts.known("git", (2, 39, 5), "/usr/bin/git", str(tmp_path)))["git is BAD"]
    assert ("unless git's changelog is only not here" in lines[0]) is (what == "none")


def base(name: str, hook: str, policy: str, table: str = "filter") -> dict[str, Any]:
    return {"chain": {"family": "ip", "table": table, "name": name, "hook": hook, "prio": 0, "policy": policy}}


DOCKER = {"chain": {"family": "ip", "table": "filter", "name": "DOCKER-USER"}}
UFW = {"chain": {"family": "ip", "table": "filter", "name": "ufw-before-forward"}}
DROPS = base("FORWARD", "forward", "drop")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        pytest.param([], [], id="no rules"),
        pytest.param([base("FORWARD", "forward", "accept"), base("INPUT", "input", "drop")], [], id="others"),
        pytest.param([DROPS], [Chain("ip", "filter", "FORWARD", "forward", "")], id="somebody's"),
        pytest.param([DROPS, DOCKER], [Chain("ip", "filter", "FORWARD", "forward", "docker")], id="docker's"),
        pytest.param([UFW, DROPS], [Chain("ip", "filter", "FORWARD", "forward", "ufw")], id="ufw's"),
        pytest.param(
            [base("filter_FORWARD", "forward", "drop", "firewalld")],
            [Chain("ip", "firewalld", "filter_FORWARD", "forward", "firewalld")], id="firewalld's",
        ),
        pytest.param(
            [base("out", "output", "drop", "mine")], [Chain("ip", "mine", "out", "output", "")], id="what is sent"
        ),
    ],
)  # fmt: skip
def test_chains_that_drop(rules: list[dict[str, Any]], said: list[Chain]) -> None:
    assert facts.dropping({"nftables": [{"metainfo": {}}, *rules]}) == said


@pytest.mark.parametrize("value", [[], {}, {"nftables": 1}], ids=str)
def test_what_is_no_ruleset_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="not a ruleset"):
        facts.dropping(value)


def test_another_firewall_is_named_and_its_meaning_said(tmp_path: Path) -> None:
    """In a network namespace of its own, as Docker leaves a machine."""
    if os.geteuid() != 0 or shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("root and nft are needed for rules of a namespace's own")
    code = (
        "import subprocess, sys\n"
        "subprocess.run(['nft', '-f', '-'], input=sys.argv[1].encode(), check=True)\n"
        "from cli.__main__ import main\n"
        "sys.exit(main(['doctor', '--no-probe', '--json', '--context', 'unix:///none']))"
    )
    rules = "table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; chain DOCKER { }; }"
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", code, rules], env=Person(tmp_path, tmp_path).environment(), cwd=ROOT,
        capture_output=True, check=False,
    )  # fmt: skip
    host = json.loads(done.stdout)["host"]
    assert host["firewall"] == ["ip filter FORWARD (docker's) drops what is forwarded: sandboxes do not need it"]
    assert host["forwarding"].endswith("; sandboxes do not use it")
    assert done.returncode == 1, "no sandboxd answers"


def test_who_is_not_root_is_told_so() -> None:
    assert dict(facts.forwarding(1000))["firewall"] == "not looked at: only root may list its rules"


def test_where_disks_are_and_what_is_free(tmp_path: Path) -> None:
    assert facts.state_dir(0, {"XDG_DATA_HOME": "/x"}) == "/var/lib/sandboxd"
    assert facts.state_dir(5, {"XDG_DATA_HOME": "/x"}) == "/x/sandboxd"
    assert facts.state_dir(5, {"HOME": "/h", "XDG_DATA_HOME": "x"}) == "/h/.local/share/sandboxd"
    said = facts.disk(str(tmp_path / "not" / "there"))
    assert said.startswith(f"{tmp_path}/not/there: ") and " GiB free" in said


NO_NETWORK = "its network ceiling is none"
ALL = Capabilities(
    "1", "qemu", {"egress_allowlist": True, "workspace_bundle": True}, {}, Network("allowlist", ("a",)), "open", ("*",)
)


@pytest.mark.parametrize(
    ("wanted", "found", "lacks"),
    [
        pytest.param("dev", ALL, [], id="dev is had"),
        pytest.param("prod", ALL, [], id="prod is had"),
        pytest.param("dev", ALL._replace(network_ceiling="none"), [NO_NETWORK], id="dev, no network"),
        pytest.param("prod", ALL._replace(network_ceiling="none"), [NO_NETWORK], id="prod, no network"),
        pytest.param("prod", ALL._replace(network_may_allow=()), ["its policy lets no run name"], id="prod, no names"),
        pytest.param("dev", ALL._replace(network_may_allow=()), [], id="dev needs none"),
        pytest.param(
            "prod", ALL._replace(network_may_allow=(), network_may_allow_tcp=("a:22",)), [], id="prod, other ports"
        ),
        pytest.param(
            "prod", ALL._replace(capabilities={}), ["it cannot hold sandboxes to names", "it takes no repository"],
            id="neither capability",
        ),
    ],
)  # fmt: skip
def test_whether_a_profile_can_be_had(wanted: str, found: Capabilities, lacks: list[str]) -> None:
    said = doctor.undeliverable(wanted, found)
    assert len(said) == len(lacks)
    assert all(one.startswith(lack) for one, lack in zip(said, lacks, strict=True))
