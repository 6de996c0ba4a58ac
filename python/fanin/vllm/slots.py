# SPDX-License-Identifier: Apache-2.0
"""Adapters as they lie in vLLM's LoRA slots: where each published element goes, found out once, and
which images (:mod:`fanin.vllm.images`) a worker has, which pulls fill and vLLM copies into slots.

This file, :mod:`fanin.vllm.slot_memory` and :mod:`fanin.vllm.lora_held` alone know vLLM's LoRA
classes. vLLM still decides which adapter has which slot, and when one leaves; it asks for an
adapter as ever, and is given an image instead of a directory.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch

from fanin.engine.lora_places import file_name
from fanin.engine.slot_table import Seat, Seats
from fanin.errors import RequestError
from fanin.mapping import About, MappingError, Trace, layer_of
from fanin.mapping import Mapping as SlotMapping
from fanin.vllm import patches
from fanin.vllm.images import Image
from fanin.vllm.slot_memory import SlotMemory, stacks_of

__all__ = ["Layout", "Part", "Slots", "prove", "twin_of", "unfit", "unfitting"]

_log = logging.getLogger("vllm.fanin")

#: Of vLLM, for which the names below are right.
VERSIONS = ("0.32.",)
_SPARE = 2  # images that are kept for the next pull
_ON_GPU = 3  # images that stay in a GPU's memory: two that are kept, as is usual, and the next


def unfitting(why: str) -> RequestError:
    """The error of an adapter that has no place in this engine's slots, or of such an engine."""
    return RequestError.make(why, "a directory is loaded as ever", phase="slots")


def unfit(worker: Any) -> str:
    """Why the slots of *worker* cannot be filled, ``""`` if they can be. Does not block."""
    from vllm import __version__ as version

    if not version.startswith(VERSIONS):
        return f"vLLM {version} is none whose slots are known ({', '.join(VERSIONS)}x)"
    loader = _loader(worker)
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


def _loader(worker: Any) -> Any:
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


def _idle_slot(worker: Any, manager: Any, kept: set[int]) -> int | None:
    """A slot that no adapter has, or that of the adapter that vLLM would let go of next, which goes
    now, if no request runs with it. None: there is none but *kept*. In the engine's thread."""
    slots = manager.lora_index_to_id
    free = [index for index, number in enumerate(slots) if number is None and index not in kept]
    if free:
        return int(free[0])
    batch = getattr(worker.model_runner, "input_batch", None)
    running = getattr(batch, "lora_id_to_request_ids", None)
    active = manager._active_adapters
    oldest = next((number for number in active.order if number not in active.pinned_items), None)
    if running is None or oldest is None or oldest in running:
        return None
    index = int(slots.index(oldest))
    active.remove_oldest()
    return index


def _sit_down(manager: Any, number: int, index: int) -> None:
    """What vLLM's own activation does, but for the weights."""
    manager._active_adapters[number] = None
    manager.lora_index_to_id[index] = number


def _set(manager: Any, lora: Any, path: str, twin: Any) -> None:
    weights = manager._get_lora_layer_weights(lora, path)
    if weights:
        twin.set_lora(0, weights.lora_a, weights.lora_b)


# -------------------------------------------------------------------------------- the layout


class Part(NamedTuple):
    """What of one slot an adapter fills in one of vLLM's tensors, from the first element on."""

    path: str
    attribute: str
    place: int | None
    leaf: str
    #: Of the slot.
    dtype: Any
    #: What vLLM multiplies it by.
    scale: float


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tensors of a publication go in a slot of one worker. Immutable; any thread."""

    mapping: SlotMapping
    parts: tuple[Part, ...]
    #: Modules that have a switch for each slot, which is on with this adapter.
    switched: tuple[str, ...]
    signature: tuple[Any, ...]

    @classmethod
    def record(
        cls,
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

    def leaves(self) -> Iterator[Any]:
        """Those of the mapping, in the order of the parts."""
        for module in self.mapping.modules:
            yield from module.leaves


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
        self._files = {entry.name: file_name(entry.name) for entry in published}
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


def twin_of(manager: Any, lora: Any, path: str) -> Any:
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
        strange = [name for name in names if file_name(name) not in there]
        if strange:
            raise unfitting(f"the file has no {file_name(strange[0])}")
        image.read(lambda name: file.get_tensor(file_name(name)))
    image.finish()
    lora = type(loader)._load_adapter(loader, request)
    manager = copy.copy(loader._adapter_manager)
    type(manager)._create_merged_loras_inplace(manager, lora)
    for path in manager.modules:
        twin = twin_of(manager, lora, path)
        for stack in stacks_of(twin):
            mine = image.slot_of(path, stack.leaf, stack.tensor[0])
            if not torch.equal(_bits(mine), _bits(stack.tensor[0])):
                raise unfitting(f"vLLM's own load puts something else into {path}.{stack.leaf}")
        switch = getattr(twin, "adapter_enabled", None)
        if switch is not None and bool(switch[0]) != (path in image.layout.switched):
            raise unfitting(f"vLLM's own load switches {path} otherwise")


def _bits(tensor: Any) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8)


# ------------------------------------------------------------------------ in a vLLM's worker


class Slots:
    """What one worker has of adapters in the layout of its slots.

    Made in the engine's thread: from then on vLLM is given images where there are some. Layouts and
    images come and go in any thread.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.loader = _loader(worker)
        self.manager = self.loader._adapter_manager
        self._memory = SlotMemory(self.manager)
        self._seats = Seats()
        self._lock = threading.Lock()
        self._layouts: dict[str, Layout] = {}
        self._images: dict[str, tuple[Image, int]] = {}  # by path, with how often it is held
        self._spare: list[Image] = []
        cuda = self.manager.device.type == "cuda"
        self._gpu = self.manager.device if cuda else None
        self._there: list[weakref.ref[Image]] = []
        _Images(self)

    def use_device(self) -> None:
        """In a new thread: pinned memory is this worker's GPU's, not the first one's."""
        if self.manager.device.type == "cuda" and self.manager.device.index is not None:
            torch.cuda.set_device(self.manager.device)

    def layout(self, key: str) -> Layout | None:
        """The layout that was learnt under that key, if vLLM's memory is as it was."""
        with self._lock:
            layout = self._layouts.get(key)
        if layout is not None and layout.signature != self._memory_now().signature:
            with self._lock:
                self._layouts.pop(key, None)
            return None
        return layout

    def _memory_now(self) -> SlotMemory:
        memory = self._memory
        if not memory.stands(self.manager):
            memory = self._memory = SlotMemory(self.manager)
        return memory

    def keep(self, key: str, layout: Layout) -> None:
        with self._lock:
            self._layouts[key] = layout

    def take(self, layout: Layout) -> Image:
        """An image to be filled; on a GPU's engine in its memory, if there is room."""
        with self._lock:
            for place, image in enumerate(self._spare):
                if image.layout is layout:
                    del self._spare[place]
                    image.whole = False
                    break
            else:
                image = None
        if image is None:
            image = self._new(layout)
        image.wait()
        self._newest(image)
        return image

    def _new(self, layout: Layout) -> Image:
        if self._gpu is None:
            return Image(layout)
        try:
            with self._lock:
                self._spare = []  # of other layouts
            return Image(layout, device=self._gpu)
        except torch.OutOfMemoryError as error:
            _log.warning("fanin: an adapter lands in host memory: %s", str(error).split(". ")[0])
            return Image(layout, pinned=True)

    def _newest(self, image: Image) -> None:
        """Of those that are there, vLLM's cache included, it will be moved last."""
        with self._lock:
            there = [ref for ref in self._there if ref() not in (None, image)]
            self._there = [*there, weakref.ref(image)]

    def settle(self) -> None:
        """Moves the oldest whole images out of the GPU's memory if there are many; most of it is
        the engine's.

        It uses a thread, as pinned memory takes long to get. Any thread.
        """
        with self._lock:
            there = [image for ref in self._there if (image := ref()) and image.on_gpu]
        many = [image for image in there[: max(len(there) - _ON_GPU, 0)] if image.whole]
        if many:
            threading.Thread(
                target=self._move, args=(many,), name="fanin-move", daemon=True
            ).start()

    def _move(self, images: list[Image]) -> None:
        self.use_device()
        for image in images:
            with self._lock:
                if image in self._spare or image.leaving or not image.whole:
                    continue  # its memory is wanted as it is, or another thread has it
                image.leaving = True
            try:
                image.to_host()
            except RuntimeError as error:
                _log.warning("fanin: an adapter stays in a GPU's memory: %s", error)

    def idle(self) -> bool:
        """Whether no request waits for a step, as far as the worker knows; the engine's thread."""
        batch = getattr(self._worker.model_runner, "input_batch", None)
        return not getattr(batch, "req_id_to_index", None)

    def keep_seat(self) -> Seat | None:
        """A slot to be filled before vLLM asks for it. In the engine's thread, which may be using
        the others; None if requests run with all, or it is a GPU's."""
        if self.manager.device.type != "cpu":
            return None
        index = _idle_slot(self._worker, self.manager, self._seats.indices())
        return None if index is None else self._seats.keep(index)

    def fill_seat(self, seat: Seat | None, image: Image) -> None:
        """Puts *image* into the slot that was kept, if vLLM has not taken it back."""
        if seat is None:
            return
        clearing = self._memory_now().clearing(seat.index)
        if seat.fill(itertools.chain(clearing, image.pieces(self.manager, seat.index))):
            image.seat = seat

    def let_go(self, seat: Seat | None) -> None:
        """The keeper of the slot has ended: the slot is vLLM's again, unless an image is in it."""
        if seat is not None and not seat.filled:
            self._seats.give_up(seat)

    def sit_down(self, number: int, image: Image) -> bool:
        """Whether the adapter of that number has a slot now without a copy. In the engine's
        thread, which may give any slot away after this."""
        seat, image.seat = image.seat, None
        whole = self._seats.give_up(seat)
        if seat is not None and whole and self.manager.lora_index_to_id[seat.index] is None:
            _sit_down(self.manager, number, seat.index)
            return True
        return False

    def stand_up(self) -> None:
        """vLLM gives a slot away now: the first that no adapter has."""
        slots = self.manager.lora_index_to_id
        if None in slots:
            self._seats.take_back(slots.index(None))

    def hold(self, path: str, image: Image | None = None) -> Image | None:
        """Holds the image of that path once more; *image*, if there is none yet. None: none."""
        with self._lock:
            there, times = self._images.get(path, (image, 0))
            if there is None:
                return None
            self._images[path] = there, times + 1
            return there

    def release(self, path: str) -> None:
        """Takes one hold back; with the last one vLLM cannot ask for it any more."""
        with self._lock:
            image, times = self._images.get(path, (None, 0))
            if image is None:
                return
            if times > 1:
                self._images[path] = image, times - 1
                return
            del self._images[path]
        self._seats.give_up(image.seat)
        with suppress(RuntimeError):  # the engine's thread has just changed the list
            loaded = list(self.manager.list_adapters().values())
            if not any(getattr(model, "image", None) is image for model in loaded):
                self.give_back(image)

    def give_back(self, image: Image) -> None:
        """An image that nothing uses: the next pull may fill it."""
        self._seats.give_up(image.seat)
        image.seat = None
        if image.on_gpu != (self._gpu is not None):
            return
        with self._lock:
            if image.leaving:
                return
            self._spare = [*self._spare, image][-_SPARE:]

    def image(self, path: str) -> Image | None:
        with self._lock:
            return self._images.get(path, (None, 0))[0]


class _Images:
    """What vLLM's managers of this worker are given: images for adapters that it has read and
    packed."""

    def __init__(self, slots: Slots) -> None:
        from vllm.lora.lora_model import LoRAModel

        class SlotModel(LoRAModel):
            """An adapter that lies in the layout of a slot."""

            def __init__(self, lora_model_id: int, image: Image) -> None:
                super().__init__(lora_model_id, 1, {})
                self.image = image

        self._slots, self._model = slots, SlotModel
        patches.put(slots.loader, "LRUCacheWorkerLoRAManager", self)
        patches.put(slots.manager, "LRUCacheLoRAModelManager", self)

    def load_adapter(self, original: Any, request: Any) -> Any:
        image = self._slots.image(request.lora_path)
        return original(request) if image is None else self._model(request.lora_int_id, image)

    def create_merged(self, original: Any, lora: Any) -> None:
        if not isinstance(lora, self._model):
            original(lora)

    def activate_adapter(self, original: Any, lora_id: int) -> bool:
        """vLLM chooses the slot and clears it, since the adapter names no module; or it has been
        filled."""
        manager = self._slots.manager
        lora = manager.list_adapters().get(lora_id)
        if lora_id not in manager._active_adapters:
            if isinstance(lora, self._model) and self._slots.sit_down(lora_id, lora.image):
                return True
            self._slots.stand_up()
        fresh = original(lora_id)
        if fresh and isinstance(lora, self._model):
            try:
                lora.image.put(manager, manager.lora_index_to_id.index(lora_id))
            except BaseException:
                with suppress(Exception):
                    manager.remove_adapter(lora_id)
                raise
        return bool(fresh)
