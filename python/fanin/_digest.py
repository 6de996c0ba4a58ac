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

__all__ = ["MODULUS", "box_digest", "digest_sum"]

MODULUS = 1 << 64
_CHUNK = 1 << 22
"""Elements that are widened to 64 bits at a time."""
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def digest_sum(digests: Iterable[int]) -> int:
    """The digest of the boxes together; they must not overlap."""
    return sum(digests) % MODULUS


def box_digest(values: Any, offset: Sequence[int] = ()) -> int:
    """The digest of a box of a tensor.

    Args:
        values: the box's elements, a ``torch.Tensor`` of any strides, on any device. It is read on
            the device's current stream, and the call waits for the result.
        offset: the index of the box's first element in the tensor, zeros unless it is given.

    Returns:
        A number below 2**64. Elements count by their bits: -0.0 is not 0.0, a NaN equals itself.
    """
    import torch

    with torch.no_grad():
        bits = values.detach()
        bits = bits.view(getattr(torch, _BITS[bits.element_size()]))
        if bits.dim() == 0:
            bits = bits.reshape(1)
        start = list(offset) or [0] * bits.dim()
        weights = [
            _weights(dim, first, size, bits.device)
            for dim, (first, size) in enumerate(zip(start, bits.shape, strict=True))
        ]
        if bits.numel() == 0:
            return 0
        rows = max(1, _CHUNK * bits.shape[0] // bits.numel())
        total = 0
        for row in range(0, bits.shape[0], rows):
            part = bits[row : row + rows].to(torch.int64)
            for weight in reversed(weights[1:]):
                part = part.mul_(weight).sum(-1)
            total += int((part * weights[0][row : row + rows]).sum())
        return total % MODULUS


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
