"""Make a sandbox, run a command in it, bring its commits back.

Usage:
  sandbox-cli run [--allow=HOST]... [--deny=HOST]... [--allow-tcp=HOST:PORT]...
              [--env=KV]... [--label=KV]... [--volume=SPEC]...
              [--fallback=AGENT]... [options] -- CMD...

Inside a git repository HEAD goes in as a bundle and is checked out in
/workspace, where the command starts. When it ends, everything it left there is
committed and comes back to refs/sandbox/NAME; no branch, index or working tree
is touched. The exit code is the command's; 1 if it was 0 and its commits could
not come back.

Options:
  --name=NAME         the sandbox's name, and the one below refs/sandbox/
                      (default: the sandbox's id); a ref of an earlier run of
                      that name is replaced, and how to keep its commits is
                      printed
  --project=DIR       the repository to take (default: the one around the
                      current directory)
  --no-workspace      take no repository
  --bind=DIR          no copy: this directory itself is /workspace, and what
                      the command changes there is changed here, checked by
                      nobody; only with a sandboxd on this machine that allows
                      it
  --bind-read-only    the same, and the command cannot change anything there
  --no-bring-back     bring nothing back (add --keep, or the commits go with
                      the sandbox)
  --checkpoint-every=D
                      also bring what is there back every 30s, 5m, 1h, 0 for
                      never (default: 5m), to refs/sandbox/checkpoints/ID:
                      `recover` finds it should this machine or the sandbox go
                      down; gone once the run's commits came back
  --keep              leave the sandbox running at the end
  -d, --detach        start the command, print the sandbox's id and leave
  -e KV, --env=KV     K=V, or K for the value it has here; may be given again
  --git               commits in the sandbox bear your name and address, as git
                      has them here
  --profile=NAME      dev, or prod: only hosts that are named, none of the
                      server's own, and no login is kept (default: what the
                      settings say, else dev)
  --config=FILE       settings to use instead of the project's .sandbox.yaml;
                      unlike that, this file is trusted
  --no-persist-auth   keep no login (of an agent; a command has none)
  --image=REF         the image to start from (default: the server's)
  --template=NAME     a size by its name (see `template ls`); --cpus, --memory
                      and --disk come before it
  --cpus=N            virtual processors
  --memory=MIB        memory in MiB
  --disk=MIB          disk in MiB
  --idle=SECONDS      end the sandbox after this long with no process and no
                      request
  --from-snapshot=ID  start from a snapshot: with its files and no repository
                      of yours
  --snapshot-every=D  let a snapshot of it be taken every so often: 30m, 2h
  --snapshot-keep=N   how many of those are kept (default: the server's, 1)
  --network=MODE      none, allowlist or open (default: the server's); no more
                      than the server's ceiling, which `doctor` prints: where
                      it is none, only none works
  --allow=HOST        a name it may reach on ports 80 and 443, beside those the
                      server allows by itself; `*.HOST` for all names below
                      one; may be given again
  --allow-tcp=HOST:PORT
                      a name it may reach on another port, such as
                      github.com:22; may be given again
  --deny=HOST         a name it may not reach, whatever is allowed; may be
                      given again
  --no-baseline       only the names given here, none of the server's own
  --volume=SPEC       NAME:/path mounts a volume there, NAME:/path:ro only to
                      read; may be given again
  --label=KV          K=V, for `list --label`; may be given again
  --fallback=AGENT    for `agent` only: who goes on where an agent that asks
                      nobody fails and has changed nothing, or its provider
                      does not answer; may be given again
  --context=C         which sandboxd: the name of a context (see `context`), or
                      an address
  --json              print the result as an object: on stdout with --detach,
                      else last on stderr
  -h, --help          show this
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from docopt import DocoptExit, docopt

from cli import config, plan
from cli.running import Run, signals_end_us
from sandboxd.errors import SandboxError


def main(args: dict[str, Any]) -> int:
    if args["--fallback"]:
        raise SandboxError("--fallback goes with `sandbox-cli agent`: another agent would not know what CMD was to do")
    asked = plan.of(args, settings(args), os.environ, plan.zone())
    with signals_end_us():
        return Run(asked).to_the_end().code


def parsed(flags: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """The arguments of a run from words that are flags of ours, and its command; raises where they do not fit."""
    try:
        return dict(docopt(str(__doc__), argv=["run", *flags, "--", "x"])) | {"CMD": list(command)}
    except DocoptExit:
        raise SandboxError("a flag is missing its value, or given twice; see sandbox-cli run --help") from None


def settings(args: dict[str, Any]) -> config.Config:
    """Those in force for a run with these arguments. The project's own are those of what becomes /workspace."""
    project = config.directory(args["--project"] or args["--bind"])
    return config.load(os.environ, project, args["--config"], args["--profile"])
