"""The agents we know, as data. A new one is a new row.

In: a name. Out: an `Agent`. Sources: each vendor's documentation of its command line; versions are those that were
tried in a sandbox of ours, or, where that was not possible, the newest known when the row was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean


class Npm(NamedTuple):
    """A package of the npm registry, at one version."""

    package: str
    version: str


class Script(NamedTuple):
    """A vendor's own installer, with the variables it is told by. `unpinned` says why there is no version, where there
    is none."""

    url: str
    env: Mapping[str, str] = {}
    version: str = ""
    unpinned: str = ""


class Release(NamedTuple):
    """A program by itself, at an address for each machine as `uname -m` names it."""

    urls: Mapping[str, str]
    version: str


class Agent(NamedTuple):
    """One agent's command line.

    `headless` is what precedes the prompt, None for an agent that works in a terminal only; `skip_permission` makes it
    ask nothing; `logins` are files relative to HOME; `env` are variables that are forwarded where the person has them,
    `forced` those that are always set; `hosts` are the names it needs to work, `probe` the one whose answer says that
    its provider is up, "" for no probe.
    """

    name: str
    binary: str
    source: Npm | Script | Release
    headless: tuple[str, ...] | None = None
    skip_permission: tuple[str, ...] = ()
    logins: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    forced: Mapping[str, str] = {}
    hosts: tuple[str, ...] = ()
    probe: str = ""


def _keys(*providers: str) -> tuple[str, ...]:
    return tuple(f"{provider}_API_KEY" for provider in providers)


AGENTS: dict[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent(
            name="claude", binary="claude", source=Npm("@anthropic-ai/claude-code", "2.1.332"),
            headless=("-p",), skip_permission=("--dangerously-skip-permissions",),
            logins=(".claude/.credentials.json", ".claude.json"),
            env=(
                "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "CLAUDE_CODE_USE_BEDROCK",
                "CLAUDE_CODE_USE_VERTEX",
            ),
            hosts=("api.anthropic.com",), probe="api.anthropic.com",
        ),
        Agent(
            name="codex", binary="codex", source=Npm("@openai/codex", "0.171.0"),
            headless=("exec",), logins=(".codex/auth.json",),
            env=("CODEX_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"),
            hosts=("api.openai.com",), probe="api.openai.com",
        ),
        Agent(
            name="gemini", binary="gemini", source=Npm("@google/gemini-cli", "0.61.0"),
            headless=("-p",), skip_permission=("--yolo",),
            logins=(".gemini/oauth_creds.json", ".gemini/google_accounts.json", ".gemini/settings.json"),
            env=(
                "GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_CLOUD_PROJECT",
                "GOOGLE_CLOUD_LOCATION",
            ),
            hosts=("generativelanguage.googleapis.com",), probe="generativelanguage.googleapis.com",
        ),
        Agent(
            name="opencode", binary="opencode", source=Npm("opencode-ai", "1.18.33"),
            headless=("run",), logins=(".local/share/opencode/auth.json",),
            env=(
                *_keys("ANTHROPIC", "OPENAI", "GEMINI", "GROQ", "OPENROUTER"), "OPENCODE_DISABLE_AUTOUPDATE",
            ),
        ),
        Agent(
            name="cline", binary="cline", source=Npm("cline", "3.0.65"),
            headless=(), skip_permission=("--auto-approve", "true"),
            env=_keys("ANTHROPIC", "CLINE", "OPENAI", "OPENROUTER", "AI_GATEWAY", "V0"),
        ),
        Agent(
            name="copilot", binary="copilot", source=Npm("@github/copilot", "1.0.102"),
            env=("COPILOT_GITHUB_TOKEN", "GH_TOKEN", "GITHUB_TOKEN", "GH_HOST", "COPILOT_MODEL", "COPILOT_API_URL"),
        ),
        Agent(
            name="cursor", binary="cursor-agent",
            source=Script("https://cursor.com/install", unpinned="its installer takes no version"),
            env=("CURSOR_API_KEY", "CURSOR_API_ENDPOINT"), forced={"NO_OPEN_BROWSER": "1"},
        ),
        Agent(
            name="devin", binary="devin",
            source=Script("https://cli.devin.ai/install.sh", unpinned="its installer takes no version"),
            env=("DEVIN_API_KEY", "DEVIN_API_BASE_URL"),
        ),
        Agent(
            name="goose", binary="goose",
            source=Script(
                "https://github.com/block/goose/releases/download/stable/download_cli.sh",
                {"CONFIGURE": "false", "GOOSE_BIN_DIR": '"$HOME/.local/bin"', "GOOSE_VERSION": "v1.45.0"}, "1.45.0",
            ),
            env=(
                *_keys("ANTHROPIC", "OPENAI", "GOOGLE", "GROQ", "OPENROUTER"), "GOOSE_PROVIDER", "GOOSE_MODEL",
                "GOOSE_FAST_MODEL", "GOOSE_MODE",
            ),
            forced={"GOOSE_DISABLE_KEYRING": "1"},
        ),
        Agent(
            name="kilocode", binary="kilocode", source=Npm("@kilocode/cli", "7.8.1"),
            env=_keys("KILOCODE", "ANTHROPIC", "OPENAI", "GEMINI", "GROQ", "OPENROUTER"),
        ),
        Agent(
            name="openhands", binary="openhands",
            source=Release(
                {
                    machine: f"https://github.com/OpenHands/OpenHands-CLI/releases/download/1.16.0/openhands-linux-{name}"
                    for machine, name in (("x86_64", "x86_64"), ("aarch64", "arm64"))
                },
                "1.16.0",
            ),
            env=(
                "LLM_API_KEY", "LLM_MODEL", "LLM_BASE_URL", "ANTHROPIC_API_KEY", "OPENAI_API_KEY",
                "OPENHANDS_CLOUD_URL",
            ),
        ),
        Agent(
            name="qwen", binary="qwen", source=Npm("@qwen-code/qwen-code", "0.24.4"),
            env=(
                *_keys("OPENAI", "ANTHROPIC", "GEMINI", "GOOGLE", "DASHSCOPE", "OPENROUTER", "BAILIAN_CODING_PLAN"),
                "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_MODEL",
            ),
            forced={"SANDBOX": "1", "NO_BROWSER": "1"},
        ),
    )
}  # fmt: skip


def named(name: str) -> Agent:
    """Raises SandboxError with the names there are."""
    try:
        return AGENTS[name]
    except KeyError:
        raise SandboxError(f"no agent {clean(name)!r}; there are {', '.join(sorted(AGENTS))}") from None
