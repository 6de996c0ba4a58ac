# SPDX-License-Identifier: Apache-2.0
"""weights_measure.py [ROUNDS]: how long a whole model's update holds up a vLLM on this machine's
CPUs, beside vLLM's own `reload_weights` of the same weights from a file in the page cache.

The two alternate; medians are printed, with the bytes. The trainer is two FSDP2 ranks, which do
nothing meanwhile. NIXL_FETCH is not needed; FANIN_LIBRARY and PYTHONPATH as for the tests.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from full_models import save_full_model
from full_trainer import FullTrainer

BIG = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        TOKENIZERS_PARALLELISM="false",
    )
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = save_full_model(scratch / "model", "qwen3", **BIG)
        size = (model / "model.safetensors").stat().st_size
        with FullTrainer(model, scratch / "run", world_size=2, record=True) as trainer:
            trainer.wait_ready()
            step = int(trainer.step()["step"])
            measure(model, trainer, step, rounds, size)


def measure(model: Path, trainer: FullTrainer, step: int, rounds: int, size: int) -> None:
    from fanin.vllm import register
    from vllm import LLM

    register()
    engine = LLM(
        str(model),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        weight_transfer_config={"backend": "fanin"},
    )
    engine.init_weight_transfer_engine({"init_info": {"trainer": str(trainer.info)}})
    file = {"weights_path": str(trainer.record(step))}
    pulls, reloads = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        engine.start_weight_update()
        engine.update_weights({"update_info": {"step": step}})
        engine.finish_weight_update(f"step-{step}")
        between = time.perf_counter()
        engine.collective_rpc("reload_weights", kwargs=file)
        pulls.append(between - start)
        reloads.append(time.perf_counter() - between)
    update, reload = statistics.median(pulls[1:]), statistics.median(reloads[1:])
    print(
        f"{size / 1e6:.1f} MB, medians of {rounds}: update {update:.3f} s (first {pulls[0]:.3f}), "
        f"reload_weights from the page cache {reload:.3f} s (first {reloads[0]:.3f})"
    )
    sys.stdout.flush()
    trainer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
