#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""full_weights.py [--model NAME] [--layers N] [--divide N] [--ranks N] [--tp N] [--compact]
                   [--served] [--nccl] [--nixl] [--device cuda|cpu] [--pulls N] [--json FILE]

A whole model from trainer ranks, whose BF16 shards are cut by rows as FSDP2 does, into an engine's
fused tensors (qkv_proj, gate_up_proj, w13, w2; --tp workers with their slices, all at once), by
fanin's Python package. Beside it in the same run, alternated:

  alone with --tp, the first worker's pull while the others rest
  copy  one peer copy of the bytes that cross between GPUs (with one GPU, or none: a copy of all)
  nccl  with --nccl, one rank a GPU: what a broadcasting engine does. full_tensor() on all ranks,
        packed into two buffers of 1 GiB and broadcast by rank 0, unpacked into the fused tensors
  nixl  with --nixl, TP1: what the most careful user of NIXL does. Every storage registered once,
        one READ a rank with all its descriptors, prepared once; timed are posting and waiting.
        Its agents' threads run beside the pulls, too

The first pull of a process and that of a new client are told apart from the warm ones (medians).
With --compact the ranks' shards lie in few large allocations, as fanin.torch.compact() lays them.
With --served the ranks have a model under FSDP2, which fanin.torch.WeightServer publishes, and with
--compact fanin.torch.compact() itself has moved; without, they lend tensors by fanin.Server.
Each element is compared with the pattern that the ranks wrote, after the first pull and after the
last. Ranks lie round robin on the GPUs, workers on the last ones. Needs PyTorch, the package
(PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77 without GPUs, unless --device cpu.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pathlib
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2] / "tests" / "engines"))

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
import layout  # noqa: E402
from worlds import Child, Control  # noqa: E402

SLOWEST = 300.0  # seconds that any wait may take
PACKED = 1 << 30
ARENA = 512 << 20
PHASES = ("connect", "map", "catalog", "plan", "table", "wait", "begin", "read", "end", "total")


class Model(NamedTuple):
    """Shapes of a public model, as its configuration tells them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Of the MLP, or of one expert."""
    experts: int = 0
    head: int = 128
    vocabulary: int = 151936


MODELS = {
    "Qwen3-8B": Model(36, 4096, 32, 8, 12288),
    "Qwen3-30B-A3B": Model(48, 2048, 32, 4, 768, experts=128),
}


def smaller(model: Model, layers: int | None, by: int) -> Model:
    """Fewer layers with their share of the vocabulary, every width and the vocabulary divided."""
    layers = layers or model.layers
    return model._replace(
        layers=layers,
        hidden=model.hidden // by,
        width=model.width // by,
        head=model.head // by,
        vocabulary=model.vocabulary * layers // model.layers // by,
    )


def published(m: Model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (m.vocabulary, m.hidden)}
    queries, keys = m.heads * m.head, m.kv_heads * m.head
    for index in range(m.layers):
        at = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (m.hidden,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{at}self_attn.{norm}.weight"] = (m.head,)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"{at}self_attn.{name}.weight"] = (rows, m.hidden)
        shapes[f"{at}self_attn.o_proj.weight"] = (m.hidden, queries)
        if m.experts:
            shapes[f"{at}mlp.gate.weight"] = (m.experts, m.hidden)
        for expert in [f"experts.{e}." for e in range(m.experts)] or [""]:
            for name in ("gate_proj", "up_proj"):
                shapes[f"{at}mlp.{expert}{name}.weight"] = (m.width, m.hidden)
            shapes[f"{at}mlp.{expert}down_proj.weight"] = (m.hidden, m.width)
    shapes["model.norm.weight"] = (m.hidden,)
    shapes["lm_head.weight"] = (m.vocabulary, m.hidden)
    return shapes


class Part(NamedTuple):
    """What a worker holds of a published tensor, a box, and where."""

    name: str
    shape: tuple[int, ...]
    of: tuple[slice, ...]
    view: torch.Tensor


def pattern(number: int, shape: tuple[int, ...], first: int, device: Any) -> torch.Tensor:
    """Rows from ``first`` on of tensor ``number``: bits that differ by tensor and place."""
    count, start = torch.Size(shape).numel(), first * torch.Size(shape[1:]).numel()
    flat = torch.arange(start, start + count, device=device, dtype=torch.int32)
    return flat.mul_(31).add_(number * 17).short().reshape(shape).view(torch.bfloat16)


class Arenas:
    """Few large allocations, and tensors that lie in them one after the other."""

    def __init__(self, device: torch.device):
        self.device, self.at, self.room = device, 0, torch.empty(0)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in an arena; what is larger than half of one stays."""
        size = tensor.numel() * tensor.element_size()
        if size > ARENA // 2:
            return tensor
        if self.at + size > self.room.numel():
            self.room = torch.empty(ARENA, dtype=torch.uint8, device=self.device)
            self.at = 0
        place = self.room[self.at : self.at + size].view(tensor.dtype).view(tensor.shape)
        self.at += -(-size // 512) * 512
        return place.copy_(tensor)


def on(options: dict[str, Any], index: int) -> torch.device:
    if options["device"] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def rendezvous() -> str:
    """Of a TCPStore, which torchrun has too: one of files answers every 10 ms."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def child(rank: Any, worker: Any) -> bool:
    """Whether this process is a child of a measurement. It then was one of both, to its end."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        return False
    control, options = Control(), json.loads(sys.argv[1])
    made = (worker if "worker" in options else rank)(options)
    control.say("here")
    control.obey(made)
    return True


def given(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with what all take who measure GPUs."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        sys.exit(77)
    return options


# ------------------------------------------------------------------------------ processes


class Member:
    """A rank or a worker: what both do in the broadcasting way."""

    def __init__(self, options: dict[str, Any], index: int):
        self.options = options
        self.agent: Any = None
        self.model = smaller(MODELS[options["model"]], options["layers"], options["divide"])
        self.shapes = published(self.model)
        self.device = on(options, index)
        self.trainers: Any = None

    def join(self) -> None:
        """One group for the trainers' gathering, one of rank 0 and the workers."""
        import torch.distributed as dist

        ranks, workers = self.options["ranks"], self.options["tp"]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            init_method=self.options["rendezvous"],
            rank=int(os.environ["RANK"]),
            world_size=ranks + workers,
            timeout=datetime.timedelta(seconds=SLOWEST),
        )
        self.trainers = dist.new_group(list(range(ranks)))
        self.readers = dist.new_group([0, *range(ranks, ranks + workers)])

    def buckets(self) -> Iterator[list[str]]:
        """Names whose tensors fill a packed buffer, in the order of publication."""
        bucket, size = [], 0
        for name, shape in self.shapes.items():
            bytes_ = 2 * torch.Size(shape).numel()
            if bucket and size + bytes_ > PACKED:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += bytes_
        yield bucket

    def side_streams(self) -> list[Any]:
        cuda = self.device.type == "cuda"
        return [torch.cuda.Stream(self.device) if cuda else None for _ in range(2)]

    def copy(self, crossing: int) -> dict[str, Any]:
        """What crosses, in pieces of 1 GiB at most, out of one buffer on another GPU."""
        if not hasattr(self, "far"):
            size, own = min(crossing, PACKED), self.device.index or 0
            self.far = torch.zeros(size, dtype=torch.uint8, device=on(self.options, own + 1))
            self.near = torch.zeros(size, dtype=torch.uint8, device=on(self.options, own))
        settle(self.device)
        start = time.perf_counter()
        left = crossing
        while left > 0:
            size = min(left, self.near.numel())
            self.near[:size].copy_(self.far[:size], non_blocking=True)
            left -= size
        settle(self.device)
        return {"seconds": time.perf_counter() - start}


class Agent:
    """NIXL's agent of one process, over UCX."""

    def __init__(self, name: str, device: torch.device):
        from nixl._api import nixl_agent, nixl_agent_config

        self._nixl = nixl_agent(name, nixl_agent_config(True, False, 0))
        self._kind = "VRAM" if device.type == "cuda" else "DRAM"
        self._reads: list[Any] = []
        self.index = device.index or 0

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Each storage once."""
        storages = {one.untyped_storage().data_ptr(): one for one in tensors if one.numel()}
        listed = [
            (at, one.untyped_storage().nbytes(), one.device.index or 0, "")
            for at, one in storages.items()
        ]
        self._nixl.register_memory(self._nixl.get_reg_descs(listed, self._kind))

    def told(self, table: list[Any]) -> dict[str, Any]:
        """What a reader has to know, and where it finds what."""
        metadata = self._nixl.get_agent_metadata().hex()
        return {"metadata": metadata, "index": self.index, "table": table}

    def prepare(self, rank: dict[str, Any], pairs: list[tuple[int, int, int]]) -> None:
        """One READ of a rank: addresses here and there, and sizes."""
        peer = self._nixl.add_remote_agent(bytes.fromhex(rank["metadata"]))
        ends = [
            self._nixl.get_xfer_descs([(pair[end], pair[2], index) for pair in pairs], self._kind)
            for end, index in enumerate((self.index, rank["index"]))
        ]
        self._reads.append(self._nixl.initialize_xfer("READ", *ends, peer))

    def read(self) -> dict[str, Any]:
        """Posts all READs, waits for all."""
        left = self._reads
        start = time.perf_counter()
        for read in left:
            self._nixl.transfer(read)
        while left:
            states = [self._nixl.check_xfer_state(read) for read in left]
            if "ERR" in states:
                raise RuntimeError("a READ failed")
            left = [read for read, state in zip(left, states, strict=True) if state == "PROC"]
        return {"seconds": time.perf_counter() - start}


class Rank(Member):
    """A trainer rank: rows of every tensor, one allocation each, as FSDP2 has them."""

    def __init__(self, options: dict[str, Any]):
        self.rank = int(os.environ["RANK"])
        super().__init__(options, self.rank)
        self.rows: dict[str, torch.Tensor] = {}
        self.first: dict[str, int] = {}
        self.tree: Any = None
        if options["served"]:
            self.tree = self._under_fsdp2()
            return
        arenas = Arenas(self.device)
        for number, (name, shape) in enumerate(self.shapes.items()):
            chunk = -(-shape[0] // options["ranks"])
            first = min(self.rank * chunk, shape[0])
            rows = min(chunk, shape[0] - first)
            self.first[name] = first
            shard = pattern(number, (rows, *shape[1:]), first, self.device)
            self.rows[name] = arenas.move(shard) if options["compact"] else shard
        settle(self.device)

    def _under_fsdp2(self) -> Any:
        """Modules with parameters of these names, sharded layer by layer as they are made."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        # Nothing is gathered here, and NCCL refuses two ranks on one GPU.
        dist.init_process_group(
            "gloo", init_method=self.options["rendezvous"], rank=self.rank,
            world_size=self.options["ranks"], timeout=datetime.timedelta(seconds=SLOWEST),
        )  # fmt: skip
        mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        root = torch.nn.Module()
        layers = ""
        for name, whole in self.wholes():
            *path, leaf = name.split(".")
            layer = ".".join(path[:3]) if path[:2] == ["model", "layers"] else ""
            if layers and layer != layers:
                fully_shard(root.get_submodule(layers), mesh=mesh)
            layers, module = layer, root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, torch.nn.Parameter(whole, requires_grad=False))
        fully_shard(root, mesh=mesh)
        if self.options["compact"]:
            from fanin.torch import compact

            compact(root)
        settle(self.device)
        return root

    def wholes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters before they are sharded, layer by layer."""
        for number, (name, shape) in enumerate(self.shapes.items()):
            yield name, pattern(number, shape, 0, self.device)

    def serve(self, world: str) -> dict[str, Any]:
        import fanin

        if self.tree is not None:
            from fanin.torch import WeightServer

            self.server = WeightServer(self.tree, run="bench", base_port=0)
            self.server.publish(1)
            return {"address": self.server.addresses[self.rank]}
        self.server = fanin.Server(
            world_id=bytes.fromhex(world), rank=self.rank, world_size=self.options["ranks"]
        )
        shards = []
        for name, rows in self.rows.items():
            shape = self.shapes[name]
            offset = (self.first[name], *(0,) * (len(shape) - 1))
            shards.append(fanin.shard_of(name, rows, shape=shape, offset=offset))
        self.server.put("full:bench", shards)
        self.server.commit("full:bench", 1)
        return {"address": f"127.0.0.1:{self.server.port}"}

    def nixl_serve(self) -> dict[str, Any]:
        self.agent = Agent(f"rank{self.rank}", self.device)
        self.agent.register(self.rows.values())
        return self.agent.told(
            [
                (self.first[name], rows.data_ptr(), 2 * rows.numel())
                for name, rows in self.rows.items()
            ]
        )

    def nccl(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self.trainers, self.device.type)
        self.sharded = {
            name: DTensor.from_local(
                rows, mesh, [Shard(0)], shape=torch.Size(self.shapes[name]), stride=rows.stride()
            )
            for name, rows in self.rows.items()
        }

    def broadcast(self) -> None:
        """Gather tensor by tensor; rank 0 packs a bucket while the one before is on its way."""
        import torch.distributed as dist

        streams = self.side_streams()
        for turn, bucket in enumerate(self.buckets()):
            with torch.cuda.stream(streams[turn % 2]):
                whole = [self.sharded[name].full_tensor().reshape(-1) for name in bucket]
                if self.rank == 0:
                    dist.broadcast(torch.cat(whole), 0, group=self.readers)
        settle(self.device)


class Worker(Member):
    """An engine's worker: fused parameters that pulls and broadcasts fill."""

    def __init__(self, options: dict[str, Any]):
        self.rank = options["worker"]
        super().__init__(options, -options["tp"] + self.rank)
        self.parameters: list[torch.Tensor] = []
        self.parts: list[Part] = []
        keys = [{"name": one, "dtype": "BF16", "shape": [*of]} for one, of in self.shapes.items()]
        wanted = layout.mapping(layout.tensors_of(keys), layout.Shape(options["tp"]), self.rank)
        for one in wanted["modules"][0]["tensors"]:
            flat = torch.zeros(one["shape"], dtype=torch.bfloat16, device=self.device)
            self.parameters.append(flat)
            for source in one["sources"]:
                self.parts += (self._part(source, box, flat) for box in source["boxes"])
        settle(self.device)

    @staticmethod
    def _part(source: dict[str, Any], box: dict[str, Any], flat: torch.Tensor) -> Part:
        ends = zip(box["offset"], box["extent"], strict=True)
        of = tuple(slice(first, first + size) for first, size in ends)
        stride = [bytes_ // 2 for bytes_ in box["stride"]]
        view = flat.as_strided(box["extent"], stride, box["at"] // 2)
        return Part(source["name"], tuple(source["shape"]), of, view)

    def connect(self, addresses: list[str]) -> None:
        import fanin

        self.fanin, self.addresses, self.client = fanin, addresses, None
        start = time.perf_counter()
        self.packed = fanin.pack(self._shards())
        self.packing = time.perf_counter() - start

    def _shards(self) -> Iterator[Any]:
        for part in self.parts:
            offset = tuple(index.start for index in part.of)
            yield self.fanin.shard_of(
                part.name, part.view, shape=part.shape, offset=offset, writable=True
            )

    def pull(self, fresh: bool = False) -> dict[str, Any]:
        if fresh and self.client is not None:
            self.client.close()
            self.client = None
        start = time.perf_counter()
        if self.client is None:
            self.client = self.fanin.Client(self.addresses)
        result = self.client.pull_into("full:bench", self.packed, timeout=SLOWEST)
        seconds = time.perf_counter() - start
        phases = {key: 1e3 * getattr(result, key) for key in PHASES}
        return {"seconds": seconds, "bytes": result.bytes, "path": result.path, "phases": phases}

    def nccl(self) -> None:
        self.places: dict[str, list[Part]] = {}
        for part in self.parts:
            self.places.setdefault(part.name, []).append(part)

    def broadcast(self) -> dict[str, Any]:
        import torch.distributed as dist

        streams = self.side_streams()
        start = time.perf_counter()
        for turn, bucket in enumerate(self.buckets()):
            with torch.cuda.stream(streams[turn % 2]):
                sizes = [torch.Size(self.shapes[name]).numel() for name in bucket]
                packed = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.device)
                dist.broadcast(packed, 0, group=self.readers)
                for name, flat in zip(bucket, packed.split(sizes), strict=True):
                    for part in self.places[name]:
                        part.view.copy_(flat.view(part.shape)[part.of])
        settle(self.device)
        return {"seconds": time.perf_counter() - start}

    def nixl_prepare(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """One READ a rank; each shard of rows is one stretch of a fused parameter."""
        start = time.perf_counter()
        self.agent = Agent("worker", self.device)
        self.agent.register(self.parameters)
        for rank in ranks:
            pairs = []
            shards = dict(zip(self.shapes, rank["table"], strict=True))
            for part in self.parts:
                first, address, size = shards[part.name]
                if size:
                    at = part.view.data_ptr() + 2 * part.view.stride(0) * first
                    pairs.append((at, address, size))
            self.agent.prepare(rank, pairs)
        return {"seconds": time.perf_counter() - start}

    def nixl(self) -> dict[str, Any]:
        return dict(self.agent.read())

    def poison(self) -> None:
        for value in self.parameters:
            value.fill_(-1)
        settle(self.device)  # a pull does not wait for it

    def compare(self) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self.shapes)}
        wrong = []
        for part in self.parts:
            expected = pattern(numbers[part.name], part.shape, 0, self.device)[part.of]
            held = part.view.contiguous().view(torch.int16)
            if not torch.equal(expected.view(torch.int16), held):
                wrong.append(part.name)
        return {"wrong": wrong[:3], "count": len(wrong)}


# --------------------------------------------------------------------------------- the run


def ask(children: list[Child], what: str, **fields: Any) -> list[dict[str, Any]]:
    """All at once; their answers."""
    for one in children:
        one.tell(what, **fields)
    return [one.expect("done", SLOWEST) for one in children]


def check(workers: list[Child], way: str = "", **fields: Any) -> None:
    """Ends the run if one of them holds something else than it should."""
    for answer in ask(workers, "compare", **fields):
        if answer["count"]:
            sys.exit(f"{way}{answer['count']} tensors differ, the first: {answer['wrong']}")


class Run:
    def __init__(self, options: argparse.Namespace, folder: pathlib.Path):
        common = {key: getattr(options, key) for key in ("device", "model", "layers", "divide")}
        common |= {"ranks": options.ranks, "tp": options.tp, "compact": options.compact}
        common["served"] = options.served
        common["rendezvous"] = rendezvous()
        self.options, self.world, self.times = options, os.urandom(16).hex(), {}
        everyone = options.ranks + options.tp
        self.children = []
        for index in range(everyone):
            worker = index - options.ranks
            role = {**common, **({"worker": worker} if worker >= 0 else {})}
            numbers = {"RANK": str(index), "WORLD_SIZE": str(everyone)}
            name = f"rank{index}" if worker < 0 else f"worker{worker}"
            self.children.append(Child(name, str(HERE), role, folder, **numbers))
        self.ranks, self.workers = self.children[: options.ranks], self.children[options.ranks :]
        for one in self.children:
            one.expect("here", SLOWEST)

    def time(self, way: str, what: str, **fields: Any) -> list[dict[str, Any]]:
        """As slow as the slowest worker."""
        asked = self.children if what == "broadcast" else self.workers
        answers = ask(asked, what, **fields)
        self.times.setdefault(way, []).append(max(a.get("seconds", 0) for a in answers))
        return answers

    def prepare(self) -> list[str]:
        """What is measured beside the pulls; in which order."""
        options, beside = self.options, []
        if options.nccl:
            ask(self.children, "join")
            ask(self.children, "nccl")
            beside.append("nccl")
        if options.nixl:
            ranks = ask(self.ranks, "nixl_serve")
            self.time("nixl prepares", "nixl_prepare", ranks=ranks)
            beside.append("nixl")
        return beside

    def proven(self, turn: int) -> None:
        """Of the first turn's ways each brings the bytes."""
        if turn == 0:
            check(self.workers)
            ask(self.workers, "poison")

    def turn(self, turn: int, beside: list[str], crossing: int) -> list[dict[str, Any]]:
        for way in beside:
            self.time(way, {"nccl": "broadcast", "nixl": "nixl"}[way])
            self.proven(turn)
        answers = self.time("pull", "pull")
        if self.options.tp > 1:
            alone = ask(self.workers[:1], "pull")
            self.times.setdefault("alone", []).append(alone[0]["seconds"])
        self.time("copy", "copy", crossing=crossing)
        return answers

    def measure(self) -> dict[str, Any]:
        options = self.options
        served = ask(self.ranks, "serve", world=self.world)
        ask(self.workers, "connect", addresses=[answer["address"] for answer in served])
        first = self.time("first of the process", "pull")
        check(self.workers)
        again = [self.time("new client", "pull", fresh=True)[0] for _ in range(3)]
        gpus = torch.cuda.device_count() if options.device == "cuda" else 1
        crossing = first[0]["bytes"] * (gpus - 1) // gpus if gpus > 1 else first[0]["bytes"]
        beside = self.prepare()
        ask(self.workers, "poison")
        for turn in range(options.pulls + 1):
            if turn == 1:  # the first round warms up
                for way in ("pull", "alone", "copy", *beside):
                    self.times.pop(way, None)
            answers = self.turn(turn, beside, crossing)
        check(self.workers)
        return {"path": answers[0]["path"], "bytes": answers[0]["bytes"], "crossing": crossing,
                "phases": answers[0]["phases"], "first_phases": first[0]["phases"],
                "new_phases": again[-1]["phases"]}  # fmt: skip

    def close(self) -> None:
        for one in self.children:
            one.close()


def report(options: argparse.Namespace, run: Run, facts: dict[str, Any]) -> None:
    figures = {way: 1e3 * statistics.median(times) for way, times in run.times.items()}
    name = f"{options.model}, {options.ranks} ranks -> TP{options.tp}"
    print(f"{name}: {facts['bytes'] / 1e9:.2f} GB a worker by {facts['path']}")
    for way, figure in figures.items():
        ratio = f"{figure / figures['pull']:6.2f} x a warm pull"
        print(f"  {way:22} {figure:10.2f} ms  {ratio}")
    print(f"  pull / copy {figures['pull'] / figures['copy']:.3f}")
    for whose, phases in (
        ("a warm pull's ms", "phases"),
        ("the first one's", "first_phases"),
        ("a new client's", "new_phases"),
    ):
        shown = {key: round(ms, 2) for key, ms in facts[phases].items() if ms}
        print(f"  {whose:17}", shown)
    if options.json:
        all_times = {way: [1e3 * t for t in times] for way, times in run.times.items()}
        record = {"options": vars(options), "medians_ms": figures, "ms": all_times, **facts}
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1))


def no_nixl(options: argparse.Namespace) -> str:
    """Why there is no comparison with it; empty: there is."""
    if options.tp > 1:
        return "its descriptors are made for TP1 only"
    try:
        importlib.import_module("nixl._api")
    except ImportError as missing:
        return str(missing)
    return ""


def main() -> int:
    if child(Rank, Worker):
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="Qwen3-8B")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--divide", type=int, default=1, help="divide the widths by 2, 4, 8 or 16")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--compact", action="store_true", help="shards in few large allocations")
    parser.add_argument("--served", action="store_true", help="by WeightServer, under FSDP2")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--nixl", action="store_true")
    parser.add_argument("--pulls", type=int, default=9)
    options = given(parser)
    if options.served and (options.nccl or options.nixl):
        parser.error("--served is measured without --nccl and --nixl")
    if options.nixl and (why := no_nixl(options)):
        print(f"without NIXL: {why}")
        options.nixl = False
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="full-weights-", dir=room) as folder:
        run = Run(options, pathlib.Path(folder))
        try:
            report(options, run, run.measure())
        finally:
            run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
