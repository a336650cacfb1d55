"""The operator's policy, from a file.

In: YAML, read strictly. Out: a `Policy`, or a `SetupError` that lists every fault with its place. The file is trusted
to decide and not trusted to be what its writer meant: a key that nobody knows, stands twice or means nothing here
stops the daemon, and so does everything in YAML that two readers read differently (anchors, aliases, merge keys, tags,
more than one document, yes and no as truth values, numbers with a leading zero).
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandboxd import fields, plain_yaml
from sandboxd import policy as rules
from sandboxd.errors import InvalidRequest, SetupError
from sandboxd.plain_yaml import Section
from sandboxd.policy import MODES, Limits, Policy, PoolSize
from sandboxd.store import Network
from sandboxd.vm.machine import MAX_CPUS

MAX_BYTES = 1 << 20
MAX_POOL = 32
MAX_LIMIT = (1 << 31) - 1
MAX_DISK_RATE = 1_000_000
"""MiB, and requests, per second: more than any drive does, and what QEMU takes as bytes (10^15, its throttle.h)."""
MIN_DISK_OPS = 20
"""A guest makes some 350 requests until it answers, and has a minute for it."""


def read(path: Path, built_in: Policy) -> Policy:
    """`built_in` is what holds where the file says nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
                raise SetupError(f"--policy {path} must be a file of this user's or root's that nobody else can write")
            data = file.read(MAX_BYTES + 1)
    except OSError as fault:
        raise SetupError(f"--policy {path} cannot be read: {fault.strerror}") from None
    faults: list[str] = []
    policy = parse(data, built_in, faults)
    if faults:
        raise SetupError(f"--policy {path} is not in order:" + "".join(f"\n  {fault}" for fault in faults))
    return policy


def parse(data: bytes, built_in: Policy, faults: list[str]) -> Policy:
    """What the text says; `faults` gets a line for each that was found, and the result is then of no use."""
    tree = plain_yaml.document(data, MAX_BYTES, faults)
    return built_in if faults else _policy(Section("", {} if tree is None else tree, faults), built_in)


def _policy(root: Section, built_in: Policy) -> Policy:
    allow_bind = root.take("allow_bind", built_in.allow_bind, lambda value: isinstance(value, bool), "true or false")
    built_in = _images(root, replace(built_in, allow_bind=allow_bind))
    limits = _limits(root.section("limits"), built_in.limits)
    policy = _defaults(root.section("defaults"), replace(built_in, limits=limits))
    policy = _network(root.section("network"), policy)
    policy = replace(policy, pools=_pools(root, policy))
    root.done()
    return policy


def _images(root: Section, built_in: Policy) -> Policy:
    default = root.take("default_image", built_in.default_image, lambda value: isinstance(value, str), "an image")
    images = root.take(
        "images", None, lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
        "a list of images",
    )  # fmt: skip
    for key, one in (("default_image", default), *((f"images[{at}]", one) for at, one in enumerate(images or ()))):
        try:
            rules.image_name(one)
        except InvalidRequest as fault:
            root.fault(key, fault.message.removeprefix("image: "))
    if images is not None and default not in images:
        root.fault("images", f"the default image, {fields.printable(default)}, must be among them")
    return replace(built_in, default_image=default, images=None if images is None else tuple(images))


def _limits(section: Section, built_in: Limits) -> Limits:
    # 0 is no limit for the two that are times of a sandbox.
    ranges = {
        "max_cpus": (1, MAX_CPUS),
        "max_idle_timeout_secs": (0, rules.CENTURY_S),
        "max_lifetime_secs": (0, rules.CENTURY_S),
        "max_snapshot_keep": (0, MAX_LIMIT),
        "disk_mb_per_s": (1, MAX_DISK_RATE),
        "disk_ops_per_s": (MIN_DISK_OPS, MAX_DISK_RATE),
    }
    found: dict[str, Any] = {}
    for each in dataclasses.fields(built_in):
        least, most = ranges.get(each.name, (1, MAX_LIMIT))
        expected = f"a whole number from {least} to {most}"
        found[each.name] = section.take(each.name, getattr(built_in, each.name), _whole(least, most), expected)
    section.done()
    return Limits(**found)


def _defaults(section: Section, policy: Policy) -> Policy:
    limits = policy.limits
    # What is not written is looked at too: a limit may be below the built-in default.
    ranges: dict[str, tuple[Callable[[Any], bool], float, float]] = {
        "cpus": (_number, 0.01, limits.max_cpus),
        "memory_mb": (_whole(0), rules.MIN_MEMORY_MB, limits.max_memory_mb),
        "disk_mb": (_whole(0), rules.MIN_DISK_MB, limits.max_disk_mb),
        "idle_timeout_secs": (_whole(0), 0, limits.max_idle_timeout_secs or rules.CENTURY_S),
    }
    found: dict[str, Any] = {}
    for key, (check, least, most) in ranges.items():
        value = section.take(key, getattr(policy, key), check, "a number")
        if not least <= value <= most:
            section.fault(key, f"{value} is not within the limits, {least} to {most}")
        found[key] = value
    section.done()
    return replace(policy, **found)


def _pools(root: Section, policy: Policy) -> tuple[PoolSize, ...]:
    entries = root.take("pools", [], lambda value: isinstance(value, list), "a list")
    found: dict[str, PoolSize] = {}
    for position, entry in enumerate(entries):
        section = Section(f"pools[{position}]", entry, root.faults)
        sized = section.value.get("size") is not None
        image = section.take("image", "", lambda value: isinstance(value, str) and value != "", "an image")
        size = section.take("size", 0, _whole(1, MAX_POOL), f"a whole number from 1 to {MAX_POOL}")
        if not sized:
            section.fault("size", "it is missing")
        section.done()
        wanted = image or policy.default_image
        try:
            rules.image_name(wanted)
        except InvalidRequest as fault:
            section.fault("image", fault.message.removeprefix("image: "))
        if policy.images is not None and wanted not in policy.images:
            section.fault("image", f"{fields.printable(wanted)} is not among the images that are permitted")
        elif wanted in found:
            section.fault("image", f"{fields.printable(wanted)} has a pool already")
        found[wanted] = PoolSize(image, size)
    return tuple(found.values())


def _network(section: Section, built_in: Policy) -> Policy:
    mode_names = f"one of {', '.join(MODES)}"
    ceiling: str = section.take("ceiling", built_in.ceiling, lambda value: value in MODES, mode_names)
    may_allow = section.names("may_allow", _starred(fields.hosts))
    may_allow_tcp = section.names("may_allow_tcp", _starred(fields.services))
    if may_allow_tcp is None and may_allow is not None and may_allow != ("*",):
        # Who says which names may be asked for must not find that those on other ports are left to anybody.
        may_allow_tcp = ()
    private = section.names("private", fields.hosts) or ()
    policy = replace(
        built_in,
        ceiling=ceiling,
        may_allow=built_in.may_allow if may_allow is None else may_allow,
        may_allow_tcp=built_in.may_allow_tcp if may_allow_tcp is None else may_allow_tcp,
        private=tuple(sorted({*built_in.private, *private})),
    )
    default = _default_network(section.section("default"), built_in.default_network, ceiling)
    section.done()
    return replace(policy, default_network=default)


def _default_network(section: Section, built_in: Network, ceiling: str) -> Network:
    # A stricter ceiling takes the built-in default down with it; one that is written must fit by itself.
    unsaid = min(built_in.mode, ceiling, key=MODES.index)
    before = len(section.faults)
    mode: str = section.take("mode", unsaid, lambda value: value in MODES, f"one of {', '.join(MODES)}")
    allow, deny = section.names("allow", fields.hosts), section.names("deny", fields.hosts) or ()
    allow_tcp = section.names("allow_tcp", fields.services)
    section.done()
    if MODES.index(mode) > MODES.index(ceiling):
        section.fault("mode", f"{mode} is above network.ceiling, {ceiling}")
    for key, given in (("allow", allow), ("allow_tcp", allow_tcp)):
        if given and mode != "allowlist":
            section.fault(key, f"it has no meaning with mode {mode}")
    if mode == "none":
        return Network("none")
    if mode == "open":
        return Network("open", None, deny)
    if allow_tcp is None:
        allow_tcp = built_in.allow_tcp if allow is None else ()
    allow = (built_in.allow or ()) if allow is None else allow
    if not allow and not allow_tcp and len(section.faults) == before:
        section.fault("allow", "an allowlist that names nothing is refused; write mode: none")
    return Network("allowlist", allow, deny, allow_tcp)


def _starred(normal: Callable[[str, list[str]], tuple[str, ...]]) -> Callable[[str, list[str]], tuple[str, ...]]:
    """`*` alone permits every name."""
    return lambda key, entries: ("*",) if entries == ["*"] else normal(key, entries)


def _whole(least: int, most: int = MAX_LIMIT) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0
