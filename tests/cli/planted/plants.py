"""Programs a repository, a home or an environment can make plain git run, each with a control that shows it.

`plant` puts it there; `control` are commands of plain git of which at least one must start it, or the plant
proves nothing and its test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cli.planted.world import World, git

Commands = tuple[tuple[str, ...], ...]
CREDENTIAL = b"protocol=https\nhost=example.test\n\n"


@dataclass(frozen=True)
class Plant:
    name: str
    plant: Callable[[World], None]
    control: Commands
    env: Callable[[World], dict[str, str]] = field(default=lambda world: {})
    stdin: bytes = b""
    tty: bool = False
    stops_fetch: bool = False  # rewrites addresses, so that a fetch of a path is refused


def nothing(world: World) -> None:
    pass


def config(*settings: tuple[str, str]) -> Callable[[World], None]:
    """Settings of the repository; `{m}` is the marker program."""

    def plant(world: World) -> None:
        for key, value in settings:
            world.config(key.format(m=world.marker), value.format(m=world.marker, r=world.root))

    return plant


def attributes(line: str, *settings: tuple[str, str], file: str = ".gitattributes") -> Callable[[World], None]:
    def plant(world: World) -> None:
        (world.repo / file).write_text(f"{line}\n")
        config(*settings)(world)

    return plant


def home_file(name: str, content: str) -> Callable[[World], None]:
    def plant(world: World) -> None:
        path = world.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.format(m=world.marker, r=world.root))

    return plant


def hook(name: str, *settings: tuple[str, str], directory: str = ".git/hooks") -> Callable[[World], None]:
    def plant(world: World) -> None:
        path = world.repo / directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho ran >> {world.marks}\n")
        path.chmod(0o755)
        config(*settings)(world)

    return plant


def both(*plants: Callable[[World], None]) -> Callable[[World], None]:
    def plant(world: World) -> None:
        for one in plants:
            one(world)

    return plant


def environment(**values: str) -> Callable[[World], dict[str, str]]:
    return lambda world: {
        key: value.format(m=world.marker, r=world.root, marks=world.marks) for key, value in values.items()
    }


def second_pack(world: World) -> None:
    for name in ("p", "q"):
        git(world.repo, "commit", "-q", "--allow-empty", "-m", name)
        git(world.repo, "repack", "-q")
    git(world.repo, "reset", "-q", "--soft", "HEAD~2")


def signed_side(world: World) -> None:
    """Gives the tip of `side` a signature, which verifying hands to a program."""
    raw = git(world.repo, "cat-file", "commit", "side")
    head, _, message = raw.partition(b"\n\n")
    signature = b"gpgsig -----BEGIN PGP SIGNATURE-----\n \n aGVsbG8=\n -----END PGP SIGNATURE-----"
    body = head + b"\n" + signature + b"\n\n" + message
    name = git(world.repo, "hash-object", "-t", "commit", "-w", "--stdin", stdin=body).decode().strip()
    git(world.repo, "update-ref", "refs/heads/side", name)


def included(kind: str) -> Callable[[World], None]:
    def plant(world: World) -> None:
        (world.root / "extra").write_text(f"[core]\n\tfsmonitor = {world.marker}\n")
        world.config(kind.format(r=world.repo), str(world.root / "extra"))

    return plant


def worktree_scope(line: str, key: str) -> Callable[[World], None]:
    def plant(world: World) -> None:
        if line:
            (world.repo / ".gitattributes").write_text(f"{line}\n")
        git(world.repo, "config", "extensions.worktreeConfig", "true")
        git(world.repo, "config", "--worktree", key, str(world.marker))

    return plant


def raw_config(content: bytes, line: bytes = b"") -> Callable[[World], None]:
    def plant(world: World) -> None:
        if line:
            (world.repo / ".gitattributes").write_bytes(line + b"\n")
        with (world.repo / ".git/config").open("ab") as file:
            file.write(content.replace(b"{m}", str(world.marker).encode()))

    return plant


def submodule(world: World) -> None:
    git(world.repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(world.remote), "sub")
    inner = world.repo / ".git/modules/sub"
    git(inner, "config", "core.fsmonitor", str(world.marker))
    (world.repo / "sub/a.txt").write_text("changed\n")


def alternates(world: World) -> None:
    (world.repo / ".git/objects/info").mkdir(exist_ok=True)
    (world.repo / ".git/objects/info/alternates").write_text(f"{world.remote}/objects\n")
    world.config("core.alternateRefsCommand", f"{world.marker} #")
    git(world.remote, "commit-tree", "-m", "x", "main^{tree}")
    name = git(world.remote, "commit-tree", "-m", "y", "main^{tree}").decode().strip()
    git(world.remote, "update-ref", "refs/heads/more", name)


def exec_path(world: World) -> None:
    directory = world.root / "exec"
    directory.mkdir()
    for name in ("git-upload-pack", "git-bundle", "git-status", "git-zz"):
        (directory / name).symlink_to(world.marker)


def template_hooks(world: World) -> None:
    directory = world.root / "template/hooks"
    directory.mkdir(parents=True)
    (directory / "post-checkout").symlink_to(world.marker)


def path_entry(world: World) -> None:
    (world.root / "bin").mkdir()
    (world.root / "bin/git").symlink_to(world.marker)
    (world.repo / "git").symlink_to(world.marker)


def in_config(key: str, value: str = "{m}") -> str:
    """A configuration file's text for one setting, `{m}` left in."""
    section, _, rest = key.partition(".")
    subsection, _, name = rest.rpartition(".")
    head = f'[{section} "{subsection}"]' if subsection else f"[{section}]"
    return f"{head}\n\t{name} = {value}\n"


STATUS: Commands = (("status",),)
ADD: Commands = (("add", "a.txt"),)
DIFF: Commands = (("diff",),)
COMMIT: Commands = (("commit", "--allow-empty", "-m", "x"),)
FETCH: Commands = (("fetch", "origin"),)
MERGE: Commands = (("checkout", "-q", "-f", "main"), ("merge", "-m", "x", "side"))

PLANTS: tuple[Plant, ...] = (
    # hooks
    Plant(
        "hook reference-transaction",
        hook("reference-transaction"),
        (("update-ref", "refs/heads/x", "HEAD"),),
    ),
    Plant("hook reference-transaction under fetch", hook("reference-transaction"), FETCH),
    Plant("hook post-index-change", hook("post-index-change"), STATUS + ADD),
    Plant("hook pre-commit", hook("pre-commit"), COMMIT),
    Plant("hook prepare-commit-msg", hook("prepare-commit-msg"), COMMIT),
    Plant("hook commit-msg", hook("commit-msg"), COMMIT),
    Plant("hook post-commit", hook("post-commit"), COMMIT),
    Plant("hook pre-merge-commit", hook("pre-merge-commit"), MERGE),
    Plant("hook post-merge", hook("post-merge"), MERGE),
    Plant("hook post-checkout", hook("post-checkout"), (("checkout", "-q", "-f", "side"),)),
    Plant("hook pre-push", hook("pre-push"), (("push", "origin", "main:refs/heads/x"),)),
    Plant(
        "hook pre-auto-gc",
        both(second_pack, hook("pre-auto-gc", ("gc.autoPackLimit", "1"))),
        (("gc", "--auto"),),
    ),
    Plant(
        "hook after fetch through gc",
        both(second_pack, hook("pre-auto-gc", ("gc.autoPackLimit", "1"), ("gc.autoDetach", "false"))),
        FETCH,
    ),
    Plant("core.hooksPath", hook("pre-commit", ("core.hooksPath", "tracked"), directory="tracked"), COMMIT),
    # programs named by one key
    Plant("core.fsmonitor", config(("core.fsmonitor", "{m}")), STATUS),
    Plant("core.fsmonitor under fetch", config(("core.fsmonitor", "{m}")), FETCH + STATUS),
    Plant("diff.external", config(("diff.external", "{m}")), DIFF),
    Plant("core.pager", config(("core.pager", "{m}")), (("log",),), tty=True),
    Plant("pager of one command", config(("pager.log", "{m}")), (("log",),), tty=True),
    Plant("core.editor", config(("core.editor", "{m}")), (("commit", "--allow-empty"),)),
    Plant(
        "sequence.editor",
        config(("sequence.editor", "{m}")),
        (("rebase", "-i", "--autostash", "HEAD~1"),),
    ),
    Plant(
        "interactive.diffFilter",
        config(("interactive.diffFilter", "{m}"), ("color.ui", "always")),
        (("add", "-p"),),
        tty=True,
    ),
    Plant("core.sshCommand", config(("core.sshCommand", "{m}")), (("ls-remote", "ssh://example.test/x"),)),
    Plant("core.gitProxy", config(("core.gitProxy", "{m}")), (("ls-remote", "git://example.test/x"),)),
    Plant("core.askPass", config(("core.askPass", "{m}")), (("credential", "fill"),), stdin=CREDENTIAL),
    Plant(
        "credential.helper",
        config(("credential.helper", "!{m}")),
        (("credential", "fill"),),
        stdin=CREDENTIAL,
    ),
    Plant(
        "credential.helper of one address",
        config(("credential.https://example.test.helper", "!{m}")),
        (("credential", "fill"),),
        stdin=CREDENTIAL,
    ),
    Plant("core.alternateRefsCommand", alternates, (("fetch", "origin", "more"),)),
    Plant("alias", config(("alias.zz", "!{m}")), (("zz",),)),
    Plant("gpg.program", config(("gpg.program", "{m}"), ("commit.gpgSign", "true")), COMMIT),
    Plant("gpg.openpgp.program", config(("gpg.openpgp.program", "{m}"), ("commit.gpgSign", "true")), COMMIT),
    Plant(
        "gpg.x509.program",
        config(("gpg.format", "x509"), ("gpg.x509.program", "{m}"), ("commit.gpgSign", "true")),
        COMMIT,
    ),
    Plant(
        "gpg.ssh.program",
        config(
            ("gpg.format", "ssh"), ("gpg.ssh.program", "{m}"), ("user.signingKey", "key::ssh-ed25519 AAAA"),
            ("commit.gpgSign", "true"),
        ),
        COMMIT,
    ),
    Plant(
        "gpg.ssh.defaultKeyCommand",
        config(("gpg.format", "ssh"), ("gpg.ssh.defaultKeyCommand", "{m}"), ("commit.gpgSign", "true")),
        COMMIT,
    ),
    Plant(
        "log.showSignature", both(signed_side, config(("log.showSignature", "true"), ("gpg.program", "{m}"))),
        (("log", "side"),),
    ),
    Plant(
        "merge.verifySignatures",
        both(signed_side, config(("merge.verifySignatures", "true"), ("gpg.program", "{m}"))),
        MERGE,
    ),
    Plant("tag.gpgSign", config(("tag.gpgSign", "true"), ("gpg.program", "{m}")), (("tag", "-m", "x", "t"),)),
    Plant("tar format", config(("tar.zz.command", "{m}")), (("archive", "--format=zz", "HEAD"),)),
    Plant("difftool", config(("diff.tool", "zz"), ("difftool.zz.cmd", "{m}")), (("difftool", "-y"),)),
    # drivers, whose names the repository chooses
    Plant("filter clean", attributes("* filter=q7", ("filter.q7.clean", "{m}")), ADD),
    Plant("filter clean under status", attributes("* filter=q7", ("filter.q7.clean", "{m}")), DIFF + STATUS),
    Plant(
        "filter smudge",
        attributes("* filter=q7", ("filter.q7.smudge", "{m}")),
        (("checkout", "-f", "side"),),
    ),
    Plant(
        "filter smudge under cat-file",
        attributes("* filter=q7", ("filter.q7.smudge", "{m}")),
        (("cat-file", "--filters", "HEAD:a.txt"),),
    ),
    Plant("filter process", attributes("* filter=q7", ("filter.q7.process", "{m}")), ADD),
    Plant(
        "filter that is required",
        attributes("* filter=q7", ("filter.q7.clean", "{m}"), ("filter.q7.required", "true")),
        ADD,
    ),
    Plant("filter with dots in its name", attributes("* filter=a.b.c", ("filter.a.b.c.clean", "{m}")), ADD),
    Plant("filter with = in its name", attributes("* filter=a=b", ("filter.a=b.clean", "{m}")), ADD),
    Plant(
        "filter that looks like another key",
        attributes("* filter=x.clean", ("filter.x.clean.clean", "{m}")),
        ADD,
    ),
    Plant(
        "filter with capitals and a name that is no text",
        raw_config(b'[FILTER "Q\xff"]\n\tCLEAN = {m}\n', b"* filter=Q\xff"),
        ADD,
    ),
    Plant(
        "filter in info/attributes",
        attributes("* filter=q7", ("filter.q7.clean", "{m}"), file=".git/info/attributes"),
        ADD,
    ),
    Plant(
        "filter in core.attributesFile",
        attributes(
            "* filter=q7", ("filter.q7.clean", "{m}"), ("core.attributesFile", "{r}/repo/else"), file="else"
        ),
        ADD,
    ),
    Plant("diff driver", attributes("* diff=q7", ("diff.q7.command", "{m}")), DIFF),
    Plant("textconv under diff", attributes("* diff=q7", ("diff.q7.textconv", "{m}")), DIFF),
    Plant("textconv under log", attributes("* diff=q7", ("diff.q7.textconv", "{m}")), (("log", "-p"),)),
    Plant("textconv under show", attributes("* diff=q7", ("diff.q7.textconv", "{m}")), (("show", "HEAD"),)),
    Plant(
        "textconv under blame",
        attributes("* diff=q7", ("diff.q7.textconv", "{m}")),
        (("blame", "a.txt"),),
    ),
    Plant("textconv with dots in its name", attributes("* diff=a.b", ("diff.a.b.textconv", "{m}")), DIFF),
    Plant(
        "merge driver",
        attributes("* merge=q7", ("merge.q7.driver", "{m} %A"), file=".git/info/attributes"),
        MERGE,
    ),
    Plant("merge driver by default", config(("merge.default", "q7"), ("merge.q7.driver", "{m} %A")), MERGE),
    Plant(
        "trailer", config(("trailer.sign.command", "{m}"), ("trailer.sign.key", "Sign")),
        (("interpret-trailers", "--trailer", "sign=x"),), stdin=b"subject\n",
    ),
    # transports
    Plant("remote.origin.uploadpack", config(("remote.origin.uploadpack", "{m}")), FETCH),
    Plant(
        "remote.origin.receivepack",
        config(("remote.origin.receivepack", "{m}")),
        (("push", "origin", "main:x"),),
    ),
    Plant(
        "remote with an ext:: address",
        config(("remote.evil.url", "ext::{m}"), ("protocol.ext.allow", "always")),
        (("fetch", "evil"),),
    ),
    Plant(
        "address rewritten to ext::",
        config(("url.ext::{m} .insteadOf", "/"), ("protocol.ext.allow", "always")),
        FETCH,
        stops_fetch=True,
    ),
    # where settings come from
    Plant("include.path", included("include.path"), STATUS),
    Plant("includeIf gitdir", included("includeIf.gitdir:{r}/.path"), STATUS),
    Plant("includeIf onbranch", included("includeIf.onbranch:main.path"), STATUS),
    Plant("worktree scope fsmonitor", worktree_scope("", "core.fsmonitor"), STATUS),
    Plant("worktree scope filter", worktree_scope("* filter=q7", "filter.q7.clean"), ADD),
    Plant(
        "filter in the home directory",
        both(attributes("* filter=q7"), home_file(".gitconfig", in_config("filter.q7.clean"))),
        ADD,
    ),
    Plant(
        "filter in the XDG directory",
        both(attributes("* filter=q7"), home_file(".config/git/config", in_config("filter.q7.clean"))),
        ADD,
    ),
    Plant(
        "attributes in the XDG directory",
        both(home_file(".config/git/attributes", "* filter=q7\n"), config(("filter.q7.clean", "{m}"))),
        ADD,
    ),
    Plant("fsmonitor in the home directory", home_file(".gitconfig", in_config("core.fsmonitor")), STATUS),
    Plant(
        "hooks in the home directory",
        both(
            home_file("hooks/pre-commit", "#!/bin/sh\nexec {m} </dev/null\n"),
            home_file(".gitconfig", in_config("core.hooksPath", "{r}/home/hooks")),
            lambda world: (world.home / "hooks/pre-commit").chmod(0o755),
        ),
        COMMIT,
    ),
    Plant(
        "uploadpack.packObjectsHook in the home directory",
        home_file(".gitconfig", in_config("uploadpack.packObjectsHook")),
        (("fetch", "origin", "side:refs/heads/y"), ("clone", "--no-local", "--bare", ".", "../c")),
    ),
    Plant("a submodule's own settings", submodule, STATUS),
    # the caller's environment
    Plant("GIT_EXTERNAL_DIFF", nothing, DIFF, environment(GIT_EXTERNAL_DIFF="{m}")),
    Plant(
        "GIT_SSH_COMMAND",
        nothing,
        (("ls-remote", "ssh://example.test/x"),),
        environment(GIT_SSH_COMMAND="{m}"),
    ),
    Plant("GIT_SSH", nothing, (("ls-remote", "ssh://example.test/x"),), environment(GIT_SSH="{m}")),
    Plant(
        "GIT_PROXY_COMMAND",
        nothing,
        (("ls-remote", "git://example.test/x"),),
        environment(GIT_PROXY_COMMAND="{m}"),
    ),
    Plant(
        "GIT_ASKPASS",
        nothing,
        (("credential", "fill"),),
        environment(GIT_ASKPASS="{m}"),
        stdin=CREDENTIAL,
    ),
    Plant(
        "SSH_ASKPASS",
        nothing,
        (("credential", "fill"),),
        environment(SSH_ASKPASS="{m}"),
        stdin=CREDENTIAL,
    ),
    Plant("GIT_PAGER", nothing, (("log",),), environment(GIT_PAGER="{m}"), tty=True),
    Plant("PAGER", nothing, (("log",),), environment(PAGER="{m}"), tty=True),
    Plant("GIT_EDITOR", nothing, (("commit", "--allow-empty"),), environment(GIT_EDITOR="{m}")),
    Plant("VISUAL", nothing, (("commit", "--allow-empty"),), environment(VISUAL="{m}")),
    Plant("EDITOR", nothing, (("commit", "--allow-empty"),), environment(EDITOR="{m}")),
    Plant(
        "GIT_SEQUENCE_EDITOR", nothing, (("rebase", "-i", "--autostash", "HEAD~1"),),
        environment(GIT_SEQUENCE_EDITOR="{m}"),
    ),
    Plant(
        "GIT_CONFIG_COUNT", nothing, STATUS,
        environment(GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="core.fsmonitor", GIT_CONFIG_VALUE_0="{m}"),
    ),
    Plant(
        "GIT_CONFIG_PARAMETERS",
        nothing,
        STATUS,
        environment(GIT_CONFIG_PARAMETERS="'core.fsmonitor'='{m}'"),
    ),
    Plant(
        "GIT_CONFIG_GLOBAL", home_file("other", in_config("core.fsmonitor")), STATUS,
        environment(GIT_CONFIG_GLOBAL="{r}/home/other"),
    ),
    Plant(
        "GIT_CONFIG_SYSTEM", home_file("other", in_config("core.fsmonitor")), STATUS,
        environment(GIT_CONFIG_SYSTEM="{r}/home/other"),
    ),
    Plant(
        "XDG_CONFIG_HOME", home_file("x/git/config", in_config("core.fsmonitor")), STATUS,
        environment(XDG_CONFIG_HOME="{r}/home/x"),
    ),
    Plant("GIT_EXEC_PATH", exec_path, (("zz",),), environment(GIT_EXEC_PATH="{r}/exec")),
    Plant(
        "GIT_TEMPLATE_DIR", template_hooks, (("clone", "-q", ".", "../cloned"),),
        environment(GIT_TEMPLATE_DIR="{r}/template"),
    ),
    Plant("PATH with a git of its own", path_entry, STATUS, environment(PATH="{r}/bin:/usr/bin:/bin")),
    Plant("PATH with the current directory", path_entry, STATUS, environment(PATH=".:/usr/bin:/bin")),
    *(
        Plant(f"{name} to a file", nothing, FETCH + DIFF, environment(**{name: "{marks}"}))
        for name in ("GIT_TRACE", "GIT_TRACE_SETUP", "GIT_TRACE2", "GIT_TRACE2_EVENT", "GIT_TRACE2_PERF")
    ),
)  # fmt: skip
