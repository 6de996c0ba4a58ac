# SPDX-License-Identifier: Apache-2.0
"""An inference worker without an engine: pulls each step as it comes, and says what came.

    python engine.py /tmp/demo                       # what trainer.py --info wrote
    python engine.py 10.0.0.7:6000,10.0.0.7:6001     # or the ranks themselves
    python engine.py /tmp/demo --load tiny           # and loads each with PEFT

Every step is a directory of its own, and the one before is removed only when its reader is done.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import fanin
from fanin.info import addresses_of


def load(base: Any, directory: Path) -> None:
    """The adapter on its base model, by PEFT; what it computes for one prompt."""
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, directory).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(16).unsqueeze(0)).logits
    print(f"    loaded; next token of the prompt: {int(logits[0, -1].argmax())}")
    model.unload()


def base_model(name: str) -> Any:
    """The model that trainer.py trains."""
    from trainer import base_model as made

    return made(None if name == "tiny" else name)


def follow(options: argparse.Namespace, place: Path) -> None:
    base = base_model(options.load) if options.load else None
    newest = -1
    with fanin.Client(addresses_of(options.trainer)) as client:
        for _ in range(options.steps):
            directory = place / "new"
            # A step above the last one, as soon as all ranks have it.
            result = client.pull_adapter(
                options.run, directory, at_least=newest + 1, timeout=options.timeout
            )
            newest = result.step
            directory = directory.rename(place / f"step-{newest}")
            print(
                f"step {newest}: {result.bytes / 1e6:.2f} MB from {len(result.ranks)} ranks "
                f"by {result.path} in {(result.total - result.wait) * 1e3:.1f} ms",
                flush=True,
            )
            if base is not None:
                load(base, directory)
            shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", help="nixl_info.json, its directory, or host:port,host:port")
    parser.add_argument("--run", default="0")
    parser.add_argument("--steps", type=int, default=10, help="how many to pull")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a step")
    parser.add_argument("--load", help="base model for PEFT; 'tiny': the one of trainer.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fanin-example-") as place:
        try:
            follow(options, Path(place))
        except fanin.FaninError as error:
            raise SystemExit(f"engine.py: {error}") from error


if __name__ == "__main__":
    main()
