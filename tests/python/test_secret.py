# SPDX-License-Identifier: Apache-2.0
"""A launch's secret: servers and clients that have it, another one, or none."""

import functools
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
from fanin._options import Credentials
from fanin.engine.clients import ClientPool, Source
from fanin.engine.directories import Places
from fanin.engine.pulls import PullService, Wanted
from fanin.info import TrainerInfo, read_info, write_info
from fanin.parameter_client import ParameterClient
from fanin.parameter_server import ParameterServer
from fanin.pool import EnginePool, newest_step
from fanin.sglang import SGLangEngine
from fanin.sync import Registry, TransportBackend, wait_for_step
from http_engine import OK, SUPERSEDED, Engine
from local_world import (
    A_NAME,
    CONFIG,
    PATIENCE,
    addresses,
    publish,
    publish_rank,
    servers,
    shards_of,
    weights,
)

# Over a Unix socket the kernel says who asks, and nobody needs the secret.
TCP = {"use_unix": False, "use_ucx": False}


def secret(folder: Path, name: str) -> Path:
    file = folder / name
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32) + "\n")
    return file


def client(ranks: list[fanin.Server], file: Path | str | None) -> fanin.Client:
    return fanin.Client(addresses(ranks), use_unix=False, use_ucx=False, secret_file=file)


def test_who_has_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = secret(tmp_path, "one"), secret(tmp_path, "other")
    with servers(secret_file=one) as ranks:
        publish(ranks, 1)
        with client(ranks, str(one)) as reader:
            assert [p.step for p in reader.publications()] == [1, 1, 1]
        monkeypatch.setenv("FANIN_SECRET_FILE", str(one))
        with client(ranks, None) as reader:
            assert len(reader.publications()) == len(ranks)
        with pytest.raises(fanin.ConnectionFailedError, match="another secret"):
            client(ranks, other)
        with pytest.raises(fanin.ConnectionFailedError, match="demands the launch's secret"):
            client(ranks, "")


@pytest.mark.parametrize(("mine", "theirs"), [("", ""), ("one", ""), ("one", "other")])
def test_who_knows_the_world_plays_no_rank_of_it(tmp_path: Path, mine: str, theirs: str) -> None:
    """A rank is gone, and somebody on its port has its world, its number and its tensors' names,
    which are no secrets. Without a secret it is believed, also by who knew the rank; with one by
    nobody."""
    files = {name: secret(tmp_path, name) if name else "" for name in (mine, theirs)}
    world: dict[str, Any] = {"world_id": bytes(range(1, 17)), "world_size": 3, "use_ucx": False}
    lie = shards_of(1, 66)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(fanin.Server(rank=rank, secret_file=files[mine], **world))
            for rank in range(3)
        ]
        for rank in ranks:
            publish_rank(rank, 1)
        known = stack.enter_context(client(ranks, files[mine]))
        assert known.pull_adapter(0, tmp_path / "before").step == 1
        where, port = addresses(ranks), ranks[1].port
        ranks[1].close()
        liar = stack.enter_context(
            fanin.Server(rank=1, base_port=port - 1, secret_file=files[theirs], **world)
        )
        liar.put(0, lie)
        liar.set_metadata(0, CONFIG)
        for rank in (ranks[0], ranks[2]):
            publish_rank(rank, 2)
        liar.commit(0, 2)
        for name, reader in (
            ("known", lambda: known),
            (
                "new",
                lambda: stack.enter_context(fanin.Client(where, secret_file=files[mine], **TCP)),
            ),
        ):
            if not mine:
                reader().pull_adapter(0, tmp_path / name, step=2, timeout=PATIENCE)
                landed = (tmp_path / name / "adapter_model.safetensors").read_bytes()
                assert weights(66)[A_NAME][2].tobytes() in landed
                continue
            with pytest.raises(fanin.ConnectionFailedError, match="secret"):
                reader().pull_adapter(0, tmp_path / name, step=2, timeout=PATIENCE)
            assert not (tmp_path / name).exists()


def test_files_that_others_may_read_are_none(tmp_path: Path) -> None:
    file = secret(tmp_path, "open")
    file.chmod(0o644)
    with pytest.raises(fanin.FaninError, match="mode 0644"), servers(secret_file=file):
        pass
    with pytest.raises(fanin.FaninError, match="cannot read the secret file"):
        fanin.Client(secret_file=tmp_path / "none")


def test_a_path_that_is_none_is_named() -> None:
    with pytest.raises(fanin.RequestError, match="tls_key is int, not a path"):
        fanin.Client(tls_key=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ask",
    [
        lambda where, **more: newest_step(where, 0, timeout=30, **more),
        lambda where, **more: wait_for_step(where, "0", None, timeout=30, **more)[0],
    ],
)
def test_orchestrators_ask_with_it(ask: Callable[..., int], tmp_path: Path) -> None:
    one, other = secret(tmp_path, "one"), secret(tmp_path, "other")
    with servers(secret_file=one) as ranks:
        publish(ranks, 3)
        for rank in ranks:
            rank.put("full:0", [fanin.shard_of("w", np.zeros(2, np.float32))], replace=True)
            rank.commit("full:0", 3)
        where = addresses(ranks)
        assert ask(where, secret_file=one, **TCP) == 3
        with pytest.raises(fanin.ConnectionFailedError, match="another secret"):
            ask(where, secret_file=other, **TCP)
        with pytest.raises(fanin.ConnectionFailedError, match="demands the launch's secret"):
            ask(where, **TCP)
        # The trainer's file names it, as an object and on disk; an argument says more.
        info = TrainerInfo(tuple(where), run="0", secret_file=str(one))
        write_info(tmp_path / "job", info)
        for named in (info, tmp_path / "job", str(tmp_path / "job" / "nixl_info.json")):
            assert ask(named, **TCP) == 3
            with pytest.raises(fanin.ConnectionFailedError, match="another secret"):
                ask(named, secret_file=other, **TCP)
        with pytest.raises(TypeError, match="'secret_fil'"):
            ask(where, secret_fil=one)


def test_a_pool_asks_for_the_newest_step_with_it(tmp_path: Path) -> None:
    one = secret(tmp_path, "one")
    with servers(secret_file=one) as ranks, Engine([SUPERSEDED, OK]) as engine:
        publish(ranks, 2)
        info = TrainerInfo(tuple(addresses(ranks)), run="0")
        write_info(tmp_path / "job", info)
        pool = EnginePool([engine.url], secret_file=one, **TCP)
        assert pool.update_weights(tmp_path / "job", "p", 1).step == 2
    other = secret(tmp_path, "other")
    with servers(secret_file=one) as ranks, Engine([SUPERSEDED]) as engine:
        publish(ranks, 2)
        where = TrainerInfo(tuple(addresses(ranks)), run="0")
        pool = EnginePool([engine.url], secret_file=other, timeout=30, **TCP)
        with pytest.raises(fanin.FaninError, match="another secret"):
            pool.update_weights(where, "p", 1)
    with pytest.raises(TypeError, match=r"EnginePool\(\) .* 'world_id'"):
        EnginePool(["http://a:1"], world_id="00" * 16)


def test_a_registry_asks_with_it(tmp_path: Path) -> None:
    one = secret(tmp_path, "one")
    with servers(secret_file=one) as ranks:
        for rank in ranks:
            rank.put("full:0", [fanin.shard_of("w", np.zeros(2, np.float32))])
            rank.commit("full:0", 4)
        # Nobody listens at the engine's port: that is said after the trainer was asked.
        for more, wanted in (
            ({"secret_file": one}, "http://127.0.0.1:1"),
            ({}, "demands the launch's secret"),
        ):
            registry = Registry(addresses(ranks), timeout=20, **more, **TCP)
            registry.add("http://127.0.0.1:1", kind="vllm")
            with pytest.raises(fanin.FaninError, match=wanted):
                registry.sync()
    with pytest.raises(TypeError, match=r"Registry\(\) .* 'secret'"):
        Registry(["127.0.0.1:1"], secret=one)


def test_engines_pull_with_it(tmp_path: Path) -> None:
    one = secret(tmp_path, "one")
    over_tcp = functools.partial(fanin.Client, **TCP)
    with servers(secret_file=one) as ranks, Engine([OK]) as http:
        publish(ranks, 1)
        wanted = Wanted("p-run0-step1", "0", 1, "p", Source.of(addresses(ranks)), 20.0)
        for file, cache in ((str(one), "own"), (None, "none")):
            pool = ClientPool(over_tcp, credentials=Credentials(file))
            service = PullService(Places(tmp_path / cache), pool)
            if file is None:
                with pytest.raises(fanin.FaninError, match="demands the launch's secret"):
                    service.pull(wanted)
            else:
                assert service.pull(wanted).transport == "stream"
            service.close()
        more: dict[str, Any] = {"trainer": addresses(ranks), "cache_dir": tmp_path / "sglang"}
        assert SGLangEngine(http.url, **more, secret_file=one, **TCP).load(0, 1).pull.step == 1
        with pytest.raises(fanin.ConnectionFailedError, match="demands the launch's secret"):
            SGLangEngine(http.url, **more, **TCP).load(0, 1)
    with pytest.raises(
        TypeError, match=r"SGLangEngine\(\) .* 'secret'; did you mean 'secret_file'"
    ):
        SGLangEngine("http://h:1", **more, secret=one)


def test_a_parameter_server_serves_with_it(tmp_path: Path) -> None:
    one, other = secret(tmp_path, "one"), secret(tmp_path, "other")
    server = ParameterServer("job", 0, True, secret_file=one, stranger_cpu=0.5)
    try:
        at: tuple[Any, ...] = ("reader", "job", "127.0.0.1", server.port)
        reader = ParameterClient(*at, tcp_only=True, secret_file=one)
        reader.disconnect()
        with pytest.raises(fanin.FaninError, match="another secret"):
            ParameterClient(*at, timeout=5, tcp_only=True, secret_file=other)
    finally:
        server.shutdown()
    with pytest.raises(TypeError, match=r"ParameterServer\(\) .* 'world_size'"):
        ParameterServer("job", 0, world_size=2)
    with pytest.raises(TypeError, match=r"ParameterClient\(\) .* 'use_unix'"):
        ParameterClient("reader", "job", "127.0.0.1", 1, use_unix=False)


def test_a_transport_takes_what_a_server_does(tmp_path: Path) -> None:
    with pytest.raises(fanin.RequestError, match="unknown field 'rank'"):
        TransportBackend(None, rank=1)
    missing = tmp_path / "none"
    with Engine([OK]) as engine:
        host, _, port = engine.url.removeprefix("http://").partition(":")

        class Endpoint:
            pass

        endpoint: Any = Endpoint()
        endpoint.host, endpoint.port = host, int(port)
        config: Any = Endpoint()
        config.endpoints = [endpoint]
        with pytest.raises(fanin.FaninError, match="cannot read the secret file"):
            TransportBackend(config, secret_file=missing).initialize()


def test_torch_servers_serve_with_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fanin.torch import WeightServer

    one = secret(tmp_path, "one")
    model = torch.nn.Linear(4, 2)
    with WeightServer(model, base_port=0, secret_file=one, stranger_cpu=0.5) as server:
        server.publish(1)
        path = server.write_info(tmp_path / "job")
        assert path is not None and read_info(path).secret_file == str(one)
        assert server.secret_file == str(one)
        assert wait_for_step(path, "0", 1, timeout=30, **TCP)[0] == 1
        with pytest.raises(fanin.ConnectionFailedError, match="demands the launch's secret"):
            wait_for_step(server.addresses, "0", 1, timeout=30, **TCP)
    for wrong in ("world_id", "open", "secret"):
        with pytest.raises(TypeError, match=rf"WeightServer\(\) .* '{wrong}'"):
            WeightServer(model, base_port=0, **{wrong: 1})
    with pytest.raises(fanin.RequestError, match="secret_file is int"):
        WeightServer(model, base_port=0, secret_file=7)
