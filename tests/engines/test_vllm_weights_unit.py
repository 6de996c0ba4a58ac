# SPDX-License-Identifier: Apache-2.0
"""What the backend refuses, and with which words: vLLM's own classes, and no engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fanin
import pytest
import torch
from fanin.engine import clients
from fanin.engine.trainers import Published, Trainer, left
from fanin.errors import RequestError, StateError
from fanin.info import TrainerInfo, write_info
from fanin.mapping import About, Leaf, Mapping, Module, Source
from fanin.vllm import guard, patches
from fanin.vllm.beside import Prefetch, ServedModel
from fanin.vllm.landings import with_neighbours
from fanin.vllm.reload import Afterwards, as_loaded, widened
from fanin.vllm.weights import (
    Engine,
    InitInfo,
    UpdateInfo,
    _named,
    _refuse_what_moves,
    refuse_what_stays,
)
from vllm_server import free_ports


def config(**more: Any) -> Any:
    parallel = SimpleNamespace(enable_eplb=False)
    return SimpleNamespace(**({"parallel_config": parallel} | more))


def offload(uva: float = 0, group: int = 0) -> Any:
    return SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=uva), prefetch=SimpleNamespace(offload_group_size=group)
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"parallel_config": SimpleNamespace(enable_eplb=True)},
            "start vLLM without --enable-eplb",
        ),
        ({"offload_config": offload(uva=2.5)}, "start vLLM without offloading"),
        ({"offload_config": offload(group=4)}, "start vLLM without offloading"),
        ({"cache_config": SimpleNamespace(cpu_offload_gb=1)}, "start vLLM without offloading"),
    ],
)
def test_configurations_whose_parameters_move_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        _refuse_what_moves(config(**fields))


def test_other_configurations_are_not() -> None:
    _refuse_what_moves(config(offload_config=offload(), cache_config=SimpleNamespace()))


def test_these_are_the_names_that_vllm_has() -> None:
    """What is asked of its configurations above is there, under that name."""
    from vllm.config import ParallelConfig
    from vllm.config.offload import OffloadConfig

    assert ParallelConfig().enable_eplb is False
    assert OffloadConfig().uva.cpu_offload_gb == 0
    assert OffloadConfig().prefetch.offload_group_size == 0


@pytest.mark.parametrize(
    ("fields", "key", "said"),
    [
        ({"mode": "fast"}, "mode", "'fast'.*auto.*loader"),
        ({"verify": "yes"}, "verify", "'yes'.*true or false"),
        ({"ring": 0}, "ring", "is 0.*1 to 64"),
        ({"ring": True}, "ring", "is True.*1 to 64"),
        ({"external_kv": True}, "external_kv", "is True.*drop.*keep"),
        ({"ring": 65}, "ring", "is 65.*1 to 64"),
        ({"save": 7}, "save", "is 7.*give a directory"),
        ({"unused": "*"}, "unused", r"'\*'.*a list of patterns"),
        ({"unused": [1]}, "unused", "a list of patterns"),
        ({"timeout": 0}, "timeout", "is 0.*above 0"),
        ({"run": "lora:0"}, "run", "lora_adapter_nixl"),
        ({"draft_run": "lora:0"}, "run", "lora_adapter_nixl"),
        ({"trainer": 7}, "trainer_addresses", "host:port"),
    ],
)
def test_wrong_init_info_is_named(fields: Any, key: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        InitInfo(**({"trainer": "127.0.0.1:6000"} | fields)).checked()
    assert caught.value.key == key


def test_init_info_that_is_right() -> None:
    init = InitInfo("127.0.0.1:6000", run=3, draft_run="d", unused=["a.*"], save="/m").checked()
    assert (init.run, init.draft_run, init.timeout) == ("full:3", "full:d", 120.0)
    assert (init.unused, init.save, init.ring) == (("a.*",), "/m", 2)


@pytest.mark.parametrize(
    ("fields", "key"), [({"step": "7"}, "step"), ({"step": 7, "prefetch": 1}, "prefetch")]
)
def test_wrong_update_info_is_named(fields: Any, key: str) -> None:
    with pytest.raises(RequestError) as caught:
        UpdateInfo(**fields).checked()
    assert caught.value.key == key


def stores(name: str, **extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
    )
    return SimpleNamespace(kv_transfer_config=transfer, ec_transfer_config=None)


def both(name: str) -> Any:
    return stores("MultiConnector", connectors=[{"kv_connector": name, "kv_role": "kv_both"}])


@pytest.mark.parametrize(
    ("config", "stays"),
    [
        (SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None), ""),
        (stores("OffloadingConnector", cpu_bytes_to_use=1), ""),
        (stores("SimpleCPUOffloadConnector"), ""),
        (stores("MooncakeStoreConnector"), ""),
        (stores("ExampleConnector", shared_storage_path="/kv"), "ExampleConnector does not"),
        (stores("LMCacheConnectorV1"), "LMCacheConnectorV1 does not implement reset_cache"),
        (stores("OffloadingConnector", secondary_tiers=[{"type": "fs"}]), "secondary tiers"),
        (stores("OffloadingConnector", spec_name="TheirSpec"), "what TheirSpec keeps"),
        (both("OffloadingConnector"), ""),
        (both("ExampleConnector"), "ExampleConnector does not"),
        (
            SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector="ECExampleConnector")),
            "ECExampleConnector cannot drop outputs of encoders",
        ),
    ],
)
def test_what_connectors_keep_outside_of_the_engine(config: Any, stays: str) -> None:
    """The connectors are vLLM's own."""
    if not stays:
        return refuse_what_stays(config)
    with pytest.raises(RequestError, match=stays) as caught:
        refuse_what_stays(config)
    assert caught.value.key == "external_kv" and '{"external_kv": "keep"}' in str(caught.value)


def parallel(rank: int, size: int, replica: int = 0, replicas: int = 1) -> Any:
    numbers = {"rank": rank, "world_size": size}
    numbers |= {"data_parallel_index": replica, "data_parallel_size": replicas}
    return config(parallel_config=SimpleNamespace(**numbers))


def test_workers_are_told_apart() -> None:
    assert _named(parallel(1, 4)) == "worker 1 of 4"
    assert _named(parallel(0, 2, 0, 2)) == "worker 0 of 2, replica 0"
    # Of replicas that share nothing vLLM says how many there are to nobody.
    assert _named(parallel(0, 1, 3)) == "worker 0 of 1, replica 3"


def module(path: str, *names: str, fallback: str = "") -> Module:
    leaves = [
        Leaf(
            name="weight",
            role="parameter",
            dtype="BF16",
            shape=(1,),
            stride=(2,),
            sources=tuple(Source(name, "BF16", (1,), ()) for name in names),
            fills=(),
            own="",
        )
    ]
    return Module(path, "Linear", tuple(leaves), fallback, names if fallback else ())


def test_what_the_loader_writes_beside_is_the_loaders() -> None:
    """Given a tensor, it writes into every module that takes something of it."""
    mapping = Mapping(
        about=About("vllm", "0.32.0", "Model", {}),
        keys=5,
        digest="",
        modules=(
            module("far", "c", "d"),
            module("near", "b", "c"),
            module("computed", "a", "b", fallback="it computes"),
            module("apart", "e"),
        ),
        unwanted=(),
    )
    found = {one.path: one for one in with_neighbours(mapping).modules}
    assert [path for path, one in found.items() if one.fallback] == ["far", "near", "computed"]
    assert found["near"].taken == ("b", "c") and "'b'" in found["near"].fallback
    assert found["far"].taken == ("c", "d") and "'c'" in found["far"].fallback


class Launch:
    """One launch of a trainer, which publishes one step of one value."""

    def __init__(self, value: float, port: int = 0, world: str = "") -> None:
        self.world = world or os.urandom(16).hex()
        self.server = fanin.Server(world_id=self.world, rank=0, world_size=1, base_port=port)
        self.server.put("full:0", [fanin.shard_of("w", torch.full((4,), value))])
        self.server.commit("full:0", 7)
        self.address = f"127.0.0.1:{self.server.port}"

    def tell(self, folder: Path) -> None:
        write_info(folder, TrainerInfo((self.address,), world_id=self.world))


class OneTensor:
    """What a shadow is to what reads ahead."""

    bytes, place, asked = 16, "cpu", False

    def __init__(self) -> None:
        self.read, self.model = torch.zeros(4), torch.zeros(4)

    def on_stream(self) -> Any:
        return nullcontext

    def fill(self, trainer: Trainer, step: int, deadline: float, progress: Any) -> Any:
        return trainer.client.pull_into(
            trainer.run, {"w": self.read}, step=step, timeout=left(deadline)
        )

    def install(self) -> None:
        self.model.copy_(self.read)


@pytest.fixture
def launch() -> Iterator[Launch]:
    one = Launch(1.0)
    yield one
    one.server.close()


PUBLISHED = Published((SimpleNamespace(name="w", dtype="F32", shape=(4,)),), {}, "", "")


def read_ahead(source: str, shadow: OneTensor) -> Prefetch:
    trainer = Trainer(clients.Source.of(source), "full:0")
    ahead = Prefetch(shadow, trainer, 7, PUBLISHED, 30)  # type: ignore[arg-type]
    ahead._thread.join(30)
    assert ahead.state()["state"] == "ready"
    return ahead


def may_be_installed(ahead: Prefetch) -> bool:
    return ahead.wait(time.monotonic() + 30)


def test_what_was_read_ahead_is_installed_while_the_trainer_goes_on(launch: Launch) -> None:
    shadow = OneTensor()
    ahead = read_ahead(launch.address, shadow)
    launch.server.begin_update("full:0")  # and nothing of it can be read for as long as it likes
    assert may_be_installed(ahead)
    assert ahead.install(lambda: None).as_dict()["worlds"] == [launch.world]
    assert (shadow.model == 1).all()
    launch.server.abort_update("full:0")
    launch.server.pause("full:0", "offloaded")
    assert may_be_installed(ahead)


@pytest.mark.parametrize(
    "how", ["same port", "same world", "told by the file", "beside the old", "not there"]
)
def test_what_was_read_ahead_of_a_launch_that_has_ended_is_not_installed(
    launch: Launch, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new launch has a step of that number, too, and other weights in it. So may a rank that
    was started again with the launch's id."""
    launch.tell(tmp_path)
    by_address = how in ("same port", "same world", "not there")
    ahead = read_ahead(launch.address if by_address else str(tmp_path), OneTensor())
    if how != "beside the old":
        launch.server.close()
    if how == "not there":
        assert not may_be_installed(ahead)
        return
    port = launch.server.port if by_address else 0
    other = Launch(2.0, port, launch.world if how == "same world" else "")
    other.tell(tmp_path)
    try:
        assert not may_be_installed(ahead)
        assert f"read ahead from launch {launch.world}" in caplog.text
        assert ahead._trainer.ready(time.monotonic() + 30).world == other.world
    finally:
        other.server.close()


class Settling(OneTensor):
    """All of it is read, and the thread is not at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read, self.may_end = threading.Event(), threading.Event()

    def fill(self, *arguments: Any) -> Any:
        result = super().fill(*arguments)
        self.is_read.set()
        self.may_end.wait(30)
        return result


def test_a_cancel_that_finds_no_call_does_not_end_the_next_update(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, shadow = Trainer(clients.Source.of(launch.address), "full:0"), Settling()
    ahead = Prefetch(shadow, trainer, 7, PUBLISHED, 30)  # type: ignore[arg-type]
    assert shadow.is_read.wait(30)
    cancel = trainer.client.cancel

    def late() -> None:
        cancel()
        shadow.may_end.set()

    monkeypatch.setattr(trainer.client, "cancel", late)
    ahead.cancel()
    assert not ahead._thread.is_alive()
    assert trainer.ready(time.monotonic() + 30, 7).world == launch.world
    trainer.close()


def test_a_cancel_that_ends_the_reading_keeps_the_connections(launch: Launch) -> None:
    trainer = Trainer(clients.Source.of(launch.address), "full:0")
    trainer.ready(time.monotonic() + 30)
    client = trainer.client
    ahead = Prefetch(OneTensor(), trainer, 8, PUBLISHED, 30)  # type: ignore[arg-type]
    ahead.cancel()  # it waits for step 8, which does not come
    assert ahead.state()["code"] == "FANIN_ERR_CANCELLED"
    assert trainer.ready(time.monotonic() + 30, 7).world == launch.world
    assert trainer.client is client
    trainer.close()


class OnDevice(torch.nn.Parameter):
    """As on a GPU: vLLM keeps nothing of what lies in host memory."""

    is_cpu = False


def sleepers() -> Engine:
    """A model and its draft, which has no embedding of its own, both with a step in them."""
    main, draft = (
        torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("embed", "head")})
        for _ in range(2)
    )
    draft["norm"] = torch.nn.LayerNorm(2)
    for module in (*main.values(), *draft.values()):
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, OnDevice(parameter.data))
    draft["embed"] = main["embed"]
    made = Engine.__new__(Engine)
    made._main = ServedModel("worker 0 of 1", main, None)
    made._draft = ServedModel("worker 0 of 1, draft", draft, None)
    return made


@pytest.mark.parametrize(
    ("patterns", "lost"),
    [
        ([], [True, True]),
        (["draft.*"], [True, False]),
        (["draft.head.*", "draft.norm.*"], [True, False]),
        (["draft.head.*"], [True, True]),
        (["head.*"], [True, True]),
        (["*"], [True, False]),
    ],
)
def test_what_vllm_keeps_through_a_sleep_is_not_lost(patterns: list[str], lost: list[bool]) -> None:
    """By the names that vLLM's own code gives to parameters, and where it remembers them."""
    from vllm.v1.worker.gpu_worker import Worker

    engine = sleepers()
    worker = SimpleNamespace(
        model_config=SimpleNamespace(sleep_preserve_parameter_names=patterns),
        get_draft_model=lambda: engine._draft.model,  # type: ignore[union-attr]
        weight_transfer_engine=engine,
    )
    worker._get_sleep_parameters = partial(Worker._get_sleep_parameters, worker)
    Worker._save_sleep_parameters(worker, engine._main.model)
    guard.fanin_lose_weights(worker, "given up")
    assert [bool(one["dirty"]) for one in engine.holds()] == lost
    kept = ServedModel.require_kept
    kept(engine._main)
    engine._main.kept = frozenset({"head.weight"})
    if patterns in (["head.*"], ["*"]):
        kept(engine._main)
    else:
        with pytest.raises(fanin.StateError, match="head.weight.*given up"):
            kept(engine._main)
    engine.reloaded()
    kept(engine._main)


def linear(loaded: torch.dtype, bias: torch.dtype) -> torch.nn.Module:
    """As vLLM's layers are: they know the type in which they are loaded."""
    made = torch.nn.Linear(4, 2, dtype=loaded)
    made.bias = torch.nn.Parameter(torch.tensor([0.1, -1.7], dtype=bias), requires_grad=False)
    made.params_dtype = loaded
    return made


def test_a_bias_that_processing_has_widened_is_as_if_it_were_loaded() -> None:
    """Some of vLLM's kernels for CPUs want it in F32, and the reload leaves it so: a publication in
    F32 would leave it more precise than any vLLM has it that was started with the same weights."""
    wide = linear(torch.bfloat16, torch.float32)
    model = torch.nn.ModuleList([wide, linear(torch.bfloat16, torch.bfloat16)])
    model += [linear(torch.float32, torch.float32), torch.nn.LayerNorm(4)]
    assert widened(model) == [wide]

    class Config:
        dtype = torch.bfloat16

    given, place = wide.bias, wide.bias.data_ptr()
    Afterwards(model, Config).run()
    assert wide.bias is given and given.data_ptr() == place and given.dtype == torch.float32
    assert torch.equal(given, torch.tensor([0.1, -1.7]).bfloat16().float())
    assert as_loaded(wide, "bias", given) is not given  # a check compares values, not identity
    assert torch.equal(as_loaded(wide, "bias", given), given)
    assert as_loaded(wide, "weight", given) is given


def test_vllm_has_all_that_the_table_of_patches_names() -> None:
    """Each target is there in this vLLM, takes what the table says, and is replaced once."""
    patches.install()
    patches.install()
    assert patches.installed() and list(patches.changed()) == []
    patches.require()
    for row in patches.TABLE:
        if row.owner in patches._CLASSES and row.takes != patches.ADDED:
            original = getattr(patches._owner_of(row), row.name).fanin_wraps
            assert not hasattr(original, "fanin_wraps"), row.target


def test_a_vllm_with_another_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in patches.TABLE if row.name == "sleep")
    other = (row._replace(takes="level mode tags"),)
    monkeypatch.setattr(patches, "TABLE", other)
    assert [text for text in patches.changed() if "EngineCore.sleep takes (level, mode)" in text]
    monkeypatch.setattr(patches, "TABLE", (row._replace(target=row.target + "s"),))
    assert list(patches.changed()) == [f"there is no {row.target}s"]


def test_replicas_compare_by_vllms_own_groups() -> None:
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    port = free_ports()
    numbers = ([0, 3, -3], [1, 4, -4])

    def replica(rank: int) -> list[int]:
        group = stateless_init_torch_distributed_process_group(
            "127.0.0.1", port, rank, 2, backend="gloo"
        )
        return guard._highest(group, numbers[rank])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(replica, range(2))) == [[1, 4, -3]] * 2
