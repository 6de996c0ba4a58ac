# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server that pulls whole models, as `fanin.sync` drives it and by its own routes.

One server for each layout. The tests of the first run in order, each on what the earlier ones left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fanin.check
import pytest
import torch
from fanin.sglang import LOADER, Request
from fanin.sglang.request import encode
from fanin.sync import Registry, SyncError
from full_models import save_full_model
from full_trainer import FullTrainer
from sglang_server import BrokenLink, SGLangServer, generation, needs_sglang
from vllm_server import Refused

pytestmark = needs_sglang

PROMPTS = ([5, 9, 13, 17, 21], [200, 3, 77])
COUNT = 8
STEPS = 20
TORN = "the weights are not whole"


class Place:
    """A trainer of two FSDP2 ranks, and an engine."""

    def __init__(self, scratch: Path, kind: str, tied: bool, ranks: int = 1) -> None:
        self.scratch, self.ranks, self.launches = scratch, ranks, 0
        self.model = save_full_model(scratch / "model", kind, tied=tied)
        variables = {"FANIN_REQUIRE_STEP": "1"} if ranks == 1 else {}
        self.engine = SGLangServer(self.model, scratch, ranks=ranks, **variables)
        try:
            self.launch()
            self.engine.wait_ready()
        except BaseException:
            self.engine.stop()
            raise

    def launch(self) -> None:
        """The trainer is started, or started again, with other values than before."""
        if self.launches:
            self.trainer.close()
        self.launches += 1
        self.trainer = FullTrainer(
            self.model,
            self.scratch / "run",
            world_size=2,
            record=True,
            digests=True,
            step=100 * self.launches,
            seed=self.launches,
            server={"use_ucx": False},
        )
        self.trainer.wait_ready()

    def close(self) -> None:
        try:
            self.engine.stop()
        finally:
            self.trainer.close()

    def step(self) -> int:
        return int(self.trainer.step()["step"])

    def registry(self, trainer: Any = None, **options: Any) -> Registry:
        registry = Registry(trainer or str(self.trainer.info), **({"timeout": 120} | options))
        registry.add(self.engine.url)
        return registry

    def update(self, step: int, trainer: Any = None, **more: Any) -> tuple[int, str]:
        """By hand, the middle of an update: status and message."""
        request = Request(
            trainer=trainer or str(self.trainer.info), step=step, timeout=more.pop("timeout", 30)
        )
        body = {
            "serialized_named_tensors": [encode(request)] * self.ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "abort_all_requests": False,
            **more,
        }
        status, answer = self.engine.request(
            "POST", "/update_weights_from_tensor", body, timeout=120
        )
        return status, str(answer["message"] if "message" in answer else answer)

    def attempt(self, step: int, trainer: Any = None, **more: Any) -> tuple[int, str]:
        """A whole update by hand that fails, and leaves the weights that were there."""
        assert self.engine.post("/begin_weight_update")["success"]
        told = self.update(step, trainer, **more)
        assert self.engine.post("/end_weight_update")["success"]
        return told

    def seen(self) -> Any:
        """What a user sees of the weights; nothing is left of what was computed before."""
        return self.engine.seen(PROMPTS, COUNT)

    def load(self, step: int) -> None:
        """SGLang's own loading of what PyTorch has gathered of a step."""
        body = {"model_path": str(self.trainer.record(step)), "weight_version": f"disk-{step}"}
        assert self.engine.post("/update_weights_from_disk", **body)["success"]
        assert self.engine.version() == f"disk-{step}"

    def from_disk(self, step: int) -> Any:
        """What a user sees after that."""
        self.load(step)
        return self.seen()


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """With so many ranks of tensor parallelism. The one is ended before the other begins."""
    kind, tied = ("qwen3", True) if request.param == 1 else ("qwen2", False)
    one = Place(tmp_path_factory.mktemp("sglang"), kind, tied, request.param)
    yield one
    one.close()


ALONE = pytest.mark.parametrize("place", [1], indirect=True)
PAIR = pytest.mark.parametrize("place", [2], indirect=True)


@pytest.fixture(autouse=True)
def tell_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """The end of the server's log is among what a failing test shows."""
    yield
    one = request.node.funcargs.get("place")
    if one is not None:
        print(one.engine.log_end())


@ALONE
def test_requests_wait_for_a_first_step(place: Place) -> None:
    with pytest.raises(Refused, match="503.*only its checkpoint"):
        place.engine.output(PROMPTS, COUNT)
    assert place.engine.request("GET", "/health", None, timeout=60)[0] == 200


@ALONE
def test_each_step_is_what_a_checkpoint_of_it_is(place: Place) -> None:
    """Tokens, log probabilities and checksums are those of the files, which are loaded after."""
    seen, registry = {}, place.registry()
    for _ in range(STEPS):
        step = place.step()
        result = registry.sync(step)
        (entry,) = result.results.values()
        assert result.ok and entry.step == step and entry.bytes and "tensors by" in entry.how
        assert place.engine.version() == f"step-{step}"
        seen[step] = place.seen()
        if step % 5 == 0:
            report = fanin.check.served(place.engine.url, place.trainer.addresses, timeout=120)
            assert report.step == step and not report.unseen
    assert len({str(one) for one in seen.values()}) == STEPS
    # The file of another step is loaded in between, so that none is there from before.
    for step, found in seen.items():
        assert place.from_disk(step) == found


@ALONE
def test_tokens_are_those_of_the_trainer(place: Place) -> None:
    """Transformers computes in another order: log probabilities are near, not equal."""
    from transformers import AutoModelForCausalLM

    step = place.step()
    place.registry().sync(step)
    model = AutoModelForCausalLM.from_pretrained(place.trainer.record(step), dtype=torch.float32)
    for prompt, (tokens, told) in zip(PROMPTS, place.engine.output(PROMPTS, COUNT), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        found = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(found, torch.tensor(told), atol=0.2), (found, told)


@ALONE
def test_by_the_routes_of_the_page(place: Place) -> None:
    step, engine = place.step(), place.engine
    prompt = list(range(3, 40))

    def cached() -> int:
        answer = engine.post("/generate", **generation(prompt, 2))
        return int(answer["meta_info"]["cached_tokens"])

    cached()
    assert cached() > 0
    engine.post("/pause_generation", mode="retract")
    assert engine.post("/begin_weight_update")["success"]
    status, message = place.update(step, weight_version="mine")
    assert status == 200 and f'fanin has pulled: {{"step": {step}' in message
    ended = engine.post("/end_weight_update")
    assert ended["success"] and f'"step": {step}' in ended["message"]
    assert engine.request("POST", "/flush_cache", None)[0] == 200
    assert engine.version() == "mine"
    body = {"new_version": f"step-{step}", "abort_all_requests": False}
    assert engine.post("/update_weight_version", **body)["success"]
    engine.post("/continue_generation")
    assert engine.version() == f"step-{step}"
    assert cached() == 0 and cached() > 0
    assert place.seen() == place.from_disk(step)


@ALONE
def test_a_request_lives_through_an_update(place: Place) -> None:
    """It is retracted and computed again: one answer, of tokens of two versions."""
    before, step = place.engine.version(), place.step()
    with place.engine.streaming(PROMPTS[0], 400) as events:
        next(events)
        place.registry().sync(step)
        *_, last = events
    assert last["meta_info"]["completion_tokens"] == 400
    versions = [span["version"] for span in last["meta_info"]["weight_versions"]]
    assert versions == [before, f"step-{step}"]


def by_sync(place: Place, step: int, trainer: list[str]) -> str:
    """An update that fails, and what is said of it."""
    with pytest.raises(SyncError) as caught:
        place.registry(trainer).sync(step, timeout=60)
    (failed,) = caught.value.result.results.values()
    assert failed.phase == "update" and failed.paused
    said = str(failed.error)
    assert "HTTP 400" in said
    return said


def by_hand(place: Place, step: int, trainer: list[str]) -> str:
    """The same, of an engine that nobody has paused."""
    assert place.engine.post("/begin_weight_update")["success"]
    status, message = place.update(step, trainer, weight_version="torn")
    assert status == 400
    return message


def break_in_the_midst(place: Place, how: Callable[[Place, int, list[str]], str]) -> None:
    """A pull of which a rank dies when a part of its bytes has landed."""
    step, version, sums = place.step(), place.engine.version(), place.engine.checksums()
    with BrokenLink(place.trainer.addresses, 300_000) as link, ThreadPoolExecutor(1) as pool:
        told = pool.submit(how, place, step, link.target)
        link.wait_held()
        place.trainer.kill_rank(1)
        said = told.result(120)
    assert f"rank 1 at {link.target[1]}" in said and "remedy: " in said
    assert place.engine.version() == version and place.engine.checksums() != sums


def refuses_torn_weights(place: Place) -> None:
    """The end of an update is refused, and nothing is generated whatever is called."""
    with pytest.raises(Refused) as caught:
        place.engine.post("/end_weight_update")
    assert caught.value.status == 400 and TORN in str(caught.value.body)
    place.engine.post("/continue_generation")
    place.engine.wait_log("fanin: stays paused")


@ALONE
def test_torn_weights_are_not_served(place: Place) -> None:
    place.launch()
    break_in_the_midst(place, by_sync)
    refuses_torn_weights(place)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(place.engine.output, PROMPTS, COUNT, 300)
        place.engine.post("/continue_generation")
        place.launch()
        step = place.step()
        assert not waiting.done()
        place.registry().sync(step)
        answered = waiting.result(300)
    found = place.seen()
    assert answered == found[0] and place.from_disk(step) == found


@PAIR
def test_two_ranks(place: Place) -> None:
    seen, registry = {}, place.registry()
    for _ in range(2):
        step = place.step()
        assert registry.sync(step).ok and place.engine.version() == f"step-{step}"
        seen[step] = place.seen()
        one, two = seen[step][1]
        assert one.keys() == two.keys() and one != two
    for step, found in seen.items():
        assert place.from_disk(step) == found
    status, message = place.attempt(0)
    assert status == 400 and "has passed" in message and "of 2" in message


@PAIR
def test_two_ranks_that_are_torn_are_mended_from_disk(place: Place) -> None:
    step, found = place.trainer.published, place.seen()
    break_in_the_midst(place, by_hand)
    refuses_torn_weights(place)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(place.engine.output, PROMPTS, COUNT, 300)
        with pytest.raises(TimeoutError):
            waiting.result(3)
        # SGLang's updates wait for the requests that are there, and these wait for an update,
        # unless the engine was told to pause.
        place.engine.post("/pause_generation", mode="retract")
        place.load(step)
        assert place.engine.post("/end_weight_update")["success"]
        place.engine.post("/continue_generation")
        assert waiting.result(300) == found[0]
    assert place.seen() == found
