# SPDX-License-Identifier: Apache-2.0
"""One JSON request to an inference engine, with a deadline, by the standard library only."""

from __future__ import annotations

import functools
import http.client
import io
import json
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fanin._otel import carried
from fanin.errors import RequestError, status_name

FAILURES = (OSError, http.client.HTTPException)
"""What :func:`ask_json` raises when no answer was got."""

_MAX_REPLY = 1 << 20
_UNSAID = re.compile(r"[\x00-\x20\x7f]")  # what http.client has in no request line


def base_url(url: str) -> str:
    """An engine's URL without a final ``/`` and without OpenAI's ``/v1``.

    Raises RequestError unless it is ``http://host[:port][/path]`` or https, of a host that can be
    looked up. One with a user or a password is refused without being told.
    """
    if isinstance(url, str) and "@" in url:
        raise RequestError.make(
            "the URL has an @ in it: a user or a password is not sent",
            "give http://HOST:PORT, and a key by api_key",
            key="url",
        )
    try:
        split = urllib.parse.urlsplit(url.strip())
        good = split.scheme in ("http", "https") and bool(split.hostname)
        good = good and split.path.isascii() and not _UNSAID.search(split.netloc + split.path)
        # These raise ValueErrors for what is no port, and no name that can be looked up.
        split.port  # noqa: B018
        split.hostname.encode("idna")  # type: ignore[union-attr]
    except (ValueError, AttributeError):
        good = False
    if not good or split.query or split.fragment:
        raise RequestError.make(
            f"{url!r} is no engine's URL", "give http://HOST:PORT, and a key by api_key"
        )
    path = split.path.rstrip("/")
    if path.endswith("/v1"):
        path = path[:-3].rstrip("/")
    return f"{split.scheme}://{split.netloc}{path}"


def checked_key(key: str | None) -> str | None:
    """A bearer token as it is sent: without whitespace at its ends, which files of secrets have.

    None stays None. Does not block; any thread. Raises RequestError, which does not tell the key,
    if nothing else is in it, or if it is not printable ASCII.
    """
    if key is None:
        return None
    bare = key.strip() if isinstance(key, str) else ""
    if not bare:
        raise RequestError.make(
            "the api_key is empty" if isinstance(key, str) else "the api_key is no text",
            "give a key, or leave it out where none is wanted",
            key="api_key",
        )
    if not (bare.isascii() and bare.isprintable()):
        raise RequestError.make(
            "the api_key has a character that no HTTP header may have",
            "give a key of printable ASCII characters",
            key="api_key",
        )
    return bare


@dataclass(frozen=True, slots=True)
class Reply:
    """What an engine answered: the HTTP status and the body as text."""

    status: int
    text: str
    retry_after: float | None = None

    def json(self) -> Any:
        """The body as JSON, None if it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    def error(self) -> dict[str, Any]:
        """The body's ``error`` object, {} if there is none."""
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        return error if isinstance(error, dict) else {}

    def told(self) -> dict[str, Any]:
        """What :meth:`error` has of ``remedy``, ``rank``, ``address`` and ``key``."""
        kinds = {"remedy": str, "rank": int, "address": str, "key": str}
        error = self.error()
        return {name: error[name] for name, kind in kinds.items() if type(error.get(name)) is kind}

    @property
    def code(self) -> str:
        """``"FANIN_ERR_..."`` if a fanin route answered with an error, else ``""``."""
        code = self.error().get("code")
        if isinstance(code, int) and not isinstance(code, bool) and code < 0:
            code = status_name(code)
        return code if isinstance(code, str) and code.startswith("FANIN_ERR_") else ""

    @property
    def reason(self) -> str:
        """The sentence in which the engine says why, in whichever of the usual forms."""
        body = self.json()
        places: list[Any] = [self.error().get("message")]
        if isinstance(body, dict):
            places += [body.get(key) for key in ("message", "error_message", "detail", "error")]
        for place in places:
            if place and isinstance(place, (str, list)):
                return (place if isinstance(place, str) else json.dumps(place))[:1000]
        return " ".join(self.text.split())[:300]


def post_json(
    url: str, path: str, body: Mapping[str, Any], *, deadline: float, api_key: str | None = None
) -> Reply:
    """:func:`ask_json` with POST."""
    return ask_json("POST", url, path, body, deadline=deadline, api_key=api_key)


def ask_json(
    method: str,
    url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    deadline: float,
    api_key: str | None = None,
    limit: int = _MAX_REPLY,
) -> Reply:
    """Sends *body* to ``url + path`` and returns the answer, whatever its status.

    method: GET, POST. path: with its query. body: None: none is sent. deadline: by
    time.monotonic(). limit: bytes of the answer; the rest is cut off. Ignores proxies of the
    environment: engines are in the same cluster. Blocks at most until the deadline or a little
    longer; any thread. The current span of OpenTelemetry goes along (``traceparent``). Raises one
    of FAILURES if there is no answer.
    """
    split = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if split.scheme == "https" else http.client.HTTPConnection
    host = re.sub("%25(?=.)", "%", split.hostname or "")  # an interface's, as URLs have it
    connection = kind(host, split.port, timeout=_remaining(deadline))
    headers = {**carried(), "Accept": "application/json"}
    content_sent = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        content_sent = json.dumps(body).encode()
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connection.response_class = functools.partial(_Response, deadline=deadline)  # type: ignore[assignment]
    try:
        connection.connect()
        connection.sock.settimeout(_remaining(deadline))
        connection.request(method, split.path + path, content_sent, headers)
        response = connection.getresponse()
        content = bytearray()  # bytes would be copied whole for each piece
        while len(content) <= limit:
            piece = response.read1(65536)
            if not piece:
                break
            content += piece
        return Reply(
            response.status,
            content[:limit].decode("utf-8", "replace"),
            _seconds(response.getheader("Retry-After")),
        )
    except FAILURES:
        raise  # of SSL's some are ValueErrors too
    except ValueError:
        # Not in its own words: they have the header that is wrong, which may be a key.
        raise http.client.HTTPException(
            "the request cannot be said in HTTP: look at the URL and the api_key"
        ) from None
    finally:
        connection.close()


class _Response(http.client.HTTPResponse):
    """Ends at the deadline also if the peer sends a byte now and then."""

    def __init__(self, sock: Any, *, deadline: float, **more: Any) -> None:
        super().__init__(sock, **more)
        raw = self.fp.detach()
        self.fp = io.BufferedReader(Until(raw, sock, deadline))


class Until(io.RawIOBase):
    """Reads of a socket, each with what is left of the time until ``deadline``."""

    def __init__(self, raw: io.RawIOBase, sock: Any, deadline: float) -> None:
        self._raw, self._sock, self.deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        self._sock.settimeout(_remaining(self.deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("nothing came in time")
    return remaining


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
