# SPDX-License-Identifier: Apache-2.0
"""Memory in the layout of a worker's LoRA slots, which pulls fill, in pieces that slots copy.

What is done to it is done by few calls: a model has hundreds of such tensors, and the engine waits
for some of it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fanin._dtypes import torch_types
from fanin.engine.copies import Copies, laid_out, room_of
from fanin.mapping import Mapping
from fanin.mapping._held import view_of
from fanin.server import Stream

_TYPES = torch_types()


class Part(NamedTuple):
    """What of one slot an adapter fills in one tensor of the engine, from the first element on."""

    path: str
    attribute: str
    place: int | None
    leaf: str
    #: Of the slot.
    dtype: Any
    #: What the engine multiplies it by.
    scale: float


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tensors of a publication go in a slot of one worker. Immutable; any thread."""

    mapping: Mapping
    parts: tuple[Part, ...]
    #: Modules that have a switch for each slot, which is on with this adapter.
    switched: tuple[str, ...]
    signature: tuple[Any, ...]

    def leaves(self) -> Iterator[Any]:
        """Those of the mapping, in the order of the parts."""
        for module in self.mapping.modules:
            yield from module.leaves


class _Fill:
    """The copies of an image's tensors into one slot, made out once: to get views of hundreds of
    tensors takes longer than to have them copied."""

    def __init__(self, stacks: list[Any], pairs: list[tuple[Any, Any]]) -> None:
        self._stacks = stacks
        self._at = [stack.data_ptr() for stack in stacks]
        self.copies = Copies(pairs)

    def is_into(self, stacks: list[Any]) -> bool:
        """Whether the slots lie in that memory still."""
        return all(map(operator.is_, self._stacks, stacks)) and self._at == [
            stack.data_ptr() for stack in stacks
        ]


def _fill_of(
    known: dict[int, _Fill], manager: Any, slot: int, ready: list[tuple[Part, Any, Any]]
) -> _Fill:
    stacks = []
    for part, _, _ in ready:
        stack = getattr(manager.modules[part.path], part.attribute)
        stacks.append(stack if part.place is None else stack[part.place])
    fill = known.get(slot)
    if fill is None or not fill.is_into(stacks):
        pairs = []
        for stack, (_, _, final) in zip(stacks, ready, strict=True):
            start, *steps = stack.stride()  # slicing takes twice as long, some ms of all parts
            at = stack.storage_offset() + slot * start
            pairs.append((stack.as_strided(final.shape, steps, at), final))
        fill = known[slot] = _Fill(stacks, pairs)
    return fill


def _layouts_of(layout: Layout) -> Iterator[tuple[tuple[int, str], Any]]:
    """Tensors without memory: as each part lands, and as slots get it, if that is otherwise."""
    for number, (part, leaf) in enumerate(zip(layout.parts, layout.leaves(), strict=True)):
        dtype = _TYPES[leaf.dtype]
        steps = [step // dtype.itemsize for step in leaf.stride]
        landed = torch.empty_strided(leaf.shape, steps, dtype=dtype, device="meta")
        yield (number, "landed"), landed
        if dtype != part.dtype or not landed.is_contiguous():
            yield (number, "final"), torch.empty(leaf.shape, dtype=part.dtype, device="meta")


class Image:
    """One adapter of one worker, in the layout of its slots, in a GPU's memory or in the host's.

    One thread fills it, then the engine's thread reads it. Another one may move it to the host
    meanwhile. Until the image is whole, a GPU works on it on a stream of its own, and has finished
    when a method returns. So no work of the engine waits for that stream, and no copy of the engine
    overtakes it.

    Args:
        device: a GPU; None: the host.
        pinned: of host memory: a GPU copies from it by itself.

    Raises:
        torch.OutOfMemoryError: the GPU has no room for it.
    """

    def __init__(self, layout: Layout, *, device: Any = None, pinned: bool = False) -> None:
        self.layout = layout
        self._lock = threading.Lock()
        self._copied: Any = None
        #: Nobody fills it: it may be moved.
        self.whole = False
        #: From the GPU to the host: nobody will fill it.
        self.leaving = False
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._layouts = dict(_layouts_of(layout))
        size, where = room_of(self._layouts.values()), device or "cpu"
        self._bind(torch.empty(size, dtype=torch.uint8, device=where, pin_memory=pinned))
        leaves = zip(layout.parts, layout.leaves(), self._ready, strict=True)
        #: Where a pull lands; None once it has been moved to the host.
        self._landed = {(part.path, leaf.name): here for part, leaf, (_, here, _) in leaves}
        self.packed: Any = layout.mapping.pack(self._landed)

    def _bind(self, room: Any) -> None:
        tensors = laid_out(room, self._layouts)
        ready = []
        for number, part in enumerate(self.layout.parts):
            here = tensors[number, "landed"]
            ready.append((part, here, tensors.get((number, "final"), here)))
        with self._lock:  # the engine may be reading them
            self._room = room
            #: The part, what lands, what is copied.
            self._ready = ready
            #: Of this memory, by slot.
            self._fills: dict[int, _Fill] = {}
        scaled: dict[float, list[Any]] = {}
        for part, _, final in ready:
            if part.scale != 1:
                scaled.setdefault(part.scale, []).append(final)
        self._scaled = scaled
        self._turned = Copies((final, here) for _, here, final in ready if final is not here)

    @property
    def on_gpu(self) -> bool:
        return bool(self._room.is_cuda)

    @property
    def stream(self) -> Stream | None:
        """For pulls: the one that its memory's former uses are on; None: not on a GPU."""
        if self._stream is None:
            return None
        return Stream(self._stream.cuda_stream, self._stream.device_index)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """What a GPU is told within is on the image's stream, and done at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def wait(self) -> None:
        """Until no GPU copies from it any more."""
        if self._copied is not None:
            self._copied.synchronize()

    def read(self, tensors: Callable[[str], Any]) -> None:
        """Fills it with whole tensors, by published names, instead of a pull."""
        with self._alone():
            for module in self.layout.mapping.modules:
                for leaf in module.leaves:
                    self._read(leaf, self._landed[module.path, leaf.name], tensors)

    def _read(self, leaf: Any, here: Any, tensors: Callable[[str], Any]) -> None:
        for source in leaf.sources:
            whole = tensors(source.name)
            for piece in source.pieces:
                box = tuple(
                    slice(a, a + n) for a, n in zip(piece.offset, piece.extent, strict=True)
                )
                view_of(here, piece).copy_(whole[box])

    def finish(self) -> None:
        """After a pull: types, order and scaling as vLLM's own load makes them."""
        with self._alone():
            self._turned.make()
            for scale, tensors in self._scaled.items():
                for tensor in tensors:  # _foreach_mul_ rounds the factor to their type first
                    tensor *= scale
        self.whole = True

    def to_host(self) -> None:
        """From the GPU, for good: slots get it from pinned memory from now on. Any thread."""
        room = torch.empty(self._room.numel(), dtype=torch.uint8, pin_memory=True)
        with self._alone():
            room.copy_(self._room, non_blocking=True)
        self._bind(room)
        self._landed, self._stream = {}, None
        self.packed = None

    def put(self, manager: Any, slot: int) -> None:
        """Copies it into a slot that vLLM has just cleared; on CUDA on the current stream.

        On that stream vLLM clears slots and runs its model, also as a CUDA graph. So each read of
        the slot is before or behind the copy. Graphs know slots by their addresses, which stay.
        """
        with self._lock:
            room, ready, fills = self._room, self._ready, self._fills
        if room.is_cuda:  # it may be let go of before the copy is done
            room.record_stream(torch.cuda.current_stream(room.device))
        _fill_of(fills, manager, slot, ready).copies.make()
        for path in self.layout.switched:
            manager.modules[path].adapter_enabled[slot].fill_(1)
        if manager.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def slot_of(self, path: str, leaf: str, like: Any) -> Any:
        """What a slot has of it in one tensor, the rest zero."""
        made = torch.zeros(like.shape, dtype=like.dtype, device="cpu")
        for part, _, final in self._ready:
            if (part.path, part.leaf) == (path, leaf):
                made[tuple(slice(n) for n in final.shape)] = final
        return made
