"""What a setting of git leads to: which of them run programs, read other files, or send git elsewhere.

In: a setting's name as `git config --list` prints it (section and name in lower case, the subsection as written).
Out: a few words that say what git does with it, or None for one that only changes how git looks. The table is
git-config(1), its section for each command, and what git-lfs(1) and git-send-email(1) read.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Iterable

# The subsection, if there is one, stands as `*`.
ROWS: tuple[tuple[str, str], ...] = (
    ("runs it on status and add", "core.fsmonitor"),
    ("runs hooks from there", "core.hookspath hook.*.command hook.*.event hook.*.enabled"),
    ("runs it to connect", "core.sshcommand core.gitproxy ssh.variant remote.*.uploadpack remote.*.receivepack"),
    ("runs it for passwords", "core.askpass credential.helper credential.*.helper credential.*"),
    (
        "runs it to show or edit text",
        "core.pager core.editor sequence.editor pager.* interactive.difffilter man.*.cmd man.*.path web.browser "
        "browser.*.cmd browser.*.path instaweb.browser instaweb.httpd gui.* guitool.*.cmd",
    ),
    ("runs it on fetch", "core.alternaterefscommand"),
    ("runs it on the contents of files", "filter.*.clean filter.*.smudge filter.*.process"),
    (
        "runs it to compare or merge files",
        "diff.external diff.*.command diff.*.textconv merge.*.driver merge.default difftool.*.cmd difftool.*.path "
        "mergetool.*.cmd mergetool.*.path diff.tool diff.guitool merge.tool merge.guitool",
    ),
    (
        "runs it to sign or to check signatures",
        "gpg.program gpg.*.program gpg.ssh.defaultkeycommand gpg.format user.signingkey gpg.ssh.allowedsignersfile",
    ),
    ("runs it as a command", "alias.* alias.*.command"),
    (
        "runs it in one of its commands",
        "trailer.*.command trailer.*.cmd tar.*.command uploadpack.packobjectshook gc.recentobjectshook "
        "sendemail.tocmd sendemail.cccmd sendemail.*cmd sendemail.smtpserver sendemail.*.smtpserver imap.tunnel "
        "lfs.customtransfer.*.path lfs.customtransfer.*.args lfs.standalonetransferagent lfs.extension.*.clean "
        "lfs.extension.*.smudge submodule.*.update svn-remote.* receive.procreceiverefs",
    ),
    ("reads more settings from there", "include.path includeif.*.path extensions.worktreeconfig"),
    ("reads files from there", "core.attributesfile init.templatedir core.excludesfile diff.orderfile"),
    ("works somewhere else", "core.worktree"),
    (
        "fetches from or sends to there",
        "remote.*.url remote.*.pushurl remote.*.vcs remote.*.fetch remote.*.push remote.pushdefault "
        "url.*.insteadof url.*.pushinsteadof submodule.*.url lfs.url lfs.pushurl remote.*.lfsurl "
        "branch.*.pushremote branch.*.remote remote.*.promisor extensions.partialclone",
    ),
    ("sends what it fetches or pushes through there", "http.* http.*.* https.proxy remote.*.proxy core.gitproxy"),
    ("trusts or checks less", "protocol.allow protocol.*.allow safe.directory safe.barerepository core.protecthfs "
     "core.protectntfs core.symlinks transfer.fsckobjects fetch.fsckobjects receive.fsckobjects fsck.* fetch.fsck.*"),
)  # fmt: skip

PROGRAM_WORDS = re.compile(r"runs|reads")


def effect(name: str) -> str | None:
    """What git does with the value of this setting, as words that follow "git"."""
    section, _, rest = name.partition(".")
    subsection, dot, key = rest.rpartition(".")
    section, key = section.lower(), key.lower()
    forms = [f"{section}.{key}", f"{section}.*.{key}", f"{section}.*.*"] if dot else [f"{section}.{key}"]
    if dot and "." in subsection:
        forms.append(f"{section}.{subsection.partition('.')[0].lower()}.*.{key}")
    forms = forms[1:] if dot else [*forms, f"{section}.*"]
    return next((_EFFECTS[form] for form in forms if form in _EFFECTS), None)


def names_files(name: str) -> bool:
    """Whether the value is a program, a command line or a file that git reads."""
    said = effect(name)
    return said is not None and PROGRAM_WORDS.match(said) is not None


def inside(settings: Iterable[tuple[str, str]], top: str, git_dir: str) -> dict[str, str]:
    """The paths below `top` that programs or files in `settings` lie at, each with the setting that names it."""
    found: dict[str, str] = {}
    for name, value in settings:
        if not names_files(name):
            continue
        start = git_dir if name.lower().startswith("include") else top
        for word in _words(value):
            path = posixpath.normpath(posixpath.join(start, os.path.expanduser(word)))
            if path.startswith(f"{top}/"):
                found.setdefault(path[len(top) + 1 :], name)
    return found


def _words(value: str) -> list[str]:
    """The value itself and, as a shell would split it, its words."""
    try:
        words = shlex.split(value.removeprefix("!"))
    except ValueError:
        words = value.split()
    return [word for word in (value, *words) if word and not word.startswith("-")]


_EFFECTS = {pattern: said for said, patterns in reversed(ROWS) for pattern in patterns.split()}
