# SPDX-License-Identifier: Apache-2.0
"""Where each element of a published adapter goes in vLLM's LoRA slots, found out once.

vLLM's own naming, packing and slicing are run over numbers. What says where each element goes says
the way back as well: what a worker holds of an adapter is digested so for :mod:`fanin.check`. The
scale is multiplied in and cannot be undone: the trainer's ranks digest what it makes of theirs.

This file and :mod:`fanin.vllm.slots_worker` alone know vLLM's LoRA classes. A model has hundreds of
tensors that hold slots. What each pull asks is answered with one look at each: meanwhile the
engine's thread cannot have the interpreter.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch

from fanin._digest import box_digests
from fanin._dtypes import dtype_bits, torch_dtype
from fanin._served import scaled
from fanin._tensors import Shard
from fanin.engine.slot_images import Image, Layout, Part
from fanin.errors import RequestError, StateError
from fanin.mapping import About, MappingError, Trace, layer_of
from fanin.mapping import Mapping as SlotMapping
from fanin.mapping._held import Told
from fanin.torch import on_disk
from fanin.vllm import patches


def unfitting(why: str) -> RequestError:
    """The error of an adapter that has no place in this engine's slots, or of such an engine."""
    return RequestError.make(why, "a directory is loaded as ever", phase="slots")


def unfit(worker: Any) -> str:
    """Why the slots of *worker* cannot be filled, ``""`` if they can be. Does not block."""
    try:
        patches.require_version()
    except RequestError as error:
        return error.message
    loader = loader_of(worker)
    manager = getattr(loader, "_adapter_manager", None)
    if manager is None:
        return "the worker has no LoRA manager"
    if manager.is_pooling_model:
        return "a pooling model"
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return "pipeline parallelism"
    if getattr(parallel, "enable_elastic_ep", False):
        return "workers may come later (elastic expert parallelism)"
    strange = [name for name, module in manager.modules.items() if not stacks_of(module)]
    return f"the layer {strange[0]} keeps its adapters in an unknown way" if strange else ""


# ------------------------------------------------------------------------- vLLM's own classes


_MOE = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
_PLAIN = ("lora_a_stacked", "lora_b_stacked")


class Stack(NamedTuple):
    """One of a module's tensors that hold all slots; the first dimension is the slot."""

    attribute: str
    place: int | None
    tensor: Any

    @property
    def leaf(self) -> str:
        return self.attribute if self.place is None else f"{self.attribute}.{self.place}"


def _attributes(module: Any) -> tuple[str, ...]:
    return _MOE if hasattr(module, _MOE[0]) else _PLAIN


def stacks_of(module: Any) -> list[Stack]:
    """Of one of vLLM's modules with LoRA; none: it keeps its adapters in an unknown way."""
    found = []
    for attribute in _attributes(module):
        value = getattr(module, attribute, None)
        if isinstance(value, torch.Tensor):
            found.append(Stack(attribute, None, value))
        elif isinstance(value, (tuple, list)):
            found += [Stack(attribute, i, tensor) for i, tensor in enumerate(value)]
    return found


class SlotMemory:
    """All slots of one of vLLM's managers of adapters, as they were when this was made.

    signature: of the memory; where another one is an adapter needs another layout.
    """

    def __init__(self, manager: Any) -> None:
        self._modules = list(manager.modules.values())
        self._holders = [
            (module, attribute, getattr(module, attribute, None))
            for module in self._modules
            for attribute in _attributes(module)
        ]
        stacks = {path: stacks_of(module) for path, module in manager.modules.items()}
        self._tensors = [stack.tensor for of_one in stacks.values() for stack in of_one]
        self._at = [(tensor.shape, tensor.data_ptr()) for tensor in self._tensors]
        self.signature = tuple(
            (path, stack.leaf, tuple(stack.tensor.shape), stack.tensor.dtype)
            for path, of_one in stacks.items()
            for stack in of_one
        )

    def stands(self, manager: Any) -> bool:
        """Whether *manager* has its slots there still."""
        now = manager.modules
        return (
            len(now) == len(self._modules)
            and all(map(operator.is_, now.values(), self._modules))
            and all(getattr(module, name, None) is held for module, name, held in self._holders)
            and all(
                tensor.shape == shape and tensor.data_ptr() == at
                for tensor, (shape, at) in zip(self._tensors, self._at, strict=True)
            )
        )


def loader_of(worker: Any) -> Any:
    return getattr(getattr(worker, "model_runner", None), "lora_manager", None)


def _twin(module: Any, dtype: Any = None) -> Any:
    """A module that does what *module* does to tensors of its own, of one slot, on the CPU."""
    twin = copy.copy(module)
    held: dict[str, Any] = {}
    for attribute, index, tensor in stacks_of(module):
        made = torch.zeros((1, *tensor.shape[1:]), dtype=dtype or tensor.dtype, device="cpu")
        held[attribute] = made if index is None else (*held.get(attribute, ()), made)
    if hasattr(module, "adapter_enabled"):
        held["adapter_enabled"] = torch.zeros(2, dtype=torch.int, device="cpu")
    twin.__dict__.update(held)
    return twin


def _mapper(manager: Any) -> Any:
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _set(manager: Any, lora: Any, path: str, twin: Any) -> None:
    weights = manager._get_lora_layer_weights(lora, path)
    if weights:
        twin.set_lora(0, weights.lora_a, weights.lora_b)


# -------------------------------------------------------------------------------- the layout


def record_layout(
    loader: Any,
    published: Iterable[Any],
    config: Mapping[str, Any],
    *,
    is_3d: bool = False,
    dtype: str | None = None,
    about: About | None = None,
    partial: bool = False,
) -> Layout:
    """Runs vLLM's own naming, packing and slicing over numbers, a decoder layer at a time.

    Reads vLLM's modules, and writes nothing to them.

    Args:
        loader: vLLM's WorkerLoRAManager.
        published: all tensors of the publication.
        config: the adapter's PEFT configuration.
        is_3d: the request's ``is_3d_lora_weight``.
        dtype: of the pulls.
        partial: leave out tensors that have no place here.

    Raises:
        RequestError: its slots cannot be filled by boxes.
    """
    recorder = _Recorder(loader, list(published), config, is_3d, dtype, about)
    try:
        return recorder.layout(partial)
    except MappingError as error:
        raise unfitting(error.message) from None


class _Recorder:
    def __init__(
        self,
        loader: Any,
        published: list[Any],
        config: Mapping[str, Any],
        is_3d: bool,
        dtype: str | None,
        about: About | None,
    ) -> None:
        from vllm.lora.lora_model import _is_remote_expert_key
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.utils import parse_fine_tuned_lora_name

        self._loader, self._manager = loader, loader._adapter_manager
        self._is_3d = is_3d
        self._mapper = _mapper(self._manager)
        self._helper = PEFTHelper.from_dict(dict(config))
        self._trace = Trace(published, dtype=dtype, about=about)
        self._files = {entry.name: on_disk(entry.name) for entry in published}
        spec = self._manager.moe_ep_load_spec
        #: By layer: names of published tensors, each with its module.
        self._layers: dict[str, dict[str, tuple[str, bool]]] = {}
        #: Experts of other workers, by vLLM's own rule.
        self._remote: set[str] = set()
        for name, file in self._files.items():
            if spec is not None and _is_remote_expert_key(file, spec):
                self._remote.add(name)
                continue
            module, is_a = parse_fine_tuned_lora_name(file, self._mapper)
            self._layers.setdefault(layer_of(module), {})[name] = module, is_a
        self._scales: dict[str, float] = {}

    def layout(self, partial: bool) -> Layout:
        switched: list[str] = []
        for layer, names in self._layers.items():
            self._one(layer, names, switched)
        mapping = self._trace.mapping()
        lost = [name for name in mapping.unwanted if name not in self._remote]
        if (lost and not partial) or not mapping.modules:
            raise unfitting(
                f"{len(lost)} tensors have no place in the slots of this engine: "
                + ", ".join(lost[:3])
            )
        return Layout(
            mapping,
            tuple(self._parts(mapping)),
            tuple(switched),
            SlotMemory(self._manager).signature,
        )

    def _one(self, layer: str, names: dict[str, tuple[str, bool]], switched: list[str]) -> None:
        """Records one layer; all that is made for it is let go of."""
        from vllm.lora.lora_model import LoRAModel

        part = copy.copy(self._manager)
        part.modules = {
            p: _twin(m, torch.float64)
            for p, m in self._manager.modules.items()
            if layer_of(p) == layer
        }
        part.packed_modules = {
            p: list(v) for p, v in self._manager.packed_modules.items() if layer_of(p) == layer
        }
        if not part.modules:
            return
        lora = patches.unpinned(LoRAModel.from_lora_tensors)(
            1,
            {self._files[name]: self._trace.lend(name) for name in names},
            self._helper,
            device="cpu",
            dtype=torch.float64,
            model_vocab_size=self._loader.vocab_size,
            weights_mapper=self._mapper,
            skip_prefixes=getattr(self._manager.model, "lora_skip_prefixes", None),
        )
        if lora.modules_to_save:
            raise unfitting("modules that are saved whole")
        for name, (module, is_a) in names.items():
            weights = lora.loras.get(module)
            self._scales[name] = 1.0 if is_a or weights is None else float(weights.scaling)
        for weights in lora.loras.values():
            weights.scaling = 1  # values are places here; the parts are scaled when they land
        lora.is_3d_lora_weight = self._is_3d
        part._validate_moe_lora_format(lora)
        patches.unpinned(MethodType(type(part)._create_merged_loras_inplace, part))(lora)
        for path, twin in part.modules.items():
            _set(part, lora, path, twin)
            for stack in stacks_of(twin):
                self._trace.found(path, type(twin).__name__, stack.leaf, stack.tensor[0])
            if hasattr(twin, "adapter_enabled") and int(twin.adapter_enabled[0]):
                switched.append(path)

    def _parts(self, mapping: SlotMapping) -> Iterator[Part]:
        for module in mapping.modules:
            stacks = {s.leaf: s for s in stacks_of(self._manager.modules[module.path])}
            for leaf in module.leaves:
                stack = stacks[leaf.name]
                scales = {self._scales[source.name] for source in leaf.sources}
                if len(scales) > 1:
                    raise unfitting(f"the experts of {module.path} are scaled differently")
                yield Part(
                    module.path,
                    stack.attribute,
                    stack.place,
                    leaf.name,
                    stack.tensor.dtype,
                    scales.pop(),
                )


def _twin_of(manager: Any, lora: Any, path: str) -> Any:
    """A module of vLLM's with one slot, on the CPU, into which vLLM has put what it has of *lora*
    in its memory."""
    twin = _twin(manager.modules[path])
    _set(manager, lora, path, twin)
    return twin


def prove(loader: Any, image: Image, request: Any) -> None:
    """Whether *image* is what vLLM's own load of *request*'s directory puts into a slot.

    Raises RequestError naming the first tensor in which it is not.
    """
    from safetensors import safe_open

    with safe_open(Path(request.lora_path) / "adapter_model.safetensors", framework="pt") as file:
        there = set(file.keys())
        names = {
            e.name for m in image.layout.mapping.modules for leaf in m.leaves for e in leaf.sources
        }
        strange = [name for name in names if on_disk(name) not in there]
        if strange:
            raise unfitting(f"the file has no {on_disk(strange[0])}")
        image.read(lambda name: file.get_tensor(on_disk(name)))
    image.finish()
    lora = type(loader)._load_adapter(loader, request)
    manager = copy.copy(loader._adapter_manager)
    type(manager)._create_merged_loras_inplace(manager, lora)
    for path in manager.modules:
        twin = _twin_of(manager, lora, path)
        for stack in stacks_of(twin):
            mine = image.slot_of(path, stack.leaf, stack.tensor[0])
            if not torch.equal(_bits(mine), _bits(stack.tensor[0])):
                raise unfitting(f"vLLM's own load puts something else into {path}.{stack.leaf}")
        switch = getattr(twin, "adapter_enabled", None)
        if switch is not None and bool(switch[0]) != (path in image.layout.switched):
            raise unfitting(f"vLLM's own load switches {path} otherwise")


def _bits(tensor: Any) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8)


# ------------------------------------------------------------------------- what is held


#: All tensors that a module has of one adapter, by leaf, by the module's path.
Slot = Callable[[str], dict[str, Any]]


def held(
    worker: Any,
    number: int,
    tensors: Sequence[tuple[str, Sequence[int]]],
    config: Mapping[str, Any],
    is_3d: bool,
) -> dict[str, Any]:
    """What *worker* holds of the adapter that vLLM has given that number.

    Args:
        tensors: that are published: names and shapes.
        config: the adapter's PEFT configuration.
        is_3d: of vLLM's request.

    Raises StateError if it has none of that number, RequestError if its slots cannot be read.
    """
    if why := unfit(worker):
        raise RequestError.make(f"no digests of adapters here: {why}")
    loader = worker.model_runner.lora_manager
    manager = loader._adapter_manager
    lora = manager.list_adapters().get(number)
    if lora is None:
        raise StateError.make(
            f"this worker has no adapter {number} now", "send the adapter a request, and ask again"
        )
    # Types are of no matter: what is read is compared in the slots' own.
    published = [Shard(name, "F32", tuple(shape), (), -1) for name, shape in tensors]
    layout = record_layout(loader, published, config, is_3d=is_3d, partial=True)
    slot = _slot_of(manager, lora, number)
    with torch.no_grad():
        found, filled = _boxes(layout, slot)
        strange = [
            f"{path}.{leaf}: it is not zero where the adapter has nothing"
            for path in manager.modules
            for leaf, tensor in slot(path).items()
            if int(torch.count_nonzero(tensor)) != filled.get((path, leaf), 0)
        ]
    return {"held": found, "different": strange, "unseen": [], "untold": [], "unused": []}


def _slot_of(manager: Any, lora: Any, number: int) -> Slot:
    if number in manager.lora_index_to_id:
        index = manager.lora_index_to_id.index(number)
        return lambda path: {s.leaf: s.tensor[index] for s in stacks_of(manager.modules[path])}
    image: Image | None = getattr(lora, "image", None)  # it came in the layout of the slots

    def made(path: str) -> dict[str, Any]:
        if image is None:
            twin = _twin_of(manager, lora, path)
            return {stack.leaf: stack.tensor[0] for stack in stacks_of(twin)}
        return {
            stack.leaf: image.slot_of(path, stack.leaf, stack.tensor[0])
            for stack in stacks_of(manager.modules[path])
        }

    return functools.cache(made)


def _boxes(layout: Layout, slot: Slot) -> tuple[list[Told], dict[tuple[str, str], int]]:
    """Every box of a published tensor, and how many elements of each of the slot's tensors, where
    the adapter fills it, are not zero."""
    boxes, filled = [], {}
    for part, leaf in zip(layout.parts, layout.leaves(), strict=True):
        final = slot(part.path)[part.leaf][tuple(slice(n) for n in leaf.shape)]
        filled[part.path, part.leaf] = int(torch.count_nonzero(final))
        boxes += [(name, piece, part, one) for name, piece, one in _pieces(leaf, final)]
    digests = box_digests((values, piece.offset) for _, piece, _, values in boxes)
    return [
        (name, list(piece.offset), list(piece.extent), {_kind(part): digest})
        for (name, piece, part, _), digest in zip(boxes, digests, strict=True)
    ], filled


def _pieces(leaf: Any, final: Any) -> Iterator[tuple[str, Any, Any]]:
    """The published boxes in a slot's tensor, whose elements lie in another order than they land
    in."""
    size = dtype_bits(leaf.dtype) // 8
    steps = [step // size for step in leaf.stride]
    landed = torch.empty_strided(leaf.shape, steps, dtype=final.dtype, device=final.device)
    landed.copy_(final)
    for source in leaf.sources:
        for piece in source.pieces:
            strides = [step // size for step in piece.stride]
            yield source.name, piece, landed.as_strided(piece.extent, strides, piece.at // size)


def _kind(part: Part) -> str:
    return scaled(str(torch_dtype(part.dtype)), part.scale)
