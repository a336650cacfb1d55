"""Whose name a commit bears."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import identity, plan, run
from cli.config import Config
from cli.githard import NOWHERE, Place
from sandboxd.errors import SandboxError
from tests.cli.person import Person
from tests.conftest import git, make_repository
from tests.sandboxd.rig import Rig

OWN = "[user]\n\tname = Own\n\temail = own@localhost\n"
REPO = (("user.name", "Repo"), ("user.email", "repo@localhost"))


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("GIT_", "XDG_")) or name == "EMAIL"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return make_repository(tmp_path / "project")


@pytest.mark.parametrize(
    ("own", "repo", "environ", "author", "committer"),
    [
        pytest.param(OWN, (), {}, "Own <own@localhost>", "Own <own@localhost>", id="the person's settings"),
        pytest.param(OWN, REPO, {}, "Repo <repo@localhost>", "Repo <repo@localhost>", id="the repository's come first"),
        pytest.param(OWN, REPO[1:], {}, "Own <repo@localhost>", "Own <repo@localhost>", id="each for itself"),
        pytest.param(OWN, (("user.name", ""),), {}, "Own <own@localhost>", "Own <own@localhost>", id="empty is none"),
        pytest.param(OWN, REPO, {"GIT_AUTHOR_NAME": "Env"}, "Env <repo@localhost>", "Repo <repo@localhost>",
                     id="the environment's come before all"),
        pytest.param("[user]\n\tname = Own\n", (), {"EMAIL": "e@x"}, "Own <e@x>", "Own <e@x>", id="EMAIL at last"),
    ],
)  # fmt: skip
def test_who_it_is(
    own: str, repo: tuple[tuple[str, str], ...], environ: dict[str, str], author: str, committer: str, top: Path
) -> None:
    (top.parent / ".gitconfig").write_text(own)
    for key, value in repo:
        git(top, "config", key, value)
    found = identity.of(Place(top / ".git", top), environ)
    assert f"{found['GIT_AUTHOR_NAME']} <{found['GIT_AUTHOR_EMAIL']}>" == author
    assert f"{found['GIT_COMMITTER_NAME']} <{found['GIT_COMMITTER_EMAIL']}>" == committer


def test_nobody_is_not_made_up(top: Path) -> None:
    with pytest.raises(SandboxError, match=r"git config --global user\.name NAME, and user\.email ADDRESS"):
        identity.of(Place(top / ".git", top), {})
    (top.parent / ".gitconfig").write_text(OWN)
    assert identity.of(NOWHERE, {})["GIT_AUTHOR_NAME"] == "Own", "outside a repository too"


def test_a_runs_commits_are_nobodys_unless_asked(top: Path) -> None:
    (top.parent / ".gitconfig").write_text(OWN)
    for flags, name in (([], "sandbox"), (["--git"], "Own"), (["--git", "-e", "GIT_AUTHOR_NAME=Env"], "Env")):
        made = plan.of(run.parsed([f"--project={top}", *flags], ["x"]), Config(), {}, None)
        assert (made.create.env or {})["GIT_AUTHOR_NAME"] == name


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


def test_what_comes_back_is_the_persons(top: Path, rig: Rig) -> None:
    (top.parent / ".gitconfig").write_text(OWN)
    script = "echo x > x; git add x; git commit -qm one"
    done = Person(top.parent, rig.socket).run("run", "--git", "--name=mine", "--", "sh", "-c", script, cwd=top)
    assert done.returncode == 0, done.stderr
    assert git(top, "log", "-1", "--format=%an %ae %cn", "refs/sandbox/mine").strip() == "Own own@localhost Own"
