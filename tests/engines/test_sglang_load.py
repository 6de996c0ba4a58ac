# SPDX-License-Identifier: Apache-2.0
"""fanin.sglang.load: what the model's own loader would write is written, and failures are told.

Without SGLang: its route, its session and what it asks of a model before an update are imitated,
and the model is a stand-in with loaders of the same kind.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import pickle
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import fanin
import fanin.mapping
import fanin.sglang.weights as weights
import pytest
import torch
from fanin import _served
from fanin._digest import box_digest
from fanin._records import DELTAS
from fanin.errors import StateError
from fanin.sglang import LOADER, Request, asking, guard, load
from fanin.sglang.held import held
from fanin.sglang.request import TOLD, decode, encode
from sglang_model import HIDDEN, StandIn, published


class Trainer:
    """Two ranks that hold the checkpoint, each half the rows of every tensor."""

    def __init__(
        self,
        computes: bool = False,
        without: str = "",
        extra: str = "",
        world: bytes = b"w" * 16,
        ports: tuple[int, ...] = (0, 0),
    ) -> None:
        torch.manual_seed(4)
        shapes = dict(published(computes))
        shapes.pop(without, None)
        if extra:
            shapes[extra] = (3, 3)
        self.tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.servers = []
        for rank in range(2):
            server = fanin.Server(
                world_id=world,
                rank=rank,
                world_size=2,
                name="job",
                use_ucx=False,
                base_port=ports[rank] and ports[rank] - rank,
            )
            server.put("full:0", [self._part(name, rank) for name in self.tensors])
            self.servers.append(server)

    def _part(self, name: str, rank: int) -> Any:
        whole = self.tensors[name]
        half = whole.shape[0] // 2
        rows = whole[:half] if rank == 0 else whole[half:]
        offset = (0 if rank == 0 else half, *[0] * (whole.dim() - 1))
        return fanin.shard_of(name, rows, shape=tuple(whole.shape), offset=offset)

    def commit(self, step: int) -> None:
        for server in self.servers:
            server.begin_update("full:0")
        for tensor in self.tensors.values():
            tensor.normal_()
        for server in self.servers:
            server.commit("full:0", step)

    def request(self, step: int, **more: Any) -> Request:
        addresses = tuple(f"127.0.0.1:{server.port}" for server in self.servers)
        return Request(trainer=addresses, step=step, timeout=more.pop("timeout", 30.0), **more)

    def close(self) -> None:
        for server in self.servers:
            server.close(drain=0)


class Manager:
    """What SGLang's manager of updates does in one scheduler: asks, calls, answers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.scheduler = SimpleNamespace(_engine_paused=False)
        self.versions: list[str] = []
        self.ended = 0

    def update_weights_from_tensor(self, asked: Any) -> Any:
        for module in self.model.modules():
            reason = getattr(module, "_derived_weight_cache_error", None)
            if reason is not None:
                return SimpleNamespace(success=False, message=reason)
        if asked.load_format == LOADER:
            load(self.model, asked.tensors)
        self.record_weight_version_after_update(asked.weight_version)
        return SimpleNamespace(success=True, message="Success")

    def record_weight_version_after_update(self, version: str | None) -> None:
        if version is not None:
            self.versions.append(version)

    def end_weight_update(self, _: Any) -> Any:
        self.ended += 1
        return SimpleNamespace(success=True, message="Success")


class Updater:
    """The manager with fanin's plugin around its methods, as SGLang's registry of hooks puts it."""

    def __init__(self, model: Any) -> None:
        self.manager = Manager(model)

    def answer(self, tensors: Any, load_format: str = LOADER) -> Any:
        asked = SimpleNamespace(tensors=tensors, load_format=load_format, weight_version="mine")
        return guard.update(Manager.update_weights_from_tensor, self.manager, asked)

    def sync(self, request: Request) -> str:
        """The reason why it failed."""
        said = self.answer(pickle.loads(base64.b64decode(encode(request))))
        return "" if said.success else str(said.message)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test is a process of its own."""
    guard.standing.forget()
    yield
    guard.standing.forget()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    result = Trainer()
    yield result
    result.close()


def expected(trainer: Trainer, model: StandIn) -> StandIn:
    """The same model after its own loader has read the checkpoint."""
    other = StandIn(*model.made_with)
    with torch.no_grad():
        other.load_weights(iter(trainer.tensors.items()))
    return other


def check(trainer: Trainer, model: StandIn) -> None:
    other = expected(trainer, model)
    mine, others = dict(model.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []
    for layer, then in zip(model.layers, other.layers, strict=True):
        assert torch.equal(layer.absorbed, then.absorbed)


def test_a_request_is_what_it_was() -> None:
    for request in (
        Request(
            trainer="/shared/run",
            run="a.b",
            step=2**64 - 1,
            timeout=2,
            server_name="job",
        ),
        Request(trainer=("a:1", "[::1]:2"), step=0, timeout=0.5),
    ):
        assert decode(pickle.loads(base64.b64decode(encode(request)))) == request


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_loader_would_write(
    trainer: Trainer, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks(monkeypatch)
    model = StandIn(rank, 2)
    for parameter in model.parameters():
        if parameter.dim():
            parameter.fill_(7)
    updater = Updater(model)
    for step in (1, 2, 3):
        trainer.commit(step)
        assert updater.sync(trainer.request(step)) == ""
        check(trainer, model)
    assert model.post_loads == 3  # not while it was recorded
    assert (model.embed.weight[30:] == 0).all()


def relayed(updater: Updater, trainer: Trainer, step: int) -> int:
    """Percent of a sync that other readers have brought."""
    said = updater.answer(pickle.loads(base64.b64decode(encode(trainer.request(step)))))
    assert said.success, said.message
    how = json.loads(said.message.removeprefix(TOLD))["how"]
    return int(re.search(r"with relays \((\d+) %", how)[1])


def sync_by_relay(
    updater: Updater, trainer: Trainer, relay: fanin.Relay, forged: str | None = None
) -> int:
    """The step that the engine has had of this relay, which has altered a bit of one tensor."""
    whole = {name: torch.zeros_like(value) for name, value in trainer.tensors.items()}
    for step in range(1, 20):  # who is slow to be found is done without
        trainer.commit(step)
        relay.pull_into("full:0", whole, step=step, timeout=30.0)
        if forged is not None:
            whole[forged].view(torch.int32).view(-1)[5] ^= 1
        if relayed(updater, trainer, step) == 100:
            return step
    raise AssertionError("relays have brought nothing")


def test_relays_bring_a_step_and_live_parameters_are_not_lent(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_RELAY", "host")
    model = StandIn()
    updater = Updater(model)
    addresses = list(trainer.request(0).trainer)
    with fanin.Relay(addresses) as cache:
        step = sync_by_relay(updater, trainer, cache)
        check(trainer, model)
    # SGLang's end of an update makes something else of them.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    whole = {name: torch.zeros_like(value) for name, value in trainer.tensors.items()}
    with fanin.Relay(addresses) as other:
        other.pull_into("full:0", whole, step=step, timeout=30.0)
        assert other.stats()["bytes_from_relays"] == 0
    assert all(torch.equal(whole[name], trainer.tensors[name]) for name in whole)


def test_relays_that_cannot_be_are_done_without(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is torn: the trainer is read alone, and the log says why."""
    monkeypatch.setenv("FANIN_RELAY", "10.254.0.0/16")
    model = StandIn()
    updater = Updater(model)
    trainer.commit(1)
    assert updater.sync(trainer.request(1)) == ""
    check(trainer, model)
    assert "not in the network 10.254.0.0/16" in caplog.text
    assert "name the network of the fleet's hosts" in caplog.text


def patched(updater: Updater, trainer: Trainer, step: int) -> bool:
    """Whether a sync has read what one of a hundred elements has changed, and nothing else."""
    for server in trainer.servers:
        server.begin_update("full:0")
    for tensor in trainer.tensors.values():
        tensor.view(-1)[step % 100 :: 100] += 1
    for server in trainer.servers:
        server.commit("full:0", step, snapshot=True, deltas=4)
    said = updater.answer(pickle.loads(base64.b64decode(encode(trainer.request(step)))))
    assert said.success, said.message
    check(trainer, updater.manager.model)
    return f"since step {step - 1}" in said.message


def test_parameters_that_hold_the_step_before_are_patched(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes them is found by the digests: the same pull reads the whole."""
    monkeypatch.setenv("FANIN_PATH", "stream")
    for server in trainer.servers:
        server.set_metadata("full:0", {DELTAS: "4"})
    model = StandIn()
    updater = Updater(model)
    assert [patched(updater, trainer, step) for step in (1, 2, 3)] == [False, True, True]
    with torch.no_grad():
        model.embed.weight[3] += 1  # as processing after load may
    assert [patched(updater, trainer, step) for step in (4, 5)] == [False, True]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as packing for AMX does
    assert [patched(updater, trainer, step) for step in (6, 7)] == [False, True]
    for step in (8, 9, 10, 11):
        with torch.no_grad():
            model.embed.weight[3] += step < 10
        assert not patched(updater, trainer, step)  # after two of them it is not tried


def test_parameters_that_lie_elsewhere_are_found_again(trainer: Trainer) -> None:
    model = StandIn()
    updater = Updater(model)
    trainer.commit(1)
    assert updater.sync(trainer.request(1)) == ""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    trainer.commit(2)
    assert updater.sync(trainer.request(2)) == ""
    check(trainer, model)


def test_a_loader_that_computes_gets_whole_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Trainer(computes=True)
    model = StandIn(computes=True)
    updater = Updater(model)
    for step in (1, 2):
        trainer.commit(step)
        assert updater.sync(trainer.request(step)) == ""
        check(trainer, model)
    # Of each layer the two that are computed with, and no others.
    assert "4 tensors go whole through SGLang's own load_weights" in caplog.text
    assert "neg" in caplog.text
    trainer.close()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"without": "layers.1.o_proj.weight"}, "layers.1.o_proj"),
        ({"without": "layers.0.experts.2.up_proj.weight"}, "layers.0.experts"),
        ({"extra": "layers.9.o_proj.weight"}, "layers.9.o_proj.weight"),
    ],
)
def test_a_publication_that_does_not_fit(more: dict[str, str], says: str) -> None:
    trainer = Trainer(**more)
    trainer.commit(1)
    model = StandIn()
    before = copy.deepcopy(model.state_dict())
    told = Updater(model).sync(trainer.request(1))
    assert says in told and told.startswith("fanin: worker 0 of 1")
    now = model.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in before)  # nothing was written
    trainer.close()


def test_the_answer_says_what_came_of_it(trainer: Trainer) -> None:
    model = StandIn()
    updater = Updater(model)
    trainer.commit(5)
    told = updater.sync(trainer.request(4))  # has passed
    assert "fanin: worker 0 of 1" in told and "4" in told
    assert updater.manager.versions == []
    said = updater.answer(pickle.loads(base64.b64decode(encode(trainer.request(5)))))
    assert said.success and said.message.startswith(TOLD)
    pulled = json.loads(said.message.removeprefix(TOLD))
    assert pulled["step"] == 5 and pulled["bytes"] > 0 and "tensors by" in pulled["how"]
    assert pulled["worlds"] == [(b"w" * 16).hex()]
    assert updater.manager.versions == ["mine"]
    check(trainer, model)


def test_nothing_written_is_nothing_torn(trainer: Trainer) -> None:
    """What failed before the first byte leaves the engine as it was."""
    trainer.commit(5)
    updater = Updater(StandIn())
    assert updater.sync(trainer.request(4)) != ""
    assert not updater.manager.scheduler._engine_paused
    assert guard.end(Manager.end_weight_update, updater.manager, None).success
    scheduler = SimpleNamespace(_engine_paused=True)
    went_on: list[Any] = []
    guard.go_on(lambda *asked: went_on.append(asked), scheduler, None)
    assert went_on


@pytest.mark.parametrize("computes", [False, True])
def test_a_rank_that_is_gone_is_nothing_torn(computes: bool) -> None:
    """It was connected, and is asked before anything is read from any rank."""
    trainer = Trainer(computes)
    trainer.commit(1)
    updater = Updater(StandIn(computes=computes))
    assert updater.sync(trainer.request(1)) == ""
    before = copy.deepcopy(updater.manager.model.state_dict())
    trainer.commit(2)
    asked = trainer.request(2, timeout=5.0)
    trainer.servers[1].close(drain=0)
    assert asked.trainer[1] in updater.sync(asked)
    now = updater.manager.model.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert not guard.standing.torn and not updater.manager.scheduler._engine_paused
    trainer.close()


def test_an_engine_with_torn_weights_does_not_generate(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its callers make of the answer."""
    output = SimpleNamespace(EndWeightUpdateReqOutput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", output)
    trainer.commit(1)
    model = StandIn()
    updater = Updater(model)
    assert updater.sync(trainer.request(1)) == ""
    monkeypatch.setattr(model, "post_load_weights", lambda: 1 / 0)
    trainer.commit(2)
    assert "ZeroDivisionError" in updater.sync(trainer.request(2))
    scheduler = updater.manager.scheduler
    assert scheduler._engine_paused
    went_on: list[Any] = []
    for _ in range(2):
        guard.go_on(lambda *asked: went_on.append(asked), scheduler, None)
        assert scheduler._engine_paused and not went_on
        refused = guard.end(Manager.end_weight_update, updater.manager, None)
        assert not refused.success and "the weights are not whole" in refused.message
    assert updater.manager.ended == 0
    # Another loader's update is none of ours, and heals nothing.
    assert updater.answer(pickle.loads(base64.b64decode(encode(trainer.request(2)))), "x").success
    assert guard.standing.torn
    monkeypatch.undo()
    assert updater.sync(trainer.request(2)) == ""
    check(trainer, model)
    ended = guard.end(Manager.end_weight_update, updater.manager, None)
    assert ended.success and '"step": 2' in ended.message
    guard.go_on(lambda *asked: went_on.append(asked), scheduler, None)
    assert went_on


def test_a_checkpoint_from_disk_heals_too(trainer: Trainer) -> None:
    guard.standing.fail(7, "torn", True)
    for success in (False, True):
        said = guard.from_disk(
            lambda *_, found=success: SimpleNamespace(success=found),
            Manager(StandIn()),
            None,
        )
        assert said.success is success and bool(guard.standing.torn) is not success


def test_without_the_plugin_nothing_is_pulled(trainer: Trainer) -> None:
    """Nobody would hear of a failure."""
    trainer.commit(1)
    model = StandIn()
    before = copy.deepcopy(model.state_dict())
    asked = SimpleNamespace(
        tensors=pickle.loads(base64.b64decode(encode(trainer.request(1)))),
        load_format=LOADER,
        weight_version=None,
    )
    manager = Manager(model)
    manager.update_weights_from_tensor(asked)
    now = model.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in before)
    for _ in range(2):
        said = manager.update_weights_from_tensor(asked)
        assert not said.success and "SGLANG_PLUGINS" in said.message


def test_a_trainer_that_is_gone_and_one_that_was_started_again(
    trainer: Trainer,
) -> None:
    model = StandIn()
    updater = Updater(model)
    trainer.commit(1)
    assert updater.sync(trainer.request(1)) == ""
    request = trainer.request(2, timeout=2.0)
    trainer.close()
    assert "127.0.0.1" in updater.sync(request)
    again = Trainer()
    again.commit(1)
    assert updater.sync(again.request(1)) == ""
    check(again, model)
    again.close()


@pytest.mark.parametrize("world", [b"x" * 16, b"w" * 16], ids=["another launch", "the same"])
def test_a_trainer_that_is_started_again_between_two_pulls_of_a_step(
    world: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boxes are of one life then, and what the loader computes with of the next one, whose
    step has the same number."""
    trainers = [Trainer(computes=True)]
    trainers[0].commit(1)
    updater = Updater(StandIn(computes=True))
    by_loader = weights._by_loader

    def after_a_restart(*arguments: Any) -> None:
        monkeypatch.undo()
        old = trainers[0]
        old.close()
        ports = tuple(server.port for server in old.servers)
        trainers.append(Trainer(computes=True, world=world, ports=ports))
        trainers[1].commit(1)
        by_loader(*arguments)

    monkeypatch.setattr(weights, "_by_loader", after_a_restart)
    told = updater.sync(trainers[0].request(1))
    if world == b"w" * 16:
        assert "rank 0 of the trainer was started again while step 1 was read" in told
    else:
        assert (b"w" * 16).hex() in told and world.hex() in told and "sync again" in told
    assert guard.standing.torn and updater.manager.scheduler._engine_paused
    assert updater.manager.versions == []
    assert updater.sync(trainers[1].request(1)) == ""
    check(trainers[1], updater.manager.model)
    assert not guard.standing.torn
    trainers[1].close()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([], "was given 0 tensors"),
        ([("w", torch.zeros(3))], "wants the one named fanin.request"),
        ([("fanin.request", torch.zeros(3))], "is no request"),
        (
            [("fanin.request", torch.tensor(list(b"{"), dtype=torch.uint8))],
            "is no JSON",
        ),
        (
            [("fanin.request", torch.tensor(list(b"[]"), dtype=torch.uint8))],
            "is no object",
        ),
        (
            [("fanin.request", torch.tensor(list(b'{"stepp":1}'), dtype=torch.uint8))],
            "'stepp'",
        ),
        ([("fanin.request", torch.tensor(list(b"{}"), dtype=torch.uint8))], "trainer"),
    ],
)
def test_what_is_no_request(tensors: Any, says: str) -> None:
    said = Updater(StandIn()).answer(tensors)  # an exception would end SGLang
    assert not said.success and says in said.message and said.message.startswith("fanin: ")


def test_a_model_that_says_no(trainer: Trainer) -> None:
    trainer.commit(1)
    model = StandIn()
    model.layers[1]._derived_weight_cache_error = "captured graphs keep a copy"
    assert "captured graphs" in Updater(model).sync(trainer.request(1))


def two_ranks(monkeypatch: pytest.MonkeyPatch, before: bool = False, **other: Any) -> list[Any]:
    """This process is one of two; the other one takes the rest of each tensor, and says after the
    pull the same but for *other*. What this one has said."""
    group = SimpleNamespace(tp_rank=0, tp_size=2, pp_size=1, tp_group=SimpleNamespace(cpu_group=0))
    monkeypatch.setattr(weights, "_parallel", lambda: group)
    monkeypatch.setattr(weights, "_about", lambda model: fanin.mapping.About("sglang"))
    heard: list[Any] = []

    def gather(out: list[Any], mine: Any, group: Any) -> None:
        heard.append(mine)
        more = other if len(heard) % 2 == 0 or before else {}
        out[:] = [mine, dataclasses.replace(mine, **{"taken": (), **more})]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return heard


def test_the_failure_of_another_rank_is_everybodys(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.commit(1)
    heard = two_ranks(monkeypatch, failure="rank 3 of the trainer is gone")
    told = Updater(StandIn(0, 2)).sync(trainer.request(1))
    assert told == "fanin: worker 1 of 2: rank 3 of the trainer is gone"
    assert [one.failure for one in heard] == [
        "",
        "",
    ]  # this one had no failure of its own
    assert guard.standing.torn  # and has written


def test_the_failure_of_another_rank_before_anything_is_read(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.commit(1)
    heard = two_ranks(monkeypatch, before=True, failure="it has another model")
    told = Updater(StandIn(0, 2)).sync(trainer.request(1))
    assert told == "fanin: worker 1 of 2: it has another model"
    assert len(heard) == 1 and not guard.standing.torn


def test_ranks_that_have_pulled_from_two_launches(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.commit(1)
    two_ranks(monkeypatch, worlds={"78" * 16})
    updater = Updater(StandIn(0, 2))
    told = updater.sync(trainer.request(1))
    assert f"worker 0 of 2 has pulled from {(b'w' * 16).hex()}" in told
    assert f"worker 1 of 2 has pulled from {'78' * 16}" in told
    assert guard.standing.torn and updater.manager.scheduler._engine_paused


def test_ranks_that_have_pulled_from_two_lives_of_a_rank(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have other bytes under the number of the step, in the same launch."""
    trainer.commit(1)
    two_ranks(monkeypatch, incarnations={"0": "78" * 16})
    told = Updater(StandIn(0, 2)).sync(trainer.request(1))
    assert "rank 0 of the trainer was started again between the pulls of worker 0 and" in told
    assert guard.standing.torn


def test_pipeline_stages_are_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.commit(1)
    stages = SimpleNamespace(tp_rank=0, tp_size=1, pp_size=2)
    monkeypatch.setattr(weights, "_parallel", lambda: stages)
    assert "pipeline parallelism (2 stages)" in Updater(StandIn()).sync(trainer.request(1))


def test_what_is_published_and_goes_nowhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(extra="mtp.weight")
    trainer.commit(1)
    model = StandIn()
    stock = model.load_weights

    def without_mtp(pairs: Any) -> None:
        stock((name, tensor) for name, tensor in pairs if not name.startswith("mtp"))

    monkeypatch.setattr(model, "load_weights", without_mtp)
    updater = Updater(model)
    told = updater.sync(trainer.request(1))
    assert "published, and the model takes nothing of it: mtp.weight" in told
    assert '{"unused": ["<pattern>"]}' in told and not guard.standing.torn
    assert updater.sync(trainer.request(1, unused=("mtp.*",))) == ""
    trainer.close()


def test_a_trainer_that_is_larger_is_refused(trainer: Trainer) -> None:
    """A loader takes its part of what is larger: here a rank of two stands alone."""
    trainer.commit(1)
    told = Updater(StandIn(0, 2)).sync(trainer.request(1))
    assert "takes nothing of it: elements [8:16, 0:16] of layers.0.k_proj.weight" in told
    assert "heads and widths" in told and not guard.standing.torn


def test_a_trainer_that_is_smaller_is_refused(trainer: Trainer) -> None:
    """SGLang's loaders pad on the CPU, which is right where SGLang has enlarged the model."""
    trainer.commit(1)
    model = StandIn()

    def padded(parameter: Any, loaded: Any) -> None:
        parameter.data.narrow(0, HIDDEN, 4).zero_()
        parameter.data.narrow(0, 0, HIDDEN).copy_(loaded)

    norm = model.layers[0].norm
    norm.weight = torch.nn.Parameter(torch.ones(HIDDEN + 4), False)
    norm.weight.weight_loader = padded
    told = Updater(model).sync(trainer.request(1))
    assert "smaller than 'layers.0.norm.weight'" in told and not guard.standing.torn
    model.config = SimpleNamespace(hidden_size=HIDDEN + 4, original_hidden_size=HIDDEN)
    assert Updater(model).sync(trainer.request(1)) == ""
    assert norm.weight[HIDDEN:].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("started", "says"),
    [
        ({"load_format": "dummy"}, "filled it at random"),
        ({"enable_memory_saver": True}, "may give up its memory"),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, ""),
        ({}, ""),
    ],
)
def test_what_is_kept_has_to_be_there(
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    started: dict[str, Any],
    says: str,
) -> None:
    trainer.commit(1)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: SimpleNamespace(**started)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    model = StandIn()
    model.visual = torch.nn.Linear(2, 2)
    told = Updater(model).sync(trainer.request(1, keep=("visual.*",)))
    assert (says in told and "keep names 'visual.bias'" in told) if says else told == ""


def test_what_nobody_trains_is_kept(trainer: Trainer) -> None:
    trainer.commit(1)
    model = StandIn()
    model.visual = torch.nn.Linear(2, 2)
    before = model.visual.weight.clone()
    updater = Updater(model)
    told = updater.sync(trainer.request(1))
    assert "visual" in told and '{"keep": ["<pattern>"]}' in told
    assert updater.sync(trainer.request(1, keep=("visual.*",))) == ""
    assert torch.equal(model.visual.weight, before)
    told = updater.sync(trainer.request(1, keep=("visual.*", "embed.*")))
    assert "keep names what 'embed.weight' of the trainer fills" in told
    assert "keep names 'mtp.*', and the model has no such" in updater.sync(
        trainer.request(1, keep=("mtp.*",))
    )


def holds(model: StandIn, step: int = 1, publication: str = "full:0", **more: Any) -> Any:
    """What a scheduler with this model answers to fanin.check."""
    runner = SimpleNamespace(weight_updater=SimpleNamespace(get_model=lambda: model))
    manager = {"_select_runners": lambda _: [("target", runner)]}
    manager |= {"_session": None, "offload_tags": set(), **more}
    return held(SimpleNamespace(**manager), publication, step)


def differences(trainer: Trainer, *workers: Any) -> list[str]:
    trained = [
        _served.Tensor(name, tuple(tensor.shape), {"F32": box_digest(tensor)}, "")
        for name, tensor in trainer.tensors.items()
    ]
    boxes = [
        [_served.Held(name, tuple(at), tuple(n), one) for name, at, n, one in worker["held"]]
        for worker in workers
    ]
    return [str(one) for one in _served.compare(trained, boxes)[0]]


def test_what_is_held_is_what_is_trained(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    two_ranks(monkeypatch)
    trainer.commit(1)
    models = [StandIn(rank, 2) for rank in range(2)]
    for rank, model in enumerate(models):
        monkeypatch.setattr(weights._parallel(), "tp_rank", rank)
        assert Updater(model).sync(trainer.request(1)) == ""
    workers = [holds(model) for model in models]
    assert differences(trainer, *workers) == [] and workers[0]["unseen"] == []
    cut = differences(trainer, workers[1])
    assert "layers.0.q_proj.weight: cut: 128 of 256 elements of [16, 16] are held by nobody" in cut
    models[1].layers[1].o_proj.weight.data[3, 2] += 1  # behind everybody's back
    (written,) = differences(trainer, workers[0], holds(models[1]))
    assert written == "layers.1.o_proj.weight: other values than those that are trained (F32)"
    # What processing has put elsewhere, or made anew, cannot be read back.
    models[1].layers[1].qkv_proj.weight.data = models[1].layers[1].qkv_proj.weight.data.clone()
    models[1].layers[0].experts.quant_method = object()
    told = holds(models[1])
    assert told["unseen"] == ["layers.0.experts", "layers.1.qkv_proj"]
    assert "layers.1.k_proj.weight" in told["untold"]
    assert "layers.0.experts.3.down_proj.weight" in told["untold"]


def test_what_a_relay_has_forged_is_not_what_is_trained(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANIN_RELAY", "host")
    model = StandIn()
    with fanin.Relay(list(trainer.request(0).trainer)) as liar:
        step = sync_by_relay(Updater(model), trainer, liar, forged="layers.1.o_proj.weight")
        (found,) = differences(trainer, holds(model, step))
    assert found == "layers.1.o_proj.weight: other values than those that are trained (F32)"


def test_what_has_no_digests(trainer: Trainer) -> None:
    trainer.commit(1)
    model = StandIn()
    with pytest.raises(StateError, match="was not pulled"):
        holds(model)
    assert Updater(model).sync(trainer.request(1)) == ""
    for told, why in (
        ({"step": 2}, "is at step 1"),
        ({"publication": "full:1"}, "is filled from full:0"),
        ({"_session": object()}, "an update is under way"),
        ({"offload_tags": {"weights"}}, "given up the weights' memory"),
    ):
        with pytest.raises(StateError, match=why):
            holds(model, **told)
    guard.standing.forget()  # a checkpoint was loaded
    with pytest.raises(StateError, match="is at step none"):
        holds(model)


def test_how_it_is_asked() -> None:
    """In SGLang's own request: what is not fanin's goes to SGLang."""
    assert asking.question("checksum") is None and asking.question("fanin.served_digests") is None
    assert asking.question("fanin.served_digests full:a.b 7") == ("full:a.b", 7)
    said = guard.check(lambda *_: "SGLang's", None, SimpleNamespace(action="checksum"))
    assert said == "SGLang's"
