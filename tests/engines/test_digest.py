# SPDX-License-Identifier: Apache-2.0
"""Digests of boxes add up to the whole's, and tell elements and their places apart."""

from __future__ import annotations

import pytest
import torch
from fanin import _digest
from fanin._digest import MODULUS, box_digest, digest_sum
from fanin._tensors import Box, Shard
from fanin.errors import StateError
from fanin.torch import _proof


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(7,), (6, 10), (3, 4, 5)])
def test_boxes_add_up(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (torch.randn(shape) * 50).to(dtype)
    digest = box_digest(whole)
    assert 0 <= digest < MODULUS
    for dim, size in enumerate(shape):
        parts = []
        for first, length in ((0, 1), (1, size - 1)):
            offset = [first if at == dim else 0 for at in range(len(shape))]
            parts.append(box_digest(whole.narrow(dim, first, length), offset))
        assert digest_sum(parts) == digest
    turned = whole.transpose(0, -1).contiguous().transpose(0, -1)
    monkeypatch.setattr(_digest, "_CHUNK", {"cpu": 4})
    assert box_digest(turned) == digest  # of any strides, in any pieces


def test_elements_and_places_count() -> None:
    whole = torch.randn(6, 8).to(torch.bfloat16)
    digest = box_digest(whole)
    assert box_digest(whole.flip(0)) != digest != box_digest(whole.flip(1))
    for place in ((0, 0), (5, 7), (2, 3)):
        changed = whole.clone()
        changed[place] += 1
        assert box_digest(changed) != digest
    square = torch.randn(5, 5)
    assert box_digest(square) != box_digest(square.t())
    assert box_digest(torch.tensor(0.0)) != box_digest(torch.tensor(-0.0))
    assert box_digest(torch.empty(0, 3)) == 0


class _Held:
    """Stands for a rank's parameters: boxes of F32 that begin at these places."""

    def __init__(self, boxes: list[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
        self._boxes = boxes

    def held(self) -> list[object]:
        return [
            (
                Shard("w", "F32", (12, 4), (), -1),
                Box(place, tuple(values.shape), values.stride(), values.data_ptr()),
                values,
            )
            for values, place in self._boxes
        ]


def test_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, scalar, none = torch.randn(9, 4), torch.randn(()), torch.randn(0, 4)
    expected = [
        box_digest(whole.to(torch.bfloat16), (3, 0)),
        box_digest(scalar.to(torch.bfloat16)),
        box_digest(none.to(torch.bfloat16)),
    ]
    monkeypatch.setattr(_proof, "_ROUNDED", 8)
    held = _Held([(whole, (3, 0)), (scalar, ()), (none, (0, 0))])
    assert [one.digests["BF16"] for one in _proof._held(held)] == expected


def test_a_model_that_has_changed() -> None:
    proof = _proof.Proof("full:0", 0, [_proof.Layout("w", "F32", (1,), (((0,), (1,)),))], [200])

    class Nothing:
        devices = ()

        def held(self) -> list[object]:
            return []

    with pytest.raises(StateError, match="other parts"):
        proof.publish(None, Nothing(), 1)  # type: ignore[arg-type]


def test_digests_that_nobody_asked_for_take_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(_proof.time, "monotonic", lambda: clock[0])

    def due(took: float, steps: int = 32) -> list[int]:
        proof = _proof.Proof("full:0", 0, [], [64])
        proof._took = took
        found = []
        for step in range(1, steps + 1):
            clock[0] += 10.0
            if proof.due():
                found.append(step)
        return found

    assert due(0.09) == list(range(1, 33))
    slow, slower = due(0.25), due(0.35)
    assert slow == slower == [4 * n for n in range(1, 9)]
    assert due(0.7) == [8, 16, 24, 32], "what the slowest rank digests all others do"
    assert due(100.0) == []
