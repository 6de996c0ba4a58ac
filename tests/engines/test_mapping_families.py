# SPDX-License-Identifier: Apache-2.0
"""Mappings of eight model families, recorded from vLLM's real classes and loaders, rank by rank:
what they put in place is what the loaders put in place."""

from __future__ import annotations

import math
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from families import FAMILIES, Engine, Entry, Layout, checkpoint, served, values
from fanin import mapping as maps
from fanin._digest import box_digest
from fanin._served import Held, Tensor, compare
from fanin.mapping import Mapping, MappingError
from fanin.mapping._checks import Taken, missed, taken_of
from fanin.mapping._held import held_of
from fanin.vllm import patches, reload
from vllm.model_executor.model_loader.reload import layerwise

LAYOUTS = [
    (name, layout)
    for name, family in FAMILIES.items()
    for layout in (Layout(1), Layout(2), Layout(2, experts=True))
    if family.experts or not layout.experts
] + [(name, Layout(2, stages=True)) for name in ("qwen2", "qwen3-moe", "deepseek-v3")]
POISON = 0x5A


def tensors_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def poison(model: Any) -> None:
    """Fills what is loaded with a pattern."""
    for _, parameter in model.named_parameters():
        assert parameter.is_contiguous()
        bits(parameter).fill_(POISON)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: bits(tensor).clone() for name, tensor in tensors_of(model)}


def put(mapping: Mapping, model: Any, weights: dict[str, torch.Tensor]) -> None:
    """What a pull by the mapping does, box by box, done by PyTorch."""
    mapping.fill(model)
    for module, leaf, source in mapping.sources():
        live = getattr(model.get_submodule(module.path), leaf.name).detach()
        size = live.element_size()
        for piece in source.pieces:
            to = live.as_strided(
                piece.extent,
                [step // size for step in piece.stride],
                live.storage_offset() + piece.at // size,
            )
            where = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.extent, strict=True))
            to.copy_(weights[source.name][where])


def loaded(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What vLLM's own loader makes of poisoned parameters."""
    poison(model)
    with torch.no_grad():
        model.load_weights(iter(weights.items()))
    return snapshot(model)


def identities(model: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (id(t), t.data_ptr(), t.shape, t.stride(), sorted(t.__dict__))
        for name, t in tensors_of(model)
    }


def record(
    engine: Engine, model: Any, published: list[Entry], taken: list[Taken] | None = None
) -> Mapping:
    """The mapping; the model has to be as it was. taken: gets what the rank tells of coverage."""
    poison(model)
    before, content = identities(model), snapshot(model)
    recording = reload.record_model(published, model, engine.config)
    assert identities(model) == before
    after = snapshot(model)
    assert all(torch.equal(after[name], content[name]) for name in content)
    if taken is not None:
        taken.append(taken_of(recording.taken()))
    return recording.mapping()


def held(mapping: Mapping, model: Any) -> list[Held]:
    """What a rank tells the check of what is served."""
    leaves = {(m.path, leaf.name): leaf for m, leaf, _ in mapping.sources()}
    told = held_of(
        (leaf, getattr(model.get_submodule(path), name)) for (path, name), leaf in leaves.items()
    )
    return [Held(name, tuple(o), tuple(e), digests) for name, o, e, digests in told]


def trained(weights: dict[str, torch.Tensor]) -> list[Tensor]:
    """What a trainer of one rank tells it."""
    types = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    return [
        Tensor(name, tuple(one.shape), {types[one.dtype]: box_digest(one)}, "")
        for name, one in weights.items()
    ]


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    def made(name: str, layout: Layout) -> Engine:
        return Engine(tmp_path, FAMILIES[name], layout)

    return made


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_boxes_put_what_the_loader_puts(name: str, layout: Layout, engine: Any) -> None:
    published = checkpoint(FAMILIES[name].configuration())
    weights = values(published)
    made = engine(name, layout)
    mappings: list[Mapping] = []
    told: list[Taken] = []
    digests: list[list[Held]] = []
    for rank in range(layout.size):
        with made.rank(rank) as model:
            mapping = record(made, model, published, told)
            expected = loaded(model, weights)
            poison(model)
            put(mapping, model, weights)
            found = snapshot(model)
            differ = [key for key in expected if not torch.equal(found[key], expected[key])]
            assert differ == []
            assert not [one for module in mapping.modules for one in module.unfilled()]
            assert mapping.about.ranks[layout.kind] == (rank, layout.size)
            assert mapping.about.ranks.get("ep", (rank, 2)) == (rank, 2)
            mappings.append(mapping)
            digests.append(held(mapping, model))
    assert maps.unwanted(mappings) == ()
    shapes = {entry.name: tuple(entry.shape) for entry in published}
    assert compare(trained(weights), digests) == ([], len(weights))
    assert missed(shapes, told) == []
    if layout.size > 1:
        assert missed(shapes, told[1:]), "one rank alone takes a part"
    taken = set().union(*(mapping.wanted() for mapping in mappings))
    assert taken == {entry.name for entry in published}
    if layout.stages:
        both = set(mappings[0].wanted()) & set(mappings[1].wanted())
        assert not [name for name in both if ".layers." in name]  # some embed on every stage
    elif layout.experts:
        assert all(".experts." in name for mapping in mappings for name in mapping.unwanted)
        assert all(mapping.unwanted for mapping in mappings)
    else:
        assert all(mapping.unwanted == () for mapping in mappings)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_nothing_is_missed_of_a_whole_model(
    name: str, layout: Layout, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding of vocabularies, scales and tables are no parts that are missing; a norm is."""
    published = checkpoint(FAMILIES[name].configuration())
    weights = values(published)
    made = engine(name, layout)
    norm = next(entry.name for entry in published if entry.name.endswith("input_layernorm.weight"))
    with made.rank(0) as model:
        recording = reload.record_model(published, model, made.config)
        assert reload.lacking(recording, model) == []
        fewer = [entry for entry in published if entry.name != norm]
        recording = reload.record_model(fewer, model, made.config)
        assert [f"{r.module}.{r.leaf}" for r in reload.lacking(recording, model)] == [norm]

        def put_back(module: Any, info: Any) -> None:  # a model that cannot run is not processed
            layerwise._place_kernel_tensors(module, info)
            info.reset()

        monkeypatch.setattr(layerwise, "_layerwise_process", put_back)
        try:
            reload.begin(model)
            model.load_weights(iter(weights.items()))
            reload.require_filled(model, "")
            reload.begin(model)
            model.load_weights((n, tensor) for n, tensor in weights.items() if n != norm)
            with pytest.raises(fanin.PeerError, match=norm.removesuffix(".weight")):
                reload.require_filled(model, "")
        finally:
            reload.abandon(model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "glm4"])
def test_tied_embeddings_are_published_once(name: str, tmp_path: Path) -> None:
    configuration = FAMILIES[name].configuration()
    configuration.tie_word_embeddings = True
    published = checkpoint(configuration)
    assert "lm_head.weight" not in {entry.name for entry in published}
    weights = values(published)
    made = Engine(tmp_path, FAMILIES[name], Layout(2), configuration)
    for rank in range(2):
        with made.rank(rank) as model:
            mapping = record(made, model, published)
            expected = loaded(model, weights)
            poison(model)
            put(mapping, model, weights)
            found = snapshot(model)
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            tied = [leaf.own for m in mapping.modules for leaf in m.leaves if m.path == "lm_head"]
            assert tied in ([], ["tied to model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "size", "tensors"), [("qwen3-8b", 2, 399), ("qwen3-30b-a3b", 1, 18867)]
)
def test_real_sizes_without_memory(name: str, size: int, tensors: int, tmp_path: Path) -> None:
    """What tests/gpu/record_mapping.py saves."""
    script = Path(__file__).resolve().parents[1] / "gpu/record_mapping.py"
    family = runpy.run_path(str(script))["MODELS"][name]
    published = checkpoint(family.configuration())
    assert len(published) == tensors
    made = Engine(tmp_path, family, Layout(size))
    with made.rank(size - 1, device="meta") as model:
        mapping = reload.record_model(published, model, made.config).mapping()
    assert mapping.unwanted == ()
    taken = sum(math.prod(piece.extent) for _, _, s in mapping.sources() for piece in s.pieces)
    whole = sum(math.prod(entry.shape) for entry in published)
    alone = sum(math.prod(e.shape) for e in published if "norm" in e.name)  # on every rank
    assert taken == (whole - alone) // size + alone
    mapping.save(tmp_path / "mapping.json")
    assert maps.load(tmp_path / "mapping.json") == mapping


def test_another_tp_size_than_recorded_is_refused(engine: Any) -> None:
    published = checkpoint(FAMILIES["qwen3"].configuration())
    made = engine("qwen3", Layout(2))
    with made.rank(1) as model:
        two = record(made, model, published)
    made.layout = Layout(1)
    with made.rank(0) as model:
        one = record(made, model, published)
        with pytest.raises(fanin.RequestError, match="embed_tokens.weight' is BF16 of shape"):
            two.pack(model)
        assert one.pack(model).tensors.shards


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "lm_head.weight': no published tensor fills it"),
        (lambda p: [e for e in p if "layers.1.mlp.up" not in e.name], r"filled by no published"),
        (lambda p: [*p, Entry("model.layers.7.x", "BF16", (2,))], "'model.layers.7.x': the loader"),
        (
            lambda p: [Entry(e.name, "F16", e.shape) if "o_proj" in e.name else e for e in p],
            r"o_proj.weight': it is published as F16 and wanted as BF16",
        ),
        (
            lambda p: [
                Entry(e.name, e.dtype, (1, *e.shape[1:])) if "q_proj.w" in e.name else e for e in p
            ],
            r"q_proj.weight': the loader failed with",
        ),
    ],
    ids=["missing", "missing-part", "extra", "dtype", "shape"],
)
def test_a_publication_of_another_model_is_refused(change: Any, said: str, engine: Any) -> None:
    published = change(checkpoint(FAMILIES["qwen3"].configuration()))
    made = engine("qwen3", Layout(1))
    with made.rank(0) as model:
        before = identities(model)
        with pytest.raises(MappingError, match=said):
            reload.record_model(published, model, made.config).mapping()
        assert identities(model) == before
        record(made, model, checkpoint(FAMILIES["qwen3"].configuration()))


@pytest.mark.parametrize(
    ("field", "missing"),
    [
        ("intermediate_size", "mlp.gate_proj.weight"),
        ("num_attention_heads", "self_attn.q_proj.weight"),
        ("num_key_value_heads", "self_attn.k_proj.weight"),
        ("vocab_size", "model.embed_tokens.weight"),
    ],
)
def test_larger_models_are_not_cut(field: str, missing: str, engine: Any) -> None:
    """vLLM's loaders take their part of what is larger; the recording says what is left."""
    larger = FAMILIES["qwen3"].configuration()
    setattr(larger, field, 2 * getattr(larger, field))
    published = checkpoint(larger)
    made = engine("qwen3", Layout(1))
    with made.rank(0) as model:
        recording = reload.record_model(published, model, made.config)
    shapes = {entry.name: tuple(entry.shape) for entry in published}
    if recording.whole:
        found = missed(shapes, [taken_of(recording.taken())])
        assert any(one.name.endswith(missing) and one.gap for one in found)
    else:  # the loader itself has refused
        assert any(missing in str(refusal) for refusal in recording.refusals)


def test_an_untied_model_does_not_go_into_one_memory(tmp_path: Path) -> None:
    """Of an engine that ties its embeddings: a head of its own is missed, or fills twice."""
    published = checkpoint(FAMILIES["qwen3"].configuration())
    assert any(entry.name == "lm_head.weight" for entry in published)
    tied = FAMILIES["qwen3"].configuration()
    tied.tie_word_embeddings = True
    made = Engine(tmp_path, FAMILIES["qwen3"], Layout(1), tied)
    with made.rank(0) as model:
        recording = reload.record_model(published, model, made.config)
        shapes = {entry.name: tuple(entry.shape) for entry in published}
        left = [one.name for one in missed(shapes, [taken_of(recording.taken())])]
        if left != ["lm_head.weight"]:
            with pytest.raises(MappingError, match="one memory for two published tensors"):
                recording.mapping()


def test_skeletons_are_taken_back_in_all_cases(engine: Any, monkeypatch: Any) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    made = engine("qwen3", Layout(1))
    with made.rank(0) as model:
        before = identities(model)
        with pytest.raises(ZeroDivisionError):
            with reload.skeletons(model, made.config):
                assert all(p.is_meta for p in model.parameters())
                raise ZeroDivisionError
        assert identities(model) == before
        breaks = iter([None] * 5)
        whole = layerwise.restore_layer_on_meta

        def half(layer: Any, info: Any) -> None:
            next(breaks)
            whole(layer, info)

        with monkeypatch.context() as patched:
            patched.setattr(layerwise, "restore_layer_on_meta", half)
            with pytest.raises((StopIteration, RuntimeError)):
                with reload.skeletons(model, made.config):
                    raise AssertionError("entered")
        assert identities(model) == before


def test_a_processed_model_has_the_same_mapping(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU vLLM packs linear weights away and leaves empty parameters; its own reload works
    on after a recording."""
    from vllm import _custom_ops
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    # Not every processor packs BF16; what is packed is not run here.
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", lambda *_: object())

    published = checkpoint(FAMILIES["qwen3"].configuration())
    weights = values(published)
    made = engine("qwen3", Layout(1))
    with made.rank(0) as model:
        fresh = record(made, model, published)
        loaded(model, weights)
        process_weights_after_loading(model, made.config.model_config, torch.device("cpu"))
        projection = model.model.layers[0].self_attn.qkv_proj
        assert not projection.weight.numel()
        assert record(made, model, published) == fresh
        with torch.no_grad():
            initialize_layerwise_reload(model)
            with pytest.raises(fanin.StateError, match="in the middle of a weight update"):
                with reload.skeletons(model, made.config):
                    raise AssertionError("entered")
            model.load_weights(iter(weights.items()))
            layerwise.finalize_layerwise_reload(model, made.config.model_config)
        assert not projection.weight.numel() and projection.cpu_linear is not None
        assert record(made, model, published) == fresh


def test_vllm_gets_what_is_wider_than_published(engine: Any) -> None:
    """As routers of mixtures of experts are, which this build of vLLM cannot process."""
    from fanin.engine.clients import Source
    from fanin.engine.landing import Progress
    from fanin.engine.trainers import Trainer
    from fanin.vllm.beside import Shadow
    from fanin.vllm.landings import MappedLanding
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    published = checkpoint(FAMILIES["qwen3"].configuration())
    weights = values(published)
    made = engine("qwen3", Layout(1))
    device = torch.device("cpu")
    with made.rank(0) as model, served(weights) as addresses:
        norm = torch.nn.Parameter(torch.ones(64, dtype=torch.float32), requires_grad=False)
        model.model.norm.weight = norm
        record_metadata_for_reloading(model)
        loaded(model, weights)
        process_weights_after_loading(model, made.config.model_config, device)
        mapping = reload.record_model(published, model, made.config).mapping()
        landing = MappedLanding(model, made.config.model_config, device, mapping)
        trainer = Trainer(Source.of(addresses), "full:0")
        expected = weights["model.norm.weight"].float()
        end = time.monotonic() + 60
        try:
            trainer.ready(end)
            bits(norm).fill_(POISON)
            landing.pull(trainer, 1, end, lambda: None)
            assert torch.equal(norm, expected)
            shadow = Shadow(landing)
            bits(norm).fill_(POISON)
            shadow.fill(trainer, 1, end, Progress(1, 0))
            shadow.install()
            assert torch.equal(norm, expected)
        finally:
            trainer.close()
            landing.close()


def test_a_model_with_adapters_is_filled_beneath_them(engine: Any) -> None:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.model_manager import create_lora_manager

    published = checkpoint(FAMILIES["qwen3"].configuration())
    made = engine("qwen3", Layout(1))
    lora = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.bfloat16)
    made.config.lora_config = lora
    with made.rank(0) as model:
        plain = record(made, model, published)
        wrapped = create_lora_manager(
            model=model,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            vocab_size=500,
            lora_config=lora,
            vllm_config=made.config,
            device=torch.device("cpu"),
        ).model
        mapping = record(made, wrapped, published)
        assert record(made, wrapped, published) == mapping
        assert mapping.wanted() == plain.wanted()
        paths = {module.path.replace(".base_layer", "") for module in mapping.modules}
        assert paths == {module.path for module in plain.modules}
        assert any(module.path.endswith("qkv_proj.base_layer") for module in mapping.modules)


def test_versions_that_are_not_known_are_refused(monkeypatch: Any) -> None:
    import vllm

    assert patches.require_version() == vllm.__version__
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(fanin.RequestError, match=r"vLLM 0\.33\.1 .* knows 0\.32"):
        patches.require_version()


def test_a_model_of_which_vllm_keeps_nothing_is_refused() -> None:
    with pytest.raises(fanin.RequestError, match="keeps no shapes"):
        with reload.skeletons(torch.nn.Linear(2, 2)):
            raise AssertionError("entered")
