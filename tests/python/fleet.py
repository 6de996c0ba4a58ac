# SPDX-License-Identifier: Apache-2.0
"""Engines that answer as vLLM and SGLang do, and do what a test says; a trainer of whole models."""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import fanin
from fanin._served import Held, Layout, digests_of, publication_for
from fanin.info import addresses_of
from fanin.sync import Registry
from http_engine import OK, Answer, Engine, Request, Trainer

Hook = Callable[[Request], Answer | None]


def number_of(step: int | None, part: int) -> int:
    """A digest."""
    assert step is not None
    return step * 1000 + part


HANG_UP: Answer = (0, None)
"""The connection ends without a word."""

_LAUNCHES: dict[str, str] = {}
"""Which launch of a WholeTrainer is at an address."""


class FakeEngine:
    """What the two kinds have in common.

    hooks: by path without query: answers in place of the engine; None goes on to its own answer.
    worlds: the launches of the trainer that its workers, in turn, say their weights are of; []: the
    right one. paths: what came in. hang(path): requests to it wait until the test ends, or let go.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}
        self.worlds: list[str] = []
        self.paths: list[str] = []
        self.queries: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.version = self.started = "checkpoint"
        self.paused = False
        self.model = "old"
        self.at: dict[str, threading.Event] = {}
        self._holds: list[threading.Event] = []
        self._lock = threading.Lock()
        self.http = Engine(self._answer)
        self.url = self.http.url

    def hang(self, path: str) -> threading.Event:
        """Requests to *path* get no answer until the event that is returned is set.

        ``at[path]`` is set when one has come.
        """
        hold, here = threading.Event(), threading.Event()
        self._holds.append(hold)
        self.at[path] = here

        def wait(_: Request) -> None:
            here.set()
            hold.wait(60)

        self.hooks[path] = wait
        return hold

    def refuse(self, path: str, status: int, message: str) -> None:
        """Requests to *path* are answered so."""
        self.hooks[path] = lambda _: (status, {"error": {"message": message, "code": status}})

    def restart(self) -> None:
        """As a new process at the same address."""
        self.version, self.paused, self.model = self.started, False, "old"

    def count(self, path: str) -> int:
        """How often it was asked."""
        return self.paths.count(path)

    def _answer(self, request: Request) -> Answer | None:
        path, _, query = request.path.partition("?")
        with self._lock:
            self.paths.append(path)
            self.queries.append(query)
            self.bodies[path] = request.body
        hook = self.hooks.get(path)
        answer = hook(request) if hook is not None else None
        if answer is not None:
            return None if answer is HANG_UP else answer
        with self._lock:
            return self._serve(path, query, request.body)

    def _serve(self, path: str, query: str, body: Any) -> Answer | None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for hold in self._holds:
            hold.set()
        self.http.__exit__()


def internal(message: str) -> Answer:
    """What vLLM makes of an exception in a worker."""
    return 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}


class FakeVLLM(FakeEngine):
    """vLLM's routes and the state that its workers keep, with the engine ``fanin`` behind."""

    def __init__(self) -> None:
        super().__init__()
        self.initialised: dict[str, Any] | None = None
        self.active = False
        self.pulled: int | None = None
        self.held: int | None = None
        self.workers = 2
        self.external = False
        #: Whether it has a draft model, and which step that has; whether it is the one updated now.
        self.drafts, self.draft_held, self.of_draft = False, None, False
        self._launch = ""
        #: What reading ahead says of itself, one answer after the other; the last one stays.
        self.reads: list[dict[str, Any]] = [{"state": "ready", "bytes": 50, "total": 50}]
        self.ahead: int | None = None
        #: Where its weights came from; what is wrong with them; when it was asked for digests, and
        #: whether it was paused then; why it was told that its weights are not what is trained.
        self.basis, self.wrong, self.rounded = "a", 0, False
        self.compared: list[tuple[int | None, bool]] = []
        self.compared_runs: list[str] = []
        self.disowned: list[str] = []
        #: Whether it was paused when each update came.
        self.updates: list[tuple[str, bool]] = []

    def restart(self) -> None:
        super().restart()
        self.initialised, self.active, self.pulled, self.held = None, False, None, None
        self.ahead = None

    def _serve(self, path: str, query: str, body: Any) -> Answer | None:
        if path == "/health":
            return 200, b""
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return OK
        if path == "/get_world_size":
            return 200, {"world_size": self.workers}
        if path == "/collective_rpc":
            return self._rpc(**body)
        if path == "/init_weight_transfer_engine":
            self.initialised = body["init_info"]
            return 200, {"message": "Weight transfer initialized"}
        return self._update(path, body)

    def _rpc(
        self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Answer:
        if method == "fanin_served_digests":
            assert kwargs is not None and kwargs["step"] == self.held
            self.compared_runs.append(kwargs["publication"])
            assert self.active is False
            self.compared.append((self.held, self.paused))
            found: list[Any] = [self._digests(worker) for worker in range(self.workers)]
        elif method == "fanin_disown_weights":
            self.disowned += args or []
            found = [None] * self.workers
        else:
            assert method == "fanin_weights_state"
            found = [self._state(worker) for worker in range(self.workers)]
        return 200, {"results": found}

    def _digests(self, worker: int) -> dict[str, Any]:
        """Of two workers each has one of the two ranks' rows."""
        number = number_of(self.held, worker) + self.wrong
        digests = {"F32": number + 1, "BF16": 1} if self.rounded else {"F32": number}
        held = [["w", [4 * worker, 0], [4, 8], digests]]
        return {"held": held, "different": [], "unseen": [], "untold": [], "unused": []}

    def _state(self, worker: int) -> dict[str, Any]:
        ahead, last = None, None
        if self.ahead is not None:
            ahead = {"step": self.ahead, **self.reads[0]}
            self.reads = self.reads[1:] or self.reads
        if self.held is not None:
            last = {"bytes": 50, "read": 0.5, "path": "cma"}
            worlds = self.worlds or [self._launch]
            last["worlds"] = [worlds[worker % len(worlds)]]
        told = {"step": self.held, "dirty": "", "ahead": ahead, "last": last}
        told |= {"external_kv": self.external, "drafts": self.drafts}
        return {**told, "draft_step": self.draft_held, "basis": self.basis}

    def _update(self, path: str, body: Any) -> Answer | None:
        if path == "/start_draft_weight_update":
            assert self.drafts and self.initialised and not self.active
            self.active, self.pulled, self.of_draft = True, None, True
            return 200, {"message": "Draft weight update started"}
        if path == "/start_weight_update":
            if self.initialised is None:
                return internal("no init_weight_transfer_engine before start")
            if self.active:
                return internal(
                    "start_weight_update called while a weight update is already active"
                )
            self.active, self.pulled = True, None
            return 200, {"message": "Weight update started"}
        if path == "/update_weights":
            if not self.active:
                return internal("start_weight_update must be called before update_weights.")
            info = body["update_info"]
            ahead = info.get("prefetch", False)
            self.updates.append(("ahead" if ahead else "update", self.paused))
            if ahead:
                self.ahead = info["step"]
            else:
                self.pulled = info["step"]
                assert self.initialised is not None
                first, *_ = addresses_of(self.initialised["trainer"])
                self._launch = _LAUNCHES.get(first, "a" * 32)
            return 200, {"message": "Weights updated"}
        if path == "/finish_weight_update":
            if not self.active or self.pulled is None:
                return internal("finish refused: nothing was pulled")
            self.active, self.ahead, draft, self.of_draft = False, None, self.of_draft, False
            if draft:
                self.draft_held = self.pulled
                return 200, {"message": "Weight update finished"}
            self.held = self.pulled
            self.model = f"weights of step {self.pulled}"
            if body["weight_version"] is not None:
                self.version = body["weight_version"]
            return 200, {"message": "Weight update finished"}
        return 404, {"detail": "Not Found"}


class _Loaded(pickle.Unpickler):
    """Reads the request as SGLang does, with nothing of PyTorch but the shape of its answer."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("torch", "ByteTensor")
        return bytes


class FakeSGLang(FakeEngine):
    """SGLang's routes, with what fanin's loader makes of the request behind.

    failure: the reason for which the loader fails. plugin: whether fanin's plugin is there, which
    tells what came of a pull.
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.ranks = ranks
        self.version = self.started = "default"  # as SGLang says
        self.open = False
        self.failure = ""
        self.loaders = ["fanin.sglang.load"]
        self.sent: list[dict[str, Any]] = []
        self.plugin = True
        self.told = ""

    def restart(self) -> None:
        super().restart()
        self.open, self.told = False, ""

    def _serve(self, path: str, query: str, body: Any) -> Answer | None:
        if path == "/model_info":
            return 200, {"model_path": "m", "weight_version": self.version}
        if path == "/server_info":
            return 200, {"tp_size": self.ranks, "custom_weight_loader": self.loaders, "dp_size": 1}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            return OK
        if path == "/flush_cache":
            return 200, b"Cache flushed."
        if path == "/begin_weight_update":
            assert body == {"selector": "target"}
            if self.open:
                return 400, {"success": False, "message": "a session is already open"}
            self.open = True
            return 200, {"success": True, "message": "Success"}
        if path == "/end_weight_update":
            was, self.open = self.open, False
            return (200 if was else 400), {"success": was, "message": self.told or "Success"}
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.version = body["new_version"]
            return 200, {"success": True, "message": "ok", "new_version": self.version}
        if path == "/update_weights_from_tensor":
            return self._load(body)
        return 404, {"detail": "Not Found"}

    def _load(self, body: Any) -> Answer:
        if not self.open:
            return 400, {"success": False, "message": "must run between begin and end"}
        assert body["load_format"] == "fanin.sglang.load" and body["flush_cache"] is False
        assert body["selector"] == "target"
        assert len(body["serialized_named_tensors"]) == self.ranks
        for payload in body["serialized_named_tensors"]:
            ((name, content),) = _Loaded(io.BytesIO(base64.b64decode(payload))).load()
            assert name == "fanin.request"
            request = json.loads(bytes(content))
        self.sent.append(request)
        if self.failure:
            return 400, {"success": False, "message": self.failure}
        self.model = f"weights of step {request['step']}"
        first, *_ = addresses_of(request["trainer"])
        told = {
            "step": request["step"],
            "bytes": 100,
            "seconds": 0.5,
            "how": "4 tensors by cma",
            "worlds": self.worlds or [_LAUNCHES.get(first, "a" * 32)],
        }
        self.told = f"fanin has pulled: {json.dumps(told)}" if self.plugin else ""
        return 200, {"success": True, "message": self.told or "Success"}


class WholeTrainer(Trainer):
    """The same of a whole model, which is one matrix."""

    kind = "full"

    def put(self, server: fanin.Server, metadata: dict[str, str]) -> None:
        server.put(self.publication, [self.rows(server.rank, "w")])
        _LAUNCHES[f"127.0.0.1:{server.port}"] = self.world.hex()

    def commit(  # type: ignore[override]
        self, step: int, ranks: Iterable[int] | None = None, *, digests: bool = False
    ) -> None:
        """These ranks, or all, are at *step*, with digests of it or without."""
        ranks = range(len(self.servers)) if ranks is None else list(ranks)
        super().commit(step, ranks)
        for rank in ranks if digests else ():
            self.digest(step, rank)

    def digest(self, step: int, rank: int, publication: str = "") -> None:
        """What fanin.torch makes of the weights, with numbers of the tests."""
        place = (4 * rank, 0), (4, 8)
        layouts = [Layout("w", "F32", (8, 8), (place,))]
        number = number_of(step, rank)
        held = [Held("w", *place, {"F32": number, "BF16": 1, "F16": 1})]
        told = bytearray(digests_of(layouts, step, held))
        shards = [fanin.Shard(f"rank{at}", "U8", (len(told),), (), -1) for at in range(2)]
        shards[rank] = fanin.shard_of(f"rank{rank}", told, dtype="U8")
        told_by, name = self.servers[rank], publication_for(publication or self.publication)
        told_by.begin_update(name)
        told_by.put(name, shards, replace=True)
        told_by.commit(name, step)


TRAINER = "10.0.0.1:6000,10.0.0.2:6000"


def registry_of(*engines: Any, trainer: Any = None, **more: Any) -> Registry:
    """Of these engines or URLs, and of this trainer; None: of one that nobody asks. Nothing is read
    ahead unless the test says so."""
    given = {"timeout": 30.0, "ask_trainer": trainer is not None, "prefetch": False, **more}
    registry = Registry(TRAINER if trainer is None else trainer, **given)
    for engine in engines:
        registry.add(getattr(engine, "url", engine))
    return registry


def failure(caught: Any, engine: FakeEngine) -> Any:
    """What a SyncError says of this engine."""
    result = caught.value.result.results[engine.url]
    assert not result.ok and engine.url in result.error
    return result
