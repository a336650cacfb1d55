"""docs/agents.md lists the agents as the program knows them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.agents.table import AGENTS, Agent, Npm, Script

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()


def row(agent: Agent) -> str:
    source = agent.source
    if isinstance(source, Npm):
        origin = f"npm {source.package} {source.version}"
    else:
        url = source.url if isinstance(source, Script) else min(source.urls.values())
        kind = "script" if isinstance(source, Script) else "release"
        origin = f"{kind} of {urlsplit(url).hostname} {source.version}".rstrip()
    headless = "-" if agent.headless is None else f"`{' '.join((*agent.headless, 'PROMPT'))}`"
    logins = ", ".join(f"`{name}`" for name in agent.logins) or "-"
    return f"| {agent.name} | {origin} | {headless} | {logins} | {', '.join(agent.hosts) or '-'} |"


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_the_page_has_its_row(agent: Agent) -> None:
    assert row(agent) in PAGE.splitlines()


def test_the_page_has_no_other() -> None:
    table = PAGE.partition("## The ones we know")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 2 + len(AGENTS)
