# SPDX-License-Identifier: Apache-2.0
"""fp8 checkpoints in small, what publishes them, and a kernel with which vLLM runs them on CPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fp8_rule
import torch
from full_models import random_model
from vllm_server import save_tokenizer
from weights_engine import FP8_KERNEL

SKIPPED = ("lm_head",)
BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": list(SKIPPED),
}
_EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": list(SKIPPED),
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT | {"strategy": "token", "dynamic": True},
        }
    },
}
# In block fp8 each of q, k, gate has whole blocks.
FIELDS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}

Tensors = dict[str, torch.Tensor]


def scales_of(weight: torch.Tensor, quantization: dict[str, Any]) -> torch.Tensor:
    """A scale for each block or row: 448 is the largest number of the type."""
    most = weight.float().abs()
    if quantization is CHANNEL:
        return most.amax(dim=1, keepdim=True).clamp(min=1e-4) / 448
    padded = torch.nn.functional.pad(most, (0, -most.shape[1] % 128, 0, -most.shape[0] % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    return blocks.amax(dim=(1, 3)).clamp(min=1e-4) / 448


def spread(scales: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """The scale of each element."""
    rows, columns = shape
    whole = scales.repeat_interleave(128 if scales.shape[0] != rows else 1, 0)[:rows]
    return whole.repeat_interleave(128, 1)[:, :columns] if scales.shape[1] > 1 else whole


def quantized(
    tensors: Tensors, quantization: dict[str, Any], skipped: Iterable[str] = ()
) -> Tensors:
    """The tensors of a checkpoint in fp8 and their scales, but what is *skipped*."""
    name_of = "weight_scale" if quantization is CHANNEL else "weight_scale_inv"
    found = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        plain = (*SKIPPED, "embed_tokens", "mlp.gate", *skipped)
        if tensor.dim() != 2 or leaf != "weight" or module.endswith(plain):
            found[name] = tensor
            continue
        scales = scales_of(tensor, quantization)
        wide = tensor.float() / spread(scales, tensor.shape)
        found[name] = wide.to(torch.float8_e4m3fn)
        found[f"{module}.{name_of}"] = scales
    return found


def whole_in_fp8(tensors: Tensors, end: str, **rule: Any) -> Tensors:
    """A checkpoint as the rule makes it of whole tensors."""
    out = {}
    for name, one in tensors.items():
        if one.dim() != 2 or "embed" in name or "lm_head" in name:
            out[name] = one
            continue
        bytes_, scales = fp8_rule.rounded(one.float().numpy(), **rule)
        out[name] = torch.from_numpy(bytes_).view(torch.float8_e4m3fn)
        out[name + end] = torch.from_numpy(scales)
    return out


def random_tensors(kind: str = "qwen3", seed: int = 1, **fields: Any) -> Tensors:
    """A checkpoint in BF16."""
    model = random_model(kind, seed=seed, **(FIELDS | fields))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def save(
    directory: Path, tensors: Tensors, quantization: dict[str, Any] | None, kind: str = "qwen3"
) -> Path:
    """A directory that vLLM loads."""
    from safetensors.torch import save_file

    random_model(kind, **FIELDS).save_pretrained(directory)
    save_tokenizer(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        file = directory / "config.json"
        config = json.loads(file.read_text()) | {"quantization_config": quantization}
        file.write_text(json.dumps(config))
    return directory


class Holder(torch.nn.Module):
    """A trainer's own quantized tensors, which it publishes as they are."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.named = list(tensors)
        for index, tensor in enumerate(tensors.values()):
            self.register_parameter(f"p{index}", torch.nn.Parameter(tensor.clone(), False))

    def name_of(self, name: str, shape: Any) -> str:
        return self.named[int(name.removeprefix("p"))]

    def set(self, tensors: Tensors) -> None:
        for index, name in enumerate(self.named):
            getattr(self, f"p{index}").copy_(tensors[name])


@contextmanager
def publishing(
    tensors: Tensors, quantization: dict[str, Any] | None, **fields: Any
) -> Iterator[Any]:
    """The server and the holder of a trainer of one rank; step 1 is published."""
    from fanin.torch import WeightServer

    config = json.loads(random_model("qwen3", **(FIELDS | fields)).config.to_json_string())
    if quantization is not None:
        config["quantization_config"] = quantization
    holder = Holder(tensors)
    server = WeightServer(holder, base_port=0, names=holder.name_of, config=config)
    with server:
        server.publish(1)
        yield server, holder


def install_kernel() -> None:
    """Appends a kernel of block fp8 to vLLM's, whose own for CPUs want AMX. Experts of fp8 have
    the layout of Triton's kernels, which no CPU runs.

    In an environment with "requantizes" it makes of the weights what DeepGEMM makes of them:
    scales that are powers of two, laid out by columns.
    """
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS as kernels
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as blocks
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.model_executor.utils import replace_parameter
    from vllm.platforms.interface import PlatformEnum

    class Reference(blocks.Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> tuple[bool, None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, None]:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            if os.environ.get(FP8_KERNEL) != "requantizes":
                return
            held = self._get_layer_params(layer)
            weight, scale = held.weight.data, held.block_scale.data
            fp8_utils.requant_weight_ue8m0_inplace(weight, scale, [128, 128])
            replace_parameter(layer, held.WEIGHT, weight)
            replace_parameter(layer, held.block_scale_attr, scale.t().contiguous().t())

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            wide = B.float() * spread(Bs, B.shape)
            return torch.nn.functional.linear(A, wide.to(A.dtype))

    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, None)
    if not any(one.__name__ == "Reference" for one in kernels[PlatformEnum.CPU]):
        kernels[PlatformEnum.CPU].append(Reference)
