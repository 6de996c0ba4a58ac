# SPDX-License-Identifier: Apache-2.0
"""What a vLLM worker has of adapters in the layout of its slots, and its pulls into them.

vLLM still decides which adapter has which slot, and when one leaves; it asks for an adapter as
ever, and is given an image (:mod:`fanin.engine.slot_images`) instead of a directory.

A layout is learnt from an adapter that is here as a directory: vLLM's own code is run over numbers
(:mod:`fanin.vllm.slots`), and what the layout then makes of the directory is compared with what
vLLM's own load makes of it, byte for byte. Only a layout that has passed that is ever used.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fanin._otel import within
from fanin.engine.clients import remaining
from fanin.engine.faults import to_wire
from fanin.engine.jobs import Done, Jobs, Progress
from fanin.engine.pulls import PullService, catalog_digest, version_of
from fanin.engine.slot_images import Image, Layout
from fanin.errors import CancelledError, FaninError, HostError, StaleError
from fanin.vllm import patches
from fanin.vllm.slots import SlotMemory, loader_of, prove, record_layout, unfit, unfitting

_log = logging.getLogger("vllm.fanin")


_SPARE = 2  # images that are kept for the next pull
_ON_GPU = 3  # images that stay in a GPU's memory: two that are kept, as is usual, and the next


class Slots:
    """What one worker has of adapters in the layout of its slots.

    Made in the engine's thread: from then on vLLM is given images where there are some. Layouts and
    images come and go in any thread.
    """

    def __init__(self, worker: Any) -> None:
        self.loader = loader_of(worker)
        self.manager = self.loader._adapter_manager
        self._memory = SlotMemory(self.manager)
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
        with suppress(RuntimeError):  # the engine's thread has just changed the list
            loaded = list(self.manager.list_adapters().values())
            if not any(getattr(model, "image", None) is image for model in loaded):
                self.give_back(image)

    def give_back(self, image: Image) -> None:
        """An image that nothing uses: the next pull may fill it."""
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
        """vLLM chooses the slot and clears it, since the adapter names no module."""
        manager = self._slots.manager
        lora = manager.list_adapters().get(lora_id)
        fresh = original(lora_id)
        if fresh and isinstance(lora, self._model):
            try:
                lora.image.put(manager, manager.lora_index_to_id.index(lora_id))
            except BaseException:
                with suppress(Exception):
                    manager.remove_adapter(lora_id)
                raise
        return bool(fresh)


# ------------------------------------------------------------------------------- its jobs


def _short(error: MemoryError) -> HostError:
    return HostError.make(str(error) or "no memory for an adapter", "keep fewer adapters")


class _Hold:
    """An image that the engine may ask for by its path; what a lease is to a directory."""

    def __init__(self, slots: Slots, path: str) -> None:
        self._slots, self._path = slots, path

    def release(self, *, delete: bool) -> bool:
        self._slots.release(self._path)
        return True


class _Nothing:
    """What a job that brought no adapter gives back."""

    def release(self, *, delete: bool) -> bool:
        return False


class WorkerSlots:
    """The slots of one worker as an end of its jobs. Made in the engine's thread."""

    def __init__(self, worker: Any) -> None:
        why = unfit(worker)
        if why:
            raise unfitting(why)
        self._slots = Slots(worker)
        self.jobs = Jobs()

    def begin(
        self, job: dict[str, Any], service: Callable[[], PullService]
    ) -> Callable[[Progress], Done]:
        """What a thread has to do to pull, or to learn a layout; see
        :class:`fanin.engine.slots_way.SlotWay`. In the engine's thread.

        service: makes the one to pull with; called in the job's thread.
        """

        def run(progress: Progress) -> Done:
            try:
                with within(job.get("trace")):
                    return self._run(job, service, progress)
            except MemoryError as error:
                raise _short(error) from error

        return run

    def _run(
        self, job: dict[str, Any], service: Callable[[], PullService], progress: Progress
    ) -> Done:
        self._slots.use_device()
        deadline = time.monotonic() + float(job["timeout"])
        with service().connected(job, deadline) as client:
            if job["learn"]:
                return self._learn(client, job, deadline)
            return self._pull(client, job, deadline, progress)

    # ------------------------------------------------------------------ adding

    def add(self, adapter: dict[str, Any]) -> dict[str, Any]:
        """Adds an adapter to vLLM's, or says why not; raises nothing. In the engine's thread.

        adapter: adapter, its name; number, path, is_3d.
        """
        from vllm.lora.request import LoRARequest

        try:
            self._slots.loader.add_adapter(
                LoRARequest(
                    adapter["adapter"],
                    adapter["number"],
                    adapter["path"],
                    is_3d_lora_weight=adapter["is_3d"],
                )
            )
        except MemoryError as error:
            return {"error": to_wire(_short(error))}
        except Exception as error:
            _log.warning("fanin: %s was not added", adapter["adapter"], exc_info=True)
            return {"error": to_wire(error)}
        return {"error": None}

    # ------------------------------------------------------------------ a pull

    def _pull(self, client: Any, job: dict[str, Any], deadline: float, progress: Progress) -> Done:
        layout = self._slots.layout(job["layout"])
        if layout is None:
            raise unfitting("this worker does not know the layout any more")
        path = job["path"]
        if self._slots.hold(path) is not None:  # another caller has brought it
            return Done.of(job, _Hold(self._slots, path), reused=True)
        image = self._slots.take(layout)
        try:
            result = client.pull_into(
                job["run"],
                image.packed.tensors,
                step=int(job["step"]),
                timeout=remaining(deadline),
                dtype=image.packed.dtype,
                stream=image.stream,
                max_bytes=job["how"]["max_bytes"],
                progress=progress,
            )
            self._check_catalog(client, job, deadline)
            image.finish()
        except BaseException:
            self._slots.give_back(image)
            raise
        if self._slots.hold(path, image) is not image:
            self._slots.give_back(image)
        self._slots.settle()
        return Done.of(job, _Hold(self._slots, path), result)

    def _check_catalog(self, client: Any, job: dict[str, Any], deadline: float) -> None:
        """Whether what was pulled is laid out, and scaled, as the layout says."""
        found = client.publications(timeout=remaining(deadline))
        if version_of(found, job["run"]) == job["version"]:
            return
        entries = client.catalog(job["run"], timeout=remaining(deadline))
        metadata = client.metadata(job["run"], timeout=remaining(deadline))
        if catalog_digest(entries, metadata) != job["digest"]:
            raise StaleError.make(
                "the trainer has changed the adapter's tensors or configuration meanwhile",
                "ask again",
            )

    # ---------------------------------------------------------------- learning

    def _learn(self, client: Any, job: dict[str, Any], deadline: float) -> Done:
        begun = time.monotonic()
        entries = client.catalog(job["run"], timeout=remaining(deadline))
        self._check_catalog(client, job, deadline)
        try:
            layout = self._proven(entries, job)
        except FaninError:
            raise
        except Exception as error:
            if not Path(job["path"]).is_dir():
                raise CancelledError.make("the directory has been retired", "") from error
            # vLLM's own code, with what it does not expect.
            raise unfitting(f"{type(error).__name__}: {error}") from error
        self._slots.keep(job["layout"], layout)
        _log.info(
            "fanin: run %s: %d tensors go into %d of vLLM's slots; recorded and proven in %.3f s",
            job["run"],
            len(layout.mapping.wanted()),
            len(layout.parts),
            time.monotonic() - begun,
        )
        return Done.of({**job, "path": ""}, _Nothing())

    def _proven(self, entries: Any, job: dict[str, Any]) -> Layout:
        from vllm.lora.request import LoRARequest

        config = json.loads((Path(job["path"]) / "adapter_config.json").read_text())
        how = {"is_3d": job["is_3d"], "dtype": job["how"]["dtype"]}
        layout = record_layout(self._slots.loader, entries, config, **how)
        image = self._slots.take(layout)
        request = LoRARequest("fanin-proof", 1, job["path"], is_3d_lora_weight=job["is_3d"])
        prove(self._slots.loader, image, request)
        self._slots.give_back(image)
        return layout
