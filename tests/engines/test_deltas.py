# SPDX-License-Identifier: Apache-2.0
"""What real trainers change in a step, read instead of the whole, is in an engine's parameters what
the whole would be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from families import FAMILIES, Engine, Layout
from fanin.errors import RequestError
from fanin.torch import WeightServer
from fanin.vllm import reload
from full_models import random_model, save_full_model
from full_trainer import FullTrainer
from safetensors.torch import load_file
from test_full_worlds import DTYPES
from test_mapping_families import loaded, poison, snapshot
from test_vllm_landings import Anew, Backend, Nothing, Place, prepared, tensors_of, told, updated
from transformers import AutoConfig
from vllm.config.weight_transfer import WeightTransferConfig
from weights_engine import Engine as LiveEngine
from weights_engine import Judge

RUN = "full:0"
SERVER = {"snapshot": True, "cast": "BF16", "deltas": 4}
LEARN = {"dtype": "float32", "lr": 1e-6, "record": True, "server": SERVER}
KIND, STEPS = "qwen3-moe", 20
RANKS = 3
#: After these steps: an update that is given up, and a kill of all ranks, who are started again.
ABORT, KILL = 7, 13


class Rank:
    """One worker's model of vLLM's own classes, filled by its mapping."""

    def __init__(self, engine: Engine, rank: int, published: Any) -> None:
        self._engine, self._rank = engine, rank
        with engine.rank(rank) as self.model:
            mapping = reload.record_model(published, self.model, engine.config).mapping()
        poison(self.model)
        mapping.fill(self.model)
        self.packed = mapping.pack(self.model)

    def pull(self, client: fanin.Client, step: int) -> fanin.PullResult:
        assert self.packed.dtype is None
        result = client.pull_into(RUN, self.packed.tensors, step=step, deltas=True, timeout=60)
        self.packed.settle()
        return result

    def different(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """From what vLLM's own loader makes of them."""
        with self._engine.rank(self._rank) as judge:
            wanted = loaded(judge, weights)
        found = snapshot(self.model)
        return [name for name in wanted if not torch.equal(found[name], wanted[name])]


class Trainer:
    """FSDP2 ranks that train with AdamW at the rate of RL, and begin again after :meth:`kill`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._lives = folder, 0
        self.model = save_full_model(folder / "model", kind, dtype="float32")
        self._start(self.model, 0)

    def _start(self, model: Path, step: int) -> None:
        self._lives += 1
        scratch = self._folder / f"life-{self._lives}"
        self.now = FullTrainer(model, scratch, world_size=RANKS, step=step, **LEARN)
        self.now.wait_ready()

    def kill(self) -> None:
        """Another launch goes on from the last step, which it publishes under the same number."""
        last = self.now
        last.kill()
        last.close()
        self._start(last.record(last.published), last.published)

    def weights(self) -> dict[str, torch.Tensor]:
        """What torch gathers of what is trained, as it is published."""
        whole = load_file(self.now.record(self.now.published) / "model.safetensors")
        return {name: one.bfloat16() for name, one in whole.items()}

    def close(self) -> None:
        self.now.close()


def test_every_step_of_adamw(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, KIND)
    client = fanin.Client(trainer.now.addresses, path="stream")
    try:
        published = client.catalog(RUN)
        made = AutoConfig.from_pretrained(trainer.model)
        workers = []
        for number, layout in enumerate((Layout(2), Layout(2, experts=True))):
            folder = tmp_path / f"engine-{number}"
            engine = Engine(folder, FAMILIES[KIND], layout, made)
            workers += [Rank(engine, rank, published) for rank in range(layout.size)]
        deltas = []
        for step in range(STEPS + 1):
            if step == ABORT:
                trainer.now.do("give_up_update")
            if step:
                assert trainer.now.step()["step"] == step
            results = [worker.pull(client, step) for worker in workers]
            weights = trainer.weights()
            for worker in workers:
                assert worker.different(weights) == []
            assert all(one.verified for one in results)
            if all(one.patch_bytes > 0 for one in results):
                assert [one.base_step for one in results] == [step - 1] * len(results)
                deltas.append(step)
            if step == KILL:
                trainer.kill()
                client.close()
                client = fanin.Client(trainer.now.addresses, path="stream")
                again = [worker.pull(client, step) for worker in workers]
                assert all(one.whole_because for one in again)
        assert deltas == list(range(1, STEPS + 1))
    finally:
        client.close()
        trainer.close()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    with Judge(tmp_path_factory.mktemp("judge")) as one:
        yield one.wait_ready()


def changes(engine: LiveEngine) -> list[tuple[float, int]]:
    """Percent that were read, and since which step, as the log says it."""
    found = re.findall(
        r" MB of \d+ tensors by stream.*, ([\d.]+) % of .* since step (\d+)", engine.log()
    )
    return [(float(share), int(step)) for share, step in found]


def test_a_real_engine(judge: Judge, tmp_path: Path) -> None:
    """Read ahead into memory beside the model, and into the model itself: tokens and log
    probabilities are those of a vLLM that has loaded the step."""
    model = save_full_model(tmp_path / "model", "qwen3", dtype="float32")
    with (
        FullTrainer(model, tmp_path / "run", world_size=2, **LEARN) as trainer,
        LiveEngine(model, tmp_path / "engine", environment={"FANIN_PATH": "stream"}) as engine,
    ):
        trainer.wait_ready()
        engine.wait_ready()
        seen = []

        def arrives(ahead: bool) -> None:
            step = int(trainer.step()["step"])
            engine.good("start_weight_update")
            if ahead:
                wanted = {"step": step, "prefetch": True}
                engine.good("update_weights", {"update_info": wanted})
            engine.good("update_weights", {"update_info": {"step": step}})
            engine.good("finish_weight_update", f"step-{step}")
            output = engine.output()
            assert output == judge.output_of(trainer.record(step)) and output not in seen
            seen.append(output)

        assert not engine.init(str(trainer.info))  # "auto"
        for _ in range(3):
            arrives(ahead=True)
        assert [since for _, since in changes(engine)] == [1, 2]
        assert not engine.init(str(trainer.info), deltas=True)
        for _ in range(3):
            arrives(ahead=False)
        assert [since for _, since in changes(engine)] == [1, 2, 4, 5]
        assert engine.check(trainer.published)["unseen"] == []  # it writes the model itself
        arrives(ahead=False)
        engine.scribble("model.norm.weight")  # nobody says so
        arrives(ahead=False)
        assert "the whole was read, because" in engine.log()
        arrives(ahead=True)
        arrives(ahead=False)  # what was read ahead has written the model
        assert all(share < 25 for share, _ in changes(engine))


class Served:
    """A model whose modules *method* processes, and a trainer of it; no step is read ahead."""

    def __init__(self, place: Place, method: type, model: Any, **said: Any) -> None:
        self.place, self.method, self.model = place, method, model
        config = place.engine.config
        prepared(model, method, config, place.first)
        self.backend = Backend(
            WeightTransferConfig(backend="nccl"), config, torch.device("cpu"), model
        )
        self.backend.init_transfer_engine(told(place, deltas=True, **said))

    def arrives(self, step: int) -> None:
        if step > 1:
            self.place.server.begin_update("full:0")
            self.place.server.commit("full:0", step, **self.place.how)
        updated(self.backend, step)

    def different(self) -> list[str]:
        """Tensors that are not what vLLM makes of what is published now."""
        with self.place.engine.rank(0) as judge:
            prepared(judge, self.method, self.place.engine.config, self.place.now)
            wanted = tensors_of(judge)
        found = tensors_of(self.model)
        return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@contextmanager
def served(folder: Path, method: type, **said: Any) -> Iterator[Served]:
    place = Place(folder, snapshot=True, deltas=4)
    try:
        with place.engine.rank(0) as model:
            one = Served(place, method, model, **said)
            yield one
            one.backend.shutdown()
    finally:
        place.close()


@pytest.mark.parametrize(("method", "beside"), [(Anew, True), (Nothing, False)])
def test_what_is_processed_is_patched_beside_the_model(
    method: type, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory does not hold what was published."""
    monkeypatch.setenv("FANIN_PATH", "stream")
    with served(tmp_path, method) as one:
        for step in (1, 2, 3):
            if step > 1:
                for tensor in one.place.now.values():
                    tensor.view(-1)[::100] += 1
            one.arrives(step)
            assert not one.different()
            last = one.backend.state()["last"]
            assert ("read ahead into cpu" in last["path"]) is beside
            assert (last["whole"] > last["bytes"] > 0) is (step > 1), last
            assert last["since"] == step - 1 or step == 1


def test_a_model_that_is_disowned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without verify nothing else shows that the memory beside it is as wrong."""
    monkeypatch.setenv("FANIN_PATH", "stream")
    with served(tmp_path, Anew, verify=False) as one:
        one.arrives(1)
        for tensor in one.backend._main.shadow._tensors.values():
            tensor.fill_(7)
        one.backend.disown("its answers are not the judge's")
        one.arrives(2)
        assert not one.different()


def test_a_trainer_that_cannot_keep_patches() -> None:
    model = random_model("qwen3")
    options = {"base_port": 0, "use_ucx": False}
    with pytest.raises(RequestError, match="without snapshot") as caught:
        WeightServer(model, deltas=4, **options)
    assert "snapshot=True" in caught.value.remedy
    for wrong in (17, -1, True, "4"):
        with pytest.raises(RequestError, match="deltas is"):
            WeightServer(model, deltas=wrong, snapshot=True, **options)
    with WeightServer(model, **options) as server:
        with pytest.raises(RequestError, match="without snapshot"):
            server.add_run("draft", random_model("qwen2"), deltas=4)
        server.publish(0)


def empty(client: fanin.Client, run: str) -> dict[str, torch.Tensor]:
    entries = client.catalog(f"full:{run}")
    return {one.name: torch.empty(one.shape, dtype=DTYPES[one.dtype]) for one in entries}


def test_runs_keep_patches_each_for_itself() -> None:
    """Also of what is rounded to fp8; engines find it in the metadata."""
    model, draft = random_model("qwen3"), random_model("qwen2")
    with WeightServer(model, base_port=0, use_ucx=False, snapshot=True, deltas=4) as server:
        server.add_run("0-fp8", model, quantize="fp8")
        server.add_run("draft", draft, deltas=0)
        runs = ("0", "0-fp8", "draft")
        server.publish(dict.fromkeys(runs, 1))
        with fanin.Client(server.addresses, path="stream") as client:
            told = [client.metadata(f"full:{run}").get("deltas") for run in runs]
            assert told == ["4", "4", None]
            memory, packed = {}, {}
            for run in runs:
                memory[run] = into = empty(client, run)
                packed[run] = fanin.pack(fanin.shard_of(*one) for one in into.items())
                client.pull_into(f"full:{run}", packed[run], deltas=True)
            with torch.no_grad():
                for parameter in (*model.parameters(), *draft.parameters()):
                    parameter.view(-1)[:: parameter.numel() // 3] *= 0.75
            server.publish(dict.fromkeys(runs, 2))
            for run in runs:
                result = client.pull_into(f"full:{run}", packed[run], deltas=True)
                assert bool(result.patch_bytes) is (run != "draft"), result.whole_because
                wanted = empty(client, run)
                client.pull_into(f"full:{run}", wanted)
                for name, one in memory[run].items():
                    assert torch.equal(one.view(torch.uint8), wanted[name].view(torch.uint8)), name
