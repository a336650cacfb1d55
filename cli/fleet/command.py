"""Several agents at once, each in a sandbox of its own and for a branch of its
own; then merge what they made.

Usage:
  sandbox-cli agent fleet run -f FILE [--keep] [--checkpoint-every=D]
              [--config=FILE] [--profile=NAME] [--context=C] [--json]
  sandbox-cli agent fleet status [--json]
  sandbox-cli agent fleet land BRANCH [--unverified] [--onto=BRANCH] [--json]
  sandbox-cli agent fleet land --all [--unverified] [--onto=BRANCH] [--json]
  sandbox-cli agent fleet (-h | --help)

`run` gives every task of FILE to an agent in a sandbox, all from the commit
that is HEAD now, and brings its commits back to refs/sandbox/fleet/BRANCH; no
branch moves. A task is verified where its verify command succeeded behind the
agent, or where it has none and the agent did; else it is rejected or failed;
it is lost where its process or its sandbox was killed. Ctrl-C ends the agents
and brings back what there is. The exit code is 1 unless all are verified.

`status` says what became of the last fleet in this repository. `land` merges
what a task brought back into the branch you are on, with --no-ff: verified
tasks only, onto the commit the fleet started from. What of it would be
executed later is listed first. A conflict is left for you.

Options:
  -f FILE, --file=FILE   the fleet file; see docs/fleet.md
  --keep                 leave the sandboxes running at the end
  --checkpoint-every=D   how often what a sandbox holds is saved to the
                         repository, such as 30s or 5m; 0 for never
  --config=FILE          settings to use instead of the project's .sandbox.yaml
  --profile=NAME         dev or prod
  --context=C            which sandboxd: a context's name, or an address
  --all                  every task that can be landed, in the file's order;
                         the others are named with the reason
  --unverified           also tasks that failed or were rejected, if something
                         came back
  --onto=BRANCH          you are on this branch, and mean to merge although it
                         is not where the fleet started
  --json                 print the result as an object
  -h, --help             show this
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def main(args: dict[str, Any]) -> int:
    if args["run"]:
        from cli.fleet import run

        return run.main(args)
    if args["land"]:
        from cli.fleet import land

        return land.main(args)
    return _status(as_json=args["--json"])


def _status(*, as_json: bool) -> int:
    from cli import place, repository
    from cli.fleet import report, state

    found = repository.locate(Path("."))
    if found is None:
        raise state.StateError("a fleet belongs to a repository: ask inside one")
    store = state.Store.of(place.config_dir(), found.common_dir)
    fleet = store.read()
    if fleet is None:
        raise state.StateError("no fleet was run in this repository: sandbox-cli agent fleet run -f FILE runs one")
    report.tell(state.truth(fleet, state.alive), store, as_json=as_json)
    return 0
