# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang's for tests: block fp8 on any CPU, where SGLang's own kernel wants AMX.

Weights and scales stay as they are loaded, which is what SGLang leaves of them on Hopper. They are
spread before they are multiplied, as its kernel for CPUs does: activations are not quantized.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch
    from sglang.srt.layers.quantization import fp8, fp8_utils

    def linear(
        input: Any,
        weight: Any,
        block_size: list[int],
        weight_scale: Any,
        input_scale: Any = None,
        bias: Any = None,
    ) -> Any:
        wide = fp8_utils.block_quant_dequant(weight, weight_scale, block_size, input.dtype)
        return torch.nn.functional.linear(input, wide, bias)

    fp8._is_cpu = False
    fp8_utils.triton_w8a8_block_fp8_linear = linear
