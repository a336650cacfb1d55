"""Completion of command lines by the Tab key, in bash, zsh and fish.

Usage:
  sandbox-cli completion (bash | zsh | fish)

Prints what the shell is to read:

  bash:  source <(sandbox-cli completion bash)    in ~/.bashrc
  zsh:   source <(sandbox-cli completion zsh)     in ~/.zshrc, behind compinit
  fish:  sandbox-cli completion fish | source     in ~/.config/fish/config.fish

Commands, options and agents are read from the usage texts. Names of sandboxes
are asked of sandboxd, for a second at most, and where it does not answer there
are none. Names of files are offered where one is meant, and behind `--`.

Options:
  -h, --help     show this
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from threading import Thread
from typing import Any

from cli import __main__ as top
from cli import candidates
from cli.candidates import Usages
from sandboxd.errors import SandboxError

WORDS_AS_THEY_ARE = True
PATIENCE_S = 1.0
FILES_TOO = 3
"""The exit code of `completion words` where the shell's own names of files are meant as well; a shell that offered them
wherever there are no words would offer them for a sandbox's name."""
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:/+-]*")
"""What a shell takes as it is: a server's word that is anything else would be run when the line is."""

BASH = f"""\
_sandbox_cli() {{
    local found code
    found=$(sandbox-cli completion words "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null)
    code=$?
    COMPREPLY=()
    # `compgen -W` would expand what it is given.
    [[ -z "$found" ]] || mapfile -t COMPREPLY <<< "$found"
    [[ $code != {FILES_TOO} ]] || compopt -o default 2>/dev/null
}}
complete -F _sandbox_cli sandbox-cli
"""
ZSH = f"""\
#compdef sandbox-cli
_sandbox_cli() {{
    local found code
    found="$(sandbox-cli completion words "${{(@)words[2,CURRENT]}}" 2>/dev/null)"
    code=$?
    [[ -z "$found" ]] || compadd -- "${{(@f)found}}"
    if [[ $code == {FILES_TOO} ]]; then
        compset -P '--*='
        _files
    fi
}}
if [[ "${{funcstack[1]}}" = _sandbox_cli ]]; then
    _sandbox_cli "$@"
else
    compdef _sandbox_cli sandbox-cli
fi
"""
FISH = f"""\
function __sandbox_cli_ask
    set -l typed (commandline -opc)
    set -e typed[1]
    set -g __sandbox_cli_found (sandbox-cli completion words $typed (commandline -ct) 2>/dev/null)
    test $status -ne {FILES_TOO}
end
complete -c sandbox-cli -n __sandbox_cli_ask -f -a '$__sandbox_cli_found'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(args: dict[str, Any]) -> int:
    words: list[str] = args["WORDS"]
    if words in (["-h"], ["--help"]):
        sys.stdout.write(str(__doc__).strip() + "\n")
    elif words[:1] == ["words"]:
        typed = joined(words[1:])
        offer = candidates.complete(typed, usages(), partial(names, typed))
        sys.stdout.writelines(f"{one}\n" for one in offer.words)
        return FILES_TOO if offer.files else 0
    elif len(words) == 1 and words[0] in SCRIPTS:
        sys.stdout.write(SCRIPTS[words[0]])
    else:
        raise SandboxError("completion: say for which shell: bash, zsh, fish; see sandbox-cli completion --help")
    return 0


def joined(words: Sequence[str]) -> list[str]:
    """bash hands `--option=value` over as three words."""
    after = [""] + [word if word.startswith("--") else "" for word in words]
    found = [word for word, option in zip(words, after, strict=False) if not (word == "=" and option)]
    return [*found, ""] if words and words[-1] == "=" and after[-2] else found


def usages() -> Usages:
    """Every command's text, read where it is asked for."""
    commands = [*top.COMMANDS, *top.ALIASES]

    def text(name: str) -> str:
        return str(import_module(top.COMMANDS[top.ALIASES.get(name, name)]).__doc__)

    return Usages(commands, text, {"agent": "run"})


def names(words: Sequence[str], kind: str) -> list[str]:
    """Values of an option or of a name in a usage text."""
    if kind == "--context" or (words[:1] == ["context"] and kind.endswith(" NAME")):
        return [] if kind == "add NAME" else _quietly(_contexts)
    if kind == "--network":
        return ["none", "allowlist", "open"]
    if kind == "--profile":
        from cli import profile

        return list(profile.PROFILES)
    if kind == "--template":
        return _quietly(_templates)
    if words[:1] == ["agent"] and kind in ("NAME", "--fallback"):
        from cli.agents.table import AGENTS

        return [name for name, row in AGENTS.items() if kind == "NAME" or row.headless is not None]
    if words[:1] == ["agent"] and kind == "--state":
        from cli.agents.states import STATES

        return list(STATES)
    return _quietly(partial(_sandboxes, words)) if kind.endswith("SANDBOX") else []


def _contexts() -> list[str]:
    from cli import contexts, place

    return [contexts.LOCAL, *contexts.load(place.config_dir()).named]


def _templates() -> list[str]:
    from cli import templates

    return [one.name for one in templates.every()]


def _sandboxes(words: Sequence[str]) -> list[str]:
    """Names, and ids of those without one; of the sandboxd that the line names."""
    from cli import context

    asked = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--context":
            asked = following
        elif word.startswith("--context="):
            asked = word.partition("=")[2]
    found = context.choose(asked).client.sandboxes()
    return [one.name or one.id for one in found if one.state != "terminated"]


def _quietly(ask: Any) -> list[str]:
    """Within a moment, or nothing; and nothing that a shell would not take as a word."""
    found: list[str] = []

    def run() -> None:
        try:
            found.extend(one for one in ask() if PLAIN.fullmatch(one))
        except (SandboxError, OSError):
            return

    asking = Thread(target=run, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return list(found)
