# SPDX-License-Identifier: Apache-2.0
"""Routes of the API server: load an adapter, say where the trainer is, how things stand.

``POST /load_lora_adapter_nixl`` ``{lora_name, run_idx, trainer_addresses, lora_alpha, timeout,
step, dtype, max_bytes, trust_config, landing}`` pulls one step and registers it under
``lora_name``; it needs no ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``. ``POST /init_nixl_client``
``{trainer_addresses, server_name, timeout}`` says where the trainer is from now on.
``GET /nixl/status``. ``POST /nixl/served`` ``{run, step}`` gives digests of what the workers hold
of that step's adapters (:func:`fanin.check.served`).

All of them want the engine's API key, if it has one. Of an engine without one, requests may name
only trainers that its configuration lists (``allow_trainers``), and the one that it has. So does
vLLM's own route that names a trainer, ``/init_weight_transfer_engine``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hmac
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from fanin import _allowed
from fanin._dtypes import NARROWED
from fanin._http_server import Receive, Send, asgi_answer, asgi_body
from fanin._options import LANDINGS, MOST_BYTES
from fanin._otel import span, within
from fanin.engine.clients import Source
from fanin.engine.faults import body_of, status_of
from fanin.engine.pulls import Adapter, Wanted, which
from fanin.engine.threads import in_thread
from fanin.errors import (
    FaninError,
    HostError,
    NotFoundError,
    RequestError,
    StateError,
    SupersededError,
)
from fanin.names import check_step, parse, run_of
from fanin.vllm.guard import ours
from fanin.vllm.state import State, names_are_resolved, state

_log = logging.getLogger("vllm.fanin")

_MAX_TIMEOUT = 3600.0
_OR_A_KEY = ", or start the engine with an API key and send it"
_TRAINER_FIELDS = ("trainer_addresses", "nixl_info", "server_name", "timeout")
_LOAD_FIELDS = (
    *(*_TRAINER_FIELDS, "lora_name", "run_idx", "step"),
    *("lora_alpha", "dtype", "max_bytes", "trust_config", "landing"),
)


def api_processes(args: Any, config: Any) -> int:
    """How many API server processes this engine has, by its arguments and its configuration."""
    asked = getattr(args, "api_server_count", None)
    parallel = getattr(config, "parallel_config", None)
    real = getattr(parallel, "_api_process_count", 1)
    return max(asked if isinstance(asked, int) else 1, real if isinstance(real, int) else 1)


def _positive(value: Any, most: float) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= most


#: What is good, and what is said of what is not, and the remedy.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "timeout": (
        lambda value: _positive(value, _MAX_TIMEOUT),
        f"is no number of seconds up to {_MAX_TIMEOUT:g}",
        "",
    ),
    "lora_alpha": (lambda value: _positive(value, sys.float_info.max), "is no positive number", ""),
    "dtype": (
        lambda value: isinstance(value, str) and value.upper() in NARROWED,
        "is not one that F32 tensors are converted to",
        'give "BF16" or "F16", or leave it out',
    ),
    "max_bytes": (
        lambda value: type(value) is int and 0 < value <= MOST_BYTES,
        f"is no integer from 1 to {MOST_BYTES}",
        "",
    ),
    "trust_config": (lambda value: isinstance(value, bool), "is neither true nor false", ""),
    "landing": (lambda value: value in LANDINGS, f"is none of {', '.join(LANDINGS)}", ""),
}


def _said(body: dict[str, Any], name: str, default: Any = None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    good, says, remedy = _FIELDS[name]
    if not good(value):
        raise RequestError.make(f"{name} {value!r} {says}", remedy, key=name)
    return value


def _trust_config(body: dict[str, Any], default: bool) -> bool:
    value = bool(_said(body, "trust_config", default))
    if value and not default:  # whoever can send a request must not make the engine trust more
        raise RequestError.make(
            "trust_config is off in this engine",
            "start it with FANIN_TRUST_CONFIG=1 if its trainers may name code to load",
            key="trust_config",
        )
    return value


def _check_fields(body: dict[str, Any], known: tuple[str, ...]) -> None:
    """Other fields are somebody else's, but a misspelt one of ours is an error."""
    for name in body:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if name not in known and near and near[0] not in body:
            raise RequestError.make(
                f"{name!r} is no field of the request", f"did you mean {near[0]!r}?", key=name
            )


def _server_name(body: dict[str, Any], default: str | None) -> str | None:
    value = body.get("server_name", default)
    if value is not None and (not isinstance(value, str) or not value):
        raise RequestError.make(f"server_name {value!r} is no name", key="server_name")
    return value


def _trainer(body: dict[str, Any]) -> Any:
    return body.get("trainer_addresses", body.get("nixl_info"))


class Api:
    """What the routes do. Used in the event loop's thread.

    keyed: the caller has shown the engine's API key.
    """

    def __init__(self, here: State, *, keyed: bool = False) -> None:
        self._here = here
        self._keyed = keyed
        self._own = here.source

    def wanted(self, body: dict[str, Any]) -> Wanted:
        """The request of /load_lora_adapter_nixl. Raises RequestError naming the field."""
        _check_fields(body, _LOAD_FIELDS)
        run, step, label = which(body.get("lora_name"), body.get("run_idx"), body.get("step"))
        config = self._here.config
        dtype = _said(body, "dtype", config.dtype)
        return Wanted.by(
            config,
            self._source(body),
            body["lora_name"],
            run,
            step,
            label,
            timeout=_said(body, "timeout", config.timeout),
            lora_alpha=_said(body, "lora_alpha"),
            dtype=None if dtype is None else dtype.upper(),
            trust_config=_trust_config(body, config.trust_config),
            max_bytes=_said(body, "max_bytes", config.max_bytes),
            landing=_said(body, "landing", config.landing),
        )

    def _wants_newest(self, body: dict[str, Any]) -> bool:
        """Whether the body leaves the step to this engine, and the engine may choose it."""
        name = body.get("lora_name")
        free = isinstance(name, str) and parse(name) is None
        return self._here.config.newest and body.get("step") is None and free

    async def _fetch(self, body: dict[str, Any]) -> Adapter:
        """The adapter that the body asks for, pinned."""
        here = self._here
        if not self._wants_newest(body):
            return await here.pulls.fetch(self.wanted(body))
        first = self.wanted({**body, "step": 0})
        deadline = time.monotonic() + first.timeout
        while True:
            step = await in_thread(lambda: here.service.newest(first.source, first.run, deadline))
            wanted = dataclasses.replace(first, step=step, timeout=deadline - time.monotonic())
            try:
                return await here.pulls.fetch(wanted)
            except SupersededError:
                if time.monotonic() >= deadline:
                    raise

    def _source(self, body: dict[str, Any]) -> Source:
        trainer = _trainer(body)
        if trainer is None:
            if self._here.source is None:
                raise RequestError.make(
                    "trainer_addresses is missing, and this engine has not been told where the"
                    " trainer is",
                    "give trainer_addresses, set FANIN_TRAINER, or POST /init_nixl_client",
                    key="trainer_addresses",
                )
            return self._here.source
        return self._named(trainer, body)

    def _named(self, trainer: Any, body: dict[str, Any]) -> Source:
        """The trainer that a request names. Raises RequestError if it may not."""
        here = self._here
        source = Source.of(trainer, _server_name(body, here.config.server_name))
        known = [one.text for one in (self._own, here.source) if one is not None]
        if not self._keyed and source.text not in known:
            allowed = here.config.allow_trainers
            _allowed.check(allowed, source.text, source.path, source.addresses, _OR_A_KEY)
        return source

    def check_init(self, info: dict[str, Any]) -> None:
        """What a request without a key may begin vLLM's weight transfer with. Raises RequestError.

        info: see :class:`fanin.vllm.weights.InitInfo`, which checks all else.
        """
        self._named(info.get("trainer"), {})
        save = info.get("save")
        if isinstance(save, str):
            _allowed.check_directory(self._here.config.allow_trainers, save, _OR_A_KEY)

    async def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Pulls the adapter and registers it. Raises FaninError.

        Waits at most about the request's timeout, plus what the engine takes to load it.
        """
        here = self._here
        wanted = self.wanted({**body, "step": 0} if self._wants_newest(body) else body)
        engine = here.engine
        if engine is None:
            raise StateError.make("the engine is not up yet", "ask again")
        self._check_name(engine.models, wanted.name)
        adapter = await self._fetch(body)
        try:
            here.service.warn_of_base_model(
                adapter, str(getattr(engine.models.model_config, "model", ""))
            )
            loaded = time.monotonic()
            await self._register(engine.models, adapter)
        finally:
            adapter.pins -= 1
        if here.source is None:
            here.use_source(wanted.source)
        return {
            "status": "ok",
            "lora_name": adapter.name,
            **adapter.told(),
            "pull_seconds": round(adapter.seconds, 6),
            "load_seconds": round(time.monotonic() - loaded, 6),
        }

    def _check_name(self, models: Any, name: str) -> None:
        """Whether the name is free, or ours."""
        there = models.lora_requests.get(name)
        mine = self._here.keeper.get(name)
        if models.is_base_model(name):
            raise RequestError.make(
                f"{name!r} is a base model of this engine", "take another name", key="lora_name"
            )
        if there is not None and (mine is None or there.lora_path != str(mine.path)):
            raise RequestError.make(
                f"{name!r} is loaded already, from {there.lora_path}, by somebody else",
                "take another name, or unload that one",
                key="lora_name",
            )

    async def _register(self, models: Any, adapter: Adapter) -> None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        there = models.lora_requests.get(adapter.name)
        if there is None:
            answer = await models.load_lora_adapter(
                LoadLoRAAdapterRequest(
                    lora_name=adapter.name,
                    lora_path=str(adapter.path),
                    is_3d_lora_weight=adapter.is_3d,
                )
            )
            there = models.lora_requests.get(adapter.name)
            # Two at once: the second is told that the name is taken, and it is by the first.
            if there is None or there.lora_path != str(adapter.path):
                problem = getattr(getattr(answer, "error", None), "message", answer)
                raise HostError.make(
                    f"the engine did not load adapter {adapter.name}: {problem}",
                    "see the engine's log",
                )
        elif there.lora_path != str(adapter.path):
            raise StateError.make(
                f"adapter {adapter.name} was loaded from elsewhere meanwhile", "ask again"
            )
        if not any(there is request for request in adapter.requests):
            adapter.requests.append(there)
        adapter.suspended = False

    async def init(self, body: dict[str, Any]) -> dict[str, Any]:
        """Connects to the trainer and uses it from now on. Raises FaninError: then nothing changes.

        Waits at most the request's timeout, 10 s if it has none.
        """
        _check_fields(body, _TRAINER_FIELDS)
        trainer = _trainer(body)
        if trainer is None:
            raise RequestError.make(
                "trainer_addresses is missing",
                'give ["host:port", ...], [["host", port], ...] or the path of a nixl_info.json',
                key="trainer_addresses",
            )
        source = self._named(trainer, body)
        timeout = _said(body, "timeout", 10.0)
        try:
            world = await in_thread(lambda: self._here.service.world_now(source, timeout))
        except FaninError as error:
            _log.warning("fanin: not pointed at %s: %s", source.text, error)
            raise
        self._here.use_source(source)
        self._here.keeper.point_at(
            world, f"this engine was pointed at {source.text}, world {world}"
        )
        _log.info("fanin: adapters come from %s, world %s", source.text, world)
        return {"status": "ok", "trainer": source.text, "world": world}

    async def served(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the workers hold of the adapters of a run's step, by name."""
        here, run, step = self._here, run_of(body.get("run", "0")), check_step(body.get("step", -1))
        adapters = here.keeper.at(run, step)
        if here.engine is None or not adapters:
            raise NotFoundError.make(
                f"no adapter of step {step} of lora:{run} is here",
                "load that step, of which the trainer has digests, and ask again",
                key=f"lora:{run}",
            )
        return {"adapters": {one.name: await here.engine.served(one) for one in adapters}}

    def status(self) -> dict[str, Any]:
        """How things stand, as plain values."""
        here = self._here
        source = here.source
        met = None if source is None else here.service.last_met(source)
        return {
            "trainer": None if source is None else source.text,
            "server_name": None if source is None else source.server_name,
            "world": None if met is None else met[0],
            "worlds_silent": here.watch.status(),
            "cache_dir": str(here.config.cache_dir),
            "keep": here.config.keep,
            "dtype": here.config.dtype,
            "max_bytes": here.config.max_bytes,
            "trust_config": here.config.trust_config,
            "slots": here.pulls.slots(),
            **here.keeper.status(),
            "pulling": here.pulls.status(),
            "connections": here.service.pool.stats(),
            "counters": here.counters.snapshot(),
            "last_error": here.pulls.last_error,
        }


#: Method, path, what FastAPI's page says, and what is done with a request's body; a GET has none.
_ROUTES: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    (
        "POST",
        "/load_lora_adapter_nixl",
        "Pulls one step of a run's adapter from the trainer and loads it.",
        Api.load,
    ),
    ("POST", "/init_nixl_client", "Says where the trainer is from now on.", Api.init),
    (
        "GET",
        "/nixl/status",
        "The trainer, the adapters that are here, and the pulls that run.",
        Api.status,
    ),
    ("POST", "/nixl/served", "Digests of what the workers hold of an adapter.", Api.served),
)


class EndpointPlugin:
    """What ``vllm.endpoint_plugins`` wants: vLLM lets it attach routes, then gives the engine."""

    name = "fanin"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._api: Api | None = None
        self._keys: tuple[str, ...] = ()
        self._door = RouteAuth()

    def attach_router(self, app: Any) -> None:
        """Registers the routes on *app*, a FastAPI application that has vLLM's."""
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def answer(request: Any, work: Callable[..., Any]) -> Any:
            try:
                api = self._ready(request.headers.get("authorization"))
                if api is None:
                    return JSONResponse(UNAUTHORIZED, status_code=401)
                with within(request.headers), span("fanin.route", "server", route=request.url.path):
                    if request.method == "GET":
                        return JSONResponse(work(api))
                    return JSONResponse(await work(api, await _object_of(request)))
            except FaninError as error:
                return JSONResponse(body_of(error), status_code=status_of(error))
            except Exception as error:
                _log.exception("fanin: %s failed", request.url.path)
                return JSONResponse(body_of(error), status_code=500)

        def route(method: str, path: str, told: str, work: Callable[..., Any]) -> None:
            async def endpoint(request: Any) -> Any:
                return await answer(request, work)

            endpoint.__name__, endpoint.__doc__ = path.strip("/").replace("/", "_"), told
            # FastAPI looks annotations' names up in the module, where fastapi is not imported.
            endpoint.__annotations__ = {"request": Request}
            app.add_api_route(path, endpoint, methods=[method], response_model=None)

        for one in _ROUTES:
            route(*one)
        self._door.stand_before(app)
        _log.info("fanin: routes %s", ", ".join(path for _, path, *_ in _ROUTES))

    def _ready(self, authorization: str | None) -> Api | None:
        """The routes' work; None: the caller has not got the key."""
        if self._keys and not shows_key(self._keys, authorization):
            return None
        if self._api is None:
            raise StateError.make("the engine is not up yet", "ask again")
        return self._api

    async def init_state(self, engine_client: Any, app_state: Any, args: Any) -> None:
        """Takes the engine. Raises ConfigError, and StateError for what cannot work.

        vLLM calls it when the engine is up; an error ends the server with its sentence.
        """
        if engine_client is None:
            return
        count = api_processes(args, getattr(engine_client, "vllm_config", None))
        if count > 1:
            raise StateError.make(
                f"fanin cannot load adapters with {count} API server processes: a request to load"
                " one reaches one of them only",
                "start vLLM with --api-server-count 1",
            )
        here = state()
        # vLLM guards its own paths only, and these load what they are told to.
        keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        self._keys = tuple(key for key in keys if key)
        engine = await here.attach(app_state.openai_serving_models)
        self._api = Api(here, keyed=bool(self._keys))
        if ours(getattr(engine_client, "vllm_config", None)):
            self._door.close(self._keys, self._api.check_init)
        app_state.fanin = here
        facts = engine.facts()
        if not facts.lora_enabled:
            _log.warning("fanin: this engine was started without --enable-lora")
        _log.info(
            "fanin: ready; trainer %s, adapters in %s, %d of a run are kept; names %s",
            "not configured" if here.source is None else here.source.text,
            here.config.cache_dir,
            here.config.keep,
            "are resolved"
            if names_are_resolved()
            else "are not resolved (VLLM_ALLOW_RUNTIME_LORA_UPDATING is not 1), only routes load",
        )


async def _object_of(request: Any) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise RequestError.make(f"the body is no JSON: {error}", "send an object") from None
    if not isinstance(body, dict):
        raise RequestError.make("the body is no JSON object", "send an object")
    return body


# --------------------------------------------------------------------- in front of vLLM's own route
# vLLM's API key guards what is below ``/v1`` and a few paths beside. Whoever reaches the port would
# else choose by ``/init_weight_transfer_engine`` whose weights the engine serves, and where its
# workers write.


UNAUTHORIZED = {"error": "Unauthorized"}
"""The body of a 401, which is vLLM's own."""

_PATH = "/init_weight_transfer_engine"
_MOST = 1 << 20


def shows_key(keys: Sequence[str], authorization: str | None) -> bool:
    """Whether a request's Authorization header bears one of the engine's keys."""
    scheme, _, token = (authorization or "").partition(" ")
    given = token.encode()
    good = [hmac.compare_digest(given, key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(good)


class RouteAuth:
    """Lets all pass until :meth:`close`."""

    def __init__(self) -> None:
        self._keys: Sequence[str] = ()
        self._check: Callable[[dict[str, Any]], None] | None = None

    def stand_before(self, app: Any) -> None:
        """Puts itself before the route, if *app*, a FastAPI application, has it.

        Not as a middleware, which would have to know all forms of a path that lead to a route.
        """
        for route in app.routes:
            if getattr(route, "path", None) == _PATH:
                route.app = self._before(route.app)

    def close(self, keys: Sequence[str], check: Callable[[dict[str, Any]], None]) -> None:
        """From now on a request passes with one of the *keys*; if there are none, if *check*,
        which is given its ``init_info``, raises no FaninError."""
        self._keys, self._check = keys, check

    def _before(self, inner: Any) -> Any:
        async def door(scope: Any, receive: Receive, send: Send) -> None:
            if self._check is not None and self._keys:
                authorization = dict(scope["headers"]).get(b"authorization", b"")
                if not shows_key(self._keys, authorization.decode("latin-1")):
                    return await asgi_answer(send, 401, UNAUTHORIZED)
            elif self._check is not None:
                body = await asgi_body(receive, _MOST)
                if body is None:
                    return None
                receive = _again(body, receive)
                try:
                    _look(body, self._check)
                except FaninError as error:
                    status = 413 if len(body) > _MOST else status_of(error)
                    return await asgi_answer(send, status, body_of(error))
            return await inner(scope, receive, send)

        return door


def _again(body: bytes, receive: Receive) -> Receive:
    """*receive* for whoever reads the body after it was read."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again


def _look(body: bytes, check: Callable[[dict[str, Any]], None]) -> None:
    """Raises FaninError for a body that may not pass. What is no init_info vLLM refuses."""
    if len(body) > _MOST:
        raise RequestError.make(
            f"the body of {_PATH} is longer than {_MOST} bytes",
            "name the trainer by the path of its nixl_info.json",
        )
    try:
        request = json.loads(body)
    except ValueError:
        return
    except RecursionError:
        raise RequestError.make(
            f"the body of {_PATH} is nested too deeply", "send what init_info takes"
        ) from None
    info = request.get("init_info") if isinstance(request, dict) else None
    if isinstance(info, dict):
        check(info)
