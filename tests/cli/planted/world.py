"""Repositories made with plain git, as a person and an agent would make them; only tests may do this.

A `World` is one scratch directory: the person's repository, a home, a remote, and a program that leaves a mark
when it runs.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

IDENTITY = {
    "GIT_AUTHOR_NAME": "alice", "GIT_AUTHOR_EMAIL": "alice@example.test",
    "GIT_COMMITTER_NAME": "alice", "GIT_COMMITTER_EMAIL": "alice@example.test",
}  # fmt: skip
PATH = "/usr/local/bin:/usr/bin:/bin"


def git(
    where: Path, *arguments: str | bytes, stdin: bytes = b"", env: dict[str, str] | None = None, check: bool = True
) -> bytes:
    """Plain git with a clean environment and no configuration but the repository's own."""
    environment = {"PATH": PATH, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **IDENTITY, **(env or {})}
    done = subprocess.run(
        ["git", *arguments], cwd=where, env=environment, input=stdin, capture_output=True, timeout=60
    )  # fmt: skip
    if check and done.returncode:
        raise AssertionError(f"git {arguments}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def text(where: Path, *arguments: str) -> str:
    return git(where, *arguments).decode().strip()


@dataclass(frozen=True)
class World:
    root: Path

    @property
    def repo(self) -> Path:
        return self.root / "repo"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def remote(self) -> Path:
        return self.root / "remote.git"

    @property
    def returned(self) -> Path:
        """A bundle of two commits on `main`, as a sandbox returns it."""
        return self.root / "returned.bundle"

    @property
    def marker(self) -> Path:
        return self.root / "marker"

    @property
    def marks(self) -> Path:
        return self.root / "MARKS"

    def fired(self) -> bool:
        return self.marks.exists()

    def config(self, key: str, value: str) -> None:
        git(self.repo, "config", "--add", key, value)

    def base(self) -> str:
        return text(self.repo, "rev-parse", "main")

    def plain(self, *arguments: str, env: dict[str, str], stdin: bytes = b"", tty: bool = False) -> None:
        """The control: git as a person runs it here, whatever it answers."""
        environment = {"PATH": PATH, "HOME": str(self.home), "TERM": "xterm", **IDENTITY, **env}
        if not tty:
            subprocess.run(
                ["git", *arguments], cwd=self.repo, env=environment, input=stdin, capture_output=True, timeout=30
            )  # fmt: skip
            return
        ours, theirs = pty.openpty()
        try:
            child = subprocess.Popen(
                ["git", *arguments], cwd=self.repo, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
            )  # fmt: skip
            os.write(ours, b"q\n\x04")
            child.wait(30)
        finally:
            os.close(ours)
            os.close(theirs)


def build(root: Path) -> World:
    """The template every test copies: two branches that touch one file, a changed working tree, a remote."""
    world = World(root)
    world.home.mkdir(parents=True)
    world.repo.mkdir()
    git(root, "init", "-q", "--bare", "-b", "main", str(world.remote))
    git(world.repo, "init", "-q", "-b", "main")
    lines = [f"line {n}\n" for n in range(40)]
    (world.repo / "a.txt").write_text("".join(lines))
    (world.repo / "dir").mkdir()
    (world.repo / "dir/b.txt").write_text("b\n")
    git(world.repo, "add", ".")
    git(world.repo, "commit", "-qm", "first")
    git(world.repo, "checkout", "-q", "-b", "side")
    (world.repo / "a.txt").write_text("".join([*lines[:-1], "side\n"]))
    git(world.repo, "commit", "-qam", "side")
    git(world.repo, "checkout", "-q", "main")
    (world.repo / "a.txt").write_text("".join(["main\n", *lines[1:]]))
    git(world.repo, "commit", "-qam", "second")
    git(world.repo, "remote", "add", "origin", str(world.remote))
    git(world.repo, "push", "-q", "origin", "main", "side", "side:more")
    git(world.repo, "update-ref", "-d", "refs/remotes/origin/more")
    guest = root / "guest"
    git(root, "clone", "-q", str(world.repo), str(guest))
    git(guest, "checkout", "-q", "-b", "sandbox")
    for number in (1, 2):
        (guest / "dir/b.txt").write_text(f"guest {number}\n")
        (guest / f"new{number}.txt").write_text("new\n")
        git(guest, "add", ".")
        git(guest, "commit", "-qm", f"guest {number}")
    git(guest, "bundle", "create", "-q", str(world.returned), "origin/main..sandbox")
    (world.repo / "a.txt").write_text("".join(["main\n", "changed here\n", *lines[2:]]))
    return world


def copy(template: World, root: Path) -> World:
    world = World(root)
    for name in ("repo", "home", "remote.git", "returned.bundle"):
        source = template.root / name
        if source.is_dir():
            shutil.copytree(source, root / name, symlinks=True)
        else:
            shutil.copy2(source, root / name)
    config = world.repo / ".git/config"
    config.write_text(config.read_text().replace(str(template.remote), str(world.remote)))
    world.marker.write_text(f"#!/bin/sh\necho ran >> {world.marks}\ntimeout 0.3 cat\nexit 0\n")
    world.marker.chmod(0o755)
    return world


def snapshot(world: World) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time and content of everything a bring-back must leave alone."""
    seen = {}
    for directory, _, names in os.walk(world.repo):
        for name in names:
            path = Path(directory) / name
            inside = str(path.relative_to(world.repo))
            if not inside.startswith((".git/objects/", ".git/refs/sandbox/")):
                status = path.lstat()
                content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
                seen[inside] = (status.st_mode, status.st_mtime_ns, content)
    return seen
