# SPDX-License-Identifier: Apache-2.0
"""Tensors that are handed over bucket by bucket are published, and every engine pulls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import fanin
import numpy as np
import pytest
from fanin.errors import RequestError, StateError, UnreachableError
from fanin.sync import SyncError, TransportBackend
from fleet import FakeVLLM
from http_engine import Request

SHAPES = {"a.weight": (4, 8), "b.weight": (3,)}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    TransportBackend.close_all()


class PullingVLLM(FakeVLLM):
    """Pulls for real, into arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.into = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.hooks["/update_weights"] = self.pull

    def pull(self, request: Request) -> None:
        assert self.initialised is not None
        info = self.initialised
        with fanin.Client() as client:
            client.connect(info["trainer"])
            step = request.body["update_info"]["step"]
            pulled = client.pull_into("full:" + info["run"], self.into, step=step, timeout=20)
            self.worlds = [pulled.world_id]


def config(*engines: FakeVLLM, **settings: Any) -> Any:
    endpoints = [
        SimpleNamespace(host="127.0.0.1", port=int(engine.url.rpartition(":")[2]), world_size=1)
        for engine in engines
    ]
    return SimpleNamespace(
        endpoints=endpoints,
        master_address="10.0.0.1",
        master_port=0,
        group_name="weight_sync_group",
        buffer_size_mb=1024,
        device="cpu",
        training_world_size=2,
        training_rank=0,
        backend_config={"use_ucx": False, "timeout": 30.0, **settings},
    )


def send(backend: TransportBackend, value: float, names: Any = tuple(SHAPES)) -> None:
    for name in names:
        bucket = np.full(SHAPES[name], value, np.float32)
        backend.transfer_bucket([(name, bucket)], src_rank=0)
        bucket[:] = -1  # a bucket is written again at once


def test_two_syncs_by_two_objects() -> None:
    with PullingVLLM() as one, PullingVLLM() as other:
        for step in (1, 2):
            backend = TransportBackend(config(one, other))
            assert backend.sender_ranks == frozenset({0})
            assert not backend.supports_direct_ep_transfer
            assert not backend.supports_direct_pp_transfer
            assert backend.initialize() is True
            send(backend, step)
            backend.transfer_bucket([], flush_cache=True, weight_version=f"v{step}")
            backend.flush_pending_transfers()
            backend.destroy()
            backend.destroy()
            assert [entry["success"] for entry in backend.endpoint_results] == [True, True]
            for engine in (one, other):
                assert engine.version == f"v{step}" and not engine.paused
                assert all((values == step).all() for values in engine.into.values())
        assert one.count("/init_weight_transfer_engine") == 1  # connections and mapping stay


def test_what_is_said_of_one_sync_is_not_of_the_next() -> None:
    with PullingVLLM() as engine:
        backend = TransportBackend(config(engine))
        for version in ("mine", None):
            backend.initialize()
            send(backend, 1.0)
            backend.transfer_bucket([], flush_cache=True, weight_version=version)
            backend.destroy()
            assert engine.version == (version or "step-2")


def test_dropped_and_sent_again() -> None:
    with PullingVLLM() as engine:
        backend = TransportBackend(config(engine))
        backend.destroy()  # never initialized
        backend.initialize()
        send(backend, 1, ["a.weight"])
        backend.destroy(complete_receiver=False)
        assert not engine.count("/pause")
        backend.initialize()
        send(backend, 2)
        backend.destroy()
        assert all((values == 2).all() for values in engine.into.values())


def test_a_tensor_that_is_missing_changed_or_there_twice() -> None:
    with PullingVLLM() as engine:
        backend = TransportBackend(config(engine))
        backend.initialize()
        send(backend, 1)
        backend.destroy()
        backend.initialize()
        send(backend, 2)
        with pytest.raises(RequestError, match="a.weight was sent twice"):
            send(backend, 2, ["a.weight"])
        with pytest.raises(RequestError, match="no engine asked: .*a.weight was sent twice"):
            backend.destroy()
        backend.initialize()
        with pytest.raises(RequestError, match=r"b.weight was float32 \(3,\)"):
            backend.transfer_bucket([("b.weight", np.zeros(4, np.float32))])
        send(backend, 2, ["a.weight"])
        with pytest.raises(RequestError, match=r"no engine asked: .*b.weight was float32 \(3,\)"):
            backend.destroy()
        backend.initialize()
        send(backend, 2, ["a.weight"])
        with pytest.raises(RequestError, match="b.weight was not sent"):
            backend.destroy()
        assert engine.version == "step-1"  # nothing absent is served
        backend.initialize()
        send(backend, 3)
        backend.destroy()
        assert engine.version != "step-1" and (engine.into["b.weight"] == 3).all()


def test_a_tensor_that_is_refused_is_not_taken_for_published() -> None:
    refused = np.ones(3, np.clongdouble)  # which safetensors has no name for
    with PullingVLLM() as engine:
        for _ in range(2):
            backend = TransportBackend(config(engine))
            backend.initialize()
            with pytest.raises(RequestError, match="b.weight"):
                backend.transfer_bucket([("b.weight", refused)])
            backend.destroy(complete_receiver=False)
        backend = TransportBackend(config(engine))
        backend.initialize()
        send(backend, 3)
        backend.destroy()
        assert all((values == 3).all() for values in engine.into.values())


class Stuck:
    """A tensor that cannot be copied."""

    def copy(self, order: str) -> None:
        raise MemoryError("no room for a copy")


def torn() -> Iterator[tuple[str, Any]]:
    yield "b.weight", np.ones(3, np.float32)
    raise ValueError("the gather has failed")


@pytest.mark.parametrize(
    ("bucket", "why"),
    [
        (lambda: [("b.weight", np.ones(3, np.clongdouble))], "RequestError: .*b.weight"),
        (lambda: [("b.weight", Stuck())], "MemoryError: no room for a copy"),
        (torn, "ValueError: the gather has failed"),
    ],
)
@pytest.mark.parametrize("before", [[], ["a.weight"]])
def test_a_bucket_that_failed_ends_its_sync(before: list[str], bucket: Any, why: str) -> None:
    with PullingVLLM() as engine:
        backend = TransportBackend(config(engine))

        def sync() -> None:
            backend.initialize()
            try:
                send(backend, 1, before)
                backend.transfer_bucket(bucket())
            finally:
                backend.destroy()

        with pytest.raises(RequestError, match=f"no engine asked: {why}"):
            sync()
        assert not engine.count("/pause") and not engine.count("/update_weights")
        backend.initialize()
        send(backend, 2)
        backend.destroy()
        assert all((values == 2).all() for values in engine.into.values())


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("call", ["put", "commit"])
def test_what_was_not_published_is_sent_anew(
    call: str, takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a call of the server is raised when the call has ended."""
    ports: list[int] = []
    real = getattr(fanin.Server, call)

    def fail(server: fanin.Server, *arguments: Any, **options: Any) -> None:
        ports.append(server.port)
        if takes_effect:
            real(server, *arguments, **options)
        raise KeyboardInterrupt

    with PullingVLLM() as engine:
        backend = TransportBackend(config(engine))
        backend.initialize()
        send(backend, 1)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(fanin.Server, call, fail)
            backend.destroy()
        assert not engine.count("/pause")
        with fanin.Client([f"127.0.0.1:{ports[0]}"]) as client:
            state = "stable" if takes_effect and call == "commit" else "unpublished"
            assert [one.state for one in client.publications()] == [state]
        for value in (2, 3):
            backend = TransportBackend(config(engine))
            backend.initialize()
            send(backend, value)
            backend.destroy()
            assert all((values == value).all() for values in engine.into.values())


class Device(NamedTuple):
    type: str
    index: int


class OnDevice(np.ndarray):  # type: ignore[type-arg]
    """What a device's tensor does: copies to it come when its stream is synchronized."""

    device = Device("cuda", 1)
    queue: ClassVar[list[Callable[[], None]]] = []

    def detach(self) -> OnDevice:
        return self

    def contiguous(self) -> OnDevice:
        return self

    def to(self, device: str, copy: bool) -> OnDevice:
        assert device == "cuda:1" and copy
        result = np.zeros(self.shape, self.dtype).view(OnDevice)
        return result.copy_(self)

    def copy_(self, other: OnDevice) -> OnDevice:
        values = np.array(other)
        self.queue.append(lambda: np.copyto(self, values))
        return self


def test_copies_of_a_stream_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit without a stream takes all for written."""

    def current_stream(device: Any) -> Any:
        assert device is OnDevice.device
        return SimpleNamespace(synchronize=synchronize)

    def synchronize() -> None:
        while OnDevice.queue:
            OnDevice.queue.pop(0)()

    cuda = SimpleNamespace(current_stream=current_stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with PullingVLLM() as engine:
        for step in (1, 2):
            backend = TransportBackend(config(engine, keep_on="cuda:1"))
            backend.initialize()
            for name, shape in SHAPES.items():
                bucket = np.full(shape, step, np.float32).view(OnDevice)
                backend.transfer_bucket([(name, bucket)])
                assert not OnDevice.queue  # a bucket is written again at once
            backend.destroy()
            assert all((values == step).all() for values in engine.into.values())


def test_an_engine_that_fails_is_told_of() -> None:
    with PullingVLLM() as good, FakeVLLM() as bad:
        bad.refuse("/update_weights", 500, "no memory")
        backend = TransportBackend(config(good, bad))
        backend.initialize()
        send(backend, 1)
        with pytest.raises(SyncError, match="no memory"):
            backend.destroy()
        assert [entry["success"] for entry in backend.endpoint_results] == [True, False]
        assert good.version == "step-1" and bad.paused


def test_used_wrongly() -> None:
    with FakeVLLM() as engine:
        backend = TransportBackend(config(engine))
        with pytest.raises(StateError, match="not initialized"):
            send(backend, 1)
        with pytest.raises(RequestError, match="unknown field 'speed'"):
            TransportBackend(config(engine, speed="0"))
        with pytest.raises(RequestError, match="api_key") as caught:
            TransportBackend(config(engine, api_key="s3\0cret"))
        assert "cret" not in str(caught.value)
        with pytest.raises(RequestError, match="no endpoint"):
            TransportBackend(config()).initialize()
        backend.initialize()
        with pytest.raises(StateError, match="another transport"):
            TransportBackend(config(engine)).initialize()
        with pytest.raises(StateError, match="is being sent"):
            TransportBackend.close_all()
        with pytest.raises(RequestError, match="rank 3 sends"):
            backend.transfer_bucket([], src_rank=3)
        backend.destroy(complete_receiver=False)
        with pytest.raises(StateError, match="other settings"):
            TransportBackend(config(engine, pause_mode="abort")).initialize()
        engine.__exit__(None, None, None)
        with pytest.raises(UnreachableError):
            backend.initialize()
