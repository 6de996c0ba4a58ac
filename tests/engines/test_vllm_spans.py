# SPDX-License-Identifier: Apache-2.0
"""One trace from the pool through a real vLLM to the pull in its worker, and both logs' name of it.

Spans of the test, of the API server and of the workers go to one collector by OTLP, as vLLM's
`--otlp-traces-endpoint` sends them; vLLM brings the SDK and the exporters along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fanin.pool import EnginePool
from live_trainer import LiveTrainer
from vllm_server import VllmServer, save_model

PATIENCE = 120.0
BESIDE = 200  # milliseconds between two exports of a process


@dataclasses.dataclass(frozen=True)
class Span:
    """One of fanin's, and what its process says of itself."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    error: bool
    attributes: dict[str, Any]
    process: dict[str, Any]


def values(attributes: Any) -> dict[str, Any]:
    """Attributes of OTLP as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Collector:
    """An OTLP endpoint over HTTP that keeps fanin's spans."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[Span] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found = [
            Span(
                one.name,
                one.trace_id,
                one.span_id,
                one.parent_span_id,
                one.status.code == one.status.STATUS_CODE_ERROR,
                values(one.attributes),
                values(process.resource.attributes),
            )
            for process in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in process.scope_spans
            if scope.scope.name == "fanin"
            for one in scope.spans
        ]
        with self._changed:
            self._spans += found
            self._changed.notify_all()

    def one(self, what: str, fits: Callable[[Span], bool]) -> Span:
        """The only span that fits, once it is here."""

        def here() -> list[Span]:
            return [span for span in self._spans if fits(span)]

        with self._changed:
            assert self._changed.wait_for(here, PATIENCE), f"no {what}, but {self._spans}"
            (found,) = here()
            return found

    def below(self, parent: Span, name: str) -> Span:
        """The only span of that name below *parent*."""
        place = (name, parent.trace, parent.id)
        return self.one(
            f"{name} below {parent.name}", lambda one: (one.name, one.trace, one.parent) == place
        )

    def way(self, step: int) -> list[Span]:
        """From the update to the pull, each below the one before."""
        place = ("fanin.update", step)
        found = [
            self.one("update", lambda one: (one.name, one.attributes.get("fanin.step")) == place)
        ]
        for name in ("fanin.post", "fanin.route", "fanin.fetch", "fanin.pull"):
            found.append(self.below(found[-1], name))
        return found


@dataclasses.dataclass
class Place:
    collector: Collector
    trainer: LiveTrainer
    engine: VllmServer
    pool: EnginePool

    def update(self) -> int:
        """One more step, which the engine serves."""
        step = int(self.trainer.step(record=False)["step"])
        result = self.pool.update_weights(self.trainer.info, "policy", step=step)
        assert (result.step, result.superseded) == (step, False)
        return step

    def learnt(self) -> bool:
        slots = self.engine.ask("GET", "/nixl/status")["slots"]
        assert not slots["why_not"] and not slots["refused"], slots
        return slots["layouts"] > 0 and slots["learning"] == 0


@contextlib.contextmanager
def spans_of_this_process(endpoint: str) -> Iterator[None]:
    """The program's SDK, as a trainer's or an orchestrator's own sets it up."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    scratch = tmp_path_factory.mktemp("spans")
    model = save_model(scratch / "model")
    with contextlib.ExitStack() as stack:
        # Of the trainer's ranks and of the engine: each logs its pulls and who connects.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("FANIN_LOG", "info")
        collector = stack.enter_context(Collector())
        stack.enter_context(spans_of_this_process(collector.endpoint))
        engine = stack.enter_context(
            VllmServer(
                model,
                scratch,
                *("--otlp-traces-endpoint", collector.endpoint),
                *("--max-loras", "2", "--max-cpu-loras", "2"),
                environment={
                    "FANIN_ALLOW_TRAINERS": "127.0.0.1",
                    "NIXL_LORA_CACHE_DIR": str(scratch / "cache"),
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                    "OTEL_BSP_SCHEDULE_DELAY": str(BESIDE),
                },
            )
        )
        trainer = stack.enter_context(LiveTrainer(model, scratch / "trainer")).wait_ready()
        engine.wait_ready()
        yield Place(collector, trainer, engine, EnginePool([engine.url], timeout=PATIENCE))


def until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.05)
    return found


def until_logged(log: Path, pattern: re.Pattern[str]) -> str:
    """What the pattern's group is in the log, once there is a line of it."""
    return str(until(lambda: pattern.search(log.read_text(errors="replace")), str(pattern))[1])


def processes(way: list[Span]) -> list[str]:
    """Of each span: "" for the test's, else what vLLM calls the process."""
    return [str(one.process.get("vllm.process_kind", "")) for one in way]


def test_into_a_directory_the_api_server_pulls(place: Place) -> None:
    step = place.update()
    way = place.collector.way(step)
    assert not any(one.error for one in way)
    assert way[3].attributes["fanin.landing"] == "directory"
    pull = way[4]
    assert (pull.attributes["fanin.call"], pull.attributes["fanin.step"]) == ("pull_adapter", step)
    assert pull.attributes["fanin.ranks"] == 2 and pull.attributes["fanin.bytes"] > 0
    assert pull.process == way[2].process != way[1].process


def test_into_a_slot_the_worker_pulls(place: Place) -> None:
    until(place.learnt, "the layout")
    step = place.update()
    way = place.collector.way(step)
    assert not any(one.error for one in way)
    assert way[3].attributes["fanin.landing"] == "slot"
    pull = way[4]
    assert (pull.attributes["fanin.call"], pull.attributes["fanin.step"]) == ("pull_into", step)
    assert processes(way) == ["", "", "", "", "worker"], [one.process for one in way]
    assert pull.process["vllm.process_id"] != way[2].process["vllm.process_id"]


def test_both_logs_name_the_pull_alike(place: Place) -> None:
    step = place.update()
    pattern = re.compile(rf"pull: trace (\w{{32}})/\d+: lora:0 step {step} ")
    found = until_logged(place.engine.log, pattern)
    for rank in range(2):
        log = place.trainer.scratch / f"rank{rank}.log"
        until_logged(log, re.compile(rf"session-open: .*trace ({found})"))
