# SPDX-License-Identifier: Apache-2.0
"""A base and its LoRA adapter together: the values that PEFT's ``merge_and_unload()`` would leave.

PEFT's own functions compute what a layer adds, from the factors that this rank's part needs. So
order and dtypes of the computation are PEFT's, and base and adapter stay as they are.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fanin._cover import Part
from fanin.errors import RequestError
from fanin.torch._config import active_adapters, holder_of, kinds_of
from fanin.torch._factors import Asked, Factors, Found, Place
from fanin.torch._fused import (
    Plan,
    Steady,
    Step,
    Sums,
    can_fuse,
    is_proven,
    is_tf32,
    noise_like,
    planned,
)
from fanin.torch._packed4 import unpack4
from fanin.torch._state import State, part_now, refuse_kind
from fanin.torch._transform import Batch, Cut, Parted, Transform, Values, parted, parts_of
from fanin.torch._tree import Item, root_of

Shape = tuple[int, ...]

_LAYERS = ("Linear", "Embedding", "ParamWrapper", "Linear4bit")
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_GRAIN = 64
"""Rows are computed by so many, whatever this rank's part is: products of very few rows may be
rounded otherwise than those of a whole matrix."""
_MOST = 2 << 20
"""Elements that a layer adds at a time. PEFT holds two tensors of them."""
_OTHERS = "publish the adapter by fanin.torch.AdapterServer, or what merge_and_unload() makes"


def _kind_of(layer: Any) -> type:
    """PEFT's class of a layer, of which FSDP2 may have made one of its own."""
    return next(kind for kind in type(layer).__mro__ if kind.__module__.partition(".")[0] == "peft")


class Layer:
    """One of PEFT's layers, which adds something to a tensor of the base."""

    def __init__(self, path: str, layer: Any, adapter: str) -> None:
        self.path, self.layer, self.adapter = path, layer, adapter
        self.kind = _kind_of(layer)
        self.embeds = adapter in layer.lora_embedding_A
        self.is_dora = adapter in layer.lora_variant
        self.places = self._places()
        self._plans: dict[tuple[Shape, Part], tuple[Any, Plan | None]] = {}

    def _places(self) -> dict[str, Place]:
        layer, adapter = self.layer, self.adapter
        if self.embeds:
            return {
                "A": Place(layer.lora_embedding_A, adapter),
                "B": Place(layer.lora_embedding_B, adapter),
            }
        found = {
            "A": Place(layer.lora_A[adapter], "weight"),
            "B": Place(layer.lora_B[adapter], "weight"),
        }
        if self.is_dora:
            found["magnitude"] = Place(layer.lora_magnitude_vector[adapter], "weight")
        return found

    @property
    def shapes(self) -> list[Shape]:
        """Of the whole factors: what has the same ones goes through one launch."""
        return [tuple(place.now().shape) for place in self.places.values()]

    def asked(self, is_stored: bool) -> list[Asked]:
        """is_stored: what is computed of the base are the parts that the ranks hold."""
        owner, attribute = self.target
        base = Place(owner, attribute) if is_stored and attribute in owner._parameters else None
        experts = getattr(self.layer, "num_experts", 1)
        if experts == 1:
            return [Asked(place) for place in self.places.values()]
        return [Asked(self.places[which], experts, which == "B", base) for which in "AB"]

    @property
    def target(self) -> tuple[Any, str]:
        """The module of the base and its attribute."""
        return self.layer.get_base_layer(), getattr(self.layer, "parameter_name", "weight")

    def add(
        self, factors: dict[str, Found], shape: Shape, part: Part, base: Any, out: Any, sums: Sums
    ) -> bool:
        """Writes to *out* a part of the tensor of that shape, *base*, and what is added to it.
        Whether *sums* do it: if a kernel makes PEFT's bytes of such a part."""
        scale = self.layer.scaling[self.adapter]
        # The kernel is for a base and a result of one type; model.float() changes the base alone.
        # PEFT's hot swap makes a tensor of the scale, whose value changes in place.
        is_fit = isinstance(scale, (int, float))
        is_fit = is_fit and (base.dtype, base.device) == (out.dtype, out.device)
        seen = (
            *(is_fit, sums.is_tf32, base.dtype, base.shape, base.stride(), base.device),
            *[one.form for one in factors.values()],
        )
        known = self._plans.get((shape, part))
        if known is None or known[0] != seen:
            known = seen, self._planned(factors, shape, part, base) if is_fit else None
            self._plans[shape, part] = known
        if known[1] is None:
            self._follow(factors, shape, part, base, out)
            return 0 in out.shape
        sums.add(known[1], factors, base, out, scale)
        return True

    def _planned(
        self, factors: dict[str, Found], shape: Shape, part: Part, base: Any
    ) -> Plan | None:
        """None: PEFT's functions have to do it."""
        if self.is_dora or 0 in base.shape or (len(shape) == 3 and shape[0] == 1):
            return None
        if not can_fuse(base, factors):
            return None
        offset, (rows, *extent) = part
        some: Part = offset, (min(rows, self._rows(shape)), *extent)

        def both() -> tuple[Any, Any]:
            noise = {which: _noisy(one) for which, one in factors.items()}
            values = noise_like(base[: some[1][0]])
            outs, sums = (torch.empty_like(values), torch.empty_like(values)), Sums()
            self._follow(noise, shape, some, values, outs[0])
            plan = self._plan(noise, shape, some, values)
            sums.add(plan, noise, values, outs[1], self.layer.scaling[self.adapter])
            sums.launch()
            return outs

        plan = self._plan(factors, shape, part, base)
        kind = (self.kind.__name__, shape, some[1], plan.kind.rank)
        return plan if is_proven(base, factors["A"].memory, kind, both) else None

    def _plan(self, factors: dict[str, Found], shape: Shape, part: Part, base: Any) -> Plan:
        offset, extent = part if len(shape) == 3 else ((0, *part[0]), (1, *part[1]))
        swapped = getattr(self.layer, "_did_swap_in_out_features", False)
        by_inputs = self.embeds or (len(shape) == 3 and not swapped)
        sides = {}
        for which, at, n in zip("AB" if by_inputs else "BA", offset[1:], extent[1:], strict=True):
            side, first = factors[which].tensor(), offset[0] - factors[which].expert
            if len(shape) == 2:
                side = (side if which == "A" else side.t())[None]
            sides[which] = side[first : first + extent[0], :, at : at + n]
        is_rounded = self.embeds or self.kind.__name__ == "ParamWrapper"
        return planned(base, factors, sides, is_rounded, extent)

    def _rows(self, shape: Shape) -> int:
        """How many PEFT's functions are given at a time."""
        step = max(1, _MOST // max(1, math.prod(shape[1:])))
        return step - step % _GRAIN if step > _GRAIN else step

    def _follow(
        self, factors: dict[str, Found], shape: Shape, part: Part, base: Any, out: Any
    ) -> None:
        """By PEFT's functions."""
        (first, *rest), (count, *extent) = part
        cut = (slice(None), *(slice(at, at + n) for at, n in zip(rest, extent, strict=True)))
        step = self._rows(shape)
        for at in range(0, count, step):
            rows = slice(at, min(at + step, count))
            start, stop = first + rows.start, first + rows.stop
            delta = self._delta(factors, shape, start, stop, out)[cut]
            if self.is_dora:  # the norm is one of whole rows
                summed = base[rows] + delta
                norm = torch.linalg.norm(summed, dim=1).to(summed.dtype)
                magnitude = factors["magnitude"].tensor()[start:stop]
                out[rows] = (magnitude / norm).view(-1, 1) * summed
            elif self.embeds:  # PEFT rounds what is added to embeddings
                torch.add(base[rows], delta.to(out.dtype), out=out[rows])
            else:
                torch.add(base[rows], delta, out=out[rows])

    def _delta(
        self, factors: dict[str, Found], shape: Shape, start: int, stop: int, like: Any
    ) -> Any:
        """What is added to rows start to stop; like: has the tensor's dtype and device."""
        a, b = factors["A"].tensor(), factors["B"].tensor()
        if len(shape) == 3:
            return self._experts(a, b, factors["A"].expert, factors["B"].expert, start, stop, like)
        first, last = start // _GRAIN * _GRAIN, -(-stop // _GRAIN) * _GRAIN
        if self.embeds:
            a = a[:, first:last]
        else:
            b = b[first:last]
        return self._by_peft(a, b, like)[start - first : stop - first]

    def _experts(
        self, a: Any, b: Any, of_a: int, of_b: int, start: int, stop: int, like: Any
    ) -> Any:
        """Of stacked experts; of_a, of_b: the first ones in the factors."""
        if a.dim() == 2:
            delta = self._by_peft(a, b, like)
            return delta.reshape(1, *delta.shape[-2:])[start:stop]
        # PEFT takes one expert for a layer that is not stacked.
        end = min(of_a + len(a), of_b + len(b))
        first = max(min(start, end - 2), of_a, of_b)
        last = min(max(stop, first + 2), end)
        a = a[first - of_a : last - of_a].flatten(0, 1)
        b = b[first - of_b : last - of_b].permute(2, 1, 0).flatten(1)
        delta = self._by_peft(a, b, like, last - first)
        return delta.reshape(last - first, *delta.shape[-2:])[start - first : stop - first]

    def _by_peft(self, a: Any, b: Any, like: Any, experts: int = 1) -> Any:
        """PEFT's function, given what it looks at of a layer."""
        prefix = "lora_embedding_" if self.embeds else "lora_"
        factors = (a, b) if self.embeds else (SimpleNamespace(weight=a), SimpleNamespace(weight=b))
        seen = SimpleNamespace(
            scaling=self.layer.scaling,
            fan_in_fan_out=False,
            num_experts=experts,
            _did_swap_in_out_features=getattr(self.layer, "_did_swap_in_out_features", False),
            get_param=lambda: like,
        )
        for which, one in zip("AB", factors, strict=True):
            setattr(seen, prefix + which, {self.adapter: one})
        return self.kind.get_delta_weight(seen, self.adapter)  # type: ignore[attr-defined]


class Merge(Batch):
    """A transform: of each tensor of the base what it is together with the adapter."""

    def __init__(
        self, model: Any, transform: Transform | None = None, cut: Cut | None = None
    ) -> None:
        """transform: gives what the base's tensors are. cut: large parts are computed so, None:
        whole. RequestError: there is no adapter."""
        root = root_of(model)
        if holder_of(root) is None:
            raise RequestError.make(
                f"merge=True merges an adapter of PEFT's, and the {type(root).__name__} has none",
                "give what get_peft_model() made, or leave merge= out",
            )
        self._holder = holder_of(root)
        self._transform, self._cut = transform, cut
        #: The base's outermost module, under which names are those of its checkpoint.
        self.root = root_of(root.get_base_model() if hasattr(root, "get_base_model") else root)
        self._layers: dict[tuple[int, str], list[Layer]] = {}
        self._order: dict[tuple[int, str], int] = {}
        self._factors = Factors([])
        self._sums = Sums()
        self._adapter = ""
        #: Paths of modules that no name of the base has, and of what is not published.
        self.transparent: set[str] = set()
        self._dropped: set[str] = set()
        #: Layers that the adapter does not touch, by their paths.
        self._others: list[tuple[str, Any]] = []
        self._is_looked = False
        #: By whose steps they are.
        self._steady: dict[Hashable, Steady] = {}
        self._whose: Hashable = None
        #: What the step that is made now is made of, None: it will not be repeated.
        self._step: Step | None = None

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside, :meth:`look` takes the adapter that is active. If that raises, all is as before:
        ranks that have not agreed gather the same factors yet."""
        before, self._adapter = dict(vars(self)), ""
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def look(self) -> None:
        """Finds the layers of the adapter, at first of the one that is active now. RequestError:
        they cannot be merged.

        What they are is found again when the module tree has changed. The adapter stays: all ranks
        gather the same factors, also if one of them has another adapter now.
        """
        self._adapter = self._adapter or self._active()
        self.transparent, self._dropped, self._others, layers = set(), set(), [], []
        for path, module in self.root.named_modules(remove_duplicate=False):
            if _is_a(module, "tuners.tuners_utils", "BaseTunerLayer"):
                self.transparent.add(f"{path}.base_layer")
                held = (*module._modules, *module._parameters, *module._buffers)
                self._dropped |= {f"{path}.{name}" for name in held if name != "base_layer"}
                layers += self._layer(path, module)
            elif _is_a(module, "utils.other", "AuxiliaryTrainingWrapper"):
                self._wrapper(path, module)
        if not layers:
            raise RequestError.make(
                f"merge=True found no LoRA layer of the adapter '{self._adapter}'",
                "give what get_peft_model() made with a LoraConfig; if the adapter was deleted or "
                "renamed, set_adapter() another one and call refresh() on every rank",
            )
        self._layers = {}
        for layer in reversed(layers):  # the innermost first
            owner, attribute = layer.target
            self._layers.setdefault((id(owner), attribute), []).append(layer)
        # Large ones first: a GPU computes them while Python goes on.
        shapes = {key: layers[0].shapes for key, layers in self._layers.items()}
        alike = sorted(reversed(shapes), key=shapes.__getitem__, reverse=True)
        self._order = {key: place for place, key in enumerate(alike)}
        is_stored = self._transform is None
        self._factors = Factors(
            one for key in alike for layer in self._layers[key] for one in layer.asked(is_stored)
        )
        self._steady = {}

    def _active(self) -> str:
        kinds = kinds_of(self._holder)
        if kinds != ["LORA"]:
            what = " and ".join(kinds) or "no adapter any more"
            raise RequestError.make(f"merge=True merges LoRA, and the model has {what}", _OTHERS)
        active = active_adapters(self._holder)
        if len(active) != 1:
            raise RequestError.make(
                f"merge=True merges one adapter, and {', '.join(active) or 'none'} "
                f"{'is' if not active else 'are'} active",
                "set_adapter(name) the one that is to be published, on every rank",
            )
        return active[0]

    def _layer(self, path: str, module: Any) -> list[Layer]:
        kind = _kind_of(module).__name__
        if kind not in _LAYERS or not hasattr(module, "lora_variant"):
            raise _refused(path, f"is PEFT's {kind}, which is not merged")
        if self._adapter not in (*module.lora_A, *module.lora_embedding_A):
            self._others.append((path, module))
            return []
        variant = type(module.lora_variant.get(self._adapter)).__name__
        if variant not in ("NoneType", "DoraLinearVariant"):
            raise _refused(path, f"is computed by PEFT's {variant}, which is not merged")
        if getattr(module, "fan_in_fan_out", False):
            raise _refused(path, "holds its weight transposed (fan_in_fan_out)")
        if module.lora_bias.get(self._adapter):
            raise _refused(path, "has a bias of its own (lora_bias)")
        return [Layer(path, module, self._adapter)]

    def _wrapper(self, path: str, module: Any) -> None:
        if _kind_of(module).__name__ != "ModulesToSaveWrapper":
            raise _refused(path, f"is PEFT's {_kind_of(module).__name__}, which is not merged")
        saved = f"{path}.modules_to_save"
        if self._adapter in module.modules_to_save:
            kept = {saved, f"{saved}.{self._adapter}"}
        else:
            kept = {f"{path}.original_module"}
        self.transparent |= kept
        every = {f"{saved}.{name}" for name in module.modules_to_save}
        self._dropped |= ({f"{path}.original_module", saved} | every) - kept

    def is_kept(self, path: str) -> bool:
        """Whether a tensor at that path is one of the base, or takes the place of one."""
        parts = path.split(".")
        return not any(".".join(parts[:n]) in self._dropped for n in range(1, len(parts) + 1))

    def refuse_tied(self, places: list[tuple[Any, str]], paths: list[str]) -> None:
        """RequestError: the adapter adds to one of the places of one tensor, which is another
        tensor then in the others."""
        layers = [one for owner, name in places for one in self._layers.get((id(owner), name), ())]
        if layers and len(places) > 1:
            raise _refused(
                layers[0].path,
                f"adds to '{paths[0]}', which is tied to '{paths[1]}': merged they are two tensors",
                "load the base with two tensors (tie_word_embeddings=False, no layer_replication), "
                "or leave the module out of target_modules",
            )

    def __call__(self, name: str, module: Any, attribute: str, tensor: Any) -> Values | None:
        given = self._base(name, module, attribute, tensor)
        key = (id(module), attribute)
        if key not in self._layers:
            return given
        base = given or _stored(name, module, attribute, tensor, self._cut)
        if base.dtype not in _FLOATING:
            raise _refused(
                self._layers[key][0].path,
                f"adds to '{name}', whose elements are {base.dtype}, not BF16, F16 or F32",
                "give transform= that says what the values of a quantized base are, or publish the "
                "adapter by fanin.torch.AdapterServer",
            )
        self._refuse_split_dora(key, name, tuple(base.shape), base.parts)
        return self._merged(base, given, Stored(name, module, attribute, self._cut))

    def _merged(self, base: Values, given: Values | None, stored: Stored) -> Values:
        """The values of a tensor with the adapter; given: the base's, None: they are stored."""
        shape, parts, place = tuple(base.shape), base.parts, stored.place
        key = (id(place.owner), place.attribute)

        def begin(outs: list[Any] | None = None) -> Callable[[int, Any], None]:
            layers, step = self._layers[key], self._step
            self._step = None  # if this raises, or is of no kernel, the step is not repeated
            factors = [
                {which: self._factors.whole(one) for which, one in layer.places.items()}
                for layer in layers
            ]
            unpack = given.begin() if isinstance(given, Parted) else None
            if given is not None and unpack is None:
                given.fill(outs or [])
            if not self._is_looked:
                self._refuse_merged()
            for layer in layers:
                self._refuse_switched(layer)
            sources = stored.now() if given is None else None
            if given is None:
                self._step = step
                self._note(0, parts, place, layers)

            def compute(number: int, out: Any) -> None:
                step, self._step = self._step, None
                if unpack is not None:
                    unpack(number, out)
                source, is_summed = out if sources is None else sources[number], True
                for layer, found in zip(layers, factors, strict=True):
                    is_summed &= layer.add(found, shape, parts[number], source, out, self._sums)
                    if len(layers) > 1:
                        self._sums.launch()  # the next one reads it
                    source = out
                if is_summed:
                    self._step = step
                    self._note(number + 1, parts, place, layers)

            return compute

        if given is None or isinstance(given, Parted):
            return parted(shape, base.dtype, parts, begin)

        def fill(outs: list[Any]) -> None:
            compute = begin(outs)
            for number, out in enumerate(outs):
                compute(number, out)

        return Values(shape, base.dtype, parts, fill)

    def _note(self, done: int, parts: tuple[Part, ...], place: Place, layers: list[Layer]) -> None:
        """As many parts of the tensor at *place* are asked for."""
        if self._step is not None and done == len(parts):
            self._step.note(place, layers)

    def _base(self, name: str, module: Any, attribute: str, tensor: Any) -> Values | None:
        given = self._transform(name, module, attribute, tensor) if self._transform else None
        return given or unpack4(name, module, attribute, tensor, self._cut)

    def place_of(self, item: Item) -> int:
        return self._order.get((id(item.owner), item.attribute), -1)

    def then(self, call: Callable[[], None]) -> None:
        step, self._step = self._step, None
        self._sums.launch()
        call()
        if step is not None:
            step.events.append(call)
        self._step = step

    def finish(self) -> None:
        """All is computed: frees the factors that were gathered."""
        step, self._step = self._step, None
        self._is_looked = False
        self._factors.forget()
        self._sums.launch()
        self._sums.log = self._factors.log = None
        if step is not None and step.is_whole:
            # The step is good, and the next one is not repeated.
            with contextlib.suppress(Exception):
                self._steady[self._whose] = Steady(step, self._sums)

    def repeat(self, whose: Hashable, states: list[State]) -> bool:
        steady, stands = self._steady.pop(whose, None), False
        with contextlib.suppress(Exception):  # what is wrong is told where each one is asked for
            stands = steady is not None and steady.stands(states)
        if steady is not None and stands:
            steady.repeat()
            self._steady[whose] = steady
            return True
        self._step = Step(states, self._adapter, [module for _, module in self._others])
        self._whose = whose
        self._sums.log = self._factors.log = self._step.events
        return False

    def release(self) -> None:
        self._steady = {}
        self._factors.release()

    def _refuse_merged(self) -> None:
        """RequestError: the base has another adapter in it, where this one adds nothing. Asked once
        a step."""
        self._is_looked = True
        self._sums.is_tf32 = is_tf32()
        for path, module in self._others:
            if module.merged_adapters:
                raise RequestError.make(
                    f"the adapter '{module.merged_adapters[0]}' is merged into '{path}', which the "
                    f"published adapter '{self._adapter}' does not touch",
                    "unmerge_adapter() before the step is published",
                    key=path,
                )

    def _refuse_split_dora(
        self, key: tuple[int, str], name: str, shape: Shape, parts: tuple[Part, ...]
    ) -> None:
        whole = all(tuple(extent[1:]) == shape[1:] for _, extent in parts)
        if not whole and any(layer.is_dora for layer in self._layers[key]):
            raise _refused(
                self._layers[key][0].path,
                f"is DoRA's, which scales whole rows, and this rank has parts of rows of '{name}'",
                "shard the base by rows (Shard(0)), or train without use_dora",
            )

    def _refuse_switched(self, layer: Layer) -> None:
        """RequestError: the layer does not compute with the adapter that was found."""
        module = layer.layer
        if module.merged_adapters:
            what, remedy = "is merged into the base already", "unmerge_adapter() before"
        elif module.disable_adapters:
            what, remedy = "is switched off", "switch adapters on before the step is published"
        elif list(module.active_adapters) != [self._adapter]:
            what = f"is not the one that is active ({', '.join(module.active_adapters) or 'none'})"
            remedy = (
                f"set_adapter('{self._adapter}') before the step is published, or call refresh() "
                "on every rank"
            )
        else:
            return
        raise RequestError.make(
            f"the adapter '{self._adapter}' of '{layer.path}' {what}", remedy, key=layer.path
        )


class Stored:
    """This rank's parts of a stored tensor, found again where its sharding is another one."""

    def __init__(self, name: str, module: Any, attribute: str, cut: Cut | None) -> None:
        self._name, self._cut = name, cut
        self.place = Place(module, attribute)
        self._seen: Any = None
        self._cuts: list[tuple[Shape, Shape, int]] = []

    def now(self) -> list[Any]:
        """Views of the tensor that is there now. For callers under torch.no_grad()."""
        tensor = self.place.now()
        spec, local = getattr(tensor, "_spec", None), part_now(tensor)
        seen = local.shape, local.stride(), local.storage_offset()
        if self._seen != (spec, seen):
            views = [view for _, view in _views(self._name, tensor, self._cut)]
            self._cuts = [(view.shape, view.stride(), view.storage_offset()) for view in views]
            self._seen = spec, seen
        return [local if one == seen else local.as_strided(*one) for one in self._cuts]


def _views(name: str, tensor: Any, cut: Cut | None) -> Iterator[tuple[Part, Any]]:
    """The parts of a tensor that this rank holds, large ones cut."""
    for offset, view in parts_of(tensor, name):
        part = offset, tuple(view.shape)
        for where, size in cut.of(part, view.element_size()) if cut else [part]:
            near = (
                slice(at - of, at - of + n) for at, of, n in zip(where, offset, size, strict=True)
            )
            yield (where, size), view[tuple(near)]


def _stored(name: str, module: Any, attribute: str, tensor: Any, cut: Cut | None) -> Values:
    """A stored tensor, as it is."""
    refuse_kind(Item(name, name, module, attribute), getattr(tensor, "_local_tensor", tensor))
    parts = tuple(part for part, _ in _views(name, tensor, cut))
    return Values(tuple(tensor.shape), tensor.dtype, parts, lambda outs: None)


def _noisy(factor: Found) -> Found:
    noise = noise_like(factor.tensor())
    return Found(noise, 0, noise.shape, noise.stride(), None, None, factor.expert)


def _is_a(module: Any, where: str, name: str) -> bool:
    return isinstance(module, getattr(sys.modules.get(f"peft.{where}"), name, ()))


def _refused(path: str, what: str, remedy: str = _OTHERS) -> RequestError:
    return RequestError.make(f"'{path}' {what}", remedy, key=path)
