"""Objects of an S3-compatible store: one put, one read, a listing. Nothing here deletes.

In: a `Mirror`, the environment. Out: bytes and names, both untrusted, or a MirrorError in one line. botocore speaks the
protocol (Signature Version 4) and is told everything: the credentials are the values of the variables that the settings
name, and nothing else is looked for. No profile, no file below ~/.aws, no endpoint or proxy from the environment, and
no address that hands out credentials is asked. A store that sends a byte now and then never runs into a timeout of the
library's, which are for each byte: so whole calls have an end too.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import IO, Any, NamedTuple

import botocore.config
import botocore.exceptions
import botocore.session

from cli.bucket import MIB, Mirror, MirrorError
from sandboxd.termsafe import clean

PIECE_BYTES = 1024 * 1024
SAID = 300
LISTED = 100_000
CALL_S = 300.0  # for a whole call, attempts and all; an object's bytes come on top
SLOWEST = 64 * 1024  # bytes of an object in a second
KEY_BYTES = 1024  # docs.aws.amazon.com "Naming Amazon S3 objects"
ANSWER_BYTES = 16 * MIB  # of everything but an object: a page has 1000 names, each byte of which may be an entity
# botocore's variables for these are its own affair elsewhere; here the settings say where and as whom.
NOTHING_FROM_OUTSIDE = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}
CONFIG = {
    "signature_version": "s3v4",
    "proxies": {},
    "ignore_configured_endpoint_urls": True,
    "defaults_mode": "legacy",  # "auto" would ask the instance's metadata where it is
    "connect_timeout": 10,
    "read_timeout": 60,
    "retries": {"total_max_attempts": 3, "mode": "standard"},
    # Newer checksums come as trailers, which other stores than Amazon's may not read.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


class Listed(NamedTuple):
    """One object, as the store tells of it."""

    key: str
    size_bytes: int


class Store:
    """A bucket."""

    def __init__(self, mirror: Mirror, environ: Mapping[str, str]) -> None:
        """Raises MirrorError where a variable with credentials is not set. Asks nobody yet."""
        self._mirror = mirror
        self._sockets: list[socket.socket] = []
        self._late = False
        access, secret = (_value(environ, name) for name in (mirror.access_key_env, mirror.secret_key_env))
        style = {"addressing_style": "path" if mirror.path_style else "virtual", "payload_signing_enabled": True}
        with self._understood("cannot be used"):
            session = botocore.session.Session(session_vars=NOTHING_FROM_OUTSIDE)
            self._client = session.create_client(
                "s3",
                region_name=mirror.region,
                endpoint_url=mirror.endpoint or None,
                aws_access_key_id=access,
                aws_secret_access_key=secret,
                aws_session_token=environ.get(mirror.session_token_env) or None,
                config=botocore.config.Config(s3=style, **CONFIG),
            )
            self._client.meta.events.register("before-send.s3", self._send)
            pools = self._client._endpoint.http_session._manager.pool_classes_by_scheme
            pools.update({scheme: self._kept(pool) for scheme, pool in pools.items()})

    def put(self, key: str, data: IO[bytes] | bytes, size: int) -> None:
        """One PUT; there is an object afterwards, or none."""
        with self._told(f"did not take {key}", size):
            self._client.put_object(Bucket=self._mirror.bucket, Key=key, Body=data, ContentLength=size)

    def get(self, key: str, into: IO[bytes], most: int) -> int:
        """Writes an object's bytes and counts them; raises MirrorError as soon as there are more than `most`."""
        with self._told(f"did not give {key}"):
            answer = self._client.get_object(Bucket=self._mirror.bucket, Key=key)
        with self._told(f"did not give {key}", min(answer.get("ContentLength", most), most)):
            size = 0
            # `with` the body itself would be urllib3's, with errors of its own.
            with closing(answer["Body"]) as body:
                while piece := body.read(PIECE_BYTES):
                    size += len(piece)
                    if size > most:
                        raise MirrorError(f"{_short(key)} is larger than {most} bytes")
                    into.write(piece)
            return size

    def list(self, prefix: str) -> list[Listed]:
        """Every object whose name begins so, in the store's order."""
        found: list[Listed] = []
        token: dict[str, str] = {}
        with self._told("could not be listed"):
            while len(found) < LISTED:
                page = self._client.list_objects_v2(Bucket=self._mirror.bucket, Prefix=prefix, **token)
                found += [Listed(str(one["Key"]), int(one["Size"])) for one in page.get("Contents", ())]
                if any(len(one.key.encode("utf-8", "replace")) > KEY_BYTES for one in found[-1000:]):
                    raise ValueError("a name longer than any")
                if not page.get("IsTruncated") or not page.get("NextContinuationToken") or not page.get("Contents"):
                    return found
                token = {"ContinuationToken": page["NextContinuationToken"]}
        raise MirrorError(f"the bucket {self._mirror.bucket} holds more than {LISTED} objects of this repository")

    def _send(self, request: Any, **_: Any) -> Any:
        """Instead of botocore's own sending, which reads into memory whatever comes in the place of an object."""
        if self._late:
            raise MirrorError("this call is over")  # and not tried again
        is_object, request.stream_output = request.stream_output, True
        answer = self._client._endpoint.http_session.send(request)
        if is_object and answer.status_code < 300:
            return answer
        content = b""
        try:
            for piece in answer.raw.stream(PIECE_BYTES):
                content += piece
                if len(content) > ANSWER_BYTES:
                    break
        except Exception as fault:
            raise botocore.exceptions.HTTPClientError(error=fault) from None  # as botocore does; it is tried again
        if len(content) > ANSWER_BYTES:
            answer.raw.close()
            raise MirrorError(f"the bucket {self._mirror.bucket} answers with more than {ANSWER_BYTES} bytes")
        answer._content = content
        return answer

    def _kept(self, pool: Any) -> Any:
        """A kind of connections whose sockets we know."""
        kind = pool.ConnectionCls

        def connect(connection: Any) -> None:
            kind.connect(connection)
            self._sockets.append(connection.sock)
            if self._late:
                self._hang_up()

        return type(pool.__name__, (pool,), {"ConnectionCls": type(kind.__name__, (kind,), {"connect": connect})})

    def _hang_up(self) -> None:
        self._late = True
        for one in self._sockets:
            with suppress(OSError):  # closed long ago
                socket.socket.shutdown(one, socket.SHUT_RDWR)  # not TLS's own, which is no other thread's affair

    @contextmanager
    def _told(self, what: str, size: int = 0) -> Iterator[None]:
        """A call, which `size` bytes of an object are part of; what went wrong in one line."""
        limit_s = CALL_S + max(0, size) / SLOWEST
        late = MirrorError(f"the bucket {self._mirror.bucket} {_short(what)}: it took more than {limit_s:.0f} s")
        self._late = False
        timer = threading.Timer(limit_s, self._hang_up)
        timer.daemon = True
        timer.start()
        try:
            with self._understood(what):
                yield
        except MirrorError:
            if self._late:
                raise late from None
            raise
        finally:
            timer.cancel()
        if self._late:  # what was cut off may look whole
            raise late

    @contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        """The store's own words are cut and cleaned."""
        where = f"the bucket {self._mirror.bucket}"
        try:
            yield
        except botocore.exceptions.ClientError as error:
            said: Mapping[str, Any] = error.response.get("Error", {})
            code, words = str(said.get("Code", "")), str(said.get("Message", ""))
            raise MirrorError(f"{where} {_short(what)}: {_short(f'{code}: {words}')}") from None
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError) as error:
            # Behind the endpoint stands the request, which says no more.
            words = re.sub(r'"?https?://[^\s"]*"?', self._mirror.endpoint or "Amazon's", str(error))
            raise MirrorError(f"{where} {_short(what)}: {_short(words)}; see mirror.s3.endpoint") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # The last: botocore asks again where a bucket is whenever it is sent elsewhere, without end.
            odd = type(error).__name__
            raise MirrorError(f"{where} {_short(what)}: that is no answer of S3's ({odd})") from None


def _value(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise MirrorError(f"the variable {name}, which is to hold the mirror's credentials, is not set here")
    if not value.isascii() or not value.isprintable():
        raise MirrorError(f"the variable {name} holds characters that no credential has")
    return value


def _short(text: str) -> str:
    text = clean(text)
    return text if len(text) <= SAID else f"{text[:SAID]}…"
