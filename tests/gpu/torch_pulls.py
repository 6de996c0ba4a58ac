#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_pulls.py [--device cuda|cpu] [--pulls N] [--only MODE] [--json FILE]

PyTorch trainers that write their parameters in place, on a side stream, while a worker on the last
GPU pulls into CUDA tensors without pause, and now and then a directory. No pull may be torn:

  plain       one trainer; tensors of its own lent by fanin.Server; each step adds 1 to all elements
  counted     fully_shard over NCCL on two GPUs; SGD with constant gradients adds 1 to every element
  adamw       the same with forward, backward and AdamW; each step's digest is recorded
  snapshot    as adamw, published as snapshots rounded to bf16
  weights     as counted, of a whole model by fanin.torch.WeightServer: embeddings, projections and
              experts that are stored in one tensor a layer and published one by one
  still       counted stops at step 1, and the engine plugin's service pulls that F32 step into
              directories as it is, as BF16 and as F16: each element is what PyTorch rounds it to

Needs PyTorch, safetensors, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77
without GPUs. With --device cpu it runs on gloo, in small. The last line is "N passed, N failed";
the JSON has times of pulls and what was seen.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

try:
    import safetensors.torch  # noqa: F401
    import torch
    import torch.distributed as dist
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
from worlds import Child, Control

# These parts of --pulls.
MODES = {"plain": 4, "counted": 1, "adamw": 10, "snapshot": 10, "weights": 1}
COUNTED = ("plain", "counted", "weights")
BASES = 1000  # a counted element starts at less: sums stay exact in F32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
SLOWEST = 100.0  # seconds that any wait may take


def sizes(device: str) -> dict[str, int]:
    """Of the adapter: 64 MiB of F32 on GPUs, next to nothing on a CPU; r is uneven over two."""
    if device == "cuda":
        return {"layers": 32, "hidden": 4096, "r": 15}
    return {"layers": 3, "hidden": 64, "r": 5}


def on(device: str, index: int) -> torch.device:
    return (
        torch.device(device, index % torch.cuda.device_count())
        if device == "cuda"
        else torch.device("cpu")
    )


# --------------------------------------------------------------------------------- values


def start_of(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A counted tensor's values at step 0: they differ by name and place."""
    salt = sum(name.encode()) % 97
    flat = torch.arange(torch.Size(shape).numel(), device=device)
    return ((flat * 7 + salt) % BASES).float().reshape(shape)


def digest_of(flat: torch.Tensor) -> int:
    """A sum of all elements' bits, each weighted by its place; whatever the order of summing."""
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16).long()
    weights = torch.arange(bits.numel(), device=bits.device) * 2654435761 + 12345
    return int((bits * weights.bitwise_or_(1)).sum().item())


def named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name.replace(".default", ""): value for name, value in model.named_parameters()}
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------- trainers


class Adapter(torch.nn.Module):
    """One linear layer's A and B, under PEFT's names."""

    def __init__(self, hidden: int, r: int, device: torch.device):
        super().__init__()
        options = {"bias": False, "device": device}
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(hidden, r, **options)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(r, hidden, **options)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lora_B["default"](self.lora_A["default"](x))


class Layer(torch.nn.Module):
    def __init__(self, hidden: int, r: int, device: torch.device):
        super().__init__()
        linears = {name: Adapter(hidden, r, device) for name in LINEARS}
        self.self_attn = torch.nn.ModuleDict(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.self_attn.values():
            x = linear(x)
        return x


class Model(torch.nn.Module):
    def __init__(self, layers: int, hidden: int, r: int, device: torch.device):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(Layer(hidden, r, device) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Experts(torch.nn.Module):
    """All experts of a layer in two tensors, as transformers has them."""

    def __init__(self, count: int, width: int, hidden: int, device: torch.device):
        super().__init__()
        gate_up = torch.empty(count, 2 * width, hidden, device=device)
        down = torch.empty(count, hidden, width, device=device)
        self.gate_up_proj, self.down_proj = map(torch.nn.Parameter, (gate_up, down))


class WholeLayer(torch.nn.Module):
    def __init__(self, hidden: int, count: int, width: int, device: torch.device):
        super().__init__()
        for name in LINEARS:
            self.add_module(name, torch.nn.Linear(hidden, hidden, bias=False, device=device))
        self.experts = Experts(count, width, hidden, device)
        self.norm = torch.nn.RMSNorm(hidden, device=device)


class Whole(torch.nn.Module):
    """A whole model that is not run: every element counts steps."""

    def __init__(self, layers: int, hidden: int, count: int, width: int, device: torch.device):
        super().__init__()
        self.embed = torch.nn.Embedding(5 * hidden + 3, hidden, device=device)
        self.layers = torch.nn.ModuleList(
            WholeLayer(hidden, count, width, device) for _ in range(layers)
        )

    def count(self, device: torch.device) -> None:
        """Step 0, by the names under which tensors are published."""
        from fanin.torch._names import slices_of
        from fanin.torch.names import experts

        with torch.no_grad():
            for name, value in self.named_parameters():
                for part in slices_of(experts(), name, tuple(value.shape)):
                    piece = value[part.index] if part.index else value
                    piece.copy_(start_of(part.key, tuple(piece.shape), device))


class Streams:
    """The side stream that writes the parameters, and its order with the stream that reads them."""

    def __init__(self, device: torch.device):
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.square = torch.ones(512, 512)

    @contextlib.contextmanager
    def aside(self):
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(200_000)  # the writes begin well after the calls that ask for them
            yield
        torch.cuda.current_stream().wait_stream(self.side)

    def work(self) -> None:
        """A few milliseconds between two steps, as a forward takes them."""
        if self.side is None:
            self.square @ self.square
        else:
            torch.cuda._sleep(5_000_000)
            torch.cuda.current_stream().synchronize()

    def handle(self) -> Any:
        import fanin

        if self.side is None:
            return None
        return fanin.Stream(self.side.cuda_stream, self.side.device.index)


class Trainer:
    """One rank; runs one mode after the other, as it is told."""

    def __init__(self, control: Control, options: dict[str, Any]):
        self.control, self.options = control, options
        self.rank = int(os.environ["RANK"])
        self.device = on(options["device"], self.rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=options["rendezvous"],
            rank=self.rank,
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(seconds=SLOWEST),
        )

    def goes_on(self) -> bool:
        """What rank 0 has heard, for all ranks."""
        flag = torch.zeros(1)
        if self.rank == 0 and self.control.heard() is None:
            flag += 1
        dist.broadcast(flag, 0)
        return bool(flag)

    # ------------------------------------------------------------ tensors of its own

    def plain(self) -> None:
        """Rank 0 alone lends tensors without DTensor; the other waits."""
        import fanin

        size = sizes(self.device.type)
        streams = Streams(self.device)
        tensors, server = {}, None
        if self.rank == 0:
            names = named_parameters(Model(device=torch.device("meta"), **size))
            tensors = {n: start_of(n, tuple(p.shape), self.device) for n, p in names.items()}
            server = fanin.Server(world_id=os.urandom(16), rank=0, world_size=1)
            server.put("lora:0", [fanin.shard_of(n, t) for n, t in tensors.items()])
            server.set_metadata("lora:0", {"lora_alpha": "16", "base_model_name_or_path": "none"})
        self.start([f"127.0.0.1:{server.port}"] if server else [])
        step = 0
        while self.goes_on():
            step += 1
            if server is None:
                continue
            with streams.aside():
                if step > 1:
                    server.begin_update("lora:0")
                for value in tensors.values():
                    value.add_(1)
                server.commit("lora:0", step, stream=streams.handle())
            streams.work()
        self.control.say("stopped", steps=step, digests={})
        if server is not None:
            server.close()

    # --------------------------------------------------------------------- DTensors

    def model(self, counted: bool) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = sizes(self.device.type)
        model = Model(device=self.device, **size)
        if counted:
            with torch.no_grad():
                for name, value in named_parameters(model).items():
                    value.copy_(start_of(name, tuple(value.shape), self.device))
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def serve(self, model: torch.nn.Module, **options: Any) -> Any:
        from fanin.torch import AdapterServer

        config = {"peft_type": "LORA", "r": sizes(self.device.type)["r"], "lora_alpha": 16}
        config |= {"base_model_name_or_path": "none", "target_modules": list(LINEARS)}
        return AdapterServer(model, base_port=0, config=config, **options)

    def weights(self) -> None:
        """A whole model: each step adds 1 to all of it, exactly."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from fanin.torch import WeightServer
        from fanin.torch.names import experts

        large = {"layers": 4, "hidden": 2048, "count": 16, "width": 511}
        small = {"layers": 2, "hidden": 16, "count": 3, "width": 5}
        size = large if self.device.type == "cuda" else small
        model = Whole(device=self.device, **size)
        model.count(self.device)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with WeightServer(model, base_port=0, names=experts()) as server:
            self.count_steps(model, server)

    def start(self, addresses: list[str]) -> None:
        dist.barrier()
        self.control.say("ready", addresses=addresses)

    def counted(self) -> None:
        """An adapter: each step adds 1 to all of it, exactly."""
        model = self.model(counted=True)
        with self.serve(model) as server:
            self.count_steps(model, server)

    def count_steps(self, model: torch.nn.Module, server: Any) -> None:
        """Gradients of -1 and a rate of 1."""
        streams = Streams(self.device)
        for value in model.parameters():
            value.grad = torch.full_like(value, -1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.start(server.addresses)
        step = 0
        while self.goes_on():
            step += 1
            with streams.aside(), server.updating(step):
                optimizer.step()
            streams.work()
        self.control.say("stopped", steps=step, digests={})

    def still(self) -> None:
        """One step of :meth:`counted`, held until the worker is through."""
        model, streams = self.model(counted=True), Streams(self.device)
        with self.serve(model) as server:
            with streams.aside(), server.updating(1), torch.no_grad():
                for value in model.parameters():
                    value.add_(1 / 3)  # no multiple of what BF16 or F16 can tell apart
            self.start(server.addresses)
            while self.goes_on():
                streams.work()
            self.control.say("stopped", steps=1, digests={})

    def adamw(self, rounded: bool = False, **options: Any) -> None:
        """Real training; after each step all ranks gather the whole, and rank 0 has its digest."""
        model, streams = self.model(counted=False), Streams(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(self.rank)
        width = sizes(self.device.type)["hidden"]
        digests = {}
        with self.serve(model, **options) as server:
            self.start(server.addresses)
            step = 0
            while self.goes_on():
                step += 1
                x = torch.randn(4, width, generator=generator).to(self.device)
                model(x).square().mean().backward()
                with streams.aside(), server.updating(step):
                    optimizer.step()
                optimizer.zero_grad()
                parameters = named_parameters(model).values()
                whole = torch.cat([p.detach().full_tensor().reshape(-1) for p in parameters])
                if self.rank == 0:
                    digests[step] = digest_of(whole.bfloat16() if rounded else whole)
            self.control.say("stopped", steps=step, digests=digests)

    def snapshot(self) -> None:
        self.adamw(rounded=True, snapshot=True, cast="BF16")

    def run(self) -> None:
        self.control.say("here")
        while (told := self.control.hear(SLOWEST))["event"] != "end":
            getattr(self, told["event"])()
            if self.rank != 0:
                self.control.hear(SLOWEST)  # the word to stop, which rank 0 has passed on
        dist.destroy_process_group()


# --------------------------------------------------------------------------------- worker


class Worker:
    """Pulls what one mode publishes again and again into an arena on its device."""

    def __init__(self, control: Control, options: dict[str, Any]):
        self.control = control
        self.device = on(options["device"], torch.cuda.device_count() - 1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.folder = pathlib.Path(options["folder"])

    def pulls(
        self, mode: str, addresses: list[str], count: int, every: int, seconds: float
    ) -> dict[str, Any]:
        import fanin

        limit = time.monotonic() + seconds
        self.run_name = "full:0" if mode == "weights" else "0"
        with fanin.Client(addresses) as client:
            views, arena = self.room(client)
            packed = fanin.pack(fanin.shard_of(name, view) for name, view in views.items())
            starts = [
                start_of(self.names[n], tuple(v.shape), self.device) for n, v in views.items()
            ]
            flat = torch.cat([start.reshape(-1) for start in starts])
            counted = mode in COUNTED
            seen, times, waits, torn = [], [], [], []
            paths: collections.Counter[str] = collections.Counter()
            stale, which = 0, {}
            while len(times) + len(waits) < count and time.monotonic() < limit:
                arena.fill_(-1)
                start = time.perf_counter()
                stream = None
                if self.device.type == "cuda":
                    current = torch.cuda.current_stream()
                    stream = fanin.Stream(current.cuda_stream, self.device.index)
                result = client.pull_into(
                    self.run_name, packed, timeout=SLOWEST, stream=stream, **which
                )
                if which:
                    waits.append(time.perf_counter() - start)
                else:
                    times.append(time.perf_counter() - start)
                which = {} if which else {"at_least": result.step + 1}
                paths[result.path] += 1
                stale += result.stale
                seen.append([result.step, self.number(arena, flat, counted)])
                if counted and seen[-1][1] != result.step:
                    torn.append(f"pull {len(seen)}: step {result.step}: {self.spread(arena, flat)}")
                if mode != "weights" and (len(times) + len(waits)) % every == 0:
                    seen.append(self.directory(client, views, flat, counted, torn))
            return {
                "seen": seen,
                "torn": torn,
                "paths": dict(paths),
                "stale": stale,
                "bytes": arena.nbytes,
                "median_ms": 1e3 * statistics.median(times),
                "best_ms": 1e3 * min(times),
                "worst_ms": 1e3 * max(times),
                "next_step_ms": 1e3 * statistics.median(waits),
                "pulls": len(times) + len(waits),
            }

    def room(self, client: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Destinations in one arena, in the order of names."""
        dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
        entries = sorted(
            client.catalog(self.run_name, timeout=SLOWEST),
            key=lambda entry: self.plain_name(entry.name),
        )
        total = sum(torch.Size(entry.shape).numel() for entry in entries)
        arena = torch.empty(total, dtype=dtypes[entries[0].dtype], device=self.device)
        views, at = {}, 0
        for entry in entries:
            size = torch.Size(entry.shape).numel()
            views[entry.name] = arena[at : at + size].view(entry.shape)
            at += size
        self.names = {name: self.plain_name(name) for name in views}
        return views, arena

    @staticmethod
    def plain_name(name: str) -> str:
        return name.removeprefix("base_model.model.")

    @staticmethod
    def number(arena: torch.Tensor, flat: torch.Tensor, counted: bool) -> int:
        """The step that all elements tell, -1 if they tell several; or the digest."""
        if not counted:
            return digest_of(arena)
        low, high = (arena - flat).aminmax()
        return int(low) if low == high else -1

    @staticmethod
    def spread(arena: torch.Tensor, flat: torch.Tensor) -> str:
        steps, counts = (arena - flat).unique(return_counts=True)
        return ", ".join(
            f"{int(c)} of {int(s)}" for s, c in list(zip(steps, counts, strict=True))[:5]
        )

    def directory(
        self,
        client: Any,
        views: dict[str, torch.Tensor],
        flat: torch.Tensor,
        counted: bool,
        torn: list[str],
    ) -> list[int]:
        from safetensors.torch import load_file

        path = self.folder / f"adapter-{time.monotonic_ns()}"
        result = client.pull_adapter("0", path, timeout=SLOWEST)
        state = {
            self.plain_name(n): v for n, v in load_file(path / "adapter_model.safetensors").items()
        }
        shutil.rmtree(path)
        arena = torch.cat([state[self.names[name]].reshape(-1) for name in views]).to(self.device)
        found = self.number(arena, flat, counted)
        if counted and found != result.step:
            torn.append(f"directory of step {result.step}: {self.spread(arena, flat)}")
        return [result.step, found]

    def plugin(self, addresses: list[str], seconds: float) -> list[str]:
        """What came in which dtype, by the engine plugin's service."""
        from safetensors.torch import load_file

        from fanin.engine.clients import ClientPool, Source
        from fanin.engine.directories import Places
        from fanin.engine.pulls import PullService, Wanted

        came = []
        service = PullService(Places(self.folder / "cache"), ClientPool())
        wanted = Wanted("run0-step1", "0", 1, "still", Source.of(addresses), seconds)
        for dtype, kind in {
            None: torch.float32,
            "BF16": torch.bfloat16,
            "F16": torch.float16,
        }.items():
            adapter = service.pull(dataclasses.replace(wanted, dtype=dtype))
            for name, got in load_file(adapter.path / "adapter_model.safetensors").items():
                shape = tuple(got.shape)
                start = start_of(self.plain_name(name), shape, self.device)
                expected = (start + 1 / 3).to(kind).cpu()
                assert got.dtype == kind and torch.equal(got, expected), f"{name} as {dtype}"
            came.append(str(dtype))
        service.close()
        return came

    def run(self) -> None:
        self.control.say("here")
        while (told := self.control.hear(SLOWEST)).pop("event") != "end":
            still = told["mode"] == "still"
            result = (
                {"dtypes": self.plugin(told["addresses"], told["seconds"])}
                if still
                else self.pulls(**told)
            )
            self.control.say("pulled", **result)


# ----------------------------------------------------------------------------------- test


class Run:
    """The processes, and the modes that they run."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path):
        self.options = options
        common = {"device": options.device, "folder": str(folder)}
        common["rendezvous"] = f"file://{folder}/rendezvous"
        script = str(HERE)
        self.worker = Child("worker", script, {**common, "role": "worker"}, folder)
        self.ranks = []
        for rank in range(2):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            role = {**common, "role": "trainer"}
            self.ranks.append(Child(f"rank{rank}", script, role, folder, **numbers))

    def close(self) -> None:
        for one in (self.worker, *self.ranks):
            one.close()

    def mode(self, name: str, seconds: float) -> dict[str, Any]:
        for rank in self.ranks:
            rank.tell(name)
        addresses = [rank.expect("ready", SLOWEST) for rank in self.ranks][0]["addresses"]
        count = self.options.pulls // MODES.get(name, 1)
        wish = {"mode": name, "addresses": addresses, "count": count, "every": max(count // 5, 1)}
        self.worker.tell("pull", **wish, seconds=seconds)
        result = self.worker.expect("pulled", seconds + SLOWEST)
        for rank in self.ranks:
            rank.tell("stop")
        stopped = [rank.expect("stopped", SLOWEST) for rank in self.ranks][0]
        result["steps"] = stopped["steps"]
        if name == "still":
            assert result["dtypes"] == ["None", "BF16", "F16"], result
            return result
        self.judge(name, result, stopped["digests"], count)
        return result

    def judge(self, name: str, result: dict[str, Any], digests: dict[str, int], count: int) -> None:
        """AssertionError: a pull was torn, or there were too few of them to tell."""
        seen = result.pop("seen")
        result["distinct_steps"] = len({step for step, _ in seen})
        result["checked"] = len(seen)
        assert not result["torn"], f"{len(result['torn'])} torn: {result['torn'][0]}"
        if name in ("adamw", "snapshot"):
            torn = [step for step, found in seen if digests[str(step)] != found]
            assert not torn, f"{len(torn)} of {len(seen)} torn, the first at step {torn[0]}"
        assert result["distinct_steps"] >= 5, f"{result['distinct_steps']} steps were seen only"
        assert result["pulls"] >= count, f"{result['pulls']} pulls only, in time"
        if self.options.device == "cuda":
            assert set(result["paths"]) == {"cuda_ipc"}, f"paths {result['paths']}"

    def end(self) -> None:
        for one in (self.worker, *self.ranks):
            one.tell("end")
        for one in (self.worker, *self.ranks):
            assert one.wait(SLOWEST) == 0, one.tail()


def check(options: argparse.Namespace) -> int:
    results: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "modes": {}}
    passed = failed = 0
    modes = [
        mode for mode in (*MODES, "still") if not options.only or mode in options.only.split(",")
    ]
    begun = time.monotonic()
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="torch-pulls-", dir=room) as folder:
        run = Run(options, pathlib.Path(folder))
        try:
            for one in (run.worker, *run.ranks):
                one.expect("here", SLOWEST)
            for mode in modes:
                start = time.monotonic()
                result = run.mode(mode, begun + options.seconds - start)
                results["modes"][mode] = result
                passed += 1
                if mode == "still":
                    print(f"passed  still: {', '.join(result['dtypes'])} by the plugin's service")
                    continue
                print(
                    f"passed  {mode}: {result['pulls']} pulls of {result['bytes'] / 1e6:.0f} MB in "
                    f"{time.monotonic() - start:.1f} s, median {result['median_ms']:.2f} ms, "
                    f"next step after {result['next_step_ms']:.2f} ms, "
                    f"{result['distinct_steps']} of {result['steps']} steps, "
                    f"stale {result['stale']}, {result['paths']}",
                    flush=True,
                )
            run.end()
        except AssertionError:
            failed += 1
            traceback.print_exc()
            for one in (run.worker, *run.ranks):
                print(one.tail(), file=sys.stderr)
        finally:
            run.close()
    results["seconds"] = time.monotonic() - begun
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1))
    print(json.dumps(results))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        control, options = Control(), json.loads(sys.argv[1])
        (Worker if options["role"] == "worker" else Trainer)(control, options).run()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--pulls", type=int, default=1000, help="of the mode counted; the others: a part"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="that all pulls together may take"
    )
    parser.add_argument("--only", default="", help="modes, with commas between")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    return check(options)


if __name__ == "__main__":
    sys.exit(main())
