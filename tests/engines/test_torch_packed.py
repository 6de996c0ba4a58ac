# SPDX-License-Identifier: Apache-2.0
"""WeightServer(merge=True) of a base that bitsandbytes packs in 4 bits, and of what it cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fanin.errors import RequestError, StateError
from fanin.torch import WeightServer, _packed4, _transform
from merged import fits_in_half, four_bits, packed, pulled, rounded, same, unpacked, with_adapter
from worlds import World, case_world, run_case

pytest.importorskip("bitsandbytes")

KINDS = [
    ("bfloat16", "nf4", True),
    ("uint8", "nf4", False),
    ("float32", "fp4", True),
]


def serve(model: Any, **options: Any) -> WeightServer:
    return WeightServer(model, **{"base_port": 0, "use_ucx": False, "merge": True, **options})


@pytest.fixture(scope="module", params=[2, 3])
def world(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("packed")
    with case_world(request.param, folder, "merge_ranks.py") as ranks:
        yield ranks


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_values_of_bitsandbytes_in_a_world(world: World, how: tuple[Any, ...]) -> None:
    run_case(world, "dequantized", *how)


def test_fp8_of_what_is_dequantized_and_merged(world: World) -> None:
    run_case(world, "dequantized", *KINDS[0], quantize="fp8")


@pytest.mark.parametrize("most", [4096, 1 << 24])
@pytest.mark.parametrize("how", KINDS, ids=str)
def test_values_of_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, how: tuple[Any, ...], most: int
) -> None:
    monkeypatch.setattr(_packed4, "_MOST", most)
    model = four_bits(*how)
    with serve(model) as server:
        server.publish(0)
        same({k: v + 0 for k, v in pulled(server).items()}, unpacked(model))
        config = json.loads(server._runs["full:0"].metadata["config"])
    assert "quantization_config" not in config and config["hidden_size"] == 136


def test_fp8_of_what_is_dequantized() -> None:
    model = four_bits()
    with serve(model, quantize="fp8") as server:
        server.publish(0)
        got = pulled(server)
        fits_in_half(server, got)
    same(got, rounded(unpacked(model), got))


@pytest.mark.parametrize("how", KINDS[:2], ids=str)  # of FP4 the sign of zeros is not told
def test_fp8_of_a_part_at_a_time(how: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transform.Cut.__new__, "__defaults__", (1 << 15,))
    model = four_bits(*how)
    with serve(model, quantize="fp8") as server:
        server.publish(0)
        got = pulled(server)
        assert fits_in_half(server, got) == 2 * 128 * 200 < 2 * 136 * 200
    same(got, rounded(unpacked(model), got))


def lost() -> Any:
    model = four_bits()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "quant_state"):
            module.quant_state = module.weight.quant_state = None
    return model


def for_inference() -> Any:
    model = four_bits()
    query = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    query.weight.quant_state.packing_format_for_cpu = True
    return model


def eight_bits() -> Any:
    import bitsandbytes as bnb

    model = packed("bfloat16", "nf4", True)
    model.model.layers[0].mlp.up_proj = bnb.nn.Linear8bitLt(136, 200, bias=False)
    return with_adapter(model, r=2, target_modules=["q_proj"])


def adapted_eight_bits() -> Any:
    import bitsandbytes as bnb

    base = packed("bfloat16", "nf4", True)
    base.model.layers[0].mlp.up_proj = bnb.nn.Linear8bitLt(136, 200, bias=False)
    base.is_loaded_in_8bit = True
    return with_adapter(base, r=2, target_modules=["up_proj"])


REFUSED = {
    "no state": (lost, StateError, "without its quant_state", "before it is sharded"),
    "packed anew": (for_inference, StateError, "packed anew for inference", "train()"),
    "8 bits": (eight_bits, RequestError, "up_proj.weight' .* Linear8bitLt", "dequantize"),
    "8 bits with LoRA": (
        adapted_eight_bits,
        RequestError,
        "layers.0.mlp.up_proj' is PEFT's Linear8bitLt",
        "AdapterServer",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_dequantized_is_refused(what: str) -> None:
    make, kind, text, remedy = REFUSED[what]
    with pytest.raises(kind, match=text) as caught:
        serve(make())
    assert remedy in caught.value.remedy


def test_packed_weights_without_merging_are_refused() -> None:
    with pytest.raises(RequestError, match="Linear4bit, which packs") as caught:
        serve(packed("bfloat16", "nf4", True), merge=False)
    assert "merge=True" in caught.value.remedy


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = four_bits()
    with serve(model) as server:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(RequestError, match="4 bits, which cannot be imported") as caught:
            server.publish(0)
        assert "install bitsandbytes" in caught.value.remedy
        monkeypatch.undo()
        server.publish(0)


def test_what_no_adapter_touches_is_dequantized_too() -> None:
    model = four_bits()
    untouched = model.get_base_model().model.layers[0].mlp.up_proj
    assert untouched.weight.dtype is torch.bfloat16 and untouched.weight.shape[1] == 1
    with serve(model) as server:
        server.publish(0)
        assert pulled(server)["model.layers.0.mlp.up_proj.weight"].shape == (200, 136)
