# SPDX-License-Identifier: Apache-2.0
"""A fake inference engine over HTTP, and a small trainer, for tests of pool and SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fanin
import numpy as np
from fanin.info import TrainerInfo

Answer = tuple[int, Any]
OK: Answer = (200, {"status": "ok"})


class Request:
    """What came in: path, JSON body, headers."""

    def __init__(self, path: str, body: Any, headers: dict[str, str]) -> None:
        self.path = path
        self.body = body
        self.headers = headers


class Engine:
    """Answers GETs and POSTs by *answer*: a function of the request, or a list of answers one after
    the other of which the last repeats. An answer None closes the connection without a word.
    """

    def __init__(
        self, answer: Callable[[Request], Answer | None] | Iterable[Answer | None]
    ) -> None:
        self.requests: list[Request] = []
        self.arrived = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._answer = answer if callable(answer) else None
        self._list = [] if callable(answer) else list(answer)
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(content) if content else None
                engine._serve(self, Request(self.path, body, dict(self.headers)))

            def do_GET(self) -> None:
                engine._serve(self, Request(self.path, None, dict(self.headers)))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _serve(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
            answer = None
            if self._answer is None:
                answer = self._list.pop(0) if len(self._list) > 1 else self._list[0]
        self.arrived.release()
        if self._answer is not None:
            answer = self._answer(request)
        if answer is None:
            handler.close_connection = True
            return
        status, body = answer
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        try:
            handler.wfile.write(data)
        except OSError:
            handler.close_connection = True

    @property
    def bodies(self) -> list[Any]:
        return [request.body for request in self.requests]

    @property
    def names(self) -> list[str]:
        return [body.get("lora_name") for body in self.bodies]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refusal(status: int, code: str, message: str = "because", remedy: str = "") -> Answer:
    return status, {
        "error": {"code": code, "message": message, "remedy": remedy, "rank": None, "key": ""}
    }


SUPERSEDED = refusal(404, "FANIN_ERR_SUPERSEDED", "the step has passed")


class Trainer:
    """Real fanin servers of one launch: *size* ranks that hold one LoRA layer, split by rows."""

    kind = "lora"

    def __init__(
        self, size: int = 2, run: str = "0", world: bytes = bytes(range(1, 17)), **metadata: str
    ) -> None:
        self.publication, self.world, self.run = f"{self.kind}:{run}", world, run
        self.weights = [np.zeros((4, 8), np.float32) for _ in range(size)]
        self.servers = [
            fanin.Server(world_id=world, rank=rank, world_size=size, name="job", use_ucx=False)
            for rank in range(size)
        ]
        for server in self.servers:
            self.put(server, metadata)

    def rows(self, rank: int, name: str) -> fanin.Shard:
        """What this rank holds of the matrix."""
        shape = 4 * len(self.servers), 8
        return fanin.shard_of(name, self.weights[rank], shape=shape, offset=(4 * rank, 0))

    def put(self, server: fanin.Server, metadata: dict[str, str]) -> None:
        prefix = "model.layers.0.self_attn.q_proj"
        b = np.zeros((8, 4 * len(self.servers)), np.float32)
        shards = [self.rows(server.rank, f"{prefix}.lora_A.weight")]
        server.put(self.publication, [*shards, fanin.shard_of(f"{prefix}.lora_B.weight", b)])
        pairs = {"base_model_name_or_path": "base", "lora_alpha": "16", **metadata}
        server.set_metadata(self.publication, pairs)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{server.port}" for server in self.servers)

    @property
    def info(self) -> TrainerInfo:
        return TrainerInfo(self.addresses, self.world.hex(), self.run, "job")

    def commit(
        self, step: int, ranks: Iterable[int] | None = None, value: int | None = None
    ) -> None:
        """All bytes become *value*, None: the step's number."""
        for rank in range(len(self.servers)) if ranks is None else ranks:
            self.servers[rank].begin_update(self.publication)
            self.weights[rank][:] = step if value is None else value
            self.servers[rank].commit(self.publication, step)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.close(drain=0)
