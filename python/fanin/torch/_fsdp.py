# SPDX-License-Identifier: Apache-2.0
"""What FSDP2 has made of a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fanin.errors import RequestError

try:
    from torch.distributed.fsdp import FullyShardedDataParallel as _Fsdp1
except ImportError:  # a PyTorch without distributed
    _Fsdp1 = None

try:
    from torch.distributed.fsdp import FSDPModule as _Fsdp2
except ImportError:
    _Fsdp2 = None

UNSHARDED = (
    "commit when FSDP has resharded the parameters: right after optimizer.step(), before any "
    "forward; after a forward without backward call module.reshard() first, or shard the root "
    "with reshard_after_forward=True"
)


def refuse_fsdp1(root: Any) -> None:
    for path, module in root.named_modules():
        if _Fsdp1 is not None and isinstance(module, _Fsdp1):
            raise RequestError.make(
                f"module '{path or type(module).__name__}' is sharded by "
                "FullyShardedDataParallel (FSDP1), whose flat parameters have lost their shapes",
                "shard the model by torch.distributed.fsdp.fully_shard (FSDP2)",
            )


def fsdp_params(root: Any) -> Iterator[Any]:
    """FSDP2's own record of each parameter that it shards. AttributeError: it tells of none."""
    for module in root.modules():
        if _Fsdp2 is None or not isinstance(module, _Fsdp2):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            yield from group.fsdp_params if group is not None else ()


def _managed(root: Any) -> set[tuple[int, str]] | None:
    """Owner's id and attribute of all parameters that FSDP2 shards; None: it does not tell."""
    out: set[tuple[int, str]] = set()
    try:
        for param in fsdp_params(root):
            info = param._module_info
            out.add((id(info.module), info.param_name))
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            out.update((id(owner), name) for owner, name in shared)
    except AttributeError:
        return None
    return out


def sharding_of(root: Any) -> Callable[[Any, str, str], bool]:
    """A function that says of owner, attribute and path whether FSDP2 shards that parameter."""
    managed = _managed(root)
    if managed is not None:
        return lambda owner, attribute, path: (id(owner), attribute) in managed
    prefixes = tuple(
        f"{path}." if path else ""
        for path, module in root.named_modules()
        if _Fsdp2 is not None and isinstance(module, _Fsdp2)
    )
    return lambda owner, attribute, path: path.startswith(prefixes)
