# SPDX-License-Identifier: Apache-2.0
"""What an adapter directory must be to PEFT: whole, the trainer's, and computing the same."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import logits
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

WEIGHTS = "adapter_model.safetensors"


@dataclass
class Original:
    """An adapter as the trainer has it."""

    tensors: dict  # PEFT's name on disk: tensor
    config: dict  # fields that the pulled configuration must have, with these values
    make_base: Callable  # a new base model
    logits: torch.Tensor  # what the adapted model computes
    converted: bool = False  # PEFT loads the tensors into others than those of the file


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def check_tensors(directory, original):
    found = load_file(directory / WEIGHTS)
    same_tensors(found, original.tensors)


def same_tensors(found, expected):
    for name in sorted(found.keys() ^ expected.keys()):
        raise AssertionError(f"{name} is {'unexpected' if name in found else 'missing'}")
    for name, tensor in expected.items():
        other = found[name]
        assert other.dtype == tensor.dtype, f"{name} has dtype {other.dtype}, not {tensor.dtype}"
        assert other.shape == tensor.shape, f"{name} has another shape"
        assert torch.equal(bits(other), bits(tensor)), f"{name} has other values"


def check_config(directory, original):
    config = PeftConfig.from_pretrained(directory).to_dict()
    for field, value in original.config.items():
        assert config[field] == value, f"{field} is {config[field]}, not {value}"


def load_whole(directory, base):
    """The base model with the adapter; every tensor of the file has a place, and the reverse."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, directory, autocast_adapter_dtype=False)
    for warning in caught:
        assert "adapter keys" not in str(warning.message), str(warning.message)
    result = model.load_adapter(directory, "default", autocast_adapter_dtype=False)
    assert not result.missing_keys, f"missing: {result.missing_keys[:3]}"
    assert not result.unexpected_keys, f"unexpected: {result.unexpected_keys[:3]}"
    return model.eval()


def check_model(directory, original):
    base = original.make_base()
    before = logits(base)
    model = load_whole(directory, base)
    if not original.converted:
        embedding = any("embed_tokens.base_layer" in name for name in original.tensors)
        state = get_peft_model_state_dict(model, save_embedding_layers=embedding)
        same_tensors(state, load_file(directory / WEIGHTS))
    after = logits(model)
    assert torch.isfinite(after).all(), "the logits are not finite"
    assert not torch.equal(after, before), "the adapter changes nothing"
    assert torch.equal(after, original.logits), "other logits than the trainer's model"


def check(directory, original):
    check_tensors(directory, original)
    check_config(directory, original)
    check_model(directory, original)


def check_shapes(directory, model):
    """The layers that PEFT makes from the configuration have the file's names and shapes."""
    config = PeftConfig.from_pretrained(directory)
    adapted = PeftModel(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    made = {
        name: list(tensor.shape)
        for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items()
    }
    with safe_open(directory / WEIGHTS, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}
    for name in sorted(made.keys() ^ found.keys()):
        raise AssertionError(f"{name} is {'unexpected' if name in found else 'missing'}")
    for name, shape in made.items():
        assert found[name] == shape, f"{name} has shape {found[name]}, PEFT makes {shape}"
    return config
