# SPDX-License-Identifier: Apache-2.0
"""Weights that bitsandbytes packs in 4 bits (NF4, FP4): dequantized, each rank its own part.

A weight is stored as a flat range of packed values, and its scales lie whole on every rank. FSDP2
gives each rank a piece of the range, which may begin inside of a row or of a block of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fanin._cover import Part
from fanin.errors import RequestError, StateError
from fanin.torch._transform import Cut, Parted, parted, parts_of

_LINEAR = ("bitsandbytes.nn.modules", "Linear4bit")
_MOST = 4 << 20
"""Elements that are dequantized at a time; blocks have a power of two, at most 4,096."""


def is_packed4(module: Any, attribute: str) -> bool:
    """Whether the parameter is a weight of bitsandbytes' Linear4bit."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(module).__mro__)
    return attribute == "weight" and _LINEAR in kinds


def unpack4(
    name: str, module: Any, attribute: str, tensor: Any, cut: Cut | None = None
) -> Parted | None:
    """A transform: the values of a weight that is packed in 4 bits; cut: large parts of it."""
    if not is_packed4(module, attribute):
        return None
    state = _state_of(name, module, tensor)
    shape = tuple(state.shape)
    whole = [
        part
        for first, packed in _ranges(name, tensor)
        for part in _parts(first, packed.numel() * 2, shape)
    ]
    parts = tuple(one for part in whole for one in (cut.of(part, 2) if cut else [part]))

    def begin() -> Callable[[int, Any], None]:
        now = module._parameters[attribute]
        state = _state_of(name, module, now)
        scales, ranges = _scales(state), _ranges(name, now)

        def compute(number: int, out: Any) -> None:
            row, column = parts[number][0]
            at = row * shape[1] + column
            first, packed = max((one for one in ranges if one[0] <= at), key=lambda one: one[0])
            _fill(packed, first, state, scales, at, out)

        return compute

    return parted(shape, state.dtype, parts, begin)


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


def _fill(packed: Any, first: int, state: Any, scales: Any, at: int, out: Any) -> None:
    """Writes the values from number *at* on to *out*; first: the number of the first packed one."""
    size, end, left = state.blocksize, at + out.numel(), out.view(-1)
    while at < end:
        stop = min((at // _MOST + 1) * _MOST, end)
        even = at - at % 2  # two values a byte
        lead, blocks = even % size, -(-stop // size) - even // size
        held = packed[(even - first) // 2 : (stop - first + 1) // 2]
        if held.numel() * 2 != blocks * size:  # blocks of which this rank has a part
            whole = held.new_zeros(blocks * size // 2)
            whole[lead // 2 : lead // 2 + held.numel()] = held
            held = whole
        mine = scales[even // size : even // size + blocks].to(held.device).contiguous()
        values = _dequantized(held, mine, state)[lead + at - even : lead + stop - even]
        left[: stop - at].copy_(values)
        left, at = left[stop - at :], stop


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
