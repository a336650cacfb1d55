"""Names of images: `REGISTRY[:PORT]/REPOSITORY[:TAG][@DIGEST]`. Pure.

The grammar is the distribution project's. A name without a registry is refused and not completed: which registry it
means would be a guess of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandboxd.errors import InvalidRequest

LATEST = "latest"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?\Z")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Reference:
    """`digest` is empty where none is pinned; a pinned one decides, whatever the tag is."""

    registry: str
    repository: str
    tag: str
    digest: str

    @property
    def wanted(self) -> str:
        """As skopeo takes it, which refuses a tag beside a digest."""
        return self.by_digest(self.digest) if self.digest else f"{self.registry}/{self.repository}:{self.tag}"

    def by_digest(self, digest: str) -> str:
        return f"{self.registry}/{self.repository}@{digest}"


def parse(text: str) -> Reference:
    """`InvalidRequest` says what is wrong with it."""
    name, at, digest = text.partition("@")
    if at and not DIGEST.match(digest):
        raise InvalidRequest("image: a digest is sha256: and 64 digits of 0-9a-f")
    registry, slash, path = name.partition("/")
    if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
        raise InvalidRequest("image: name the registry too, as in registry.example/team/image:tag")
    if not _HOST.match(registry) or len(registry) > 255:
        raise InvalidRequest("image: what stands before the first / is not HOST or HOST:PORT")
    repository, colon, tag = path.partition(":")
    if not all(_PART.match(part) for part in repository.split("/")):
        raise InvalidRequest("image: a repository is lower-case words, with . _ or - in them and / between them")
    if colon and not _TAG.match(tag):
        raise InvalidRequest("image: a tag is at most 128 letters, digits, . _ and -")
    return Reference(registry, repository, tag or LATEST, digest)
