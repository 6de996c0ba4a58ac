# SPDX-License-Identifier: Apache-2.0
"""Spans of OpenTelemetry, where the program has imported its API; nothing where it has not.

Which spans are kept, and where they go, is what the program's SDK says: without one the API drops
them. :func:`fanin.trace` is another thing, and needs none of this.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from .errors import FaninError

_T = TypeVar("_T")


class _Api(NamedTuple):
    """What is used of OpenTelemetry."""

    tracer: Any
    trace: Any
    context: Any
    propagate: Any


def _load(provider: Any = None) -> _Api | None:
    """provider: of tracers, None: the program's, also if it is set later."""
    try:
        from opentelemetry import context, propagate, trace
    except ImportError:
        return None
    return _Api(trace.get_tracer("fanin", tracer_provider=provider), trace, context, propagate)


_loaded = functools.cache(_load)


def _api() -> _Api | None:
    """None also where the program has not imported it: nobody keeps spans then, and an import would
    cost the first pull a tenth of a second."""
    return _loaded() if "opentelemetry.trace" in sys.modules else None


class Span:
    """What a ``with span(...)`` gives; this one does nothing."""

    recording = False
    """Whether what :meth:`set` is told goes anywhere."""

    def set(self, **attributes: Any) -> None:
        """Adds attributes ``fanin.<name>``; None: leaves one out. Any thread; does not block."""

    def fail(self, kind: str, message: str) -> None:
        """Says that it failed though nothing is raised. kind: a code's name."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        pass


class _Span(Span):
    """One of OpenTelemetry's, current in this thread or task until it is left."""

    def __init__(self, api: _Api, name: str, kind: str, attributes: dict[str, Any]) -> None:
        self._api = api
        self._span = api.tracer.start_span(name, kind=getattr(api.trace.SpanKind, kind.upper()))
        self._token: Any = None
        self.recording = self._span.is_recording()
        self.set(**attributes)

    def set(self, **attributes: Any) -> None:
        if not self.recording:
            return
        for name, value in attributes.items():
            if value is not None:
                # Their integers end at 63 bits; steps do not.
                long = isinstance(value, int) and value >= 1 << 63
                self._span.set_attribute(f"fanin.{name}", str(value) if long else value)

    def fail(self, kind: str, message: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._api.trace.StatusCode.ERROR, message)

    def __enter__(self) -> Span:
        api = self._api
        self._token = api.context.attach(api.trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._api.context.detach(self._token)
        if error is not None:
            code = error.name if isinstance(error, FaninError) else type(error).__name__
            self._span.record_exception(error)
            self.fail(code, str(error))
        self._span.end()


_NOTHING = Span()


def span(name: str, kind: str = "internal", /, **attributes: Any) -> Span:
    """A span for a ``with`` block, below the one that is current; what leaves it is an error of it.

    kind: "internal", "client" or "server". attributes: see :meth:`Span.set`.
    """
    api = _api()
    return _NOTHING if api is None else _Span(api, name, kind, attributes)


def carried() -> dict[str, str]:
    """The current span as headers (``traceparent`` unless the program's propagators are others),
    for another process; {} if there is none."""
    headers: dict[str, str] = {}
    api = _api()
    if api is not None:
        api.propagate.inject(headers)
    return headers


@contextlib.contextmanager
def within(headers: Mapping[str, str] | Any) -> Iterator[None]:
    """A ``with`` block below the span that *headers* carry, unless one is current already, which
    an instrumented server's is. headers: with ``get``; None: of nobody."""
    api = None if headers is None else _api()
    if api is None or api.trace.get_current_span().get_span_context().is_valid:
        yield
        return
    token = api.context.attach(api.propagate.extract(headers))
    try:
        yield
    finally:
        api.context.detach(token)


def carry(work: Callable[..., _T]) -> Callable[..., _T]:
    """*work* for another thread: it runs there below the span that is current here and now."""
    api = _api()
    if api is None:
        return work
    here = api.context.get_current()

    def run(*arguments: Any) -> _T:
        token = api.context.attach(here)
        try:
            return work(*arguments)
        finally:
            api.context.detach(token)

    return run
