# SPDX-License-Identifier: Apache-2.0
"""Several steps, one after the other, into a model whose processing may be done once only.

What each landing leaves is compared, bit for bit, with a model that has loaded the same step as its
first. The model is a real one of vLLM, without an engine around it; in the tests at the end the
backend is what vLLM makes in a worker, called as a worker calls it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from families import FAMILIES, Engine, Layout, checkpoint, values
from fanin.engine import copies
from fanin.engine.clients import Source
from fanin.engine.landing import Landing, Progress
from fanin.engine.trainers import Published, Trainer
from fanin.vllm import reload
from fanin.vllm.beside import Shadow
from fanin.vllm.landings import LoaderLanding, MappedLanding, with_neighbours
from fanin.vllm.weights import Engine as Backend
from fanin.vllm.weights import InitInfo
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import process_weights_after_loading

CPU = torch.device("cpu")
STEPS = (1, 2, 3)
COMPUTED = "model.layers.1.mlp.gate_proj.weight"


class Anew(UnquantizedLinearMethod):
    """What comes of processing is another tensor, and processing that again would be wrong."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data * 2 + 1, requires_grad=False)


class InPlace(UnquantizedLinearMethod):
    """It writes into the very tensor that was loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight.data.mul_(2).add_(1)


class Nothing(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass


def at_step(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    return {name: tensor + step for name, tensor in weights.items()}


def computing(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loader that computes with one tensor before it writes it."""

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return load((n, tensor * 1 if n == COMPUTED else tensor) for n, tensor in weights)

    return load_weights


def prepared(model: Any, method: type, config: Any, weights: dict[str, torch.Tensor]) -> None:
    """As vLLM starts: loaded and processed."""
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method = method()
    record_metadata_for_reloading(model)
    with torch.no_grad():
        model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, config.model_config, CPU)


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


class Place:
    """One rank that publishes, and the engine's configuration. how: of its commits."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.how = how
        self.entries = checkpoint(FAMILIES["qwen3"].configuration())
        self.first = values(self.entries)
        self.engine = Engine(folder, FAMILIES["qwen3"], Layout(1))
        self.now = at_step(self.first, 0)
        self.server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1)
        self.server.put("full:0", [fanin.shard_of(n, t) for n, t in self.now.items()])
        self.server.commit("full:0", 1, **how)
        self.trainer = Trainer(Source.of(f"127.0.0.1:{self.server.port}"), "full:0")

    def publish(self, step: int) -> None:
        self.server.begin_update("full:0")
        for name, tensor in at_step(self.first, step).items():
            self.now[name].copy_(tensor)
        self.server.commit("full:0", step + 1)

    def expected(self, method: type, step: int) -> dict[str, torch.Tensor]:
        """What a model has that loads this step as its first."""
        with self.engine.rank(0) as model:
            prepared(model, method, self.engine.config, at_step(self.first, step))
            return tensors_of(model)

    def landing(self, kind: str, model: Any, published: Published) -> Landing:
        config = self.engine.config.model_config
        if kind == "loader":
            return LoaderLanding(model, config, CPU, published)
        if kind == "mixed":
            model.load_weights = computing(model.load_weights)
        recording = reload.record_model(published.entries, model, self.engine.config)
        mapping = recording.mapping(fallback=kind == "mixed")
        if kind == "mapped":
            return MappedLanding(model, config, CPU, mapping, verify=True, ring=1)
        mapping = with_neighbours(mapping)
        loader = LoaderLanding(model, config, CPU, published, fallback=mapping, verify=True)
        mixed = MappedLanding(model, config, CPU, mapping, loader, verify=True)
        assert mixed.by_loader == ("model.layers.1.mlp.gate_up_proj",)
        return mixed

    def close(self) -> None:
        self.trainer.close()
        self.server.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize("kind", ["mapped", "mixed", "loader"])
@pytest.mark.parametrize("method", [Anew, InPlace, Nothing])
def test_each_step_is_as_if_it_were_the_first(place: Place, kind: str, method: type) -> None:
    expected = [place.expected(method, step) for step in STEPS]
    with place.engine.rank(0) as model:
        prepared(model, method, place.engine.config, place.first)
        addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        end = time.monotonic() + 120
        landing = place.landing(kind, model, place.trainer.ready(end))
        try:
            for step, wanted in zip(STEPS, expected, strict=True):
                place.publish(step)
                landing.pull(place.trainer, step + 1, end, lambda: None)
                found = tensors_of(model)
                different = [n for n in wanted if not torch.equal(found[n], wanted[n])]
                assert found.keys() == wanted.keys() and not different
            # Where CUDA graphs would read them.
            assert {n: t.data_ptr() for n, t in model.named_parameters()} == addresses
        finally:
            landing.close()


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("method", [Anew, InPlace, Nothing])
def test_so_is_each_that_was_read_ahead(
    place: Place, method: type, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied tensor by tensor, and many at once."""
    monkeypatch.setattr(copies, "_SMALL", small)
    expected = [place.expected(method, step) for step in STEPS]
    with place.engine.rank(0) as model:
        prepared(model, method, place.engine.config, place.first)
        addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        end = time.monotonic() + 120
        landing = place.landing("mapped", model, place.trainer.ready(end))
        assert isinstance(landing, MappedLanding)
        shadow = Shadow(landing)
        for step, wanted in zip(STEPS, expected, strict=True):
            place.publish(step)
            shadow.fill(place.trainer, step + 1, end, Progress(step + 1, 0))
            shadow.install()
            found = tensors_of(model)
            assert not [n for n in wanted if not torch.equal(found[n], wanted[n])]
        assert {n: t.data_ptr() for n, t in model.named_parameters()} == addresses
        landing.close()


# -------------------------------------------------------------------- what is not all published

MISSING = "model.layers.1.mlp.up_proj.weight"
HALF = "gate_up_proj.weight': 6144 of 12288 elements are filled by no published tensor"


def publish_as(place: Place, run: str, tensors: dict[str, torch.Tensor]) -> None:
    place.server.put(f"full:{run}", [fanin.shard_of(n, t) for n, t in tensors.items()])
    place.server.commit(f"full:{run}", 1)


@pytest.fixture
def part(place: Place) -> Place:
    """The run "part" has all but half of a module."""
    publish_as(place, "part", {n: t for n, t in place.first.items() if n != MISSING})
    return place


def reading(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loader that needs values, so that it cannot be run without weights."""

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return load((n, t) for n, t in weights if t.flatten()[0].item() < 1e9)

    return load_weights


@pytest.mark.parametrize("kind", ["mixed", "loader"])
def test_half_a_module_is_no_step(part: Place, kind: str) -> None:
    """vLLM would take what new memory happens to hold for the other half."""
    with part.engine.rank(0) as model:
        prepared(model, Nothing, part.engine.config, part.first)
        end = time.monotonic() + 120
        landing = part.landing(kind, model, part.trainer.ready(end))
        trainer = Trainer(part.trainer.source, "full:part")
        partial = trainer.ready(end)
        if isinstance(landing, MappedLanding):
            assert landing._loader is not None
            landing._loader._names.remove(MISSING)
        else:
            landing = LoaderLanding(model, part.engine.config.model_config, CPU, partial)
        before = tensors_of(model)
        with pytest.raises(fanin.PeerError, match=HALF) as caught:
            landing.pull(trainer, 1, end, lambda: None)
        assert caught.value.remedy and caught.value.key == "model.layers.1.mlp.gate_up_proj"
        name = "model.layers.1.mlp.gate_up_proj.weight"
        assert torch.equal(tensors_of(model)[name], before[name])
        trainer.close()
        landing.close()


@pytest.mark.parametrize("kind", ["mixed", "loader"])
def test_a_rank_that_is_started_again_between_two_pulls_of_a_step(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same launch, and to the same step, of which it has other bytes."""
    end = time.monotonic() + 60
    published = place.trainer.ready(end)
    client, life = place.trainer.client, (place.server.world_id, place.server.port)
    pull, pulls = client.pull_into, []

    def once_then_again(*arguments: Any, **how: Any) -> Any:
        pulls.append(pull(*arguments, **how))
        if len(pulls) == 1:
            place.server.close()
            place.server = fanin.Server(world_id=life[0], rank=0, world_size=1, base_port=life[1])
            other = at_step(place.first, 5)
            place.server.put("full:0", [fanin.shard_of(n, t) for n, t in other.items()])
            place.server.commit("full:0", 1)
        return pulls[-1]

    with place.engine.rank(0) as model:
        prepared(model, Nothing, place.engine.config, place.now)
        landing = place.landing(kind, model, published)
        monkeypatch.setattr(client, "pull_into", once_then_again)
        with pytest.raises(fanin.StaleError, match="rank 0 of the trainer was started again while"):
            landing.pull(place.trainer, 1, end, lambda: None)
        landing.close()


def test_padding_that_vllm_declares_is_not_missed(part: Place) -> None:
    with part.engine.rank(0) as model:
        weight = model.model.layers[1].mlp.gate_up_proj.weight
        weight.weight_loader_numel = weight.numel() // 2
        prepared(model, Nothing, part.engine.config, part.first)
        transfer = WeightTransferConfig(backend="nccl")
        backend = Backend(transfer, part.engine.config, CPU, model)
        # Boxes would leave in it what was there before.
        with pytest.raises(fanin.FaninError, match=HALF) as caught:
            backend.init_transfer_engine(told(part, run="part"))
        assert '"mode": "loader"' in caught.value.remedy
        backend.init_transfer_engine(told(part, run="part", mode="loader"))
        updated(backend, 1)
        backend.shutdown()


# -------------------------------------------------------------------- what comes after all modules


def test_attention_that_looks_at_weights_is_processed_each_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain attention is left out from the second step on: vLLM writes scales of one there."""
    asked = [0, 0]
    with place.engine.rank(0) as model:
        prepared(model, Nothing, place.engine.config, place.first)
        first, second = (layer.self_attn for layer in model.model.layers)
        first.attn.impl.made = torch.zeros(())  # so that only its bytes change

        def looks(_: Any) -> None:
            asked[0] += 1
            first.attn.impl.made = first.qkv_proj.weight.float().sum()

        def scales(layer: Any, register_buffer: bool = False) -> None:
            asked[1] += layer is second.attn
            own(layer, register_buffer)

        own = attention.set_default_quant_scales
        monkeypatch.setattr(attention, "set_default_quant_scales", scales)
        first.attn.impl.process_weights_after_loading = looks
        end = time.monotonic() + 120
        landing = place.landing("mapped", model, place.trainer.ready(end))
        second.attn._k_scale.fill_(2)
        for step in STEPS:
            place.publish(step)
            landing.pull(place.trainer, step + 1, end, lambda: None)
            assert first.attn.impl.made == first.qkv_proj.weight.float().sum()
        assert second.attn._k_scale == 1 and second.attn._v_scale == 1
        landing.close()
    assert asked == [len(STEPS), 1]


def test_attention_that_processing_changes_is_processed_again(place: Place) -> None:
    """As where it lets go of what a checkpoint may have brought: the next time finds none."""
    asked = []
    with place.engine.rank(0) as model:
        prepared(model, Nothing, place.engine.config, place.first)
        attention = model.model.layers[0].self_attn.attn
        attention.given = torch.ones(2)

        def lets_go(_: Any) -> None:
            asked.append(attention.__dict__.pop("given", None))

        attention.impl.process_weights_after_loading = lets_go
        after = reload.Afterwards(model, place.engine.config.model_config)
        for _ in STEPS:
            after.run()
    assert [one is None for one in asked] == [False, True, True]


# ------------------------------------------------------------------------------- the backend


@pytest.fixture
def backend(place: Place) -> Iterator[Backend]:
    config = place.engine.config
    with place.engine.rank(0) as model:
        prepared(model, Nothing, config, place.first)
        transfer = WeightTransferConfig(backend="nccl")
        one = Backend(transfer, config, CPU, model)
        yield one
        one.shutdown()


def told(place: Place, **fields: Any) -> InitInfo:
    return InitInfo(f"127.0.0.1:{place.server.port}", timeout=30, **fields)


def updated(backend: Backend, step: int) -> None:
    backend.start_weight_update()
    backend.update_weights({"step": step})
    backend.finish_weight_update()
    backend.reset_weight_update_target()


def test_all_that_init_can_be_told(place: Place, backend: Backend, tmp_path: Path) -> None:
    backend.init_transfer_engine(told(place, verify=True, ring=1, save=str(tmp_path / "maps")))
    updated(backend, 1)
    assert backend.check(1)["different"] == []
    file = str(tmp_path / "maps" / "rank0.json")
    command = [os.environ["NIXL_FETCH"], "map", file]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "model.layers.1.self_attn.qkv_proj" in printed


def test_what_the_model_does_not_have(place: Place, backend: Backend) -> None:
    """vLLM's loader refuses some names itself: then it is not given them."""
    extra = {"model.layers.61.eh_proj.weight": torch.ones(2, 2, dtype=torch.bfloat16)}
    place.server.begin_update("full:0")
    place.server.put("full:0", [fanin.shard_of(n, t) for n, t in extra.items()])
    place.server.commit("full:0", 2)
    with pytest.raises(fanin.FaninError, match="layers.61.*unused") as caught:
        backend.init_transfer_engine(told(place))
    assert "worker 0 of 1" in str(caught.value)
    with pytest.raises(fanin.StateError, match="before init_weight_transfer_engine"):
        backend.start_weight_update()
    for mode in ("auto", "loader"):
        backend.init_transfer_engine(told(place, mode=mode, unused=["model.layers.61.*"]))
        updated(backend, 2)
    assert backend.holds()[0]["step"] == 2


@pytest.mark.parametrize("mode", ["auto", "loader"])
@pytest.mark.parametrize("loads", [list, computing])
def test_what_nothing_fills_is_refused_at_init(
    part: Place, backend: Backend, mode: str, loads: Callable[[Any], Any]
) -> None:
    if loads is computing:
        backend.model.load_weights = computing(backend.model.load_weights)
    with pytest.raises(fanin.FaninError, match=HALF) as caught:
        backend.init_transfer_engine(told(part, run="part", mode=mode))
    assert "publish the" in caught.value.remedy
    backend.init_transfer_engine(told(part, mode=mode))
    updated(backend, 1)


def test_a_loader_that_needs_values_is_judged_at_each_step(part: Place, backend: Backend) -> None:
    backend.model.load_weights = reading(backend.model.load_weights)
    with pytest.raises(fanin.FaninError, match="reads values"):
        backend.init_transfer_engine(told(part))
    backend.init_transfer_engine(told(part, run="part", mode="loader"))
    backend.start_weight_update()
    with pytest.raises(fanin.PeerError, match=HALF):
        backend.update_weights({"step": 1})
    assert backend.holds()[0]["dirty"]
    with pytest.raises(fanin.StateError):
        backend.finish_weight_update()
    backend.reset_weight_update_target()
    backend.init_transfer_engine(told(part, mode="loader"))
    updated(backend, 1)
    assert not backend.holds()[0]["dirty"]


def test_what_a_loader_makes_up_is_for_vllms_loader(place: Place, backend: Backend) -> None:
    """As the bias that Whisper's checkpoints have not, which is zero."""
    load, name = backend.model.load_weights, "model.norm.weight"
    made = torch.full((64,), 3, dtype=torch.bfloat16)
    backend.model.load_weights = lambda weights: load([*weights, (name, made)])
    publish_as(place, "less", {n: t for n, t in place.first.items() if n != name})
    with pytest.raises(fanin.FaninError, match=name) as caught:
        backend.init_transfer_engine(told(place, run="less"))
    assert '"mode": "loader"' in caught.value.remedy
    backend.init_transfer_engine(told(place, run="less", mode="loader"))
    updated(backend, 1)
    assert torch.equal(backend.model.model.norm.weight, made)


EXTRA = "model.layers.0.self_attn.rotary_emb.inv_freq"  # vLLM's loader passes over it


@pytest.mark.parametrize("mode", ["auto", "loader"])
def test_what_the_loader_passes_over_is_refused(place: Place, backend: Backend, mode: str) -> None:
    more = place.first | {EXTRA: torch.ones(4, dtype=torch.bfloat16)}
    publish_as(place, "more", more)
    with pytest.raises(fanin.PeerError, match=EXTRA + ".*unused"):
        backend.init_transfer_engine(told(place, run="more", mode=mode))
    backend.init_transfer_engine(told(place, run="more", mode=mode, unused=[EXTRA]))
    updated(backend, 1)


@pytest.mark.parametrize("prefetch", [False, True])
def test_so_is_what_a_trainer_publishes_in_addition(
    place: Place, backend: Backend, prefetch: bool
) -> None:
    """Since it was started again, or with the very step that is waited for."""
    backend.init_transfer_engine(told(place))
    updated(backend, 1)
    port = place.server.port
    place.server.close(drain=0)
    place.server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1, base_port=port)
    more = place.first | {EXTRA: torch.ones(4, dtype=torch.bfloat16)}
    place.server.put("full:0", [fanin.shard_of(n, t) for n, t in more.items()])
    place.server.commit("full:0", 2)
    backend.start_weight_update()
    if prefetch:
        backend.update_weights({"step": 2, "prefetch": True})
    with pytest.raises(fanin.PeerError, match=EXTRA + ".*unused"):
        backend.update_weights({"step": 2})
    assert backend.holds()[0]["step"] == 1 and not backend.holds()[0]["dirty"]


@pytest.mark.parametrize("mode", ["auto", "loader"])
def test_it_may_be_of_replicas_that_share_experts(
    place: Place, backend: Backend, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = torch.ones(4, dtype=torch.bfloat16)
    publish_as(place, "more", place.first | {f"model.layers.0.mlp.experts.7.{EXTRA}": extra})
    publish_as(place, "other", place.first | {EXTRA: extra})
    monkeypatch.setattr(backend.parallel_config, "data_parallel_size", 2)
    monkeypatch.setattr(backend.parallel_config, "enable_expert_parallel", True)
    with pytest.raises(fanin.PeerError, match=EXTRA):
        backend.init_transfer_engine(told(place, run="other", mode=mode))
    backend.init_transfer_engine(told(place, run="more", mode=mode))
    updated(backend, 1)


@pytest.mark.parametrize("mode", ["auto", "loader"])
def test_of_a_draft_it_is_too(place: Place, backend: Backend, mode: str) -> None:
    publish_as(place, "more", place.first | {EXTRA: torch.ones(4, dtype=torch.bfloat16)})
    with place.engine.rank(0) as draft:
        prepared(draft, Nothing, place.engine.config, place.first)
        backend.init_transfer_engine(told(place, mode=mode, draft_run="more"))
        backend.set_weight_update_target(draft, backend.model_config)
        for _ in range(2):
            with pytest.raises(fanin.PeerError, match=EXTRA) as caught:
                backend.start_weight_update()
            assert "draft model" in caught.value.remedy
        # In one run of both models the rest is the main model's.
        main = told(place, run="more", mode=mode, draft_run="more", unused=[EXTRA])
        backend.reset_weight_update_target()
        backend.init_transfer_engine(main)
        backend.set_weight_update_target(draft, backend.model_config)
        updated(backend, 1)


@pytest.fixture
def sharing(place: Place, backend: Backend) -> Iterator[Any]:
    """A draft model that has the main model's embedding and head: so vLLM leaves one that is loaded
    without its own, or with the same."""
    main = backend.model
    with place.engine.rank(0) as draft:
        prepared(draft, Nothing, place.engine.config, place.first)
        del draft.model.embed_tokens, draft.lm_head
        draft.model.embed_tokens, draft.lm_head = main.model.embed_tokens, main.lm_head
        yield draft


SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("mode", ["auto", "loader"])
@pytest.mark.parametrize("loads", [list, computing])
def test_what_a_draft_shares_is_the_main_models(
    place: Place,
    backend: Backend,
    sharing: Any,
    mode: str,
    loads: Callable[[Any], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its run need not have it, and writes nothing of it."""
    caplog.set_level(logging.WARNING, "vllm.fanin")
    if loads is computing:
        sharing.load_weights = computing(sharing.load_weights)
    whole = at_step(place.first, 5)
    publish_as(place, "whole", whole)
    publish_as(place, "own", {n: t for n, t in whole.items() if n not in SHARED})
    for run in ("whole", "own"):
        backend.init_transfer_engine(told(place, mode=mode, draft_run=run))
        updated(backend, 1)
        before = tensors_of(backend.model)
        caplog.clear()
        backend.set_weight_update_target(sharing, backend.model_config)
        updated(backend, 1)
        after = tensors_of(backend.model)
        assert not [name for name in before if not torch.equal(before[name], after[name])]
        assert torch.equal(sharing.model.norm.weight, whole["model.norm.weight"])
        half = sharing.model.layers[1].mlp.gate_up_proj.weight.chunk(2)[0]
        assert torch.equal(half, whole[COMPUTED])
        said = [text for text in caplog.messages if "shares" in text]
        assert len(said) == (run == "whole")
        assert all(name in text for text in said for name in SHARED)
        with torch.no_grad():
            sharing.model.norm.weight.zero_()
    assert [one["step"] for one in backend.holds()] == [1, 1]


@pytest.mark.parametrize("loads", [list, computing])
def test_what_a_draft_holds(
    place: Place, backend: Backend, sharing: Any, loads: Callable[[Any], Any]
) -> None:
    """In a run of its own, and in one of both models; digests of it."""
    if loads is computing:
        sharing.load_weights = computing(sharing.load_weights)
    publish_as(place, "whole", at_step(place.first, 5))
    for run in ("whole", "0"):
        backend.init_transfer_engine(told(place, draft_run=run))
        updated(backend, 1)
        with pytest.raises(fanin.StateError, match="holds nothing of full:whole"):
            backend.holds_of(1, "full:whole")
        main = backend.holds_of(1, "full:0")
        backend.set_weight_update_target(sharing, backend.model_config)
        updated(backend, 1)
        backend.reset_weight_update_target()
        both = backend.holds_of(1, f"full:{run}")
        names = {name for name, *_ in both["held"]} | set(both["untold"])
        assert names | set(both["unused"]) == set(place.first) and not main["unused"]
        assert both["unused"] == ([] if run == "0" else sorted(SHARED))
        assert (COMPUTED in both["untold"]) is (loads is computing)
        assert ("draft: model.layers.1.mlp.gate_up_proj" in both["unseen"]) is (loads is computing)
        if run == "0":
            assert both["held"][: len(main["held"])] == main["held"]
            assert len(both["held"]) > len(main["held"])
        with torch.no_grad():
            sharing.model.norm.weight.zero_()


@pytest.mark.parametrize("mode", ["auto", "loader"])
def test_a_loader_that_may_write_what_a_draft_shares(
    place: Place, backend: Backend, sharing: Any, mode: str
) -> None:
    load = sharing.load_weights

    def pads(weights: Any) -> Any:
        sharing.lm_head.weight.data[:1].fill_(0)
        return load(weights)

    backend.init_transfer_engine(told(place, mode=mode, draft_run="0"))
    before = tensors_of(backend.model)
    backend.set_weight_update_target(sharing, backend.model_config)
    for loads, says in ((pads, "lm_head.weight.*fills them"), (reading(load), "reads values")):
        sharing.load_weights = loads
        with pytest.raises(fanin.RequestError, match=says) as caught:
            backend.start_weight_update()
        assert caught.value.key == "draft_run"
    assert all(torch.equal(tensor, before[n]) for n, tensor in tensors_of(backend.model).items())


def test_a_worker_that_can_open_no_more_files(place: Place, backend: Backend) -> None:
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    for descriptor in taken[-2:]:
        os.close(descriptor)
    try:
        with pytest.raises(fanin.FaninError, match="worker 0 of 1.*files") as caught:
            backend.init_transfer_engine(told(place))
        assert isinstance(caught.value, (fanin.HostError, fanin.ConnectionFailedError))
    finally:
        for descriptor in taken[:-2]:
            os.close(descriptor)
    backend.init_transfer_engine(told(place))
    updated(backend, 1)


def test_what_it_holds_is_told(place: Place, backend: Backend) -> None:
    backend.init_transfer_engine(told(place))
    assert backend.holds()[0]["step"] is None and not backend.holds()[0]["dirty"]
    updated(backend, 1)
    assert backend.holds()[0]["step"] == 1
    assert backend.holds()[0]["world"] == backend.state()["last"]["worlds"][0]
    # vLLM may carry it as it is (VLLM_ALLOW_INSECURE_SERIALIZATION), and answers with JSON.
    assert len(json.loads(json.dumps(backend.state()))["last"]["worlds"]) == 1
    place.publish(4)
    backend.start_weight_update()
    with pytest.raises(fanin.SupersededError):
        backend.update_weights({"step": 1})
    assert "step 1 failed" in backend.holds()[0]["failed"] and not backend.holds()[0]["dirty"]
    backend.reset_weight_update_target()
    backend.reloaded()
    assert backend.holds()[0] == {
        "worker": "worker 0 of 1",
        "dirty": "",
        "step": None,
        "world": "",
        "incarnations": {},
        "failed": "",
    }
