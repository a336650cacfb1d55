"""The operator's file: what it may say, and that every fault is told with its place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.errors import SetupError
from sandboxd.policy import BASELINE, Limits, Policy, PoolSize, built_in
from sandboxd.policy_file import parse, read
from sandboxd.store import Network

BUILT_IN = built_in(["registry.test"], ["registry.test:8443"])
LIST = tuple(sorted({*BASELINE, "registry.test"}))


def parsed(text: str | bytes) -> tuple[Policy, list[str]]:
    faults: list[str] = []
    return parse(text if isinstance(text, bytes) else text.encode(), BUILT_IN, faults), faults


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", BUILT_IN, id="nothing"),
        pytest.param("# nothing\n---\n", BUILT_IN, id="an empty document"),
        pytest.param("network:\nlimits: ~\nimages: null\npools: []\nallow_bind: false", BUILT_IN, id="keys without"),
        pytest.param(
            "default_image: sandbox-base\nlimits: {max_cpus: 2, max_lifetime_secs: 60}\ndefaults: {cpus: 0.5}",
            replace(BUILT_IN, cpus=0.5, limits=Limits(max_cpus=2, max_lifetime_secs=60)), id="sizes",
        ),
        pytest.param(
            "limits: {disk_mb_per_s: 1, disk_ops_per_s: 20}",
            replace(BUILT_IN, limits=Limits(disk_mb_per_s=1, disk_ops_per_s=20)), id="what a drive may carry",
        ),
        pytest.param("limits: {disk_mb_per_s: ~}", BUILT_IN, id="no limit of a drive"),
        pytest.param("defaults: {idle_timeout_secs: 0}", replace(BUILT_IN, idle_timeout_secs=0), id="never idle"),
        pytest.param(
            "pools: [{size: 3}]", replace(BUILT_IN, pools=(PoolSize("", 3),)), id="a pool",
        ),
        pytest.param(
            "defaults: {idle_timeout_secs: 0}\nlimits: {max_idle_timeout_secs: 0}",
            replace(BUILT_IN, idle_timeout_secs=0, limits=Limits(max_idle_timeout_secs=0)), id="no idle timeout",
        ),
        pytest.param(
            "network: {ceiling: open, may_allow: [], may_allow_tcp: ['*.Db.test:5432'], private: [Home.test.]}",
            replace(
                BUILT_IN, ceiling="open", may_allow=(), may_allow_tcp=("*.db.test:5432",),
                private=("home.test", "registry.test"),
            ),
            id="what may be asked",
        ),
        pytest.param(
            "network: {default: {allow: [B.test, b.test., bücher.test], deny: [c.test], allow_tcp: ['b.test:22']}}",
            replace(
                BUILT_IN,
                default_network=Network("allowlist", ("b.test", "xn--bcher-kva.test"), ("c.test",), ("b.test:22",)),
            ),
            id="a default of one's own, in normal form",
        ),
        pytest.param(
            "network: {may_allow: []}", replace(BUILT_IN, may_allow=(), may_allow_tcp=()),
            id="who may add no names may add none on other ports",
        ),
        pytest.param(
            "network: {may_allow: [a.test]}", replace(BUILT_IN, may_allow=("a.test",), may_allow_tcp=()),
            id="nor who may add some",
        ),
        pytest.param("network: {may_allow: ['*']}", BUILT_IN, id="but who may add any may"),
        pytest.param(
            "network: {default: {allow: [b.test]}}",
            replace(BUILT_IN, default_network=Network("allowlist", ("b.test",))), id="a default of names alone",
        ),
        pytest.param(
            "network: {default: {deny: [c.test]}}",
            replace(BUILT_IN, default_network=Network("allowlist", LIST, ("c.test",), ("registry.test:8443",))),
            id="the baseline, less a name",
        ),
        pytest.param(
            "network: {default: {mode: open}, ceiling: open}",
            replace(BUILT_IN, default_network=Network("open"), ceiling="open"), id="open",
        ),
        pytest.param(
            "network: {ceiling: none}", replace(BUILT_IN, default_network=Network("none"), ceiling="none"), id="none",
        ),
        pytest.param(
            "network: {default: {mode: none}}", replace(BUILT_IN, default_network=Network("none")), id="none at first",
        ),
    ],
)  # fmt: skip
def test_what_it_says(text: str, expected: Policy) -> None:
    policy, faults = parsed(text)
    assert faults == []
    assert policy == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param("netwrok: {}", "netwrok: it is not known", id="an unknown key"),
        pytest.param(
            "network: {default: {alow: []}}",
            "network.default.alow: it is not known; known here: allow, allow_tcp, deny, mode", id="one inside",
        ),
        pytest.param("network: {may_allow: [*.a.test]}", "what begins with * must be in quotes", id="a bare star"),
        pytest.param("network: {may_allow: [*a]}", "what begins with * or & must be in quotes", id="a bare alias"),
        pytest.param("{a: &x 1, b: *x}", "line 1: a: anchors and aliases", id="an anchor"),
        pytest.param("a: &x {b: 1}\n<<: *x", "line 2: merge keys", id="a merge key"),
        pytest.param("network: !!map {}", "line 1: network: tags", id="a tag"),
        pytest.param("network: {ceiling: none}\nnetwork: {}", "line 2: network: it stands twice", id="a key twice"),
        pytest.param("---\n{}\n---\n{}", "line 3: a second document", id="two documents"),
        pytest.param("allow_bind: yes", "line 1: allow_bind: yes is read", id="a truth value of YAML 1.1"),
        pytest.param("network: {may_allow: [no]}", "network.may_allow[0]: no is read", id="one in a list"),
        pytest.param("limits: {max_cpus: 010}", "limits.max_cpus: 010 is read", id="octal or not"),
        pytest.param("limits: {max_cpus: 1_0}", "limits.max_cpus: it must be a whole number", id="underscores"),
        pytest.param("limits: {max_cpus: 1.5}", "limits.max_cpus: it must be a whole number", id="a fraction"),
        pytest.param("limits: {max_cpus: '1'}", "limits.max_cpus: it must be a whole number", id="text"),
        pytest.param("limits: {max_cpus: true}", "limits.max_cpus: it must be a whole number", id="a truth value"),
        pytest.param("limits: {max_cpus: 0}", "limits.max_cpus: it must be a whole number from 1", id="too small"),
        pytest.param("limits: []", "limits: it must be a mapping", id="a list for a mapping"),
        pytest.param("- a", "it must be a mapping", id="a list for everything"),
        pytest.param("12: a", "line 1: a key that is not text", id="a number for a key"),
        pytest.param("[a]: b", "line 1: a key that is not text", id="a list for a key"),
        pytest.param("defaults: {memory_mb: 99999}", "defaults.memory_mb: 99999 is not within", id="above a limit"),
        pytest.param("limits: {max_memory_mb: 512}", "defaults.memory_mb: 1024 is not within", id="a limit below"),
        pytest.param("defaults: {cpus: 0}", "defaults.cpus: it must be a number", id="no cpu"),
        pytest.param("images: []", "images: the default image, 'sandbox-base', must be among", id="no image permitted"),
        pytest.param("images: a.test/b", "images:", id="images that are no list"),
        pytest.param("images: [sandbox-base, debian]", "images[1]: name the registry", id="an image of no registry"),
        pytest.param("default_image: debian:12", "default_image: name the registry", id="a default of no registry"),
        pytest.param("default_image: ''", "default_image: image is not", id="no image"),
        pytest.param("limits: {max_idle_timeout_secs: 60}", "defaults.idle_timeout_secs: 1800 is", id="a short limit"),
        pytest.param("limits: {max_cpus: 65}", "limits.max_cpus: it must be a whole number from 1 to 64", id="many"),
        pytest.param("limits: {max_lifetime_secs: 99999999999}", "limits.max_lifetime_secs: it must", id="too long"),
        *(
            pytest.param(
                f"limits: {{{key}: {value}}}", f"limits.{key}: it must be a whole number from {least} to 1000000",
                id=f"{key}: {value}",
            )
            for key, least in (("disk_mb_per_s", 1), ("disk_ops_per_s", 20))
            for value in (str(least - 1), "-1", "1000001", "100.5", "true", "'100'", "none", "[100]")
        ),
        pytest.param("pools: {size: 1}", "pools: it must be a list", id="one pool"),
        pytest.param("pools: [1]", "pools[0]: it must be a mapping", id="a pool of nothing"),
        pytest.param("pools: [{}]", "pools[0].size: it is missing", id="a pool without a size"),
        pytest.param("pools: [{size: 0}]", "pools[0].size: it must be a whole number from 1 to 32", id="an empty pool"),
        pytest.param("pools: [{size: 33}]", "pools[0].size: it must be a whole number from 1", id="a large pool"),
        pytest.param("pools: [{size: 1, cpus: 2}]", "pools[0].cpus: it is not known", id="a pool of another size"),
        pytest.param("pools: [{size: 1, image: debian}]", "pools[0].image: name the reg", id="of no image"),
        pytest.param("pools: [{size: 1}, {size: 2}]", "pools[1].image: 'sandbox-base' has a pool", id="two pools"),
        pytest.param(
            "images: [sandbox-base]\npools: [{size: 1, image: a.test/b}]", "pools[0].image: 'a.test/b' is not among",
            id="a pool of a forbidden image",
        ),
        pytest.param("allow_bind: 1", "allow_bind: it must be true or false", id="a number for bind"),
        pytest.param("network: {ceiling: wide}", "network.ceiling: it must be one of none, allow", id="no mode"),
        pytest.param(
            "network: {default: {mode: open}}", "network.default.mode: open is above network.ceiling, allowlist",
            id="a default above the ceiling",
        ),
        pytest.param(
            "network: {ceiling: none, default: {allow: [a.test]}}",
            "network.default.allow: it has no meaning with mode none", id="names under none",
        ),
        pytest.param("network: {default: {allow: []}}", "network.default.allow: an allowlist that names", id="no name"),
        pytest.param("network: {default: {allow: a.test}}", "network.default.allow: it must be a list", id="no list"),
        pytest.param(
            "network: {default: {allow: [a.test, 1.2.3.4]}}", "network.default.allow[1]: '1.2.3.4' is an address",
            id="an address",
        ),
        pytest.param("network: {may_allow: ['*', 7]}", "network.may_allow[1]: it must be text", id="a number"),
        pytest.param("network: {private: ['*']}", "network.private[0]: '*' is not a name", id="everything private"),
        pytest.param("network: {may_allow_tcp: ['a:443']}", "network.may_allow_tcp[0]: 'a:443'", id="a web port"),
        pytest.param("a: [", "line 1: it is not YAML", id="half a list"),
        pytest.param("a: \x01", "it is not YAML", id="a control character"),
        pytest.param(b"a: \xff", "it is not UTF-8", id="other bytes"),
        pytest.param("x" * (1 << 20) + "y", "it is longer than 1024 KiB", id="too long"),
        pytest.param("[" * 5000, "it is not YAML", id="too deep"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str | bytes, fault: str) -> None:
    _, faults = parsed(text)
    assert any(fault in line for line in faults), faults
    assert all(line.isprintable() and len(line) < 500 for line in faults)


def test_a_list_whose_names_are_all_wrong_is_not_called_empty_too() -> None:
    _, faults = parsed("network: {default: {allow: [1.2.3.4]}}")
    assert len(faults) == 1


def test_every_fault_is_told(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("limits: {max_cpus: -1}\nnetwork: {ceiling: 3, may_allow: [x/, b]}\nwhat: 1\n")
    with pytest.raises(SetupError) as caught:
        read(path, BUILT_IN)
    said = str(caught.value).splitlines()
    assert said[0] == f"--policy {path} is not in order:"
    assert [line.split(":")[0].strip() for line in said[1:]] == [
        "limits.max_cpus", "network.ceiling", "network.may_allow[0]", "what",
    ]  # fmt: skip


def test_a_file_that_others_could_change_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("limits: {max_cpus: 2}")
    assert read(path, BUILT_IN).limits.max_cpus == 2
    path.chmod(0o664)
    with pytest.raises(SetupError, match="nobody else can write"):
        read(path, BUILT_IN)
    with pytest.raises(SetupError, match="No such file"):
        read(tmp_path / "absent", BUILT_IN)
    with pytest.raises(SetupError, match="directory"):
        read(tmp_path, BUILT_IN)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SetupError, match="must be a file"):
        read(tmp_path / "pipe", BUILT_IN)
