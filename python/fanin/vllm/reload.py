# SPDX-License-Identifier: Apache-2.0
"""All contact with the inside of vLLM's layerwise reload.

vLLM keeps, of every module, the shapes, types, attributes and loaders that its tensors had before
they were loaded and processed: its skeleton. Recording where a publication goes needs the model in
that state, with loaders that write at once instead of collecting weights; afterwards everything is
as it was. Installing new weights fills skeletons, processes them, and copies the result into the
memory that kernels and CUDA graphs know.

These functions of vLLM are no interface of its own and move between versions;
:data:`fanin.vllm.patches.SUPPORTED` says which are known.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fanin.errors import PeerError, RequestError, StateError, first_of
from fanin.mapping import About, ModelState, Recording, Refusal, Target, record
from fanin.mapping._checks import engine_own
from fanin.vllm.patches import require_version

_WRAPPED = "online_process_loader"


@dataclass(frozen=True)
class Skeletons:
    """What is known of a model while its tensors are as the loader expects them."""

    #: Paths of tensors that share another one's memory in the live model, by path.
    ties: dict[str, str]


@contextmanager
def skeletons(model: Any, vllm_config: Any = None) -> Iterator[Skeletons]:
    """The model with the tensors that its loader expects, without memory, and its own loaders.

    On leaving, in whatever way, the model has its modules, parameters, buffers, attributes and
    memory again, and the reload's books are closed. The model must not run meanwhile.

    Args:
        vllm_config: made current meanwhile, which some loaders need; None: it is already.

    Raises:
        RequestError: vLLM's version is not known, or it keeps nothing of the model.
        StateError: a weight update of vLLM is under way.
    """
    require_version()
    from vllm.model_executor.model_loader.reload import layerwise

    infos = _infos(model, layerwise)
    ties = _ties(model)
    state = ModelState(model)
    loaders = [(t, dict(t.__dict__)) for info in infos for t in _remembered(info)]
    with ExitStack() as stack:
        if vllm_config is not None:
            from vllm.config import set_current_vllm_config

            stack.enter_context(set_current_vllm_config(vllm_config))
        try:
            layerwise.initialize_layerwise_reload(model)
            _unwrap(model)
            yield Skeletons(ties)
        finally:
            state.restore()
            for tensor, attributes in loaders:
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)
            for module in model.modules():  # also of those that it kept nothing of
                info = layerwise.LAYERWISE_INFO.get(module)
                if info is not None:
                    info.reset()


def _infos(model: Any, layerwise: Any) -> list[Any]:
    """What vLLM keeps of each module."""
    found = []
    for path, module in model.named_modules():
        info = layerwise.LAYERWISE_INFO.get(module)
        if info is None:
            tensors = (*module._parameters.values(), *module._buffers.values())
            if all(tensor is None for tensor in tensors):
                continue  # put around a module later: vLLM's wrappers for LoRA
            raise RequestError.make(
                f"vLLM keeps no shapes of module '{path}' from before it was loaded",
                "let vLLM's initialize_model make the model",
                code=-404,
            )
        if info.can_load():
            raise StateError.make(
                f"vLLM is in the middle of a weight update of module '{path}'", "finish it first"
            )
        found.append(info)
    return found


def _remembered(info: Any) -> Iterator[Any]:
    for table in info.restore_metadata:
        yield from table.values()


def _unwrap(model: Any) -> None:
    """Takes the reload's wrappers off the loaders: they would keep weights until all have come."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                loader: Any = getattr(tensor, "weight_loader", None)
                wrapped = loader
                while getattr(wrapped, "__name__", "") == _WRAPPED:
                    wrapped = wrapped.__wrapped__
                if wrapped is not loader:
                    tensor.weight_loader = wrapped


def _ties(model: Any) -> dict[str, str]:
    """Tensors of several modules that are one."""
    first: dict[int, str] = {}
    found = {}
    for path, module in model.named_modules():
        for leaf, tensor in {**module._parameters, **module._buffers}.items():
            name = f"{path}.{leaf}" if path else leaf
            if tensor is not None and first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found


def shared(draft: Any, main: Any) -> frozenset[str]:
    """Paths of a draft model's tensors that are the main model's.

    vLLM lets a draft use the main model's embedding and head if it has none of its own, or the
    same.
    """
    theirs = {id(tensor) for tensor in (*main.parameters(), *main.buffers())}
    mine = (
        *draft.named_parameters(remove_duplicate=False),
        *draft.named_buffers(remove_duplicate=False),
    )
    return frozenset(path for path, tensor in mine if id(tensor) in theirs)


def _own(target: Target) -> str | None:
    """As :func:`engine_own`."""
    from vllm.model_executor.model_loader.reload import meta

    if target.leaf in meta.SKIP_LOAD_TENSORS and target.role != "parameter":
        return "a table of vLLM's experts"
    return engine_own(target)


def about(model: Any, vllm_config: Any = None) -> About:
    """Engine, model and ranks, as they are in this process."""
    version = require_version()
    from vllm.distributed import parallel_state

    ranks: dict[str, tuple[int, int]] = {}
    for kind in ("tp", "pp", "ep", "dp"):
        group = getattr(parallel_state, f"_{kind.upper()}", None)
        if group is not None:
            ranks[kind] = (group.rank_in_group, group.world_size)
    if vllm_config is not None and not vllm_config.parallel_config.enable_expert_parallel:
        ranks.pop("ep", None)
    return About("vllm", version, type(model).__name__, ranks)


def record_model(
    published: Iterable[Any],
    model: Any,
    vllm_config: Any = None,
    others: Container[str] = frozenset(),
) -> Recording:
    """Where a publication goes in a model of vLLM, as this process has it.

    Args:
        published: names, dtypes and shapes of all that is published: ``Client.catalog(run)``.
        others: paths of tensors that nothing has to fill: they are another model's, or kept.

    Raises:
        RequestError, StateError: as :func:`skeletons` and :func:`fanin.mapping.record`.
    """
    known = about(model, vllm_config)

    def own(target: Target) -> str | None:
        return "another model's, or kept" if target.path in others else _own(target)

    with skeletons(model, vllm_config) as bare:
        return record(published, model.load_weights, model, own=own, ties=bare.ties, about=known)


# ------------------------------------------------------------------ loading by vLLM itself


def _layerwise() -> Any:
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise


def _books(model: Any) -> Iterator[tuple[str, Any, Any]]:
    layerwise = _layerwise()
    for name, module in model.named_modules():
        yield name, module, layerwise.get_layerwise_info(module)


def begin(
    model: Any, modules: Iterable[str] | None = None, others: Container[str] = frozenset()
) -> None:
    """Puts skeletons in the place of the model's tensors; its kernels' tensors are kept aside.

    It first puts back the state that an earlier reload left behind: vLLM would skip such modules.

    Args:
        modules: paths; only of these.
        others: paths of tensors that are another model's: modules with such stay as they are.
    """
    abandon(model)
    layerwise = _layerwise()
    if modules is None and others:
        modules = [path for path, module in model.named_modules() if not _has(path, module, others)]
    if modules is None:
        layerwise.initialize_layerwise_reload(model)
        return
    for path in modules:
        module = model.get_submodule(path)
        info = layerwise.get_layerwise_info(module)
        _set_aside(module, info)
        layerwise.initialize_online_processing(module)


def _has(path: str, module: Any, wanted: Container[str]) -> bool:
    leaves = (*module._parameters, *module._buffers)
    return any((f"{path}.{leaf}" if path else leaf) in wanted for leaf in leaves)


def _set_aside(module: Any, info: Any) -> None:
    """Skeletons in the place of the kernels' tensors, which the reload's books then hold."""
    from vllm.model_executor.model_loader.reload import meta

    info.kernel_tensors = _layerwise().get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    meta.restore_layer_on_meta(module, info)


def abandon(model: Any) -> None:
    """Puts the kernels' tensors back wherever a skeleton is in their place. Again: does nothing.

    Their bytes are what was last written to them.
    """
    layerwise = _layerwise()
    for _, module, info in _books(model):
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            # Tensors that are never skeletons had their loaders wrapped as well.
            for tensor in layerwise.get_layer_tensors(module).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()


def end(model: Any, model_config: Any) -> None:
    """Processes what loading alone has not: attention, padded modules, tied embeddings."""
    _layerwise().finalize_layerwise_reload(model, model_config)
    _process(_sharing(model))
    _round(widened(model))


def _unloaded(model: Any) -> list[str]:
    """Modules with parameters of which nothing was loaded since :func:`begin`.

    Not those that have none of their own: attention's scales, and what is tied to another module.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    missing: list[str] = []
    filled: set[int] = set()
    waiting = []
    for name, module, info in _books(model):
        if not info.can_load():
            filled.update(id(tensor) for tensor in module._parameters.values())
        elif info.load_numel > 0:
            filled.update(id(tensor) for tensor in info.kernel_tensors[0].values())
        elif not is_deferred_attention_layer(module):
            waiting.append((name, info.kernel_tensors[0]))
    for name, parameters in waiting:
        if any(id(tensor) not in filled for tensor in parameters.values()):
            missing.append(name)
    return missing


def lacking(recording: Recording, model: Any) -> list[Refusal]:
    """Parameters and buffers of which vLLM's own loader leaves elements that nothing has filled.

    The reload puts some back as they were, and these are left out: attention's scales, and buffers
    of modules that get nothing. So is padding that vLLM declares of a weight.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    targets = recording.targets
    spots = [*(copy.to for copy in recording.copies), *recording.written]
    given = {targets[spot.place].module for spot in spots}
    known = {(target.module, target.leaf): target for target in targets}
    found = []
    for refusal in recording.unfilled:
        target = known[refusal.module, refusal.leaf]
        count = target.tensor.numel()
        declared = count - getattr(target.tensor, "weight_loader_numel", count)
        kept = target.role != "parameter" and target.module not in given
        if refusal.unfilled > declared and not kept:
            if not is_deferred_attention_layer(model.get_submodule(target.module)):
                found.append(refusal)
    return found


def _partly(model: Any) -> list[Refusal]:
    """What is lacking of modules that have got something since :func:`begin`, and not all.

    vLLM keeps what it has called their loaders with: each is called once more, and watched.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import meta

    found = []
    for name, module, info in _books(model):
        if not info.can_load() or not 0 < info.load_numel < info.load_numel_total:
            continue
        if not is_deferred_attention_layer(module):
            recording = record((), _calls(module, info), module, own=_own)
            found += [
                replace(refusal, module=name)
                for refusal in lacking(recording, module)
                if not refusal.module and refusal.leaf not in meta.SKIP_LOAD_TENSORS
            ]
    return found


def _calls(module: Any, info: Any) -> Callable[[Any], None]:
    def load(_: Any) -> None:
        for leaf, bound in info.loaded_weights:
            parameter = bound.arguments["param"] = getattr(module, leaf)
            _layerwise()._get_original_loader(parameter)(*bound.args, **bound.kwargs)

    return load


def require_filled(model: Any, remedy: str) -> None:
    """To be called before :func:`end`, for which a part that is missing is whatever new memory
    happens to hold.

    Raises:
        PeerError: the loader has not filled all that :func:`begin` has set aside.
    """
    missing = _unloaded(model)
    if missing:
        what = f"nothing that is published fills {first_of(missing)}"
        raise PeerError.make(what, remedy, key=missing[0])
    partly = _partly(model)
    if partly:
        raise PeerError.make(first_of(partly, 4, "; "), remedy, key=partly[0].module)


def widened(model: Any) -> list[Any]:
    """Modules whose bias processing has made wider than it is loaded (one of vLLM's kernels for
    CPUs wants it in F32).

    The reload leaves a bias as processing has made it. A wider publication would fill it with other
    values than a vLLM has that loaded the same weights from a file.
    """
    return [
        module
        for module in model.modules()
        if (bias := module._parameters.get("bias")) is not None
        and as_loaded(module, "bias", bias) is not bias
    ]


def _round(modules: list[Any]) -> None:
    for module in modules:
        module.bias.data.copy_(as_loaded(module, "bias", module.bias))


def as_loaded(module: Any, leaf: str, tensor: Any) -> Any:
    """*tensor* with the values that it would have, had it been loaded when the engine started."""
    loaded = getattr(module, "params_dtype", None) if leaf == "bias" else None
    if loaded is None or not tensor.is_floating_point() or not loaded.is_floating_point:
        return tensor
    if tensor.element_size() <= loaded.itemsize:
        return tensor
    return tensor.to(loaded).to(tensor.dtype)


def _sharing(model: Any) -> list[Any]:
    """Modules that are processed and share a parameter with one before them.

    What they made of it beside it (on the CPU: a packed copy of tied embeddings) is stale when only
    the other module was loaded.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    owners: dict[int, Any] = {}
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        for tensor in module._parameters.values():
            if tensor is None or tensor.numel() == 0:
                continue
            if owners.setdefault(id(tensor), module) is not module and isinstance(
                method, QuantizeMethodBase
            ):
                found.append(module)
    return found


def _process(modules: list[Any]) -> None:
    for module in modules:
        module.quant_method.process_weights_after_loading(module)


# ------------------------------------------------------------------ one module


class Skeleton:
    """What one module's tensors were before processing, and how new ones of them are installed.

    name: of the module. Not for two threads at once.
    """

    def __init__(self, name: str, module: Any) -> None:
        from vllm.model_executor.model_loader.reload import meta

        self.name, self.module = name, module
        self._info = _layerwise().get_layerwise_info(module)
        parameters, buffers = self._info.restore_metadata
        #: Tensors without memory, by name.
        self.leaves: dict[str, Any] = {
            leaf: tensor
            for leaf, tensor in {**parameters, **buffers}.items()
            if leaf not in meta.SKIP_TENSORS
        }

    def live(self, leaf: str) -> Any:
        """The tensor that kernels use; None: there is none of that name."""
        module = self.module
        found = module._parameters.get(leaf)
        return module._buffers.get(leaf) if found is None else found

    def laid_out_as_live(self) -> bool:
        """Whether the kernels' tensors have types, shapes and strides of the skeletons."""
        return all(
            (live := self.live(leaf)) is not None and _layout(live) == _layout(tensor)
            for leaf, tensor in self.leaves.items()
        )

    def signature(self) -> tuple[Any, ...]:
        """Modules of one signature are processed alike."""
        method = getattr(self.module, "quant_method", None)
        return (
            type(self.module),
            type(method),
            tuple((leaf, _layout(tensor)) for leaf, tensor in self.leaves.items()),
            tuple(
                _layout(t) if (t := self.live(leaf)) is not None else None for leaf in self.leaves
            ),
            tuple(sorted(n for n, t in self.module._parameters.items() if t is not None)),
        )

    def processed(self) -> bool:
        """Whether vLLM processes such a module after loading at all."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        method = getattr(self.module, "quant_method", None)
        return (
            isinstance(method, QuantizeMethodBase)
            and type(method).process_weights_after_loading
            is not QuantizeMethodBase.process_weights_after_loading
        )

    def process_live(self) -> None:
        """Processes the module as it is: what it derives from its tensors is made anew."""
        _forget_processed(self.module)
        with _in_place(self.module):
            self.module.quant_method.process_weights_after_loading(self.module)

    def _enter(self, tensors: dict[str, Any]) -> None:
        """Puts *tensors* in the place of the kernels', which the reload's books then hold."""
        _set_aside(self.module, self._info)
        for leaf, tensor in tensors.items():
            setattr(self.module, leaf, dressed(tensor, self.leaves[leaf]))

    def _enter_alone(self, tensors: dict[str, Any]) -> None:
        """Likewise, and copies of what is never a skeleton: it is the live one, which processing
        must not write."""
        self._enter(tensors)
        for leaf, tensor in list(self.module._parameters.items()):
            if leaf not in self.leaves and tensor is not None:
                self.module._parameters[leaf] = torch.nn.Parameter(tensor.clone(), False)

    def install(self, tensors: dict[str, Any]) -> None:
        """Processes *tensors*, one for each leaf, and copies what comes of them to the kernels'.

        The kernels' tensors stay where they are. After any exception they are back.
        """
        layerwise, info, module = _layerwise(), self._info, self.module
        try:
            with _in_place(module):
                self._enter(tensors)
                layerwise._layerwise_process(module, info)
        except BaseException:
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            info.reset()
            raise

    def result_of(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """What :meth:`install` would copy to the kernels' tensors; nothing is installed.

        Also what processing makes in addition (scales), and copies of what is never a skeleton.
        """
        module, method = self.module, self.module.quant_method
        with _kept(module, method):
            self._enter_alone(tensors)
            _forget_processed(module)
            method.process_weights_after_loading(module)
            found = {**dict.fromkeys(self.leaves), **module._parameters, **module._buffers}
        self._info.reset()
        return found

    def rows_of(self, inputs: Any) -> Any:
        """What the live module makes of *inputs*, without its bias."""
        return self.module.quant_method.apply(self.module, inputs, None)

    def try_out(self, tensors: dict[str, Any]) -> Trial:
        """Processes *tensors*, says what became of them, and leaves no trace in the module."""
        module, info = self.module, self._info
        method: Any = getattr(module, "quant_method", None)
        before = {leaf: tensor.clone() for leaf, tensor in tensors.items()}
        places = {leaf: _place(tensor) for leaf, tensor in tensors.items()}
        storages = {leaf: tensor.untyped_storage() for leaf, tensor in tensors.items()}
        counts = {leaf: torch._C._storage_Use_Count(s._cdata) for leaf, s in storages.items()}
        live = {leaf: _layout(t) for leaf in self.leaves if (t := self.live(leaf)) is not None}
        with _kept(module, method):
            self._enter_alone(tensors)
            given, others = _attributes(module, method), dict(module._parameters)
            _forget_processed(module)
            method.process_weights_after_loading(module)
            result = {
                leaf: tensor
                for leaf, tensor in {**module._parameters, **module._buffers}.items()
                if leaf in self.leaves and tensor is not None
            }
            same = result.keys() == tensors.keys() and all(
                _place(tensor) == places[leaf] and same_bytes(tensor, before[leaf])
                for leaf, tensor in result.items()
            )
            same = same and all(
                module._parameters.get(leaf) is tensor
                for leaf, tensor in others.items()
                if leaf not in self.leaves
            )
            derived = _attributes(module, method) != given
            fits = all(
                leaf in result and _layout(result[leaf]) == layout for leaf, layout in live.items()
            )
            # What holds the memory now, besides the module's own tensors?
            for leaf in self.leaves:
                module._parameters.pop(leaf, None)
                module._buffers.pop(leaf, None)
            result.clear()
            others.clear()
            kept = any(
                torch._C._storage_Use_Count(s._cdata) > counts[leaf] for leaf, s in storages.items()
            )
        info.reset()
        return Trial(same=same, derived=derived, fits=fits, kept=kept)


class Trial(NamedTuple):
    """What processing does with a module's tensors."""

    #: They are as they were: bytes, layout, address.
    same: bool
    #: It made something beside them (a packed copy).
    derived: bool
    #: The result is laid out as the kernels' tensors.
    fits: bool
    #: What it made points into the memory of the tensors that it was given.
    kept: bool


@contextmanager
def _in_place(module: Any) -> Iterator[None]:
    """What is made within it as an attribute of the module, of its method or of its attention goes
    to where the attribute's tensor was before: CUDA graphs have its address."""
    before = [
        (owner, name, value)
        for owner in _owners(module)
        for name, value in owner.__dict__.items()
        if isinstance(value, torch.Tensor)
    ]
    yield
    for owner, name, old in before:
        new = owner.__dict__.get(name)
        moved = isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr()
        if moved and _layout(new) == _layout(old):
            old.data.copy_(new)
            setattr(owner, name, old)


def _forget_processed(module: Any) -> None:
    """Online quantization processes a module once, unless it has forgotten that it did."""
    if hasattr(module, "_already_called_process_weights_after_loading"):
        delattr(module, "_already_called_process_weights_after_loading")


def dressed(tensor: Any, skeleton: Any) -> Any:
    """*tensor* with the class and the attributes of a skeleton, as a tensor of its own."""
    result = tensor.detach()
    result.__class__ = skeleton.__class__
    result.__dict__ = skeleton.__dict__.copy()
    return result


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _place(tensor: Any) -> tuple[Any, ...]:
    return (tensor.data_ptr(), *_layout(tensor))


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two tensors of one shape hold the same bits."""
    a, b = one.detach().contiguous(), other.contiguous()
    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _attributes(*owners: Any) -> list[tuple[str, Any]]:
    """What hangs on a module and its method beside its tensors, for comparison by ``==``."""
    found: list[tuple[str, Any]] = []
    for owner in owners:
        for name, value in owner.__dict__.items():
            if name not in _TABLES:
                plain = isinstance(value, (str, int, float, bool, tuple, type(None)))
                found.append((name, value if plain else id(value)))
    return found


@contextmanager
def _kept(module: Any, method: Any) -> Iterator[None]:
    """Puts a module and its method back as they are now, and what the tensors point to."""
    state, theirs = ModelState(module), dict(method.__dict__)
    try:
        yield
    finally:
        method.__dict__.clear()
        method.__dict__.update(theirs)
        state.restore()


# ------------------------------------------------------------------ the whole model


class Afterwards:
    """What comes after the last module of an update: what attention makes of its weights (MLA's
    absorbed projections), ties, and the rounding of widened biases. The engine stands still for it.
    So the first time looks through all modules of a model, and later times skip attention that
    would write what is there.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        self._dtype = model_config.dtype
        self._attention = [m for m in model.modules() if is_deferred_attention_layer(m)]
        self._ties = _sharing(model)
        self._widened = widened(model)

    def run(self) -> None:
        for module in self._attention:
            with _in_place(module):
                module.process_weights_after_loading(self._dtype)
        self._attention = [m for m in self._attention if not _writes_the_same(m)]
        _process(self._ties)
        _round(self._widened)


def _writes_the_same(module: Any) -> bool:
    """Whether processing a module of attention is vLLM's own for plain attention, which writes
    scales of one, and its backend's nothing."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionImplBase

    name = "process_weights_after_loading"
    both = ((module, Attention), (getattr(module, "impl", None), AttentionImplBase))
    return all(
        getattr(getattr(one, name, None), "__func__", None) is getattr(kind, name)
        for one, kind in both
    )


def _owners(module: Any) -> list[Any]:
    """A module of attention, its method and its implementation."""
    owners = (module, getattr(module, "quant_method", None), getattr(module, "impl", None))
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def of_all_workers(mine: Any, vllm_config: Any) -> list[Any]:
    """What each worker of this engine has brought, in their order; one alone: its own.

    Every worker calls it at the same point, and waits for the others.
    """
    from vllm.distributed import parallel_state

    size = int(vllm_config.parallel_config.world_size)
    world = parallel_state._WORLD
    if size == 1 or world is None or world.world_size != size:
        return [mine]
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, mine, group=world.cpu_group)
    return found
