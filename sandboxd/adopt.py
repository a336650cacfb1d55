"""What a restart takes back, and what it clears away.

In: the records of an earlier daemon and what still runs. Out: each record with its machine, or without one.
The lock on the state directory comes first, so nothing of a living daemon is ever looked at. A machine with a
whole record is taken back; one whose create never finished, or whose end was asked for, is ended; files that
belong to no record go. A sandbox whose machine is gone is shown as terminated and its disk is put aside:
nobody asked for its end. One whose record cannot be read is left alone with all that is its own.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import anyio.to_thread

from sandboxd.audit import Audit
from sandboxd.errors import SetupError
from sandboxd.lifecycle import State, move
from sandboxd.service import Backend, Places, put_aside, quiesce
from sandboxd.store import SandboxRecord, Store, Unreadable
from sandboxd.termsafe import clean
from sandboxd.unixpath import make_private
from sandboxd.vm.machine import Machine

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A record as it is now. `machine` is None where it has ended."""

    record: SandboxRecord
    machine: Machine | None


def lock(state_dir: Path) -> int:
    """Makes the state directory if need be and holds it until the descriptor is closed. `SetupError`
    otherwise."""
    try:
        make_private(state_dir)
        directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            info = os.fstat(directory)
            if info.st_uid != os.geteuid() or info.st_mode & 0o022:
                raise SetupError(f"{state_dir} must belong to this user and be writable by nobody else")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open("lock", flags, 0o600, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as fault:
        raise SetupError(f"the state directory {state_dir} cannot be used: {fault.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SetupError(f"another sandboxd uses the state directory {state_dir}") from None
    return fd


async def adopt(
    places: Places, store: Store, backend: Backend, audit: Audit
) -> tuple[list[Adopted], list[Unreadable]]:
    """Oldest first, and what is left alone. Afterwards every process, socket and file below the state directory has an
    owner."""
    places.sandboxes.mkdir(mode=0o700, exist_ok=True)
    found: list[Adopted] = []
    records, unreadable = store.sandboxes()
    for record in records:
        if record.state is State.PENDING:
            log.info("%s: its create never finished: it is removed", record.id)
            if record.id in audit.past.created and record.id not in audit.past.ended:
                audit.record("sandbox.terminated", record.id, reason="machine")
            store.forget(record.id)
            continue
        found.append(await _look(places, store, backend, audit, record))
    for one in unreadable:
        log.error("%s: its record was written by another version: %s; it is left as it is", one.id, clean(one.why))
    left = {one.id for one in unreadable}
    known = frozenset(one.record.id for one in found if one.machine is not None) | left
    await anyio.to_thread.run_sync(backend.sweep, places.sandboxes, known)
    owners = {one.record.id for one in found} | left
    _clear(places.sandboxes, known, "sandboxes")
    _clear(places.outputs, owners, "output")
    _clear(places.disks, {f"{owner}.img" for owner in owners}, "disks")
    return found, unreadable


async def _look(
    places: Places, store: Store, backend: Backend, audit: Audit, record: SandboxRecord
) -> Adopted:
    if record.state is State.TERMINATED:
        await _finish(places, backend, record)
        return Adopted(record, None)
    machine = await backend.adopt(places.machine(record.id), record.id)
    if machine is not None:
        log.info("%s: its machine still runs: it is taken back", record.id)
        return Adopted(record, machine)
    log.warning("%s: its machine is gone: it is shown as terminated", record.id)
    put_aside(places, record.id)
    if record.id not in audit.past.ended:
        audit.record("sandbox.terminated", record.id, reason="machine")
    ended = replace(record, state=move(record.state, State.TERMINATED), ended_because="its machine is gone")
    store.put_done(ended)
    return Adopted(ended, None)


async def _finish(places: Places, backend: Backend, record: SandboxRecord) -> None:
    """Of a sandbox whose end was asked for: a daemon that was killed meanwhile had perhaps not seen to its volumes. The
    rest of its end is the sweep's."""
    if record.volumes and (machine := await backend.adopt(places.machine(record.id), record.id)) is not None:
        await quiesce(machine, record)
        await machine.terminate()


def _clear(directory: Path, known: frozenset[str] | set[str], what: str) -> None:
    """Removes what no record names. Links are removed, never followed."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name in known:
            continue
        log.info("%s/%s has no owner: it is removed", what, entry.name)
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
