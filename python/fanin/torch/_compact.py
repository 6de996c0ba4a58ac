# SPDX-License-Identifier: Apache-2.0
"""Puts a model's many small allocations into a few large ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fanin.errors import RequestError, StateError
from fanin.torch._fsdp import UNSHARDED, fsdp_params, refuse_fsdp1
from fanin.torch._tree import root_of, walk, walk_buffers

_ALIGNMENT = 512  # PyTorch's allocator of device memory aligns so


class Compacted(NamedTuple):
    """What :func:`compact` has done on this rank."""

    tensors: int
    """Parameters and buffers that were moved."""
    bytes: int
    arenas: int
    """Allocations that they lie in now."""
    left: int
    """Parameters and buffers that stayed where they were."""


class _Storage:
    """An allocation of PyTorch's, and the tensors that are known to lie in it."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.bytes: int = storage.nbytes()
        self.tensors: list[Any] = []
        self.bases: list[Any] = []
        """What they were made of as views, which autograd remembers, and with it the memory."""
        self.counted = 0
        """Those among them that are the model's, and not FSDP2's views of the same memory."""

    def can_move(self, most: int) -> bool:
        """Whether it is one tensor's own: a part of another's buffer would leave that behind."""
        return (
            0 < self.bytes <= most
            and all(map(_is_plain, [*self.tensors, *self.bases]))
            and any(one.numel() * one.element_size() == self.bytes for one in self.tensors)
        )


def compact(model: Any, *, arena_bytes: int = 512 << 20) -> Compacted:
    """Moves this rank's parameters and persistent buffers into few allocations of *arena_bytes*.

    Before its first pull, a worker that reads GPU memory maps every allocation that holds a shard,
    some 50 us each. PyTorch gives tensors below 1 MB segments of 2 MB. Tens of thousands of small
    shards (experts under FSDP2) make seconds of it. ::

        fully_shard(model)
        compact(model)
        optimizer = torch.optim.AdamW(model.parameters())
        server = WeightServer(model)

    It needs no other rank. Parameter objects stay. So do optimizers, ties, requires_grad, DTensor's
    placements, hooks, and what DDP and FSDP2 know of them. Values stay to the last bit. Each tensor
    still has a storage of its own; only its address changes. Optimizers may be made before or
    after. As with ``model.to()``, tensors that were made as views of parameters keep the old
    memory. ``model.to()`` and ``load_state_dict(assign=True)`` undo it; it may be called again.
    Call it before CUDA graphs are captured and before the first publish, and not between forward
    and backward. A server frees an allocation that it lends only at its next publish.

    Some tensors stay where they are: slices of a larger buffer, pinned and not plain ones, and
    those larger than half of an arena. Storages in an arena cannot be resized
    (``untyped_storage().resize_(0)``), nor sent to other processes by torch's own CUDA IPC.

    Copies on the current stream; costs the memory of one arena more while it runs, then gives what
    was freed back to the device (``empty_cache``).

    Args:
        model: the module that is trained, after it was sharded.
        arena_bytes: bytes of one allocation; give 256 MiB or more.

    Raises:
        RequestError: no module; FSDP1; a parameter that FSDP2 offloads (CPUOffloadPolicy); a
            PyTorch whose FSDP2 does not tell what it keeps.
        StateError: FSDP2 shows whole parameters in place of its shards now.
    """
    if arena_bytes < 2 * _ALIGNMENT:
        raise RequestError.make(f"arena_bytes is {arena_bytes}", "give 256 MiB or more")
    if not isinstance(model, torch.nn.Module):
        raise RequestError.make(
            f"the model is a {type(model).__name__}", "give the torch.nn.Module that is trained"
        )
    root = root_of(model)
    refuse_fsdp1(root)
    storages = _storages(root)
    moving = [one for one in storages if one.can_move(arena_bytes // 2)]
    out = Compacted(
        sum(one.counted for one in moving),
        sum(one.bytes for one in moving),
        0,
        sum(one.counted for one in storages) - sum(one.counted for one in moving),
    )
    devices = dict.fromkeys(one.storage.device for one in moving)
    by_device = {at: [one for one in moving if one.storage.device == at] for at in devices}
    del storages, moving
    arenas = sum(_move(device, found, arena_bytes) for device, found in by_device.items())
    return out._replace(arenas=arenas)


def _storages(root: Any) -> list[_Storage]:
    """All storages of the model's tensors on this rank, in the order of the tree."""
    found: dict[tuple[Any, int], _Storage] = {}

    def add(tensor: Any, counted: int) -> None:
        storage = tensor.untyped_storage()
        one = found.setdefault((storage.device, storage.data_ptr()), _Storage(storage))
        one.tensors.append(tensor)
        if tensor._base is not None:
            one.bases.append(tensor._base)
        one.counted += counted

    known: dict[int, Any] = {}
    for every in (walk(root), walk_buffers(root)):
        for _, _, tensor, _ in every:
            known[id(tensor)] = getattr(tensor, "_local_tensor", tensor)
    for local in known.values():
        if _has_memory(local):
            add(local, 1)
    for flat in _flat_views(root):
        if _has_memory(flat):
            add(flat, 0)
    return list(found.values())


def _flat_views(root: Any) -> Iterator[Any]:
    """The tensors, padded and flat, that FSDP2 gathers from."""
    paths = {(id(owner), attribute): path for owner, attribute, _, path in walk(root)}
    try:
        for param in fsdp_params(root):
            owner, name = param._module_info.module, param._module_info.param_name
            path = paths.get((id(owner), name), name)
            if param.offload_to_cpu:
                raise RequestError.make(
                    f"'{path}' is offloaded to host memory by FSDP's CPUOffloadPolicy, which no "
                    "worker maps",
                    "leave compact() out, or shard without offload_policy",
                    key=path,
                )
            if owner._parameters.get(name) is not param.sharded_param:
                raise StateError.make(
                    f"the parameter '{path}' is FSDP's temporary unsharded buffer now",
                    UNSHARDED.replace("commit", "call compact()", 1),
                    key=path,
                )
            yield param._sharded_param_data
    except AttributeError as error:
        raise RequestError.make(
            f"FSDP2 of PyTorch {torch.__version__} does not tell what it keeps: {error}",
            "leave compact() out",
        ) from None


def _has_memory(tensor: Any) -> bool:
    try:
        return bool(tensor.untyped_storage().data_ptr() and tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, or without memory as yet
        return False


def _is_plain(tensor: Any) -> bool:
    """Whether its values are the bytes of its storage, which may be those of another one."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    return (
        dispatch is torch.Tensor.__torch_dispatch__
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_inference()
        and not (tensor.device.type == "cpu" and tensor.is_pinned())
    )


def _move(device: Any, storages: list[_Storage], arena_bytes: int) -> int:
    """Moves them; returns how many arenas it made. Lets go of each when it has been moved."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    arenas = 0
    # What is made in inference mode could not be trained.
    with on_device, torch.inference_mode(False), torch.no_grad():
        _settle(device)  # other streams may still be reading
        while storages:
            taken, length, offsets = 0, 0, []
            for one in storages:
                if length + one.bytes > arena_bytes:
                    break
                offsets.append(length)
                length += -(-one.bytes // _ALIGNMENT) * _ALIGNMENT
                taken += 1
            arena = torch.empty(length, dtype=torch.uint8, device=device)
            _fill(arena, storages[:taken], offsets)
            del arena, storages[:taken]
            arenas += 1
            _settle(device)
    return arenas


def _settle(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _fill(arena: Any, storages: list[_Storage], offsets: list[int]) -> None:
    # Through DLPack each piece is a storage of its own, which keeps the arena.
    pieces = [
        torch.from_dlpack(arena[at : at + one.bytes])
        for one, at in zip(storages, offsets, strict=True)
    ]
    old = [
        torch.empty(0, dtype=torch.uint8, device=arena.device).set_(one.storage) for one in storages
    ]
    torch._foreach_copy_(pieces, old)
    for one, piece in zip(storages, pieces, strict=True):
        storage = piece.untyped_storage()
        for tensor in (*one.tensors, *one.bases):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
