# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 has made of a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed._composable_state import _module_state_mapping as _stateful
from torch.distributed.fsdp import FSDPModule as _Fsdp2
from torch.distributed.fsdp import FullyShardedDataParallel as _Fsdp1

from fanin.errors import RequestError

UNSHARDED = (
    "commit when FSDP has resharded the parameters: right after optimizer.step(), before any "
    "forward; after a forward without backward call module.reshard() first, or shard the root "
    "with reshard_after_forward=True"
)


def refuse_fsdp1(root: Any) -> None:
    for path, module in root.named_modules():
        if isinstance(module, _Fsdp1):
            raise RequestError.make(
                f"module '{path or type(module).__name__}' is sharded by "
                "FullyShardedDataParallel (FSDP1), whose flat parameters have lost their shapes",
                "shard the model by torch.distributed.fsdp.fully_shard (FSDP2)",
            )


def fsdp_params(root: Any) -> Iterator[Any]:
    """FSDP2's own record of each parameter that it shards."""
    return _params_of(root.modules())


def _params_of(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        if not isinstance(module, _Fsdp2):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            yield from group.fsdp_params if group is not None else ()


def is_unsharded(record: Any) -> bool | None:
    """Whether FSDP2 shows a temporary buffer in a parameter's place; None: there is no record.

    Over tensor parallelism the buffer is a DTensor as the shard is.
    """
    return None if record is None else record.sharded_state.name != "SHARDED"


def sharding_of(root: Any) -> Callable[[Any, str], Any]:
    """A function that gives FSDP2's record of the parameter with that owner and attribute; None:
    FSDP2 does not shard it.

    Of all of this process's modules: those around *root* may be what FSDP2 shards.
    """
    out: dict[tuple[int, str], Any] = {}
    for param in _params_of((*root.modules(), *_stateful)):
        info = param._module_info
        out[id(info.module), info.param_name] = param
        for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            out[id(owner), name] = param
    return lambda owner, attribute: out.get((id(owner), attribute))
