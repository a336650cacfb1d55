"""An agent's login between its runs."""

from __future__ import annotations

import os

from cli import place
from cli.agents.table import Agent


def saved(agent: Agent) -> bool:
    """Whether a login file of this agent is there."""
    top = os.path.join(place.config_dir(), "agents", agent.name)
    return any(os.path.isfile(os.path.join(top, name)) for name in agent.logins)
