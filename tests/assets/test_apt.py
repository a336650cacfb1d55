from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.assets.apt import (
    Package,
    Source,
    configuration,
    deb822_sources,
    host_sources,
    one_line_sources,
    sources_list,
)
from sandboxd.errors import SetupError

MAIN = Source("http://mirror.example/debian", "bookworm")
SECURITY = Source("http://mirror.example/debian-security", "bookworm-security")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        pytest.param("deb http://mirror.example/debian bookworm main", [MAIN], id="the plain line"),
        pytest.param("deb http://mirror.example/debian/ bookworm main contrib", [MAIN], id="more components, a slash"),
        pytest.param(
            "  deb [ arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg ] "
            "http://mirror.example/debian bookworm main # ours",
            [MAIN], id="options and a comment",
        ),
        pytest.param("deb http://mirror.example/debian-security bookworm-security main", [SECURITY], id="security"),
        pytest.param(
            "deb http://mirror.example/debian bookworm-updates main",
            [Source("http://mirror.example/debian", "bookworm-updates")], id="updates",
        ),
        pytest.param("deb [trusted=yes] http://mirror.example/debian bookworm main", [MAIN], id="trust is not copied"),
        pytest.param("# deb http://mirror.example/debian bookworm main", [], id="a comment"),
        pytest.param("deb-src http://mirror.example/debian bookworm main", [], id="sources"),
        pytest.param("deb http://mirror.example/debian bookworm contrib # main", [], id="main only in a comment"),
        pytest.param("deb http://mirror.example/debian bookworm-backports main", [], id="backports"),
        pytest.param("deb http://mirror.example/debian sid main", [], id="another release"),
        pytest.param("deb http://vendor.example/linux bookworm stable", [], id="a vendor's component"),
        pytest.param(
            "deb [signed-by=/etc/apt/keyrings/vendor.gpg] http://vendor.example/debian bookworm main",
            [], id="a vendor's key",
        ),
        pytest.param("deb http://mirror.example/debian", [], id="half a line"),
        pytest.param("deb [arch=amd64 http://mirror.example/debian bookworm main", [], id="an open bracket"),
        pytest.param("deb cdrom:[Debian_12]/ bookworm main", [], id="an installation disc"),
        pytest.param("rm -rf / bookworm main", [], id="no source at all"),
        pytest.param("", [], id="nothing"),
    ],
)
def test_one_line_sources(line: str, found: list[Source]) -> None:
    assert one_line_sources(line, "bookworm") == found


ALL_SUITES = "bookworm bookworm-updates bookworm-backports"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
STANZA = f"""\
Types: deb
# the mirror
URIs: http://mirror.example/debian
Suites: {ALL_SUITES}
Components: main
Signed-By: {KEYRING}
"""


@pytest.mark.parametrize(
    ("text", "suites"),
    [
        pytest.param(STANZA, ["bookworm", "bookworm-updates"], id="a stanza"),
        pytest.param("\n\n" + STANZA + "\n \n\n" + STANZA, ["bookworm", "bookworm-updates"] * 2, id="two of them"),
        pytest.param(STANZA.replace("Types: deb", "types: deb deb-src"), ["bookworm", "bookworm-updates"], id="case"),
        pytest.param(
            STANZA.replace(ALL_SUITES, "\n bookworm\n bookworm-updates"),
            ["bookworm", "bookworm-updates"], id="a field over several lines",
        ),
        pytest.param("Enabled: no\n" + STANZA, [], id="switched off"),
        pytest.param(STANZA.replace("Types: deb", "Types: deb-src"), [], id="sources only"),
        pytest.param(STANZA.replace("Components: main", "Components: contrib"), [], id="not main"),
        pytest.param(STANZA.replace("debian-archive-keyring", "vendor"), [], id="a vendor's key"),
        pytest.param(
            STANZA.replace(KEYRING, "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ"), [], id="a key in the file",
        ),
        pytest.param(" continued\n: nothing\nTypes", [], id="rubbish"),
        pytest.param("", [], id="nothing"),
    ],
)
def test_deb822_sources(text: str, suites: list[str]) -> None:
    assert [source.suite for source in deb822_sources(text, "bookworm")] == suites


def host(etc: Path, **files: str) -> Path:
    (etc / "apt/sources.list.d").mkdir(parents=True)
    (etc / "os-release").write_text('ID=debian\nVERSION_CODENAME=bookworm\n')
    for name, text in files.items():
        (etc / "apt" / name.replace("__", "/").replace("_dot_", ".")).write_text(text)
    return etc


def test_all_of_the_hosts_files_are_read_and_vendors_are_left_out(tmp_path: Path) -> None:
    etc = host(
        tmp_path,
        sources_dot_list="deb http://mirror.example/debian-security bookworm-security main\n",
        sources_dot_list_dot_d__debian_dot_sources=STANZA,
        sources_dot_list_dot_d__again_dot_list="deb http://mirror.example/debian bookworm main\n",
        sources_dot_list_dot_d__vendor_dot_list="deb http://vendor.example/apt bookworm stable\n",
        sources_dot_list_dot_d__old_dot_list_dot_save="deb http://old.example/debian bookworm main\n",
    )
    updates = Source("http://mirror.example/debian", "bookworm-updates")
    assert sorted(host_sources(etc)) == sorted([SECURITY, MAIN, updates])


def test_a_host_without_debians_archive_is_told_so(tmp_path: Path) -> None:
    etc = host(tmp_path, sources_dot_list="deb http://vendor.example/apt bookworm stable\n")
    with pytest.raises(SetupError, match=r"(?s)bookworm.*apt-get update"):
        host_sources(etc)


def test_a_host_of_no_known_release_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="VERSION_CODENAME"):
        host_sources(tmp_path)


def test_apt_is_told_to_trust_debians_key_alone() -> None:
    text = sources_list([MAIN, SECURITY], Path("/keys/debian.gpg"))
    assert text == (
        "deb [arch=amd64 target=Packages signed-by=/keys/debian.gpg] http://mirror.example/debian bookworm main\n"
        "deb [arch=amd64 target=Packages signed-by=/keys/debian.gpg] http://mirror.example/debian-security "
        "bookworm-security main\n"
    )


def test_apt_works_in_our_directory_and_runs_no_hook_of_the_host() -> None:
    text = configuration(Path("/state/apt"))
    for line in (
        'Dir::State::status "/state/apt/status";', 'Dir::Etc::sourceparts "/dev/null";',
        "#clear APT::Update::Post-Invoke;", "#clear APT::Update::Post-Invoke-Success;",
        'APT::Get::AllowUnauthenticated "false";',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize("name", ['/state/"; Evil "', "/state/a\nb", "/state/a;b", "/state/a\\b"], ids=repr)
def test_a_directory_that_apts_configuration_cannot_name_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match="name"):
        configuration(Path(name))


def test_an_epoch_is_written_into_the_file_name_as_apt_does() -> None:
    package = Package("git", "1:2.39.5-0+deb12u3", "amd64", "aa", 1)
    assert package.filename == "git_1%3a2.39.5-0+deb12u3_amd64.deb"
