"""Run coding agents on a repository inside virtual machines with a kernel of
their own.

Usage:
  sandbox-cli COMMAND [ARGS...]
  sandbox-cli (-h | --help | --version)

Commands:
  run [options] -- CMD...       make a sandbox, run a command in it, bring its
                                commits back
  agent NAME [ARGS...]          run a coding agent in a sandbox, and bring its
                                commits back
  agent ls                      list the agents, and whose login is saved
  agent fleet run|status|land   several agents at once, each for a branch, and
                                merge what they made
  agent state [SANDBOX...]      say what the agents in sandboxes are doing
  agent wait SANDBOX            wait until an agent is done, blocked, ...
  exec SANDBOX -- CMD...        run a command in a running sandbox
  shell SANDBOX                 open a shell in a running sandbox
  attach SANDBOX                take part in a process of a sandbox
  logs SANDBOX                  print what a process wrote, and follow it
  tunnel SANDBOX PORT           reach a port inside a sandbox from this machine
  list, ls                      list sandboxes
  bring-back SANDBOX            bring the commits of a run's sandbox back again
  recover                       what became of runs that were cut off, and
                                where their work is
  update SANDBOX                change what a sandbox may reach, its name, its
                                labels
  egress SANDBOX                show which names a sandbox asked for, and what
                                was decided
  why ID                        explain one refusal, and print what would allow
                                it
  events SANDBOX                show what was done with a sandbox
  audit verify                  check that the log of it was not changed
  kill SANDBOX...               end sandboxes and discard their disks
  suspend SANDBOX               stop a sandbox where it is
  resume SANDBOX                let a suspended one go on
  snapshot SANDBOX              keep what a sandbox is now, for others to start
                                from
  snapshot ls|rm                list those that are kept, delete some
  snapshot-schedule SANDBOX     let snapshots be taken from time to time
  image ls|pull|rm              images that sandboxes start from: list, fetch,
                                remove
  template ls                   sizes of sandboxes that have a name
  mirror check|ls|push|fetch    what came back, kept in a bucket too: try it,
                                list, upload, take back
  volume create|ls|rm           disks that outlive sandboxes: make, list,
                                delete
  context add|ls|use|rm         name the sandboxds there are, choose the one to
                                speak to
  doctor                        say what this machine and its sandboxd can do
  conformance                   hold a sandboxd against the specification of
                                its API
  completion bash|zsh|fish      let the Tab key complete command lines
  version                       print the version
  help [COMMAND]                print this, or a command's usage

`sandbox-cli COMMAND --help` says more. A command that ran something in a
sandbox exits with its code; an error of its own is one line on stderr and exit
code 1.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from docopt import DocoptExit, docopt

from cli import show
from sandboxd.errors import ApiError, SandboxError
from sandboxd.termsafe import clean

COMMANDS = {
    "agent": "cli.agent",
    "agent fleet": "cli.fleet.command",
    "agent ls": "cli.agents.ls",
    "agent state": "cli.agents.state",
    "agent wait": "cli.agents.wait",
    "attach": "cli.attach",
    "audit": "cli.audit",
    "bring-back": "cli.collect",
    "completion": "cli.completion",
    "conformance": "cli.conformance",
    "context": "cli.context_command",
    "doctor": "cli.doctor",
    "egress": "cli.egress",
    "events": "cli.events",
    "exec": "cli.exec",
    "image": "cli.image",
    "kill": "cli.kill",
    "list": "cli.list",
    "logs": "cli.logs",
    "mirror": "cli.mirror",
    "recover": "cli.recover",
    "resume": "cli.resume",
    "run": "cli.run",
    "shell": "cli.shell",
    "snapshot": "cli.snapshot",
    "snapshot-schedule": "cli.snapshot_schedule",
    "suspend": "cli.suspend",
    "template": "cli.template",
    "tunnel": "cli.tunnel",
    "update": "cli.update",
    "version": "cli.version",
    "volume": "cli.volume",
    "why": "cli.why",
}
ALIASES = {"ls": "list"}
# What other programs call it. No aliases: who types `stop` may expect the disk to be kept, and `kill` discards it.
ELSEWHERE = {"ps": "list", "status": "list", "rm": "kill", "delete": "kill", "stop": "kill", "create": "run"}
LATER = (
    "agent-run", "gateway", "job", "org", "secret", "service", "ssh", "ssh-access",
    "ssh-key", "studio", "whoami",
)  # fmt: skip
INTERRUPTED = 130
OUTPUT_CLOSED = 141
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: parse, import the one command that is asked for, run it, report."""
    _open_standard_streams()
    try:
        return _flushed(_run(sys.argv[1:] if argv is None else list(argv)))
    except SandboxError as error:
        show.note(str(error))
        return 1
    except BrokenPipeError:
        return _output_is_gone()
    except OSError as fault:
        if fault.errno not in FULL:
            raise
        _output_is_gone()
        show.note(f"writing failed: {fault.strerror}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:3], "--help"]
    try:
        top = docopt(str(__doc__), argv=argv, options_first=True)
    except DocoptExit:
        what = f"{clean(argv[0])}: the command comes first, its flags behind it;" if argv else "which command?"
        raise SandboxError(f"{what} see sandbox-cli --help") from None
    asked, rest = ("version", []) if top["--version"] else (top["COMMAND"], top["ARGS"])
    name = ALIASES.get(asked, asked)
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name in LATER:
        raise SandboxError(f"{name} is not built yet in this version")
    if name not in COMMANDS:
        raise SandboxError(f"unknown command {clean(asked)!r}; {_meant(name)}see sandbox-cli --help")
    module = import_module(COMMANDS[name])
    usage = str(module.__doc__)
    args: dict[str, Any]
    try:
        as_they_are = getattr(module, "WORDS_AS_THEY_ARE", False)
        args = {"WORDS": rest} if as_they_are else dict(docopt(usage, argv=[*name.split(), *rest]))
    except DocoptExit as error:
        raise SandboxError(misuse(name, usage, rest, str(error))) from None
    try:
        return int(module.main(args))
    except ApiError as error:
        from cli import wording

        ref = args.get("SANDBOX")
        if not isinstance(ref, str):
            raise SandboxError(wording.plain(error.message)) from None
        raise SandboxError(wording.about(error.message, ref, args.get("--pid"))) from None


def _meant(word: str) -> str:
    """Which command it may have been."""
    from difflib import get_close_matches

    from cli.agents.table import AGENTS

    if word in AGENTS or any(name.startswith(f"agent {word}") for name in COMMANDS):
        return f"is it sandbox-cli agent {word}? "
    near = [ELSEWHERE[word]] if word in ELSEWHERE else get_close_matches(word, [*COMMANDS, *ALIASES], n=1, cutoff=0.6)
    return f"is it sandbox-cli {near[0]}? " if near else ""


def misuse(name: str, usage: str, argv: Sequence[str], fault: str) -> str:
    """What is wrong with arguments that do not fit `usage`, in one line."""
    ours = list(argv[: argv.index("--")] if "--" in argv else argv)
    given = [word.partition("=")[0] for word in ours if word.startswith("-") and word != "-"]
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", usage))
    for option in given:
        if not any(word.startswith(option) or (option[:2] == word and len(word) == 2) for word in known):
            what = f"unknown option {clean(option)}"
            break
    else:
        first = fault.splitlines()[0] if fault else ""
        if first and not first.startswith(("Warning:", "Usage:")):
            what = clean(first)
        elif not ours and usage.count("\n  sandbox-cli ") <= 2 and re.search(r"\bSANDBOX\b", usage):
            what = "name a sandbox"
        elif "-- CMD" in usage and "--" not in argv:
            what = "the command goes after `--`"
        else:
            what = _unfit(name, usage, ours)
    return f"{name}: {what}; see sandbox-cli {name} --help"


def _unfit(name: str, usage: str, given: Sequence[str]) -> str:
    """What is said of words that fit no line of the usage: the line they come closest to, where each is a form."""
    what = "an argument is missing, too many, or given twice"
    text = usage.partition("Usage:\n")[2].partition("\n\n")[0]
    # Of a form that goes on in the next line, what must be given is shown.
    lines = [line.strip() for line in re.sub(r"\n {4,}", "\0", text).splitlines() if "--help" not in line]
    forms = [re.sub(r"[ \0]\[[^]]*\](\.\.\.)?", "", line) if "\0" in line else line for line in lines]
    first = [re.sub(r" [\[A-Z].*", "", form.removeprefix(f"sandbox-cli {name}")) for form in forms]
    verbs = [re.findall("[a-z]+", words) for words in first]
    if len(forms) == 1:
        return f"{what}: {forms[0]}"
    if not all(verbs):
        meant = [form for form, words in zip(forms, verbs, strict=True) if set(words) & set(given[:1])]
        return f"{what}: {' | '.join(meant or forms)}"
    for form, words in zip(forms, verbs, strict=True):
        if set(words) & set(given[:1]):
            return f"{what}: {form}"
    return f"say what to do: {', '.join(dict.fromkeys(words[0] for words in verbs))}"


def _open_standard_streams() -> None:
    """A descriptor that was closed before us would become a socket's, and be written to as output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as fault:
        if fault.errno in FULL:
            raise
        return code or _output_is_gone()
    return code


def _output_is_gone() -> int:
    """The interpreter flushes stdout once more at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return OUTPUT_CLOSED


if __name__ == "__main__":
    sys.exit(main())
