# SPDX-License-Identifier: Apache-2.0
"""The two ways of a step into a model: by a recorded mapping, or by vLLM's own loader.

By a mapping a module is *direct* if processing after load was seen to leave a patterned copy of its
tensors as they were, in bytes, layout and address: its bytes land where its kernels read them. What
is processed into something else is *staged*: bytes land in a skeleton, are processed, and the
result is copied into the memory that the kernels know, so that CUDA graphs hold. Skeletons of one
decoder layer at a time lie in a ring of few buffers.

Some loaders compute what they write, and no mapping can say that. Only the modules in question go
through vLLM's own `load_weights` then; or all of them, if the init says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from fanin._dtypes import dtype_bits
from fanin._records import PullResult
from fanin._tensors import PackedTensors, Shard, pack
from fanin.engine.copies import Copies, laid_out, room_of, span
from fanin.engine.deltas import Asking
from fanin.engine.landing import Landing, Progress, Summary, lend
from fanin.engine.trainers import Published, Trainer, left
from fanin.errors import RequestError, StaleError
from fanin.mapping import Bridge, Mapping, layer_of
from fanin.session import PullSession
from fanin.vllm import reload

_log = logging.getLogger("vllm.fanin")


def with_neighbours(mapping: Mapping) -> Mapping:
    """*mapping*, with the fallback widened to modules that share a tensor with it.

    The loader, given a published tensor, writes into all modules that take from it.
    """
    modules = list(mapping.modules)
    taken = {name for module in modules for name in module.taken if module.fallback}
    while True:
        before = len(taken)
        for index, module in enumerate(modules):
            names = {source.name for leaf in module.leaves for source in leaf.sources}
            if not module.fallback and names & taken:
                shared = min(names & taken)
                why = f"'{shared}' is of a module that is filled by the loader"
                modules[index] = module._replace(fallback=why, taken=tuple(sorted(names)))
                taken |= names
        if len(taken) == before:
            return replace(mapping, modules=tuple(modules))


class LoaderLanding(Landing):
    """vLLM's own `load_weights` on whole tensors, of which it is lent a decoder layer at a time.

    Every worker reads every tensor whole, and holds a layer of them beside the model.

    Args:
        others: paths of tensors that are another model's.
        fallback: fill only what no mapping of this can say; None: the whole model.
        verify: compare what has landed with digests that the ranks make.
    """

    def __init__(
        self,
        model: Any,
        model_config: Any,
        device: Any,
        published: Published,
        others: Container[str] = frozenset(),
        *,
        fallback: Mapping | None = None,
        verify: bool = False,
    ) -> None:
        self._model, self._config, self._device = model, model_config, device
        self._others, self._verify = others, verify
        self._published = published
        self._modules: tuple[str, ...] | None = None
        self._names = [entry.name for entry in published.entries]
        self._remedy = "publish the whole model under the names of its checkpoint"
        if fallback is not None:
            loaded = [module for module in fallback.modules if module.fallback]
            self.by_loader = self._modules = tuple(module.path for module in loaded)
            self._names = list(dict.fromkeys(name for module in loaded for name in module.taken))
            # It was seen to fill them when it was given all tensors.
            self._remedy = 'init with {"mode": "loader"}'

    def __str__(self) -> str:
        return "mode loader" if self._modules is None else f"{len(self._modules)} modules by loader"

    def pull(
        self, trainer: Trainer, step: int, deadline: float, writing: Callable[[], None]
    ) -> Summary:
        summary = Summary()
        sizes = {entry.name: entry.bytes for entry in self._published.entries}
        progress = Progress(step, sum(sizes[name] for name in self._names))

        def came(result: PullResult) -> None:
            progress.add(result.bytes)
            summary.add(result)
            summary.came_from(trainer.client, result)

        writing()
        reload.begin(self._model, self._modules, self._others)
        try:
            begun = time.monotonic()
            lent = lend(
                trainer,
                self._published,
                self._names,
                deadline,
                self._device,
                came,
                step=step,
                verify=self._verify,
                rank_progress=progress,
            )
            self._model.load_weights(lent)
            if len(summary.worlds) > 1:
                raise _launches(step)
            reload.require_filled(self._model, self._remedy)
            reload.end(self._model, self._config)
            summary.install = time.monotonic() - begun - summary.read
        finally:
            reload.abandon(self._model)
        return summary


def _launches(step: int) -> StaleError:
    return StaleError.make(
        f"the trainer was started again while step {step} was read", "update again"
    )


@dataclass
class _Staged:
    """A module that is processed: its skeletons are views of a buffer of the ring."""

    skeleton: reload.Skeleton
    #: What is made of its tensors points into them: they need memory of their own.
    own_memory: bool
    tensors: dict[str, Any] = field(default_factory=dict)

    def install(self) -> None:
        tensors = self.tensors
        if self.own_memory:
            tensors = {leaf: tensor.clone() for leaf, tensor in tensors.items()}
        self.skeleton.install(tensors)


@dataclass
class _Layer:
    """Modules that are read and installed together."""

    path: str
    modules: list[str] = field(default_factory=list)
    staged: list[_Staged] = field(default_factory=list)
    derived: list[reload.Skeleton] = field(default_factory=list)
    #: Of tensors that are wider than what is published: a router that vLLM keeps in F32.
    bridges: list[Bridge] = field(default_factory=list)
    #: Of its shards among all.
    first: int = 0
    count: int = 0


class MappedLanding(Landing):
    """Fills a model by a mapping, a decoder layer at a time.

    loader: fills the mapping's fallback, which :func:`with_neighbours` has made, if there is one.
    ring: how many layers' skeletons there are: one is read while another one is installed.
    verify: compare what has landed with digests that the ranks make.
    asking: for what has changed alone, where :attr:`holds_steps`; None: for the whole.
    Raises RequestError if a module can be filled in no way, naming it.
    """

    def __init__(
        self,
        model: Any,
        model_config: Any,
        device: Any,
        mapping: Mapping,
        loader: LoaderLanding | None = None,
        *,
        ring: int = 2,
        verify: bool = False,
        asking: Asking | None = None,
    ) -> None:
        self._loader, self._asking = loader, asking
        self.by_loader = () if loader is None else loader.by_loader
        self.model, self._config, self.device = model, model_config, device
        self.mapping = mapping
        self._modules: dict[str, Any] = {}
        self._direct = self._derived = 0
        self._layers = self._judge()
        self._ring = self._lay_out(max(ring, 1))
        self._ahead = max(len(self._ring), 1)
        #: (path, leaf) of all that something published fills.
        self.filled = {
            (module.path, leaf.name)
            for module in mapping.modules
            for leaf in module.leaves
            if leaf.sources and not module.fallback
        }
        self.verify = verify
        #: Of each module the leaves that land where kernels read them.
        self._plain: dict[str, list[str]] = {}
        for path, leaf in sorted(self.filled):
            place = self._skeletons.get(path)
            plain = self._plain.setdefault(path, [])
            if place is None or leaf not in place.tensors:
                plain.append(leaf)
        self.dtype = mapping.converts()
        shards: list[Shard] = []
        for layer in self._layers:
            layer.first = len(shards)
            shards += mapping.shards(self._tensor, layer.modules, layer.bridges)
            layer.count = len(shards) - layer.first
        self._packed = pack(shards)
        self._after = reload.Afterwards(model, model_config)
        self._bytes = sum(map(_bytes_of, shards))

    def hidden(self, path: str) -> bool:
        """Whether the module's kernels read what processing has made, not only its tensors."""
        return path in self._skeletons or path in self._deriving

    def derives(self, path: str) -> bool:
        """Whether processing the module makes something beside its tensors (a packed copy)."""
        return path in self._deriving

    def staged(self, path: str) -> bool:
        """Whether the module is processed into other tensors."""
        return path in self._skeletons

    @property
    def holds_steps(self) -> bool:
        """Whether the model's memory has the bytes of the last step as they were published, so that
        what has changed since can be put there."""
        as_published = not self._skeletons and self.dtype is None and not self.by_loader
        return as_published and not reload.widened(self.model)

    @property
    def whole(self) -> frozenset[str]:
        """Paths of the modules of which all tensors have to be new: they are processed."""
        return frozenset(self._skeletons)

    @property
    def verdicts(self) -> dict[str, int]:
        """How many modules are direct, derived (direct, and something is made of them) and
        staged."""
        staged = sum(len(layer.staged) for layer in self._layers)
        return {"direct": self._direct, "derived": self._derived, "staged": staged}

    def __str__(self) -> str:
        ring = sum(buffer.numel() for buffer in self._ring) / 1e6
        said = ", ".join(f"{count} modules {kind}" for kind, count in self.verdicts.items())
        rest = f"; {self._loader}" if self._loader is not None else ""
        return f"{said}; {len(self._ring)} buffers of {ring:.1f} MB in all{rest}"

    # ------------------------------------------------------------------------------ once

    def _judge(self) -> list[_Layer]:
        modules = dict(self.model.named_modules())
        trials: dict[Any, reload.Trial] = {}
        layers: dict[str, _Layer] = {}
        self._skeletons: dict[str, _Staged] = {}
        self._deriving: set[str] = set()
        for module in self.mapping.modules:
            if not module.filled or module.fallback:
                continue
            layer = layers.setdefault(layer_of(module.path), _Layer(layer_of(module.path)))
            layer.modules.append(module.path)
            skeleton = reload.Skeleton(module.path, modules[module.path])
            if not skeleton.processed():
                if not skeleton.laid_out_as_live():
                    raise _stranger(module.path)
                self._direct += 1
                continue
            signature = skeleton.signature()
            if signature not in trials:
                trials[signature] = skeleton.try_out(_pattern(skeleton, self.device))
            trial = trials[signature]
            if trial.derived:
                self._deriving.add(module.path)
            if trial.same and skeleton.laid_out_as_live():
                self._direct += not trial.derived
                self._derived += trial.derived
                if trial.derived:
                    layer.derived.append(skeleton)
            elif trial.fits:
                staged = _Staged(skeleton, trial.kept)
                layer.staged.append(staged)
                self._skeletons[module.path] = staged
            else:
                raise _stranger(module.path)
        return list(layers.values())

    def _lay_out(self, ring: int) -> list[Any]:
        """Gives every staged module its place in a buffer of the ring; the buffers."""
        import torch

        sizes = [sum(map(_room, layer.staged)) for layer in self._layers]
        used = [size for size in sizes if size]
        buffers = [
            torch.empty(max(used), dtype=torch.uint8, device=self.device)
            for _ in range(min(ring, len(used)))
        ]
        turn = 0
        for layer, size in zip(self._layers, sizes, strict=True):
            if not size:
                continue
            at, buffer = 0, buffers[turn % len(buffers)]
            turn += 1
            for staged in layer.staged:
                staged.tensors = laid_out(buffer, staged.skeleton.leaves, at)
                at += _room(staged)
        return buffers

    def _tensor(self, path: str, leaf: str) -> Any:
        """Where a leaf's bytes land."""
        staged = self._skeletons.get(path)
        if staged is not None and leaf in staged.tensors:
            return staged.tensors[leaf]
        return getattr(self.module(path), leaf)

    # ------------------------------------------------------------------------------ each step

    def pull(
        self, trainer: Trainer, step: int, deadline: float, writing: Callable[[], None]
    ) -> Summary:
        """The loader's part first: what comes after all modules is the mapped part's to do."""
        import torch

        summary = Summary()
        if self._loader is not None:
            summary = self._loader.pull(trainer, step, deadline, writing)
        asked = self._asking is not None and self.holds_steps
        attempt = self._changed if asked else self._attempt
        with torch.no_grad():
            while True:
                try:
                    result = attempt(trainer, step, deadline, writing, summary)
                    break
                except StaleError as error:
                    # The step may be there still: an abort, or a rank that was paused.
                    summary.restarts += 1
                    _log.info("fanin: step %d is read again from the start: %s", step, error)
            start = time.monotonic()
            self._finish()
            summary.install += time.monotonic() - start
        summary.add(result, asked)
        summary.came_from(trainer.client, result)
        if len(summary.worlds) > 1:
            raise _launches(step)
        return summary

    def reach(self, trainer: Trainer, deadline: float) -> None:
        self._begin(trainer, None, deadline, None).abandon()

    def _begin(
        self, trainer: Trainer, step: int | None, deadline: float, progress: Progress | None
    ) -> PullSession:
        session: PullSession = trainer.client.begin(
            trainer.run,
            self._packed,
            step=step,
            timeout=left(deadline),
            dtype=self.dtype,
            verify=self.verify,
            rank_progress=progress,
        )
        return session

    def _attempt(
        self,
        trainer: Trainer,
        step: int,
        deadline: float,
        writing: Callable[[], None],
        summary: Summary,
    ) -> Any:
        """Reads and installs every layer of one session; its result is the proof of all of it."""
        begun = time.monotonic()
        session = self._begin(trainer, step, deadline, Progress(step, self._bytes))
        summary.ready = time.monotonic() - begun
        writing()
        with session, ThreadPoolExecutor(1, thread_name_prefix="fanin-read") as reader:
            ahead: deque[Future[None]] = deque()
            try:
                for index, layer in enumerate(self._layers):
                    # A buffer is read into when what was in it is installed.
                    while len(ahead) < self._ahead and index + len(ahead) < len(self._layers):
                        following = self._layers[index + len(ahead)]
                        self._prepare(following)
                        ahead.append(reader.submit(session.read, following.first, following.count))
                    ahead.popleft().result()
                    start = time.monotonic()
                    self._install(layer)
                    summary.install += time.monotonic() - start
            finally:
                reader.shutdown(cancel_futures=True)
            begun = time.monotonic()
            result = session.end()
            summary.proof = time.monotonic() - begun
            return result

    def _changed(
        self,
        trainer: Trainer,
        step: int,
        deadline: float,
        writing: Callable[[], None],
        summary: Summary,
    ) -> PullResult:
        """Likewise by one pull: what has changed since the step that the model holds, or all."""
        assert self._asking is not None
        writing()
        result: PullResult = trainer.client.pull_into(
            trainer.run,
            self._packed,
            step=step,
            timeout=left(deadline),
            rank_progress=Progress(step, self._bytes),
            **self._asking.options(),
        )
        self._asking.came(result)
        summary.ready, summary.proof = result.total - result.read, result.verify
        start = time.monotonic()
        for layer in self._layers:
            self._install(layer)
        summary.install += time.monotonic() - start
        return result

    def touched(self) -> None:
        self._packed.touched()

    def _prepare(self, layer: _Layer, padding: bool = True) -> None:
        """What no published element fills: padding, and what the engine has of its own."""
        staged = [one.skeleton.name for one in layer.staged]
        if not staged:
            return
        for one in layer.staged:
            for leaf, tensor in one.tensors.items():
                if (one.skeleton.name, leaf) not in self.filled:
                    tensor.copy_(one.skeleton.live(leaf))
        if padding:
            self.mapping.fill(self._tensor, staged)

    def installation(self, tensors: dict[tuple[str, str], Any]) -> Callable[[], None]:
        """What installs a step that lies in *tensors*, by path and leaf: all that is filled, and
        every leaf of staged modules. It works out once which tensor goes where.
        """
        plain = Copies(
            (self.live(path, leaf), tensors[path, leaf])
            for layer in self._layers
            for path in layer.modules
            for leaf in self._plain[path]
        )
        processed = [
            (layer, Copies(self._into_ring(layer, tensors)))
            for layer in self._layers
            if layer.staged or layer.derived
        ]

        def install() -> None:
            import torch

            with torch.no_grad():
                plain.make()
                for layer, staged in processed:
                    staged.make()
                    self._prepare(layer, padding=False)
                    self._process(layer)
                self._finish()

        return install

    def _into_ring(
        self, layer: _Layer, tensors: dict[tuple[str, str], Any]
    ) -> Iterator[tuple[Any, Any]]:
        for staged in layer.staged:
            path = staged.skeleton.name
            for leaf, tensor in staged.tensors.items():
                if (path, leaf) in self.filled:
                    yield tensor, tensors[path, leaf]

    def _finish(self) -> None:
        """What comes when every layer is installed."""
        import torch

        self._after.run()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def live(self, path: str, leaf: str) -> Any:
        """A tensor that kernels read."""
        return getattr(self.module(path), leaf)

    def _install(self, layer: _Layer) -> None:
        for bridge in layer.bridges:
            bridge.settle()
        self._process(layer)

    def _process(self, layer: _Layer) -> None:
        for staged in layer.staged:
            staged.install()
        for skeleton in layer.derived:
            skeleton.process_live()

    def module(self, path: str) -> Any:
        """The module of a path; looked for once, since an engine stands still for it."""
        found = self._modules.get(path)
        if found is None:
            found = self.model.get_submodule(path) if path else self.model
            self._modules[path] = found
        return found

    def close(self) -> None:
        self._ring.clear()
        self._packed = PackedTensors((), 0, ())
        self._layers.clear()
        self._skeletons.clear()
        self._modules.clear()


def _stranger(path: str) -> RequestError:
    return RequestError.make(
        f"vLLM lays out the weights of module '{path}' in another way than new weights, so that "
        "these cannot be put in their place",
        'init with {"mode": "loader"}, or with another backend',
        key=path,
    )


def _bytes_of(shard: Shard) -> int:
    return sum(math.prod(box.extent) for box in shard.boxes) * dtype_bits(shard.dtype) // 8


def _room(staged: _Staged) -> int:
    return room_of(staged.skeleton.leaves.values())


def _pattern(skeleton: reload.Skeleton, device: Any) -> dict[str, Any]:
    """Tensors of a skeleton's layouts in which neighbours differ."""
    import torch

    result = {}
    for leaf, tensor in skeleton.leaves.items():
        count = span(tensor)
        values = torch.arange(count, device=device) % 251 - 125
        # Small powers of two apart: exact in every floating type that weights have.
        flat = (
            (values / 64).to(tensor.dtype)
            if tensor.is_floating_point()
            else values.to(tensor.dtype)
        )
        result[leaf] = flat.as_strided(tensor.shape, tensor.stride())
    return result
