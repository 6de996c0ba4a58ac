# SPDX-License-Identifier: Apache-2.0
"""FSDP2 trainers that train in place while a worker pulls without pause.

Each world trains 25 steps with AdamW. Whatever the worker pulled, as directories or into tensors,
must be byte for byte what torch's own gather gave after that step, and PEFT with a pulled directory
must compute what the trainers' model computes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from fsdp_models import adapted, base_model, logits
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from worlds import World, child, digests

STEPS = 25
FEWEST_STEPS = 4  # of those trained, seen by the worker


@dataclasses.dataclass
class Case:
    """A world, and how its worker pulls."""

    name: str
    size: int
    r: int
    layout: str = "fsdp"
    kind: str = "qwen2"
    adapter: str = "default"
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    client: dict[str, Any] = dataclasses.field(default_factory=dict)
    pull: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounded: bool = False
    path: str | None = None

    def options(self, record: pathlib.Path) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "r": self.r,
            "layout": self.layout,
            "adapter": self.adapter,
            "server": self.server,
            "record": str(record),
        }


CASES = [
    Case("two-ranks", 2, 8),
    Case("four-ranks-empty-shards", 4, 3, kind="llama", adapter="run7", server={"run": "7"}),
    Case("three-ranks-uneven", 3, 5),
    Case("hsdp-2x2", 4, 3, layout="hsdp", kind="llama"),
    Case("fsdp-tp-2x2", 4, 3, layout="fsdp+tp"),
    Case("snapshot-bf16", 2, 8, server={"snapshot": True, "cast": "BF16"}, rounded=True),
    Case("snapshot-tp", 2, 5, layout="fsdp+tp", server={"snapshot": True}),
    Case(
        "stream-rounded-by-worker",
        2,
        3,
        server={"use_ucx": False},
        client={"path": "stream", "use_unix": False},
        pull={"dtype": "BF16"},
        rounded=True,
        path="stream",
    ),
]


def state_of(record: pathlib.Path, step: int, rounded: bool) -> dict[str, torch.Tensor]:
    """What torch gathered after a step, as the worker is to see it."""
    state = load_file(record / f"step-{step}.safetensors")
    return {name: value.bfloat16() if rounded else value for name, value in state.items()}


def check_pulls(results: dict[str, Any], record: pathlib.Path, rounded: bool) -> None:
    """All pulls, against the record."""
    expected: dict[int, dict[str, dict[str, str]]] = {}
    for number, pull in enumerate(results["pulls"]):
        step = pull["step"]
        if step not in expected:
            state = state_of(record, step, rounded)
            right = {name: value[:, value.shape[1] // 2 :] for name, value in state.items()}
            expected[step] = {"whole": digests(state), "right": digests(right)}
        whole = expected[step]["right" if pull["how"] == "columns" else "whole"]
        wrong = [name for name in whole if pull["digests"].get(name) != whole[name]]
        assert pull["digests"].keys() == whole.keys(), f"pull {number}: other tensors"
        assert not wrong, (
            f"pull {number} ({pull['how']}, {pull['rule']}, step {step}): {len(wrong)} of "
            f"{len(whole)} tensors differ, the first {wrong[0]}"
        )


def check_peft(
    directory: str, options: dict[str, Any], state: dict[str, torch.Tensor]
) -> torch.Tensor:
    """PEFT loads the directory without a complaint; its logits are those of the gathered state."""
    reference = adapted({**options, "adapter": "default"})
    found = set_peft_model_state_dict(reference, {n: v.float() for n, v in state.items()})
    assert not found.unexpected_keys
    loaded = PeftModel.from_pretrained(base_model(options["kind"]), directory)
    assert loaded.peft_config["default"].r == options["r"]
    assert (
        loaded.peft_config["default"].target_modules
        == reference.peft_config["default"].target_modules
    )
    ours, theirs = logits(loaded.eval()), logits(reference.eval())
    assert torch.equal(ours, theirs), f"logits differ: {(ours - theirs).abs().max()}"
    return ours


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pulled_adapter_is_one_step(case: Case, tmp_path: pathlib.Path) -> None:
    record, out = tmp_path / "record", tmp_path / "out"
    record.mkdir()
    out.mkdir()
    options = case.options(record)
    with World(case.size, options, tmp_path / "world") as world:
        wishes = {
            "addresses": world.addresses(),
            "run": case.server.get("run", "0"),
            "final": STEPS,
            "out": str(out),
            "client": case.client,
            "pull": case.pull,
        }
        with child("worker", "fsdp_worker.py", wishes, tmp_path) as worker:
            worker.expect("pulling")
            world.do("train", first=2, last=STEPS)
            worker.tell("stop")
            worker.expect("pulled")
            assert worker.wait() == 0, worker.tail()
        world.do("evaluate")
        world.tell("end", how="close, destroy")
        world.expect("ending")
        assert world.wait() == [0] * case.size

    results = json.loads((out / "results.json").read_text())
    pulls = results["pulls"]
    steps = {pull["step"] for pull in pulls}
    assert pulls[-1]["step"] == STEPS and pulls[-1]["how"] == "directory"
    assert len(steps) >= FEWEST_STEPS, f"the worker saw steps {sorted(steps)} only"
    assert {pull["how"] for pull in pulls} == {"directory", "tensors", "columns"}
    if case.path:
        assert {pull["path"] for pull in pulls} == {case.path}
    check_pulls(results, record, case.rounded)

    seen = {pull["step"]: pull["directory"] for pull in pulls if "directory" in pull}
    for step in sorted(seen):
        ours = check_peft(seen[step], options, state_of(record, step, case.rounded))
    trainer = torch.load(record / "logits.pt")
    if case.rounded:  # other numbers, of which check_pulls() has compared each
        assert (ours - trainer).norm() < 0.05 * trainer.norm()
    elif case.layout == "fsdp+tp":  # sums in another order
        assert torch.allclose(ours, trainer, rtol=0.05, atol=1e-4)
    else:
        assert torch.equal(ours, trainer), f"logits differ: {(ours - trainer).abs().max()}"
