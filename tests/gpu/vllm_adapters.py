#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vllm_adapters.py [--adapters N] [--device cuda|cpu] [--logs FOLDER]

A whole vLLM on a GPU, over HTTP, with CUDA graphs, serves N (100) adapters of a Qwen3 that two
ranks publish: each pulled into a directory that vLLM loads, and then, the engine told to forget
them, each pulled straight into the layout of its LoRA slots. vLLM is batch invariant, has 8 slots
and a cache of all N, so slots are filled, left and filled again. Tokens and log probabilities of
each adapter are the same to the last bit, when it comes and once more when all are there, and when
vLLM itself loads the files of another pull; no two adapters give the same. Told is how long each
way takes.

Needs vLLM, transformers, the package (PYTHONPATH), its library (FANIN_LIBRARY), and a GPU; exit
status 77 and the reason without. The ranks' memory is on the last GPU. --device cpu rehearses it
with vLLM's build for CPUs, without graphs. The last line is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

RANKS, LORA_RANK, STEP = 2, 8, 1
HIDDEN, WIDTH, LAYERS, HEADS, KEY_HEADS, HEAD = 1024, 2816, 6, 16, 8, 64
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KEY_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KEY_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
PROMPT = [5, 9, 13, 7, 101, 44]
PATIENCE = 120.0  # seconds, for one answer


def missing(device: str) -> str:
    """Why nothing can be run here; "" if it can."""
    for name in ("torch", "transformers", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"there is no package {name}"
    import torch

    return "" if device == "cpu" or torch.cuda.is_available() else "no GPU"


# --------------------------------------------------------------------------- a trainer's rank


class Rank:
    """Its half of the rows of every tensor of every adapter; each adapter is a run of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        import fanin
        import torch

        rank, device = options["rank"], torch.device("cpu")
        if options["device"] == "cuda":
            device = torch.device("cuda", torch.cuda.device_count() - 1)
        world = bytes.fromhex(options["world"])
        self.server = fanin.Server(world_id=world, rank=rank, world_size=RANKS)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": LORA_RANK,
            "lora_alpha": 2 * LORA_RANK,
            "base_model_name_or_path": options["model"],
            "target_modules": sorted(path.rsplit(".")[-1] for path in SHAPES),
        }
        for number in range(options["adapters"]):
            run = f"lora:{number}"
            self.server.put(run, list(self._shards(number, rank, device)))
            self.server.set_metadata(run, {"peft_config": json.dumps(config)})
            self.server.commit(run, STEP)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @staticmethod
    def _shards(number: int, rank: int, device: Any) -> Iterator[Any]:
        import fanin
        import torch

        values = torch.Generator(device).manual_seed(2 * number + rank)
        for layer in range(LAYERS):
            for path, (out, into) in SHAPES.items():
                for side, shape in (("A", (LORA_RANK, into)), ("B", (out, LORA_RANK))):
                    rows = shape[0] // RANKS
                    part = torch.empty(rows, shape[1], device=device)
                    part.normal_(0, 0.05, generator=values)
                    name = f"base_model.model.model.layers.{layer}.{path}.lora_{side}.weight"
                    yield fanin.shard_of(name, part, shape=shape, offset=(rank * rows, 0))

    def run(self) -> None:
        from worlds import Control

        control = Control()
        control.say("here", address=f"127.0.0.1:{self.server.port}")
        control.hear(3600.0)
        self.server.close()


# ------------------------------------------------------------------------------- the test's side


def save_model(folder: pathlib.Path) -> pathlib.Path:
    """A random Qwen3, and a tokenizer of whole words."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from vllm_server import VOCABULARY, save_tokenizer

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Engine:
    """A vLLM over HTTP, and what the ranks' adapters answer there."""

    def __init__(self, options: argparse.Namespace, model: pathlib.Path, addresses: list[str]):
        from vllm_server import VllmServer

        environment: dict[str, str] = {}
        words = ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-loras", "8"]
        words += ["--max-cpu-loras", str(options.adapters)]
        if options.device == "cuda":
            graphs = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8]}
            words += ["--no-enforce-eager", "--compilation-config", json.dumps(graphs)]
            words += ["--gpu-memory-utilization", "0.2"]
            # vLLM's LoRA kernels else add parts in the order in which they happen to end.
            environment |= {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
        self.server = VllmServer(model, model.parent, *words, environment=environment)
        self.addresses = addresses
        self.took: dict[str, list[float]] = {}

    def load(self, number: int, landing: str) -> tuple[str, str]:
        """Pulls the adapter; its name, and how it landed."""
        name = f"a-run{number}-step{STEP}"
        body = {"lora_name": name, "trainer_addresses": self.addresses, "landing": landing}
        begun = time.perf_counter()
        self.server.ask("POST", "/load_lora_adapter_nixl", body, PATIENCE)
        self.took.setdefault(landing, []).append(1e3 * (time.perf_counter() - begun))
        told = self.server.ask("GET", "/nixl/status")["adapters"]
        (one,) = [one for one in told if one["name"] == name]
        return name, one["landing"]

    def answer(self, name: str) -> Any:
        """Tokens and their log probabilities, as JSON has them: to the last bit."""
        body = {**self.server.completion(name, PROMPT, 16), "logprobs": 1}
        (choice,) = self.server.ask("POST", "/v1/completions", body, PATIENCE)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def answers(self, count: int, landing: str) -> list[Any]:
        """Of each adapter as it comes, and again when all are there."""
        found = []
        for number in range(count):
            name, landed = self.load(number, landing)
            found.append(self.answer(name))
            assert landed == landing, f"{name} landed by {landed}, not {landing}"
        for number in range(count):
            again = self.answer(f"a-run{number}-step{STEP}")
            assert again == found[number], f"adapter {number} answers otherwise when asked again"
        return found

    def answers_of_files(self, count: int, folder: pathlib.Path) -> list[Any]:
        """Of each adapter as vLLM's own load brings it, of files that lie there."""
        import fanin

        found = []
        with fanin.Client(self.addresses) as client:
            for number in range(count):
                name, path = f"file{number}", folder / f"file{number}"
                client.pull_adapter(str(number), path)
                body = {"lora_name": name, "lora_path": str(path)}
                begun = time.perf_counter()
                self.server.ask("POST", "/v1/load_lora_adapter", body, PATIENCE)
                self.took.setdefault("file", []).append(1e3 * (time.perf_counter() - begun))
                found.append(self.answer(name))
                self.server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, PATIENCE)
        return found

    def forget(self, count: int) -> None:
        for number in range(count):
            self.server.ask("DELETE", f"/adapters/a-run{number}-step{STEP}", None, PATIENCE)


def check(options: argparse.Namespace, folder: pathlib.Path) -> None:
    from worlds import Child

    model = save_model(folder / "model")
    common = {"device": options.device, "adapters": options.adapters, "model": str(model)}
    common["world"] = os.urandom(16).hex()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            ranks.append(Child(f"rank{rank}", str(HERE), {**common, "rank": rank}, folder))
            stack.callback(ranks[-1].close)
        addresses = [one.expect("here", PATIENCE)["address"] for one in ranks]
        engine = Engine(options, model, addresses)
        stack.callback(engine.server.stop)
        try:
            engine.server.wait_ready(400.0)
            by_directory = engine.answers(options.adapters, "directory")
            assert len({json.dumps(one) for one in by_directory}) == options.adapters
            engine.forget(options.adapters)
            teach(engine)
            by_slot = engine.answers(options.adapters, "slot")
            by_file = engine.answers_of_files(options.adapters, folder)
        except BaseException:
            print(engine.server.log_end(6000), file=sys.stderr)
            raise
        for way, answers in (("slots", by_slot), ("files", by_file)):
            other = [n for n, own in enumerate(by_directory) if own != answers[n]]
            assert not other, f"adapters {other} answer otherwise from {way}"
        if options.device == "cuda":
            assert "Capturing CUDA graphs" in engine.server.log_text(), "no CUDA graph was captured"
        for landing, took in engine.took.items():
            print(f"{landing}: median {statistics.median(took):.1f} ms from request to answer")


def teach(engine: Engine) -> None:
    """The first adapter for slots goes by a directory: the engine learns the layout from it."""
    name, landed = engine.load(0, "slot")
    assert landed == "directory", f"{name} landed by {landed} before there is a layout"
    engine.answer(name)
    deadline = time.monotonic() + PATIENCE
    while not (slots := engine.server.ask("GET", "/nixl/status")["slots"])["layouts"]:
        assert time.monotonic() < deadline, f"no layout was learnt: {slots}"
        time.sleep(0.2)
    engine.forget(1)
    engine.took.pop("slot")


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        Rank(json.loads(sys.argv[1])).run()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapters", type=int, default=100, help="8 at least")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--logs", type=pathlib.Path)
    options = parser.parse_args()
    why = missing(options.device)
    if why:
        print(f"skipped: {why}")
        return 77
    with contextlib.ExitStack() as stack:
        folder = options.logs or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            check(options, folder)
        except Exception:
            traceback.print_exc()
            print("0 passed, 1 failed")
            return 1
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
