#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""product_loss.py NIXL_FETCH [--shape SHAPE] [--seconds S] [--pairs N]

What being read costs a GPU that works: PyTorch's matrix product (8192 x 8192, bf16) runs without
pause on GPU 0 while a worker on GPU 1 pulls an adapter of eight ranks again and again: first four
ranks on each GPU, then all on GPU 0; beside it the same with plain copies of as many bytes from
GPU 0 to GPU 1 by the copy engine. Phases with and without take turns (the reading process is
stopped and continued). Prints an object: for each the median ratio of speeds, and bytes read from
GPU 0 a second. Needs two GPUs and PyTorch; exit status 77 without.
"""

import argparse
import json
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import time

SIZE = 8192
AT_ONCE = 8


def product(path):
    """Multiplies for ever; the first number in the file counts products."""
    import torch

    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 16)
    a = torch.randn(SIZE, SIZE, device="cuda:0", dtype=torch.bfloat16)
    b = torch.randn(SIZE, SIZE, device="cuda:0", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    done = 0
    while True:
        for _ in range(AT_ONCE):
            torch.mm(a, b, out=c)
        torch.cuda.synchronize(0)
        done += AT_ONCE
        memory[:8] = struct.pack("<Q", done)


def copies(path, size):
    """Copies for ever; the second number in the file counts them."""
    import torch

    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 16)
    x = torch.empty(size, device="cuda:0", dtype=torch.uint8)
    y = torch.empty(size, device="cuda:1", dtype=torch.uint8)
    done = 0
    while True:
        y.copy_(x)
        torch.cuda.synchronize(1)
        done += 1
        memory[8:] = struct.pack("<Q", done)


class Counters:
    def __init__(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 16)

    def products(self):
        return struct.unpack("<Q", self.memory[:8])[0]

    def copied(self):
        return struct.unpack("<Q", self.memory[8:])[0]

    def rate(self, seconds):
        """Products a second, between two changes of the counter."""
        start = self.edge()
        time.sleep(seconds)
        end = self.edge()
        return (end[1] - start[1]) / (end[0] - start[0])

    def edge(self):
        before = self.products()
        limit = time.monotonic() + 30
        while self.products() == before:
            if time.monotonic() > limit:
                sys.exit("product_loss: the product does not run")
        return time.monotonic(), self.products()


def compare(counters, process, options):
    """Speeds with the process running, in parts of those around without it."""
    time.sleep(2)  # to warm up
    ratios = []
    os.kill(process.pid, signal.SIGSTOP)
    idle = counters.rate(options.seconds)
    for _ in range(options.pairs):
        os.kill(process.pid, signal.SIGCONT)
        busy = counters.rate(options.seconds)
        if process.poll() is not None:
            sys.exit(f"product_loss: what should read has ended ({process.returncode})")
        os.kill(process.pid, signal.SIGSTOP)
        after = counters.rate(options.seconds)
        ratios.append(busy / ((idle + after) / 2))
        idle = after
    os.kill(process.pid, signal.SIGCONT)
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "product_tflops": idle * 2 * SIZE**3 / 1e12,
    }


def end(process):
    process.send_signal(signal.SIGCONT)
    process.terminate()
    process.wait()


def pulls(options, counters, devices, share):
    """What pulling costs with ranks on these devices; share of the bytes lies on GPU 0."""
    ranks = subprocess.Popen(
        [
            options.tool,
            "serve",
            "--adapter-shape",
            options.shape,
            "--world-size",
            "8",
            "--device",
            devices,
            "--info",
            options.info,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    if not ranks.stdout.readline().startswith("ready"):
        sys.exit("product_loss: the ranks do not start")
    bench = [options.tool, "bench", options.info, "--dest", "device:1", "--json", "--iterations"]
    reader = subprocess.Popen([*bench, "100000"], stdout=subprocess.DEVNULL)
    try:
        result = compare(counters, reader, options)
    finally:
        end(reader)
    measured = json.loads(
        subprocess.run([*bench, "50"], check=True, capture_output=True, text=True).stdout
    )
    pull_ns = measured["phases"]["total"]["median_ns"]
    result |= {
        "devices": devices,
        "pull_ms": pull_ns / 1e6,
        "gb_per_s": share * options.size / pull_ns,
    }
    end(ranks)
    return result


def plain_copies(options, counters, path):
    reader = subprocess.Popen(
        [sys.executable, __file__, "--copies", path, "--size", str(options.size)]
    )
    while counters.copied() == 0 and reader.poll() is None:
        time.sleep(0.01)
    try:
        result = compare(counters, reader, options)
        start, before = time.monotonic(), counters.copied()
        time.sleep(options.seconds)
        done = counters.copied() - before
        result["gb_per_s"] = done * options.size / (time.monotonic() - start) / 1e9
    finally:
        end(reader)
    return result


def measure(options, path):
    counters = Counters(path)
    product_process = subprocess.Popen([sys.executable, __file__, "--product", path])
    try:
        counters.edge()
        print(
            json.dumps(
                {
                    "shape": options.shape,
                    "pull": pulls(options, counters, "0,1", 0.5),
                    "pull_all": pulls(options, counters, "0", 1.0),
                    "copy": plain_copies(options, counters, path),
                }
            )
        )
    finally:
        end(product_process)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", nargs="?")
    parser.add_argument("--shape", default="moe")
    parser.add_argument("--size", type=int, default=1687683072)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--product", help=argparse.SUPPRESS)
    parser.add_argument("--copies", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.product:
        product(options.product)
    if options.copies:
        copies(options.copies, options.size)
    try:
        import torch

        count = torch.cuda.device_count()
    except ImportError:
        count = 0
    if count < 2:
        print("skipped: PyTorch with two GPUs is needed")
        return 77
    path = f"/tmp/product-loss-{os.getpid()}"
    options.info = path + ".json"
    with open(path, "wb") as file:
        file.write(bytes(16))
    try:
        measure(options, path)
    finally:
        os.unlink(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
