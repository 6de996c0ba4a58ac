# SPDX-License-Identifier: Apache-2.0
"""A worker that pulls without pause until it is told to stop (a child of worlds.py).

Options: addresses, run, final (the last step), out (folder), client and pull (keyword arguments).
It takes turns between directories, torch tensors and parts of tensors, and between the newest step,
the next one whatever it is, and the very next one. It keeps what each pull gave as digests, the
first directory of each step, and every directory that differs from the first of its step;
results.json has them all.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import sys
import time
from typing import Any

import fanin
import torch
from safetensors.torch import load_file
from worlds import PATIENCE, Control, digests, saved_name

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Worker:
    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.out = pathlib.Path(options["out"])
        self.client = fanin.Client(options["addresses"], **options.get("client", {}))
        self.run, self.keywords = options["run"], options.get("pull", {})
        self.pulls: list[dict[str, Any]] = []
        self.first: dict[int, str] = {}
        self.step, self.superseded = 0, 0
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {}

    def learn(self) -> None:
        """What there is to be pulled."""
        for entry in self.client.catalog(self.run):
            self.shapes[entry.name] = (
                self.keywords.get("dtype") or entry.dtype,
                tuple(entry.shape),
            )

    def directory(self, **which: int) -> dict[str, Any]:
        path = self.out / f"pull-{len(self.pulls)}-{self.superseded}"
        result = self.client.pull_adapter(
            self.run, path, timeout=PATIENCE, **which, **self.keywords
        )
        tensors = load_file(path / "adapter_model.safetensors")
        pull = {"step": result.step, "how": "directory", "digests": digests(tensors)}
        pull["path"] = result.path
        same = self.first.setdefault(result.step, str(path))
        if same == str(path):
            pull["directory"] = str(path)
            return pull
        kept = next(p for p in self.pulls if p.get("directory") == same)
        if kept["digests"] == pull["digests"]:
            shutil.rmtree(path)
        return pull

    def tensors(self, **which: int) -> dict[str, Any]:
        into = {n: torch.empty(shape, dtype=DTYPES[d]) for n, (d, shape) in self.shapes.items()}
        keywords = {**self.keywords, **which}
        result = self.client.pull_into(self.run, into, timeout=PATIENCE, **keywords)
        named = {saved_name(name): value for name, value in into.items()}
        return {
            "step": result.step,
            "how": "tensors",
            "digests": digests(named),
            "path": result.path,
        }

    def columns(self, **which: int) -> dict[str, Any]:
        """The right half of each tensor, into the middle of a larger one."""
        into, shards, rooms = {}, [], []
        for name, (dtype, shape) in self.shapes.items():
            start = shape[1] // 2
            room = torch.zeros(shape[0], shape[1] - start + 3, dtype=DTYPES[dtype])
            rooms.append(room)
            into[saved_name(name)] = room[:, 1:-2]
            shards.append(fanin.shard_of(name, room[:, 1:-2], shape=shape, offset=(0, start)))
        keywords = {**self.keywords, **which}
        result = self.client.pull_into(self.run, shards, timeout=PATIENCE, **keywords)
        assert not any(room[:, (0, -2, -1)].any() for room in rooms), "bytes beside the boxes"
        return {
            "step": result.step,
            "how": "columns",
            "digests": digests(into),
            "path": result.path,
        }

    def which(self, rule: str) -> dict[str, int]:
        """The step to ask for; none is asked for that does not come."""
        if rule == "newest" or self.step >= self.options["final"]:
            return {}
        return {"step" if rule == "exact" else "at_least": self.step + 1}

    def pull(self, how: str, rule: str) -> None:
        start = time.perf_counter()
        try:
            pull = getattr(self, how)(**self.which(rule))
        except fanin.SupersededError:
            if rule != "exact":
                raise
            self.superseded += 1
            return
        pull |= {"rule": rule, "seconds": time.perf_counter() - start}
        if pull["step"] < self.step:
            raise AssertionError(f"step {pull['step']} came after step {self.step}")
        self.step = pull["step"]
        self.pulls.append(pull)

    def save(self) -> None:
        results = {"pulls": self.pulls, "superseded": self.superseded}
        (self.out / "results.json").write_text(json.dumps(results))


def main() -> None:
    control = Control()
    worker = Worker(json.loads(sys.argv[1]))
    worker.learn()
    worker.pull("directory", "newest")
    control.say("pulling")
    turns = itertools.product(("newest", "next", "exact"), ("directory", "tensors", "columns"))
    for rule, how in itertools.cycle(list(turns)):
        if control.heard() is not None:
            break
        worker.pull(how, rule)
    worker.pull("directory", "newest")
    worker.save()
    worker.client.close()
    control.say("pulled")


if __name__ == "__main__":
    main()
