"""What is said, before a merge, of files that something outside the sandbox runs later."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli import aliases, executed, fate, gate, gitconfig, manifests, recover, repository
from cli.aliases import Aliases
from cli.fate import Held, Seen, State
from cli.gate import Finding, Review
from cli.githard import Bounds
from cli.session import Session
from tests.cli.person import Person
from tests.cli.planted.world import git, text
from tests.conftest import counts, make_repository
from tests.sandboxd.rig import Rig

RUN_BY: list[tuple[str, str]] = [
    (".github/workflows/ci.yml", "GitHub Actions"),
    (".github/actions/setup/action.yml", "GitHub Actions"),
    ("pkg/action.yaml", "GitHub Actions"),
    (".gitlab-ci.yml", "GitLab"),
    ("ci/build.gitlab-ci.yml", "GitLab"),
    (".circleci/config.yml", "CircleCI"),
    ("Jenkinsfile", "Jenkins"),
    ("deploy/Jenkinsfile.prod", "Jenkins"),
    ("azure-pipelines-nightly.yml", "Azure"),
    (".buildkite/pipeline.yml", "Buildkite"),
    (".travis.yml", "Travis"),
    (".drone.star", "Drone"),
    (".woodpecker/build.yaml", "Woodpecker"),
    ("bitbucket-pipelines.yml", "Bitbucket"),
    (".vscode/tasks.json", "Visual Studio Code"),
    ("web/.vscode/settings.json", "Visual Studio Code"),
    ("all.code-workspace", "Visual Studio Code"),
    (".idea/runConfigurations/run.xml", "JetBrains"),
    (".nvim.lua", "an editor obeys"),
    (".dir-locals.el", "an editor obeys"),
    (".devcontainer/devcontainer.json", "container"),
    (".husky/pre-commit", "hooks"),
    (".githooks/pre-push", "hooks"),
    (".pre-commit-config.yaml", "commit or push"),
    ("lefthook.yml", "commit or push"),
    (".envrc", "shell loads"),
    (".config/mise/config.toml", "shell loads"),
    (".tool-versions", "shell loads"),
    ("flake.nix", "shell that nix"),
    (".claude/settings.json", "settings, commands and hooks"),
    (".mcp.json", "settings, commands and hooks"),
    ("docs/AGENTS.md", "instructions"),
    (".cursor/rules/x.mdc", "settings, commands and hooks"),
    (".github/copilot-instructions.md", "instructions"),
    (".sandbox.yaml", "sandbox-cli reads it"),
    ("setup.py", "Python"),
    ("tests/conftest.py", "Python"),
    ("pyproject.toml", "Python"),
    ("lib/evil.pth", "Python"),
    (".npmrc", "npm"),
    (".yarn/releases/yarn-4.cjs", "npm"),
    ("requirements-dev.txt", "which packages are installed"),
    ("web/package-lock.json", "which packages are installed"),
    ("Cargo.lock", "which packages are installed"),
    ("go.mod", "which packages are installed"),
    ("crates/x/build.rs", "cargo"),
    (".cargo/config.toml", "cargo"),
    ("Gemfile", "Ruby"),
    ("lib/tasks/db.rake", "Ruby"),
    ("gradle/wrapper/gradle-wrapper.jar", "Gradle"),
    ("mvnw", "Gradle, Maven"),
    ("Makefile", "make"),
    ("build/rules.mk", "make"),
    ("justfile", "make, just"),
    ("src/CMakeLists.txt", "make, just, task or another tool"),
    ("vite.config.ts", "JavaScript"),
    (".babelrc", "JavaScript"),
    ("web/.eslintrc.json", "JavaScript"),
    ("jest.config.json", "JavaScript"),
    ("Dockerfile.dev", "containers"),
    ("docker-compose.override.yml", "containers"),
    ("infra/main.tf", "deploy"),
]
FORGIVEN: list[tuple[str, str]] = [
    (".GitHub/Workflows/CI.YML", "GitHub Actions"),
    (".VSCODE/tasks.json", "Visual Studio Code"),
    (".vs\u200ccode/tasks.json", "Visual Studio Code"),
    (".vscode./tasks.json", "Visual Studio Code"),
    (".vscode /tasks.json", "Visual Studio Code"),
    (".vscode\\tasks.json", "Visual Studio Code"),
    ("Makefile::$DATA", "make"),
    ("ma\u212aefile", "make"),  # KELVIN SIGN folds to k
    ("MAKEFILE", "make"),
]
NOBODY = [
    "src/main.py", "README.md", "package-lock.txt", "docs/.github/workflows/ci.yml", "x/.travis.yml", "makefiles/a.c",
    "vscode/tasks.json", ".vscode", "husky/x", "docs/Makefile.html.txt/x", "CLAUDE.md/notes.txt", "setup.py.txt",
    "a" * 64_000, "\udcff\udcfe", "", "/", "//",
]  # fmt: skip


@pytest.mark.parametrize(("path", "who"), RUN_BY + FORGIVEN, ids=[ascii(path) for path, _ in RUN_BY + FORGIVEN])
def test_a_file_that_something_runs_is_known_by_its_name(path: str, who: str) -> None:
    found = executed.fit(path)
    assert found is not None and who in found.reason and found.kind in executed.KINDS


@pytest.mark.parametrize("path", NOBODY, ids=lambda path: ascii(path)[:40])
def test_other_names_are_nobodys(path: str) -> None:
    assert executed.fit(path) is None


def test_every_pattern_of_the_table_finds_its_own_row() -> None:
    for kind, reason, patterns in executed.ROWS:
        assert kind in executed.KINDS and reason.isprintable()
        for pattern in patterns.split():
            example = pattern.strip("/").replace("*", "x") + ("/x" if pattern.endswith("/") else "")
            assert executed.fit(example) is not None, pattern
            below = executed.fit(f"some/where/{example}")
            assert pattern.startswith("/") or below is not None, pattern


PACKAGE = b'{"name": "x", "version": "1", "scripts": {"test": "jest"}, "dependencies": {"a": "1"}}'


@pytest.mark.parametrize(
    ("new", "said"),
    [
        pytest.param(PACKAGE.replace(b'"1", "s', b'"2", "s'), "", id="its version: nothing"),
        pytest.param(PACKAGE.replace(b"jest", b"sh x"), "npm runs its scripts: test", id="a script"),
        pytest.param(
            PACKAGE.replace(b'"test"', b'"\\u001b[2Jprepare\\u202e"'), "npm runs its scripts: [2Jprepare",
            id="a script whose name is no text",
        ),
        pytest.param(PACKAGE.replace(b'"a": "1"', b'"a": "2"'), "obeys it: dependencies", id="a dependency"),
        pytest.param(PACKAGE[:-1] + b', "husky": {"hooks": {}}}', "obeys it: husky", id="hooks of a tool"),
        pytest.param(b"{", "cannot be read", id="no JSON"),
        pytest.param(b"[" * 100_000, "cannot be read", id="nested without end"),
        pytest.param(b"[]", "cannot be read", id="no object"),
    ],
)  # fmt: skip
def test_package_json_matters_by_what_changed_in_it(new: bytes, said: str) -> None:
    reasons = manifests.package_json(PACKAGE, new)
    assert [said in reason for reason in reasons] == ([True] if said else [])
    assert all(reason.isprintable() for reason in reasons)


def test_a_new_package_json_is_all_new() -> None:
    assert len(manifests.package_json(None, PACKAGE)) == 2
    assert manifests.package_json(b"{{{", b'{"name": "x"}') == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (None, b"*.png binary\n*.py diff=python\n*.md merge=union\n", []),
        (None, b"*.bin filter=lfs diff=lfs merge=lfs -text\n", ["diff=lfs, filter=lfs, merge=lfs"]),
        (b"*.bin filter=lfs\n", b"*.bin filter=lfs\n*.txt text\n", []),
        (b"*.bin filter=lfs\n", b"* filter=lfs\n", ["filter=lfs"]),
        (None, b"[attr]mine filter=q7\n* mine\n", ["filter=q7"]),
        (None, b"\xff filter=\xff\n", ["filter="]),
        (None, b"*.py filter=python diff=union merge=python\n", ["diff=union, filter=python, merge=python"]),
        (None, b"*.c diff=default merge=text\n*.ini merge=binary\n", []),
    ],
)
def test_attributes_matter_by_their_drivers(old: bytes | None, new: bytes, said: list[str]) -> None:
    reasons = manifests.attributes(old, new)
    assert len(reasons) == len(said) and all(one in reason for one, reason in zip(said, reasons, strict=True))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (b'[submodule "a"]\n\tpath = a\n\turl = ../a\n', []),
        (b'[submodule "a"]\n\tpath = b\n\turl = https://evil.test/a\n', ["submodule a comes from https://evil.test/a"]),
        (b'[submodule "a"]\n\turl = "--upload-pack=x"\n', ["submodule a comes from --upload-pack=x"]),
        (b'[submodule "a"]\n\turl = ../a\n\tupdate = !x\n', ["submodule a is updated by !x"]),
        (b'[submodule "b.\xff"]\n\turl = "ext::x\x1b[2J"\n', ["submodule b. comes from ext::x [2J"]),
        (b"[submodule\n", ["git cannot read it: "]),
        (b"[include]\n\tpath = /etc/passwd\n", []),
    ],
)
def test_submodules_are_shown_with_where_they_come_from(new: bytes, said: list[str]) -> None:
    reasons = manifests.gitmodules(b'[submodule "a"]\n\tpath = a\n\turl = ../a\n', new)
    assert len(reasons) == len(said) and all(r.startswith(one) for one, r in zip(said, reasons, strict=True)), reasons


@pytest.mark.parametrize(
    ("path", "target", "stays"),
    [
        ("a", b"b", True),
        ("a/b/c", b"../../d/e", True),
        ("a", b"./b//c/.", True),
        ("a", b"..", False),
        ("a/b", b"../..", False),
        ("a", b"/etc/passwd", False),
        ("a", b"C:\\x", False),
        ("a", b"..\\x", False),
        ("a", b"x/../../y", False),
        ("a/b/c", b"x/../y", False),  # stays only where x is no link itself
        ("a", b".git/hooks", False),
        ("a", b".GIT/config", False),
        ("a", b".g\xe2\x80\x8cit/config", False),
        ("a", b"git~1", False),
        ("notes", b"/home/alice/.ssh/authorized_keys", False),
        ("docs", b"../../", False),
        ("a", None, False),
    ],
)
def test_a_link_that_leaves_the_tree(path: str, target: bytes | None, stays: bool) -> None:
    assert (manifests.link(path, target) == []) is stays


def test_links_that_are_said_to_stay_do_stay_on_disk(tmp_path: Path) -> None:
    """Trees of links that lead through one another: where none is reported, none leaves."""
    words = ["..", "a", "b", "l0", "l1", "l2", "."]
    rng = random.Random(7)
    stayed = left = 0
    for number in range(counts(300, 3000)):
        top = tmp_path / str(number)
        (top / "a/b").mkdir(parents=True)
        links = {}
        for name in ("l0", "l1", "l2"):
            path = rng.choice(["", "a/", "a/b/"]) + name
            target = "/".join(rng.choice(words) for _ in range(rng.randint(1, 4)))
            os.symlink(target, top / path)
            links[path] = target.encode()
        reported = [path for path, target in links.items() if manifests.link(path, target)]
        outside = [path for path in links if not _below(top, os.path.realpath(top / path))]
        if not reported:
            stayed += 1
            assert not outside, links
        left += bool(outside)
    assert stayed > 20 and left > 20, "both kinds must have come up"


def _below(top: Path, path: str) -> bool:
    return path == str(top) or path.startswith(f"{top}/")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("core.fsmonitor", True), ("CORE.FSMONITOR", True), ("core.hookspath", True), ("filter.a.b.clean", True),
        ("includeif.gitdir:~/x.path", True), ("alias.st", True), ("credential.https://x.test.helper", True),
        ("lfs.customtransfer.x.path", True), ("diff.external", True), ("pager.log", True), ("merge.x.driver", True),
        ("remote.o.url", False), ("user.name", False), ("core.autocrlf", False), ("branch.main.merge", False),
    ],
)  # fmt: skip
def test_settings_that_name_programs_or_files(name: str, files: bool) -> None:
    assert gitconfig.names_files(name) is files


# Real trees.


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("template") / "project"
    make_repository(top)
    return top


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "project", symlinks=True))


def changed(project: Path, change: Callable[[Path], object]) -> Review:
    """What is said of one commit with this change."""
    base = text(project, "rev-parse", "HEAD")
    change(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "change")
    repo = repository.discover(project)
    assert repo is not None
    return gate.review(repo, base, text(project, "rev-parse", "HEAD"))


def write(files: dict[str, str], mode: int = 0o644) -> Callable[[Path], None]:
    def change(top: Path) -> None:
        for name, content in files.items():
            path = top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(mode)

    return change


def found(review: Review) -> list[tuple[str, str, str]]:
    return [(one.path, one.change, one.kind) for one in review.findings]


def test_nothing_is_said_where_nothing_runs(project: Path) -> None:
    review = changed(project, write({"src/a.py": "x", "README.md": "y", "hello.txt": "z"}))
    assert (review, gate.lines(review)) == (Review(), [])


def test_files_are_listed_with_who_runs_them_what_acts_by_itself_first(project: Path) -> None:
    write({"Makefile": "all:\n"})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "before")
    files = {
        "Makefile": "all: x\n",
        ".github/workflows/ci.yml": "x",
        ".vscode/tasks.json": "{}",
        ".husky/pre-commit": "",
    }
    review = changed(project, write(files))
    assert found(review) == [
        (".husky/pre-commit", "added", "hook"),
        (".vscode/tasks.json", "added", "editor"),
        (".github/workflows/ci.yml", "added", "ci"),
        ("Makefile", "changed", "build"),
    ]
    assert gate.lines(review) == [
        "before you merge, look at what would run or act outside the sandbox (4):",
        "- .husky/pre-commit (added): git runs hooks from here where it is set up to",
        "- .vscode/tasks.json (added): Visual Studio Code starts tasks and programs from it",
        "- .github/workflows/ci.yml (added): GitHub Actions runs it",
        "- Makefile (changed): make, just, task or another tool runs it",
    ]


def test_a_file_that_is_gone_runs_no_more_and_a_renamed_one_does(project: Path) -> None:
    write({"Makefile": "all:\n", "old.txt": "jobs: {}\n" * 50})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "before")

    def change(top: Path) -> None:
        (top / "Makefile").unlink()
        (top / ".github/workflows").mkdir(parents=True)
        (top / "old.txt").rename(top / ".github/workflows/new.yml")

    git(project, "config", "diff.renames", "copies")
    assert found(changed(project, change)) == [(".github/workflows/new.yml", "added", "ci")]


def test_a_project_s_settings_that_are_gone_matter_for_the_next_run(project: Path) -> None:
    write({".sandbox.yaml": "network: {mode: none}\n", "web/.sandbox.yaml": "", "a.txt": ""})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "before")

    def change(top: Path) -> None:
        for name in (".sandbox.yaml", "web/.sandbox.yaml", "a.txt"):
            (top / name).unlink()

    assert found(changed(project, change)) == [
        (".sandbox.yaml", "removed", "agent"), ("web/.sandbox.yaml", "removed", "agent"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (".vscode", "editor"), (".VSCode", "editor"), (".husky", "hook"), ("web/.claude", "agent"),
        ("CLAUDE.md", "agent"), (".github/workflows", "ci"), ("Makefile", "build"), ("notes", ""),
        (".github", "agent"), (".cargo", "package"), ("x/.gith", ""),
    ],
)  # fmt: skip
def test_a_link_in_the_place_of_what_runs_is_listed_though_it_stays_inside(
    project: Path, name: str, kind: str
) -> None:
    def change(top: Path) -> None:
        write({"docs/x/tasks.json": "{}"})(top)
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink("../" * name.count("/") + "docs/x", top / name)

    listed = found(changed(project, change))
    assert [one for one in listed if one[0] == name] == ([(name, "added", kind)] if kind else [])


LED = [
    pytest.param("CLAUDE.md", "docs/n.txt", "docs/n.txt", "agent", id="a file"),
    pytest.param(".vscode", "docs/v", "docs/v/tasks.json", "editor", id="a directory"),
    pytest.param(".github", "docs", "docs/workflows/x.yml", "ci", id="a directory that holds it"),
    pytest.param("x/y/Makefile", "../../docs/m", "docs/m", "build", id="from below"),
    pytest.param("package.json", "docs/p", "docs/p", "package", id="one whose contents would decide"),
    pytest.param("all", ".", "hello", "", id="the top itself, and nothing that runs"),
    pytest.param("notes", "docs/n.txt", "docs/n.txt", "", id="a link that nothing runs"),
    pytest.param("CLAUDE.md", "../docs/n.txt", "docs/n.txt", "", id="one that leaves the tree"),
    pytest.param("Makefile", "Makefile", "docs/n.txt", "", id="one that leads to itself"),
]


@pytest.mark.parametrize(("link", "target", "path", "kind"), LED)
def test_what_an_unchanged_link_leads_to_is_listed_as_what_runs(
    project: Path, link: str, target: str, path: str, kind: str
) -> None:
    (project / link).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, project / link)
    write({path: "before"})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "before")
    assert found(changed(project, write({path: "after"}))) == ([(path, "changed", kind)] if kind else [])


def test_a_file_that_gits_setting_names_through_a_link(project: Path) -> None:
    os.symlink("docs/h", project / "hooks")
    write({"docs/h/x": "before"})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "before")
    git(project, "config", "core.hooksPath", "hooks")
    assert found(changed(project, write({"docs/h/x": "after"}))) == [("docs/h/x", "changed", "git")]


@pytest.mark.parametrize(
    ("links", "path", "names"),
    [
        ({"a": "b", "b": "c"}, "c/d", {"a/d", "b/d"}),
        ({"a": "d", "d/e": "../f"}, "f/x", {"d/e/x", "a/e/x"}),
        ({"a": "b/../c"}, "c", {"a"}),
        ({"a": "/c", "b": "../c", "c": "d", "d": "c"}, "c", set()),
        ({"a": "b"}, "bc", set()),
        ({"x/\udcff": "../c"}, "c", {"x/\udcff"}),
    ],
    ids=["two hops", "a link below a link", "up and down", "nowhere", "a name that only begins so", "no text"],
)
def test_the_other_names_of_a_file(links: dict[str, str], path: str, names: set[str]) -> None:
    assert set(Aliases(links).of(path)) == names


def test_links_to_the_top_give_no_names_without_end() -> None:
    links = {name: "." for name in "abcdefgh"} | {"deep/" * 500 + "x": "../" * 500}
    assert len(list(Aliases(links).of("Makefile"))) <= aliases.NAMES
    long = {f"{number}": f"{number + 1}" for number in range(1000)}
    began = time.monotonic()
    assert list(Aliases(long).of("1000"))
    assert time.monotonic() - began < 10


def test_more_links_than_are_followed_is_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LINKS", 2)
    for number in range(3):
        os.symlink("hello", project / f"l{number}")
    review = changed(project, lambda top: None)
    assert review.unseen == "it has 3 symbolic links, and 2 were followed"


def test_new_programs_links_and_submodules(project: Path) -> None:
    write({"was.sh": "x"}, 0o755)(project)
    write({"becomes.sh": "x", "turns": "x"})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "before")

    def change(top: Path) -> None:
        write({"was.sh": "changed", "new.sh": "x", "becomes.sh": "x"}, 0o755)(top)
        (top / "turns").unlink()
        for name, target in (("turns", "../x"), ("notes", "/home/alice/.ssh/authorized_keys"), ("fine", "was.sh")):
            os.symlink(target, top / name)
        git(top, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},lib")
        (top / "lib").mkdir()

    review = changed(project, change)
    assert found(review) == [
        ("notes", "added", "link"),
        ("turns", "changed", "link"),
        ("lib", "added", "submodule"),
        ("becomes.sh", "changed", "program"),
        ("new.sh", "added", "program"),
    ]
    assert review.findings[0].reason == "a link to /home/alice/.ssh/authorized_keys, outside the repository"


def test_names_that_lie(project: Path) -> None:
    names = {"a\u202egnp.exe": "", "b\x1b[2J.txt": "", "c\nd": "", "docs/x.": "", "Read": "", "rEAD": ""}
    review = changed(project, write(names))
    assert sorted(one.path for one in review.findings) == sorted(set(names) - {"Read"})
    assert {one.kind for one in review.findings} == {"name"}
    for line in gate.lines(review):
        assert line.isprintable()
    exact = json.loads(json.dumps(gate.as_json(review)))["executed"]
    assert "c\nd" in [one["path"] for one in exact]


def test_a_name_that_is_no_text_keeps_its_bytes_in_json(project: Path) -> None:
    review = changed(project, lambda top: (top / os.fsdecode(b".vscode/\xff")).parent.mkdir() or
                     (top / os.fsdecode(b".vscode/\xff")).write_text("x"))  # fmt: skip
    [one] = [one for one in review.findings if one.kind == "editor"]
    assert os.fsencode(json.loads(json.dumps(gate.as_json(review)))["executed"][0]["path"]) == os.fsencode(one.path)


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("core.hooksPath", "tools/hooks", "tools/hooks/pre-commit"),
        ("core.hooksPath", "{top}/tools/hooks", "tools/hooks/pre-commit"),
        ("include.path", "../team.gitconfig", "team.gitconfig"),
        ("filter.q7.clean", "python3 tools/clean.py %f", "tools/clean.py"),
        ("alias.ship", "!sh ./tools/ship", "tools/ship"),
        ("core.fsmonitor", "tools/watch it", "tools/watch it"),
    ],
)
def test_a_file_that_the_persons_own_git_names(project: Path, key: str, value: str, path: str) -> None:
    git(project, "config", key, value.format(top=project))
    review = changed(project, write({path: "x", "tools/other": "x"}))
    assert found(review) == [(path, "added", "git")]
    assert review.findings[0].reason == f"git's setting {key.lower()} names it"


def test_a_file_that_the_persons_global_git_names(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[core]\n\thooksPath = mine\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found(changed(project, write({"mine/pre-push": "x"}))) == [("mine/pre-push", "added", "git")]


def test_contents_beyond_the_bound_are_said_to_be_unread(project: Path) -> None:
    big = json.dumps({"scripts": {"x": "y" * gate.CONTENT_BYTES}})
    review = changed(project, write({"package.json": big, "a/.gitattributes": "#" * (gate.CONTENT_BYTES + 1)}))
    assert [one.reason for one in review.findings] == [gate.UNREAD] * 2


def test_a_link_with_an_endless_target(project: Path) -> None:
    blob = git(project, "hash-object", "-w", "--stdin", stdin=b"x" * 100_000).decode().strip()
    base = text(project, "rev-parse", "HEAD")
    git(project, "update-index", "--add", "--cacheinfo", f"120000,{blob},long")
    git(project, "commit", "-qm", "x")
    repo = repository.discover(project)
    assert repo is not None
    [one] = gate.review(repo, base, text(project, "rev-parse", "HEAD")).findings
    assert (one.kind, one.reason) == ("link", "a link whose target is too long to look at")


def test_more_than_anyone_reads_is_counted(project: Path) -> None:
    review = changed(project, write({f"d{number}/Makefile": "x" for number in range(1200)}))
    assert (len(review.findings), review.more) == (gate.LISTED, 200)
    lines = gate.lines(review)
    assert len(lines) == gate.SHOWN_LINES + 2
    assert lines[-1] == f"- and {1200 - gate.SHOWN_LINES} more; --json lists them"


def test_a_listing_that_is_too_large_is_read_as_far_as_it_goes_and_said(project: Path) -> None:
    base = text(project, "rev-parse", "HEAD")
    write({f"d{number:04}/Makefile": "x" for number in range(300)})(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")
    repo = repository.discover(project)
    assert repo is not None
    review = gate.review(repo, base, text(project, "rev-parse", "HEAD"), Bounds(file_bytes=10_000))
    assert 20 < len(review.findings) < 300
    assert "10000 bytes" in gate.lines(review)[-1]


def test_a_commit_that_is_not_there_is_said_and_raises_nothing(project: Path) -> None:
    repo = repository.discover(project)
    assert repo is not None
    review = gate.review(repo, "1" * 40, "2" * 40)
    assert (review.findings, len(gate.lines(review))) == ((), 1)


def test_a_base_that_is_an_option_is_none(project: Path, tmp_path: Path) -> None:
    repo = repository.discover(project)
    assert repo is not None
    review = gate.review(repo, f"--output={tmp_path}/written", repo.head_commit)
    assert "is not a commit's full name" in review.unseen and not (tmp_path / "written").exists()


def test_recover_lists_them_too_for_a_checkpoint() -> None:
    record = Session("sb", "unix:///s", "/r", "a" * 40, "job", checkpoint="b" * 40, checkpoint_at="then")
    review = Review((Finding("Makefile", "added", "build", "make runs it"),))
    held = Held(checkpoint="b" * 40, review=review)
    gone = fate.of(record, Seen(State.GONE, "sb"), held)
    assert gone.said[-1] == "- Makefile (added): make runs it"
    assert gone.next[-2][0] == "merge"
    assert recover.as_object(gone)["executed"][0]["path"] == "Makefile"
    assert not any("Makefile" in said for said in fate.of(record, Seen(State.RUNNING, "sb"), held).said)


def test_rubbish_is_no_entry() -> None:
    for raw in (b"", b"\0", b"x\0y\0", b":1 2 3 4 5", b":1 2 3 4 M\0no end", b"\0" * 1001):
        assert list(gate.entries(io.BytesIO(raw))) == []
    one = b":100644 100755 aaaa bbbb M\0a\tb\nc\0"
    [entry] = gate.entries(io.BytesIO(one))
    assert (entry.path, entry.change) == ("a\tb\nc", "changed")
    assert len(list(gate.entries(io.BytesIO(one * 50_000)))) == 50_000


def test_names_of_64_kib_are_shown_short() -> None:
    review = Review((Finding("d/" + "x" * 65_536 + "\x1b/Makefile", "added", "build", "r"),))
    assert max(len(line) for line in gate.lines(review)) < 130


def test_links_through_millions_of_names_are_given_up_in_time() -> None:
    targets = {f"l{number}": "a/" * 1000 + "../" * 1000 + f"l{number + 1}" for number in range(2000)}
    began = time.process_time()
    assert "too many names" in Aliases(targets).unfollowed
    assert time.process_time() - began < 5
    assert Aliases({"x": "/".join("a" * 5000)}).unfollowed == ""


def test_judging_ends_in_time_and_says_so(project: Path) -> None:
    repo = repository.discover(project)
    assert repo is not None
    (project / "Makefile").write_text("all:\n")
    git(project, "add", "Makefile")
    git(project, "commit", "-qm", "m")
    base, commit = text(project, "rev-parse", "HEAD~1", "HEAD").split()
    assert gate.review(repo, base, commit).findings
    cut = gate.review(repo, base, commit, judge_s=-1)
    assert (cut.findings, cut.unseen) == ((), "judging its files took longer than -1 s")


@pytest.mark.soak
def test_a_million_entries_take_seconds() -> None:
    raw = b"".join(b":000000 100644 %040d %040d A\0src/d%d/f%d.ts\0" % (0, n, n % 999, n) for n in range(1_000_000))
    began = time.monotonic()
    assert gate.judge(gate.entries(io.BytesIO(raw)), {}) == ([], [])
    assert time.monotonic() - began < 60


# From the command line.


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


def test_a_run_lists_them_before_the_merge_command_and_json_does_too(rig: Rig, project: Path, tmp_path: Path) -> None:
    person = Person(tmp_path, rig.socket)
    script = "mkdir -p .github/workflows; echo x > .github/workflows/ci.yml; echo x > plain"
    done = person.run("run", "--keep", "--json", "--name=gated", "--", "sh", "-c", script, cwd=project)
    said = [line.removeprefix("sandbox-cli: ") for line in done.stderr.decode().splitlines()]
    place = said.index("before you merge, look at what would run or act outside the sandbox (1):")
    assert said[place + 1] == "- .github/workflows/ci.yml (added): GitHub Actions runs it"
    assert said[place + 2] == "merge: git merge refs/sandbox/gated"
    one = {"path": ".github/workflows/ci.yml", "change": "added", "kind": "ci", "reason": "GitHub Actions runs it"}
    assert json.loads(said[-1])["executed"] == [one]
    again = person.run("bring-back", "gated", "--json")
    assert json.loads(again.stdout)["executed"] == [one]
    assert b"before you merge" in again.stderr
    assert person.run("kill", "gated").returncode == 0
