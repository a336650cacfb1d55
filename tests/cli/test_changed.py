"""What is said, after a run that could write to a directory of the host, of what the host runs from there."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import changed, gate, gitconfig, survey
from cli.gate import Review
from cli.survey import Snapshot
from tests.cli.planted.plants import in_config
from tests.cli.planted.world import git
from tests.conftest import make_repository

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with something of everything, as it is before the run."""
    top = tmp_path_factory.mktemp("template") / "project"
    make_repository(top)
    for name, content in {
        "Makefile": "all:\n", ".vscode/tasks.json": "{}", "package.json": '{"scripts": {"test": "x"}}',
        "node_modules/a/index.js": "a", "tools/run.sh": "x", ".gitattributes": "* text=auto\n", "src/a.py": "x",
        "team.gitconfig": "[alias]\n\tst = status\n", ".sandbox.yaml": "network: {mode: none}\n",
    }.items():  # fmt: skip
        write(name, content)(top)
    (top / "tools/run.sh").chmod(0o755)
    write(".git/hooks/pre-commit", "#!/bin/sh\n", 0o755)(top)
    git(top, "config", "include.path", "../team.gitconfig")
    return top


@pytest.fixture
def top(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "project", symlinks=True))


def write(name: str, content: str, mode: int = 0o644) -> Change:
    def change(top: Path) -> None:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(mode)

    return change


def link(name: str, target: str) -> Change:
    def change(top: Path) -> None:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.symlink(target, path)

    return change


def setting(key: str, value: str, *scope: str) -> Change:
    return lambda top: git(top, "config", *scope, key, value)


def both(*changes: Change) -> Change:
    return lambda top: [change(top) for change in changes]


def bare(top: Path) -> None:
    git(top, "init", "-q", "--bare", "vendor/thing")
    git(top / "vendor/thing", "config", "core.fsmonitor", "/tmp/x")


def fifo(name: str) -> Change:
    def change(top: Path) -> None:
        (top / name).unlink(missing_ok=True)
        os.mkfifo(top / name)

    return change


def gitfile(top: Path) -> None:
    (top / ".git").rename(top / "kept")
    (top / ".git").write_text("gitdir: kept\n")


def seen(top: Path, change: Change) -> Review:
    before = survey.snapshot(top)
    assert before.unseen == ""
    change(top)
    return changed.compare(before, survey.snapshot(top))


PLANTS: list[tuple[str, Change, tuple[str, str, str, str]]] = [
    ("a new hook", write(".git/hooks/post-checkout", "x", 0o755),
     (".git/hooks/post-checkout", "added", "hook", "runs")),
    ("a changed hook", write(".git/hooks/pre-commit", "y", 0o755),
     (".git/hooks/pre-commit", "changed", "hook", "runs")),
    ("a hook that runs now", lambda top: (top / ".git/hooks/pre-commit").chmod(0o644),
     (".git/hooks/pre-commit", "changed", "hook", "runs")),
    ("a hook that is gone", lambda top: (top / ".git/hooks/pre-commit").unlink(),
     (".git/hooks/pre-commit", "removed", "hook", "runs")),
    ("a hook that is a link", link(".git/hooks/pre-push", "../../x"), (".git/hooks/pre-push", "added", "hook", "runs")),
    ("hooks that are a link", both(lambda top: (top / ".git/hooks").rename(top / "h"), link(".git/hooks", "../h")),
     (".git/hooks", "added", "hook", "runs")),
    ("a setting of this worktree", both(setting("extensions.worktreeConfig", "true"),
     setting("core.sshCommand", "x", "--worktree")),
     (".git/config.worktree", "added", "git", "core.sshcommand is 'x'")),
    ("an included file", write("team.gitconfig", "[core]\n\tfsmonitor = x\n"),
     ("team.gitconfig", "changed", "git", "core.fsmonitor is 'x': git runs it on status and add")),
    ("an include in an included file", both(write("team.gitconfig", "[include]\n\tpath = more\n"),
     write("more", "[core]\n\tpager = x\n")), ("more", "added", "git", "core.pager is 'x'")),
    ("an include that is conditional", both(setting("includeIf.onbranch:main.path", "../other"),
     write("other", "[core]\n\teditor = x\n")), ("other", "added", "git", "core.editor is 'x'")),
    ("no settings any more", lambda top: (top / ".git/config").unlink(),
     (".git/config", "removed", "git", "no settings here any more")),
    ("settings that are empty", write(".git/config", ""), (".git/config", "changed", "git", "include.path is not set")),
    ("settings git cannot read", write(".git/config", "[core"), (".git/config", "changed", "git", "cannot be read")),
    ("settings that are a link", link(".git/config", "/etc/passwd"),
     (".git/config", "changed", "git", "a link to /etc/passwd")),
    ("settings that are a pipe", fifo(".git/config"), (".git/config", "changed", "git", "it is no file")),
    ("settings without end", write(".git/config", "#" * 300_000), (".git/config", "changed", "git", "too large")),
    ("a value that looks like another entry", setting("core.pager", "x\ncore.editor\ny\0".replace("\0", "")),
     (".git/config", "changed", "git", "core.pager is 'x core.editor y'")),
    ("a section in capitals", write(".git/config", '[FILTER "Q"]\n\tCLEAN = x\n'),
     (".git/config", "changed", "git", "filter.Q.clean is 'x': git runs it on the contents of files")),
    ("info/attributes", write(".git/info/attributes", "* filter=x\n"),
     (".git/info/attributes", "added", "git", "programs")),
    ("alternates", write(".git/objects/info/alternates", "/x\n"),
     (".git/objects/info/alternates", "added", "git", "objects")),
    ("a rebase with commands", write(".git/rebase-merge/git-rebase-todo", "exec x\n"),
     (".git/rebase-merge/git-rebase-todo", "added", "git", "runs its commands")),
    ("a common directory", write(".git/commondir", "../x\n"), (".git/commondir", "added", "git", "from there")),
    ("a remote in the old form", write(".git/remotes/origin", "URL: ext::x\n"),
     (".git/remotes/origin", "added", "git", "fetches")),
    ("a remote in the oldest form", write(".git/branches/origin", "ssh://x\n"),
     (".git/branches/origin", "added", "git", "fetches")),
    ("a log of git's that is written elsewhere", link(".git/logs/HEAD", "/home/alice/.profile"),
     (".git/logs/HEAD", "added", "git", "git reads and writes what it leads to")),
    ("refs that are elsewhere", both(lambda top: shutil.rmtree(top / ".git/refs"), link(".git/refs", "/etc")),
     (".git/refs", "added", "git", "git reads and writes what it leads to")),
    ("a message that is written elsewhere", link(".git/COMMIT_EDITMSG", "../../x"),
     (".git/COMMIT_EDITMSG", "added", "git", "git reads and writes what it leads to")),
    ("a .git that is a file", gitfile, (".git", "added", "git", "another directory")),
    ("a .git in capitals", write("sub/.GIT/config", "[core]\n\tfsmonitor = x\n"),
     ("sub/.GIT/config", "added", "git", "core.fsmonitor is 'x'")),
    ("a repository in the tree", both(lambda top: make_repository(top / "in/side"),
     lambda top: git(top / "in/side", "config", "core.fsmonitor", "x")),
     ("in/side/.git/config", "added", "git", "core.fsmonitor is 'x'")),
    ("a bare repository buried in the tree", bare,
     ("vendor/thing/config", "added", "git", "core.fsmonitor is '/tmp/x'")),
    ("a directory that is made to look like git's own", both(write("HEAD", ""), write("objects/x", ""),
     write("refs/x", ""), write("objects/Makefile", "x"), write("sub/.vscode/tasks.json", "x")),
     ("sub/.vscode/tasks.json", "added", "editor", "Visual Studio Code")),
    ("what lies in it", both(write("HEAD", ""), write("refs/x", ""), write("objects/Makefile", "x")),
     ("objects/Makefile", "added", "build", "make")),
    ("a submodule's hook", both(write(".git/modules/a/b/HEAD", "x"),
     write(".git/modules/a/b/hooks/post-merge", "x", 0o755)),
     (".git/modules/a/b/hooks/post-merge", "added", "hook", "runs")),
    ("a linked worktree's settings", both(write(".git/worktrees/w/HEAD", "x"),
     write(".git/worktrees/w/config.worktree", "[core]\n\thooksPath = x\n")),
     (".git/worktrees/w/config.worktree", "added", "git", "core.hookspath is 'x': git runs hooks from there")),
    ("an editor's task", write(".vscode/tasks.json", "{ }"),
     (".vscode/tasks.json", "changed", "editor", "Visual Studio Code")),
    ("a Makefile", write("sub/Makefile", "x"), ("sub/Makefile", "added", "build", "make")),
    ("a script of npm", write("package.json", '{"scripts": {"test": "y"}}'),
     ("package.json", "changed", "package", "test")),
    ("a package.json beyond the bound", write("package.json", " " * 70_000),
     ("package.json", "changed", "package", "not looked at")),
    ("installed packages", write("node_modules/a/index.js", "b"),
     ("node_modules", "changed", "package", "installed packages")),
    ("a new program", write("tools/new", "x", 0o755), ("tools/new", "added", "program", "run as a program")),
    ("a project's settings that are gone", lambda top: (top / ".sandbox.yaml").unlink(),
     (".sandbox.yaml", "removed", "agent", "what the next run may do")),
    ("a directory in the place of a project's settings",
     both(lambda top: (top / ".sandbox.yaml").unlink(), lambda top: (top / ".sandbox.yaml").mkdir()),
     (".sandbox.yaml", "removed", "agent", "what the next run may do")),
    ("a link in the place of a directory that runs", link(".zed", "docs"),
     (".zed", "added", "editor", "an editor obeys")),
    ("a link out of the directory", link("notes", "/home/alice/.ssh"),
     ("notes", "added", "link", "outside the repository")),
    ("a name that lies", write("a\u202egnp", ""), ("a\u202egnp", "added", "name", "do not show")),
]  # fmt: skip


# Links that were there before, and a change of what they lead to.
LED: list[tuple[str, Change, Change, tuple[str, str, str, str]]] = [
    ("a hook", link(".git/hooks/pre-push", "../../tools/run.sh"), write("tools/run.sh", "y", 0o755),
     ("tools/run.sh", "changed", "hook", ".git/hooks/pre-push leads to it: git runs it")),
    ("all hooks", both(lambda top: (top / ".git/hooks").rename(top / "h"), link(".git/hooks", "../h")),
     write("h/pre-commit", "y", 0o755), ("h/pre-commit", "changed", "hook", ".git/hooks/pre-commit leads to it")),
    ("git's settings", both(lambda top: (top / ".git/config").rename(top / "c"), link(".git/config", "../c")),
     write("c", "[core]\n\tfsmonitor = x\n"), ("c", "changed", "git", "git takes its settings from there")),
    ("a Makefile", link("sub/GNUmakefile", "../src/a.py"), write("src/a.py", "y"),
     ("src/a.py", "changed", "build", "sub/GNUmakefile leads to it: make")),
    ("a directory of hooks", link(".husky", "tools"), write("tools/in/pre-push", "y"),
     ("tools/in/pre-push", "added", "hook", ".husky/in/pre-push leads to it")),
    ("a link by way of a link", both(link(".zed", "other"), link("other", "./src/../src")), write("src/b", "y"),
     ("src/b", "added", "editor", ".zed/b leads to it")),
    ("a directory above what runs", link(".github", "src"), write("src/workflows/x.yml", "y"),
     ("src/workflows/x.yml", "added", "ci", ".github/workflows/x.yml leads to it: GitHub")),
    ("the top", link(".devcontainer", "."), write("x.json", "y"),
     ("x.json", "added", "editor", ".devcontainer/x.json leads to it")),
    ("a list of scripts", link("a/package.json", "../src/a.py"), write("src/a.py", "{}"),
     ("src/a.py", "changed", "package", "a/package.json leads to it")),
    ("what a setting names", both(setting("core.hooksPath", "hk"), link("hk", "src")), write("src/pre-push", "y"),
     ("src/pre-push", "added", "git", "hk/pre-push leads to it: git's setting core.hookspath names it")),
    ("a link that a setting names", both(setting("core.hooksPath", "hk"), link("hk", "src")), link("hk", "tools"),
     ("hk", "changed", "git", "git's setting core.hookspath names it")),
]  # fmt: skip


@pytest.mark.parametrize(("before", "change", "expected"), [each[1:] for each in LED], ids=[each[0] for each in LED])
def test_what_a_link_leads_to_runs_by_the_link_s_name(
    top: Path, before: Change, change: Change, expected: tuple[str, str, str, str]
) -> None:
    before(top)
    path, how, kind, said = expected
    review = seen(top, change)
    assert any(
        (found.path, found.change, found.kind) == (path, how, kind) and said in found.reason
        for found in review.findings
    ), review
    assert review.unseen == ""


def test_files_and_links_without_end_are_bounded(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("KEPT_BYTES", 100_000), ("READ_BYTES", 300_000), ("LINKS", 3)):
        monkeypatch.setattr(survey, name, value)

    def change(top: Path) -> None:
        for number in range(20):
            write(f"{number}/package.json", "")(top)
            os.truncate(top / f"{number}/package.json", 60_000)
            link(f"l{number}", "src")(top)

    review = seen(top, change)
    assert "there is more to read than is read" in review.unseen and "more than 3 symbolic links" in review.unseen
    after = survey.snapshot(top)
    assert sum(len(one.content or b"") for one in after.seen.values()) < 100_000
    found = [one.path for one in review.findings if one.path.endswith("/package.json")]
    assert len(found) == 20, "what was not read is told all the same"


def test_a_survey_without_descriptors_says_so(top: Path) -> None:
    deep = top / "/".join(["d"] * 40)
    shutil.copytree(top / ".git", deep / ".git", symlinks=True)
    was = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = len(os.listdir("/proc/self/fd"))
    try:
        for more in range(30, 60, 3):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, was[1]))
            found = survey.snapshot(top)
            if not found.unseen:
                break
            assert "Too many open files" in found.unseen, more
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, was)
    assert more > 30


@pytest.mark.parametrize(("change", "expected"), [plant[1:] for plant in PLANTS], ids=[plant[0] for plant in PLANTS])
def test_what_the_host_runs_is_reported(top: Path, change: Change, expected: tuple[str, str, str, str]) -> None:
    review = seen(top, change)
    path, how, kind, said = expected
    fits = [
        one for one in review.findings if (one.path, one.change, one.kind) == (path, how, kind) and said in one.reason
    ]
    assert fits, review
    assert all(line.isprintable() for line in changed.lines(review))


DANGEROUS = [
    "core.fsmonitor", "core.hookspath", "core.sshcommand", "core.pager", "core.editor", "core.askpass",
    "core.alternaterefscommand", "credential.helper", "core.gitproxy", "core.attributesfile",
    "extensions.worktreeconfig",
    "filter.q7.clean", "filter.q7.smudge", "filter.q7.process", "diff.q7.textconv", "diff.q7.command", "diff.external",
    "merge.q7.driver", "gpg.program", "gpg.ssh.program", "gpg.x509.program", "alias.st", "pager.log", "url.x.insteadof",
    "remote.origin.url", "remote.origin.uploadpack", "includeif.gitdir:/x.path", "credential.https://x.test.helper",
    "sequence.editor", "interactive.difffilter", "trailer.x.cmd", "hook.x.command", "difftool.x.cmd",
    "submodule.x.update",
    "protocol.ext.allow", "http.proxy", "http.https://x.test.sslverify", "lfs.customtransfer.x.path", "core.worktree",
]  # fmt: skip


def test_every_setting_that_leads_to_a_program_is_named_and_others_are_counted(top: Path) -> None:
    def change(top: Path) -> None:
        with (top / ".git/config").open("a") as file:
            for key in (*DANGEROUS, "user.name", "core.autocrlf", "branch.main.merge"):
                file.write(in_config(key, "x"))

    reasons = [one.reason for one in seen(top, change).findings if one.path == ".git/config"]
    for key in DANGEROUS:
        assert gitconfig.effect(key) is not None
        assert any(reason.startswith(f"{key} is 'x': git ") for reason in reasons), key
    assert "other settings of git: user.name, core.autocrlf, branch.main.merge" in reasons


def test_the_order_of_values_counts_too(top: Path) -> None:
    for value in ("a", "b"):
        git(top, "config", "--add", "core.fsmonitor", value)
    text = (top / ".git/config").read_text()
    turned = text.replace("fsmonitor = a", "fsmonitor = c").replace("fsmonitor = b", "fsmonitor = a")
    review = seen(top, write(".git/config", turned.replace("fsmonitor = c", "fsmonitor = b")))
    assert [one.reason[:24] for one in review.findings] == ["core.fsmonitor is 'a': g"]


def test_work_that_nothing_runs_is_not_reported(top: Path) -> None:
    def change(top: Path) -> None:
        write("src/a.py", "changed")(top)
        write("src/b.py", "new")(top)
        write("tools/run.sh", "changed", 0o755)(top)  # it could be run before
        write("package.json", '{"scripts": {"test": "x"}, "version": "2"}')(top)
        write(".git/hooks/pre-push.sample", "x", 0o755)(top)
        git(top, "add", "-A")
        git(top, "commit", "-qm", "x", "--no-verify")
        git(top, "branch", "other")
        git(top, "gc", "-q")

    review = seen(top, change)
    assert (review, changed.lines(review)) == (Review(), [])


@pytest.mark.parametrize("key", ["core.hooksPath", "alias.ship"])
def test_a_file_that_a_setting_names_is_reported(top: Path, key: str) -> None:
    git(top, "config", key, "tools/hooks")
    review = seen(top, write("tools/hooks/pre-push" if key == "core.hooksPath" else "tools/hooks", "x"))
    [one] = review.findings
    assert (one.kind, one.reason) == ("git", f"git's setting {key.lower()} names it")


def test_a_directory_inside_a_repository(top: Path) -> None:
    git(top, "config", "core.hooksPath", "src/hooks")
    before = survey.snapshot(top / "src")
    for name in ("hooks/pre-push", ".github/workflows/ci.yml", "Makefile"):
        write(f"src/{name}", "x")(top)
    review = changed.compare(before, survey.snapshot(top / "src"))
    assert [(one.path, one.kind) for one in review.findings] == [("hooks/pre-push", "git"), ("Makefile", "build")]


def test_a_directory_without_a_repository(tmp_path: Path) -> None:
    review = seen(tmp_path, both(write(".github/workflows/ci.yml", "x"), lambda top: git(top, "init", "-q", ".")))
    assert [(one.path, one.kind) for one in review.findings] == [
        (".git/config", "git"),
        (".github/workflows/ci.yml", "ci"),
    ]


def test_as_text_and_json(top: Path) -> None:
    review = seen(top, both(write("Makefile", "x\n"), setting("core.fsmonitor", "\x1b[2Jx")))
    assert changed.lines(review) == [
        "changed in the directory, and run or obeyed on this machine later (2):",
        "- .git/config (changed): core.fsmonitor is '[2Jx': git runs it on status and add",
        "- Makefile (changed): make, just, task or another tool runs it",
    ]
    assert [one["kind"] for one in gate.as_json(review)["executed"]] == ["git", "build"]


def test_links_are_not_followed_and_pipes_not_waited_for(top: Path, tmp_path: Path) -> None:
    write("outside/Makefile", "x")(tmp_path)
    make_repository(tmp_path / "outside/repo")

    def change(top: Path) -> None:
        link("away", "../outside")(top)
        link("sub/.git", "../../outside/repo/.git")(top)
        fifo("GNUmakefile")(top)
        fifo("package.json")(top)
        fifo(".git/hooks/post-merge")(top)

    assert {one.path for one in seen(top, change).findings} == {"away", "sub/.git"}


def test_what_cannot_be_looked_at_is_said(top: Path, tmp_path: Path) -> None:
    whole = survey.snapshot(top)
    cut = survey.snapshot(top, entries=10)
    assert "more files" in cut.unseen
    assert "more files" in changed.lines(changed.compare(whole, cut))[-1]
    deep = "/".join("d" * 100)
    (top / deep).mkdir(parents=True)
    assert "too deep" in survey.snapshot(top).unseen
    assert "No such file" in survey.snapshot(tmp_path / "none").unseen
    assert changed.compare(whole, Snapshot(unseen="gone")).unseen == "gone"


def test_a_guest_that_still_writes_leads_nowhere(top: Path, tmp_path: Path) -> None:
    """Directories become links and back while they are looked at; nothing behind the links is ever seen."""
    for name in ("Makefile", "hooks/evil", "config"):
        write(f"outside/{name}", "secret")(tmp_path)
    (top / "swap").mkdir()
    write("swap/x", "")(top)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(top / "swap", top / "held")
            os.symlink("../outside", top / "swap")
            os.unlink(top / "swap")
            os.rename(top / "held", top / "swap")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(30):
            assert not {"swap/Makefile", "swap/config"} & set(survey.snapshot(top).seen)
    finally:
        stop.set()
        thread.join()
