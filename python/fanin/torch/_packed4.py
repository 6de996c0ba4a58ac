# SPDX-License-Identifier: Apache-2.0
"""Weights that bitsandbytes packs in 4 bits (NF4, FP4): dequantized, each rank its own part.

A weight is stored as a flat range of packed values, and its scales lie whole on every rank. FSDP2
gives each rank a piece of the range, which may begin inside of a row or of a block of values.
"""

from __future__ import annotations

from typing import Any

import torch

from fanin._cover import Part
from fanin.errors import RequestError, StateError
from fanin.torch._transform import Values, parts_of

__all__ = ["is_packed4", "unpack4"]

_LINEAR = ("bitsandbytes.nn.modules", "Linear4bit")
_MOST = 16 << 20
"""Elements that are dequantized at a time; blocks have a power of two, at most 4,096."""


def is_packed4(module: Any, attribute: str) -> bool:
    """Whether the parameter is a weight of bitsandbytes' Linear4bit."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    return attribute == "weight" and _LINEAR in kinds


def unpack4(name: str, module: Any, attribute: str, tensor: Any) -> Values | None:
    """A transform: the values of a weight that is packed in 4 bits."""
    if not is_packed4(module, attribute):
        return None
    state = _state_of(name, module, tensor)
    shape = tuple(state.shape)
    lengths = [(first, packed.numel() * 2) for first, packed in _ranges(name, tensor)]
    parts = tuple(part for first, count in lengths for part in _parts(first, count, shape))

    def fill(outs: list[Any]) -> None:
        now = module._parameters[attribute]
        state = _state_of(name, module, now)
        scales, left = _scales(state), iter(outs)
        for first, packed in _ranges(name, now):
            rows = [next(left).view(-1) for _ in _parts(first, packed.numel() * 2, shape)]
            _fill(packed, first, state, scales, rows)

    return Values(shape, state.dtype, parts, fill)


def _state_of(name: str, module: Any, tensor: Any) -> Any:
    """What bitsandbytes knows of the packed values; sharding leaves it with the module alone."""
    state = getattr(tensor, "quant_state", None) or getattr(module, "quant_state", None)
    if state is None:
        raise StateError.make(
            f"'{name}' is a weight of bitsandbytes' Linear4bit without its quant_state",
            "move the model to its device before it is sharded, which packs the weight; or load it "
            "by from_pretrained(quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
            key=name,
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise StateError.make(
            f"'{name}' is packed anew for inference on this CPU, as bitsandbytes does it in a "
            "forward without gradients in eval()",
            "load the base again, and call train() before a forward",
            key=name,
        )
    return state


def _ranges(name: str, tensor: Any) -> list[tuple[int, Any]]:
    """This rank's pieces of the flat range: the number of their first value, and their bytes."""
    out = []
    for offset, view in parts_of(tensor, name):
        rows, columns = offset[0], offset[1] if len(offset) > 1 else 0
        first = (rows * tensor.shape[-1] + columns) * view.element_size() * 2
        out.append((first, view.reshape(-1).view(torch.uint8)))
    return out


def _parts(first: int, count: int, shape: tuple[int, ...]) -> list[Part]:
    """A flat range of a matrix as at most three boxes: a row's end, rows, a row's beginning."""
    columns, end = shape[1], min(first + count, shape[0] * shape[1])
    out: list[Part] = []
    while first < end:
        row, column = divmod(first, columns)
        if column or end - first < columns:
            extent = (1, min(columns - column, end - first))
        else:
            extent = ((end - first) // columns, columns)
        out.append(((row, column), extent))
        first += extent[0] * extent[1]
    return out


def _scales(state: Any) -> Any:
    """Of all blocks, in F32."""
    if not state.nested:
        return state.absmax.float()
    scales = _functional().dequantize_blockwise(state.absmax, state.state2)
    return (scales + state.offset).float()


def _fill(packed: Any, first: int, state: Any, scales: Any, outs: list[Any]) -> None:
    """Writes the values of that range, one after the other, to the *outs*."""
    size = state.blocksize
    at, end = first, first + sum(out.numel() for out in outs)
    left = list(outs)
    while at < end:
        stop = min((at // _MOST + 1) * _MOST, end)
        lead, blocks = at % size, -(-stop // size) - at // size
        held = packed[(at - first) // 2 : (stop - first + 1) // 2]
        if held.numel() * 2 != blocks * size:  # blocks of which this rank has a part
            whole = held.new_zeros(blocks * size // 2)
            whole[lead // 2 : lead // 2 + held.numel()] = held
            held = whole
        mine = scales[at // size : at // size + blocks].to(held.device).contiguous()
        values = _dequantized(held, mine, state)[lead : lead + stop - at]
        while values.numel():
            n = min(values.numel(), left[0].numel())
            left[0][:n].copy_(values[:n])
            values, left[0] = values[n:], left[0][n:]
            if not left[0].numel():
                left.pop(0)
        at = stop


def _dequantized(packed: Any, scales: Any, state: Any) -> Any:
    functional = _functional()
    of_part = functional.QuantState(
        absmax=scales,
        shape=torch.Size((packed.numel() * 2,)),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    return functional.dequantize_4bit(packed.view(-1, 1), quant_state=of_part).view(-1)


def _functional() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise RequestError.make(
            f"the model has weights of bitsandbytes in 4 bits, which cannot be imported: {error}",
            "install bitsandbytes on every rank: it computes what the packed values are",
        ) from error
    return functional
