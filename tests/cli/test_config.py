"""Settings: which files are read and how, what they may say, what the result is."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import config, config_file, trust
from cli.config import Config, Secret, discover, load
from sandboxd.errors import SandboxError
from tests.cli.person import ROOT, Person
from tests.conftest import counts

DEV = Config(baseline=True, persist_auth=True)
PROD = Config(mode="allowlist", baseline=False, persist_auth=False, profile="prod")


class Place:
    """A person's home with a repository in it, and settings at both places."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.project = home / "project"
        (self.project / ".git").mkdir(parents=True)
        self.user = home / ".config" / "sandbox" / "config.yaml"
        self.user.parent.mkdir(parents=True)

    def says(self, text: str | bytes) -> None:
        self.user.write_bytes(text if isinstance(text, bytes) else text.encode())
        self.user.chmod(0o600)

    def demands(self, text: str | bytes) -> None:
        (self.project / ".sandbox.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())

    def load(self, start: Path | None = None, file: str | None = None, profile: str | None = None) -> Config:
        return load({"HOME": str(self.home)}, start or self.project, file, profile)

    def refused(self, **how: Any) -> str:
        with pytest.raises(SandboxError) as caught:
            self.load(**how)
        assert str(caught.value).isprintable()
        return str(caught.value)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def settings(found: Config) -> Config:
    return dataclasses.replace(found, origin={}, notes=())


@pytest.mark.parametrize(
    ("user", "project", "expected"),
    [
        pytest.param("", "", DEV, id="nothing"),
        pytest.param("# a note\n---\n", "{}", DEV, id="empty documents"),
        pytest.param(
            "image: debian.test/x:1\nenv: {A: b=c, E: ''}\nenv_allow: [EDITOR, EDITOR]\nrouting: [claude, codex]\n"
            "providers: {claude: ai.test, codex: ''}\nmirror: {s3: {bucket: b}}\npersist_auth: false",
            "",
            dataclasses.replace(
                DEV, image="debian.test/x:1", env={"A": "b=c", "E": ""}, env_allow=("EDITOR",),
                routing=("claude", "codex"), providers={"claude": "ai.test", "codex": ""},
                mirror={"s3": {"bucket": "b"}}, persist_auth=False,
            ),
            id="what is the person's to say",
        ),
        pytest.param(
            "network: {mode: allowlist, allow: [a.test, '*.b.test'], deny: [c.b.test], allow_tcp: ['g.test:22']}", "",
            dataclasses.replace(
                DEV, mode="allowlist", allow=("a.test", "*.b.test"), deny=("c.b.test",), allow_tcp=("g.test:22",),
            ),
            id="a network",
        ),
        pytest.param("network: {mode: default}", "", dataclasses.replace(DEV, mode="open"), id="open's other name"),
        pytest.param(
            "network: {mode: open, deny: [a.test]}", "network: {mode: allowlist, baseline: false, deny: [b.test]}",
            dataclasses.replace(DEV, mode="allowlist", baseline=False, deny=("a.test", "b.test")),
            id="a project that tightens: what is denied adds up",
        ),
        pytest.param(
            "network: {allow: [a.test]}", "network: {mode: none}\npersist_auth: false",
            dataclasses.replace(DEV, mode="none", allow=("a.test",), persist_auth=False), id="down to nothing",
        ),
        pytest.param("", "profile: prod", PROD, id="a project that wants prod"),
        pytest.param("profile: prod", "", PROD, id="a person who wants prod"),
        pytest.param("profile: prod", "profile: prod", PROD, id="both"),
        pytest.param("profile: dev", "profile: prod", PROD, id="the stronger of the two"),
        pytest.param(
            "profile: prod\nnetwork: {baseline: true}\npersist_auth: true", "",
            dataclasses.replace(PROD, baseline=True, persist_auth=True), id="what a file says beats the profile's own",
        ),
        pytest.param("", "profile: staging", DEV, id="a profile nobody knows raises nothing"),
        pytest.param("network: ~\nsecrets:\nenv: null", "network:", DEV, id="keys without a value"),
        pytest.param(
            "", "network: {mode: allowlist}", dataclasses.replace(DEV, mode="allowlist"), id="unset is as tight"
        ),
    ],
)  # fmt: skip
def test_what_is_in_force(place: Place, user: str, project: str, expected: Config) -> None:
    place.says(user)
    place.demands(project)
    assert settings(place.load()) == expected


def test_secrets_name_their_sources_and_are_in_order(place: Place) -> None:
    place.says(
        "secrets:\n"
        "  TOKEN: {command: 'pass show x', hosts: [API.test., '*.cdn.test']}\n"
        "  KEY: {file: ~/key}\n"
        "  BESIDE: {file: key}\n"
        "  HERE: {env: OTHER}\n"
    )
    beside = str(place.user.parent / "key")
    assert place.load().secrets == (
        Secret("BESIDE", "file", beside), Secret("HERE", "env", "OTHER"),
        Secret("KEY", "file", os.path.expanduser("~/key")),
        Secret("TOKEN", "command", "pass show x", ("api.test", "*.cdn.test")),
    )  # fmt: skip


def test_an_explicit_file_is_trusted_and_stands_for_the_project_s(place: Place) -> None:
    place.says("env: {A: user, B: user, C: user}\nenv_allow: [D]\nprofile: prod\n"
               "network: {deny: [a.test], allow: [x.test]}")  # fmt: skip
    place.demands("env: {A: project}\nnot even read")
    named = place.home / "named.yaml"
    named.write_text("env: {A: named}\nsecrets: {B: {env: X}, D: {env: X}}\nprofile: dev\n"
                     "network: {mode: open, allow: [y.test]}")  # fmt: skip
    named.chmod(0o644)
    found = place.load(file=str(named))
    assert (dict(found.env), found.env_allow) == ({"A": "named", "C": "user"}, ())
    assert [one.name for one in found.secrets] == ["B", "D"]
    assert (found.mode, found.allow, found.deny, found.profile) == ("open", ("y.test",), ("a.test",), "dev")


def test_the_flag_has_the_last_word_on_the_profile(place: Place) -> None:
    place.says("profile: dev")
    place.demands("profile: prod")
    assert (place.load(profile="dev").profile, place.load().profile) == ("dev", "prod")
    place.says("profile: prod")
    place.demands("")
    assert settings(place.load(profile="dev")) == DEV
    assert "--profile staging: it is dev or prod" in place.refused(profile="staging")


def test_a_project_does_not_choose_what_the_flag_has_ruled_out(place: Place) -> None:
    place.demands("network: {baseline: true}\npersist_auth: true\nprofile: dev")
    assert settings(place.load()) == DEV
    assert "refused: network.baseline, persist_auth." in place.refused(profile="prod")


# -- what a file may not say

BOTH = [
    pytest.param("netwrok: {}", "netwrok: it is not known; known here: env, env_allow, image,", id="an unknown key"),
    pytest.param("network: {ceiling: none}", "network.ceiling: it is not known; known here: allow,", id="one inside"),
    pytest.param("network: {mode: wide}", "network.mode: it must be none, allowlist or open", id="no mode"),
    pytest.param("network: {mode: none, mode: none}", "network.mode: it stands twice", id="a key twice"),
    pytest.param("network: {deny: a.test}", "network.deny: it must be a list", id="no list"),
    pytest.param("network: {deny: [https://a.test]}", "network.deny[0]: it is a host's name", id="an address"),
    pytest.param("network: {deny: ['a.test:443']}", "network.deny[0]: it is a host's name", id="a port"),
    pytest.param("network: {deny: [a.test, 7]}", "network.deny[1]: it must be text", id="a number in a list"),
    pytest.param("network: {deny: [*.a.test]}", "what begins with * must be in quotes", id="a bare star"),
    pytest.param("network: &x {mode: none}", "anchors and aliases are not read", id="an anchor"),
    pytest.param("<<: {mode: none}", "merge keys are not read", id="a merge key"),
    pytest.param("persist_auth: no", "persist_auth: no is read as different things", id="a truth value of YAML 1.1"),
    pytest.param("persist_auth: 'false'", "persist_auth: it must be true or false", id="text for a truth value"),
    pytest.param("network: !!map {}", "tags are not read", id="a tag"),
    pytest.param("--- {}\n--- {}", "a second document", id="two documents"),
    pytest.param("[network]", "it must be a mapping of settings", id="a list for everything"),
    pytest.param("a: 1\nnetwork: [\n", "line 3: it is not YAML", id="half a list"),
    pytest.param(b"#\n# \xff", "line 2: it is not UTF-8", id="other bytes"),
    pytest.param("#\na: \x07", "line 2: it is not YAML: a character that may", id="a control character"),
    pytest.param('#\na: "\\UFFFFFFFF"', "line 2: it is not YAML: a number that is", id="an escape of no character"),
    pytest.param('a: "\\U00110000"', "line 1: it is not YAML: a number that is", id="an escape just beyond the last"),
    pytest.param('a: "\\ud800"', "line 1: a: an escape that is no character", id="half of a surrogate pair"),
    pytest.param('"\\udfff": 1', "line 1: an escape that is no character", id="the other half, as a key"),
    pytest.param(f"%YAML {'9' * 5000}.1\n--- {{}}", "it is not YAML: a number that is", id="a version of many digits"),
    pytest.param("#" * (64 << 10) + "\n", "it is longer than 64 KiB", id="too long"),
    pytest.param("#\n" + "[" * 5000, "line 2: it is not YAML: it is too deep", id="too deep"),
    pytest.param("\x1b[2J\u202e: 1", "it is not", id="a key that would lie in a terminal"),
    pytest.param("hostname: x", "hostname: it is not read; name the sandbox with --name", id="a key of old"),
    pytest.param("cache: {enabled: true}", "cache: it is not read; use volumes", id="another"),
    pytest.param("sync: true\nengine: docker", "sync: it is not read; commits come back by", id="and another"),
]  # fmt: skip
USERS = [
    pytest.param("profile: staging", "profile: it must be dev or prod", id="a profile nobody knows"),
    pytest.param("image: ''", "image: it must be an image's name", id="no image"),
    pytest.param("image: 12", "image: it must be an image's name", id="a number for an image"),
    pytest.param("env: [A]", "env: it must be a mapping", id="a list for the environment"),
    pytest.param("env: {A B: x}", "env.A B: it is not a variable's name", id="no variable's name"),
    pytest.param("env: {PORT: 8080}", "env.PORT: it must be text; put numbers", id="a number for a variable"),
    pytest.param("env: {A: }", "env.A: it must be text", id="nothing for a variable"),
    pytest.param("env: {LD_PRELOAD: x}", "env.LD_PRELOAD: the name is reserved", id="a reserved variable"),
    pytest.param("env_allow: [BASH_ENV]", "env_allow[0]: the name is reserved", id="one that is forwarded"),
    pytest.param("secrets: {ENV: {env: A}}", "secrets.ENV: the name is reserved", id="one that is secret"),
    pytest.param("env_allow: ['A=1']", "env_allow[0]: it is not a variable's name", id="a value to forward"),
    pytest.param("secrets: {A: token}", "secrets.A: it must be a mapping", id="a secret in the file"),
    pytest.param("secrets: {A: {}}", "secrets.A: it has exactly one of file, command and env", id="a source of none"),
    pytest.param("secrets: {A: {file: a, env: b}}", "secrets.A: it has exactly one of", id="two sources"),
    pytest.param("secrets: {A: {fiel: a}}", "secrets.A.fiel: it is not known; known here: command,", id="no source"),
    pytest.param("secrets: {A: {env: 'a b'}}", "secrets.A.env: it is not a variable's name", id="no variable"),
    pytest.param("secrets: {A: {command: []}}", "secrets.A.command: it must be text", id="a list for a command"),
    pytest.param("secrets: {A: {env: B, hosts: a.test}}", "secrets.A.hosts: it must be a list", id="hosts of no list"),
    pytest.param("secrets: {A: {env: B, hosts: [ä.test]}}", "in its xn-- form", id="a name that is not ASCII"),
    pytest.param("env: {A: b}\nsecrets: {A: {env: B}}", "env and secrets both say A: keep one", id="two that set one"),
    pytest.param("env: {A: b}\nenv_allow: [A]", "env and env_allow both say A: keep one", id="or forward it"),
    pytest.param("network: {allow_tcp: ['a:0']}", "network.allow_tcp[0]: it is HOST:PORT", id="no port"),
    pytest.param("network: {baseline: 1}", "network.baseline: it must be true or false", id="a number for a truth"),
    pytest.param("routing: [claude, other]", "routing[1]: no such agent; there are claude,", id="an unknown agent"),
    pytest.param("providers: {other: a.test}", "providers.other: no such agent", id="a provider of none"),
    pytest.param("providers: {claude: 'https://a'}", "providers.claude: it must be the name of", id="an address"),
    pytest.param("mirror: s3", "mirror: it must be a mapping", id="no mapping"),
    *(
        pytest.param(f"{key}: x", f"{key}: it is not read; {what}", id=f"{key}, which is not read")
        for key, what in config_file.DEAD.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), [*BOTH, *USERS])
def test_what_the_person_s_file_may_not_say(place: Place, text: str | bytes, said: str) -> None:
    place.says(text)
    message = place.refused()
    assert message.startswith(f"{place.user}: ") and said in message


@pytest.mark.parametrize(("text", "said"), BOTH)
def test_what_no_file_may_say(place: Place, text: str | bytes, said: str) -> None:
    place.demands(text)
    message = place.refused()
    assert message.startswith(f"{place.project}/.sandbox.yaml: ") and said in message


def test_every_fault_is_told_but_no_more_than_a_person_reads(place: Place) -> None:
    place.says("image: 1\nnetwork: {mode: 2, allow: [3], x: 4}\nports: [5]\nzz: 6")
    told = place.refused().partition(": ")[2].split("; ")
    places = [fault.partition(": ")[0] for fault in told]
    assert set(places) >= {"ports", "image", "network.mode", "network.allow[0]", "network.x", "zz"}
    place.says("".join(f"key{number}: 1\n" for number in range(100)))
    assert place.refused().endswith("; and 80 more")


# -- what a project may not do

PRIVILEGED = {
    "image": "debian", "env": "{A: b}", "env_allow": "[A]", "network.allow": "[a.test]", "secrets": "{A: {env: B}}",
    "network.allow_tcp": "['a.test:22']", "routing": "[claude]", "providers": "{claude: evil.test}",
    "mirror": "{s3: {bucket: b}}", "network.mode": "open", "cache.paths": "[/x]", "home": "/", "mounts": "[/:/x]",
    "ports": "[80]", "security": "{seccomp: unconfined}", "snapshot": "{every: 1m}", "user": "root", "workdir": "/etc",
}  # fmt: skip


def written(key: str, value: str) -> str:
    outer, dot, inner = key.partition(".")
    return f"{outer}: {{{inner}: {value}}}\n" if dot else f"{outer}: {value}\n"


@pytest.mark.parametrize("key", PRIVILEGED)
def test_a_project_may_not_say_a_privileged_key(place: Place, key: str) -> None:
    place.demands(written(key, PRIVILEGED[key]))
    assert f"a project may only tighten a run; refused: {key}. To have" in place.refused()
    place.demands(written(key, "" if "." not in key else "~"))
    if key != "network.mode":
        assert f"refused: {key}." in place.refused(), "a key without a value is refused too"


def test_all_refused_keys_are_listed_in_order_with_the_three_ways_out(place: Place) -> None:
    place.demands("secrets: {}\nprofile: dev\nenv: {}\nports: []\nzz: 1\n"
                  "network: {mode: open, allow: [], baseline: true}")  # fmt: skip
    place.says("profile: prod")
    file = place.project / ".sandbox.yaml"
    assert place.refused() == (
        f"{file}: a project may only tighten a run; refused: env, network.allow, network.baseline, network.mode, "
        "ports, profile, secrets. To have them all the same, put them into your own config.yaml, use flags, or trust "
        f"the file with --config {file}"
    )
    place.demands("image: x\nnetwork: {deny: [1]}")
    assert "refused: image. To" in place.refused(), "what is refused comes before what is malformed"


def test_the_file_to_trust_is_named_as_a_shell_takes_it(place: Place) -> None:
    place.project = place.project.rename(place.home / "my project")
    place.demands("image: x")
    assert place.refused().endswith(f"trust the file with --config '{place.project}/.sandbox.yaml'")


def test_the_file_that_a_project_may_not_have_is_taken_with_config(place: Place) -> None:
    place.demands("env: {A: b}\nnetwork: {mode: open}")
    file = place.project / ".sandbox.yaml"
    file.chmod(0o644)
    found = place.load(file=str(file))
    assert (found.env, found.mode) == ({"A": "b"}, "open")


MODES = ["none", "allowlist", None, "open"]
STRENGTH: dict[str | None, int] = {"none": 2, "allowlist": 1, None: 1, "open": 0}


@pytest.mark.parametrize("asked", ["none", "allowlist", "open", "default"])
@pytest.mark.parametrize("user", MODES)
def test_a_project_s_network_is_never_weaker_than_what_is_in_force(place: Place, user: str | None, asked: str) -> None:
    place.says(f"network: {{mode: {user}}}" if user else "")
    place.demands(f"network: {{mode: {asked}}}")
    wanted = "open" if asked == "default" else asked
    if STRENGTH[wanted] < STRENGTH[user]:
        assert "refused: network.mode." in place.refused()
    else:
        assert place.load().mode == wanted


def test_whatever_a_project_says_the_result_is_as_tight_or_it_is_refused(place: Place) -> None:
    """Every combination of what either may say about reach, against what holds without the project."""
    users = [
        f"{mode}{rest}" for mode in ("", "network: {mode: none}\n", "network: {mode: open}\n")
        for rest in ("", "profile: prod\n", "persist_auth: false\n")
    ]  # fmt: skip
    projects = [
        f"network: {{{mode}{base}}}\n{rest}" for mode in ("", "mode: none, ", "mode: allowlist, ", "mode: open, ")
        for base in ("", "baseline: true", "baseline: false")
        for rest in ("", "profile: dev\n", "profile: prod\n", "persist_auth: true\n")
    ]  # fmt: skip
    kept = refused = 0
    for user in users:
        place.says(user)
        place.demands("")
        before = place.load()
        for project in projects:
            place.demands(project)
            try:
                after = place.load()
            except SandboxError:
                refused += 1
                continue
            kept += 1
            assert STRENGTH[after.mode] >= STRENGTH[before.mode], (user, project)
            assert not (after.baseline and not before.baseline), (user, project)
            assert not (after.persist_auth and not before.persist_auth), (user, project)
            assert (before.profile, after.profile) != ("prod", "dev"), (user, project)
    assert kept > 100 and refused > 100


def test_every_setting_is_classified() -> None:
    """A new field of `Config` needs a key, and a key needs a rule for what a project may do with it."""
    beside = {"origin", "notes"}
    fields = {each.name for each in dataclasses.fields(Config)} - beside
    by_key = {key.rpartition(".")[2] for key in trust.LIVE}
    assert fields == by_key and len(by_key) == len(trust.LIVE)
    assert not set(trust.DEAD) & set(trust.LIVE)
    assert {key.partition(".")[0] for key in trust.DEAD} <= set(config_file.DEAD)
    assert not {key.partition(".")[0] for key in trust.LIVE} & set(config_file.DEAD)


def test_every_key_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE) == list(trust.LIVE)
    former = page.partition("Keys of earlier designs")[2].partition("\n\n")[0]
    assert set(config_file.DEAD) <= set(re.findall(r"`([a-z]+)`", former))
    for key, rule in trust.LIVE.items():
        [row] = re.findall(rf"^\| `{re.escape(key)}` \|.*\|$", page, re.MULTILINE)
        assert row.endswith("| refused |") is (rule is trust.LIVE["image"]), key


def test_every_key_that_is_read_is_known_to_the_rules(place: Place) -> None:
    place.says("x: 1\nnetwork: {x: 1}")
    told = place.refused()
    parts = told.split("known here: ")[1:]
    known = {name.strip() for part in parts for name in part.partition(";")[0].split(",")}
    assert known - {"network"} == {key.rpartition(".")[2] for key in trust.LIVE}


# -- the files themselves


def test_where_no_settings_can_be_looked_for(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    for start, flags, said in (
        (tmp_path, ["--project", "loop"], "loop: its links lead nowhere"),
        (gone, [], ".: this directory is gone: change to one that is there"),
        (gone, ["--config", "x"], ".: this directory is gone: change to one that is there"),
        (gone, ["--bind", "."], ".: this directory is gone: change to one that is there"),
    ):
        start.mkdir(exist_ok=True)
        argv = ["sh", "-c", script if start == gone else 'cd "$1" && shift && exec "$@"', "sh", str(start)]
        argv += [sys.executable, "-m", "cli", "run", *flags, "--", "true"]
        done = subprocess.run(argv, capture_output=True, env=os.environ | {"HOME": str(tmp_path)}, check=False)
        assert (done.returncode, done.stderr.decode()) == (1, f"sandbox-cli: {said}\n")


@pytest.mark.parametrize(
    ("above", "start", "found"),
    [
        pytest.param(["repo/.git/"], "repo/a/b", "repo/.sandbox.yaml", id="up to the repository's top"),
        pytest.param(["repo/.git/", "repo/a/.sandbox.yaml"], "repo/a/b", "repo/a/.sandbox.yaml", id="the nearest one"),
        pytest.param(["repo/.git"], "repo/a/b", "repo/.sandbox.yaml", id="a worktree's .git is a file"),
        pytest.param(["repo/a/.git/"], "repo/a/b", None, id="not above the repository"),
        pytest.param([], "repo/a/b", "repo/.sandbox.yaml", id="outside one, up to home"),
        pytest.param([".sandbox.yaml"], "repo/a", "repo/.sandbox.yaml", id="the nearest below home"),
        pytest.param(["../.sandbox.yaml"], "other", None, id="not above home"),
        pytest.param(["../out/.sandbox.yaml", "../.sandbox.yaml"], "../out", "../out/.sandbox.yaml", id="outside home"),
        pytest.param(["../.sandbox.yaml"], "../out", None, id="outside home only there"),
    ],
)
def test_which_file_is_the_project_s(tmp_path: Path, above: list[str], start: str, found: str | None) -> None:
    home = tmp_path / "home"
    for name in (start, "repo", "other"):
        (home / name).mkdir(parents=True, exist_ok=True)
    for name in ["repo/.sandbox.yaml", *above]:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("")
    assert discover(home / start, home) == (None if found is None else (home / found).resolve())


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda path: path.symlink_to("/etc/passwd"), "it is a symbolic link", id="a link"),
        pytest.param(lambda path: path.symlink_to("nowhere"), "it is a symbolic link", id="a link to nothing"),
        pytest.param(lambda path: path.symlink_to("other.yaml"), "it is a symbolic link", id="a link to its neighbour"),
        pytest.param(os.mkfifo, "it is not a regular file", id="a pipe"),
        pytest.param(Path.mkdir, "it is not a regular file", id="a directory"),
        pytest.param(lambda path: path.write_bytes(bytes(50 << 20)), "64 KiB", id="50 MiB"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "it is a symbolic link", id="a device without end"),
    ],
)
def test_a_project_s_file_is_a_small_regular_file_of_its_own(
    place: Place, make: Callable[[Path], object], said: str
) -> None:
    (place.project / "other.yaml").write_text("network: {mode: none}")
    replaced(place.project / ".sandbox.yaml", make)
    message = place.refused()
    assert said in message and "root:" not in message


def test_each_file_is_opened_once(place: Place) -> None:
    """What is judged is what is used: a file that changes meanwhile changes nothing."""
    place.says("network: {mode: open}")
    place.demands("network: {mode: none}")
    opened = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(("config.yaml", ".sandbox.yaml")):
            opened.append(Path(str(args[0])).name)

    sys.addaudithook(watch)
    assert place.load().mode == "none"
    assert opened == ["config.yaml", ".sandbox.yaml"]


def test_a_file_that_comes_in_pieces_is_read_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """read(2) may give less than there is, as from a file system over a network."""
    place.says("network: {mode: open}")
    place.demands("network: {mode: none}")
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 7)))
    assert place.load().mode == "none"


def test_a_file_that_can_name_commands_is_nobody_else_s_to_write(place: Place) -> None:
    place.says("network: {mode: none}")
    place.user.chmod(0o664)
    assert f"others can write it: chmod go-w {place.user}" in place.refused()
    place.user.chmod(0o644)
    assert place.load().mode == "none"
    real = place.home / "dotfiles.yaml"
    place.user.rename(real)
    place.user.symlink_to(real)
    assert place.load().mode == "none", "the person's own may be a link"
    if os.geteuid() == 0:
        os.chown(real, 12345, -1)
        assert "it belongs to uid 12345" in place.refused()


def test_a_file_asked_for_must_be_there(place: Place) -> None:
    (place.home / "x.yml").touch()
    asked = str(place.home / "x.yaml")
    assert place.refused(file=asked) == f"--config {asked}: no such file; there is {place.home}/x.yml"
    assert place.refused(file="/nowhere.yaml") == "--config /nowhere.yaml: no such file"
    assert place.refused(file="") == "--config: its value is empty; name a file, or leave the flag out"


def test_a_file_of_nearly_the_right_name_is_pointed_at(place: Place) -> None:
    (place.project / ".sandbox.yml").write_text("network: {mode: none}")
    assert place.load().notes == (
        f"{place.project}/.sandbox.yml is not read: a project's settings are called .sandbox.yaml",
    )


def test_a_local_mistake_is_told_where_no_daemon_runs(tmp_path: Path) -> None:
    person = Person(tmp_path, tmp_path / "none.sock")
    (tmp_path / ".sandbox.yaml").write_text("env: {A: b}\nnetwork: {allow: ['\u202ex']}\n")
    done = person.run("run", "--", "true")
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"sandbox-cli: {tmp_path}/.sandbox.yaml: a project may only tighten a run")
    assert done.stderr.count(b"\n") == 1
    assert config.PROJECT_FILE in done.stderr.decode()


# -- whatever else a file may hold

WORDS = [
    *(key.rpartition(".")[2] for key in trust.LIVE), *(key.partition(".")[0] for key in trust.DEAD), "network", "file",
    "command", "hosts", "s3", "none", "open", "allowlist", "prod", "dev", "true", "~", "no", "0x1F", "-1", "1.5", "''",
    "a.test", "'*.a.test'", "*a", "&a b", "!!str x", "<<", "PATH", "ENV", "\u202e", "\x1b[2J", "'\\0'", '"\\0"',
    "claude",
]  # fmt: skip


def anything(seed: random.Random, depth: int = 0) -> str:
    """Mostly YAML, mostly of words that mean something somewhere."""
    kind = seed.randrange(8)
    if depth == 0 or (kind < 4 and depth < 5):
        entries = (f"{seed.choice(WORDS)}: {anything(seed, depth + 1)}" for _ in range(seed.randrange(5)))
        return "{" + ", ".join(entries) + "}"
    if kind < 6 and depth < 5:
        return "[" + ", ".join(anything(seed, depth + 1) for _ in range(seed.randrange(4))) + "]"
    return seed.choice(WORDS)


def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(place: Place, seed: random.Random) -> None:
    outcomes = {"read": 0, "refused": 0}
    for number in range(counts(600, 20_000)):
        text = anything(seed).encode()
        if number % 4 == 0 and text:
            at = seed.randrange(len(text))
            text = text[:at] + seed.randbytes(2) + text[at + 1 :]
        place.demands(text if number % 2 else b"")
        place.says(b"" if number % 2 else text)
        try:
            found = place.load()
        except SandboxError as refused:
            assert len(str(refused)) < 6000
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert not number % 2 or (not found.env and not found.secrets and found.mode != "open"), text
    assert min(outcomes.values()) > 10, outcomes
