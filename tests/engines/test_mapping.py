# SPDX-License-Identifier: Apache-2.0
"""What loaders do, recorded: small models and loaders of every kind, good and bad."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from families import Entry, served, values
from fanin import mapping as maps
from fanin.mapping import MappingError

ROOT = Path(__file__).resolve().parents[2]
Loader = Callable[[Any, str, torch.Tensor], None]
Weights = Iterator[tuple[str, torch.Tensor]]


class Fused(torch.nn.Module):
    """Two published tensors in one parameter, padded by two rows, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.full((10, 6), 7.0, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.full((6,), 7.0))
        self.register_buffer("cache", torch.full((3,), 7.0), persistent=False)
        self.calls = 0

    def put(self, name: str, weight: torch.Tensor) -> None:
        if name == "up":
            self.rows.data[0:4].copy_(weight)
        elif name == "down":
            self.rows.data.narrow(0, 4, 4).copy_(weight.t())
            self.rows.data[8:].fill_(0)
        else:
            self.norm.data.copy_(weight)

    def load_weights(self, weights: Weights) -> None:
        self.calls += 1
        for name, weight in weights:
            self.put(name, weight)


PUBLISHED = [Entry("up", "BF16", (4, 6)), Entry("down", "BF16", (6, 4)), Entry("norm", "F32", (6,))]


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """All that a recording has to leave as it is."""
    return {
        "tensors": {
            name: (t, t.data_ptr(), t.detach().clone())
            for name, t in [*model.named_parameters(), *model.named_buffers()]
        },
        "attributes": {k: v for k, v in model.__dict__.items() if isinstance(v, (int, str))},
    }


def assert_untouched(model: torch.nn.Module, before: dict[str, Any]) -> None:
    now = state_of(model)
    assert now["attributes"] == before["attributes"]
    assert list(now["tensors"]) == list(before["tensors"])
    for name, (tensor, address, content) in before["tensors"].items():
        assert now["tensors"][name][0] is tensor, name
        assert now["tensors"][name][1] == address, name
        assert torch.equal(now["tensors"][name][2], content), name


def recorded(model: torch.nn.Module, published: list[Entry] = PUBLISHED, **more: Any):
    """Records, and looks that the model is as it was."""
    before = state_of(model)
    recording = maps.record(published, model.load_weights, model, **more)
    assert_untouched(model, before)
    return recording


def bad(put: Callable[[Fused, str, torch.Tensor], None]) -> Fused:
    """The model with a loader that does something else with "up"."""

    class Bad(Fused):
        def put(self, name: str, weight: torch.Tensor) -> None:
            put(self, name, weight) if name == "up" else super().put(name, weight)

    return Bad()


def pull(weights: dict[str, torch.Tensor], packed: Any) -> None:
    """What one rank publishes, into what was packed."""
    with served(weights) as addresses, fanin.Client(addresses) as client:
        assert client.pull_into("full:0", packed.tensors, step=1, dtype=packed.dtype).step == 1
    packed.settle()


def landed(make: Callable[[], Any], published: list[Entry] = PUBLISHED) -> tuple[Any, Any, Any]:
    """A model that has pulled, one that has loaded the same, and the mapping."""
    weights = values(published)
    model, expected = make(), make()
    expected.load_weights(iter(weights.items()))
    mapping = recorded(model, published).mapping()
    packed = mapping.pack(model)
    mapping.fill(model)
    pull(weights, packed)
    return model, expected, mapping


def same(model: torch.nn.Module, expected: torch.nn.Module) -> bool:
    found = dict(model.named_parameters())
    return all(torch.equal(found[name], value) for name, value in expected.named_parameters())


# --------------------------------------------------------------------------------- good loaders


def test_what_is_copied_becomes_boxes() -> None:
    mapping = recorded(Fused()).mapping()
    (module,) = mapping.modules
    rows, norm, cache = module.leaves
    assert [s.name for s in rows.sources] == ["up", "down"]
    assert rows.sources[0].pieces == (((0, 0), (4, 6), 0, (12, 2)),)
    assert rows.sources[1].pieces == (((0, 0), (6, 4), 48, (2, 12)),)
    assert rows.fills == ((0, 96, (2, 6), (12, 2)),)
    assert (norm.dtype, norm.sources[0].pieces) == ("F32", (((0,), (6,), 0, (4,)),))
    assert cache.own == "a buffer that no checkpoint has"
    assert (mapping.keys, mapping.unwanted, module.fallback) == (3, (), "")


def test_a_pull_puts_what_the_loader_puts() -> None:
    model, expected, _ = landed(Fused)
    assert same(model, expected)


def test_views_of_any_kind_are_boxes() -> None:
    def put(model: Fused, name: str, weight: torch.Tensor) -> None:
        whole = weight.unflatten(0, (2, 2)).permute(2, 0, 1).unsqueeze(0).flatten(2)
        model.rows.data.view(5, 2, 6)[:2].view(4, 6).copy_(whole.squeeze(0).t())

    weights = values(PUBLISHED)
    model, expected = bad(put), Fused()
    expected.load_weights(iter(weights.items()))
    pull(weights, recorded(model).mapping().pack(model))
    assert torch.equal(model.rows[:8], expected.rows[:8])


JOINS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda up, down: torch.cat([up, down.t()]),
    lambda up, down: torch.cat([up[:3], down[:, :2].t(), up[3:], down.t()[2:]]),
    lambda up, down: torch.cat([down, up.t()], dim=-1).t(),
    lambda up, down: torch.cat([up.unsqueeze(0), down.t()[None]], 1)[0].narrow(0, 0, 8),
]


@pytest.mark.parametrize("number", range(len(JOINS)))
def test_what_a_loader_joins_is_copies_of_its_parts(number: int) -> None:
    """As loaders do it that keep one tensor until the other comes."""

    class Joins(Fused):
        def load_weights(self, weights: Weights) -> None:
            kept = dict(weights)
            whole = JOINS[number](kept["up"], kept["down"])
            self.rows.data[:3].copy_(whole[:3])
            self.rows.data[3:8].copy_(whole.narrow(0, 3, 5))
            self.rows.data[8:].fill_(0)
            self.norm.data.copy_(kept["norm"])

    model, expected, mapping = landed(Joins)
    assert same(model, expected) and mapping.unwanted == ()


class Wide(torch.nn.Module):
    """A router in F32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(4, 6))
        self.bias = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


def test_a_narrow_tensor_is_widened_after_it_has_landed() -> None:
    published = [Entry("gate", "BF16", (4, 6)), Entry("bias", "F32", (4,))]
    weights = values(published)
    model, expected = Wide(), Wide()
    expected.load_weights(iter(weights.items()))
    mapping = recorded(model, published).mapping()
    with pytest.raises(fanin.RequestError, match="settle"):
        mapping.shards(model)
    bridges: list[maps.Bridge] = []
    assert len(mapping.shards(model, bridges=bridges)) == 2
    assert [bridge.live is model.gate for bridge in bridges] == [True]
    packed = mapping.pack(model)
    assert packed.dtype == "BF16"
    pull(weights, packed)
    assert same(model, expected)


def test_padding_of_a_widened_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of what lies beside it is copied to it: whatever new memory holds must not be."""

    class Padded(Wide):
        def load_weights(self, weights: Weights) -> None:
            for _, weight in weights:
                self.gate.data[:3].copy_(weight)
                self.gate.data[3:].fill_(-2)

    published = [Entry("gate", "BF16", (3, 6))]
    weights = values(published)
    model, expected = Padded(), Padded()
    del model.bias, expected.bias
    expected.load_weights(iter(weights.items()))
    mapping = recorded(model, published).mapping()
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **more: empty(*a, **more).fill_(5))
    packed = mapping.pack(model)
    mapping.fill(model)
    pull(weights, packed)
    assert same(model, expected)


def test_one_tensor_may_go_to_two_modules() -> None:
    published = [Entry("shared", "BF16", (4, 6))]
    model = torch.nn.ModuleList(torch.nn.Linear(6, 2, bias=False) for _ in range(2)).bfloat16()

    def load(weights: Weights) -> None:
        for _, weight in weights:
            for part, linear in zip(weight.split(2), model, strict=True):
                linear.weight.data.copy_(part)

    weights = values(published)
    pull(weights, maps.record(published, load, model).mapping().pack(model))
    assert torch.equal(torch.cat([part.weight for part in model]), weights["shared"])


def test_new_memory_is_laid_out_as_recorded() -> None:
    class Turned(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.zeros(6, 10, dtype=torch.bfloat16).t())

    weights = values(PUBLISHED)
    model, expected = Turned(), Fused()
    expected.load_weights(iter(weights.items()))
    mapping = recorded(model).mapping()
    shadow = mapping.allocate()
    assert sorted(shadow) == [("", "norm"), ("", "rows")]
    assert shadow["", "rows"].stride() == model.rows.stride()
    mapping.fill(shadow)
    pull(weights, mapping.pack(shadow))
    assert torch.equal(shadow["", "rows"], expected.rows)
    with pytest.raises(fanin.RequestError, match="no module, function or dictionary"):
        mapping.pack(3)


def test_a_meta_model_has_the_same_mapping() -> None:
    with torch.device("meta"):
        bare = Fused()
    live = recorded(Fused()).mapping()
    mapping = maps.record(PUBLISHED, bare.load_weights, bare).mapping()
    assert mapping == live
    assert mapping.fingerprint() == live.fingerprint()
    with pytest.raises(fanin.RequestError, match="no memory"):
        mapping.pack(bare)


def test_some_modules_alone_are_packed() -> None:
    model = torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)) for _ in range(2)
            ),
            "head": torch.nn.Linear(2, 2, bias=False),
        }
    )
    published = [Entry(n, "F32", tuple(p.shape)) for n, p in model.named_parameters()]

    def load(weights: Weights) -> None:
        for name, weight in weights:
            model.get_parameter(name).data.copy_(weight)

    mapping = maps.record(published, load, model).mapping()
    whole = mapping.pack(model)
    assert [s.name for s in whole.tensors.shards] == [entry.name for entry in published]
    only = mapping.pack(model, iter(["layers.1.0"]))
    assert [s.name for s in only.tensors.shards] == ["layers.1.0.weight", "layers.1.0.bias"]


def test_ties_are_named() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4)})
    model["head"].weight = model["embed"].weight
    published = [Entry("embed", "F32", (4, 2)), Entry("bias", "F32", (4,))]

    def load(weights: Weights) -> None:
        for name, weight in weights:
            to = model["embed"].weight if name == "embed" else model["head"].bias
            to.data.copy_(weight)

    mapping = maps.record(published, load, model).mapping()
    assert mapping.modules[1].leaves[0].own == "the memory of embed.weight"
    with torch.device("meta"):
        model["head"].weight = torch.nn.Parameter(torch.empty(4, 2))
    with pytest.raises(MappingError, match=r"'head.weight': no published tensor fills it"):
        maps.record(published, load, model).mapping()
    mapping = maps.record(published, load, model, ties={"head.weight": "embed.weight"}).mapping()
    assert mapping.modules[1].leaves[0].own == "tied to embed.weight"


# --------------------------------------------------------------------------------- bad loaders


def computes(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].copy_(weight * 2)


def casts(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].copy_(weight.float())


def joins_and_changes(model: Fused, name: str, weight: torch.Tensor) -> None:
    whole = torch.cat([weight[2:], weight[:2]])
    whole[1:].mul_(2)
    model.rows.data[:4].copy_(whole)


def joins_and_reads_bits(model: Fused, name: str, weight: torch.Tensor) -> None:
    whole = torch.cat([weight[2:], weight[:2]]).view(torch.float16)
    model.rows.data[:4].copy_(whole)


def joins_and_overwrites(model: Fused, name: str, weight: torch.Tensor) -> None:
    whole = torch.cat([weight[2:], weight[:2]])
    whole[1:].copy_(torch.zeros(3, 6))
    model.rows.data[:4].copy_(whole)


def overwrites(model: Fused, name: str, weight: torch.Tensor) -> None:
    weight[2:].copy_(torch.zeros(2, 6))
    model.rows.data[:4].copy_(weight)


def changes(model: Fused, name: str, weight: torch.Tensor) -> None:
    weight.mul_(2)
    model.rows.data[:4].copy_(weight)


def adds(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].add_(weight)


def broadcasts(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].copy_(weight[0])


def asks(model: Fused, name: str, weight: torch.Tensor) -> None:
    if weight[0, 0].item() > 0:
        model.rows.data[:4].copy_(weight)


def replaces(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows = torch.nn.Parameter(torch.zeros(10, 6, dtype=torch.bfloat16))
    model.rows.data[:4].copy_(weight)


def assigns(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data = torch.zeros(10, 6, dtype=torch.bfloat16)


def takes(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data = weight


def numpys(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].view(torch.uint8).numpy()[:] = weight.view(torch.uint8).numpy()


def twice(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].copy_(weight)
    model.rows.data[3:4].copy_(weight[3:])


def wipes(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].copy_(weight)
    model.rows.data[3:4].zero_()


def breaks(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.calls = 99
    model.norm.data.fill_(3)
    raise KeyError("no such weight")


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (computes, r"tensor 'up' into 'rows': the loader computes it by aten\.mul"),
        (casts, r"tensor 'up' into 'rows': the loader computes it by aten\._to_copy"),
        (
            lambda m, _, w: m.rows.data[:4].copy_(torch.cat([w[2:], w[:2]]) * 2),
            r"tensor 'up' into 'rows': the loader computes it by aten\.mul",
        ),
        (
            lambda m, _, w: m.rows.data[:4].copy_(torch.cat([w[2:], w[:2] * 2])),
            r"tensor 'up' into 'rows': the loader computes it by aten\.(mul|cat)",
        ),
        (joins_and_changes, r"tensor 'up' into 'rows': the loader computes it by aten\.mul_"),
        (joins_and_reads_bits, r"tensor 'up' into 'rows': the loader computes it by aten\.cat"),
        (
            lambda m, _, w: m.rows.data[:4].copy_(torch.cat([w[2:], torch.zeros_like(w[:2])])),
            r"tensor 'up' into 'rows': the loader computes it by aten\.",
        ),
        (joins_and_overwrites, r"tensor 'up' into 'rows': the loader computes it by aten\.copy_"),
        (overwrites, r"tensor 'up' into 'rows': the loader computes it by aten\.copy_.* into it"),
        (
            lambda m, _, w: m.rows.data[:4].view(torch.uint8).fill_(1),
            r"into 'rows': the loader writes by aten\.fill_.*, not by copy_",
        ),
        (
            lambda m, _, w: m.rows.data[:4].copy_(torch.empty(4, 6, dtype=w.dtype).copy_(w)),
            r"tensor 'up' into 'rows': the loader computes it by aten\.copy_.* of its own",
        ),
        (changes, r"tensor 'up' into 'rows': the loader computes it by aten\.mul_"),
        (adds, r"tensor 'up' into 'rows': the loader writes by aten\.add_"),
        (broadcasts, r"tensor 'up' into 'rows': the loader copies one element of it to several"),
        (asks, r"tensor 'up': the loader reads values of tensor 'up' by aten\._local_scalar_dense"),
        (
            lambda m, _, w: m.rows.data[:4].view(-1).copy_(w[w > 0]),
            r"tensor 'up': the loader needs values of tensor 'up' for aten\.",
        ),
        (replaces, r"into 'rows': the loader replaces it"),
        (assigns, r"into 'rows': the loader replaces it, or its memory"),
        (takes, r"tensor 'up': the loader failed with RuntimeError"),
        (numpys, r"tensor 'up': the loader failed with (TypeError|RuntimeError)"),
        (
            lambda m, _, w: m.rows.data[:4].copy_(torch.ones(4, 6, dtype=torch.bfloat16)),
            r"into 'rows': the loader writes values that are not published",
        ),
        (twice, r"'rows': 6 of 60 elements are filled twice, the first at \[3, 0\] by 'up'"),
        (
            lambda m, _, w: m.rows.data[:2].copy_(w[:2]),
            r"'rows': 12 of 60 elements are filled by no published tensor, .* at \[2, 0\]",
        ),
        (wipes, r"tensor 'up' into 'rows': the loader fills elements that it had copied"),
        (breaks, r"tensor 'up': the loader failed with KeyError: 'no such weight'"),
    ],
)
def test_a_loader_that_does_more_than_copy(put: Loader, said: str) -> None:
    with pytest.raises(MappingError, match=said) as caught:
        recorded(bad(put)).mapping()
    assert caught.value.refusals
    assert caught.value.remedy


def test_a_refused_module_can_be_left_to_the_loader() -> None:
    model = torch.nn.ModuleDict({"good": Fused(), "bad": bad(computes)})

    def load(weights: Weights) -> None:
        for name, weight in weights:
            part, _, leaf = name.partition(".")
            model[part].put(leaf, weight)

    published = [Entry(f"{part}.{e.name}", e.dtype, e.shape) for part in model for e in PUBLISHED]
    recording = maps.record(published, load, model)
    with pytest.raises(MappingError, match="aten.mul"):
        recording.mapping()
    mapping = recording.mapping(fallback=True)
    good, left = mapping.modules
    assert not good.fallback and "aten.mul" in left.fallback
    assert set(left.taken) == {"bad.up", "bad.down", "bad.norm"}
    assert mapping.unwanted == ()
    assert {shard.name for shard in mapping.shards(model)} == {"good.up", "good.down", "good.norm"}


def copies_bytes(model: Fused, name: str, weight: torch.Tensor) -> None:
    model.rows.data[:4].view(torch.uint8).copy_(weight.view(torch.uint8))


@pytest.mark.parametrize("put", [computes, casts, broadcasts, adds, replaces, copies_bytes])
def test_what_only_the_loader_writes_counts_as_filled(put: Loader) -> None:
    recording = recorded(bad(put))
    assert recording.whole and recording.unfilled == ()
    assert recording.mapping(fallback=True).modules[0].fallback


@pytest.mark.parametrize("put", [computes, casts, broadcasts, adds])
def test_what_nothing_fills_is_not_left_to_the_loader(put: Loader) -> None:
    """It has no values for the rest, either: that would be what memory happens to hold."""
    recording = recorded(bad(put), changed(down=None))
    said = r"into 'rows': 36 of 60 elements are filled by no published tensor, .* \[4, 0\]"
    with pytest.raises(MappingError, match=said) as caught:
        recording.mapping()
    assert not recording.only_computes(caught.value)
    with pytest.raises(MappingError, match=said):
        recording.mapping(fallback=True)
    assert [(r.leaf, r.unfilled) for r in recording.unfilled] == [("rows", 36)]
    whole = recorded(bad(put))
    with pytest.raises(MappingError) as caught:
        whole.mapping()
    assert whole.only_computes(caught.value)


def test_a_loader_that_failed_tells_nothing_of_the_rest() -> None:
    assert not recorded(bad(breaks)).whole


def test_what_fails_as_a_whole_has_no_fallback() -> None:
    with pytest.raises(MappingError, match="KeyError"):
        recorded(bad(breaks)).mapping(fallback=True)


# --------------------------------------------------------------------------------- bad catalogs


def changed(**how: Entry | None) -> list[Entry]:
    """The publication with entries replaced, left out (None) or added."""
    made = {e.name: e for e in PUBLISHED}
    return [e for e in {**made, **how}.values() if e is not None]


@pytest.mark.parametrize(
    ("published", "said"),
    [
        (changed(up=None), r"24 of 60 elements are filled by no published tensor, .* \[0, 0\]"),
        (changed(norm=None), r"'norm': no published tensor fills it"),
        (changed(up=Entry("up", "F16", (4, 6))), "published as F16 and wanted as BF16"),
        (changed(norm=Entry("norm", "I32", (6,))), "'norm': it is published as I32 and wanted as"),
        (changed(up=Entry("up", "BF16", (5, 6))), "tensor 'up': the loader failed"),
        (changed(norm=Entry("norm", "F32", (1,))), "'norm' into 'norm': the loader copies one"),
    ],
)
def test_a_publication_of_another_model(published: list[Entry], said: str) -> None:
    with pytest.raises(MappingError, match=said):
        recorded(Fused(), published).mapping()


def test_what_nobody_wants_is_told() -> None:
    class Selective(Fused):
        def put(self, name: str, weight: torch.Tensor) -> None:
            if name != "extra":
                super().put(name, weight)

    mapping = recorded(Selective(), changed(extra=Entry("extra", "F32", (2,)))).mapping()
    assert mapping.unwanted == ("extra",)
    assert maps.unwanted([mapping, mapping]) == ("extra",)
    other = recorded(Fused()).mapping()
    with pytest.raises(fanin.RequestError, match="different publications"):
        maps.unwanted([mapping, other])
    with pytest.raises(fanin.RequestError, match="no mapping"):
        maps.unwanted([])


def test_a_catalog_that_cannot_be_run() -> None:
    model = Fused()
    with pytest.raises(fanin.RequestError, match="twice"):
        maps.record([*PUBLISHED, PUBLISHED[0]], model.load_weights, model)
    with pytest.raises(fanin.RequestError, match="no type for F6_E2M3"):
        maps.record([Entry("x", "F6_E2M3", (4,))], model.load_weights, model)
    lazy = torch.nn.LazyLinear(3)
    with pytest.raises(fanin.RequestError, match="'weight' has no shape"):
        maps.record(PUBLISHED, model.load_weights, lazy)
    assert model.calls == 0


def test_f32_becomes_one_type_in_a_pull() -> None:
    published = [Entry("gate", "F32", (4, 6)), Entry("bias", "F32", (4,))]
    weights = values(published)
    model, expected = Wide(), Wide()
    expected.load_weights(iter(weights.items()))
    packed = recorded(model, published).mapping().pack(model)
    assert (packed.dtype, packed.bridges) == ("BF16", ())
    pull(weights, packed)
    assert same(model, expected)
    model.gate = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.float16))
    with pytest.raises(fanin.RequestError, match="'gate' as F16 and 'bias' as BF16"):
        recorded(model, published).mapping().pack(model)


# --------------------------------------------------------------------------------- other memory


def test_another_layout_than_recorded_is_refused() -> None:
    mapping = recorded(Fused()).mapping()
    other = Fused()
    other.rows = torch.nn.Parameter(torch.zeros(5, 6, dtype=torch.bfloat16))  # twice the ranks
    with pytest.raises(fanin.RequestError, match=r"'.rows' is BF16 of shape \[5, 6\]"):
        mapping.pack(other)
    del other.rows
    with pytest.raises(fanin.RequestError, match=r"has no '.rows'"):
        mapping.pack(other)
    other.rows = torch.nn.Parameter(torch.zeros(6, 10, dtype=torch.bfloat16).t())
    with pytest.raises(fanin.RequestError, match="strides"):
        mapping.pack(other)


# --------------------------------------------------------------------------------- on disk


def test_a_mapping_is_saved_and_read(tmp_path: Path) -> None:
    about = maps.About("vllm", "0.32.0", "Fused", {"tp": (0, 2), "pp": (0, 1)})
    mapping = recorded(Fused(), about=about).mapping()
    mapping.save(tmp_path / "rank0.json")
    assert maps.load(tmp_path / "rank0.json") == mapping
    assert json.loads((tmp_path / "rank0.json").read_text())["format"] == maps.FORMAT
    assert [p.name for p in tmp_path.iterdir()] == ["rank0.json"]
    left = recorded(bad(computes)).mapping(fallback=True)
    left.save(tmp_path / "rank0.json")
    assert maps.load(tmp_path / "rank0.json") == left
    with pytest.raises(OSError):
        mapping.save(tmp_path / "nowhere" / "rank0.json")


def test_files_are_what_the_schema_says(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs/schemas/mapping.json").read_text())
    about = maps.About("vllm", "0.32.0", "Fused", {"pp": (0, 1), "tp": (0, 2)})
    recorded(Fused(), about=about).mapping().save(tmp_path / "small.json")
    left = recorded(bad(computes)).mapping(fallback=True)
    left.save(tmp_path / "left.json")
    for name in ("small", "left"):
        jsonschema.validate(json.loads((tmp_path / f"{name}.json").read_text()), schema)
    small = ROOT / "tests/support/mapping.json"
    assert small.read_bytes() == (tmp_path / "small.json").read_bytes()


def altered(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def alter(document: dict[str, Any]) -> None:
        at: Any = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return alter


ROWS = ("modules", 0, "tensors", 0)
UP = (*ROWS, "sources", 0)
BOX = (*UP, "boxes", 0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), "fanin-mapping/2", "format is 'fanin-mapping/2'"),
        (("engine",), 3, "engine is no object"),
        (("ranks",), {"tp": {"rank": 2, "size": 2}}, "ranks.tp.rank is 2 of 2"),
        (("published", "count"), -1, "published.count is -1"),
        (("modules",), {}, "modules is no list"),
        (("modules", 0, "path"), None, r"modules\[0\].path is no string"),
        ((*ROWS, "dtype"), "BF17", r"tensors\[0\].dtype is 'BF17'"),
        ((*ROWS, "role"), "weight", r"tensors\[0\].role is 'weight'"),
        ((*ROWS, "shape"), [10, 6, 1], r"tensors\[0\].stride has 2 numbers, .* 3 dimensions"),
        ((*ROWS, "shape"), [9, 6], r"fills\[0\] ends|boxes of 48 elements|ends"),
        ((*ROWS, "own"), "mine", "is the engine's own and has sources"),
        ((*UP, "dtype"), "I16", r"sources\[0\].dtype is I16, which does not become BF16"),
        ((*UP, "boxes"), [], r"boxes is empty"),
        ((*BOX, "offset"), [1, 0], r"boxes\[0\] is not inside of shape \[4, 6\]"),
        ((*BOX, "extent"), [4, 0], r"boxes\[0\] is not inside of shape"),
        ((*BOX, "extent"), [4, True], r"extent is no list of integers"),
        ((*BOX, "at"), 100, r"boxes\[0\] ends \d+ bytes after its tensor"),
        ((*BOX, "at"), 1 << 70, r"boxes\[0\].at is \d+, no integer"),
        ((*BOX, "at"), 1, r"does not lie on whole elements of BF16"),
        ((*BOX, "stride"), [12, 0], "writes elements over each other"),
        ((*BOX, "stride"), [-12, 2], "stride is no list of integers"),
        ((*BOX, "at"), 12, r"tensors\[0\] fills element \[4, 0\] twice"),
        ((*BOX, "stride"), [24, 2], r"tensors\[0\] fills element \[4, 0\] twice"),
        ((*ROWS, "fills", 0, "at"), 84, r"does not fill element \[9, 0\]"),
        ((*BOX, "extent"), [3, 6], "has boxes of 42 elements and padding of 12, not of 60"),
    ],
)
def test_a_lying_file_is_refused(
    tmp_path: Path, path: tuple[Any, ...], value: Any, said: str
) -> None:
    file = tmp_path / "rank0.json"
    recorded(Fused()).mapping().save(file)
    document = json.loads(file.read_text())
    altered(path, value)(document)
    file.write_text(json.dumps(document))
    with pytest.raises(fanin.RequestError, match=said):
        maps.load(file)


def test_a_file_of_any_content_is_read_or_refused(tmp_path: Path) -> None:
    """Every value of a good file exchanged for another one: nothing else than a refusal, and no box
    outside of its tensor."""
    mapping = recorded(Fused()).mapping()
    mapping.save(tmp_path / "good.json")
    good = json.loads((tmp_path / "good.json").read_text())

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        yield path
        if isinstance(value, (dict, list)):
            steps = value if isinstance(value, dict) else range(len(value))
            for step in steps:
                yield from places(value[step], (*path, step))

    others = [None, True, -1, 0, 1, 7, 1 << 61, 1 << 80, 0.5, "", "F32", [], [0], [1, 1], {}]
    read = refused = 0
    for path in list(places(good))[1:]:
        for other in others:
            document = json.loads(json.dumps(good))
            altered(path, other)(document)
            (tmp_path / "other.json").write_text(json.dumps(document))
            try:
                found = maps.load(tmp_path / "other.json")
            except fanin.RequestError as error:
                assert "other.json" in str(error)
                refused += 1
            else:
                read += 1
                for _, leaf, source in found.sources():
                    room = sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride, strict=True))
                    for piece in source.pieces:
                        reach = zip(piece.extent, piece.stride, strict=True)
                        assert piece.at + sum((n - 1) * s for n, s in reach) <= room
    assert read > 20 and refused > 500


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "\xff", '{"format": "fanin-mapping/1"}'])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rank0.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(fanin.RequestError, match=r"rank0\.json"):
        maps.load(file)
