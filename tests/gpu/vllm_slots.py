#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vllm_slots.py [--device cuda:0|cpu]

The tests of tests/engines/test_vllm_slots.py that are not of host memory, with the stacks of
vLLM's own LoRA classes on a GPU: what goes into a slot is learnt, proven, pulled, scaled and
activated there by vLLM's own manager, and held against what vLLM's own load of the same adapter
makes. Dense models, experts, fused experts, both formats, TP2 and EP2.

Needs PyTorch, vLLM, pytest, the package (PYTHONPATH) and its library (FANIN_LIBRARY); exit status
77 without. The last line is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "engines"))

try:
    import pytest
    import slots_engine
    import test_vllm_slots as tests
    import torch
    import vllm.lora.worker_manager  # noqa: F401
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

Case = tuple[str, Callable[[pathlib.Path], None]]


def cases(device: str) -> Iterator[Case]:
    loaded = [
        (name, engine, rank, {}, None) for name, engine in tests.ENGINES.items() for rank in (4, 8)
    ]
    scaling = {"alpha_pattern": {"layers.1.mlp.down_proj": 9}, "use_rslora": True}
    loaded.append(("narrowed", slots_engine.Engine(dtype=torch.bfloat16), 4, {}, "BF16"))
    loaded.append(("scaled by module", slots_engine.Engine(), 4, scaling, None))
    for name, engine, rank, fields, dtype in loaded:

        def loads(
            folder: pathlib.Path,
            engine: slots_engine.Engine = dataclasses.replace(engine, device=device),  # noqa: B008
            rank: int = rank,
            fields: dict[str, Any] = fields,
            dtype: str | None = dtype,
        ) -> None:
            tests.test_a_slot_is_what_vllm_loads(folder, engine, rank, fields, dtype)

        yield f"{name}, rank {rank}", loads
    here = slots_engine.Engine(device=device)

    def bring_back(folder: pathlib.Path) -> None:
        tests.test_an_adapter_that_left_its_slot_and_vllms_cache_comes_back()

    def untouched(folder: pathlib.Path) -> None:
        tests.test_a_slot_in_use_is_not_touched_by_what_comes()

    def failing(folder: pathlib.Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            tests.test_a_copy_that_fails_leaves_no_adapter(patch)

    # Engines that these make are on the device, too.
    tests.Engine = lambda *given, **fields: dataclasses.replace(  # type: ignore[misc,assignment]
        slots_engine.Engine(*given, **fields), device=here.device
    )
    yield "left and came back", bring_back
    yield "a slot in use", untouched
    yield "a copy that fails", failing
    yield "a worker's jobs", tests.test_a_worker_learns_and_pulls


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    passed = failed = 0
    for name, case in cases(options.device):
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vllm-slots-") as folder:
            try:
                case(pathlib.Path(folder))
                passed += 1
                print(f"passed  {name} ({time.monotonic() - start:.1f} s)", flush=True)
            except Exception:
                failed += 1
                print(f"failed  {name}\n{traceback.format_exc()[-3000:]}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
