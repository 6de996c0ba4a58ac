# SPDX-License-Identifier: Apache-2.0
"""What all ranks of an engine take together, what stays as it is, and whose configuration it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fanin.engine.trainers import Published
from fanin.errors import PeerError, RequestError, StateError
from fanin.mapping._checks import (
    check_patterns,
    config_differences,
    kept_paths,
    missed,
    refuse_idle,
    refuse_missed,
    refuse_other_config,
    refuse_torn,
    taken_of,
)

SHAPES = {"qkv": (12, 8), "down": (8, 16), "norm": (8,)}


def rows(first: int, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((first, 0), (count, 8))


def told(*ranks: dict[str, tuple[Any, ...]]) -> list[str]:
    return [str(one) for one in missed(SHAPES, [taken_of(rank) for rank in ranks])]


def test_ranks_take_a_tensor_together() -> None:
    """A rank says nothing of what it takes all of; of heads that are replicated each takes some."""
    assert told({}) == []
    assert told({"qkv": (rows(0, 6),)}, {"qkv": (rows(6, 6),)}) == []
    assert told({"qkv": (rows(0, 4), rows(8, 2))}, {"qkv": (rows(4, 4), rows(8, 4))}) == []
    assert told({"qkv": ()}, {}) == []


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (({"qkv": (rows(0, 8),)},), "elements [8:12, 0:8] of qkv [12, 8]"),
        (
            ({"qkv": (rows(0, 5),)}, {"qkv": (rows(6, 6),)}),
            "elements [5:6, 0:8] of qkv [12, 8]",
        ),
        (
            ({"down": (((0, 0), (8, 7)),)}, {"down": (((0, 8), (8, 8)),)}),
            "elements [0:8, 7:8] of down [8, 16]",
        ),
        (({"norm": ()}, {"norm": ()}), "norm"),
    ],
)
def test_what_no_rank_takes(ranks: tuple[dict[str, Any], ...], expected: str) -> None:
    assert told(*ranks) == [expected]
    with pytest.raises(PeerError) as caught:
        refuse_missed(missed(SHAPES, [taken_of(rank) for rank in ranks]), "publish that model")
    assert expected in caught.value.message and caught.value.remedy == "publish that model"


def test_ranks_that_were_told_of_other_tensors() -> None:
    with pytest.raises(StateError, match="another worker was told of 'new', and this one was not"):
        told({"qkv": (rows(0, 6),)}, {"qkv": (rows(6, 6),), "new": ()})


class Model:
    """The head is tied, and the stage has no vision tower."""

    def __init__(self) -> None:
        tied = object()
        self.own = {"embed.weight": tied, "norm.weight": object(), "head.weight": tied}

    def named_parameters(self, remove_duplicate: bool) -> list[tuple[str, object]]:
        assert not remove_duplicate
        return list(self.own.items())

    def named_buffers(self, remove_duplicate: bool) -> list[tuple[str, object]]:
        return [] if remove_duplicate else [("scale", self.own)]


def test_what_is_kept_is_kept_under_all_its_names() -> None:
    kept, idle = kept_paths(Model(), ["head.*", "visual.*", "sca?e"])
    assert kept == {"embed.weight", "head.weight", "scale"} and idle == {"visual.*"}
    assert kept_paths(Model(), ()) == (frozenset(), frozenset())
    refuse_idle(())
    with pytest.raises(RequestError, match="keep names 'visual"):
        refuse_idle(idle)
    with pytest.raises(RequestError, match="keep is 'visual"):
        check_patterns("keep", "visual.*", key="keep")


def test_what_a_failed_update_may_have_written_is_not_kept() -> None:
    one, both = frozenset({"a"}), frozenset({"a", "b"})
    refuse_torn(both, None, "given up")
    refuse_torn(both, one, "")
    refuse_torn(one, both, "the pull of step 3 failed")
    with pytest.raises(StateError, match="keep names 'b'.*step 3 failed"):
        refuse_torn(both, one, "the pull of step 3 failed")


class Config:
    """The engine's."""

    def __init__(self, **fields: Any) -> None:
        self.model_type = "deepseek_v3"
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_a_rope_that_engines_rename() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    engine = Config(rope_parameters={**rope, "rope_type": "deepseek_yarn"})
    assert config_differences({"rope_parameters": rope}, engine) == []
    found = config_differences({"rope_parameters": {**rope, "factor": 8.0}}, engine)
    assert found == ["rope_parameters.factor is 8.0 in training and 4.0 here"]
    linear = Config(rope_parameters={**rope, "rope_type": "linear"})
    assert len(config_differences({"rope_parameters": rope}, linear)) == 1


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_a_configuration_that_is_none(text: str) -> None:
    with pytest.raises(PeerError, match="no JSON object"):
        refuse_other_config(text, Config())


def test_another_configuration_is_another_model() -> None:
    one, other = (
        Published((), {"config": json.dumps({"rope_theta": theta})}, "d", "w")
        for theta in (1e4, 1e6)
    )
    assert one.same_model(Published((), dict(one.metadata), "e", "v"))
    assert not one.same_model(other)
