#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_deltas.py [--device cuda|cpu] [--gb GB] [--rounds N]

Deltas of a PyTorch trainer on a GPU, read by stream into a GPU and into host memory. After each pull
every byte is the trainer's: of BF16, F32 (as it is and cast), fp8 and odd sizes, with 0 %, 1 %, 5 %
and all of the words changed, chains of steps, a step that was given up, and a trainer that begins
again with the same steps. By itself a reader of the same host takes cuda_ipc, and reads the whole.

Then the figures: of GB (16.4) of BF16, medians of N (7). What a commit takes with a patch and
without, what it keeps the trainer's stream for, and what a pull by patches takes beside a whole one.

Needs PyTorch with CUDA, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status 77
without a GPU. A line for each check and figure, and last "N passed, N failed". With --device cpu
the checks alone run, on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
import fanin
from fanin.server import Stream
from fanin.torch import WeightServer

RUN = "full:0"
WORLD: dict[str, Any] = {"world_id": b"d" * 16, "rank": 0, "world_size": 1}
#: Of all shapes the last dimension is odd somewhere, and boxes end with half a word.
SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed": (torch.bfloat16, (3001, 257)),
    "norm": (torch.float32, (2057,)),
    "cast": (torch.float32, (513, 129)),
    "gate": (torch.float8_e4m3fn, (1025, 333)),
    "bytes": (torch.uint8, (70001,)),
    "one": (torch.float8_e5m2, (1, 1)),
    "experts": (torch.bfloat16, (16, 130, 66)),
}


class Trainer:
    """A server of tensors, and what they are published as."""

    def __init__(self, device: str, port: int = 0) -> None:
        self.tensors = {
            name: torch.randint(0, 255, shape, device=device, dtype=torch.uint8).to(dtype)
            if dtype != torch.bfloat16
            else torch.randn(shape, device=device).to(dtype)
            for name, (dtype, shape) in SHAPES.items()
        }
        root = torch.nn.Module()
        for name, one in self.tensors.items():
            root.register_parameter(name, torch.nn.Parameter(one, requires_grad=False))
        self.server = WeightServer(
            root, base_port=port, snapshot=True, cast={"cast": "BF16"}, deltas=4
        )
        self.addresses = self.server.addresses

    def published(self) -> dict[str, torch.Tensor]:
        return {
            name: one.bfloat16() if name == "cast" else one.clone()
            for name, one in self.tensors.items()
        }

    def change(self, share: float) -> None:
        for one in self.tensors.values():
            flat = one.detach().view(-1).view(torch.uint8)
            mask = torch.rand(flat.numel(), device=flat.device) < share
            flat ^= mask.to(torch.uint8) * 0x55

    def step(self, number: int, share: float) -> None:
        with self.server.updating(number):
            self.change(share)

    def give_up(self, number: int) -> None:
        """Its bytes change, and are copied perhaps, and nothing of it is published."""
        before = {name: one.clone() for name, one in self.tensors.items()}
        try:
            with self.server.updating(number):
                self.change(0.3)
                raise KeyError
        except KeyError:
            pass
        for name, one in self.tensors.items():
            one.data.copy_(before[name])


class Reader:
    """Into *device*, or "pinned" host memory, as an engine on a GPU reads ahead."""

    def __init__(self, addresses: list[str], like: dict[str, torch.Tensor], device: str) -> None:
        self.client = fanin.Client(addresses, path="stream")
        self.place = device
        how: dict[str, Any] = {"device": device}
        if device == "pinned":
            how = {"device": "cpu", "pin_memory": True}
        self.tensors = {
            name: torch.empty(one.shape, dtype=one.dtype, **how) for name, one in like.items()
        }
        self.packed = fanin.pack(
            fanin.shard_of(name, one, writable=True) for name, one in self.tensors.items()
        )

    def pull(self, step: int, **how: Any) -> fanin.PullResult:
        return self.client.pull_into(
            RUN, self.packed, step=step, deltas=True, timeout=60, **how
        )


passed, failed = 0, 0


def check(what: str, good: bool, more: object = "") -> None:
    global passed, failed
    passed, failed = passed + good, failed + (not good)
    print(f"{'ok' if good else 'FAILED'}: {what} {more}", flush=True)


def equal(reader: Reader, wanted: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(reader.tensors[name].cpu().view(torch.uint8), one.cpu().view(torch.uint8))
        for name, one in wanted.items()
    )


@contextmanager
def closing(trainer: Trainer) -> Iterator[Trainer]:
    try:
        yield trainer
    finally:
        trainer.server.close()


def check_pull(readers: list[Reader], trainer: Trainer, step: int, what: str, base: int) -> None:
    """*base*: the step before, 0: the whole is to come."""
    for reader in readers:
        result = reader.pull(step)
        told = f"{what} into {reader.place}: {result.patch_bytes} bytes {result.whole_because}"
        good = equal(reader, trainer.published()) and result.verified
        check(told, good and result.base_step == base, f"since {result.base_step}")


def check_bytes(device: str) -> None:
    with closing(Trainer(device)) as trainer:
        trainer.server.publish(1)
        like = trainer.published()
        places = ("cuda", "pinned", "cpu") if device == "cuda" else ("cpu",)
        readers = [Reader(trainer.addresses, like, one) for one in places]
        check_pull(readers, trainer, 1, "first", 0)
        step = 1
        for share in (0.01, 0.0, 0.001, 0.012):
            step += 1
            trainer.step(step, share)
            check_pull(readers, trainer, step, f"{100 * share:g} %", step - 1)
        for _ in range(3):
            step += 1
            trainer.step(step, 0.005)
        check_pull(readers, trainer, step, "three steps", step - 3)
        for share in (0.3, 1.0):
            step += 1
            trainer.step(step, share)
            check_pull(readers, trainer, step, f"{100 * share:g} %: too much", 0)
        step += 1
        trainer.step(step, 0.05)
        check_pull(readers, trainer, step, "5 %: too many bytes of single bytes", 0)
        step += 1
        trainer.step(step, 0.025)
        check_pull(readers, trainer, step, "5 % of words after a gap", step - 1)
        step += 1
        trainer.step(step, 0.01)
        check_pull(readers, trainer, step, "1 % after 5", step - 1)
        trainer.give_up(step + 1)
        step += 2
        trainer.step(step, 0.01)
        check_pull(readers, trainer, step, "after a step that was given up", step - 2)
        last = step
        port = int(trainer.addresses[0].rsplit(":", 1)[1])
    with closing(Trainer(device, port)) as trainer:
        trainer.server.publish(last)
        check_pull(readers, trainer, last, "another life", 0)
        trainer.step(last + 1, 0.01)
        check_pull(readers, trainer, last + 1, "its next step", last)


# ------------------------------------------------------------------------------- cuda_ipc

_OTHER = """
import sys, torch, fanin
client = fanin.Client([sys.argv[1]])
one = torch.zeros(int(sys.argv[2]), dtype=torch.bfloat16, device="cuda")
packed = fanin.pack([fanin.shard_of("weight", one, writable=True)])
result = client.pull_into("full:0", packed, deltas=True, timeout=60)
print(result.ranks[0]["path"], "|", result.whole_because)
"""


def check_same_host() -> None:
    weight = torch.randn(1 << 20, device="cuda").bfloat16()
    with fanin.Server(**WORLD) as server:
        server.put(RUN, [fanin.shard_of("weight", weight)])
        server.commit(RUN, 1, snapshot=True, deltas=4)
        command = [sys.executable, "-c", _OTHER, f"127.0.0.1:{server.port}", str(weight.numel())]
        told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    check("of this host", told.stdout.startswith("cuda_ipc"), told.stdout.strip() or told.stderr)


# -------------------------------------------------------------------------------- figures


def ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ms (worst {max(values) * 1e3:.1f})"


def change_some(tensors: dict[str, torch.Tensor], share: float) -> None:
    for one in tensors.values():
        words = one.view(torch.int16).view(-1)
        at = torch.randint(words.numel(), (int(words.numel() * share),), device=words.device)
        words[at] ^= 1
    torch.cuda.synchronize()


class Big:
    """GB of BF16 on a GPU, published by :class:`fanin.Server`."""

    def __init__(self, gb: float) -> None:
        elements = 64 << 20
        count = round(gb * 1e9 / 2 / elements)
        self.bytes = 2 * count * elements
        self.tensors = {
            f"w{at}": torch.randn(8192, elements // 8192, device="cuda").bfloat16()
            for at in range(count)
        }
        self.server = fanin.Server(**WORLD)
        self.server.put(RUN, [fanin.shard_of(name, one) for name, one in self.tensors.items()])
        self.number = 0

    def commit(self, deltas: int, stream: Any = None) -> float:
        if self.number:
            self.server.begin_update(RUN)
        self.number += 1
        begun = time.perf_counter()
        self.server.commit(RUN, self.number, snapshot=True, deltas=deltas, stream=stream)
        return time.perf_counter() - begun


def on_stream(big: Big, deltas: int) -> tuple[float, float, float]:
    """What the commit's call takes, how long the trainer's stream waits, and how long a product
    takes that is behind it there."""
    stream = torch.cuda.Stream()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    left = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16).normal_()
    torch.cuda.synchronize()
    events[0].record(stream)
    call = big.commit(deltas, Stream(stream.cuda_stream, 0))
    events[1].record(stream)
    with torch.cuda.stream(stream):
        for _ in range(20):
            left @ left
    events[2].record(stream)
    torch.cuda.synchronize()
    return call, events[0].elapsed_time(events[1]) / 1e3, events[1].elapsed_time(events[2]) / 1e3


def tell_commits(big: Big, share: float, rounds: int) -> None:
    plain: list[float] = []
    made: list[float] = []
    streams: dict[int, list[tuple[float, float, float]]] = {0: [], 4: []}
    for at in range(rounds + 1):
        for deltas, times in ((0, plain), (4, made)):
            change_some(big.tensors, share)
            took = big.commit(deltas)
            times += [took] if at else []
        for deltas in (0, 4):
            change_some(big.tensors, share)
            told = on_stream(big, deltas)
            streams[deltas] += [told] if at else []
    cost = statistics.median(made) - statistics.median(plain)
    print(f"{100 * share:g} %: commit {ms(plain)}, with a patch {ms(made)}: making {cost * 1e3:.1f} ms")
    for at, what in enumerate(("the call", "the stream waits", "20 products behind it")):
        told = {deltas: ms([one[at] for one in streams[deltas]]) for deltas in streams}
        print(f"{100 * share:g} %: {what}: {told[0]}, with a patch {told[4]}", flush=True)


def tell_pulls(big: Big, reader: Reader, share: float, rounds: int) -> None:
    results = []
    for _ in range(rounds):
        change_some(big.tensors, share)
        big.commit(4)
        results.append(reader.pull(big.number))
    good = all(torch.equal(one, reader.tensors[name]) for name, one in big.tensors.items())
    deltas = [one for one in results if not one.whole_because]
    check(f"{100 * share:g} % of {big.bytes / 1e9:.1f} GB", good and len(deltas) == rounds,
          {one.whole_because for one in results})
    if not deltas:
        return
    print(f"{100 * share:g} %: {deltas[0].patch_bytes / 1e6:.0f} MB of patches")
    for name in ("read", "apply", "verify", "total"):
        print(f"{100 * share:g} %: {name} {ms([getattr(one, name) for one in deltas])}", flush=True)


def tell_figures(gb: float, rounds: int) -> None:
    big = Big(gb)
    with big.server:
        big.commit(4)
        reader = Reader([f"127.0.0.1:{big.server.port}"], big.tensors, "cuda")
        begun = time.perf_counter()
        reader.pull(big.number, verify=False)
        print(f"the whole by stream: {time.perf_counter() - begun:.2f} s")
        begun = time.perf_counter()
        change_some(big.tensors, 0.001)
        first = big.commit(4)
        print(f"the first commit with a patch, which pins its room: {first * 1e3:.0f} ms")
        reader.pull(big.number)
        for share in (0.01, 0.05, 0.001):
            tell_commits(big, share, rounds)
            big.commit(4)
            reader.pull(big.number)
            change_some(big.tensors, share)
            big.commit(4)
            reader.pull(big.number)
            tell_pulls(big, reader, share, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gb", type=float, default=16.4)
    parser.add_argument("--rounds", type=int, default=7)
    said = parser.parse_args()
    on_gpu = said.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    torch.manual_seed(1)
    parts: list[Callable[[], None]] = [lambda: check_bytes(said.device)]
    if on_gpu:
        parts += [check_same_host, lambda: tell_figures(said.gb, said.rounds)]
    for part in parts:
        try:
            part()
        except Exception as error:  # the others run all the same
            check(f"{type(error).__name__}: {error}", False)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
