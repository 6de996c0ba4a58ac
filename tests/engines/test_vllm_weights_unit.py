# SPDX-License-Identifier: Apache-2.0
"""What the backend refuses, and with which words: vLLM's own classes, and no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fanin.errors import StateError
from fanin.mapping import About, Leaf, Mapping, Module, Source
from fanin.vllm import guard
from fanin.vllm.mixed import with_neighbours
from fanin.vllm.weights import _refuse_what_moves


def config(**more: Any) -> Any:
    parallel = SimpleNamespace(enable_eplb=False)
    return SimpleNamespace(**({"parallel_config": parallel} | more))


def offload(uva: float = 0, group: int = 0) -> Any:
    return SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=uva), prefetch=SimpleNamespace(offload_group_size=group)
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"parallel_config": SimpleNamespace(enable_eplb=True)},
            "start vLLM without --enable-eplb",
        ),
        ({"offload_config": offload(uva=2.5)}, "start vLLM without offloading"),
        ({"offload_config": offload(group=4)}, "start vLLM without offloading"),
        ({"cache_config": SimpleNamespace(cpu_offload_gb=1)}, "start vLLM without offloading"),
    ],
)
def test_configurations_whose_parameters_move_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        _refuse_what_moves(config(**fields))


def test_other_configurations_are_not() -> None:
    _refuse_what_moves(config(offload_config=offload(), cache_config=SimpleNamespace()))


def test_these_are_the_names_that_vllm_has() -> None:
    """What is asked of its configurations above is there, under that name."""
    from vllm.config import ParallelConfig
    from vllm.config.offload import OffloadConfig

    assert ParallelConfig().enable_eplb is False
    assert OffloadConfig().uva.cpu_offload_gb == 0
    assert OffloadConfig().prefetch.offload_group_size == 0


def module(path: str, *names: str, fallback: str = "") -> Module:
    leaves = [
        Leaf(
            name="weight",
            role="parameter",
            dtype="BF16",
            shape=(1,),
            stride=(2,),
            sources=tuple(Source(name, "BF16", (1,), ()) for name in names),
            fills=(),
            own="",
        )
    ]
    return Module(path, "Linear", tuple(leaves), fallback, names if fallback else ())


def test_what_the_loader_writes_beside_is_the_loaders() -> None:
    """Given a tensor, it writes into every module that takes something of it."""
    mapping = Mapping(
        about=About("vllm", "0.32.0", "Model", {}),
        keys=5,
        digest="",
        modules=(
            module("far", "c", "d"),
            module("near", "b", "c"),
            module("computed", "a", "b", fallback="it computes"),
            module("apart", "e"),
        ),
        unwanted=(),
    )
    found = {one.path: one for one in with_neighbours(mapping).modules}
    assert [path for path, one in found.items() if one.fallback] == ["far", "near", "computed"]
    assert found["near"].taken == ("b", "c") and "'b'" in found["near"].fallback
    assert found["far"].taken == ("c", "d") and "'c'" in found["far"].fallback


def test_vllms_engines_are_guarded_once() -> None:
    """All that the guard wraps is there in this vLLM, takes what it hands on, and is wrapped."""
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    assert guard.install() and guard.install()
    wrapped = {
        EngineCore: ("collective_rpc", "resume_scheduler", "add_request"),
        AsyncLLM: ("resume_generation", "update_weights"),
        LLMEngine: ("collective_rpc", "add_request"),
        OutputProcessor: ("process_outputs",),
    }
    for owner, names in wrapped.items():
        for name in names:
            original = getattr(owner, name).fanin_wraps
            assert not hasattr(original, "fanin_wraps")
    asked = ["self", "method", "timeout", "args", "kwargs"]
    for owner in (EngineCore, LLMEngine):
        assert list(inspect.signature(owner.collective_rpc).parameters) == asked
    added = inspect.signature(EngineCore.add_request).parameters
    assert list(added) == ["self", "request", "request_wave"]
