# SPDX-License-Identifier: Apache-2.0
"""Weights published as fp8: the bytes of the gathered whole, whoever holds which part of it.

What is pulled is compared with an oracle of its own (fp8_rule.py), which knows neither ranks nor
torch.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fanin
import fp8_rule
import numpy
import pytest
import torch
from fanin.errors import FaninError, RequestError, StateError
from fanin.torch import Slice, WeightServer, _blocks8, _formats, _quantized, _transform
from full_models import random_model, save_full_model
from quantize_ranks import module_of, whole_tensors
from quantize_ranks import names as expert_names
from test_full_worlds import Engine, saved
from worlds import World, child

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMATS: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("fp8", {}),
    ({**BLOCK, "scale_fmt": "ue8m0"}, {"powers": True}),
    ({**BLOCK, "weight_block_size": [64, 40]}, {"block": (64, 40)}),
    ({"quant_method": "compressed-tensors"}, {"block": None}),
)


def f32(value: torch.Tensor) -> Any:
    return value.detach().float().numpy()


def check(got: dict[str, torch.Tensor], wholes: dict[str, torch.Tensor], **rule: Any) -> None:
    """*got* is what the rule makes of the whole tensors, of those that have two dimensions."""
    end = "_scale" if rule.get("block", ()) is None else "_scale_inv"
    wanted = dict(wholes)
    for name, value in wholes.items():
        if value.dim() == 2:
            bytes_, scales = fp8_rule.rounded(f32(value), **rule)
            wanted[name] = torch.from_numpy(bytes_)
            wanted[name + end] = torch.from_numpy(scales)
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    for name, value in wanted.items():
        assert got[name].shape == value.shape, name
        bits = [one.contiguous().view(torch.uint8) for one in (got[name], value)]
        assert torch.equal(*bits), (name, rule, int((bits[0] != bits[1]).sum()))


def experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, value in tensors.items():
        for key in [name] if value.dim() < 3 else expert_names(name, tuple(value.shape)):
            out[key if isinstance(key, str) else key.key] = (
                value if isinstance(key, str) else value[key.index]
            )
    return out


# ------------------------------------------------------------------------------------ many ranks


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[World]:
    size = request.param
    with World(size, {}, tmp_path_factory.mktemp(f"w{size}"), "quantize_ranks.py") as world:
        world.expect("ready")
        yield world
        world.tell("exit")
        assert world.wait() == [0] * size


@pytest.mark.parametrize("kind", ["placed", "fsdp", "hsdp", "fsdp+tp", "hand"])
def test_bytes_of_the_whole(ranks: World, kind: str) -> None:
    size = len(ranks.ranks)
    if kind in ("hsdp", "fsdp+tp") and size != 4:
        pytest.skip("takes two dimensions of two")
    for seed in range(8 if kind == "placed" else 4):
        told, rule = FORMATS[seed % len(FORMATS)]
        more = {"snapshot": True} if seed % 3 == 2 else {}
        (answer, *_) = ranks.do("make", kind=kind, seed=seed, quantize=told, **more)
        with Engine(answer["addresses"]) as engine:
            for step in range(2):
                if step:
                    ranks.do("step", number=step)
                assert engine.pull() == step
                wholes = whole_tensors(seed, step)
                if kind == "hand":
                    wholes.pop("experts.w")
                check(engine.tensors, experts_apart(wholes), **rule)


@pytest.mark.parametrize("body", [False, True])
def test_a_rank_that_cannot_publish(ranks: World, body: bool) -> None:
    """The others do not hang in the maximum that they share with it; the next step is right."""
    (answer, *_) = ranks.do("make", kind="fsdp", seed=1)
    with Engine(answer["addresses"]) as engine:
        said = [answer["error"] for answer in ranks.do("fail", number=1, rank=1, body=body)]
        own = said.pop(1)
        assert ("the loss is NaN" if body else "'joined'") in own, own
        for one in said:
            assert one.startswith("rank 1 does not publish step 1 of full:0: ") and own[:40] in one
        ranks.do("step", number=2)
        assert engine.pull() == 2
        check(engine.tensors, experts_apart(whole_tensors(1, 2)))


@pytest.mark.parametrize(
    ("key", "values"),
    [("quantize", ["fp8", {**BLOCK, "scale_fmt": "ue8m0"}]), ("skip_modules", [["m1"], ["m2"]])],
)
def test_ranks_that_say_otherwise(ranks: World, key: str, values: list[Any]) -> None:
    for answer in ranks.do("differ", key=key, values=values):
        assert "the same on all ranks" in answer["error"], answer


# -------------------------------------------------------------------------------------- one rank


def served(model: torch.nn.Module, **options: Any) -> WeightServer:
    return WeightServer(model, **{"base_port": 0, "use_ucx": False, "quantize": "fp8", **options})


def pulled(server: WeightServer, run: str = "full:0") -> dict[str, torch.Tensor]:
    with Engine(server.addresses, run) as engine:
        engine.pull()
        return engine.tensors


def near(value: float, count: int = 3) -> list[float]:
    """BF16 numbers around *value*, which is one."""
    bits = int(numpy.float32(value).view(numpy.uint32)) >> 16
    around = [(bits + at) << 16 for at in range(-count, count + 1)]
    return numpy.array(around, numpy.uint32).view(numpy.float32).tolist()


def edges() -> torch.Tensor:
    """A block each of values at which rounding is decided."""
    blocks = [torch.zeros(128, 128), torch.full((128, 128), -1e-40), torch.full((128, 128), 1e-6)]
    for largest in [*near(448.0), *near(2.0**-20 * 448), 3e38, 1e-4, 1e30]:
        # All magnitudes of E4M3, and the middles between them, at this scale.
        values = [*fp8_rule.TABLE, *fp8_rule.BETWEEN]
        one = torch.tensor([v / 448.0 * largest for v in values] + [largest]).repeat(65)
        blocks.append(one[: 128 * 128].view(128, 128) * (-1.0) ** torch.arange(128))
    blocks.append(torch.tensor(near(464.0, 64)[:128]).repeat(128, 1))
    return torch.cat(blocks, 1).float()


@pytest.mark.parametrize("told, rule", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_at_which_rounding_is_decided(told: Any, rule: Any, dtype: Any) -> None:
    tensors = {"a.weight": edges().to(dtype), "b.weight": edges()[:100].to(dtype).T}
    model = module_of({name: one.contiguous() for name, one in tensors.items()})
    model.b.weight.data = tensors["b.weight"]  # columns that are no neighbours
    with served(model, quantize=told) as server:
        server.publish(0)
        check(pulled(server), tensors, **rule)


@pytest.mark.parametrize("told, rule", FORMATS)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_value_that_is_no_number(told: Any, rule: Any, bad: str, caplog: Any) -> None:
    values = torch.randn(300, 260)
    values[150, 140] = float(bad)
    model = module_of({"layer.a.weight": values.clone(), "layer.b.weight": torch.randn(8, 8)})
    with served(model, quantize=told) as server, caplog.at_level(logging.WARNING, "fanin.torch"):
        server.publish(0)
        assert "'layer.a.weight' has NaN or infinite values in 1 of its blocks" in caplog.text
        assert "layer.b" not in caplog.text
        check(pulled(server), dict(model.state_dict()), **rule)
        caplog.clear()
        with server.updating(1), torch.no_grad():
            model.layer.a.weight.fill_(1.0)
        assert not caplog.text
        check(pulled(server), dict(model.state_dict()), **rule)


def test_precisions_side_by_side() -> None:
    model = random_model("qwen3")
    with served(model, quantize=None) as server:
        server.add_run("8", model, quantize="fp8")
        server.publish({"0": 0, "8": 0})
        for step in (1, 2):
            with server.updating({"0": step, "8": step}), torch.no_grad():
                for one in model.parameters():
                    one.mul_(1.25)
        plain, rounded = pulled(server), pulled(server, "full:8")
        assert all(torch.equal(plain[n], one) for n, one in model.state_dict().items())
        check_model(rounded, model)
        server.remove_run("8")


def test_an_update_of_one_precision_alone() -> None:
    """The other run lends the embedding too, and its readers would get what is written."""
    model = random_model("qwen3")
    with served(model, quantize=None) as server:
        server.add_run("8", model, quantize="fp8")
        server.publish({"0": 0, "8": 0})
        shared = r"embed_tokens.weight' of full:8 is also what full:0 publishes .* at step 0"
        with pytest.raises(StateError, match=shared) as caught, server.updating({"8": 1}):
            raise AssertionError("the body begins")
        assert "updating({'full:8': step, 'full:0': step})" in caught.value.remedy
        with pytest.raises(StateError, match=shared):
            server.pause("8")
        assert server.runs == {"full:0": 0, "full:8": 0}
        plain = pulled(server)
        assert all(torch.equal(plain[n], one) for n, one in model.state_dict().items())
        check_model(pulled(server, "full:8"), model)
        server.publish({"8": 1})  # writes nothing
        server.pause()
        server.resume("8")
        with server.updating({"8": 2}):  # nobody reads the other one
            pass


def test_precisions_that_share_no_memory() -> None:
    """Readers read copies, or what the parameters were rounded to."""
    model = module_of({"a.weight": torch.randn(8, 8)})
    for options in ({"snapshot": True, "quantize": None}, {}):
        with served(model, **options) as server:
            server.add_run("8", model, quantize="fp8")
            server.publish({"0": 0, "8": 0})
            with server.updating({"8": 1}), torch.no_grad():
                model.a.weight.mul_(2)
            assert server.runs == {"full:0": 0, "full:8": 1}


def test_a_write_outside_of_an_update_to_what_two_runs_share() -> None:
    """Both steps are withdrawn at once, whichever run is published next."""
    model = random_model("qwen3")
    with served(model, quantize=None) as server:
        server.add_run("8", model, quantize="fp8")
        server.publish({"0": 0, "8": 0})
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(2)
        told = r"of full:8 was written outside .* step is withdrawn, and so are those of full:0"
        with pytest.raises(StateError, match=told):
            server.publish({"8": 1})
        with pytest.raises(FaninError, match="unpublished"):
            pulled(server)
        server.publish({"0": 1, "8": 1})
        check_model(pulled(server, "full:8"), model)


def test_an_update_of_one_slot_by_another_index() -> None:
    """The last slot is the same one, whether it is counted from the front or from the end."""
    model = module_of({"a.weight": torch.randn(3, 4, 4)})

    def at(index: int) -> Any:
        return lambda name, shape: [Slice("a.weight", (index,))]

    with served(model, quantize=None, names=at(2)) as server:
        server.add_run("8", model, names=at(-1))
        server.publish({"0": 0, "8": 0})
        with pytest.raises(StateError, match=r"'a.weight' of full:8 is also what full:0"):
            server.pause("8")
        server.remove_run("8")
        server.add_run("8", model, names=at(0))
        server.publish({"8": 1})
        with server.updating({"8": 2}), torch.no_grad():  # another slot
            model.a.weight[0].mul_(2)
        server.publish({"0": 1})


def test_slots_of_a_parameter_that_is_replaced() -> None:
    """Which writes are another run's update is known of the new one, too."""
    model = module_of({"a.weight": torch.randn(3, 4, 4)})

    def at(index: int) -> Any:
        return lambda name, shape: [Slice("a.weight", (index,))]

    with served(model, quantize=None, names=at(0)) as server:
        server.add_run("8", model, names=at(1))
        server.publish({"0": 0, "8": 0})
        for step in (1, 3):
            with server.updating({"8": step}), torch.no_grad():
                model.a.weight[1].mul_(2)
            server.publish({"0": step})
            model.a.weight = torch.nn.Parameter(torch.randn(3, 4, 4))
            server.publish({"0": step + 1, "8": step + 1})


def check_model(got: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    state = {name: one for name, one in model.state_dict().items() if name in got}
    kept = {n: got.pop(n) for n in ("model.embed_tokens.weight", "lm_head.weight") if n in got}
    assert all(torch.equal(one, state.pop(name)) for name, one in kept.items())
    check(got, state)


def test_a_write_outside_of_an_update_hurts_nobody() -> None:
    """Readers read results, which training does not write."""
    model = module_of({"a.weight": torch.randn(64, 64)})
    with served(model) as server:
        server.publish(0)
        with torch.no_grad():
            model.a.weight.mul_(3)
        server.publish(1)
        check(pulled(server), {"a.weight": model.a.weight})


def test_memory_that_moves_and_sets_that_change(tmp_path: Path) -> None:
    model = module_of({"a.weight": torch.randn(200, 64), "b.weight": torch.randn(64, 64)})
    with served(model) as server:
        server.publish(0)
        with server.updating(1):
            model.a.weight = torch.nn.Parameter(torch.randn(200, 64))
        check(pulled(server), dict(model.state_dict()))
        with server.updating(2):
            model.c = torch.nn.Module()
            model.c.register_parameter("weight", torch.nn.Parameter(torch.randn(130, 130)))
            model.a.weight = torch.nn.Parameter(torch.randn(100, 64))
            del model.b
            server.refresh()
        check(pulled(server), dict(model.state_dict()))
        told = json.loads(server_metadata(server)["quantization"])
        assert told["modules_to_not_convert"] == ["lm_head"]


def test_a_pause_frees_results_and_makes_them_again() -> None:
    model = module_of({"a.weight": torch.randn(256, 256)})
    with served(model) as server:
        server.publish(0)
        server.pause()
        values = model.a.weight.data.clone()
        model.a.weight.data = torch.empty(0)
        with pytest.raises(FaninError):
            pulled(server)
        model.a.weight.data = values
        server.resume()
        check(pulled(server), dict(model.state_dict()))
        server.pause()
        model.a.weight.data = values * 3
        server.resume(step=1)
        check(pulled(server), dict(model.state_dict()))


def test_digests_are_of_what_is_published() -> None:
    model = module_of({"a.weight": torch.randn(256, 200)})
    with served(model) as server:
        server.publish(0, digests=True)
        got = pulled(server)
        with Engine(server.addresses) as engine:
            assert engine.pull() == 0
        found = {held.name for held in _held(server)}
        assert found == set(got)


def _held(server: WeightServer) -> list[Any]:
    from fanin.torch._proof import _held as held

    return list(held(server._runs["full:0"].parameters))


def test_kernels_of_gpus(tmp_path: Path) -> None:
    """Triton's, by its interpreter, which has to be chosen before anything imports Triton."""
    with child("kernels", "quantize_kernels.py", {}, tmp_path) as kernels:
        for _ in FORMATS:
            assert kernels.expect("rounded")["boxes"] == 6
        assert kernels.wait() == 0


# ---------------------------------------------------------------------------- which, and under what


def server_metadata(server: WeightServer, run: str = "full:0") -> dict[str, str]:
    with fanin.Client(server.addresses) as client:
        return client.metadata(run)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_configuration_tells_the_format(kind: str, tied: bool) -> None:
    model = random_model(kind, tied)
    with served(model, skip_modules=["lm_head", "layers.1"]) as server:
        server.publish(0)
        metadata = server_metadata(server)
        told = json.loads(metadata["quantization"])
        assert json.loads(metadata["config"])["quantization_config"] == told
        left = told.pop("modules_to_not_convert")
        assert told == {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
        got = pulled(server)
        modules = {
            name.removesuffix(".weight")
            for name, one in got.items()
            if one.dim() == 2 and name.endswith(".weight") and one.dtype != torch.float8_e4m3fn
        }
        assert set(left) == modules | {"lm_head"}
        rounded = {name for name, one in got.items() if one.dtype == torch.float8_e4m3fn}
        assert rounded and not any(".layers.1." in name for name in rounded)
        assert not any("embed" in name or name.endswith("mlp.gate.weight") for name in rounded)


def test_a_dictionary_of_compressed_tensors() -> None:
    model = random_model("qwen3")
    with served(model, quantize={"quant_method": "compressed-tensors"}) as server:
        server.publish(0)
        told = json.loads(server_metadata(server)["quantization"])
        assert (told["quant_method"], told["format"]) == ("compressed-tensors", "float-quantized")
        assert told["ignore"] == ["lm_head", "model.embed_tokens"]
        with served(model, quantize=told) as again:  # what is published may be given again
            again.publish(0)
            assert json.loads(server_metadata(again)["quantization"]) == told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"skip_modules": ["no_such_module"]}, "'no_such_module', which fits no module"),
        ({"skip_modules": ["q_proj"]}, "hold the two in one tensor"),
        ({"skip_modules": ["*.experts.1.up_proj"]}, "hold the two in one tensor"),
        ({"skip_modules": ["re:.*q_proj"]}, "engines read regular expressions differently"),
        ({"skip_modules": ["*"]}, "no weight to publish as fp8"),
        ({"skip_modules": "lm_head"}, "give a list of names"),
        ({"quantize": "int8"}, "quantize is 'int8'"),
        ({"quantize": {"quant_method": "awq"}}, "quant_method"),
        ({"quantize": None, "skip_modules": ["lm_head"]}, "without quantize"),
    ],
)
def test_what_is_refused(options: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text.replace("*", ".")):
        served(random_model("qwen3-moe"), **options)


def test_scales_that_the_model_has_itself() -> None:
    model = module_of({"a.weight": torch.randn(8, 8), "a.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(RequestError, match="would publish scales under this name"):
        served(model)


def test_snapshots_that_cast_leave_scales() -> None:
    model = module_of({"a.weight": torch.randn(200, 200), "norm.weight": torch.randn(200)})
    with served(model, snapshot=True, cast="BF16") as server:
        server.publish(0)
        got = pulled(server)
        assert got["norm.weight"].dtype == torch.bfloat16
        got["norm.weight"] = model.norm.weight.detach()
        check(got, dict(model.state_dict()))


def test_parts_that_names_tell_of() -> None:
    """Rows of one stored tensor, as q, k and v of a fused one; and a matrix in two parts."""
    fused, part = torch.randn(300, 130), torch.randn(90, 70)
    model = module_of({"qkv": fused, "turned": torch.cat([part[33:], part[:33]])})

    def names(name: str, shape: tuple[int, ...]) -> Any:
        if name == "qkv":
            return [Slice(f"{at}.weight", (slice(at * 100, at * 100 + 100),)) for at in range(3)]
        rows = ((0, 57, 33), (57, 90, 0))
        return [Slice("m.weight", (slice(a, b),), (at, 0), (90, 70)) for a, b, at in rows]

    with served(model, names=names) as server:
        server.publish(0)
        wholes = {f"{at}.weight": fused[at * 100 : at * 100 + 100] for at in range(3)}
        check(pulled(server), {**wholes, "m.weight": part})


# ------------------------------------------------------------------------- layouts of real trainers


@pytest.mark.parametrize(
    ("size", "model", "kinds"),
    [
        (2, "qwen3", ["ddp", "pp", "megatron"]),
        (2, "qwen3-moe", ["ep"]),
        (4, "qwen3-moe", ["ep+fsdp"]),
    ],
)
def test_parts_of_real_models(size: int, model: str, kinds: list[str], tmp_path: Path) -> None:
    wanted = saved(save_full_model(tmp_path / model, model))
    kept = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    with World(size, {}, tmp_path / "ranks", "parts_trainer.py") as world:
        world.expect("ready")
        for kind, (told, rule) in itertools.product(kinds, FORMATS[::3]):
            at = str(tmp_path / model)
            (answer, *_) = world.do("make", model=at, kind=kind, quantize=told)
            assert answer["error"] is None, answer
            with Engine(answer["result"]) as engine:
                for step in range(2):
                    if step:
                        assert all(one["error"] is None for one in world.do("step"))
                    assert engine.pull() == step
                    now = {name: one * (-2) ** step for name, one in wanted.items()}
                    got = dict(engine.tensors)
                    for name in [one for one in now if one.endswith(kept)]:
                        assert torch.equal(got.pop(name), now.pop(name)), name
                    check(got, now, **rule)
        world.tell("exit")
        assert world.wait() == [0] * size


def test_why_a_rank_misses_a_step_is_told_though_another_one_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(_: Any) -> Any:
        raise StateError.make("the ranks' collective broke off", "see which rank has ended")

    def fails(*_: Any) -> None:
        raise RequestError.make("the adapter is switched off", "switch it on")

    quantizer = _quantized.Quantizer(_formats.format_of("fp8"))
    quantizer.agree(_blocks8.Shared(1, {}), torch.device("cpu"), gone)
    before = _quantized.Quantizer(_formats.format_of("fp8"))
    monkeypatch.setattr(before, "fill", fails)
    with pytest.raises(RequestError, match="switched off"):
        _transform.Stages([before, quantizer]).fill()
    monkeypatch.setattr(quantizer, "_maxima", fails)
    with pytest.raises(RequestError, match="switched off"):
        quantizer.fill()
    monkeypatch.undo()
    with pytest.raises(StateError, match="broke off"):
        quantizer.fill()
