# SPDX-License-Identifier: Apache-2.0
"""Digests of what is trained and of what is served, compared: pure Python, no PyTorch."""

from __future__ import annotations

import itertools
import math

import pytest
from fanin._served import (
    Held,
    Layout,
    compare,
    digests_of,
    join,
    read,
    room_for,
    size_of,
)
from fanin.errors import PeerError

SHAPE = (4, 6)


def number(offset: tuple[int, ...], extent: tuple[int, ...], salt: int = 0) -> int:
    """Adds up over boxes, as digests do."""
    places = itertools.product(*(range(a, a + n) for a, n in zip(offset, extent, strict=True)))
    return sum(hash((place, salt)) for place in places) % (1 << 64)


def box(offset: tuple[int, ...], extent: tuple[int, ...], salt: int = 0, dtype: str = "BF16"):
    return Held("w", offset, extent, {dtype: number(offset, extent, salt)})


def rank(*held: Held, dtype: str = "BF16"):
    return [Layout("w", dtype, SHAPE, tuple((one.offset, one.extent) for one in held))], list(held)


WHOLE = box((0, 0), SHAPE)
TOP, BOTTOM = box((0, 0), (2, 6)), box((2, 0), (2, 6))
LEFT, RIGHT = box((0, 0), (4, 3)), box((0, 3), (4, 3))


def differences(ranks, workers) -> list[str]:
    return [str(one) for one in compare(join(ranks), workers)[0]]


@pytest.mark.parametrize("ranks", [[rank(WHOLE)], [rank(TOP), rank(BOTTOM)]])
@pytest.mark.parametrize("workers", [[[WHOLE]], [[LEFT], [RIGHT]], [[TOP], [BOTTOM], [TOP]]])
def test_however_it_is_cut(ranks, workers) -> None:
    assert compare(join(ranks), workers) == ([], 1)


def test_boxes_that_overlap_are_counted_once() -> None:
    assert differences([rank(WHOLE), rank(TOP), rank(LEFT)], [[WHOLE], [BOTTOM]]) == []
    # The largest box fits none of the others.
    middle = rank(box((1, 0), (2, 6)))
    cut = [rank(box((at, 0), (1, 6)) if at else TOP) for at in (0, 2, 3)]
    assert differences([middle, *cut], [[WHOLE]]) == []


def test_replicas_that_are_cut_otherwise() -> None:
    """Another rank has the same elements in other boxes: they make up the tensor as well."""
    stale = rank(LEFT, box((0, 3), (4, 3), 1))
    for served in (WHOLE, box((0, 0), SHAPE, 1)):
        (why,) = differences([rank(TOP), rank(BOTTOM), stale], [[served]])
        assert "rank 0 and rank 2 hold other values of the same elements" in why
    assert differences([rank(TOP), rank(BOTTOM), rank(LEFT, RIGHT)], [[WHOLE]]) == []


def test_no_set_of_boxes_makes_up_the_whole() -> None:
    ranks = [rank(box((0, 0), (3, 6))), rank(box((1, 0), (3, 6)))]
    assert "no set of them makes up the whole" in differences(ranks, [[WHOLE]])[0]


def test_another_value() -> None:
    assert "other values" in differences([rank(WHOLE)], [[LEFT], [box((0, 3), (4, 3), 1)]])[0]


def test_the_values_of_another_tensor() -> None:
    """A lost tie: the engine has one memory for both, and the last one that came is in it."""
    head = Held("head", (0, 0), SHAPE, {"BF16": 7})
    trained = join([rank(WHOLE), ([Layout("head", "BF16", SHAPE, (((0, 0), SHAPE),))], [head])])
    held = [head, head._replace(name="w")]
    (found,) = compare(trained, [held])[0]
    assert str(found).startswith("w: the engine holds the values of 'head' in its place")


@pytest.mark.parametrize(
    ("workers", "lost"), [([[TOP]], 12), ([[TOP], [TOP]], 12), ([[TOP, LEFT]], 6)]
)
def test_elements_that_nobody_holds(workers, lost: int) -> None:
    (why,) = differences([rank(WHOLE)], workers)
    assert why == f"w: cut: {lost} of 24 elements of [4, 6] are held by nobody"


def test_a_tensor_that_nobody_holds() -> None:
    assert "24 of 24" in differences([rank(WHOLE)], [[]])[0]


def test_replicas_that_differ() -> None:
    stale = rank(box((0, 0), SHAPE, 1))
    (why,) = differences([rank(WHOLE), stale], [[WHOLE]])
    assert "rank 0 and rank 1 hold other values" in why
    (why,) = differences([rank(WHOLE)], [[TOP, BOTTOM], [box((2, 0), (2, 6), 1)]])
    assert "worker 0 and worker 1 hold other values" in why and "[2, 0]" in why


def test_what_no_rank_trains() -> None:
    other = Held("v", (0,), (1,), {"BF16": 1})
    assert differences([rank(WHOLE)], [[WHOLE, other]]) == [
        "v: the engine holds it, and no rank trains it"
    ]


def test_types() -> None:
    trained = join([rank(Held("w", (0, 0), SHAPE, {"F32": 1, "BF16": 2, "F16": 3}), dtype="F32")])

    def served(digests: dict[str, int]) -> list[str]:
        return [one.why for one in compare(trained, [[Held("w", (0, 0), SHAPE, digests)]])[0]]

    assert served({"F32": 1}) == served({"BF16": 2}) == served({"F16": 3}) == []
    assert "rounded to BF16" in served({"F32": 9, "BF16": 2})[0]
    assert "other values" in served({"F32": 9, "BF16": 8})[0]
    assert "the engine holds F8_E4M3" in served({"F8_E4M3": 1})[0]
    # Trained narrow and held wide: what is held is the same without loss, or is not.
    narrow = join([rank(Held("w", (0, 0), SHAPE, {"BF16": 2}))])
    assert compare(narrow, [[Held("w", (0, 0), SHAPE, {"F32": 7, "BF16": 2})]])[0] == []
    assert compare(narrow, [[Held("w", (0, 0), SHAPE, {"F32": 7})]])[0]


def test_an_adapters_scale() -> None:
    """What engines make of a tensor is compared with what the rank has made of it."""
    a, b = (Layout("w", "F32", SHAPE, ((WHOLE.offset, SHAPE),), scale) for scale in (1.0, 1.5))
    assert a.types() == ("F32", "BF16", "F16") and b.types() == ("F32*1.5", "BF16*1.5", "F16*1.5")
    assert b._replace(dtype="BF16").types() == ("BF16*1.5", "F32*1.5", "F16*1.5")
    digests = {"F32*1.5": 1, "BF16*1.5": 2, "F16*1.5": 3}
    trained = join([([b], [Held("w", (0, 0), SHAPE, digests)])])

    def served(digests: dict[str, int]) -> list[str]:
        return [one.why for one in compare(trained, [[Held("w", (0, 0), SHAPE, digests)]])[0]]

    assert served({"BF16*1.5": 2}) == []
    assert served({"BF16*1.5": 9}) == ["other values than those that are trained (BF16*1.5)"]
    assert served({"BF16*2": 2}) == [
        "the engine holds BF16*2, which is not what F32*1.5 of the trainer makes"
    ]


def test_room_for_what_any_rank_holds() -> None:
    """All ranks of an adapter have the same, whatever each of them holds; the rest stays empty."""
    name, shape = "a" * 200, (1 << 30, 1 << 20)
    boxes = (((1 << 29, 0), (1 << 29, 1 << 20)), ((0, 1 << 19), (1 << 29, 1 << 19)))
    layouts = [Layout(f"{name}{i}", "BF16", shape, boxes, 1 / 3) for i in range(50)]
    held = [Held(one.name, *box, dict.fromkeys(one.types(), 7)) for one in layouts for box in boxes]
    told = digests_of(layouts, 7, held)
    room = room_for((one.name, one.shape) for one in layouts)
    assert len(told) <= room
    assert read(told.ljust(room, b"\0")) == (7, layouts, held)
    assert read(told + b"\0" * 5) == (7, layouts, held)


def test_no_elements_and_no_dimensions() -> None:
    empty = ([Layout("w", "F32", (0, 3), ())], [])
    scalar = Held("s", (), (), {"F32": 4, "BF16": 5, "F16": 6})
    one = ([Layout("s", "F32", (), (((), ()),))], [scalar])
    assert compare(join([empty, one]), [[scalar]]) == ([], 2)
    nothing = Held("w", (0, 0), (0, 3), {"F32": 0})
    assert compare(join([empty, one]), [[scalar, nothing]]) == ([], 2)
    assert math.prod(()) == 1


def test_there_and_back() -> None:
    layouts = [
        Layout("w", "F32", SHAPE, ((TOP.offset, TOP.extent),)),
        Layout("e", "BF16", (3,), ()),
    ]
    held = [Held("w", TOP.offset, TOP.extent, {"F32": 1, "BF16": (1 << 64) - 1, "F16": 3})]
    told = digests_of(layouts, 7, held)
    assert len(told) == size_of(layouts) and read(told) == (7, layouts, held)
    for broken in (b"", told[:-8], told[:30], b"x" * len(told)):
        with pytest.raises(PeerError, match="cannot be read"):
            read(broken)
