"""A mirror: where it is, and how objects in it are called.

In: the mapping `mirror` of the person's settings, and names that a bucket lists. Out: a `Mirror`, an `Object`, or None
for a name that is not one of ours. A bucket is somebody else's machine: what it lists is only names until each is
taken apart here, and only what could have been put together here is taken.

An object is `<prefix><repository>/<sandbox>/<kind>-<time>-<commit>.bundle`. The repository is known by the first 16
digits of the smallest of its first commits, the time is UTC.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cli import config
from cli.config import Config
from cli.session import SANDBOX_ID
from sandboxd.envnames import ENV_NAME
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

KINDS = ("bring-back", "checkpoint")
REPOSITORY_DIGITS = 16
MIB = 2**20
# docs.aws.amazon.com "Bucket naming rules", and the older ones that other stores still take.
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
REGION = re.compile(r"[a-z0-9-]{1,64}")
PREFIX = re.compile(r"(?:(?!\.\.?(?:/|$))[A-Za-z0-9!_.*'()-]+(?:/(?!$)|/?$))+")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LAST = re.compile(r"(bring-back|checkpoint)-([0-9]{8}T[0-9]{6}Z)-([0-9a-f]{40}|[0-9a-f]{64})\.bundle")
REPOSITORY = re.compile(f"[0-9a-f]{{{REPOSITORY_DIGITS}}}")


class MirrorError(SandboxError):
    """The mirror cannot be used, or what it holds is not taken; the message says why."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """`endpoint` is "" for Amazon's own; `*_env` are names of variables, whose values are looked up when needed.

    `every_checkpoint` says whether checkpoints are uploaded too. `prefix` is empty or ends with a slash. `config` is
    the file that a person named with --config, "" where there was none.
    """

    bucket: str
    region: str = "us-east-1"
    endpoint: str = ""
    prefix: str = ""
    path_style: bool = False
    access_key_env: str = "AWS_ACCESS_KEY_ID"
    secret_key_env: str = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 - a variable's name
    session_token_env: str = "AWS_SESSION_TOKEN"  # noqa: S105
    every_checkpoint: bool = False
    max_object_mb: int = 2048
    config: str = ""

    @property
    def named(self) -> str:
        """The words, a blank before them, with which a command finds these settings again."""
        return f" --config={shlex.quote(self.config)}" if self.config else ""

    @property
    def most_bytes(self) -> int:
        return self.max_object_mb * MIB


@dataclass(frozen=True, slots=True)
class Object:
    """`time` is as it stands in the name, `YYYYMMDDTHHMMSSZ`; `key` is the whole name."""

    key: str
    repository: str
    sandbox: str
    kind: str
    time: str
    commit: str

    @property
    def shown_time(self) -> str:
        """RFC 3339."""
        day, _, clock = self.time.partition("T")
        return f"{day[:4]}-{day[4:6]}-{day[6:]}T{clock[:2]}:{clock[2:4]}:{clock[4:]}"


def of(given: Mapping[str, object], where: str, file: str | None = None) -> Mirror | None:
    """The mirror in the person's settings, None where there is none; raises MirrorError with `where`, the file that
    said it, and every fault. `file` is --config's."""
    if not given:
        return None
    from sandboxd import plain_yaml  # loads the YAML reader, which most runs do not need

    faults: list[str] = []
    whole = plain_yaml.Section("mirror", given, faults)
    s3 = whole.section("s3")
    upload = whole.take("upload", "bring-back", lambda value: value in ("bring-back", "all"), "bring-back or all")
    most = whole.take("max_object_mb", 2048, _is_megabytes, "a number from 1 to 5120")
    bucket = s3.take("bucket", "", _fits(BUCKET), "a bucket's name")
    if not bucket and not faults:
        s3.fault("bucket", "it must be given")
    prefix = s3.take("prefix", "", _fits(PREFIX), "names with slashes between them")
    found = Mirror(
        bucket=bucket,
        region=s3.take("region", "us-east-1", _fits(REGION), "a region's name"),
        endpoint=s3.take("endpoint", "", _is_endpoint, "https://HOST[:PORT], or http:// on loopback").rstrip("/"),
        prefix=f"{prefix.rstrip('/')}/" if prefix else "",
        path_style=s3.take("path_style", False, lambda value: isinstance(value, bool), "true or false"),
        access_key_env=s3.take("access_key_env", "AWS_ACCESS_KEY_ID", _fits(ENV_NAME), "a variable's name"),
        secret_key_env=s3.take("secret_key_env", "AWS_SECRET_ACCESS_KEY", _fits(ENV_NAME), "a variable's name"),
        session_token_env=s3.take("session_token_env", "AWS_SESSION_TOKEN", _fits(ENV_NAME), "a variable's name"),
        every_checkpoint=upload == "all",
        max_object_mb=most,
        config=file or "",
    )
    s3.done()
    whole.done()
    if faults:
        raise MirrorError(f"{clean(where)}: {'; '.join(clean(fault) for fault in faults)}")
    return found


def in_force(environ: Mapping[str, str], project: Path, file: str | None = None) -> Mirror | None:
    """The mirror of the person who works in `project`; `file` is --config's."""
    return said(config.load(environ, project, file), file)


def said(settings: Config, file: str | None) -> Mirror | None:
    return of(settings.mirror, settings.origin.get("mirror", ""), file)


def name(mirror: Mirror, root: str, sandbox: str, kind: str, commit: str, when: float) -> Object:
    """What an object will be called; `root` is the repository's first commit."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(when))
    repository = root[:REPOSITORY_DIGITS]
    key = f"{mirror.prefix}{repository}/{sandbox}/{kind}-{stamp}-{commit}.bundle"
    found = read(mirror, key)
    if found is None:
        raise MirrorError(f"'{clean(sandbox)[:100]}' cannot stand in an object's name")
    return found


def read(mirror: Mirror, key: str) -> Object | None:
    """The parts of an object's name; None for one that no version of this program gives."""
    if not key.startswith(mirror.prefix) or len(key) > 1024:
        return None
    parts = key[len(mirror.prefix) :].split("/")
    if len(parts) != 3:
        return None
    repository, sandbox, last = parts
    match = LAST.fullmatch(last)
    if not match or not REPOSITORY.fullmatch(repository) or not SANDBOX_ID.fullmatch(sandbox):
        return None
    return Object(key, repository, sandbox, match[1], match[2], match[3])


def _fits(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_megabytes(value: object) -> bool:
    # One PUT takes 5 GiB at most.
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 5120


def _is_endpoint(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        return False
    plain = not (parts.username or parts.password or parts.query or parts.fragment) and parts.path in ("", "/")
    secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    return plain and secure and bool(parts.hostname) and port_is_one
