"""The host's registries: which names, which settings, and that no password comes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.policy import built_in
from sandboxd.registries import (
    APT_CONF,
    APT_SOURCES,
    AT_ONCE,
    NPMRC,
    PIP_CONF,
    authorities,
    npm_settings,
    pip_settings,
    plain,
    read,
)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://Mirror.Test/simple/", "https://mirror.test/simple/"),
        ("http://u:CANARY@m.test:8080/a", "http://m.test:8080/a"),
        ("https://CANARY@m.test./a?token=CANARY#CANARY", "https://m.test/a"),
        ("https://b\u00fccher.test/", "https://xn--bcher-kva.test/"),
        ("https://10.0.0.1/simple", ""), ("https://[::1]/", ""), ("https://2130706433/", ""), ("https://*.m.test/", ""),
        ("file:///srv/mirror", ""), ("ftp://m.test/", ""), ("m.test", ""), ("", ""), ("https://", ""),
        ("https://m.test:99999/", ""), ("https://m.test/a b", ""), ("https://m.test/\n[x]", "https://m.test/[x]"),
        ("https://m.test/\u00e4", ""),
    ],
)  # fmt: skip
def test_an_address_without_what_is_nobodys_business(url: str, address: str) -> None:
    assert plain(url) == address
    assert "CANARY" not in plain(url)


def test_pips_files_and_variables_in_their_order() -> None:
    texts = [
        "[global]\nindex-url = https://u:CANARY@one.test/simple\nextra-index-url =\n    https://two.test/\n"
        "    https://three.test/x\ntimeout = 1\n",
        "[install]\nindex-url = https://install.test/simple\n[download]\nindex-url = https://no.test/\n",
        "no configuration at all",
    ]
    assert pip_settings(texts, {}) == {
        "index-url": ["https://install.test/simple"], "extra-index-url": ["https://two.test/", "https://three.test/x"],
    }  # fmt: skip
    assert pip_settings(texts, {"PIP_INDEX_URL": "https://env.test/"})["index-url"] == ["https://env.test/"]
    assert pip_settings(["[global]\nindex-url = file:///x\n"], {}) == {}


def test_npms_files_and_variables_in_their_order() -> None:
    texts = [
        "registry=https://one.test/\n//one.test/:_authToken=CANARY\n@corp:registry = \"https://corp.test/npm/\"\n",
        "; registry=https://no.test/\nregistry=https://two.test/ \n_auth=CANARY\n",
    ]
    assert npm_settings(texts, {}) == {"registry": "https://two.test/", "@corp:registry": "https://corp.test/npm/"}
    assert npm_settings(texts, {"npm_config_registry": "https://env.test/"})["registry"] == "https://env.test/"


def test_names_and_files_of_a_whole_host(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "pip.conf").write_text("[global]\nindex-url = http://u:CANARY@pip.test/simple\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".npmrc").write_text("registry=https://npm.test/\n//npm.test/:_authToken=CANARY\n")
    found = read(
        [("http://u:CANARY@apt.test/debian", "bookworm"), ("file:///srv", "bookworm")], {"HOME": "/home"}, tmp_path
    )
    assert found.names == ("apt.test", "npm.test", "pip.test")
    assert found.files == {
        APT_CONF: AT_ONCE,
        APT_SOURCES: b"deb http://apt.test/debian bookworm main\n",
        PIP_CONF: b"[global]\nindex-url = http://pip.test/simple\ntrusted-host = pip.test\n",
        NPMRC: b"registry=https://npm.test/\n",
    }


@pytest.mark.parametrize(("config", "name"), [("/settings", "settings.test"), ("settings", "home.test")])
def test_a_relative_directory_of_settings_is_none(tmp_path: Path, config: str, name: str) -> None:
    for place, host in (("settings/pip", "settings.test"), ("home/.config/pip", "home.test")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "pip.conf").write_text(f"[global]\nindex-url = https://{host}/simple\n")
    assert name in read([], {"HOME": "/home", "XDG_CONFIG_HOME": config}, tmp_path).names


def test_a_registry_on_a_port_of_its_own_is_allowed_there(tmp_path: Path) -> None:
    environment = {"PIP_INDEX_URL": "http://pip.test:3141/root/", "npm_config_registry": "https://npm.test:443/"}
    apt = [("http://apt.test:3142/debian", "bookworm"), ("http://odd.test:53/", "bookworm"), ("http://a.test:0/", "x")]
    found = read(apt, environment, tmp_path)
    assert found.services == ("apt.test:3142", "pip.test:3141")
    assert set(found.names) >= {"apt.test", "pip.test", "npm.test"}
    assert found.files[APT_SOURCES].startswith(b"deb http://apt.test:3142/debian bookworm main\n")
    network = built_in(found.names, found.services).default_network
    assert network.allow_tcp == found.services and set(network.allow or ()) >= set(found.names)


def test_a_host_that_configures_nothing_uses_what_its_programs_do(tmp_path: Path) -> None:
    found = read([], {}, tmp_path)
    assert found.files == {}
    # pip is here, since it installed this; what it goes to stands in its source and not in ours.
    assert len(found.names) >= 2
    for source in Path(__file__).resolve().parents[2].joinpath("sandboxd").rglob("*.py"):
        assert not any(name in source.read_text() for name in found.names), source


def test_npm_and_its_node_are_the_systems_own_whatever_path_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("npm", "node", "env"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {ran}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        read([], {}, tmp_path)
    assert not ran.exists()


def test_certificates_an_administrator_added_go_along_and_keys_do_not(tmp_path: Path) -> None:
    place = tmp_path / "usr/local/share/ca-certificates"
    (place / "corp").mkdir(parents=True)
    certificate = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    (place / "a.crt").write_bytes(certificate)
    (place / "corp/b.crt").write_bytes(certificate * 2)
    (place / "c.crt").write_bytes(certificate + b"-----BEGIN PRIVATE KEY-----\nCANARY\n")
    (place / "d.crt").write_bytes(b"no certificate")
    (place / "e.pem").write_bytes(certificate)
    (place / "f.crt").write_bytes(certificate * 10_000)
    found = authorities(tmp_path)
    assert list(found.values()) == [certificate, certificate * 2]
    assert all(path.startswith("/usr/local/share/ca-certificates/host-") for path in found)
    given = read([], {"PIP_INDEX_URL": "https://m.test/"}, tmp_path).files
    assert b"cert = /etc/ssl/certs/ca-certificates.crt\n" in given[PIP_CONF]
    assert b"cafile=/etc/ssl/certs/ca-certificates.crt\n" in given[NPMRC]
