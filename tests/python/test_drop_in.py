# SPDX-License-Identifier: Apache-2.0
"""The parameter server and client with NIXL-style calls: code ports by changing an import."""

from __future__ import annotations

import gc
import importlib
import inspect
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fanin.config import ConfigError
from fanin.errors import (
    FaninError,
    PeerError,
    PullAgainError,
    PullTimeoutError,
    RequestError,
    StateError,
)
from fanin.parameter_client import ParameterClient
from fanin.parameter_client import TensorInfo as ClientInfo
from fanin.parameter_server import ParameterServer, TensorInfo, join_key, split_key
from http_engine import Trainer
from local_world import until

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

A = "lora:0:base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "lora:0:base_model.model.layers.0.self_attn.q_proj.lora_B.weight"
OTHER = "layer.0.weight"


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without PyTorch in the process."""
    if request.param == "torch" and torch is None:
        pytest.skip("no PyTorch here")
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "torch", None)
    return str(request.param)


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    with ParameterServer("lora_param_server_0", port=0) as result:
        yield result


def connect(server: ParameterServer, **options: Any) -> ParameterClient:
    return ParameterClient(
        "worker", server.name, "127.0.0.1", server.port, **{"timeout": 20.0, **options}
    )


def array(*shape: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


# --------------------------------------------------------------------- calls


def test_code_written_for_such_a_server(library: str) -> None:
    """The calls as a trainer and a worker make them, with nothing of fanin's in sight."""
    shards = [array(3, 4), array(2, 4, first=100)]
    servers = []
    for rank, shard in enumerate(shards):
        server = ParameterServer(f"lora_param_server_{rank}", port=0)
        server.put(A, torch.from_numpy(shard) if library == "torch" else shard)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))

    clients = [
        ParameterClient(
            name=f"inference_tp0_to_trainer{rank}",
            server_name=f"lora_param_server_{rank}",
            server_ip="127.0.0.1",
            server_port=server.port,
            device="cpu",
            timeout=30.0,
        )
        for rank, (server, _) in enumerate(servers)
    ]
    for client in clients:
        client.refresh_catalog()
    keys = [key for key in clients[0].keys() if key.startswith("lora:0:")]
    assert keys == [A]
    parts = [client.get(keys[0]) for client in clients]
    if library == "torch":
        assert all(isinstance(part, torch.Tensor) for part in parts)
        full = torch.cat(parts, dim=0).numpy()
    else:
        assert all(isinstance(part, np.ndarray) for part in parts)
        full = np.concatenate(parts)
    assert (full == np.concatenate(shards)).all()
    for client in clients:
        client.disconnect()
        client.disconnect()
    for server, thread in servers:
        server.shutdown()
        thread.join(20)
        assert not thread.is_alive() and not server.running


def test_signatures() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(ParameterServer)[:3] == ["name", "port", "tcp_only"]
    assert inspect.signature(ParameterServer).parameters["port"].default == 5555
    assert names(ParameterClient) == [
        "name",
        "server_name",
        "server_ip",
        "server_port",
        "device",
        "timeout",
        "tcp_only",
        "more",  # by name: what fanin.Client takes
    ]
    assert names(ParameterClient.get)[1:] == ["key", "out", "timeout"]
    assert names(ParameterClient.batch_get)[1:] == ["keys", "timeout"]
    assert ClientInfo is TensorInfo


def test_keys_and_publications() -> None:
    assert split_key("lora:0:a:b") == ("lora:0", "a:b")
    for key in (OTHER, "lora:0", "lora:0:", "lora:a b:x", "lora:-:x", "lora:..:x", ":", "x:lora:0"):
        assert split_key(key) == ("lora:-", key)
    random.seed(3)
    pieces = ["lora", ":", "0", "-", "a", "/", ".", "\n"]
    seen: dict[tuple[str, str], str] = {}
    for _ in range(20000):
        key = "".join(random.choices(pieces, k=random.randint(1, 7)))
        pair = split_key(key)
        assert join_key(*pair) == key
        assert seen.setdefault(pair, key) == key


def test_put_update_remove(server: ParameterServer, library: str) -> None:
    first, second, other = array(2, 3), array(4), array(2, 2, first=7)
    server.put(A, first)
    server.put(OTHER, other)
    assert server.keys() == [A, OTHER] and server.get(A) is first and server.get("x") is None
    with pytest.raises(ValueError, match="already"):
        server.put(A, second)
    with pytest.raises(KeyError):
        server.update(B, second)
    with pytest.raises(KeyError):
        server.remove(B)

    with connect(server) as client:
        assert sorted(client.keys()) == sorted([A, OTHER])
        assert client.get_info(A) == TensorInfo(24, (2, 3), "float32", 0)
        assert client.get_info(B) is None and client.get(B) is None
        assert (as_numpy(client.get(A)) == first).all()

        server.update(A, second)  # another form than the catalog says
        assert (as_numpy(client.get(A)) == second).all()
        assert client.get_info(A) == TensorInfo(16, (4,), "float32", 0)

        server.put(B, first)
        assert client.get(B) is None  # not in the catalog before a refresh
        client.refresh_catalog()
        both = client.batch_get([B, "nowhere", OTHER, A, B])
        assert list(both) == [B, OTHER, A]
        assert (as_numpy(both[B]) == first).all() and (as_numpy(both[OTHER]) == other).all()

        server.remove(A)
        assert client.get(A) is None
        assert list(client.batch_get([A, B])) == [B]
        server.remove(B)
        assert client.batch_get([A, B]) == {} and client.keys() == [OTHER]
        assert client.batch_get([]) == {}
        server.put(A, first)  # of a publication that was empty
        client.refresh_catalog()
        assert (as_numpy(client.get(A)) == first).all()
        assert client.steps == {"lora:0": server.steps["lora:0"], "lora:-": 1}


def test_strides_dtypes_and_forms(server: ParameterServer, library: str) -> None:
    values: dict[str, Any] = {
        "transposed": array(3, 5).T,
        "every second": array(10)[::2],
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 4), np.float32),
        "half": np.ones(3, np.float16),
        "flags": np.array([True, False]),
        "bytes": np.arange(5, dtype=np.uint8),
        "long": np.array([-(2**62)]),
        "complex": np.array([1 + 2j], np.complex64),
    }
    with server.updating():
        for key, value in values.items():
            server.put(key, value)
    with connect(server) as client:
        got = client.batch_get(values)
        assert list(got) == list(values)
        for key, value in values.items():
            assert as_numpy(got[key]).dtype == value.dtype and got[key].shape == value.shape
            assert (as_numpy(got[key]) == value).all()


def test_out(server: ParameterServer, library: str) -> None:
    server.put(A, array(2, 3))
    with connect(server) as client:
        out = np.zeros((2, 3), np.float32)
        assert client.get(A, out=out) is out and (out == array(2, 3)).all()
        with pytest.raises(ValueError, match="shape"):
            client.get(A, out=np.zeros((3, 2), np.float32))
        with pytest.raises(ValueError, match="dtype"):
            client.get(A, out=np.zeros((2, 3), np.float64))
        server.update(A, array(4))
        with pytest.raises(ValueError, match="shape"):
            client.get(A, out=out)
        out.flags.writeable = False
        with pytest.raises(FaninError):
            server.update(A, array(2, 3))
            client.refresh_catalog()
            client.get(A, out=out)


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_bfloat16(server: ParameterServer, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(6).to(torch.bfloat16)
    server.put(A, value)
    with connect(server) as client:
        assert client.get_info(A) == TensorInfo(12, (6,), "bfloat16", 0)
        got = client.get(A)
        assert got.dtype == torch.bfloat16 and torch.equal(got, value)
        out = torch.zeros(6, dtype=torch.bfloat16)
        assert client.get(A, out=out) is out and torch.equal(out, value)
        with pytest.raises(ValueError, match="dtype"):
            client.get(A, out=torch.zeros(6, dtype=torch.float16))
        bits = value.view(torch.uint16).numpy()
    monkeypatch.setitem(sys.modules, "torch", None)
    with connect(server) as client:
        got = client.get(A)
        assert got.dtype == np.uint16 and (got == bits).all()
        assert (client.get(A, out=np.zeros(6, np.uint16)) == bits).all()
        with pytest.raises(RequestError, match="needs PyTorch"):
            connect(server, device="cuda:0")


# --------------------------------------------------------- steps and tearing


def test_every_change_is_a_step(server: ParameterServer) -> None:
    server.put(A, array(2))
    server.put(B, array(2))
    server.put("x", array(2))
    assert server.steps == {"lora:0": 2, "lora:-": 1}
    server.update(A, array(3))
    server.remove(B)
    assert server.steps["lora:0"] == 4
    with server.updating(step=100):
        server.put(B, array(5))
        server.remove("x")
    assert server.steps["lora:0"] == 100
    with server.updating():
        pass
    assert server.steps["lora:0"] == 101
    with pytest.raises(ValueError, match="step 101 is not above"), server.updating(step=101):
        raise AssertionError("the block must not run")
    with connect(server) as client:
        assert sorted(client.keys()) == sorted([A, B])
    with pytest.raises(RuntimeError, match="inside"), server.updating(), server.updating():
        pass


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
@pytest.mark.parametrize("how", ["update", "updating"])
def test_writes_outside_of_updating_are_refused(server: ParameterServer, how: str) -> None:
    tensor, other = torch.zeros(4), torch.ones(4)
    server.put(A, tensor)
    server.put(OTHER, other)
    with server.updating():
        tensor.add_(1)
    server.update(A, tensor)  # not written since
    tensor.add_(1)
    with pytest.raises(StateError, match="outside of updating") as caught:
        if how == "update":
            server.update(A, tensor)
        else:
            with server.updating():
                raise AssertionError("the block must not run")
    assert caught.value.key == A
    with connect(server, timeout=0.2) as client:
        with pytest.raises(PullAgainError):
            client.get(A)
        assert (client.get(OTHER).numpy() == 1).all()
        with server.updating():
            tensor.add_(1)
        assert (client.get(A, timeout=20.0).numpy() == 3).all()


MOVES = {
    "assigned": lambda p: setattr(p, "data", p.data - 0.25),
    "converted": lambda p: setattr(p, "data", p.data.half()),
    "reshaped": lambda p: setattr(p, "data", torch.ones(2, 3)),
    "transposed": lambda p: setattr(p, "data", p.data.t().contiguous().t()),
    "brought back": lambda p: [setattr(p, "data", torch.ones(n)) for n in (0, 3)],
}


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("how", MOVES)
def test_memory_that_is_replaced_is_published(how: str, snapshot: bool) -> None:
    param, beside = torch.nn.Parameter(torch.ones(4, 2)), torch.zeros(2)
    with ParameterServer("moves", port=0, snapshot=snapshot) as server:
        server.put(A, param)
        server.put(OTHER, beside)
        before = weakref.ref(param.untyped_storage())
        with connect(server) as client:
            client.get(A)
            for step in (2, 3):
                with server.updating():
                    beside.add_(1)
                    MOVES[how](param)
                assert torch.equal(client.get(A), param.detach())
                assert (client.get(OTHER) == step - 1).all()
                assert client.steps["lora:0"] == server.steps["lora:0"] == step
        assert server.keys() == [A, OTHER] and server.get(A) is param
        gc.collect()
        assert before() is None
        if not snapshot:  # what it has now is watched, and nothing else
            assert list(server._lent) == [p.untyped_storage().data_ptr() for p in (beside, param)]
            with torch.no_grad():
                param.add_(1)
            with pytest.raises(StateError, match="outside of updating"), server.updating():
                raise AssertionError("the block must not run")


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_memory_that_cannot_be_served_is_not_published(server: ParameterServer) -> None:
    param, other = torch.nn.Parameter(torch.ones(8)[4:]), torch.ones(3, 1)
    server.put(A, param)
    server.put(OTHER, other)
    with connect(server, timeout=0.2) as client:
        for change in (
            lambda: param.untyped_storage().resize_(0),  # as FSDP and offloading do
            lambda: setattr(param, "data", torch.ones(1).expand(4)),
        ):
            with pytest.raises(StateError, match="memory of '.*q_proj.*remove") as caught:
                with server.updating():
                    change()
            assert caught.value.key == A
            with pytest.raises((PullAgainError, PullTimeoutError)):
                client.get(A)
        with server.updating():
            param.data = torch.full((4,), 3.0)
        with connect(server) as patient:
            assert (patient.get(A) == 3).all() and (patient.get(OTHER) == 1).all()


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
@pytest.mark.parametrize("form", ["itself", "detach", "data", "rows"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_steps_outside_of_updating(
    server: ParameterServer, form: str, fused: bool
) -> None:
    """PyTorch counts no writes of fused optimizers, and none in what .data gave."""
    buffer = torch.zeros(3, 4)
    param, beside = (torch.nn.Parameter(buffer[row].data) for row in (0, 1))
    forms = {"itself": param, "detach": param.detach(), "data": param.data, "rows": param[1:3]}
    server.put(A, forms[form])
    optimizers = [torch.optim.AdamW([one], lr=0.1, fused=fused) for one in (param, beside)]

    def step(*which: Any) -> None:
        for optimizer in which:
            for one in optimizer.param_groups[0]["params"]:
                one.grad = torch.ones(4)
            optimizer.step()

    with server.updating():
        step(*optimizers)
    # What lies beside it in one buffer is not published, nor is what has no gradient.
    step(optimizers[1])
    optimizers[0].zero_grad()
    optimizers[0].step()
    with server.updating():
        pass
    step(optimizers[0])
    with (
        pytest.raises(StateError, match="optimizer.step()") as caught,
        server.updating(),
    ):
        raise AssertionError("the block must not run")
    assert caught.value.key == A
    with server.updating():
        pass
    server.remove(A)
    server.put(B, beside)
    step(optimizers[0])
    with server.updating():
        pass


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_servers_come_and_go_within_a_step_of_an_optimizer() -> None:
    """The garbage collector may find a server at any time; PyTorch's steps go on."""
    register = importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    optimizer = torch.optim.SGD([param], lr=0.1)
    servers = [ParameterServer("first", port=0)]
    with servers[0]:
        servers[0].put(A, torch.zeros(4))
    gone = weakref.ref(servers[0])

    def change(*_: Any) -> None:
        servers.clear()
        gc.collect()
        with ParameterServer("second", port=0) as server:
            server.put(A, param)

    # Twice: one of the two is not the last hook.
    hooks = [register(change), register(change)]
    try:
        optimizer.step()
        assert gone() is None
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_copies_may_be_written_at_any_time() -> None:
    tensor = torch.zeros(4)
    with ParameterServer("copies", port=0, snapshot=True) as server:
        server.put(A, tensor)
        tensor.add_(1)
        server.update(A, tensor)
        with connect(server) as client:
            assert (client.get(A).numpy() == 1).all()


def test_commits_that_cost_much_are_gathered(server: ParameterServer) -> None:
    """Puts of one burst are published together; a reader waits for them and misses none."""
    server.put(A, array(2))
    # As if the last commit had taken 50 ms: the next one may come 200 ms after it.
    server._last["lora:0"] = (time.monotonic(), 0.05)
    for i in range(20):
        server.put(f"lora:0:layer.{i}.weight", array(2, first=i))
    assert server._due and server.steps == {"lora:0": 21}
    with connect(server) as client:
        assert len(client.keys()) == 21
        got = client.batch_get(client.keys())
        assert all((as_numpy(got[f"lora:0:layer.{i}.weight"])[0] == i) for i in range(20))
        assert client.steps == {"lora:0": 21} and not server._due

    # A change that is due belongs to the update that comes first, or goes with the publication.
    server._last["lora:0"] = (time.monotonic(), 60.0)
    server.remove(A)
    with server.updating():
        server.put(A, array(3))
    assert server.steps == {"lora:0": 23} and not server._due
    server._last["lora:0"] = (time.monotonic(), 60.0)
    server.update(A, array(4))
    assert server._due
    server.shutdown()


def test_a_tensor_that_comes_and_goes_inside_an_update(server: ParameterServer) -> None:
    with server.updating():
        server.put(A, array(2))
        server.remove(A)
        server.put(OTHER, array(2))
    with connect(server) as client:
        assert client.keys() == [OTHER]


@pytest.mark.parametrize("snapshot", [False, True])
def test_tensors_are_never_torn(snapshot: bool) -> None:
    """A writer in place and a reader without pause: all bytes of a fetch are of one step."""
    shape = (64, 1024)
    tensors = {key: np.zeros(shape, np.float32) for key in (A, B)}
    with ParameterServer("s", port=0, snapshot=snapshot) as server:
        with server.updating():
            for key, tensor in tensors.items():
                server.put(key, tensor)
        stop = threading.Event()

        def train() -> None:
            value = 1.0
            while not stop.is_set():
                with server.updating():
                    for tensor in tensors.values():
                        tensor[: shape[0] // 2] = value
                        tensor[shape[0] // 2 :] = value
                value += 1
                stop.wait(0.001)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            with connect(server) as client:
                seen = set()
                for _ in range(60):
                    got = client.batch_get([A, B])
                    values = {float(v) for tensor in got.values() for v in np.unique(tensor)}
                    assert len(values) == 1
                    assert client.steps["lora:0"] == values.copy().pop() + 1
                    seen |= values
                assert len(seen) > 1
        finally:
            stop.set()
            thread.join()


def test_half_written_tensors_are_not_read(server: ParameterServer) -> None:
    tensor, other = array(4), array(2)
    server.put(A, tensor)
    with pytest.raises(ZeroDivisionError), server.updating():
        tensor[:2] = 9
        raise ZeroDivisionError
    with connect(server, timeout=1.0) as client:
        with pytest.raises(PullTimeoutError):
            client.get(A)
        with pytest.raises(PullTimeoutError):
            client.batch_get([A])
        assert client.get("nowhere") is None
        # What is put meanwhile does not publish the half-written ones.
        server.put(B, other)
        with pytest.raises(PullTimeoutError):
            client.get(A)
        with server.updating():
            tensor[:] = 9
        got = client.batch_get([A, B])
        assert (as_numpy(got[A]) == 9).all() and (as_numpy(got[B]) == other).all()


def test_a_put_that_is_refused_changes_nothing(server: ParameterServer) -> None:
    server.put(A, array(4))
    steps = server.steps
    for bad in (object(), np.array(["text"]), np.zeros(2, ">f4")):
        with pytest.raises(FaninError):
            server.put(B, bad)
        with pytest.raises(FaninError):
            server.update(A, bad)
    with pytest.raises(FaninError):
        server.put("lora:0:" + "x" * 600, array(2))
    with pytest.raises(FaninError):
        server.put("lora:9:" + "x" * 600, array(2))
    assert server.keys() == [A] and server.steps == steps
    with connect(server) as client:
        assert client.keys() == [A] and (as_numpy(client.get(A)) == array(4)).all()


def test_tensors_are_held_until_they_are_gone(server: ParameterServer) -> None:
    class Array(np.ndarray):  # type: ignore[type-arg]
        pass

    tensor = array(8).view(Array)
    watch = weakref.ref(tensor)
    server.put(A, tensor)
    del tensor
    gc.collect()
    assert watch() is not None
    server.update(A, array(8))
    gc.collect()
    assert watch() is None


# ---------------------------------------------------------------------- ends


def test_the_client_waits_for_the_server(server: ParameterServer) -> None:
    server.put(A, array(2))
    port = server.port
    server.shutdown()
    waiting = threading.Event()
    results: list[Any] = []

    def fetch() -> None:
        waiting.set()
        with ParameterClient("w", "late", "127.0.0.1", port, timeout=20) as client:
            results.append(client.keys())

    thread = threading.Thread(target=fetch)
    thread.start()
    waiting.wait()
    with ParameterServer("late", port=port):
        thread.join(20)
    assert results == [[]]


def test_nobody_there() -> None:
    with ParameterServer("gone", port=0) as server:
        port = server.port
    with pytest.raises(TimeoutError, match="no parameter server gone at 127.0.0.1"):
        ParameterClient("w", "gone", "127.0.0.1", port, timeout=0.2)


def test_another_name_and_a_larger_world(server: ParameterServer) -> None:
    with pytest.raises(PeerError):
        ParameterClient("w", "other", "127.0.0.1", server.port, timeout=10)
    with Trainer(size=2) as trainer:
        trainer.commit(1)
        with pytest.raises(PeerError):
            ParameterClient("w", "job", "127.0.0.1", trainer.servers[0].port, timeout=10)


def test_run_and_stop(server: ParameterServer) -> None:
    server.stop()
    server.run()  # was stopped before it began
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.running)
    server.stop()
    thread.join(20)
    assert not thread.is_alive() and not server.running
    server.put(A, array(2))  # still serves
    with connect(server) as client:
        assert client.get(A) is not None
    server.shutdown()
    server.shutdown()
    server.run()
    assert server.keys() == []
    with pytest.raises(RuntimeError, match="shut down"):
        server.put(B, array(2))


def test_after_disconnect(server: ParameterServer) -> None:
    server.put(A, array(2))
    client = connect(server)
    client.disconnect()
    with pytest.raises(FaninError):
        client.get(A)
    with pytest.raises(FaninError):
        client.refresh_catalog()


def test_a_network_needs_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs to know whom"):
        ParameterServer("s", port=0, bind="10.0.0.1")
    monkeypatch.setenv("FANIN_BIND", "0.0.0.0")
    with pytest.raises(ConfigError, match="all interfaces"):
        ParameterServer("s", port=0)
    monkeypatch.setenv("FANIN_BIND", "127.0.0.2")
    with ParameterServer("s", port=0, tcp_only=True) as server:
        server.put(A, array(2))
        with ParameterClient("w", "s", "127.0.0.2", server.port, tcp_only=True) as client:
            assert client.get(A) is not None
