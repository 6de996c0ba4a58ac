# SPDX-License-Identifier: Apache-2.0
"""WeightServer(transform=): a base in block fp8 and low-rank corrections, which are no PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fanin.errors import FaninError, RequestError
from fanin.torch import Values, WeightServer, parts_of
from merged import pulled, same
from worlds import World, case_world, run_case

BLOCK = 128


class Corrected(torch.nn.Module):
    """A linear layer that is trained by two factors beside a base in fp8, one scale a block."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        base = torch.randn(rows, columns) * 0.02
        self.packed = torch.nn.Parameter(base.to(torch.float8_e4m3fn), requires_grad=False)
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        self.register_buffer("scales", torch.rand(blocks) + 0.5)
        self.correction_U = torch.nn.Parameter(torch.randn(rows, 4) * 0.1)
        self.correction_B = torch.nn.Parameter(torch.randn(4, columns) * 0.1)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def rows_of(layer: Corrected, start: int, packed: Any, left: Any, right: Any) -> Any:
    """Values from row *start* on."""
    count, columns = packed.shape
    scales = layer.scales[torch.arange(start, start + count) // BLOCK]
    wide = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    return (packed.float() * wide + left[start : start + count] @ right).bfloat16()


def corrected(name: str, module: Any, attribute: str, tensor: Any) -> Values | None:
    """The transform: each rank computes the rows of the base that it has."""
    if not isinstance(module, Corrected) or attribute != "packed":
        return None
    parts = [(offset, tuple(values.shape)) for offset, values in parts_of(tensor, name)]

    def fill(outs: list[Any]) -> None:
        left, right = whole(module.correction_U), whole(module.correction_B)
        for (offset, packed), out in zip(parts_of(module.packed, name), outs, strict=True):
            out.copy_(rows_of(module, offset[0], packed, left, right))

    return Values(tuple(tensor.shape), torch.bfloat16, tuple(parts), fill)


def published(name: str, shape: tuple[int, ...]) -> str | None:
    """For ``names=``: the corrections and the scales are in the values."""
    if name.endswith(("correction_U", "correction_B", "scales")):
        return None
    return name.replace(".packed", ".weight")


def model_of_corrections() -> Any:
    torch.manual_seed(2)
    return torch.nn.Sequential(Corrected(300, 200), torch.nn.LayerNorm(200), Corrected(130, 136))


def wanted_of(model: Any) -> dict[str, Any]:
    found = {name: whole(value).detach().clone() for name, value in model[1].named_parameters("1")}
    for at in (0, 2):
        layer = model[at]
        left, right = whole(layer.correction_U), whole(layer.correction_B)
        found[f"{at}.weight"] = rows_of(layer, 0, whole(layer.packed), left, right).detach()
    return found


def serve(model: Any, **options: Any) -> WeightServer:
    options = {"base_port": 0, "use_ucx": False, "transform": corrected} | options
    return WeightServer(model, names=published, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with case_world(3, tmp_path_factory.mktemp("transform"), "merge_ranks.py") as ranks:
        yield ranks


def test_in_a_world(world: World) -> None:
    run_case(world, "transformed")


def test_steps() -> None:
    model = model_of_corrections()
    with serve(model) as server:
        server.publish(0)
        first = pulled(server)
        same(first, wanted_of(model))
        with server.updating(1), torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.mul_(-1.5)
        same(pulled(server), wanted_of(model))
        model[0].packed = torch.nn.Parameter(torch.zeros_like(model[0].packed), False)
        server.publish(2)
        same(pulled(server), wanted_of(model))


@pytest.mark.parametrize("number", [int, np.int64, float])
def test_parts_in_other_numbers(number: Any) -> None:
    def half(name: str, module: Any, attribute: str, tensor: Any) -> Values:
        part = (number(0), number(0)), (number(4), number(2))
        other = (number(0), number(2)), (number(4), number(2))
        return Values((4, 4), torch.float32, (part, other), fill)

    def fill(outs: list[Any]) -> None:
        for out, value in zip(outs, (1.5, 2.5), strict=True):
            out.fill_(value)

    model = torch.nn.Linear(4, 4, bias=False)
    options: dict[str, Any] = {"base_port": 0, "use_ucx": False, "transform": half}
    if number is not int:
        with pytest.raises(RequestError, match="of 'weight' of shape") as caught:
            WeightServer(model, **options)
        assert caught.value.remedy.endswith("as Python's integers")
        return
    with WeightServer(model, **options) as server:
        server.publish(0)
        same(pulled(server), {"weight": torch.tensor([1.5, 1.5, 2.5, 2.5]).repeat(4, 1)})


def test_answers_that_are_none() -> None:
    model = model_of_corrections()

    def outside(name: str, module: Any, attribute: str, tensor: Any) -> Values | None:
        if attribute != "packed":
            return None
        return Values((4, 4), torch.bfloat16, (((2, 0), (3, 4)),), lambda outs: None)

    with pytest.raises(RequestError, match=r"computes the part \[3, 4\] at \[2, 0\] of '0.packed'"):
        serve(model, transform=outside)
    with pytest.raises(RequestError, match=r"returned 5 for '0.packed'"):
        serve(model, transform=lambda name, module, attribute, tensor: 5)
    named: Any = Values((4, 4), "bf16", (), lambda outs: None)
    with pytest.raises(RequestError, match="'0.packed' the dtype 'bf16'.*torch.bfloat16"):
        serve(model, transform=lambda name, *_: named if name == "0.packed" else None)


def test_a_step_whose_values_cannot_be_computed_is_not_published() -> None:
    model = model_of_corrections()
    with serve(model) as server:
        server.publish(0)
        scales, model[2].scales = model[2].scales, torch.empty(0, 2)
        with pytest.raises(IndexError), server.updating(1):
            pass
        with pytest.raises(FaninError):
            pulled(server)
        model[2].scales = scales
        server.publish(1)
        same(pulled(server), wanted_of(model))
