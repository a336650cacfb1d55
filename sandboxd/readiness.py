"""Getting ready: the kernel, the images and the rest are there, or being built while the API already answers.

In: what builds them, from files of this host and packages it fetches, and what they settle once they are there. Out:
the files, or an error that says how far it has come; a line on stderr and to the service manager for each step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing, suppress

import anyio
import anyio.from_thread
import anyio.lowlevel

from sandboxd import notify
from sandboxd.assets.prepare import Assets, Progress, Report
from sandboxd.errors import Conflict, Unavailable
from sandboxd.images import Status
from sandboxd.policy import DEFAULT_IMAGE
from sandboxd.termsafe import clean
from sandboxd.uids import Uids

PREPARING_S = 600.0
"""How long a step of building the images may go on without a word."""

log = logging.getLogger("sandboxd")


class AssetsState:
    """Kernel, image and the rest: there, or being built."""

    def __init__(self) -> None:
        self._assets: Assets | None = None
        self._there = anyio.Event()
        self._progress = Progress("starting", 0, "")

    def report(self, progress: Progress) -> None:
        self._progress = progress

    def ready(self, assets: Assets) -> None:
        self._assets = assets
        self._there.set()

    async def wait(self) -> None:
        await self._there.wait()

    def base_image(self) -> Status:
        """Ours, as one of the images."""
        if self._assets is None:
            return Status(DEFAULT_IMAGE, "installing")
        try:
            status = self._assets.image.stat()
            # The file's own time is a fixed one, and a link to it would change that of its inode.
            made_at = self._assets.image.parent.stat().st_mtime
        except FileNotFoundError:
            return Status(DEFAULT_IMAGE, "failed", error="its file is gone; restarting sandboxd makes it again")
        return Status(DEFAULT_IMAGE, "installed", bytes=status.st_size, installed_at=made_at)

    def get(self) -> Assets:
        if self._assets is None:
            now = self._progress
            detail = f", {now.detail}" if now.detail else ""
            raise Unavailable(clean(f"sandboxd is getting ready: {now.phase}, {now.percent} %{detail}"))
        files = (self._assets.kernel, self._assets.initramfs, self._assets.runtime, self._assets.image)
        for path in files:
            if not path.is_file():
                log.error("%s is gone; a restart of sandboxd makes it again", path)
                raise Conflict(f"the server's file {path.name} is gone; restarting sandboxd makes it again")
        return self._assets


async def make_ready(
    assets: AssetsState, build: Callable[[Report], Assets], settle: Callable[[Assets, int | None], Awaitable[str]],
    uids: Uids | None,
) -> None:  # fmt: skip
    """Builds what is missing, in a thread; then settles the backend, with a uid to try it with, and says how."""
    show = print_progress()

    def report(progress: Progress) -> None:
        assets.report(progress)
        show(progress)
        notify.status(f"{progress.phase}: {progress.percent} % {progress.detail}")
        notify.starting(PREPARING_S)

    found = await _in_daemon_thread(lambda: build(report))
    with ExitStack() as borrowed:
        uid = None if uids is None else borrowed.enter_context(closing(uids.claim())).uid
        log.info("backend %s", clean(await settle(found, uid)))
    assets.ready(found)
    log.info("ready")
    notify.ready()


async def _in_daemon_thread(call: Callable[[], Assets]) -> Assets:
    """`call` in a thread the interpreter does not wait for at its end, as it would for one of anyio's: a build can
    last minutes, and a killed one leaves nothing."""
    outcome: list[Assets | BaseException] = []
    done = anyio.Event()
    token = anyio.lowlevel.current_token()

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as fault:
            outcome.append(fault)
        with suppress(anyio.RunFinishedError):
            anyio.from_thread.run_sync(done.set, token=token)

    threading.Thread(target=work, name="build", daemon=True).start()
    await done.wait()
    match outcome[0]:
        case BaseException() as fault:
            raise fault
        case found:
            return found


def print_progress() -> Report:
    """Progress on stderr, a line per step of ten percent."""
    last: list[tuple[str, int]] = []

    def show(progress: Progress) -> None:
        step = (progress.phase, progress.percent // 10)
        if step not in last:
            last[:] = [step]
            log.info("%s: %d %% %s", clean(progress.phase), progress.percent, clean(progress.detail))

    return show
