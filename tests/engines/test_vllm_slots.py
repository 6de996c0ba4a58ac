# SPDX-License-Identifier: Apache-2.0
"""Adapters in the layout of vLLM's slots, held against what vLLM's own classes load."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import fanin.mapping
import moe_engine
import pytest
import slots_engine
import torch
from fanin.engine import jobs
from fanin.engine.pulls import catalog_digest, version_of
from fanin.engine.slot_images import Image, Layout
from fanin.errors import RequestError
from fanin.mapping import Trace
from fanin.vllm.slots import SlotMemory, prove, record_layout
from fanin.vllm.slots_worker import Slots
from slots_engine import Engine

ENGINES = {
    "dense": Engine(),
    "dense bf16": Engine(dtype=torch.bfloat16),
    "dense TP2, rank 0": Engine(tp=(0, 2)),
    "dense TP2, rank 1": Engine(tp=(1, 2)),
    "experts": Engine("experts"),
    "experts TP2, rank 0": Engine("experts", tp=(0, 2)),
    "experts TP2, rank 1": Engine("experts", tp=(1, 2)),
    "experts EP2, rank 0": Engine("experts", ep=(0, 2)),
    "experts EP2, rank 1": Engine("experts", ep=(1, 2)),
    "fused": Engine("fused"),
    "fused TP2, rank 0": Engine("fused", tp=(0, 2)),
    "fused TP2, rank 1": Engine("fused", tp=(1, 2)),
    "fused EP2, rank 0": Engine("fused", ep=(0, 2)),
    "fused EP2, rank 1": Engine("fused", ep=(1, 2)),
    "mixed": Engine("mixed"),
    "mixed TP2, rank 0": Engine("mixed", tp=(0, 2)),
    "mixed TP2, rank 1": Engine("mixed", tp=(1, 2)),
    "mixed EP2, rank 1": Engine("mixed", ep=(1, 2)),
    "model": Engine("model"),
    "model TP2, rank 1": Engine("model", tp=(1, 2)),
    "model TP2 EP2, rank 0": Engine("model", tp=(0, 2), ep=(0, 2)),
    "model TP2 EP2, rank 1": Engine("model", tp=(1, 2), ep=(1, 2)),
}


class Published:
    """An adapter in two ranks, and a client of them."""

    def __init__(self, client: fanin.Client, config: dict[str, Any], addresses: list[str]) -> None:
        self.client, self.config, self.addresses = client, config, addresses

    def layout(self, loader: Any, **options: Any) -> Layout:
        return record_layout(loader, self.client.catalog("0"), self.config, **options)

    def pull(self, image: Image) -> None:
        packed = image.packed
        self.client.pull_into("0", packed.tensors, dtype=packed.dtype, step=1)
        image.finish()

    def directory(self, path: Path, **options: Any) -> Path:
        self.client.pull_adapter("0", path, step=1, **options)
        return path


@contextlib.contextmanager
def published(
    e: Engine, rank: int = 4, seed: int = 1, fields: dict[str, Any] | None = None
) -> Iterator[Published]:
    """fields: of PEFT's configuration; more: a module that is adapted as well."""
    tensors, config = slots_engine.adapter(e, rank, seed)
    config |= fields or {}
    if more := config.pop("more", None):
        tensors[f"base_model.model.{more}.lora_A.weight"] = torch.ones(rank, e.hidden)
        tensors[f"base_model.model.{more}.lora_B.weight"] = torch.ones(e.heads * e.head, rank)
    with moe_engine.ranks_of(tensors, config) as addresses:
        with fanin.Client(addresses) as client:
            yield Published(client, config, addresses)


def request(number: int, path: Any, e: Engine) -> Any:
    from vllm.lora.request import LoRARequest

    fused = e.kind in ("fused", "mixed")
    return LoRARequest(f"adapter-{number}", number, str(path), is_3d_lora_weight=fused)


def same_slots(mine: Any, theirs: Any, slot: int = 0) -> None:
    found, expected = slots_engine.slot_bytes(mine, slot), slots_engine.slot_bytes(theirs, slot)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8),
            value.contiguous().view(-1).view(torch.uint8),
        ), name


def pulled(
    e: Engine, tmp_path: Path, rank: int = 4, fields: Any = None, dtype: str | None = None
) -> tuple[Slots, Any]:
    """What a worker has pulled as "/nowhere/a" for its slots, and vLLM that has loaded the same
    adapter from a directory."""
    theirs, slots = slots_engine.loader(e), Slots(slots_engine.worker(e))
    with published(e, rank, fields=fields) as trainer:
        directory = trainer.directory(tmp_path / "a", dtype=dtype)
        theirs.add_adapter(request(1, directory, e))
        is_3d = e.kind in ("fused", "mixed")
        layout = trainer.layout(slots.loader, is_3d=is_3d, **({"dtype": dtype} if dtype else {}))
        trainer.pull(image := slots.take(layout))
        if dtype is None:
            prove(slots.loader, slots.take(layout), request(1, directory, e))
    slots.hold("/nowhere/a", image)
    return slots, theirs


HALF = torch.bfloat16
LOADED = [
    # Rank 4 of at most 8, and 8; in slots that another adapter has been in.
    *((e, rank, {}, None) for e in ENGINES.values() for rank in (4, 8)),
    *((Engine(dtype=dtype), 4, {}, "BF16") for dtype in (torch.float32, HALF)),
    *(
        (Engine(dtype=dtype), rank, fields, None)
        for dtype in (HALF, torch.float16, torch.float32)
        for rank, fields in (
            (4, {"use_rslora": True}),
            (4, {"alpha_pattern": {"k_proj": 3}}),
            (4, {"lora_alpha": 4}),
            (4, {"alpha_pattern": {"layers.1.mlp.down_proj": 9}, "use_rslora": True}),
            (3, {"lora_alpha": 10}),  # of more bits than BF16 has
            (8, {"lora_alpha": 16, "use_rslora": True}),
        )
    ),
]


@pytest.mark.parametrize(("e", "rank", "fields", "dtype"), LOADED)
def test_a_slot_is_what_vllm_loads(
    tmp_path: Path, e: Engine, rank: int, fields: dict[str, Any], dtype: str | None
) -> None:
    slots, theirs = pulled(e, tmp_path, rank, fields, dtype)
    assert slots.loader.add_adapter(request(1, "/nowhere/a", e))
    same_slots(slots.loader, theirs)
    some = next(iter(slots_engine.slot_bytes(theirs, 0).values()))
    assert some.any() and not (some == 7).all()


# ------------------------------------------------------------------- what comes and what goes


def bring(slots: Slots, e: Engine, number: int, layouts: list[Layout]) -> None:
    """Pulls an adapter of its own values, without giving it to vLLM."""
    with published(e, seed=number) as trainer:
        if not layouts:
            layouts.append(trainer.layout(slots.loader))
        trainer.pull(image := slots.take(layouts[0]))
        slots.hold(f"/nowhere/{number}", image)


def test_an_adapter_that_left_its_slot_and_vllms_cache_comes_back() -> None:
    e, layouts = Engine(slots=1, cached=1), list[Layout]()
    slots = Slots(slots_engine.worker(e))
    told = {}
    for number in (1, 2, 3):
        bring(slots, e, number, layouts)
        slots.loader.add_adapter(request(number, f"/nowhere/{number}", e))
        told[number] = slots_engine.slot_bytes(slots.loader, 0)
    for number in (1, 2, 3, 2, 1):
        slots.loader.add_adapter(request(number, f"/nowhere/{number}", e))
        found = slots_engine.slot_bytes(slots.loader, 0)
        assert all(torch.equal(found[name], told[number][name]) for name in found)
        assert set(slots.manager.list_adapters()) == {number}


def test_a_slot_in_use_is_not_touched_by_what_comes() -> None:
    e, layouts = Engine(), list[Layout]()
    slots = Slots(slots_engine.worker(e))
    bring(slots, e, 1, layouts)
    slots.loader.add_adapter(request(1, "/nowhere/1", e))
    before = [slots_engine.slot_bytes(slots.loader, slot) for slot in (0, 1)]
    bring(slots, e, 2, layouts)
    for slot in (0, 1):
        now = slots_engine.slot_bytes(slots.loader, slot)
        assert all(torch.equal(now[name], before[slot][name]) for name in now)
    slots.loader.add_adapter(request(2, "/nowhere/2", e))
    now, other = (slots_engine.slot_bytes(slots.loader, slot) for slot in (0, 1))
    assert all(torch.equal(now[name], before[0][name]) for name in now)
    assert not all(torch.equal(now[name], other[name]) for name in now)


def test_memory_is_used_again_only_when_vllm_has_let_go_of_it() -> None:
    e, layouts = Engine(), list[Layout]()
    slots = Slots(slots_engine.worker(e))
    bring(slots, e, 1, layouts)
    first = slots.image("/nowhere/1")
    slots.loader.add_adapter(request(1, "/nowhere/1", e))
    slots.release("/nowhere/1")
    assert slots.image("/nowhere/1") is None
    assert slots.take(layouts[0]) is not first, "vLLM may copy it into a slot again"

    bring(slots, e, 2, layouts)
    second = slots.image("/nowhere/2")
    slots.hold("/nowhere/2")
    slots.loader.add_adapter(request(2, "/nowhere/2", e))
    slots.loader.remove_adapter(2)
    slots.release("/nowhere/2")
    assert slots.image("/nowhere/2") is second, "it was held twice"
    slots.release("/nowhere/2")
    assert slots.take(layouts[0]) is second


@pytest.mark.parametrize("how", ["as it was", "another tensor", "other memory"])
def test_a_copy_goes_where_the_slots_are_now(how: str) -> None:
    """Where it went before is remembered as long as vLLM's memory is what it was."""
    e, layouts = Engine(), list[Layout]()
    slots = Slots(slots_engine.worker(e))
    bring(slots, e, 1, layouts)
    image = slots.image("/nowhere/1")
    assert image is not None
    for module in slots.manager.modules.values():
        module.reset_lora(1)
    image.put(slots.manager, 1)
    expected = slots_engine.slot_bytes(slots.loader, 1)
    head = slots.manager.modules["lm_head"]
    if how == "another tensor":
        head.lora_b_stacked = head.lora_b_stacked.clone()
    elif how == "other memory":
        head.lora_b_stacked.data = head.lora_b_stacked.clone()
    for module in slots.manager.modules.values():
        module.reset_lora(1)
    assert not head.lora_b_stacked[1].any()
    image.put(slots.manager, 1)
    found = slots_engine.slot_bytes(slots.loader, 1)
    assert expected["lm_head.lora_b_stacked.0"].any()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("how", ["as it was", "other tensors", "other memory", "another shape"])
def test_memory_that_is_another_is_noticed(how: str) -> None:
    manager = slots_engine.loader(Engine("experts"))._adapter_manager
    memory = SlotMemory(manager)
    module = next(iter(manager.modules.values()))
    if how == "other tensors":
        module.w2_lora_a_stacked = (module.w2_lora_a_stacked[0].clone(),)
    elif how == "other memory":
        module.w2_lora_a_stacked[0].data = module.w2_lora_a_stacked[0].clone()
    elif how == "another shape":
        module.w2_lora_a_stacked[0].data = module.w2_lora_a_stacked[0][:, :, :4]
    assert memory.stands(manager) is (how == "as it was")
    same = SlotMemory(manager).signature == memory.signature
    assert same is (how != "another shape")
    manager.modules["another"] = copy.copy(module)
    assert not memory.stands(manager)


def test_a_copy_that_fails_leaves_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    e, layouts = Engine(), list[Layout]()
    slots = Slots(slots_engine.worker(e))
    bring(slots, e, 1, layouts)

    def fail(image: Image, manager: Any, slot: int) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Image, "put", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        slots.loader.add_adapter(request(1, "/nowhere/1", e))
    assert not slots.manager.list_adapters() and set(slots.manager.lora_index_to_id) == {None}
    monkeypatch.undo()
    assert slots.loader.add_adapter(request(1, "/nowhere/1", e))


def test_a_layout_is_forgotten_when_vllms_memory_is_another() -> None:
    e = Engine()
    slots = Slots(slots_engine.worker(e))
    with published(e) as trainer:
        slots.keep("key", trainer.layout(slots.loader))
    assert slots.layout("key") is not None
    module = slots.manager.modules["lm_head"]
    module.lora_b_stacked = torch.zeros(e.slots, 1, 2 * e.vocabulary, e.max_rank)
    assert slots.layout("key") is None


class Stand:
    """In the place of an image on a GPU, which is not here."""

    def __init__(self, layout: Any, *, device: Any) -> None:
        self.layout, self.on_gpu, self.waited = layout, True, 0
        self.whole, self.leaving = False, False

    def wait(self) -> None:
        self.waited += 1

    def to_host(self) -> None:
        assert self.on_gpu
        self.on_gpu = False


def moved(slots: Slots) -> None:
    """What :meth:`Slots.settle` has begun is done."""
    slots.settle()
    for thread in threading.enumerate():
        if thread.name == "fanin-move":
            thread.join(60)
            assert not thread.is_alive()


def test_of_images_on_a_gpu_the_three_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(slots_engine.worker(Engine()))
    monkeypatch.setattr(slots, "_gpu", torch.device("cuda", 0))
    monkeypatch.setattr("fanin.vllm.slots_worker.Image", Stand)
    layout: Any = object()
    images: list[Any] = []
    for number in range(5):
        images.append(slots.take(layout))
        images[-1].whole = True
        slots.hold(f"/nowhere/{number}", images[-1])
        moved(slots)
    assert [image.on_gpu for image in images] == [False, False, True, True, True]

    slots.release("/nowhere/0")  # its memory is the host's
    slots.release("/nowhere/2")
    images[2].waited = 0
    assert slots.take(layout) is images[2] and images[2].waited, "the engine may still copy it"
    slots.hold("/nowhere/5", slots.take(layout))
    moved(slots)
    assert [image.on_gpu for image in images[2:]] == [True, False, True], "one is being filled"
    slots.give_back(images[3])
    assert slots.take(layout) is not images[3]


def test_a_gpu_without_room_gives_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slots = Slots(slots_engine.worker(Engine()))
    monkeypatch.setattr(slots, "_gpu", torch.device("cuda", 0))

    def made(layout: Any, *, device: Any = None, pinned: bool = False) -> Any:
        if device is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert pinned
        return Stand(layout, device=None)

    monkeypatch.setattr("fanin.vllm.slots_worker.Image", made)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert isinstance(slots.take(Any), Stand)
    assert "CUDA out of memory" in caplog.text


# ------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("experts", {"alpha_pattern": {"experts.1.up_proj": 3}}, "scaled differently"),
        ("dense", {"more": "model.layers.7.self_attn.q_proj"}, "no place"),
        ("dense", {"more": "model.layers.0.self_attn.strange_proj"}, "no place"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, fields: dict[str, Any], said: str) -> None:
    e = Engine(kind)
    loader = slots_engine.loader(e)
    with published(e, fields=fields) as trainer:
        with pytest.raises(RequestError, match=said) as caught:
            trainer.layout(loader)
    assert caught.value.phase == "slots"


def test_a_layout_that_is_not_what_vllm_loads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were one of vLLM's classes to do something else with weights than with numbers."""
    e = Engine()
    slots = Slots(slots_engine.worker(e))
    with published(e) as trainer:
        directory = trainer.directory(tmp_path / "a")
        layout = trainer.layout(slots.loader)
    first = layout.parts[1]
    wrong = dataclasses.replace(
        layout, parts=(layout.parts[0], first._replace(scale=2.0), *layout.parts[2:])
    )
    prove(slots.loader, Image(layout), request(1, directory, e))
    with pytest.raises(RequestError, match=f"{first.path}.{first.leaf}"):
        prove(slots.loader, Image(wrong), request(1, directory, e))


# ----------------------------------------------------------------------------- a worker's jobs


def job(trainer: Published, path: Path, **fields: Any) -> dict[str, Any]:
    found = trainer.client.publications()
    entries, metadata = trainer.client.catalog("0"), trainer.client.metadata("0")
    return {
        "id": fields.get("id", "one"),
        "root": str(path.parent / "root"),
        "path": str(path),
        "addresses": trainer.addresses,
        "server_name": None,
        "world": trainer.client.ranks()[0].world_id,
        "run": "0",
        "step": "1",
        "how": {"dtype": None, "trust_config": False, "max_bytes": None},
        "timeout": 60.0,
        "layout": "key",
        "digest": catalog_digest(entries, metadata),
        "version": version_of(found, "0"),
        "is_3d": False,
        "learn": False,
        **fields,
    }


def finished(mine: Any, number: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (report := mine.fanin_poll_pull(number))["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return dict(report)


def test_a_worker_learns_and_pulls(tmp_path: Path) -> None:
    e = Engine("experts", ep=(1, 2))
    theirs, mine = slots_engine.loader(e), slots_engine.worker(e)
    loader = mine.model_runner.lora_manager
    with published(e) as trainer:
        directory = trainer.directory(tmp_path / "a")
        theirs.add_adapter(request(1, directory, e))
        mine.fanin_start_pull(job(trainer, tmp_path / "b", id="early"))
        report = finished(mine, "early")
        assert report["state"] == "failed" and "know" in report["error"]["message"]
        mine.fanin_start_pull(job(trainer, directory, id="learn", learn=True))
        assert finished(mine, "learn")["state"] == "done"
        for number in ("one", "two"):
            mine.fanin_start_pull(job(trainer, tmp_path / "b", id=number))
            assert finished(mine, number)["state"] == "done"
    assert not (tmp_path / "b").exists()
    whole = sum(t.nbytes for t in slots_engine.adapter(e, 4, 1)[0].values())
    assert mine.fanin_poll_pull("one")["bytes"] == whole / 2, "its experts only"
    assert mine.fanin_poll_pull("two")["reused"]
    assert loader.add_adapter(request(1, tmp_path / "b", e))
    same_slots(loader, theirs)

    mine.fanin_drop_adapter("", "two")  # as one who gave up: the first one's stays
    loader.remove_adapter(1)
    assert loader.add_adapter(request(1, tmp_path / "b", e))
    loader.remove_adapter(1)
    mine.fanin_drop_adapter(str(tmp_path / "b"))
    deadline = time.monotonic() + 60
    while mine.fanin_worker_slots._slots.image(str(tmp_path / "b")) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def learnt(trainer: Published, tmp_path: Path, mine: Any) -> None:
    directory = trainer.directory(tmp_path / "a")
    mine.fanin_start_pull(job(trainer, directory, id="learn", learn=True))
    assert finished(mine, "learn")["state"] == "done"


def test_an_adapter_is_added_under_numbers_and_forgotten(tmp_path: Path) -> None:
    e = Engine()
    mine = slots_engine.worker(e)
    loader = mine.model_runner.lora_manager
    with published(e) as trainer:
        learnt(trainer, tmp_path, mine)
        mine.fanin_start_pull(job(trainer, tmp_path / "b"))
        assert finished(mine, "one")["state"] == "done"
    told = {"adapter": "b", "path": str(tmp_path / "b"), "is_3d": False}
    for number in (4, 6):
        assert mine.fanin_add_lora({**told, "number": number}) == {"error": None}
    assert loader.list_adapters() == {4, 6}
    mine.fanin_drop_adapter(str(tmp_path / "b"), "", [4, 6])
    assert loader.list_adapters() == set()
    deadline = time.monotonic() + 60
    while jobs._deletions.busy:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    error = mine.fanin_add_lora({**told, "number": 7})["error"]
    assert error is not None and 7 not in loader.list_adapters()


def test_a_worker_that_cannot_add_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = Engine()
    mine = slots_engine.worker(e)

    def short(image: Image, manager: Any, slot: int) -> None:
        raise MemoryError

    with published(e) as trainer:
        learnt(trainer, tmp_path, mine)
        mine.fanin_start_pull(job(trainer, tmp_path / "b"))
        assert finished(mine, "one")["state"] == "done"
    monkeypatch.setattr(Image, "put", short)
    told = {"adapter": "b", "number": 4, "path": str(tmp_path / "b"), "is_3d": False}
    error = mine.fanin_add_lora(told)["error"]
    assert error["class"] == "HostError" and "no memory" in error["message"]
    assert not mine.model_runner.lora_manager.list_adapters()


def test_a_configuration_that_changed_on_the_way_is_not_served(tmp_path: Path) -> None:
    """Another alpha is another scaling: what was pulled by the old layout is given up."""
    e = Engine()
    mine = slots_engine.worker(e)
    with published(e) as trainer:
        learnt(trainer, tmp_path, mine)
        stale = job(trainer, tmp_path / "b", digest="another", version="before")
        mine.fanin_start_pull(stale)
        report = finished(mine, "one")
    assert report["state"] == "failed" and report["error"]["class"] == "StaleError"
    assert mine.fanin_worker_slots._slots.image(str(tmp_path / "b")) is None


# --------------------------------------------------------------------------------- the trace


def trace_of(*shapes: tuple[int, ...]) -> tuple[Trace, list[Any]]:
    entries = [
        fanin.shard_of(f"t{i}", torch.zeros(shape, dtype=torch.float16))
        for i, shape in enumerate(shapes)
    ]
    trace = Trace(entries)
    return trace, [trace.lend(entry.name) for entry in entries]


def landed(leaf: Any, tensors: list[Any]) -> Any:
    """What the leaf's boxes make of tensors, in the leaf's shape."""
    flat = torch.zeros(leaf.shape).flatten()
    made = flat.as_strided(leaf.shape, [step // 2 for step in leaf.stride])
    for source in leaf.sources:
        whole = tensors[int(source.name[1:])]
        for piece in source.pieces:
            box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.extent, strict=True))
            steps = [step // 2 for step in piece.stride]
            flat.as_strided(piece.extent, steps, piece.at // 2).copy_(whole[box])
    return made


MOVES = {
    "whole": lambda a, b: a,
    "transposed": lambda a, b: a.T,
    "a part of the columns": lambda a, b: a[:, 2:5],
    "every other row": lambda a, b: a[::2],
    "stacked": lambda a, b: torch.stack([a, b]),
    "joined": lambda a, b: torch.cat([a[1:3], b, a[4:]]),
    "interleaved": lambda a, b: torch.stack([a[:, ::2], a[:, 1::2]], dim=2).flatten(1, 2),
    "split and permuted": lambda a, b: a.reshape(6, 2, 4).permute(2, 0, 1),
    "in reverse": lambda a, b: a.flip(0),
    "one for several": lambda a, b: a[:1].expand(3, 8),
    "a vector": lambda a, b: a[0],
}


@pytest.mark.parametrize("how", MOVES)
def test_any_movement_is_followed(how: str) -> None:
    trace, lent = trace_of((6, 8), (6, 8))
    leaf = trace.found("m", "Kind", "leaf", MOVES[how](*lent).contiguous())
    assert leaf is not None
    real = [torch.rand(6, 8), torch.rand(6, 8)]
    assert torch.equal(landed(leaf, real), MOVES[how](*real))
    both = how in ("stacked", "joined")
    assert trace.mapping().unwanted == (() if both else ("t1",))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda a: a * 0.5, "no element"),
        (lambda a: a + 1000, "no element"),
        (lambda a: a + a.T, "uneven|several|no element"),
        (lambda a: torch.cat([a[:, :3], torch.zeros(6, 1), a[:, 3:5]], dim=1), "are not"),
    ],
)
def test_what_is_computed_is_refused(how: Any, said: str) -> None:
    trace, (lent,) = trace_of((6, 6))
    with pytest.raises(fanin.mapping.MappingError, match=said):
        trace.found("m", "Kind", "leaf", how(lent))
    assert trace.found("m", "Kind", "zero", torch.zeros(4, 4)) is None
    assert trace.mapping().unwanted == ("t0",)
