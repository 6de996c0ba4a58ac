# SPDX-License-Identifier: Apache-2.0
"""How each kind of engine is asked: one method a phase, every one with an absolute deadline.

vLLM: the routes of its weight transfer, there with ``VLLM_SERVER_DEV_MODE=1``. SGLang: its sessions
for weights, with fanin's loader inside. What an engine answers is not believed where it can be
looked up: after finish it must say the version that it was given.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from fanin._http import FAILURES, Reply, ask_json
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    PeerError,
    PullTimeoutError,
    RequestError,
    StateError,
    UnreachableError,
    error_class,
    status_name,
)
from fanin.sglang.request import LOADER, REPORT, Request, encode

__all__ = ["Driver", "InitInfo", "Options", "Wire", "driver_of"]

_CODES = {status_name(code): code for code in range(-699, -99)}
_LOOK = 5.0  # seconds for what answers at once in an engine that lives
_RESET = "/reset_prefix_cache"


@dataclass(frozen=True, slots=True)
class InitInfo:
    """Where the trainer is: a path, or the ranks' addresses. timeout: seconds of a pull. more: what
    vLLM's init_info takes beside these."""

    trainer: str | tuple[str, ...]
    run: str
    timeout: float
    server_name: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """How one sync is to be made. pause_mode: of PAUSE_MODES. flush_cache: what was computed with
    the old weights goes."""

    pause_mode: str = "retract"
    flush_cache: bool = True


class Wire:
    """Requests to one engine, whose errors name it and say what to do. Any thread."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._api_key = api_key

    def get(self, path: str, phase: str, deadline: float) -> Reply:
        """The answer, whatever its status. Raises UnreachableError, PullTimeoutError."""
        return self._ask("GET", path, None, phase, deadline)

    def post(self, path: str, body: Mapping[str, Any] | None, phase: str, deadline: float) -> Reply:
        """The answer, if its status is 2xx. Raises what :meth:`refusal` makes otherwise."""
        reply = self._ask("POST", path, body, phase, deadline)
        if not 200 <= reply.status < 300:
            raise self.refusal(reply, path, phase)
        return reply

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, phase: str, deadline: float
    ) -> Reply:
        try:
            return ask_json(method, self.url, path, body, deadline=deadline, api_key=self._api_key)
        except TimeoutError as error:
            raise PullTimeoutError.make(
                f"{self.url}{_bare(path)}: no answer in time",
                "look into the engine's log; give the sync a longer timeout if it was at work",
                address=self.url,
                phase=phase,
            ) from error
        except FAILURES as error:
            raise UnreachableError.make(
                f"{self.url}{_bare(path)}: {error or type(error).__name__}",
                "check that the engine runs, or remove it",
                address=self.url,
                phase=phase,
            ) from error

    def refusal(self, reply: Reply, path: str, phase: str, remedy: str = "") -> FaninError:
        """The error that a reply means, with what it tells of code, rank and remedy."""
        told = reply.error()
        code = _CODES.get(reply.code)
        advice = told.get("remedy")
        if reply.status in (401, 403):
            remedy = "give the engine's api_key"
        kind: type[FaninError] = RequestError if reply.status < 500 else ConnectionFailedError
        rank = told.get("rank")
        return (kind if code is None else error_class(code)).make(
            f"{self.url}{_bare(path)}: HTTP {reply.status}: {reply.reason}",
            advice if isinstance(advice, str) and advice else remedy,
            address=self.url,
            phase=phase,
            code=code,
            rank=rank if isinstance(rank, int) else None,
        )


def _bare(path: str) -> str:
    return path.partition("?")[0]


class Driver(ABC):
    """One engine. One thread at a time; each call blocks until the deadline at most.

    All raise FaninError with ``phase`` and the engine's URL as ``address``.
    """

    kind = ""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    @abstractmethod
    def check_options(self, options: Options) -> None:
        """Raises RequestError if this kind of engine cannot do that. Does not block."""

    @abstractmethod
    def health(self, deadline: float) -> str:
        """The version of the engine's weights."""

    @abstractmethod
    def pause(self, options: Options, deadline: float) -> None:
        """No request is worked on from here to :meth:`resume`."""

    @abstractmethod
    def init(self, info: InitInfo, deadline: float) -> None:
        """Tells it where the trainer is."""

    @abstractmethod
    def start(self, may_be_open: bool, deadline: float) -> None:
        """Opens an update. may_be_open: an earlier one may not have been closed."""

    @abstractmethod
    def update(self, info: InitInfo, step: int, deadline: float) -> int | None:
        """Has all workers pull the step. Bytes if the engine tells."""

    @abstractmethod
    def finish(self, version: str, options: Options, deadline: float) -> None:
        """Closes the update; the engine's version is *version* then, as it says itself."""

    @abstractmethod
    def resume(self, deadline: float) -> None:
        """Generation goes on."""

    def _proven(self, version: str, deadline: float) -> None:
        said = self.health(deadline)
        if said != version:
            raise PeerError.make(
                f"{self.wire.url} says that its weights are {said!r} after {version!r} was"
                " committed",
                "see that nobody else updates this engine, then sync again",
                address=self.wire.url,
                phase="finish",
            )

    def _version(self, reply: Reply, path: str, remedy: str) -> str:
        if reply.status != 200:
            raise self.wire.refusal(reply, path, "health", remedy)
        body = reply.json()
        version = body.get("weight_version") if isinstance(body, dict) else None
        if not isinstance(version, str):
            raise PeerError.make(
                f"{self.wire.url}{path} does not say a weight_version: {reply.reason}",
                "check the URL, and that this is the engine that you mean",
                address=self.wire.url,
                phase="health",
            )
        return version


class VLLM(Driver):
    """vLLM 0.32 with ``--weight-transfer-config '{"backend": "fanin"}'``."""

    kind = "vllm"
    _DEV = "start vLLM with VLLM_SERVER_DEV_MODE=1"
    _BACKEND = 'start vLLM with --weight-transfer-config \'{"backend": "fanin"}\''

    def check_options(self, options: Options) -> None:
        del options  # all modes

    def health(self, deadline: float) -> str:
        alive = self.wire.get("/health", "health", deadline)
        if alive.status != 200:
            raise self.wire.refusal(alive, "/health", "health", "look into the engine's log")
        return self._version(
            self.wire.get("/weight_info", "health", deadline), "/weight_info", self._DEV
        )

    def pause(self, options: Options, deadline: float) -> None:
        mode = "keep" if options.pause_mode == "retract" else options.pause_mode
        query = {"mode": mode, "clear_cache": "true" if options.flush_cache else "false"}
        self.wire.post(f"/pause?{urlencode(query)}", None, "pause", deadline)
        reply = self.wire.get("/is_paused", "pause", deadline)
        body = reply.json()
        if reply.status == 200 and isinstance(body, dict) and body.get("is_paused") is False:
            raise StateError.make(
                f"{self.wire.url} was paused and goes on all the same",
                "see who else resumes it",
                address=self.wire.url,
                phase="pause",
            )

    def init(self, info: InitInfo, deadline: float) -> None:
        body: dict[str, Any] = {
            "trainer": info.trainer if isinstance(info.trainer, str) else list(info.trainer),
            "run": info.run,
            "timeout": info.timeout,
            **info.more,
        }
        self._post("/init_weight_transfer_engine", {"init_info": body}, "init", deadline)

    def start(self, may_be_open: bool, deadline: float) -> None:
        try:
            self._post("/start_weight_update", None, "start", deadline)
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            # An update that was left open is gone on with: of several workers one may have failed
            # alone, and the others then refuse a new start.
            if not may_be_open and "already active" not in error.message:
                raise

    def update(self, info: InitInfo, step: int, deadline: float) -> int | None:
        reply = self._post("/update_weights", {"update_info": {"step": step}}, "update", deadline)
        body = reply.json()
        told = body.get("bytes") if isinstance(body, dict) else None
        return told if isinstance(told, int) and not isinstance(told, bool) else None

    def finish(self, version: str, options: Options, deadline: float) -> None:
        self._post("/finish_weight_update", {"weight_version": version}, "finish", deadline)
        if options.flush_cache and options.pause_mode in ("retract", "keep"):
            self._reset_cache(options.pause_mode == "retract", deadline)
        self._proven(version, deadline)

    def _reset_cache(self, everything: bool, deadline: float) -> None:
        """Also of requests that run: they are computed again, with the new weights."""
        path = _RESET + ("?reset_running_requests=true" if everything else "")
        body = self.wire.post(path, None, "finish", deadline).json()
        if everything and not (isinstance(body, dict) and body.get("success") is True):
            raise StateError.make(
                f"{self.wire.url} has the weights, but did not drop what was computed with the old",
                "sync again, or pause with mode abort",
                address=self.wire.url,
                phase="finish",
            )

    def resume(self, deadline: float) -> None:
        self.wire.post("/resume", None, "resume", deadline)

    def _post(
        self, path: str, body: Mapping[str, Any] | None, phase: str, deadline: float
    ) -> Reply:
        reply = self.wire._ask("POST", path, body, phase, deadline)
        if reply.status == 200:
            return reply
        remedy = self._DEV if reply.status == 404 else "look into the engine's log, then sync again"
        if "not configured" in reply.reason:
            remedy = self._BACKEND
        raise self.wire.refusal(reply, path, phase, remedy)


class SGLang(Driver):
    """SGLang 0.5.23 with ``--custom-weight-loader fanin.sglang.load``.

    An exception in a custom loader ends SGLang's scheduler, so the loader keeps what failed to
    itself, and SGLang refuses the request that follows with it: that is the second one here.
    """

    kind = "sglang"
    _START = f"start SGLang with --custom-weight-loader {LOADER}"
    _MODES = {"retract": "retract", "abort": "abort", "keep": "in_place"}

    def check_options(self, options: Options) -> None:
        if options.pause_mode not in self._MODES:
            raise RequestError.make(
                f"{self.wire.url}: SGLang cannot pause with mode {options.pause_mode!r}",
                "give one of " + ", ".join(self._MODES),
                address=self.wire.url,
                phase="pause",
            )

    def health(self, deadline: float) -> str:
        reply = self.wire.get("/model_info", "health", deadline)
        return self._version(reply, "/model_info", "check the URL: this is not SGLang")

    def pause(self, options: Options, deadline: float) -> None:
        mode = self._MODES[options.pause_mode]
        self.wire.post("/pause_generation", {"mode": mode}, "pause", deadline)

    def init(self, info: InitInfo, deadline: float) -> None:
        """Nothing to tell: each request says where the trainer is. Looks whether it can work."""
        reply = self.wire.get("/server_info", "init", deadline)
        body = reply.json()
        if reply.status != 200 or not isinstance(body, dict):
            raise self.wire.refusal(reply, "/server_info", "init", "check the URL")
        loaders = body.get("custom_weight_loader")
        if isinstance(loaders, list) and LOADER not in loaders:
            raise RequestError.make(
                f"{self.wire.url} has no loader {LOADER}",
                self._START,
                address=self.wire.url,
                phase="init",
            )
        for key, name in (("dp_size", "data"), ("pp_size", "pipeline")):
            size = body.get(key)
            if isinstance(size, int) and size > 1:
                raise RequestError.make(
                    f"{self.wire.url}: SGLang does not update tensors under {name} parallelism"
                    f" ({key} is {size})",
                    f"start it with {key.replace('_', '-')} 1, as several endpoints if need be",
                    address=self.wire.url,
                    key=key,
                    phase="init",
                )
        size = body.get("tp_size")
        self._ranks = size if isinstance(size, int) and size > 0 else 1

    def start(self, may_be_open: bool, deadline: float) -> None:
        try:
            self._post("/begin_weight_update", {}, "start", deadline)
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            if not may_be_open and "already open" not in error.message:
                raise

    def update(self, info: InitInfo, step: int, deadline: float) -> int | None:
        if not hasattr(self, "_ranks"):
            self.init(info, min(deadline, time.monotonic() + _LOOK))
        request = Request(
            trainer=info.trainer,
            run=info.run,
            step=step,
            timeout=info.timeout,
            server_name=info.server_name,
        )
        self._load(request, deadline)
        self._load(Request(REPORT), deadline)
        return None

    def _load(self, request: Request, deadline: float) -> None:
        body = {
            "serialized_named_tensors": [encode(request)] * self._ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        self._post("/update_weights_from_tensor", body, "update", deadline)

    def finish(self, version: str, options: Options, deadline: float) -> None:
        self._post("/end_weight_update", {}, "finish", deadline)
        if options.flush_cache and options.pause_mode != "keep":
            self.wire.post("/flush_cache", None, "finish", deadline)
        self._post(
            "/update_weight_version",
            {"new_version": version, "abort_all_requests": False},
            "finish",
            deadline,
        )
        self._proven(version, deadline)

    def resume(self, deadline: float) -> None:
        self.wire.post("/continue_generation", {}, "resume", deadline)

    def _post(self, path: str, body: Mapping[str, Any], phase: str, deadline: float) -> None:
        reply = self.wire._ask("POST", path, body, phase, deadline)
        content = reply.json()
        said = content.get("success") if isinstance(content, dict) else None
        if reply.status == 200 and said is True:
            return
        remedy = "look into the engine's log, then sync again"
        if "load_format" in reply.reason:
            remedy = self._START
        raise self.wire.refusal(reply, path, phase, remedy)


_DRIVERS: dict[str, type[Driver]] = {VLLM.kind: VLLM, SGLang.kind: SGLang}


def driver_of(kind: str, wire: Wire, deadline: float) -> Driver:
    """The driver of an engine of *kind*; "auto": asks the engine what it is. Blocks."""
    if kind in _DRIVERS:
        return _DRIVERS[kind](wire)
    reply = wire.get("/model_info", "health", deadline)
    body = reply.json()
    if reply.status == 200 and isinstance(body, dict) and "model_path" in body:
        return SGLang(wire)
    return VLLM(wire)
