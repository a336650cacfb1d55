"""How an agent is started in a sandbox: its arguments, and the script that finds it there.

In: a row of the table, a prompt or a person's own words. Out: argument lists. A word that is not the table's reaches
the guest as an argument of its own, never inside the text of a script. The agent is found in this order: the sandbox's
own ~/.local/bin, PATH, the tools volume where that is marked as whole; else it is installed into the sandbox. It is
started by its absolute path, and PATH is only added to: what lies elsewhere under its name is never run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cli.agents.table import Agent, Npm, Script
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

TOOLS_PATH = "/sandbox/tools"
"""Where a run mounts the tools volume, read-only; its installer mounts it there too and has it as HOME."""
READY = ".sandbox-ready"
"""The file at the top of the volume that an installer makes last."""
BIN = ".local/bin"
"""Below HOME, or below the tools volume."""
NOT_STARTED = 127

# $1 is the name of the program, $2 what would be installed, the rest the agent's. What is installed here writes to
# stderr: stdout is the agent's.
_FIND = f"""\
sandbox_program=$1 sandbox_version=$2
shift 2
sandbox_look() {{
    sandbox_found=
    while [ $# -gt 0 ]; do
        case $1 in /*) if [ -f "$1/$sandbox_program" ] && [ -x "$1/$sandbox_program" ]; then
            sandbox_found=$1/$sandbox_program
            return
        fi ;; esac
        shift
    done
}}
sandbox_on_path() {{
    sandbox_ifs=$IFS IFS=:
    set -f
    sandbox_look $PATH
    set +f
    IFS=$sandbox_ifs
}}
sandbox_own=$HOME/{BIN}
sandbox_tools={TOOLS_PATH}/{BIN}
PATH=$PATH:$sandbox_own
[ ! -e {TOOLS_PATH}/{READY} ] || PATH=$PATH:$sandbox_tools
export PATH
sandbox_look "$sandbox_own"
[ -n "$sandbox_found" ] || sandbox_on_path
"""
_INSTALL = f"""\
if [ -z "$sandbox_found" ]; then
    echo "sandbox: installing $sandbox_version into the sandbox" >&2
    sandbox_install >&2 </dev/null
    sandbox_look "$sandbox_own"
fi
if [ -z "$sandbox_found" ]; then
    echo "sandbox: $sandbox_version could not be installed: see above, and for refused names sandbox-cli egress" >&2
    exit {NOT_STARTED}
fi
exec "$sandbox_found" "$@"
"""


def argv(agent: Agent, arguments: Sequence[str]) -> tuple[str, ...]:
    """The process that starts `agent` with `arguments`, which it gets as they are."""
    script = f"{_FIND}sandbox_install() {{\n{install_script(agent)}}}\n{_INSTALL}"
    return ("sh", "-c", script, agent.binary, agent.binary, described(agent), *arguments)


def install_script(agent: Agent) -> str:
    """Shell that installs `agent` below $HOME, its program in $HOME/.local/bin. It changes nothing outside $HOME but
    below /tmp, and fails by its exit status."""
    source = agent.source
    if isinstance(source, Npm):
        package = shlex.quote(f"{source.package}@{source.version}")
        return (
            'npm install --global --prefix "$HOME/.local" --cache /tmp/npm-cache --no-audit --no-fund'
            f" --no-update-notifier --loglevel=error {package}\n"
        )
    if isinstance(source, Script):
        settings = "".join(f"{name}={value} " for name, value in source.env.items())
        return (
            f"curl -fsSL --proto =https -o /tmp/sandbox-install {shlex.quote(source.url)} &&\n"
            f"{settings}bash /tmp/sandbox-install\n"
        )
    places = "".join(f"{machine}) url={shlex.quote(url)} ;;\n" for machine, url in sorted(source.urls.items()))
    return (
        f"url= directory=$HOME/{BIN}\n"
        f"case $(uname -m) in\n{places}esac\n"
        '[ -n "$url" ] && mkdir -p "$directory" && curl -fsSL --proto =https -o "$directory/.new" "$url" &&\n'
        f'chmod 755 "$directory/.new" && mv "$directory/.new" "$directory/"{shlex.quote(agent.binary)}\n'
    )


def described(agent: Agent) -> str:
    """Name and version, for a person."""
    return f"{agent.name} {agent.source.version}".rstrip()


def headless(agent: Agent, prompt: str, extra: Sequence[str] = ()) -> tuple[str, ...]:
    """The agent's own arguments (see `argv`) for work without a person: it asks nothing and ends by itself. Raises
    where it has no such form, or the prompt would be taken for something else."""
    if agent.headless is None:
        raise SandboxError(f"{agent.name} works in a terminal only: it cannot be given work without one")
    _check_prompt(prompt)
    return (*agent.headless, prompt, *agent.skip_permission, *extra)


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise SandboxError("the prompt is empty")
    if "\0" in prompt:
        raise SandboxError("the prompt has a NUL character in it")
    if prompt.startswith("-"):
        raise SandboxError(f"the prompt begins with a dash, and would be taken for a flag: {clean(prompt)[:60]}")
