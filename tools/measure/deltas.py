#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `network.py --deltas` measures: whole pulls and deltas of the same steps in turns, over
links of several rates; and what patches cost the commit.

One rank publishes a copy of 16 tensors of BF16 (--mib), of which a share of the elements, at random
places, changes with each step. One worker pulls each step twice into memory that it has prepared,
whole and by deltas, with the ranks' digests and without. Both are children of this file, each in a
namespace of its own. At the end of each row the worker's memory is compared with the rank's.
Commits with and without patches take turns as well, while a worker that asks is connected.

With --directory no worker is there: `nixl-fetch pull --delta-from` replaces each step's directory
by the next one's. `nixl-fetch pull --verify` makes another one beside it, whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

RUN, TENSORS, PORT, KEPT, PATIENCE = "full:0", 16, 6300, 4, 600
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "engines")]

from worlds import Child, Control  # noqa: E402

# ------------------------------------------------------------------------------ the children


class Rank:
    def __init__(self, options: dict[str, Any]) -> None:
        import fanin
        import numpy as np

        self.random = np.random.default_rng(1)
        words = options["mib"] << 19
        values = self.random.standard_normal(words, dtype=np.float32) * np.float32(0.02)
        self.flat = (values.view(np.uint32) >> 16).astype(np.uint16)
        self.server = fanin.Server(
            world_id=os.urandom(16),
            rank=0,
            world_size=1,
            base_port=PORT,
            lease=5.0,
            use_ucx=False,
            **options["server"],
        )
        parts = enumerate(self.flat.reshape(TENSORS, -1))
        self.server.put(RUN, [fanin.shard_of(f"t{i}", one, dtype="BF16") for i, one in parts])
        self.step = 0
        self.commit(0.0, 0)

    def commit(self, share: float, deltas: int) -> dict[str, Any]:
        """The next step; the seconds of its commit."""
        count = int(self.random.binomial(self.flat.size, share)) if share else 0
        self.flat[self.random.integers(0, self.flat.size, count)] += 1
        if self.step:
            self.server.begin_update(RUN)
        self.step += 1
        begun = time.perf_counter()
        self.server.commit(RUN, self.step, snapshot=True, wait=True, deltas=deltas)
        return {"step": self.step, "seconds": time.perf_counter() - begun}

    def digest(self) -> dict[str, Any]:
        return {"digest": hashlib.blake2b(self.flat).hexdigest()}


class Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        import fanin
        import numpy as np

        self.memory, self.packed = [], []
        for _ in range(2):  # whole pulls, and deltas
            self.memory.append(np.zeros(options["mib"] << 19, np.uint16))
            parts = enumerate(self.memory[-1].reshape(TENSORS, -1))
            made = (fanin.shard_of(f"t{i}", one, dtype="BF16", writable=True) for i, one in parts)
            self.packed.append(fanin.pack(made))
        how = {
            "path": "stream",
            "use_unix": False,
            "use_ucx": False,
            **options["client"],
        }
        self.client = fanin.Client([options["address"]], **how)

    def pull(self, step: int, deltas: bool, verify: bool) -> dict[str, Any]:
        begun = time.perf_counter()
        result = self.client.pull_into(
            RUN,
            self.packed[deltas],
            step=step,
            timeout=PATIENCE,
            deltas=deltas,
            verify=verify,
        )
        took = time.perf_counter() - begun
        names = ("base_step", "patch_bytes", "whole_because", "read", "apply", "verify")
        return {"seconds": took, **{name: getattr(result, name) for name in names}}

    def digest(self) -> dict[str, Any]:
        return {"digest": [hashlib.blake2b(one).hexdigest() for one in self.memory]}


def main() -> None:
    kind, options = json.loads(sys.argv[1])
    control, made = Control(), {"rank": Rank, "worker": Worker}[kind](options)
    control.say("here")
    control.obey(made)


# ------------------------------------------------------------------------------- the measure


def child(stack: ExitStack, inside: list[str], library: str, kind: str, options: Any) -> Child:
    """A rank or a worker, which ends with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltas-")))
    own, variables = str(Path(__file__).resolve()), {"FANIN_LIBRARY": library}
    one = Child(kind, own, [kind, options], folder, inside, **variables)
    stack.callback(one.close)
    one.expect("here", PATIENCE)
    return one


def row(rank: Child, worker: Child, share: float, rounds: int) -> dict[str, Any]:
    """Seconds of each kind of pull, medians of *rounds* steps, and of commits."""

    def pull(step: int, deltas: bool, verify: bool) -> dict[str, Any]:
        return worker.do("pull", step=step, deltas=deltas, verify=verify)

    pull(rank.do("commit", share=share, deltas=KEPT)["step"], True, False)  # who asks is there
    took: dict[str, list[float]] = {}
    patches = []
    for number in range(rounds):
        for verify in (False, True):
            step = rank.do("commit", share=share, deltas=KEPT)["step"]
            order = (False, True) if number % 2 == 0 else (True, False)
            for deltas in order:
                result = pull(step, deltas, verify)
                if deltas and result["whole_because"]:
                    sys.exit(f"network: no delta, because {result['whole_because']}")
                name = ("delta" if deltas else "whole") + (" verified" if verify else "")
                took.setdefault(name, []).append(result["seconds"])
                if deltas:
                    patches.append(result["patch_bytes"])
                    for part in ("read", "apply") if not verify else ():
                        took.setdefault(part, []).append(result[part])
    if worker.do("digest")["digest"] != [rank.do("digest")["digest"]] * 2:
        sys.exit("network: the worker's memory is not the rank's")
    for _ in range(rounds):
        for deltas in (0, KEPT):
            name = "commit with a patch" if deltas else "commit"
            took.setdefault(name, []).append(
                rank.do("commit", share=share, deltas=deltas)["seconds"]
            )
    middle = {name: statistics.median(values) for name, values in took.items()}
    return {
        "share": share,
        "patch_bytes": statistics.median(patches),
        "seconds": middle,
    }


def directory_row(rank: Child, pull: list[str], place: Path, arguments: Any, share: float) -> Any:
    """The same of the command's pulls into directories, each by a process of its own."""
    delta, whole = place / "delta", place / "whole"
    took: dict[str, list[float]] = {}
    patches = []

    def run(directory: Path, *options: str) -> dict[str, Any]:
        words = [*pull, str(directory), *options, "--path", "stream", "--json", "--quiet"]
        begun = time.perf_counter()
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
        told: dict[str, Any] = json.loads(done.stdout)
        return told | {"seconds": time.perf_counter() - begun}

    def pull_one(deltas: bool) -> None:
        if not deltas:
            shutil.rmtree(whole, ignore_errors=True)
        options = ["--delta-from", str(delta)] if deltas else ["--verify"]
        told = run(delta if deltas else whole, *options)
        if deltas and told["whole_because"]:
            sys.exit(f"network: no delta, because {told['whole_because']}")
        kind = "delta" if deltas else "whole"
        took.setdefault(kind, []).append(told["seconds"])
        for part in ("read", "verify", "write"):
            took.setdefault(f"{kind}: {part}", []).append(told["phases_ns"][part] / 1e9)
        if deltas:
            patches.append(told["patch_bytes"])

    rank.do("commit", share=share, deltas=KEPT)
    run(delta, "--delta-from", str(delta))
    for number in range(arguments.rounds):
        rank.do("commit", share=share, deltas=KEPT)
        for deltas in (False, True) if number % 2 == 0 else (True, False):
            pull_one(deltas)
        files = [(one / "model.safetensors").read_bytes() for one in (delta, whole)]
        if files[0] != files[1]:
            sys.exit("network: the two directories differ")
    for one in (delta, whole):
        shutil.rmtree(one)
    middle = {name: statistics.median(values) for name, values in took.items()}
    worst = {name: max(values) for name, values in took.items()}
    return {
        "share": share,
        "patch_bytes": statistics.median(patches),
        "seconds": middle,
        "worst": worst,
    }


def measure(link: Any, arguments: Any, served: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each rate, without TLS and with it, and share of changed elements."""
    found = []
    built = Path(arguments.nixl_fetch).parents[1] / "libfanin.so.0"
    library = os.environ.get("FANIN_LIBRARY", str(built))
    ways = {"TCP": None} | ({"TLS": arguments.secret_file} if arguments.secret_file else {})
    for gbits in arguments.rates:
        link.shape(gbits)
        for way, secret in ways.items():
            shown = {"secret_file": secret} if secret else {}
            server = served | (shown or {"insecure": True})
            address = f"{link.rank}:{PORT}"
            with ExitStack() as stack:
                common = {"mib": arguments.mib, "server": server, "client": shown}
                options = common | {"address": address}
                rank = child(stack, link.inside(0), library, "rank", options)
                if arguments.directory:
                    pull = [arguments.nixl_fetch, "pull", address, RUN]
                    pull += ["--secret-file", secret] if secret else []
                    place = Path(arguments.directory)
                    for share in arguments.shares:
                        told = directory_row(
                            rank, link.inside(1, *pull), place, arguments, share / 100
                        )
                        found.append({"gbits": gbits, "way": way, "mib": arguments.mib, **told})
                        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                    continue
                worker = child(stack, link.inside(1), library, "worker", options)
                for share in arguments.shares:
                    one = row(rank, worker, share / 100, arguments.rounds)
                    found.append({"gbits": gbits, "way": way, "mib": arguments.mib, **one})
                    tell(found[-1])
    return found


def tell(one: dict[str, Any]) -> None:
    """One row, as text."""
    s = one["seconds"]
    plain, proven = s["whole"] / s["delta"], s["whole verified"] / s["delta verified"]
    print(
        f"{one['gbits']:g} Gb/s {one['way']}, {one['mib']} MiB, {one['share']:.1%} changed: "
        f"whole {s['whole']:.3f} s, delta {s['delta']:.3f} s (read {s['read']:.3f}, apply "
        f"{s['apply']:.3f}), {plain:.1f} x; verified {s['whole verified']:.3f} s, "
        f"{s['delta verified']:.3f} s, {proven:.1f} x; patch {one['patch_bytes'] / 1e6:.1f} MB; "
        f"commit {s['commit']:.3f} s, with a patch {s['commit with a patch']:.3f} s",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
