# SPDX-License-Identifier: Apache-2.0
"""A registry behind HTTP routes, for callers that speak to a training server.

The routes, fields and replies are those that users of NCCL weight synchronisation know: endpoints
are added and removed by host and port, one call syncs them. What only a process group needed is
accepted and named in the reply's ``notices``; a field that nobody knows is an error.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fanin._http import checked_key
from fanin._http_server import Answer, HttpServer, Receive, Request, Send, asgi_answer, asgi_body
from fanin._otel import within
from fanin.engine.faults import body_of, status_of
from fanin.errors import (
    FaninError,
    HostError,
    NotFoundError,
    PullTimeoutError,
    RequestError,
    StateError,
)
from fanin.info import is_loopback, join_address

from .endpoints import KINDS, PAUSE_MODES, Endpoint, EndpointResult, SyncError, SyncResult
from .registry import Registry

_log = logging.getLogger("fanin.sync")

_PREFIX = "/api/v1"
_MAX_BODY = 1 << 20
# What a process group needed, and one-sided pulls do not.
_UNNEEDED = {
    "master_address": "workers read the trainer's ranks: there is no rendezvous",
    "master_port": "workers read the trainer's ranks: there is no rendezvous",
    "group_name": "there is no process group; endpoints are grouped by pool",
    "buffer_size_mb": "nothing is sent in buckets",
}
_MODES = {**{mode: mode for mode in PAUSE_MODES}, "in_place": "keep"}
_INVALIDATION = ("auto", "flush", "none")
_NOT_HERE = "a sync quantizes nothing: the trainer publishes its run {run} so"
_WHATS = {str: "a text", bool: "true or false", int: "an integer", float: "seconds"}
_WHATS |= {list: "a list of texts"}
_ADD = {
    "host", "port", "url", "kind", "pool", "world_size", "worker_port", "sync_weights",
    "receiver_kv_cache_dtype", "api_key", *_UNNEEDED,
}  # fmt: skip
_SYNC = {
    "step", "model_id", "pools", "pause_mode", "flush_cache", "keep_caches",
    "cache_invalidation_mode",
    "weight_version", "quantization", "skip_modules", "timeout", "skip_dead", "again", "prefetch",
    "verify_served",
    *_UNNEEDED,
}  # fmt: skip


class _Body:
    """A request's object, field by field; complaints name the field."""

    def __init__(self, body: Any, known: set[str]) -> None:
        if not isinstance(body, dict):
            raise RequestError.make("the body is no JSON object", "send an object")
        for name in body:
            if name not in known:
                raise RequestError.make(
                    f"the field {name!r} is unknown",
                    "the fields here are " + ", ".join(sorted(known)),
                    key=name,
                )
        self._body: dict[str, Any] = body

    def __contains__(self, name: str) -> bool:
        return self._body.get(name) is not None

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            what = _WHATS[kind]
            raise RequestError.make(f"{name} {value!r} is not {what}", f"send {what}", key=name)
        return value

    def raw(self, name: str) -> Any:
        return self._body.get(name)

    def one_of(self, name: str, choices: Mapping[str, str] | tuple[str, ...], default: str) -> str:
        value: str = self.get(name, str, default)
        if value not in choices:
            raise RequestError.make(
                f"{name} {value!r} is unknown", "give one of " + ", ".join(choices), key=name
            )
        return value

    def notices(self) -> list[str]:
        """Of what is accepted and does nothing."""
        found = [f"{name} is not needed: {why}" for name, why in _UNNEEDED.items() if name in self]
        for notice in found:
            _log.info("fanin.sync: %s", notice)
        return found

    def url(self) -> str:
        """Of the engine: ``url``, or ``host`` and ``port``."""
        url: str | None = self.get("url", str)
        if url is not None:
            if "host" in self or "port" in self:
                raise RequestError.make("url is given, and host or port too", "send one", key="url")
            return url
        for name in ("host", "port"):
            if name not in self:
                raise RequestError.make(f"{name} is missing", "send host and port", key=name)
        return f"http://{join_address(self.get('host', str), self.get('port', int))}"


class Service:
    """The routes of one registry, for whichever server mounts them.

    Any thread; a sync blocks the thread that calls :meth:`answer`.

    Args:
        registry: what the routes work on.
        api_key: what callers must send as bearer token, printable ASCII. Whitespace at its ends is
            dropped. None: callers need no key. Engines that these routes add then get the request's
            key, not the registry's api_key. Otherwise anybody could add a listener of their own.

    Raises:
        RequestError: *api_key* is no key, such as an empty one.
    """

    def __init__(self, registry: Registry, *, api_key: str | None = None) -> None:
        self.registry = registry
        self._api_key = checked_key(api_key)
        routes: dict[str, tuple[str, Callable[[Any], tuple[int, dict[str, Any]]]]] = {
            "add_inference_endpoint": ("POST", self._add),
            "remove_inference_endpoint": ("POST", self._remove),
            "list_inference_endpoints": ("GET", self._list),
            "sync_inference_weights": ("POST", self._sync),
            "set_sync_quantization": ("POST", self._quantize),
        }
        self._routes = {
            f"{prefix}/{name}": route for name, route in routes.items() for prefix in ("", _PREFIX)
        }
        self._routes["/health"] = ("GET", lambda body: (200, {"status": "healthy"}))

    @property
    def guarded(self) -> bool:
        """Whether callers must know a key."""
        return self._api_key is not None

    @property
    def paths(self) -> list[str]:
        """The paths that :meth:`answer` knows."""
        return sorted(self._routes)

    def answer(
        self, method: str, path: str, body: bytes = b"", authorization: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the JSON object that answer a request.

        Blocks as long as a sync takes, if it is one. Raises nothing: errors are ``{"error": {code,
        message, remedy, ...}, "detail"}``.

        Args:
            method: "GET" or "POST".
            path: without the query.
            body: of the request.
            authorization: the header.

        Returns:
            The status and the object.
        """
        if self._api_key is not None and not hmac.compare_digest(
            authorization.encode(), f"Bearer {self._api_key}".encode()
        ):
            return 401, _error_body(RequestError.make("unauthorized", "send the api_key"))
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self.paths)
            missing = NotFoundError.make(f"no route {path}", f"there are {known}")
            return 404, _error_body(missing)
        wanted, handler = route
        if method != wanted and not (method == "POST" and wanted == "GET"):
            return 405, _error_body(RequestError.make(f"{path} wants {wanted}", f"use {wanted}"))
        try:
            return handler(_parsed(body))
        except StateError as error:
            return 409, _error_body(error)
        except FaninError as error:
            return status_of(error), _error_body(error)
        except Exception as error:
            _log.exception("fanin.sync: %s", path)
            return 500, _error_body(error)

    # ------------------------------------------------------------- the routes

    def _add(self, sent: Any) -> tuple[int, dict[str, Any]]:
        body = _Body(sent, _ADD)
        notices = body.notices()
        cache = body.get("receiver_kv_cache_dtype", str, "auto")
        if cache != "auto":
            raise RequestError.make(
                f"receiver_kv_cache_dtype {cache!r} cannot be checked here",
                "leave it out; keep_caches says which caches a sync leaves",
                key="receiver_kv_cache_dtype",
            )
        if "worker_port" in body:
            body.get("worker_port", int)
            notices.append("worker_port is not needed: the engine itself is asked")
        url = body.url()
        sync = body.get("sync_weights", bool, False)
        known = {endpoint.url for endpoint in self.registry.endpoints()}
        endpoint = self.registry.add_well(
            url,
            kind=body.one_of("kind", KINDS, "auto"),
            group=body.get("pool", str, "default"),
            world_size=body.get("world_size", int),
            api_key=body.get("api_key", str),
            use_key=self.guarded,
        )
        said = "was already registered" if endpoint.url in known else "was added"
        reply = {
            "success": True,
            "message": f"endpoint {endpoint.url} {said}",
            "endpoint": _endpoint_body(endpoint, True),
            "weights_synced": False,
            "sync_message": None,
            "notices": notices,
        }
        if sync:
            self._sync_new(endpoint, reply)
        return 200, reply

    def _sync_new(self, endpoint: Endpoint, reply: dict[str, Any]) -> None:
        try:
            self.registry.sync(urls=[endpoint.url])
            reply["weights_synced"] = True
            reply["sync_message"] = "the engine has the newest step"
        except FaninError as error:
            reply["sync_message"] = str(error)

    def _remove(self, sent: Any) -> tuple[int, dict[str, Any]]:
        url = _Body(sent, {"host", "port", "url"}).url()
        if self.registry.remove(url):
            return 200, {"success": True, "message": f"endpoint {url} was removed"}
        return 200, {"success": False, "message": f"endpoint {url} was not registered"}

    def _list(self, sent: Any) -> tuple[int, dict[str, Any]]:
        _Body(sent, set())
        endpoints = self.registry.endpoints()
        healthy = self.registry.healthy()
        found = [_endpoint_body(e, e.url in healthy) for e in endpoints]
        return 200, {"endpoints": found, "count": len(found)}

    def _quantize(self, sent: Any) -> tuple[int, dict[str, Any]]:
        body = _Body(sent, {"quantization", "skip_modules"})
        run = self.registry.set_quantization(
            body.raw("quantization"), body.get("skip_modules", list)
        )
        return 200, {
            "success": True,
            "quantization": run.quantization,
            "run": run.name,
            "message": f"syncs bring full:{run.name} from now on",
            "notices": [_NOT_HERE.format(run=run.name)],
        }

    def _sync(self, sent: Any) -> tuple[int, dict[str, Any]]:
        body = _Body(sent, _SYNC)
        notices = body.notices()
        self._check_model(body)
        cache = body.one_of("cache_invalidation_mode", _INVALIDATION, "auto")
        mode = _MODES[body.one_of("pause_mode", _MODES, "retract")]
        keep = body.get("keep_caches", bool, mode == "keep" or cache == "none")
        if not body.get("flush_cache", bool, True) and not keep:
            notices.append(
                "flush_cache false is not followed: answers of the old weights would go on; "
                "keep_caches true leaves them"
            )
        try:
            result = self.registry.sync(
                body.get("step", int),
                body.get("pools", list),
                version=body.get("weight_version", str),
                timeout=body.get("timeout", float),
                pause_mode=mode,
                keep_caches=keep,
                skip_dead=body.get("skip_dead", bool, False),
                again=body.get("again", bool, False),
                prefetch=body.raw("prefetch"),
                verify_served=body.raw("verify_served"),
                quantization=body.raw("quantization"),
                skip_modules=body.get("skip_modules", list),
            )
        except SyncError as error:
            timed_out = isinstance(error, PullTimeoutError) or error.name == "FANIN_ERR_TIMEOUT"
            reply = _sync_body(error.result, str(error), cache, keep, notices)
            reply["error"] = body_of(error)["error"]
            return 504 if timed_out else 502, reply
        told = f"step {result.step} is on {len(result.results)} engines"
        if "quantization" in body:
            notices.append(_NOT_HERE.format(run=result.run))
        return 200, _sync_body(result, told, cache, keep, notices)

    def _check_model(self, body: _Body) -> None:
        model = body.get("model_id", str, self.registry.run)
        if model not in (self.registry.run, "default"):
            raise RequestError.make(
                f"model_id {model!r} is not what is synced here, run {self.registry.run!r}",
                "leave it out, or ask the server of that run",
                key="model_id",
            )


def _parsed(body: bytes) -> Any:
    if len(body) > _MAX_BODY:
        raise RequestError.make(f"the body is larger than {_MAX_BODY} bytes", "send less")
    if not body.strip():
        return {}
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError.make(f"the body is no JSON: {error}", "send an object") from None


def _error_body(error: BaseException) -> dict[str, Any]:
    return {**body_of(error), "detail": str(error), "success": False, "message": str(error)}


def _endpoint_body(endpoint: Endpoint, healthy: bool) -> dict[str, Any]:
    host, _, port = endpoint.url.rpartition("://")[2].partition("/")[0].rpartition(":")
    return {
        "host": host or endpoint.url,
        "port": int(port) if port.isdigit() else None,
        "url": endpoint.url,
        "kind": endpoint.kind,
        "pool": endpoint.group,
        "world_size": endpoint.world_size or 1,
        "healthy": healthy,
    }


def _result_body(result: EndpointResult) -> dict[str, Any]:
    place = _endpoint_body(result.endpoint, result.ok)
    return {"host": place["host"], "port": place["port"], **result.to_json()}


def _sync_body(
    result: SyncResult, message: str, cache: str, keep: bool, notices: list[str]
) -> dict[str, Any]:
    slowest: dict[str, float] = {}
    for entry in result.results.values():
        for phase, took in entry.seconds.items():
            slowest[f"{phase}_s"] = max(took, slowest.get(f"{phase}_s", 0.0))
    return {
        "success": result.ok,
        "message": message,
        "step": result.step,
        "run": result.run,
        "weight_version": result.version,
        "transfer_time": slowest.get("update_s", 0.0),
        "total_bytes": result.bytes or 0,
        "timing_breakdown": {**slowest, "total_s": result.seconds},
        "stall_s": max((e.stall for e in result.results.values() if e.stall), default=0.0),
        "cache_invalidation_mode": cache,
        "flush_cache": not keep,
        "endpoints_synced": [_result_body(entry) for entry in result.results.values()],
        "notices": notices,
    }


# ------------------------------------------------------------------------------------- over HTTP
# A server of its own, or mounted in a trainer's ASGI application:
#     server = SyncServer(Service(registry), port=8700)   # a thread; loopback
#     app.mount("/", asgi_app(Service(registry)))         # FastAPI, Starlette


_IDLE = 60.0  # seconds that a connection may be silent, and that a request may take to come
_MOST = 256  # connections


class SyncServer:
    """The routes on a port, in threads of this process, by the standard library only. Any thread.

    Args:
        service: the routes.
        bind: numeric address to listen on.
        port: 0: one that the system chooses. A server that others can reach needs the service's
            api_key. A caller that may add an engine and sync it decides where requests of this
            process go.

    Raises:
        RequestError: an argument is wrong; no api_key where others can reach the server.
        HostError: it cannot listen.
    """

    def __init__(self, service: Service, *, bind: str = "127.0.0.1", port: int = 0) -> None:
        if not is_loopback(bind) and not service.guarded:
            raise RequestError.make(
                f"{bind} can be reached by others, and nothing is asked of them",
                "give an api_key, or bind 127.0.0.1",
                address=bind,
            )

        def answering(request: Request) -> Answer:
            authorization = request.headers.get("Authorization", "")
            with within(request.headers):
                status, body = service.answer(
                    request.method, request.path, request.body, authorization
                )
            return Answer(status, json.dumps(body).encode(), "application/json")

        try:
            self._server = HttpServer(
                answering,
                bind,
                port,
                name="fanin-sync http",
                most=_MOST,
                seconds=_IDLE,
                keep=True,
                largest=_MAX_BODY,
            )
        except (OSError, OverflowError) as error:
            raise HostError.make(
                f"cannot listen on {bind}, port {port}: {error}",
                "choose another port, or 0",
                address=bind,
            ) from error

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def url(self) -> str:
        """For clients on this host."""
        return f"http://{self._server.address}"

    def close(self) -> None:
        """Listens no longer; a sync that is under way ends by itself. Twice is safe."""
        self._server.close()

    def wait(self) -> None:
        """Blocks until :meth:`close`."""
        self._server.wait()

    def __enter__(self) -> SyncServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def asgi_app(service: Service) -> Callable[[Any, Receive, Send], Awaitable[None]]:
    """An ASGI application with the routes, to be mounted or served. Syncs run in threads.

    A peer that has gone before its request came whole is not answered, and nothing is done.
    """

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        body = await asgi_body(receive, _MAX_BODY)
        if body is None:
            return
        if len(body) > _MAX_BODY:
            status, reply = 413, {"detail": f"a body has {_MAX_BODY} bytes at most"}
        else:
            headers = {name.lower(): value for name, value in scope["headers"]}
            path = scope["path"]
            root = scope.get("root_path", "")
            path = path[len(root) :] if root and path.startswith(root) else path
            status, reply = await asyncio.to_thread(
                service.answer,
                scope["method"],
                path,
                body,
                headers.get(b"authorization", b"").decode("latin-1"),
            )
        await asgi_answer(send, status, reply)

    return app


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
