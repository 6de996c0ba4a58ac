#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lora_slots.py FOLDER [--device cuda|cpu] [--ranks N] [--pulls N] [--layers N] [--json FILE]

A LoRA adapter from trainer ranks, whose BF16 shards are cut by rows as FSDP2 does, straight into
tensors laid out as vLLM's LoRA slots, where tests/gpu/record_slots.py has found vLLM's own classes
to put it (FOLDER is what that made: slots.json, slots-LAYOUT-RANK.json). Beside it, alternated, the
same bytes one behind the other in one allocation.

Each worker of each layout is timed alone, with a max_lora_rank of the adapter's r and of twice
that, in which the rows of each B lie apart; then all workers of a layout at once. Of two slots the
second is filled; every byte of both is compared: what was published, zeros beyond the rank, and
the first slot as it was. Ranks lie round robin on the GPUs, workers on the last ones. Needs
PyTorch, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without GPUs or
mappings. The last line is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
from worlds import Child, Control  # noqa: E402

SLOWEST = 150.0  # seconds that any wait may take
SLOTS, FILLED = 2, 1
RUN = "full:slots"
FINITE = 0xBFFF  # bits of a BF16 that is less than 2
OTHER = 7.0  # what the other slot holds
TIMES = (1, 2)  # max_lora_rank, in r


def layer(name: str) -> int:
    """Of a tensor or module."""
    return int(name.split(".layers.")[1].split(".")[0])


def pattern(number: int, shape: tuple[int, ...], first: int, device: Any) -> torch.Tensor:
    """Rows from ``first`` on of tensor ``number``: finite, and they differ by tensor and place."""
    count, start = torch.Size(shape).numel(), first * torch.Size(shape[1:]).numel()
    flat = torch.arange(start, start + count, device=device, dtype=torch.int32)
    flat.mul_(31).add_(number * 17).bitwise_and_(FINITE)
    return flat.short().reshape(shape).view(torch.bfloat16)


def on(options: dict[str, Any], index: int) -> torch.device:
    if options["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def published(options: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    entries = json.loads((pathlib.Path(options["folder"]) / "slots.json").read_text())
    limit = options["layers"]
    wanted = [e for e in entries if limit is None or layer(e["name"]) < limit]
    return {entry["name"]: tuple(entry["shape"]) for entry in wanted}


# --------------------------------------------------------------------------------- trainers


class Rank:
    """A trainer rank: rows of every tensor, one allocation each, as FSDP2 has them."""

    def __init__(self, control: Control, options: dict[str, Any]):
        import fanin

        self.control = control
        rank, ranks = options["rank"], options["ranks"]
        device = on(options, rank)
        self.server = fanin.Server(
            world_id=bytes.fromhex(options["world"]), rank=rank, world_size=ranks
        )
        self.kept, shards = [], []
        for number, (name, shape) in enumerate(published(options).items()):
            chunk = -(-shape[0] // ranks)
            first = min(rank * chunk, shape[0])
            rows = pattern(number, (min(chunk, shape[0] - first), *shape[1:]), first, device)
            self.kept.append(rows)
            offset = (first, *(0,) * (len(shape) - 1))
            shards.append(fanin.shard_of(name, rows, shape=shape, offset=offset))
        settle(device)
        self.server.put(RUN, shards)
        self.server.commit(RUN, 1)

    def run(self) -> None:
        self.control.say("here", address=f"127.0.0.1:{self.server.port}")
        self.control.hear(20 * SLOWEST)
        self.server.close()


# ---------------------------------------------------------------------------------- workers


class Filled(NamedTuple):
    """A box of a published tensor, and the part of a slot that it fills."""

    name: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    stack: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    at: int

    def of(self, slot: torch.Tensor) -> torch.Tensor:
        return slot.as_strided(self.extent, self.stride, slot.storage_offset() + self.at)


def in_slot(leaf: Any, piece: Any, strides: list[int]) -> tuple[tuple[int, ...], int]:
    """Where a piece of a leaf lies in a tensor of other strides: its own there, and its start."""
    size, place, at = 2, piece.at // 2, 0
    steps = [step // size for step in leaf.stride]
    for dim in sorted(range(len(steps)), key=lambda d: -steps[d]):
        at += place // steps[dim] * strides[dim]
        place %= steps[dim]
    found = []
    for extent, step in zip(piece.extent, piece.stride, strict=True):
        like = [d for d in range(len(steps)) if steps[d] == step // size and leaf.shape[d] > 1]
        if extent > 1 and len(like) != 1:
            raise AssertionError(f"{leaf.name}: no dimension has a step of {step} bytes")
        found.append(strides[like[0]] if extent > 1 else 1)
    return tuple(found), at


class Slots:
    """vLLM's stacks, as the mapping has them, with a larger rank than the adapter's."""

    def __init__(self, mapping: Any, times: int, device: torch.device, layers: int | None):
        self.stacks: list[torch.Tensor] = []
        self.filled: list[Filled] = []
        for module in mapping.modules:
            if layers is None or layer(module.path) < layers:
                for leaf in module.leaves:
                    self._add(leaf, times, device)

    def _add(self, leaf: Any, times: int, device: torch.device) -> None:
        shape = list(leaf.shape)
        shape[-2 if "lora_a" in leaf.name else -1] *= times
        stack = torch.empty((SLOTS, *shape), dtype=torch.bfloat16, device=device)
        strides = list(stack.stride()[1:])
        for source in leaf.sources:
            for piece in source.pieces:
                places = zip(piece.offset, piece.extent, strict=True)
                box = tuple(slice(o, o + n) for o, n in places)
                stride, at = in_slot(leaf, piece, strides)
                self.filled.append(
                    Filled(
                        source.name,
                        source.shape,
                        box,
                        len(self.stacks),
                        piece.extent,
                        stride,
                        at,
                    )
                )
        self.stacks.append(stack)

    def views(self) -> Iterator[tuple[Filled, torch.Tensor]]:
        for one in self.filled:
            yield one, one.of(self.stacks[one.stack][FILLED])

    def poison(self) -> None:
        for stack in self.stacks:
            stack.fill_(OTHER)
            stack[FILLED].zero_()
        for _, view in self.views():
            view.fill_(-1)

    def wrong(self, numbers: dict[str, int]) -> list[str]:
        """Stacks in which a byte is not what it must be, by the first tensor that fills them."""
        expected: dict[int, torch.Tensor] = {}
        first: dict[int, str] = {}
        for one in self.filled:
            stack = self.stacks[one.stack]
            if one.stack not in expected:
                expected[one.stack] = torch.full_like(stack, OTHER)
                expected[one.stack][FILLED].zero_()
                first[one.stack] = one.name
            whole = pattern(numbers[one.name], one.shape, 0, stack.device)
            one.of(expected[one.stack][FILLED]).copy_(whole[one.box])
        return [
            first[number]
            for number, tensor in expected.items()
            if not torch.equal(tensor.view(torch.int16), self.stacks[number].view(torch.int16))
        ]


class Behind:
    """The same boxes one behind the other."""

    def __init__(self, slots: Slots, device: torch.device):
        count = sum(torch.Size(one.extent).numel() for one in slots.filled)
        self.flat = torch.empty(count, dtype=torch.bfloat16, device=device)
        self.filled, at = slots.filled, 0
        self.views: list[torch.Tensor] = []
        for one in slots.filled:
            size = torch.Size(one.extent).numel()
            self.views.append(self.flat[at : at + size].view(one.extent))
            at += size

    def wrong(self, numbers: dict[str, int]) -> list[str]:
        for one, view in zip(self.filled, self.views, strict=True):
            whole = pattern(numbers[one.name], one.shape, 0, view.device)[one.box]
            if not torch.equal(whole.view(torch.int16), view.view(torch.int16)):
                return [one.name]
        return []


class Worker:
    """One worker of one layout. It is told what to pull, and tells how long that took."""

    def __init__(self, control: Control, options: dict[str, Any]):
        from fanin.mapping import load

        self.control, self.options = control, options
        self.device = on(options, -options["workers"] + options["worker"])
        folder = pathlib.Path(options["folder"])
        self.mapping = load(folder / f"slots-{options['layout']}-{options['worker']}.json")
        self.numbers = {name: number for number, name in enumerate(published(options))}

    def prepare(self, times: int, addresses: list[str]) -> dict[str, Any]:
        """Pulls once each way, and compares."""
        import fanin

        self.slots = Slots(self.mapping, times, self.device, self.options["layers"])
        self.behind = Behind(self.slots, self.device)
        views = {
            "slot": [view for _, view in self.slots.views()],
            "behind": self.behind.views,
        }
        self.packed = {
            way: fanin.pack(
                fanin.shard_of(
                    one.name,
                    view,
                    shape=one.shape,
                    offset=tuple(part.start for part in one.box),
                    writable=True,
                )
                for one, view in zip(self.slots.filled, views[way], strict=True)
            )
            for way in views
        }
        self.client = fanin.Client(addresses)
        return self.check()

    def check(self) -> dict[str, Any]:
        self.slots.poison()
        self.behind.flat.fill_(-1)
        first = {way: self.pull(way) for way in self.packed}
        wrong = self.slots.wrong(self.numbers) + self.behind.wrong(self.numbers)
        return {"wrong": wrong[:3], "first": first}

    def pull(self, way: str) -> dict[str, Any]:
        settle(self.device)
        start = time.perf_counter()
        result = self.client.pull_into(RUN, self.packed[way], timeout=SLOWEST)
        seconds = time.perf_counter() - start
        return {
            "ms": 1e3 * seconds,
            "read": 1e3 * result.read,
            "plan": 1e3 * (result.plan + result.table),
            "bytes": result.bytes,
            "path": result.path,
        }

    def measure(self, pulls: int) -> dict[str, Any]:
        """Medians of pulls each way in turns, after three of each."""
        found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for turn in range(3 + pulls):
            for way in self.packed:
                one = self.pull(way)
                if turn >= 3:
                    found[way].append(one)
        told: dict[str, Any] = {"bytes": one["bytes"], "path": one["path"]}
        for way, pulled in found.items():
            times = sorted(each["ms"] for each in pulled)
            told[way] = {
                "ms": statistics.median(times),
                "read": statistics.median(each["read"] for each in pulled),
                "extremes": [times[0], times[-1]],
            }
        told["ratio"] = told["slot"]["ms"] / told["behind"]["ms"]
        return told

    def forget(self) -> dict[str, Any]:
        self.client.close()
        del self.client, self.packed, self.slots, self.behind
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def run(self) -> None:
        self.control.say("here")
        while (told := self.control.hear(20 * SLOWEST))["event"] != "end":
            self.control.say("done", **getattr(self, told.pop("event"))(**told))


# ------------------------------------------------------------------------------------- test


class Test:
    def __init__(self, options: argparse.Namespace, folder: pathlib.Path):
        self.options = options
        common = {key: getattr(options, key) for key in ("device", "layers", "ranks")}
        common |= {"folder": str(options.folder), "world": os.urandom(16).hex()}
        self.ranks = [
            Child(f"rank{rank}", str(HERE), {**common, "rank": rank}, folder)
            for rank in range(options.ranks)
        ]
        self.workers: dict[str, list[Child]] = {}
        for layout, size in layouts(options.folder).items():
            self.workers[layout] = [
                Child(
                    f"{layout}-{worker}",
                    str(HERE),
                    {**common, "layout": layout, "worker": worker, "workers": size},
                    folder,
                )
                for worker in range(size)
            ]

    def everyone(self) -> list[Child]:
        return [*self.ranks, *(one for some in self.workers.values() for one in some)]

    @staticmethod
    def ask(children: list[Child], what: str, **fields: Any) -> list[dict[str, Any]]:
        """All at once; their answers."""
        for one in children:
            one.tell(what, **fields)
        return [one.expect("done", SLOWEST) for one in children]

    def case(self, layout: str, times: int, addresses: list[str]) -> Iterator[dict[str, Any]]:
        """Raises AssertionError: a byte was wrong."""
        workers, pulls = self.workers[layout], self.options.pulls
        firsts = [
            self.ask([one], "prepare", times=times, addresses=addresses)[0] for one in workers
        ]
        for who, one in enumerate(workers):
            told = self.ask([one], "measure", pulls=pulls)[0]
            yield {"who": str(who), "first": firsts[who]["first"], **told}
        if len(workers) > 1:
            for who, told in enumerate(self.ask(workers, "measure", pulls=pulls)):
                yield {"who": f"{who}, all at once", **told}
        for one, first in zip(workers, firsts, strict=True):
            last = self.ask([one], "check")[0]
            assert not first["wrong"] + last["wrong"], f"{first['wrong']}, {last['wrong']} differ"
        self.ask(workers, "forget")

    def run(self) -> Iterator[dict[str, Any]]:
        addresses = [one.expect("here", SLOWEST)["address"] for one in self.ranks]
        for one in self.everyone()[len(self.ranks) :]:
            one.expect("here", SLOWEST)
        for layout in self.workers:
            for times in TIMES:
                for told in self.case(layout, times, addresses):
                    if self.options.device == "cuda":
                        assert told["path"] == "cuda_ipc", f"by {told['path']}"
                    yield {"layout": layout, "max_rank": times, **told}


def layouts(folder: pathlib.Path) -> dict[str, int]:
    """Those that are there, with how many workers they have."""
    found = collections.Counter(path.stem.split("-")[1] for path in folder.glob("slots-*-*.json"))
    return dict(sorted(found.items(), key=lambda one: (one[1], one[0])))


def line(told: dict[str, Any]) -> str:
    slot, behind = told["slot"], told["behind"]
    return (
        f"{told['layout']} worker {told['who']}, max_lora_rank {told['max_rank']} r: "
        f"{told['bytes'] / 1e6:.0f} MB, slot {slot['ms']:.2f} ms (read {slot['read']:.2f}), one "
        f"behind the other {behind['ms']:.2f} ms (read {behind['read']:.2f}): {told['ratio']:.2f}"
    )


def check(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    test, found = Test(options, folder), []
    try:
        for told in test.run():
            print(line(told), flush=True)
            found.append(told)
    except AssertionError:
        for one in test.everyone():
            print(one.tail(5), file=sys.stderr)
        raise
    finally:
        for one in test.everyone():
            one.close()
        if options.json:
            with contextlib.suppress(OSError):
                pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    return found


def main_of(
    about: str, role: Callable[[dict[str, Any]], Any], count: str, check: Callable[..., list[Any]]
) -> int:
    """The main program, and that of its children; the exit status.

    about: its text. role: makes what a child is. count: an option, of how often something is done,
    with its default. check: of the options and a folder; what it has found, one for each test.
    """
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        role(json.loads(sys.argv[1])).run()
        return 0
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=8)
    name, default = count.split("=")
    parser.add_argument(name, type=int, default=int(default))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    if not layouts(options.folder):
        print(f"skipped: {options.folder} has nothing that tests/gpu/record_slots.py made")
        return 77
    with tempfile.TemporaryDirectory(prefix="slots-") as folder:
        try:
            found = check(options, pathlib.Path(folder))
        except AssertionError:
            traceback.print_exc()
            print("0 passed, 1 failed")
            return 1
    print(f"{len(found)} passed, 0 failed")
    return 0


def role_of(options: dict[str, Any]) -> Any:
    return (Worker if "worker" in options else Rank)(Control(), options)


if __name__ == "__main__":
    sys.exit(main_of(__doc__, role_of, "--pulls=25", check))
