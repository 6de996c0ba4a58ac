# SPDX-License-Identifier: Apache-2.0
"""One rank that merges as by the kernel of GPUs, step after step (a child of worlds.py).

What a step needs is kept from the one before, so each change that makes it another one has to be
found. PyTorch does what the kernel would, from the same tables of addresses; the kernels that copy
factors are interpreted. Factors are whole numbers, whose products are the same in every order.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from fanin.errors import RequestError
from fanin.torch import WeightServer, _factors, _fused, _merge, _transform, weights
from merge_ranks import RANK, sharded, whole
from merged import LINEAR, adapted, pulled, rounded, same, saved
from peft import LoraConfig
from torch.distributed.tensor import DTensor, Replicate
from worlds import run_cases

moved_steps: list[int] = []
QUERY = "model.layers.0.self_attn.q_proj"
repeated: list[int] = []


class Steady(_merge.Steady):
    def repeat(self) -> None:
        repeated.append(len(self._step.bases))
        moved_steps.append(sum(moves is not None for moves in self._moves.values()))
        super().repeat()


def lying(address: int, shape: Any, steps: Any, dtype: Any) -> Any:
    """The elements that are there."""
    last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, steps)


def launch(kind: Any, is_aligned: bool, table: Any, left_at: int, right_at: int) -> None:
    experts, rows, columns = kind.extent
    for base, out, left, right, scale in table.tolist():
        left, right = left + left_at, right + right_at
        assert not is_aligned or (base | out | left | right) % 16 == 0
        x = lying(left, (experts, kind.rank, rows), kind.steps[5:8], kind.factors)
        y = lying(right, (experts, kind.rank, columns), kind.steps[8:], kind.factors)
        product = (x.transpose(1, 2).float() @ y.float()).to(kind.factors)
        (by,) = struct.unpack("<f", struct.pack("<i", scale))
        delta = (product.float() * by).to(kind.factors)
        held = lying(base, kind.extent, kind.steps[:3], kind.dtype)
        delta = delta.to(kind.dtype) if kind.is_rounded else delta
        lying(out, kind.extent, (*kind.steps[3:5], 1), kind.dtype).copy_(held + delta)


def whole_numbers(tensor: Any) -> Any:
    numbers = torch.arange(math.prod(tensor.shape)).view(tensor.shape)
    return (numbers * 7 % 5 - 2).to(tensor.dtype)


def model_of(adapter: str) -> Any:
    model = adapted(adapter)
    with torch.no_grad():
        for param in factors(model):
            param.copy_(whole_numbers(param))
    return model


def factors(model: Any) -> list[Any]:
    return [param for path, param in model.named_parameters() if "lora_" in path]


def local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def query(model: Any) -> Any:
    return model.get_base_model().get_submodule(QUERY)


def moved(param: Any) -> None:
    if isinstance(param, DTensor):
        param._local_tensor = param._local_tensor.clone()
    else:
        param.data = param.data.clone()


def replaced(model: Any) -> None:
    layer = query(model).lora_A["default"]
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone() + 1)


def scaled(model: Any, by: float) -> None:
    query(model).set_scale("default", by)


def unsharded(model: Any) -> None:
    """A factor of experts, of which each rank has rows before."""
    factor = model.base_model.model.model.layers[0].mlp.experts.lora_B["default"]
    factor.weight = torch.nn.Parameter(factor.weight.redistribute(placements=[Replicate()]))


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "factors": (lambda model: [param.mul_(-2) for param in factors(model)], True),
    "a base": (lambda model: local(query(model).base_layer.weight).mul_(1.5), True),
    "a scale": (lambda model: scaled(model, 3.0), False),
    "its memory": (lambda model: moved(query(model).base_layer.weight), False),
    "memory of a factor": (lambda model: moved(query(model).lora_B["default"].weight), False),
}
PLAIN = {"a factor": (replaced, False)}
SHARDED = {"a sharding": (unsharded, False)}


def check(server: Any, model: Any, make: Callable[[], Any]) -> None:
    """What is published is what PEFT makes of the model as it is now."""
    now, scale = whole(model), query(model).scaling["default"]
    dist.barrier()
    if RANK == 0:

        def stepped() -> Any:
            model = make()
            model.load_state_dict(now)
            query(model).scaling["default"] = scale
            return model

        with tempfile.TemporaryDirectory() as folder:
            got, wanted = pulled(server), saved(stepped, Path(folder))
            same(got, rounded(wanted, got))
    dist.barrier()


def steps(adapter: str, layout: str | None, quantize: str | None) -> None:
    """Each change is in the next step, and the one after it is repeated again.

    With quantize= values wait for rounding in a room that takes some of them at a time.
    """
    taken: list[int] = []
    moved_steps.clear()

    class Quantizer(weights.Quantizer):  # type: ignore[name-defined,misc]
        def take(self, makers: tuple[Any, ...]) -> None:
            taken.append(len(makers))
            super().take(makers)

    weights.Quantizer = Quantizer  # type: ignore[attr-defined]
    _transform.ROOM["cpu"] = 1 << 16

    def make() -> Any:
        return model_of(adapter)

    model = make() if layout is None else sharded(make(), layout)
    options = {"base_port": 0, "use_ucx": False, "merge": True, "quantize": quantize}
    with WeightServer(model, **options) as server:
        server.publish(0)
        items = [one.state for one in server._runs["full:0"].parameters._items]
        count = sum(state.values is not None for state in items)
        step = 0
        more = {} if layout else PLAIN
        if layout and adapter == "experts":
            more = SHARDED
        for name, (change, alike) in {**CHANGES, **more}.items():
            for number, now in enumerate([change] if alike else [change, CHANGES["factors"][0]]):
                repeated.clear()
                taken.clear()
                step += 1
                with server.updating(step), torch.no_grad():
                    now(model)
                check(server, model, make)
                assert (count in repeated) is (alike or number == 1), (name, number, repeated)
                assert quantize is None or 1 < max(taken) < sum(taken), taken
        batch = server._runs["full:0"].parameters.transform
        kinds = {type(one) for steady in batch._steady.values() for one in steady._step.events}
        assert (_factors.Exchanged in kinds) is (adapter == "experts")
        assert (max(moved_steps) > 0) is (adapter == "experts" or layout is not None)


def switched(model: Any) -> Callable[[], None]:
    query(model).enable_adapters(False)
    return lambda: query(model).enable_adapters(True)


def hand_merged(model: Any) -> Callable[[], None]:
    query(model).merge()
    return query(model).unmerge


def other_active(model: Any) -> Callable[[], None]:
    model.set_adapter("other")
    return lambda: model.set_adapter("default")


def both_active(model: Any) -> Callable[[], None]:
    model.base_model.set_adapter(["default", "other"])
    return lambda: model.set_adapter("default")


def other_merged(model: Any) -> Callable[[], None]:
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    layer.merge(adapter_names=["other"])
    return layer.unmerge


REFUSED = {
    "is switched off": switched,
    "is merged into the base already": hand_merged,
    "is not the one that is active (other)": other_active,
    "is not the one that is active (default, other)": both_active,
    "'other' is merged into": other_merged,
}


def refused(layout: str | None) -> None:
    """A rank finds it in a step that others repeat, if there are any; none waits for another."""

    def make() -> Any:
        model = model_of("embedding")
        model.add_adapter("other", LoraConfig(r=2, target_modules=LINEAR))
        return model

    model = make() if layout is None else sharded(make(), layout)
    is_here = layout is None or RANK == dist.get_world_size() - 1
    with WeightServer(model, base_port=0, use_ucx=False, merge=True) as server:
        server.publish(0)
        for step, (text, change) in enumerate(REFUSED.items()):
            undo = change(model) if is_here and (layout is None or "merged" not in text) else None
            repeated.clear()
            try:
                server.publish(2 * step + 1)
            except RequestError as error:
                assert undo is not None and text in str(error), error
                assert not repeated
                undo()
            else:
                assert undo is None and repeated, text
            with torch.no_grad():
                factors(model)[0].neg_()
            server.publish(2 * step + 2)
            check(server, model, make)


def partial() -> None:
    """A step that was interrupted between two tensors is not repeated without the rest."""
    model = model_of("linear")
    with WeightServer(model, base_port=0, use_ucx=False, merge=True) as server:
        transform = server._runs["full:0"].parameters.transform
        note, noted = _merge.Step.note, []

        def interrupted(step: Any, *arguments: Any) -> None:
            note(step, *arguments)
            noted.append(1)
            if len(noted) == 3:
                transform._step = step
                raise KeyboardInterrupt

        _merge.Step.note = interrupted  # type: ignore[method-assign]
        try:
            server.publish(0)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("not interrupted")
        finally:
            _merge.Step.note = note  # type: ignore[method-assign]
        repeated.clear()
        server.publish(1)
        assert not repeated
        check(server, model, lambda: model_of("linear"))


def hot(model: Any) -> None:
    """As PEFT's hot swap has it for compiled models."""
    layer = query(model)
    layer.scaling["default"] = torch.tensor(layer.scaling["default"] * 3)


def hotter(model: Any) -> None:
    query(model).scaling["default"].mul_(2)


def unfit(first: str) -> None:
    """What the kernel cannot make is made by PEFT's functions, at each step."""
    then = {"hot": [hot, hotter], "float": [lambda model: query(model).base_layer.float()]}[first]
    model = model_of("linear")
    with WeightServer(model, base_port=0, use_ucx=False, merge=True) as server:
        server.publish(0)
        for step, change in enumerate([*then, CHANGES["factors"][0]], 1):
            repeated.clear()
            with server.updating(step), torch.no_grad():
                change(model)
            assert not repeated
            check(server, model, lambda: model_of("linear"))


def main() -> None:
    _fused._launch = launch
    _merge.can_fuse = lambda base, factors: True
    _factors.can_move = lambda tensors: True  # type: ignore[attr-defined]
    _merge.noise_like = whole_numbers
    _merge.Steady = Steady  # type: ignore[misc]
    run_cases(globals())


if __name__ == "__main__":
    main()
