# SPDX-License-Identifier: Apache-2.0
"""Adapters that are not plain LoRA, and models that are not plain weights: published whole, as PEFT
saves them, or refused by name."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from fanin.errors import RequestError
from fanin.torch import WeightServer
from models import TINY, same_tensors
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.config import KasaConfig, MontecloraConfig, VeloraConfig
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from test_torch_server import BASE, Base, Puller, adapted, fill, lora, serve, values
from transformers import AutoModelForCausalLM

FIRST = "base_model.model.layers.0.q_proj"
TOKENS = torch.arange(8).reshape(1, 8)


@pytest.fixture
def pull(tmp_path):
    return Puller(tmp_path)


def output(model):
    with torch.no_grad():
        return model.eval()(TOKENS)


# ------------------------------------------------------------------------------- variants of LoRA


def test_the_diagonal_of_kasa_is_published(pull):
    model = adapted(lora(kasa_config=KasaConfig()))
    with serve(model) as server:
        server.publish(0)
        same_tensors(pull(server)[1], values(model))
        assert f"{FIRST}.lora_diag" in values(model)
    torch.manual_seed(1)
    assert torch.equal(output(PeftModel.from_pretrained(Base(), pull.path)), output(model))


@pytest.mark.parametrize(
    "options",
    [{"velora_config": VeloraConfig()}, {"monteclora_config": MontecloraConfig()}],
    ids=lambda options: next(iter(options)),
)
def test_what_only_training_uses_is_not_published(pull, options):
    model = adapted(lora(**options))
    with serve(model) as server:
        server.publish(0)
        same_tensors(
            pull(server)[1], {k: v for k, v in values(model).items() if k.endswith("weight")}
        )
    torch.manual_seed(1)
    assert torch.equal(output(PeftModel.from_pretrained(Base(), pull.path)), output(model))


def with_parameter(layer):
    layer.lora_gate = torch.nn.ParameterDict({"default": torch.nn.Parameter(torch.ones(3))})


def with_buffer(layer):
    layer.lora_gate = torch.nn.Module()
    layer.lora_gate.register_buffer("default", torch.ones(3))


def with_parametrization(layer):
    torch.nn.utils.parametrizations.weight_norm(layer.lora_A["default"])


@pytest.mark.parametrize(
    "change, part",
    [
        (with_parameter, "lora_gate.default"),
        (with_buffer, "lora_gate.default"),
        (with_parametrization, "lora_A.default.parametrizations.weight.original0"),
    ],
)
def test_unknown_parts_of_an_adapter_are_refused(change, part):
    model = adapted()
    with serve(model) as server:
        change(model.base_model.model.layers[0].q_proj)
        with pytest.raises(RequestError) as caught:
            server.publish(1)
    assert caught.value.key == f"{FIRST}.{part}"
    assert caught.value.key in caught.value.message and "LoraConfig" in caught.value.remedy


def test_parts_of_other_adapters_are_not_refused(pull):
    model = adapted()
    model.add_adapter("other", lora())
    layer = model.base_model.model.layers[0].q_proj
    layer.lora_gate = torch.nn.ParameterDict({"other": torch.nn.Parameter(torch.ones(3))})
    with serve(model, adapter="default") as server:
        server.publish(0)
        same_tensors(pull(server)[1], values(model))


def test_tied_tokens_are_published_once(pull):
    tied = copy.deepcopy(TINY["llama"])
    tied.tie_word_embeddings = True
    config = lora(trainable_token_indices=[1, 5], ensure_weight_tying=True)
    model = get_peft_model(AutoModelForCausalLM.from_config(tied), config)
    model.peft_config["default"].base_model_name_or_path = BASE
    fill(model, 3)
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    with serve(model) as server:
        server.publish(0)
        same_tensors(pull(server)[1], saved)


# ------------------------------------------------------------------------------- other adapters

OTHERS = {
    "ADALORA": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_r=4),
    "IA3": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "VERA": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4),
    "OFT": lambda: peft.OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=4),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["q_proj"]),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(
        token_indices=[1, 2], target_modules=["embed"]
    ),
}


def other(kind):
    model = get_peft_model(Base(), OTHERS[kind]())
    model.peft_config["default"].base_model_name_or_path = BASE
    return model


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_kinds_are_refused(kind):
    with pytest.raises(RequestError, match=f"peft_type {kind}") as caught:
        serve(other(kind))
    assert "LoraConfig" in caught.value.remedy


def test_an_adapter_that_becomes_one_of_another_kind_is_refused(pull):
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        model.peft_config["default"].peft_type = peft.PeftType.ADALORA
        with pytest.raises(RequestError, match="peft_type ADALORA"):
            server.publish(1)
        assert pull(server)[0] == 0


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_kinds_are_no_weights(kind):
    with pytest.raises(RequestError, match="belongs to an adapter") as caught:
        WeightServer(other(kind), base_port=0, use_ucx=False)
    assert kind in str(caught.value) and "merge_and_unload" in caught.value.remedy
    assert ".q_proj" in caught.value.key or ".embed" in caught.value.key


def test_an_adapter_without_layers_is_no_weights():
    model = AutoModelForCausalLM.from_config(TINY["llama"])
    model = get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(RequestError, match="belongs to an adapter .*PROMPT_TUNING"):
        WeightServer(model, base_port=0, use_ucx=False)


@pytest.mark.parametrize("kind", ["ADALORA", "IA3", "OFT"])
def test_what_is_left_of_an_adapter_that_was_merged_is_weights(kind):
    model = other(kind).merge_and_unload()
    model.peft_config = {"default": OTHERS[kind]()}  # as some versions of PEFT leave it
    WeightServer(model, base_port=0, use_ucx=False).close()


# --------------------------------------------------------------------------------------- scales


@pytest.fixture
def hot(tmp_path):
    """A saved adapter of four times the usual scale."""
    adapted(lora(lora_alpha=24), seed=2).save_pretrained(tmp_path / "hot")
    return tmp_path / "hot"


def test_a_swapped_adapter_has_its_own_scale(pull, hot):
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        with pytest.raises(RequestError, match="scale 8.*gives 2") as caught, server.updating(1):
            hotswap_adapter(model, hot, "default", "cpu")
        assert caught.value.key == FIRST and FIRST in caught.value.message
        assert "lora_alpha" in caught.value.remedy
        model.peft_config["default"].lora_alpha = 24
        with server.updating(1):
            pass
        same_tensors(pull(server)[1], values(model))
    assert torch.equal(output(PeftModel.from_pretrained(same_base(), pull.path)), output(model))


def same_base():
    torch.manual_seed(1)
    return Base()


def test_a_scale_that_is_set_for_a_while(pull):
    patterns = {"alpha_pattern": {"v_proj": 1}, "rank_pattern": {"1.q_proj": 5}}
    model = adapted(lora(use_rslora=True, **patterns))
    layer = model.base_model.model.layers[1].q_proj
    with serve(model) as server:
        server.publish(0)
        layer.scale_layer(0.3)
        with pytest.raises(RequestError, match=r"layers\.1\.q_proj"):
            server.publish(1)
        layer.unscale_layer(0.3)
        server.publish(1)
        layer.set_scale("default", 3)
        with pytest.raises(RequestError, match=r"layers\.1\.q_proj"):
            server.publish(2)
        layer.set_scale("default", 1)
        server.publish(2)
        assert pull(server)[0] == 2


def test_patterns_tell_the_scale_of_a_layer():
    model = adapted()
    config = model.peft_config["default"]
    config.alpha_pattern = {"layers.1.q_proj": 12}
    layer = model.base_model.model.layers[1].q_proj
    with serve(model) as server:
        layer.scaling["default"] = 4.0
        server.publish(1)
        config.alpha_pattern = {"layers.0.q_proj": 12}
        with pytest.raises(RequestError, match="scale 4.*gives 2"):
            server.publish(2)


def test_ranks_that_are_padded_do_not_change_the_scale():
    model = adapted()
    prepare_model_for_compiled_hotswap(model, target_rank=6, config=model.peft_config["default"])
    with pytest.raises(RequestError, match="scale 2.*gives 1"):
        serve(model)
    model.peft_config["default"].lora_alpha = 12
    serve(model).close()


# -------------------------------------------------------------------------------- packed weights


class Params4bit(torch.nn.Parameter):
    """Looks like bitsandbytes' class of this name."""


class Bnb4bitParametrization(torch.nn.Module):
    """Looks like bitsandbytes' class of this name."""

    def forward(self, packed):
        return packed.float()


Params4bit.__module__ = "bitsandbytes.nn.modules"
Bnb4bitParametrization.__module__ = "bitsandbytes.nn.parametrize"


def packed_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].weight = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    return model, "0.weight", "Params4bit"


def packed_parametrization():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    torch.nn.utils.parametrize.register_parametrization(
        model[0], "weight", Bnb4bitParametrization(), unsafe=True
    )
    return model, "0.parametrizations.weight.original", "Bnb4bitParametrization"


@pytest.mark.parametrize("make", [packed_parameter, packed_parametrization])
def test_packed_weights_in_modules_of_ones_own_are_refused(make):
    model, path, kind = make()
    with pytest.raises(RequestError, match=f"bitsandbytes' {kind}, which packs") as caught:
        WeightServer(model, base_port=0, use_ucx=False)
    assert caught.value.key == path and "dequantize" in caught.value.remedy


def test_other_parametrizations_are_published():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    WeightServer(model, base_port=0, use_ucx=False).close()
