# SPDX-License-Identifier: Apache-2.0
"""Quantized models of vLLM, without an engine around them: what fills them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from families import FAMILIES, Engine, Family, Layout, checkpoint
from fanin.mapping._checks import refuse_other_modules
from fanin.vllm import reload
from fanin.vllm.weights import Engine as Backend
from fanin.vllm.weights import InitInfo
from quantized import (
    BLOCK,
    CHANNEL,
    FIELDS,
    install_kernel,
    publishing,
    quantized,
    random_tensors,
)
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from weights_engine import FP8_KERNEL

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"

install_kernel()


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return random_tensors()


@contextmanager
def engine_of(
    folder: Path, config: dict[str, Any] | None, processed: bool = True, **options: Any
) -> Iterator[Any]:
    """The backend of a model that vLLM makes with this `quantization_config`."""
    qwen = FAMILIES["qwen3"]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    family = Family(qwen.architecture, qwen.config, qwen.options | FIELDS | sizes)
    configuration = family.configuration()
    if config is not None:
        configuration.quantization_config = config
    engine = Engine(folder, family, Layout(1), configuration, **options)
    with engine.rank(0) as model:
        record_metadata_for_reloading(model)
        if processed:
            with torch.no_grad(), set_current_vllm_config(engine.config):
                for parameter in model.parameters():
                    parameter.data.fill_(1)
                process_weights_after_loading(model, engine.config.model_config, CPU)
        backend = Backend(WeightTransferConfig(backend="nccl"), engine.config, CPU, model)
        yield backend
        backend.shutdown()


def told(server: Any, **fields: Any) -> InitInfo:
    return InitInfo(server.addresses, timeout=60, **fields)


@pytest.mark.parametrize(("config", "kernel"), [(BLOCK, ""), (BLOCK, "requantizes"), (CHANNEL, "")])
def test_what_it_holds_is_seen(
    config: Any, kernel: str, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a false alarm, weights as well as scales."""
    monkeypatch.setenv(FP8_KERNEL, kernel)
    tensors = quantized(plain, config)
    with publishing(tensors, config) as (server, _), engine_of(tmp_path, config) as one:
        one.init_transfer_engine(told(server))
        one.start_weight_update()
        one.update_weights({"step": 1})
        one.finish_weight_update()
        one.reset_weight_update_target()
        for poison in (False, True):
            found = one.check(1, poison)
            assert found["different"] == [] and found["unseen"] == []
        module = one.model.get_submodule(DOWN)
        scale = next(n for n, _ in module.named_parameters() if n.startswith("weight_scale"))
        getattr(module, scale).data[0, 0] *= 2
        assert one.check(1, poison=False)["different"] == [f"{DOWN}.{scale}"]


@pytest.mark.parametrize("width", [192, 256])
def test_experts_that_tensor_parallelism_cuts_within_a_block(width: int, tmp_path: Path) -> None:
    """vLLM computes their scales: its loader fills them, and that is no other quantization."""
    whole = FAMILIES["qwen3-moe-fp8"]
    family = replace(whole, options=whole.options | {"moe_intermediate_size": width})
    published = checkpoint(family.configuration())
    engine = Engine(tmp_path, family, Layout(2))
    with engine.rank(1) as model:
        recording = reload.record_model(published, model, engine.config)
        refuse_other_modules(recording, lambda _: recording, None, None, "%s")
        modules = recording.mapping(fallback=True).modules
    by_loader = {module.path for module in modules if module.fallback}
    experts = {f"model.layers.{n}.mlp.experts.routed_experts" for n in range(2)}
    assert by_loader == (set() if width == 256 else experts)


def other(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in (BLOCK | fields).items() if value is not None}


MORE = other(modules_to_not_convert=[*BLOCK["modules_to_not_convert"], DOWN])
TENSOR = other(weight_block_size=None)
STATIC = other(weight_block_size=None, activation_scheme="static")
NOT_CONVERT = "modules_to_not_convert of the engine"
# Of the trainer: how it quantizes, what it skips; of the engine, too; what the error names, and
# what if the trainer does not tell how it quantizes.
PAIRS: dict[str, tuple[Any, ...]] = {
    "plain engine": (BLOCK, (), None, ['"fp8"', '"none"'], ["the trainer quantizes", "down_proj"]),
    "plain trainer": (None, (), BLOCK, ["engine quantizes", "down_proj"], ['quantize="fp8"']),
    "online engine": (BLOCK, (), "fp8_per_block", ['"fp8"', '"fp8_per_block"'], None),
    "other method": (BLOCK, (), CHANNEL, ['"fp8"', '"compressed-tensors"'], ["no such scales"]),
    "other blocks": (
        *(BLOCK, (), other(weight_block_size=[64, 64])),
        *(["[128, 128]", "[64, 64]"], ["no such scales", "weight_scale_inv"]),
    ),
    "a scale for all": (BLOCK, (), TENSOR, ["[128, 128]", "null"], ["no such scales"]),
    "static": (BLOCK, (), STATIC, ["[128, 128]", '"dynamic"', '"static"'], ["no such scales"]),
    "trainer skips": (MORE, (DOWN,), BLOCK, *[[DOWN, f"add them to {NOT_CONVERT}"]] * 2),
    "engine skips": (BLOCK, (), MORE, *[[DOWN, f"take them out of {NOT_CONVERT}"]] * 2),
}


@pytest.mark.parametrize("told_so", [True, False])
@pytest.mark.parametrize("case", PAIRS)
def test_another_quantization_is_refused(
    case: str, told_so: bool, plain: Any, tmp_path: Path
) -> None:
    """By the names of what differs, and with what helps: `mode` does not."""
    theirs, skipped, mine, says, untold = PAIRS[case]
    if not told_so:
        says = untold
    tensors = quantized(plain, theirs, skipped) if theirs else plain
    options = {"quantization": mine} if isinstance(mine, str) else {}
    config = mine if isinstance(mine, dict) else None
    with (
        publishing(tensors, theirs if told_so else None) as (server, _),
        engine_of(tmp_path, config, processed=False, **options) as one,
    ):
        for mode in ("auto", "loader") if says else ():
            with pytest.raises(fanin.RequestError) as caught:
                one.init_transfer_engine(told(server, mode=mode))
            text = str(caught.value)
            assert not [one for one in says if one not in text], text
            assert '"mode"' not in caught.value.remedy, text
            assert ("hf_overrides" in caught.value.remedy) is (theirs is not None), text
