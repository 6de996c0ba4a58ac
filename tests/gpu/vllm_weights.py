#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vllm_weights.py [--parts WORD,...] [--steps N] [--rounds N] [--seconds S] [--json FILE]
                [--logs FILE] [--device cuda|cpu]

vLLM with the backend `fanin` on GPUs: whole models of two FSDP2 ranks (NCCL, a GPU each) into
engines that run with CUDA graphs. The judge is a vLLM of the same layout that loads what torch has
gathered: equal tokens, and log probabilities equal to the last bit. All but `large` run at the same
time.

  dense       Qwen3, graphs of the whole model: steps in place, addresses that hold, reading ahead
              into the device and into pinned memory, a failing update, fanin.check.weights
  compiled    the same model as vLLM runs it by default: torch.compile and piecewise graphs
  moe         Qwen3-MoE (FusedMoE) with sleep mode: steps in place; sleep of level 2, then a step
  moe-tp2     the same on two GPUs, from a worker each
  lora        Qwen3 with --enable-lora: steps in place of the model beneath vLLM's wrappers
  fp8         Qwen3 that is trained in BF16 and published in fp8 blocks: ten steps in place into an
              engine without an fp8 checkpoint; the judge loads what torch gathers, rounded whole
  fp8-ue8m0   the same with scales that are powers of two, which DeepGEMM does not round again
  fp8-moe     the same with Qwen3-MoE and sleep mode; sleep of level 2, then a step
  mla         DeepSeek-V2 (MLA and FusedMoE): steps in place
  deltas      Qwen3 that AdamW trains in F32: what a step changes, by stream, read ahead and in
              place; an engine that chooses its path reads the whole
  large       Qwen3-8B's shapes over HTTP: how long an update holds up the engine, with and without
              reading ahead, beside vLLM's own NCCL engine (alternated) and a copy within the device

Needs GPUs, vLLM, transformers, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit
status 77 and the reason without. With one GPU the trainer is one rank beside the engine, and
`moe-tp2` and `large` are left out. --device cpu rehearses `dense`, `moe`, `deltas`, `fp8` and
`fp8-ue8m0` (with FANIN_TEST_FP8_KERNEL=) and `large`, in small and without graphs, with vLLM's
build for CPUs; of `fp8-moe`, whose kernels no CPU has, what is published. The last line is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))


def missing(device: str) -> str:
    """Why nothing can be run here; "" if it can."""
    for name in ("torch", "transformers", "safetensors", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"there is no package {name}"
    return "" if gpus() or device == "cpu" else "there is no GPU"


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def last_first() -> dict[str, str]:
    """Numbers of devices differ between trainer and engine on purpose."""
    return {"CUDA_VISIBLE_DEVICES": "1,0"} if gpus() > 1 else {}


GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4]}
PLAIN: dict[str, Any] = {
    "enforce_eager": False,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.2,
    "max_num_seqs": 4,
}
PATIENCE = 150.0  # seconds, for one answer
DENSE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
MOE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
MLA = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_FP8 = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}

# ---------------------------------------------------------------------- in the engine's process


def served() -> Any:
    """The class of what runs in the engine's process."""
    from weights_engine import Served

    class OnGpu(Served):  # type: ignore[misc, valid-type]
        replayed = 0
        mem_get_info: Any = None

        def __init__(self, options: dict[str, Any], control: Any) -> None:
            import torch

            replay = torch.cuda.CUDAGraph.replay

            def counted(graph: Any) -> None:
                OnGpu.replayed += 1
                replay(graph)

            torch.cuda.CUDAGraph.replay = counted
            judged = options["options"].pop("judged", "")
            more, options["options"] = options["options"], {} if judged else options["options"]
            super().__init__(options, control)
            if judged:
                self.load(judged, more)

        def replays(self) -> int:
            return OnGpu.replayed

        def addresses(self) -> dict[str, int]:
            """Of all that kernels may read: parameters, buffers, what hangs on modules."""
            import torch

            def look(model: Any) -> dict[str, int]:
                found = {}
                for path, module in model.named_modules():
                    for owner in (module, getattr(module, "impl", None)):
                        for name, value in getattr(owner, "__dict__", {}).items():
                            if isinstance(value, torch.Tensor):
                                found[f"{path}:{name}"] = value.data_ptr()
                tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                return found | {name: tensor.data_ptr() for name, tensor in tensors.items()}

            return dict(self.engine.apply_model(look)[0])

        def scarce(self, on: bool) -> None:
            """Whether the device says that it has no memory left."""
            import torch

            told = OnGpu.mem_get_info = OnGpu.mem_get_info or torch.cuda.mem_get_info
            torch.cuda.mem_get_info = (lambda device=None: (0, told(device)[1])) if on else told

        def forget_shadow(self) -> None:
            """What is read ahead next makes its memory anew."""

            def forget(worker: Any) -> None:
                worker.weight_transfer_engine._main.shadow = None

            self.engine.collective_rpc(forget)

        def fail(self, at: int) -> None:
            """The next update fails when its layer number *at* is installed."""
            from fanin.vllm.landings import MappedLanding

            install, left = MappedLanding._install, iter(range(at))

            def failing(landing: Any, layer: Any) -> None:
                if next(left, None) is None:
                    MappedLanding._install = install
                    raise MemoryError("no memory left on the device")
                install(landing, layer)

            MappedLanding._install = failing

        def output(self, adapter: str) -> Any:
            """One prompt after the other: two in a batch were seen to give other tokens each time,
            without fanin too."""
            from weights_engine import PROMPTS, generate

            return [generate(self.engine, [], adapter, [prompt])[0] for prompt in PROMPTS]

        def load(self, model: str, options: dict[str, Any]) -> None:
            """The first time as vLLM starts, then by its own reload of a file."""
            from weights_engine import make

            if self.engine is None:
                self.engine = make(model, **options)
            else:
                self.engine.collective_rpc("reload_weights", kwargs={"weights_path": model})

    return OnGpu


def child() -> None:
    from worlds import Control

    control = Control()
    engine = served()(json.loads(sys.argv[1]), control)
    control.say("ready")
    while (what := (command := control.hear(timeout=3600.0)).pop("event")) != "exit":
        control.say("done", result=getattr(engine, what)(**command))
    if engine.engine is not None:
        engine.engine.llm_engine.engine_core.shutdown()


# ------------------------------------------------------------------------------- the test's side


def engine_class() -> Any:
    from weights_engine import Engine

    class GpuEngine(Engine):  # type: ignore[misc, valid-type]
        script = str(HERE)
        patience = PATIENCE

        def ask(self, what: str, **fields: Any) -> Any:
            return self._do(what, **fields)

        def verdicts(self) -> str:
            """How the worker fills its modules, as its log says it."""
            found = re.findall(r"published tensors, (.*?); prepared", self.log())
            return found[-1] if found else "?"

        def ways(self) -> list[str]:
            """Of each update: bytes, path, times."""
            return re.findall(r"fanin: worker \d+ of \d+: step \d+: (.*)", self.log())

    return GpuEngine


class Part:
    """One part: its folder, its trainer, engine and judges; ended together."""

    def __init__(
        self, name: str, scratch: Path, options: argparse.Namespace, told: dict[str, Any]
    ) -> None:
        self.name, self.steps, self.rounds, self.told = name, options.steps, options.rounds, told
        self.gpu = options.device == "cuda"
        self.scratch = scratch / name
        self.scratch.mkdir()
        self.stack = contextlib.ExitStack()
        self.judges = 0
        #: How the trainer quantizes, as it tells it; None: it does not.
        self.quantization: dict[str, Any] | None = None

    def say(self, text: str) -> None:
        print(f"        {self.name}: {text}", flush=True)

    def model(self, kind: str, **more: Any) -> Path:
        from full_models import save_full_model

        return save_full_model(self.scratch / "model", kind, **(more if self.gpu else {}))

    def file(self, trainer: Any, step: int) -> Path:
        """What torch has gathered of that step; rounded to fp8 if the trainer rounds it."""
        gathered = Path(trainer.record(step))
        if self.quantization is None:
            return gathered
        to = self.scratch / f"fp8-{step}"
        return to if to.exists() else rounded(gathered, to, self.quantization)

    def plain(self, options: dict[str, Any]) -> dict[str, Any]:
        """What an engine takes: on a CPU, nothing about graphs and memory."""
        if self.gpu:
            return PLAIN | options
        return {name: options[name] for name in ("hf_overrides", "load_format") if name in options}

    def trainer(self, model: Path, **more: Any) -> Any:
        from full_trainer import FullTrainer

        ranks = min(2, gpus()) if self.gpu else 2
        options = {"world_size": ranks, "device": "cuda" if self.gpu else "cpu", **more}
        return self.stack.enter_context(FullTrainer(model, self.scratch / "run", **options))

    def engine(
        self, model: Path, alone: bool = True, name: str = "engine", path: str = "", **options: Any
    ) -> Any:
        environment = last_first() if alone else {}
        if path:
            environment["FANIN_PATH"] = path
        told = self.plain(options)
        one = engine_class()(model, self.scratch / name, self.name, alone, environment, **told)
        return self.stack.enter_context(one)

    def judge(self, model: Path, alone: bool, options: dict[str, Any]) -> Any:
        """A vLLM without fanin's backend that loads *model* as it starts."""
        self.judges += 1
        name = f"judge{self.judges}"
        environment = last_first() if alone else {}
        more = self.plain(options) | {"judged": str(model)}
        one = engine_class()(Path(), self.scratch / name, name, alone, environment, **more)
        return self.stack.enter_context(one)

    def steps_in_place(self, trainer: Any, engine: Any, judge: Any, steps: int) -> None:
        """Each step of the trainer is what the engine generates with, and no step is like another.

        The judge loads their files by vLLM's own reload.
        """
        seen = []
        for _ in range(steps):
            step = int(trainer.step(record=True)["step"])
            engine.pull(step)
            judge.ask("load", model=str(self.file(trainer, step)), options={})
            output = compare(step, engine, judge)
            assert output not in seen, f"step {step} is like one before"
            seen.append(output)
        self.say(f"{steps} steps in place; {engine.verdicts()}; {engine.ways()[-1]}")

    def loaded_anew(self, trainer: Any, engine: Any, options: dict[str, Any], alone: bool) -> None:
        """The step that the engine has now is what a vLLM has that is started with its file."""
        step = trainer.published
        judge = self.judge(self.file(trainer, step), alone, options)
        compare(step, engine, judge.wait_ready())


def run_model(
    part: Part,
    model: Path,
    options: dict[str, Any],
    then: Callable[[Any, Any, Any], None],
    alone: bool = True,
    **trained: Any,
) -> None:
    """Steps in place, and what comes then with trainer, engine and judge."""
    trainer = part.trainer(model, **trained)
    engine = part.engine(model, alone, **options)
    judge = part.judge(model, alone, options)
    trainer.wait_ready()
    engine.wait_ready()
    judge.wait_ready()
    failure = engine.init(str(trainer.info), timeout=60)
    assert not failure, failure
    before = engine.ask("addresses") if alone else {}
    part.steps_in_place(trainer, engine, judge, part.steps)
    if alone:
        check_addresses(part, before, engine.ask("addresses"))
        count = engine.ask("replays")
        engine.output()
        replays = engine.ask("replays") - count
        assert replays > 0 or not part.gpu, "no CUDA graph was replayed"
        part.say(f"{len(before)} addresses hold; {replays} replays of graphs for one output")
    report = engine.check(trainer.published)
    assert "error" not in report, report["error"]
    part.say(f"fanin.check.weights: {report}")
    then(trainer, engine, judge)
    part.loaded_anew(trainer, engine, options, alone)


def check_addresses(part: Part, before: dict[str, int], after: dict[str, int]) -> None:
    moved = [name for name, at in before.items() if name in after and after[name] != at]
    assert not moved, f"moved: {moved[:8]}"
    gone = sorted(before.keys() - after.keys())
    if gone:
        part.say(f"no longer there: {gone[:8]}")


def follow(trainer: Any, engine: Any, judge: Any) -> None:
    """The engine has what the judge reloads."""
    step = trainer.published
    judge.ask("load", model=str(trainer.record(step)), options={})
    compare(step, engine, judge)


def compare(step: int, engine: Any, judge: Any) -> Any:
    """What both generate. A failure says whether bytes differ, or two runs of one engine."""
    found, wanted = engine.output(), judge.output()
    if found == wanted:
        return found
    again = engine.output() == found, judge.output() == wanted
    report = engine.check(step, poison=False)
    raise AssertionError(f"step {step}: {found}, not {wanted}; the same again: {again}; {report}")


def read_ahead(trainer: Any, engine: Any, step: int) -> None:
    engine.good("start_weight_update")
    engine.good("update_weights", {"update_info": {"step": step, "prefetch": True}})
    engine.output()  # it answers meanwhile
    engine.good("update_weights", {"update_info": {"step": step}})
    engine.good("finish_weight_update", f"step-{step}")


def dense(part: Part) -> None:
    options = {"compilation_config": GRAPHS}

    def then(trainer: Any, engine: Any, judge: Any) -> None:
        for scarce in (False, True):
            engine.ask("scarce", on=scarce)
            engine.ask("forget_shadow")
            read_ahead(trainer, engine, int(trainer.step(record=True)["step"]))
            follow(trainer, engine, judge)
            way = engine.ways()[-1]
            assert not part.gpu or ("pinned" in way) == scarce, way
            part.say(way)
        engine.ask("scarce", on=False)
        fails_and_recovers(part, trainer, engine, judge)

    run_model(part, part.model("qwen3", **DENSE), options, then)


def fails_and_recovers(part: Part, trainer: Any, engine: Any, judge: Any) -> None:
    step = int(trainer.step(record=True)["step"])
    engine.ask("fail", at=3)
    engine.good("start_weight_update")
    failure = engine.update(step)
    assert "no memory left" in failure, failure
    engine.good("start_weight_update")
    refused = engine.call("finish_weight_update", f"step-{step}")
    assert "not whole" in refused, refused
    silent = engine.refusal()
    assert "no memory left" in silent, silent
    assert not engine.update(step)
    engine.good("finish_weight_update", f"step-{step}")
    follow(trainer, engine, judge)
    part.say(f"after a failing update: {refused.splitlines()[0][:160]}; and it recovers")


def compiled(part: Part) -> None:
    run_model(part, part.model("qwen3", **DENSE), {}, lambda *_: None)


def lora(part: Part) -> None:
    options = {"compilation_config": GRAPHS, "enable_lora": True, "max_lora_rank": 8}
    run_model(part, part.model("qwen3", **DENSE), options, lambda *_: None)


def fp8(
    part: Part,
    kind: str = "qwen3",
    fields: dict[str, Any] | None = None,
    quantize: Any = "fp8",
    sleeps: bool = False,
) -> None:
    """The trainer has BF16 and publishes fp8; the engine has no fp8 checkpoint at its start."""
    import fanin
    from full_models import save_full_model

    model = save_full_model(part.scratch / "model", kind, **(fields or SMALL_FP8))
    trainer = part.trainer(model, server={"quantize": quantize}, record=True)
    with fanin.Client(trainer.wait_ready().addresses) as client:
        part.quantization = json.loads(client.metadata("full:0")["quantization"])
    if kind == "qwen3-moe" and not part.gpu:
        published_as_rounded(part, trainer)
        return
    options: dict[str, Any] = {"compilation_config": GRAPHS, "enable_sleep_mode": sleeps}
    told = {"hf_overrides": {"quantization_config": part.quantization}}
    first = rounded(model, part.scratch / "fp8-start", part.quantization)
    engine = part.engine(model, load_format="dummy", **options, **told)
    judge = part.judge(first, True, options)
    for one in (engine, judge):
        one.wait_ready()
    failure = engine.init(str(trainer.info), timeout=60)
    assert not failure, failure
    part.steps_in_place(trainer, engine, judge, 10)
    if sleeps:
        asleep(part, trainer, engine, judge)
    assert engine.ask("replays") > 0 or not part.gpu, "no CUDA graph was replayed"
    part.say(f"fanin.check.weights: {engine.check(trainer.published)}")
    part.loaded_anew(trainer, engine, options, True)


def fp8_ue8m0(part: Part) -> None:
    fp8(part, quantize={"quant_method": "fp8", "scale_fmt": "ue8m0"})


def fp8_moe(part: Part) -> None:
    fp8(part, "qwen3-moe", MOE, sleeps=True)


def rounded(source: Path, to: Path, told: dict[str, Any]) -> Path:
    """The model as whole matrices of fp8, by the tests' own rule; told: the trainer's list of
    modules that stay, and whether scales are powers of two."""
    import shutil

    from quantized import whole_in_fp8
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, to)
    tensors = load_file(source / "model.safetensors")
    stay = {f"{module}.weight" for module in told["modules_to_not_convert"]}
    found = {name: one for name, one in tensors.items() if name in stay}
    rest = {name: one for name, one in tensors.items() if name not in stay}
    found |= whole_in_fp8(rest, "_scale_inv", powers=told.get("scale_fmt") == "ue8m0")
    save_file(found, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text()) | {"quantization_config": told}
    (to / "config.json").write_text(json.dumps(config))
    return to


def published_as_rounded(part: Part, trainer: Any) -> None:
    """What a reader gets is what the judge would load, byte by byte."""
    import fanin
    import torch
    from merged import DTYPES
    from safetensors.torch import load_file

    for _ in range(2):
        step = int(trainer.step(record=True)["step"])
        wanted = load_file(part.file(trainer, step) / "model.safetensors")
        with fanin.Client(trainer.addresses) as client:
            found = client.catalog("full:0")
            into = {one.name: torch.empty(one.shape, dtype=DTYPES[one.dtype]) for one in found}
            client.pull_into("full:0", into, step=step, timeout=60)
        assert into.keys() == wanted.keys(), sorted(into.keys() ^ wanted.keys())[:8]
        for name, one in wanted.items():
            assert torch.equal(into[name].view(torch.uint8), one.view(torch.uint8)), name
    eights = sum(one.dtype is torch.float8_e4m3fn for one in into.values())
    part.say(f"{eights} of {len(into)} tensors are fp8, with the bytes of the whole ones")


def moe(part: Part) -> None:
    options = {"compilation_config": GRAPHS, "enable_sleep_mode": True}

    def then(trainer: Any, engine: Any, judge: Any) -> None:
        asleep(part, trainer, engine, judge)

    run_model(part, part.model("qwen3-moe", **MOE), options, then)


def asleep(part: Part, trainer: Any, engine: Any, judge: Any) -> None:
    """A step fills an engine that has lost its weights."""
    before = engine.ask("addresses")
    if part.gpu:
        engine.good("sleep", 2)
        engine.good("wake_up", ["weights"])
    step = int(trainer.step(record=True)["step"])
    engine.pull(step)
    if part.gpu:
        engine.good("wake_up", ["kv_cache"])
    judge.ask("load", model=str(part.file(trainer, step)), options={})
    compare(step, engine, judge)
    check_addresses(part, before, engine.ask("addresses"))
    part.say(f"asleep at level 2, woken, filled with step {step}; {engine.ways()[-1]}")


def moe_tp2(part: Part) -> None:
    options = {"compilation_config": GRAPHS, "tensor_parallel_size": 2}

    def then(trainer: Any, engine: Any, judge: Any) -> None:
        read_ahead(trainer, engine, int(trainer.step(record=True)["step"]))
        follow(trainer, engine, judge)
        part.say(engine.ways()[-1])

    run_model(part, part.model("qwen3-moe", **MOE), options, then, alone=False)


def mla(part: Part) -> None:
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV2Config
    from vllm_server import save_tokenizer

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(DeepseekV2Config(**MLA), dtype=torch.bfloat16)
    where = part.scratch / "model"
    model.save_pretrained(where)
    save_tokenizer(where)
    options = {"compilation_config": GRAPHS}
    run_model(part, where, options, lambda *_: None, train=False)


def deltas(part: Part) -> None:
    model, options = part.model("qwen3", **DENSE), {"compilation_config": GRAPHS}
    server = {"snapshot": True, "cast": "BF16", "deltas": 4}
    trainer = part.trainer(model, dtype="float32", lr=1e-6, record=True, server=server)
    streaming = part.engine(model, name="streaming", path="stream", **options)
    choosing = part.engine(model, name="choosing", **options)
    judge = part.judge(model, True, options)
    trainer.wait_ready()
    for one in (streaming, choosing, judge):
        one.wait_ready()

    def arrives(engine: Any, ahead: bool) -> str:
        step = int(trainer.step()["step"])
        read_ahead(trainer, engine, step) if ahead else engine.pull(step)
        judge.ask("load", model=str(trainer.record(step)), options={})
        compare(step, engine, judge)
        part.say(engine.ways()[-1])
        return str(engine.ways()[-1])

    for ahead in (True, False):
        failure = streaming.init(str(trainer.info), **({} if ahead else {"deltas": True}))
        assert not failure, failure
        ways = [arrives(streaming, ahead) for _ in range(4)]
        since = [f"since step {trainer.published - 4 + at}" in way for at, way in enumerate(ways)]
        assert since == [False, True, True, True], ways
        assert all("by stream" in way for way in ways), ways
    failure = choosing.init(str(trainer.info), deltas=True)
    assert not failure, failure
    ways = [arrives(choosing, False) for _ in range(2)]
    own = "cuda_ipc" if part.gpu else "cma"
    assert all(own in way and "since" not in way for way in ways), ways


# ------------------------------------------------------------------------------------- how long


def save_config(directory: Path, shapes: dict[str, Any]) -> Path:
    """A model without a checkpoint."""
    from transformers import Qwen3Config
    from vllm_server import save_tokenizer

    config = Qwen3Config(**shapes, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    config.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def server(part: Part, model: Path, backend: str) -> Any:
    from vllm_server import VllmServer

    scratch = part.scratch / backend
    scratch.mkdir()
    words = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "8192"]
    words += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if part.gpu:
        words += ["--no-enforce-eager", "--compilation-config", json.dumps(GRAPHS)]
        words += ["--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.15"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", **last_first()}
    one = VllmServer(model, scratch, *words, environment=environment, adapters=False)
    return part.stack.enter_context(one)


class Stalls:
    """A request that streams tokens through an update: how long none came."""

    def __init__(self, engine: Any) -> None:
        from vllm_server import TokenStream

        self._stream = TokenStream(engine, "base", [5, 9, 13], 6000)
        self._stream.wait_for(20)

    def since(self, start: float) -> float:
        """The longest time without a token since *start*, of time.monotonic(). Ends the stream."""
        self._stream.wait_for(len(self._stream.tokens) + 5)
        came = [one for one in self._stream.came if one >= start]
        before = [one for one in self._stream.came if one < start][-1:]
        times = before + came
        self._stream.close()
        return max(b - a for a, b in zip(times, times[1:], strict=False))


def large(part: Part) -> None:
    model = save_config(part.scratch / "model", QWEN3_8B if part.gpu else QWEN3_8B | SMALL)
    ours = server(part, model, "fanin")
    theirs = server(part, model, "nccl") if part.gpu else ours
    trainer = part.trainer(model, dummy=True, train=False)
    trainer.wait_ready()
    ours.wait_ready()
    theirs.wait_ready()
    info = {"trainer": str(trainer.info), "timeout": 60}
    begun = time.monotonic()
    ours.ask("POST", "/init_weight_transfer_engine", {"init_info": info}, 120)
    part.say(f"init in {time.monotonic() - begun:.2f} s")
    if part.gpu:
        trainer.do("nccl_begin", url=theirs.url)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(part.rounds + 1):  # the first is not counted
        step = int(trainer.step(record=False)["step"])
        update(ours, step, found)
        if part.gpu:
            theirs_once(trainer, theirs, found)
        step = int(trainer.step(record=False)["step"])
        ahead(ours, step, found)
    figures = {name: statistics.median(times[1:]) for name, times in found.items()}
    figures |= {f"{name}, first": times[0] for name, times in found.items()}
    figures |= {f"{name}, all": times[1:] for name, times in found.items()}
    for line in re.findall(r"fanin: worker.*", ours.log_text())[-8:]:
        part.say(line[:200])
    trainer.close()
    theirs.stop()
    ours.stop()
    if part.gpu:
        figures["copies"] = device_copy()
    part.told["large"] = figures
    for name, value in figures.items():
        part.say(f"{name}: {value}")


def post(engine: Any, path: str, **body: Any) -> Any:
    return engine.ask("POST", path, body or None, 120)


def workers_of(engine: Any) -> list[dict[str, Any]]:
    """What each worker says of its updates."""
    from fanin.engine.weights_state import METHOD

    return list(post(engine, "/collective_rpc", method=METHOD)["results"])


def wait_ahead(engine: Any) -> None:
    """Blocks until all workers have the step beside their model."""
    end = time.monotonic() + PATIENCE
    while True:
        workers = workers_of(engine)
        states = {one["ahead"]["state"] for one in workers}
        if states == {"ready"}:
            return
        assert "failed" not in states and time.monotonic() < end, workers
        time.sleep(0.05)


def update(engine: Any, step: int, found: dict[str, list[float]]) -> None:
    stalls = Stalls(engine)
    start = time.monotonic()
    post(engine, "/pause?mode=keep")
    paused = time.monotonic()
    post(engine, "/start_weight_update")
    post(engine, "/update_weights", update_info={"step": step})
    post(engine, "/finish_weight_update", weight_version=f"step-{step}")
    updated = time.monotonic()
    post(engine, "/resume")
    found["fanin: start to finish"].append(updated - paused)
    found["fanin: pause to resume"].append(time.monotonic() - start)
    found["fanin: no token for"].append(stalls.since(start))


def ahead(engine: Any, step: int, found: dict[str, list[float]]) -> None:
    stalls = Stalls(engine)
    begun = time.monotonic()
    post(engine, "/start_weight_update")
    post(engine, "/update_weights", update_info={"step": step, "prefetch": True})
    wait_ahead(engine)
    found["read ahead: longest time without a token meanwhile"].append(stalls.since(begun))
    stalls = Stalls(engine)
    start = time.monotonic()
    post(engine, "/pause?mode=keep")
    paused = time.monotonic()
    post(engine, "/update_weights", update_info={"step": step})
    updated = time.monotonic()
    post(engine, "/finish_weight_update", weight_version=f"step-{step}")
    finished = time.monotonic()
    post(engine, "/resume")
    found["read ahead: the update alone"].append(updated - paused)
    found["read ahead: update and finish"].append(finished - paused)
    found["read ahead: pause to resume"].append(time.monotonic() - start)
    found["read ahead: no token for"].append(stalls.since(start))
    installed = max(one["last"]["install"] for one in workers_of(engine))
    found["read ahead: the worker installs"].append(installed)


def theirs_once(trainer: Any, engine: Any, found: dict[str, list[float]]) -> None:
    stalls = Stalls(engine)
    start = time.monotonic()
    post(engine, "/pause?mode=keep")
    paused = time.monotonic()
    trainer.do("nccl_send")
    updated = time.monotonic()
    post(engine, "/resume")
    found["nccl: start to finish"].append(updated - paused)
    found["nccl: pause to resume"].append(time.monotonic() - start)
    found["nccl: no token for"].append(stalls.since(start))


COPY = """
import json, statistics, time, torch
torch.cuda.set_device(1)
shapes = json.loads(input())
old = [torch.empty(s, dtype=torch.bfloat16, device="cuda").normal_() for s in shapes]
new = [torch.empty_like(t) for t in old]
took = []
for _ in range(11):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for a, b in zip(new, old):
        a.copy_(b, non_blocking=True)
    torch.cuda.synchronize()
    took.append(time.perf_counter() - start)
size = sum(t.numel() * 2 for t in old)
del new, old
torch.cuda.empty_cache()
one, two = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
whole = []
for _ in range(11):
    torch.cuda.synchronize()
    start = time.perf_counter()
    one.copy_(two)
    torch.cuda.synchronize()
    whole.append(time.perf_counter() - start)
took, whole = statistics.median(took), statistics.median(whole)
print(json.dumps({"bytes": size, "by tensor": took, "whole": whole}))
"""


def device_copy() -> Any:
    """Seconds of a copy within the device: of as many bytes at once, and by vLLM's tensors."""
    import subprocess

    h, f, heads, kv, d = 4096, 12288, 32, 8, 128
    layer = [[(heads + 2 * kv) * d, h], [h, heads * d], [2 * f, h], [h, f], [h], [h], [d], [d]]
    shapes = [[151936, h], *(36 * layer), [h], [151936, h]]
    done = subprocess.run(
        [sys.executable, "-c", COPY],
        input=json.dumps(shapes) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------ main

PARTS: dict[str, Callable[[Part], None]] = {
    "dense": dense,
    "compiled": compiled,
    "moe": moe,
    "moe-tp2": moe_tp2,
    "lora": lora,
    "fp8": fp8,
    "fp8-ue8m0": fp8_ue8m0,
    "fp8-moe": fp8_moe,
    "mla": mla,
    "deltas": deltas,
    "large": large,
}
ALONE = {"large"}
ON_TWO = {"moe-tp2", "large"}
ON_CPU = {"dense", "moe", "deltas", "fp8", "fp8-ue8m0", "fp8-moe", "large"}


def one_part(name: str, scratch: Path, options: argparse.Namespace, told: dict[str, Any]) -> bool:
    start = time.monotonic()
    part = Part(name, scratch, options, told)
    try:
        with part.stack:
            PARTS[name](part)
    except Exception:
        text = "".join(f"    | {line}\n" for line in traceback.format_exc().splitlines()[-60:])
        print(f"failed  {name} ({time.monotonic() - start:.0f} s)\n{text}", flush=True)
        return False
    print(f"passed  {name} ({time.monotonic() - start:.0f} s)", flush=True)
    return True


def keep_logs(scratch: Path, path: str) -> None:
    """The ends of all logs, in one file."""
    with open(path, "w", encoding="utf-8") as file:
        for log in sorted(scratch.rglob("*.log")):
            text = log.read_text(errors="replace")
            said = [line for line in text.splitlines() if "fanin" in line]
            file.write(f"==== {log.relative_to(scratch)}\n" + "\n".join(said[:60]))
            file.write("\n---- its end\n" + text[-12000:] + "\n")


def rounds_of(names: list[str], device: str) -> Iterator[list[str]]:
    """What runs at the same time."""
    if device == "cpu":
        yield from ([name] for name in names)
        return
    together = [name for name in names if name not in ALONE]
    if together:
        yield together
    for name in names:
        if name in ALONE:
            yield [name]


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        child()
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--json")
    parser.add_argument("--logs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    why = missing(options.device)
    if why:
        print(f"skipped: {why}")
        return 77
    # Here, because parts are threads, and packages that import as they are used want one.
    import full_models
    import full_trainer  # noqa: F401
    import transformers
    import vllm_server  # noqa: F401
    import weights_engine  # noqa: F401

    assert transformers.AutoModelForCausalLM and transformers.DeepseekV2Config
    assert full_models.CONFIGS
    names = [name for name in PARTS if name in options.parts.split(",")]
    if options.device == "cpu":
        names = [name for name in names if name in ON_CPU]
    elif gpus() < 2:
        names = [name for name in names if name not in ON_TWO]
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-weights-") as folder:
        good = run_parts(names, Path(folder), options, told)
        if options.logs:
            keep_logs(Path(folder), options.logs)
    if options.json:
        Path(options.json).write_text(json.dumps({"parts": good, **told}, indent=1))
    passed = sum(good.values())
    print(f"{passed} passed, {len(good) - passed} failed", flush=True)
    # Parts for which the time was too short are still there, and their children with them.
    os._exit(int(passed != len(good)))


def run_parts(
    names: list[str], scratch: Path, options: argparse.Namespace, told: dict[str, Any]
) -> dict[str, bool]:
    """Which parts have passed; what has not ended in time has not."""
    end = time.monotonic() + options.seconds
    good = dict.fromkeys(names, False)
    for together in rounds_of(names, options.device):
        pool = concurrent.futures.ThreadPoolExecutor(len(together))
        ends = {pool.submit(one_part, n, scratch, options, told): n for n in together}
        done, late = concurrent.futures.wait(ends, max(end - time.monotonic(), 0))
        good |= {ends[one]: one.result() for one in done}
        for one in late:
            print(f"failed  {ends[one]}: not done in {options.seconds:.0f} s", flush=True)
        if late:
            break
    return good


if __name__ == "__main__":
    sys.exit(main())
