# SPDX-License-Identifier: Apache-2.0
"""Digests of tensors that are held in parts.

The digest of a tensor is the sum of its elements' bits, each times a weight that follows from the
element's index, modulo 2**64. So the digests of boxes that tile a tensor add up to the digest of
the tensor, however it is cut: a trainer's ranks and an engine's workers digest what they hold, and
the sums compare. One changed element changes the digest. A sum proves nothing against a forger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MODULUS = 1 << 64
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that are widened to 64 bits at a time: they stay in a processor's cache."""
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}

Offset = Sequence[int]


def digest_sum(digests: Iterable[int]) -> int:
    """The digest of the boxes together; they must not overlap."""
    return sum(digests) % MODULUS


def box_digest(values: Any, offset: Offset = ()) -> int:
    """The digest of one box, see :func:`box_digests`."""
    (digest,) = box_digests([(values, offset)])
    return digest


def box_digests(boxes: Iterable[tuple[Any, Offset]]) -> list[int]:
    """The digests of boxes of tensors.

    Args:
        boxes: pairs. The first is the box's elements, a ``torch.Tensor`` of any strides, on any
            device. The second is the index of its first element in the whole tensor, ``()`` for
            zeros. Devices are read on their current streams. The call waits for them once, at its
            end.

    Returns:
        Numbers below 2**64. Elements count by their bits: -0.0 is not 0.0, a NaN equals itself.
    """
    import torch

    with torch.no_grad():
        known: dict[tuple[Any, ...], Any] = {}  # weights: experts have few shapes
        sums = [_sum_of(values.detach(), offset, known) for values, offset in boxes]
        out = [0] * len(sums)
        for device in {one.device for one in sums}:
            places = [i for i, one in enumerate(sums) if one.device == device]
            for i, digest in zip(
                places, torch.stack([sums[i] for i in places]).tolist(), strict=True
            ):
                out[i] = digest % MODULUS
        return out


def _sum_of(values: Any, offset: Offset, known: dict[tuple[Any, ...], Any]) -> Any:
    """The digest as a tensor of one int64."""
    import torch

    bits = values.view(getattr(torch, _BITS[values.element_size()]))
    if bits.dim() == 0:
        bits = bits.reshape(1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if bits.numel() == 0:
        return total
    start = list(offset) or [0] * bits.dim()
    weights = []
    for at in zip(range(bits.dim()), start, bits.shape, strict=True):
        key = (*at, bits.device)
        if key not in known:
            known[key] = _weights(*key)
        weights.append(known[key])
    rows = max(1, _CHUNK.get(bits.device.type, 1 << 18) * bits.shape[0] // bits.numel())
    for row in range(0, bits.shape[0], rows):
        part = bits[row : row + rows].to(torch.int64, copy=True)  # of I64, too
        for weight in reversed(weights[1:]):
            part = part.mul_(weight).sum(-1)
        total += (part * weights[0][row : row + rows]).sum()
    return total


def _weights(dim: int, first: int, size: int, device: Any) -> Any:
    """Odd numbers of 64 bits for *size* indices of a dimension from *first* on (splitmix64)."""
    import torch

    at = torch.arange(first + 1, first + 1 + size, dtype=torch.int64, device=device)
    mixed = at * _signed(0x9E3779B97F4A7C15) + _signed(0xD1B54A32D192ED03 * (dim + 1))
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(number: int) -> int:
    number %= MODULUS
    return number - MODULUS if number >= MODULUS // 2 else number


def _shifted(numbers: Any, by: int) -> Any:
    """A shift that fills with zeros; that of int64 copies the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
