"""The tools volume: an agent that an image does not carry, installed once for every run of an endpoint.

In: an endpoint, what it offers, an agent, the sandbox its run wants. Out: that sandbox, with the agent on a volume that
it mounts read-only; without one where there can be none, and then a note says why and the run installs the agent into
itself. The installer is a sandbox of its own that reaches the package registries and nothing else, whatever the run
may reach. It has no repository, no login and no environment.

Nothing is remembered here: how far an install is, the endpoint says. A volume that a sandbox with the label INSTALL has
is being installed, whoever began it; when its one process has ended, whoever sees that first ends the sandbox. A volume
is whole when it has READY in it, which the installer makes last; one that has not is deleted, and made again.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from cli.agents.start import BIN, READY, TOOLS_PATH, described, install_script
from cli.agents.table import Agent, Npm, Script
from cli.network import covers
from cli.status import Status
from sandboxd.client import (
    Capabilities,
    Client,
    Create,
    Mount,
    Network,
    NetworkRequest,
    Process,
    Sandbox,
    Unreachable,
    Volume,
)
from sandboxd.errors import Conflict, NotFound, SandboxError
from sandboxd.termsafe import clean

INSTALL = "agent.tools.install"
VOLUME_MIB = 2048
INSTALL_S = 1800
"""An emulated machine takes four minutes for 400 MB, when nothing else runs."""
TRIES = 3
LOOK_S = 1.0
UNBEGUN_S = 60.0
"""An installer without a process: whoever made it is gone."""
PATIENCE_S = INSTALL_S + UNBEGUN_S
"""Its server ends an installer by then, if it is one of ours; whoever else has that label may run for ever."""
BUSY_S = 30.0
SHOWN_STEP_S = 15
REASON_LIMIT = 300

Make = Callable[[Create, Status], Sandbox]
"""Makes a sandbox, and waits with the endpoint's progress shown while that gets ready."""


def volume(agent: Agent) -> str:
    """The volume's name: another version, or another way to install it, is another volume."""
    what = f"{agent.binary}\0{install_script(agent)}"
    return f"agent-{agent.name}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def superseded(agent: Agent, names: list[str]) -> list[str]:
    """Those of `names` that are this agent's tools volumes of another time."""
    ours = re.compile(rf"agent-{re.escape(agent.name)}-[0-9a-f]{{8}}")
    return [name for name in names if ours.fullmatch(name) and name != volume(agent)]


def script(agent: Agent) -> str:
    """What the installer runs. The volume is written out before READY is made, and READY before the end is told."""
    return f"""\
export HOME={TOOLS_PATH}
install() {{
{install_script(agent)}}}
if ! command -v {agent.binary} >/dev/null; then
    install </dev/null || exit
    [ -f "$HOME/{BIN}/{agent.binary}" ] && [ -x "$HOME/{BIN}/{agent.binary}" ] || {{
        echo "{agent.binary} is not among what was installed" >&2
        exit 1
    }}
fi
sync && : >"$HOME/{READY}" && sync
"""


def overlaps(path: str) -> bool:
    """Whether a mount at `path` is at, around or inside the place of the tools."""
    given = path.rstrip("/") + "/"
    return given.startswith(f"{TOOLS_PATH}/") or f"{TOOLS_PATH}/".startswith(given)


def hints(agent: Agent, offer: Capabilities, network: Network) -> Iterator[str]:
    """What to allow, where a run that installs `agent` itself may not reach where it comes from."""
    source = agent.source
    if isinstance(source, Npm):
        if offer.registries and all(_closed(network, name) for name in offer.registries):
            names = ", ".join(map(clean, offer.registries))
            yield f"this run reaches no package registry; allow the one it needs with --allow (here: {names})"
        return
    urls = (source.url,) if isinstance(source, Script) else tuple(source.urls.values())
    for name in dict.fromkeys(urlsplit(url).hostname or "" for url in urls):
        if _closed(network, name):
            yield f"{agent.name} comes from {name}, which this run may not reach: add --allow {name}"


def _closed(network: Network, name: str) -> bool:
    return network.mode == "none" or (network.mode == "allowlist" and not covers(network.allow or (), name))


class Tools:
    """An agent's tools at one endpoint, for one run."""

    def __init__(
        self, client: Client, offer: Capabilities, agent: Agent, asked: Create, make: Make,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """`asked` is the sandbox that the run wants."""
        self._client, self._offer, self._agent, self._make = client, offer, agent, make
        self.notes: list[str] = []
        """For the person, once nothing is being waited for."""
        self._volume = volume(agent)
        self._patience_s = self._deadline = patience_s
        self._cut_off = False
        """Our installer ended unseen: somebody saw it succeed before us, or it failed. The volume itself tells."""
        self._possible = (
            isinstance(agent.source, Npm) and bool(offer.capabilities.get("volumes"))
            and bool(offer.registries or offer.registries_tcp) and asked.snapshot_id is None
            and not any(overlaps(mount.path) for mount in asked.volumes)
        )  # fmt: skip

    def install(self, status: Status) -> None:
        """Until the agent is on its volume, or it is said why it is not. Raises where the endpoint goes away."""
        self._deadline = time.monotonic() + self._patience_s
        try:
            while self._possible and not self._installed(status):
                if time.monotonic() > self._deadline:
                    raise SandboxError(f"the volume {self._volume} is still made and given up by others")
        except Unreachable:
            raise
        except SandboxError as fault:
            self._without(str(fault))

    def create(self, asked: Create, status: Status) -> Sandbox:
        """The run's sandbox."""
        mount = Mount(self._volume, TOOLS_PATH, read_only=True)
        for _ in range(TRIES):
            if not self._possible:
                break
            try:
                sandbox = self._make(asked._replace(volumes=(*asked.volumes, mount)), status)
            except Unreachable:
                raise
            except SandboxError:
                # Whether it was for the volume's sake: somebody may have begun to install it anew, or taken it away.
                found = self._found()
                if found is not None and self._installer(found) is None:
                    raise
                self.install(status)
                continue
            if self._whole(sandbox):
                return sandbox
            self._delete(sandbox.id)
            self._discard()
            if self._cut_off:
                self._without("its sandbox ended")
                break
            self.install(status)
        sandbox = self._make(asked, status)
        for note in hints(self._agent, self._offer, sandbox.network):
            self.notes.append(note)
        return sandbox

    def _installed(self, status: Status) -> bool:
        """One look at the endpoint, and what is to be done about it; true when nothing is."""
        found = self._found()
        if found is None:
            return self._install(status)
        installer = self._installer(found)
        if installer is not None:
            self._watch(installer.id, status, begun=False)
        return installer is None

    def _install(self, status: Status) -> bool:
        """By a sandbox of ours, if nobody else is quicker."""
        try:
            self._client.create_volume(self._volume, VOLUME_MIB)
        except Conflict:
            time.sleep(LOOK_S)  # between making it and having it, whoever made it has not got it
            return False
        sandbox = ""
        try:
            sandbox = self._make(self._installer_asked(), status).id
            self._client.start(sandbox, ("sh", "-c", script(self._agent)))
            self._watch(sandbox, status, begun=True)
        except BaseException as fault:
            if isinstance(fault, SandboxError) and not sandbox and (found := self._found()) and found.attached_to:
                return False  # a run took it for an installed one, and will see that it is none
            with suppress(SandboxError):
                if sandbox:
                    self._delete(sandbox)
                self._discard()
            raise
        for name in superseded(self._agent, [one.name for one in self._client.volumes()]):
            self.notes.append(f"{name} holds another version of {self._agent.name}: sandbox-cli volume rm {name}")
        return True

    def _installer_asked(self) -> Create:
        longest = self._offer.limits.get("max_lifetime_secs") or INSTALL_S
        return Create(
            labels={INSTALL: self._agent.name},
            network=NetworkRequest(
                mode="allowlist", allow=self._offer.registries, allow_tcp=self._offer.registries_tcp
            ),
            volumes=(Mount(self._volume, TOOLS_PATH, read_only=False),),
            lifetime_secs=min(INSTALL_S, longest),
        )

    def _watch(self, sandbox: str, status: Status, *, begun: bool) -> None:
        """Until the install in `sandbox` has ended, one way or the other. `begun` says that it was by us."""
        since = time.monotonic()
        while True:
            try:
                state = self._client.get(sandbox).state
                processes = self._client.processes(sandbox) if state == "running" else []
            except (NotFound, Conflict):
                state, processes = "terminated", []
            waited = time.monotonic() - since
            if state == "terminated":
                self._cut_off = begun
                return
            if processes and processes[0].exit_code is not None:
                self._ended(sandbox, processes[0])
                return
            if not processes and state == "running" and waited > UNBEGUN_S:
                self._give_up(sandbox, "")
                return
            if time.monotonic() > self._deadline:
                late = f"no end of the install in {sandbox} within {self._patience_s:.0f} s"
                if begun:
                    self._give_up(sandbox, late)
                else:
                    self._without(f"{late}; if that hangs, end it: sandbox-cli kill {sandbox}")
                return
            status.say(self._says(waited))
            time.sleep(LOOK_S)

    def _ended(self, sandbox: str, process: Process) -> None:
        if process.exit_code == 0:
            self._delete(sandbox)
            return
        why = self._last_words(sandbox, process.pid) or f"its installer ended with {process.exit_code}"
        self._give_up(sandbox, why)

    def _give_up(self, sandbox: str, why: str) -> None:
        """Ends an install that failed; where `why` says something, without trying it again."""
        self._delete(sandbox)
        self._discard()
        if why:
            self._without(why)

    def _without(self, why: str) -> None:
        self._possible = False
        self.notes += [
            f"{described(self._agent)} could not be installed once for all runs: {clean(why)[:REASON_LIMIT]}",
            "this run installs it into its own sandbox",
        ]

    def _last_words(self, sandbox: str, pid: int) -> str:
        """What the installer said of its failure, as one line."""
        text = b""
        with suppress(SandboxError):
            for piece in self._client.output(sandbox, pid):
                text = (text + piece.data)[-4096:]
        lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
        return "; ".join(map(clean, lines[-3:]))

    def _says(self, waited_s: float) -> str:
        waited = f": {int(waited_s) // SHOWN_STEP_S * SHOWN_STEP_S} s" if waited_s >= SHOWN_STEP_S else ""
        return f"installing {described(self._agent)}, once for all runs{waited}"

    # The endpoint

    def _found(self) -> Volume | None:
        return next((one for one in self._client.volumes() if one.name == self._volume), None)

    def _installer(self, found: Volume) -> Sandbox | None:
        """Who installs it just now."""
        if not found.attached_to:
            return None
        try:
            sandbox = self._client.get(found.attached_to)
        except NotFound:
            return None
        return sandbox if INSTALL in (sandbox.labels or {}) else None

    def _whole(self, sandbox: Sandbox) -> bool:
        return any(entry.name == READY for entry in self._client.list_dir(sandbox.id, TOOLS_PATH))

    def _delete(self, sandbox: str) -> None:
        with suppress(NotFound):
            self._client.delete(sandbox)

    def _discard(self) -> None:
        """Delete the volume. Who still has it is about to see that it is not whole."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                self._client.delete_volume(self._volume)
                return
            except NotFound:
                return
            except Conflict as busy:
                if time.monotonic() > deadline:
                    self._possible = False
                    self.notes.append(f"this run does without the volume {self._volume}: {busy.message}")
                    return
            time.sleep(LOOK_S)
