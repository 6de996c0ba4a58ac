# SPDX-License-Identifier: Apache-2.0
"""The parameter server and client with NIXL-style calls: code ports by changing an import."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fanin.config import ConfigError
from fanin.errors import (
    FaninError,
    PeerError,
    PullTimeoutError,
    RequestError,
    StateError,
)
from fanin.parameter_client import ParameterClient
from fanin.parameter_client import TensorInfo as ClientInfo
from fanin.parameter_server import ParameterServer, TensorInfo
from http_engine import Trainer

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
        assert not thread.is_alive()


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
        assert sorted(client.keys()) == sorted([A, OTHER])  # before a refresh, or a get
        both = client.batch_get([B, "nowhere", OTHER, A, B])
        assert list(both) == [B, OTHER, A]
        assert (as_numpy(both[B]) == first).all() and (as_numpy(both[OTHER]) == other).all()

        server.remove(A)
        assert client.get(A) is None
        assert list(client.batch_get([A, B])) == [B]
        server.remove(B)
        assert client.batch_get([A, B]) == {} and client.keys() == [OTHER]
        assert client.batch_get([]) == {}
        server.remove(OTHER)
        assert client.get(OTHER) is None and client.keys() == []
        server.put(A, first)  # where nothing was left
        assert (as_numpy(client.get(A)) == first).all()
        assert client.step == server.step == 8


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
        with pytest.raises(PeerError, match="shape"):
            client.get(A, out=np.zeros((3, 2), np.float32))
        with pytest.raises(PeerError, match="F32, not as F64"):
            client.get(A, out=np.zeros((2, 3), np.float64))
        server.update(A, array(4))
        with pytest.raises(PeerError, match="shape"):
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
        with pytest.raises(PeerError, match="BF16, not as F16"):
            client.get(A, out=torch.zeros(6, dtype=torch.float16))
    monkeypatch.setitem(sys.modules, "torch", None)
    with connect(server, device="cuda:0") as client, pytest.raises(ImportError):
        client.get(A)


# --------------------------------------------------------- steps and tearing


def test_every_change_is_a_step(server: ParameterServer) -> None:
    for expected, change in enumerate(
        [
            lambda: server.put(A, array(2)),
            lambda: server.put(B, array(2)),
            lambda: server.update(A, array(3)),
            lambda: server.remove(B),
        ],
        start=1,
    ):
        change()
        assert server.step == expected
    with server.updating():
        server.put(B, array(5))
        server.put(OTHER, array(2))
        server.remove(OTHER)
        assert server.step == 4
    with connect(server) as client:
        assert server.step == 5 and sorted(client.keys()) == sorted([A, B])
    with (
        pytest.raises(RuntimeError, match="inside"),
        server.updating(),
        server.updating(),
    ):
        pass


@pytest.mark.skipif(torch is None, reason="no PyTorch here")
def test_memory_that_is_replaced_is_published(server: ParameterServer) -> None:
    param = torch.nn.Parameter(torch.ones(8)[4:])
    server.put(A, param)
    with connect(server) as client:
        for value in (torch.full((4,), 3.0), torch.ones(2, 3).half()):
            with server.updating():
                param.data = value
            assert torch.equal(client.get(A), value)
        for change in (
            lambda: param.untyped_storage().resize_(0),  # as FSDP and offloading do
            lambda: setattr(param, "data", torch.ones(1).expand(4)),
        ):
            with pytest.raises(RequestError, match=r"NULL .*q_proj|share memory"):
                with server.updating():
                    change()
            with pytest.raises(PullTimeoutError):
                client.get(A, timeout=0.5)
        with server.updating():
            param.data = torch.full((4,), 5.0)
        assert (client.get(A) == 5).all()


def test_half_written_tensors_are_not_read(server: ParameterServer) -> None:
    tensor, other = array(4), array(2)
    server.put(A, tensor)
    with connect(server) as client:
        with pytest.raises(ZeroDivisionError), server.updating():
            tensor[:2] = 9
            raise ZeroDivisionError

        def refused() -> None:
            with pytest.raises(PullTimeoutError):
                client.get(A, timeout=0.5)

        refused()
        with pytest.raises(PullTimeoutError):
            client.batch_get([A, "nowhere"], timeout=0.5)
        # A change meanwhile does not publish the half-written ones.
        for change in (
            lambda: server.put(B, array(3)),
            lambda: server.update(B, other),
            lambda: server.put(OTHER, other),
            lambda: server.remove(OTHER),
        ):
            change()
            refused()
        with server.updating():
            tensor[:] = 9
        got = client.batch_get([A, B])
        assert (as_numpy(got[A]) == 9).all() and (as_numpy(got[B]) == other).all()


def test_a_put_that_is_refused_changes_nothing(server: ParameterServer) -> None:
    server.put(A, array(4))
    for bad in (object(), np.array(["text"]), np.zeros(2, ">f4")):
        with pytest.raises(FaninError):
            server.put(B, bad)
        with pytest.raises(FaninError):
            server.update(A, bad)
    with pytest.raises(FaninError):
        server.put("lora:0:" + "x" * 600, array(2))
    assert server.keys() == [A] and server.step == 1
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


def test_after_shutdown(server: ParameterServer) -> None:
    server.put(A, array(2))
    server.shutdown()
    server.shutdown()
    server.run()
    assert server.keys() == [] and server.get(A) is None
    with pytest.raises(StateError, match="closed"):
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
