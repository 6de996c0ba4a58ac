# SPDX-License-Identifier: Apache-2.0
"""WeightServer(merge=True): bytes of PEFT's merge_and_unload(), and what is refused."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fanin.errors import RequestError
from fanin.torch import WeightServer, _factors, _merge, _transform
from fanin.torch._again import Again
from full_models import random_model
from merged import (
    ADAPTERS,
    LINEAR,
    adapted,
    fits_in_half,
    peak,
    pulled,
    same,
    saved,
    with_adapter,
)
from peft import LoraConfig, get_peft_model
from worlds import World, case_world, child, run_case

DTYPES = ("bfloat16", "float32")


def serve(model: Any, **options: Any) -> WeightServer:
    return WeightServer(model, **{"base_port": 0, "use_ucx": False, "merge": True, **options})


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("merge")
    with case_world(request.param, folder, "merge_ranks.py") as ranks:
        yield ranks


@pytest.mark.parametrize("wide", [True, False], ids=["factors of F32", "of the base's dtype"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_bytes_of_merge_and_unload_in_a_world(
    world: World, adapter: str, dtype: str, wide: bool
) -> None:
    run_case(world, "merged", adapter, "fsdp", dtype, wide)


@pytest.mark.parametrize("adapter", ["linear", "embedding", "experts"])
@pytest.mark.parametrize("layout", ["columns", "hsdp"])
def test_other_shards(world: World, adapter: str, layout: str) -> None:
    if len(world.ranks) not in ((4,) if layout == "hsdp" else (2, 4)):
        pytest.skip("FSDP2 cuts no columns unevenly, and replicas want four ranks")
    run_case(world, "merged", adapter, layout, "bfloat16", True)


def test_dora_of_a_base_that_is_cut_by_columns_is_refused(world: World) -> None:
    if len(world.ranks) == 3:
        pytest.skip("FSDP2 cuts no columns unevenly")
    run_case(world, "split_rows_of_dora")


@pytest.mark.parametrize("collective, quantize", [("gather", None), ("maximum", "fp8")])
def test_a_rank_that_ends_in_a_collective(
    collective: str, quantize: str | None, tmp_path: Path
) -> None:
    with World(2, {}, tmp_path / "ranks", "merge_ranks.py") as ranks:
        ranks.expect("ready")
        ranks.tell("run", case="ended_in", arguments=[collective, quantize])
        assert ranks.ranks[1].wait() == -signal.SIGKILL
        assert ranks.ranks[0].expect("done")["error"] is None


@pytest.mark.parametrize("adapter", ["linear", "dora", "experts"])
@pytest.mark.parametrize("layout", ["fsdp", "columns", "hsdp"])
def test_fp8_of_what_is_merged_in_a_world(world: World, adapter: str, layout: str) -> None:
    size = len(world.ranks)
    if (layout == "hsdp" and size < 4) or (
        layout == "columns" and (size == 3 or adapter == "dora")
    ):
        pytest.skip("FSDP2 cuts no columns unevenly, and replicas want four ranks")
    run_case(world, "rounded_to_fp8", adapter, layout)


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("how", ["switched off", "offloaded", "is not the one that is active"])
def test_a_rank_that_refuses(world: World, how: str, quantize: str | None) -> None:
    run_case(world, "refused_on_one_rank", how, quantize)


# ------------------------------------------------------------------------------------ one process


def merged_now(model: Any, folder: Path) -> dict[str, Any]:
    """What PEFT would save of the model as it is, which stays as it is."""
    return saved(lambda: copy.deepcopy(model), folder)


def test_the_configuration_is_the_bases() -> None:
    model = adapted("linear")
    with serve(model) as server:
        server.publish(0)
        described = server._runs["full:0"].metadata["config"]
    assert '"architectures": ["Qwen3ForCausalLM"]' in described and "peft" not in described


def test_what_no_adapter_touches_goes_by_reference() -> None:
    model = adapted("linear")
    with serve(model) as server:
        held = {shard.name: values for shard, _, values in server._runs["full:0"].parameters.held()}
    base = model.get_base_model()
    assert held["model.norm.weight"].data_ptr() == base.model.norm.weight.data_ptr()
    query = base.model.layers[0].self_attn.q_proj.base_layer.weight
    assert held["model.layers.0.self_attn.q_proj.weight"].data_ptr() != query.data_ptr()


def test_steps_of_an_optimizer_a_scale_and_a_pause(tmp_path: Path) -> None:
    model = adapted("linear")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with serve(model) as server:
        server.publish(0)
        model(torch.arange(3, 9)[None]).logits.square().mean().backward()
        with server.updating(1):
            optimizer.step()
        same(pulled(server), merged_now(model, tmp_path / "1"))
        model.get_base_model().model.layers[0].mlp.up_proj.set_scale("default", 3.0)
        server.publish(2)
        same(pulled(server), merged_now(model, tmp_path / "2"))
        server.pause()
        model.to(torch.float32).to(torch.bfloat16)  # all of its memory is another
        server.resume()
        same(pulled(server), merged_now(model, tmp_path / "3"))


@pytest.mark.parametrize("most", [1 << 9, 1 << 13])
@pytest.mark.parametrize("adapter", ["linear", "embedding", "dora", "experts"])
def test_some_rows_at_a_time(
    adapter: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_merge, "_MOST", most)
    with serve(adapted(adapter)) as server:
        server.publish(0)
        same(pulled(server), saved(lambda: adapted(adapter), tmp_path))


def test_kernels_of_gpus(tmp_path: Path) -> None:
    """Triton's, by its interpreter, which has to be chosen before anything imports Triton."""
    with child("kernels", "merge_kernels.py", {}, tmp_path) as kernels:
        merged = kernels.expect("merged")
        assert merged["parts"] > 40 and merged["launches"] < merged["parts"]
        assert kernels.expect("refused")["proven"] == 0
        assert kernels.wait() == 0


class Code:
    """Stands in for a kernel of Triton, and for what it compiles."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.calls: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (3, 1, 1)

        def launch(*arguments: Any, **options: Any) -> Any:
            if options:
                self.calls.append("looked")
                return self
            if len(arguments) != self.takes:
                raise TypeError
            self.calls.append("again")
            return None

        return launch


@pytest.mark.parametrize(("takes", "then"), [(4, "again"), (3, "looked")])
def test_a_launcher_is_kept_if_it_takes_the_arguments(takes: int, then: str) -> None:
    code = Code(takes)
    again = Again(code, (3,), torch.device("cpu"), ("same",), num_warps=4)
    for address in (64, 128, 8, 24, 0, 0):  # code is another one for each kind of number
        again("table", address, 32)
    assert code.calls == ["looked", then] * 3


def test_snapshots_and_a_cast(tmp_path: Path) -> None:
    model = adapted("linear", "float32")
    with serve(model, snapshot=True, cast="BF16") as server:
        server.publish(0)
        wanted = saved(lambda: adapted("linear", "float32"), tmp_path)
        same(pulled(server), {name: value.bfloat16() for name, value in wanted.items()})


@pytest.mark.parametrize("adapter", ["linear", "experts"])
def test_fp8_of_what_is_merged(adapter: str) -> None:
    model = adapted(adapter)
    with serve(model, quantize="fp8") as server:
        server.publish(0)
        with server.updating(1), torch.no_grad():
            for path, param in model.named_parameters():
                if ".lora_" in path:
                    param.mul_(-1.5)
        got = pulled(server)
        fits_in_half(server, got)
        config = json.loads(server._runs["full:0"].metadata["config"])
    assert config["quantization_config"]["quant_method"] == "fp8"
    with serve(model.merge_and_unload(), quantize="fp8", merge=False) as server:
        server.publish(0)
        same(got, pulled(server))
        assert config == json.loads(server._runs["full:0"].metadata["config"])


@pytest.mark.parametrize("adapter", ["linear", "dora", "experts"])
def test_fp8_of_a_part_at_a_time(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(adapted(adapter), quantize="fp8") as server:
        server.publish(0)
        wanted, whole = pulled(server), fits_in_half(server, pulled(server))
    monkeypatch.setattr(_transform.Cut.__new__, "__defaults__", (1 << 15,))
    with serve(adapted(adapter), quantize="fp8") as server:
        server.publish(0)
        server.publish(1)
        same(pulled(server), wanted)
        least = 2 * 128 * (128 if adapter == "experts" else 256)  # blocks stay whole
        assert fits_in_half(server, wanted) <= least
    assert (whole > least) is (adapter == "experts")


def test_fp8_of_a_large_matrix() -> None:
    """Of 100 MB. Beside the results there is room for 64 MB, whatever the matrix."""
    base = torch.nn.Sequential(torch.nn.Linear(8192, 6144, bias=False, dtype=torch.bfloat16))
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["0"]))
    servers: list[WeightServer] = []

    def publish() -> None:
        servers.append(serve(model, quantize="fp8"))
        servers[0].publish(0)

    values = model.get_base_model()[0].weight.numel()
    most = peak(publish)
    servers[0].close()
    assert values <= most <= values + values // 1024 + (64 << 20)


def two_adapters() -> Any:
    model = adapted("embedding")
    model.add_adapter("other", LoraConfig(r=2, target_modules=LINEAR))
    return model


def test_an_adapter_beside_others(tmp_path: Path) -> None:
    """The active one is published, also of what the others have and it does not."""
    model = two_adapters()
    with serve(model) as server:
        server.publish(0)
        first = pulled(server)
        same(first, saved(lambda: adapted("embedding"), tmp_path))
        model.set_adapter("other")
        with pytest.raises(RequestError, match=r"'default' of .* is not .*active \(other\)") as why:
            server.publish(1)
        assert "refresh()" in why.value.remedy
        server.refresh()
        server.publish(1)
        second = pulled(server)
    base = random_model("qwen3")
    assert torch.equal(second["lm_head.weight"], base.lm_head.weight)
    assert not torch.equal(first["lm_head.weight"], base.lm_head.weight)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(second[query], base.state_dict()[query])  # its B is zero


def test_a_refresh_that_fails(tmp_path: Path) -> None:
    """The adapter of before is the published one yet, and steps of another one are refused."""
    model = two_adapters()
    with serve(model) as server:
        server.publish(0)
        model.base_model.set_adapter(["default", "other"])
        with pytest.raises(RequestError, match="default, other are active"):
            server.refresh()
        model.set_adapter("other")
        model.get_base_model().add_module("more", torch.nn.Identity())
        with pytest.raises(RequestError, match=r"'default' of .* is not .*active \(other\)"):
            server.publish(1)
        model.set_adapter("default")
        server.publish(1)
        same(pulled(server), saved(lambda: adapted("embedding"), tmp_path))


def test_an_adapter_that_is_deleted(tmp_path: Path) -> None:
    model = two_adapters()
    with serve(model) as server:
        server.publish(0)
        model.set_adapter("other")
        model.delete_adapter("default")
        with pytest.raises(RequestError, match="no LoRA layer of the adapter 'default'") as caught:
            server.publish(1)
        assert "refresh()" in caught.value.remedy
        server.refresh()
        server.publish(1)
        same(pulled(server), merged_now(model, tmp_path))
        model.delete_adapter("other")
        with pytest.raises(RequestError, match="the model has no adapter any more"):
            server.refresh()


def test_an_adapter_that_joins_the_run(tmp_path: Path) -> None:
    """Its layers are found where the base's were by reference."""
    model = with_adapter(random_model("qwen3"), r=2, target_modules=["q_proj"])
    with serve(model) as server:
        server.publish(0)
        more = LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, init_lora_weights=False)
        model.add_adapter("more", more)
        model.set_adapter("more")
        with pytest.raises(RequestError, match=r"'default' of .* is not .*active \(more\)"):
            server.publish(1)
        server.refresh()
        server.publish(1)
        got = pulled(server)
    model.delete_adapter("default")
    same(got, saved(lambda: model, tmp_path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.disable_adapter_layers(), "'default' of .* is switched off"),
        (lambda model: model.merge_adapter(), "'default' of .* is merged into the base already"),
    ],
)
def test_an_adapter_that_is_not_applied(change: Any, text: str) -> None:
    model = adapted("linear")
    with serve(model) as server:
        server.publish(0)
        with pytest.raises(RequestError, match=text), server.updating(1):
            change(model)
        model.enable_adapter_layers()
        model.unmerge_adapter()
        server.publish(1)


def test_an_adapter_that_is_switched_on_later(tmp_path: Path) -> None:
    model = adapted("linear")
    model.disable_adapter_layers()
    with serve(model) as server:
        with pytest.raises(RequestError, match="'default' of .* is switched off") as caught:
            server.publish(0)
        assert "switch adapters on" in caught.value.remedy
        model.enable_adapter_layers()
        server.publish(0)
        same(pulled(server), saved(lambda: adapted("linear"), tmp_path))


def test_another_adapter_that_is_merged_by_hand() -> None:
    """Into a layer that the published one does not touch, whose base is another then."""
    model = with_adapter(random_model("qwen3"), r=2, target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    key = model.get_base_model().model.layers[1].self_attn.k_proj
    with serve(model) as server:
        server.publish(0)
        key.merge(adapter_names=["other"])
        text = r"'other' is merged into 'model.layers.1.self_attn.k_proj', .* 'default' does not"
        with pytest.raises(RequestError, match=text) as caught:
            server.publish(1)
        assert "unmerge_adapter()" in caught.value.remedy
        key.unmerge()
        server.publish(1)


def with_a_copy(of: str, **more: Any) -> Any:
    """PEFT trains a copy of one of two tied tensors; the adapter may tie the other one to it."""
    base = random_model("qwen3", tied=True)
    return with_adapter(base, r=2, target_modules=["q_proj"], modules_to_save=[of], **more)


@pytest.mark.parametrize("of", ["embed_tokens", "lm_head"])
def test_one_of_two_tied_tensors_that_is_trained(of: str) -> None:
    """Engines would take it for both."""
    with serve(with_a_copy(of)) as server:
        with pytest.raises(RequestError, match="ties 'lm_head.weight' to 'model.embed_tokens"):
            server.publish(0)


def test_tied_tensors_that_are_trained_together(tmp_path: Path) -> None:
    def make() -> Any:
        return with_a_copy("embed_tokens", ensure_weight_tying=True)

    with serve(make()) as server:
        server.publish(0)
        same(pulled(server), saved(make, tmp_path))


def both_active() -> Any:
    model = two_adapters()
    model.base_model.set_adapter(["default", "other"])
    return model


def conv1d() -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    small = GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    base = AutoModelForCausalLM.from_config(small)
    return with_adapter(base, r=2, target_modules=["c_attn"], fan_in_fan_out=True)


def eight_bits() -> Any:
    model = adapted("linear")
    query = model.get_base_model().model.layers[1].self_attn.q_proj.base_layer
    query.weight = torch.nn.Parameter(query.weight.to(torch.float8_e4m3fn), False)
    return model


def loha() -> Any:
    return get_peft_model(random_model("qwen3"), peft.LoHaConfig(target_modules=["q_proj"]))


REFUSED = {
    "no adapter": (lambda: random_model("qwen3"), "Qwen3ForCausalLM has none"),
    "several": (both_active, "merges one adapter, and default, other are active"),
    "another kind": (loha, "merges LoRA, and the model has LOHA"),
    "tokens": (
        lambda: with_adapter(random_model("qwen3"), r=2, trainable_token_indices=[3, 4]),
        "embed_tokens' is PEFT's TrainableTokensWrapper",
    ),
    "transposed": (conv1d, "c_attn' holds its weight transposed"),
    "dora of an embedding": (
        lambda: with_adapter(
            random_model("qwen3"), r=2, use_dora=True, target_modules=["embed_tokens"]
        ),
        "embed_tokens' is computed by PEFT's DoraEmbeddingVariant",
    ),
    "a bias": (
        lambda: with_adapter(random_model("qwen2"), r=2, lora_bias=True, target_modules=["q_proj"]),
        "q_proj' has a bias of its own",
    ),
    "a tie": (
        lambda: with_adapter(
            random_model("qwen3", tied=True), r=2, target_modules=["embed_tokens"]
        ),
        "adds to 'model.embed_tokens.weight', which is tied to 'lm_head.weight'",
    ),
    "a quantized base": (eight_bits, r"layers.1.*q_proj' adds to .*float8_e4m3fn, not BF16"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(what: str) -> None:
    make, text = REFUSED[what]
    with pytest.raises(RequestError, match=text) as caught:
        serve(make())
    assert caught.value.remedy


def test_each_factor_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the edge between two groups, where the order is another one than was said."""
    gathered: list[Any] = []

    class Whole(_factors.Group):
        def laid(self) -> Any:
            return [(at, (1,), (1,), 0) for at in range(len(self.tensors))]

        def gather(self) -> Any:
            gathered.extend(self.tensors)
            return torch.cat(self.tensors)

    monkeypatch.setattr(_factors, "_group_of", lambda one, tensor: (Whole("mesh"), 1))
    monkeypatch.setattr(_factors, "MOST", 3 * 4)
    module = torch.nn.Module()
    for number in range(9):
        module._parameters[str(number)] = torch.nn.Parameter(torch.full((1,), float(number)))
    places = [_factors.Place(module, str(number)) for number in range(9)]
    factors = _factors.Factors(map(_factors.Asked, places))
    for number in (0, 1, 3, 2, 4, 6, 5, 8, 7):
        assert factors.whole(places[number]).tensor().item() == number
    assert sorted(one.item() for one in gathered) == list(range(9))
