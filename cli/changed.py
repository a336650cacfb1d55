"""What a run changed in a directory of the host that it could write to: git's settings, hooks, files that are run.

In: what `survey` saw before the sandbox started and after it ended. Out: of what differs, a `gate.Review`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cli import gate, gitconfig, manifests
from cli.gate import Finding, Review
from cli.survey import Seen, Snapshot

HEADING = "changed in the directory, and run or obeyed on this machine later"
LEFT_BEHIND = frozenset({"hook", "git"})  # of these, one that is gone matters too

Settings = Sequence[tuple[str, str]] | str | None


def compare(before: Snapshot, after: Snapshot) -> Review:
    """What is there now that was not, or was different."""
    found: list[Finding] = []
    for path, now in after.seen.items():
        then = before.seen.get(path)
        if then is None or then.mark != now.mark:
            change = "added" if then is None else "changed"
            found += [Finding(path, change, now.kind, reason) for reason in _reasons(path, then, now)]
    for path, then in before.seen.items():
        if path not in after.seen and (then.kind in LEFT_BEHIND or gate.tightens(path)):
            found.append(Finding(path, "removed", then.kind, then.reason))
    for path in {**before.settings, **after.settings}:
        change, reasons = _settings(before.settings.get(path), after.settings.get(path))
        found += [Finding(path, change, "git", reason) for reason in reasons]
    return gate.listed(found, after.unseen or before.unseen)


def lines(review: Review) -> list[str]:
    """What the person reads; nothing where there is nothing to say."""
    return gate.lines(review, HEADING)


def _reasons(path: str, then: Seen | None, now: Seen) -> list[str]:
    reader = gate.READ_BY.get(gate.last(path))
    if reader is None or now.kind == "link":
        return [now.reason]
    if now.content is None or (then is not None and then.content is None):
        return [gate.UNREAD]
    return reader(then.content if then else None, now.content)


def _settings(before: Settings, after: Settings) -> tuple[str, list[str]]:
    """How one configuration file changed, and what of it matters. None is no file, which is not an empty one."""
    if before == after:
        return "changed", []
    if after is None:
        return "removed", ["git finds no settings here any more"]
    change = "added" if before is None else "changed"
    if isinstance(after, str):
        return change, [f"git's settings cannot be read: {after}"]
    known = _by_name(() if before is None or isinstance(before, str) else before)
    reasons, others = [], []
    now = _by_name(after)
    for name in {**now, **known}:
        values, effect = now.get(name, []), gitconfig.effect(name)
        if values == known.get(name):
            continue
        if effect is None:
            others.append(name)
            continue
        new = [value for value in values if value not in known.get(name, [])] or values[-1:]
        reasons += [f"{manifests.cut(name)} is '{manifests.cut(value)}': git {effect}" for value in new]
        if not values:
            reasons.append(f"{manifests.cut(name)} is not set any more")
    if others:
        reasons.append(f"other settings of git: {manifests.some(others)}")
    return change, reasons


def _by_name(settings: Sequence[tuple[str, str]]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in settings:
        found.setdefault(name, []).append(value)
    return found
