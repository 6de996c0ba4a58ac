# SPDX-License-Identifier: Apache-2.0
"""WeightServer with real PyTorch and transformers, in one process."""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
from pathlib import Path

import fanin
import fanin.check
import pytest
import torch
from families import FAMILIES
from fanin.errors import NotFoundError, RequestError, StateError, SupersededError
from fanin.info import read_info
from fanin.torch import AdapterServer, Slice, WeightServer, _proof, _world, chain, slot
from fanin.torch.names import checkpoint, vocabulary
from full_models import config_of, random_model
from models import same_tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from worlds import PATIENCE

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}


class Normed(torch.nn.Module):
    """Parameters, persistent and other buffers, a tied pair, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(12, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 6, bias=False))
        self.head = torch.nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.idle = torch.nn.Sequential(torch.nn.Identity())
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, tokens):
        return self.head(self.body(self.norm(self.embed(tokens)))) * self.scale


def serve(model, **options):
    return WeightServer(model, **{"base_port": 0, "use_ucx": False, **options})


def pulled(server, run="full:0", **which):
    with fanin.Client(server.addresses) as client:
        into = {
            entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            for entry in client.catalog(run)
        }
        result = client.pull_into(run, into, timeout=10, **which)
    return result.step, into


def state(model, *, without=()):
    return {key: value for key, value in model.state_dict().items() if key not in without}


def write(model, by=3.0):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(by)


# -------------------------------------------------------------------------------- what is published


def test_parameters_and_persistent_buffers():
    model = Normed()
    with serve(model) as server:
        server.publish(7)
        step, got = pulled(server)
        assert (step, server.runs) == (7, {"full:0": 7})
        same_tensors(got, state(model, without=["head.weight"]))
        assert got["scale"].shape == () and got["norm.num_batches_tracked"].dtype == torch.int64


def test_values_of_one_byte_and_their_scales():
    """As checkpoints in block fp8 have them: bytes like any other."""
    model = torch.nn.Module()
    model.register_parameter(
        "weight", torch.nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), False)
    )
    model.register_parameter("weight_scale_inv", torch.nn.Parameter(torch.rand(2, 2)))
    with serve(model) as server:
        server.publish(0)
        got = pulled(server)[1]
        assert torch.equal(got["weight"].view(torch.uint8), model.weight.view(torch.uint8))
        assert torch.equal(got["weight_scale_inv"], model.weight_scale_inv)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe"])
def test_what_transformers_saves(tmp_path, kind, tied):
    model = random_model(kind, tied)
    model.save_pretrained(tmp_path)
    with serve(model) as server:
        server.publish(0)
        same_tensors(pulled(server)[1], load_file(tmp_path / "model.safetensors"))
        with fanin.Client(server.addresses) as client:
            metadata = client.metadata("full:0")
    assert metadata.keys() == {"config", "format"} and metadata["format"] == "pt"
    assert json.loads(metadata["config"]) == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("family", [n for n, one in FAMILIES.items() if not one.quantized])
def test_families_are_published_as_they_are_saved(tmp_path, family):
    """Latent attention, shared experts, routers with biases of their own type."""
    torch.manual_seed(1)
    configuration = FAMILIES[family].configuration()
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(tmp_path)
    with serve(model) as server:
        server.publish(0)
        same_tensors(pulled(server)[1], load_file(tmp_path / "model.safetensors"))


def test_the_name_of_a_tie_is_the_one_that_is_saved():
    """Whichever of the two comes first in the tree."""

    class Head(Normed):
        _tied_weights_keys = {"embed.weight": "head.weight"}

    model = Head()
    with serve(model) as server:
        assert "head.weight" in server.server.names("full:0")
        assert "embed.weight" not in server.server.names("full:0")


def test_what_is_not_saved_is_not_published():
    class Part(torch.nn.Linear):
        _keys_to_ignore_on_save = ["bias"]

    model = torch.nn.Sequential(Part(3, 4), torch.nn.Linear(4, 2))
    with serve(model) as server:
        assert set(server.server.names("full:0")) == {"0.weight", "1.weight", "1.bias"}


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        torch.nn.DataParallel,
        lambda model: torch.compile(torch.nn.DataParallel(model)),
        lambda model: torch.nn.DataParallel(torch.compile(model)),
    ],
    ids=["compile", "parallel", "compile-parallel", "parallel-compile"],
)
def test_wrappers_are_not_part_of_names(wrap):
    model = random_model("qwen3-moe")
    names = set(slice_keys(model))
    for layer in range(2):
        model.model.layers[layer] = checkpoint_wrapper(model.model.layers[layer])
    with serve(wrap(model)) as server:
        assert set(server.server.names("full:0")) == names


def slice_keys(model):
    with serve(model) as server:
        return server.server.names("full:0")


def test_names_of_ones_own(tmp_path):
    model = random_model("qwen3-moe")

    def late(name, shape):
        return Slice(f"engine.{name}", (slice(0, 2),)) if name.endswith("q_norm.weight") else None

    with serve(model, names=chain(checkpoint(model), late)) as server:
        server.publish(0)
        wanted = {
            f"engine.{name}": value[:2]
            for name, value in model.state_dict().items()
            if name.endswith("q_norm.weight")
        }
        same_tensors(pulled(server)[1], wanted)
    with serve(model, names=chain(checkpoint(model), vocabulary(250))) as server:
        server.publish(0)
        got = pulled(server)[1]
        assert torch.equal(got["lm_head.weight"], model.lm_head.weight[:250])
        assert got["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (96, 128)


def test_configurations_that_are_given():
    for config in (config_of("qwen2", True), {"model_type": "mine"}, '{"model_type": "mine"}'):
        with serve(Normed(), config=config) as server, fanin.Client(server.addresses) as client:
            server.publish(0)
            told = json.loads(client.metadata("full:0")["config"])
            assert told["model_type"] == ("mine" if isinstance(config, (dict, str)) else "qwen2")
    with serve(Normed()) as server, fanin.Client(server.addresses) as client:
        server.publish(0)
        assert client.metadata("full:0").keys() == {"format", "keep_f32"}  # buffers
    with pytest.raises(RequestError, match="config is a int"):
        serve(Normed(), config=3)


# ---------------------------------------------------------------------------------- what is refused


def adapted():
    return get_peft_model(
        random_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )


class Linear4bit(torch.nn.Linear):
    """Looks like bitsandbytes' class of this name, which needs a GPU to be made."""


Linear4bit.__module__ = "bitsandbytes.nn.modules"


class Subclass(torch.Tensor):
    """A tensor whose values lie elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError

    def __repr__(self):
        return "Subclass()"


def holding(value):
    model = torch.nn.Module()
    model.register_buffer("weight", value)
    return model


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


REFUSED = {
    "an adapter": (adapted, "belongs to an adapter", "AdapterServer", "lora_A"),
    "bitsandbytes": (
        lambda: torch.nn.Sequential(Linear4bit(4, 4)),
        "is a weight of bitsandbytes' Linear4bit, which packs its values",
        "dequantize",
        "0.weight",
    ),
    "meta": (
        lambda: torch.nn.Linear(2, 2, device="meta"),
        "is on the meta device",
        "to_empty",
        "weight",
    ),
    "quantized": (lambda: holding(quantized()), "is quantized", "floating-point", "weight"),
    "sparse": (lambda: holding(torch.eye(3).to_sparse()), "is sparse", "dense", "weight"),
    "subclass": (
        lambda: holding(Subclass(torch.ones(2))),
        "is a Subclass, whose values do not lie in it",
        "plain tensors",
        "weight",
    ),
    "packed": (
        lambda: holding(torch.ones(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
        "float4_e2m1fn_x2, each of which packs several values",
        "whose elements are values",
        "weight",
    ),
    "offloaded": (
        lambda: offloaded(),
        "trainer memory offloaded",
        "pause(run)",
        "weight",
    ),
    "a type of no file": (
        lambda: holding(torch.ones(2, dtype=torch.complex32)),
        "torch.complex32, which safetensors does not know",
        "floating-point type",
        "weight",
    ),
}


def offloaded():
    model = torch.nn.Linear(2, 2)
    model.weight.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_cannot_be_published(case):
    make, why, remedy, key = REFUSED[case]
    with pytest.raises((RequestError, StateError)) as caught:
        serve(make())
    assert why in str(caught.value) and remedy in caught.value.remedy
    assert key in caught.value.key


def test_calls_that_are_wrong(tmp_path):
    model = Normed()
    for options, why in (
        ({"cast": "BF16"}, "cast is 'BF16' without snapshot"),
        ({"cast": {"*": "F16"}}, "without snapshot"),
        ({"cast": {"a": "F16", "*": "BF16"}, "snapshot": True}, "cast names BF16 and F16"),
        ({"cast": {"*": None}, "snapshot": True}, "cast names no dtype"),
        ({"cast": "BF17", "snapshot": True}, "cast is 'BF17'; remedy: give \"BF16\" or"),
        ({"cast": torch.int8, "snapshot": True}, "cast is torch.int8; remedy"),
        ({"allow": ["10.0.0.0/8"]}, r"allow is \['10.0.0.0/8'\].*networks with commas"),
        ({"base_port": "6000"}, "base_port is '6000'.*give a port"),
        ({"run": "lora:0"}, "'lora:0' is an adapter's publication"),
        ({"run": "a/b"}, "is no run"),
        ({"merge": "default"}, "merge is 'default'"),
        ({"transform": 1}, "transform is 1"),
        ({"config": "{"}, "config is a str"),
        ({"names": 3}, "names is 3"),
        ({"names": lambda name, shape: 3}, r"names\(\) returned 3 for"),
        ({"names": lambda name, shape: Slice(name, (9,))}, "1 indices for a tensor of 0"),
        ({"names": lambda name, shape: "x"}, "and again of"),
        ({"names": slot(99)}, r"names\(\) slices '.*no slot 99"),
        ({"names": lambda name, shape: [Slice("x"), Slice("x")]}, "several parts of one tensor"),
        ({"names": lambda name, shape: Slice(name, (), (0,), (99,))}, "do not lie inside"),
        ({"names": lambda name, shape: None}, "no rank has a tensor to publish"),
    ):
        with pytest.raises(RequestError, match=why):
            serve(model, **options)
    with pytest.raises(RequestError, match="the model is a OrderedDict"):
        serve(model.state_dict())
    with pytest.raises(RequestError, match="no rank has a tensor to publish"):
        serve(torch.nn.ReLU())
    with serve(model) as server:
        with pytest.raises(NotFoundError, match="there is no run full:7"):
            server.pause("7")
        server.publish(3)
        with pytest.raises(RequestError, match="not above its last step 3"):
            server.publish(3)
        with pytest.raises(RequestError, match="no run is named") as caught:
            server.publish({})
        assert "the runs are: full:0" in caught.value.remedy
        for call in (lambda: server.remove_run(None), lambda: server.publish({None: 4})):
            with pytest.raises(RequestError, match="None is no run"):
                call()
        assert server.write_info(tmp_path) is not None
        info = read_info(tmp_path)
        assert (info.run, info.step, list(info.addresses)) == ("0", 3, server.addresses)
        assert info.publications == ("full:0",)
    server.close()
    for call in (
        server.refresh,
        lambda: server.publish(4),
        lambda: server.remove_run("0"),
        lambda: server.add_run("1", model),
        lambda: server.write_info(tmp_path),
    ):
        with pytest.raises(StateError, match="the server is closed"):
            call()


def test_a_process_group_that_was_destroyed(monkeypatch):
    """Ranks that can no longer be asked are told so in words; of a closed server that it is."""
    distributed = torch.distributed
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ranks = _world.Ranks(None, None)
    distributed.destroy_process_group()
    model = torch.nn.Linear(3, 2)
    with serve(model) as server:
        server.publish(0)
        monkeypatch.setattr(server, "_ranks", ranks)
        for call in (server.refresh, lambda: server.add_run("1", model)):
            with pytest.raises(StateError, match="process group was destroyed") as caught:
                call()
            assert caught.value.remedy == "call this before destroy_process_group()"
        server.close()
        with pytest.raises(StateError, match="the server is closed"):
            server.add_run("1", model)


# --------------------------------------------------------------------------------- life of a server


def test_training_in_place_and_what_moves():
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with serve(model) as server:
        server.publish(0)
        for step in range(1, 4):
            with server.updating(step):
                # A step of a model with BatchNorm writes buffers in its forward.
                model(torch.arange(12)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
            got = pulled(server, step=step)[1]
            same_tensors(got, state(model, without=["head.weight"]))
        # The same values elsewhere, new objects, a tie that is made again.
        model.body[0].weight.data = model.body[0].weight.data.clone()
        model.load_state_dict({k: v.clone() for k, v in state(model).items()}, assign=True)
        model.head.weight = model.embed.weight
        server.publish(4)
        same_tensors(pulled(server, step=4)[1], state(model, without=["head.weight"]))


@pytest.mark.parametrize("which", ["parameter", "buffer", "fused"])
def test_writes_outside_of_updating(which):
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with serve(model) as server:
        server.publish(0)
        if which == "parameter":
            write(model)
        elif which == "buffer":
            model.shift.add_(1)
        else:
            model.eval()(torch.arange(12)).square().mean().backward()
            optimizer.step()
        with pytest.raises(StateError, match="was written outside of updating") as caught:
            server.publish(1)
        assert caught.value.key == "full:0"
        server.publish(1)
        same_tensors(pulled(server, step=1)[1], state(model, without=["head.weight"]))


def test_a_cast_with_exceptions():
    """By published names, the first pattern that fits; a slice is one of its own."""
    model = Normed()

    def halves(name, shape):
        if name != "body.0.weight":
            return name
        return [Slice("body.gate", (slice(0, 2),)), Slice("body.rest", (slice(2, 5),))]

    cast = {"*.gate": None, "norm.running_mean": None, "norm.*": "BF16", "body.*": "BF16"}
    with serve(model, snapshot=True, cast=cast, names=halves) as server:
        for step in range(2):
            server.publish(step)
            got = pulled(server, step=step)[1]
            rounded = {name for name, value in got.items() if value.dtype == torch.bfloat16}
            assert rounded == {
                *("norm.weight", "norm.bias", "norm.running_var"),
                *("body.rest", "body.0.bias", "body.1.weight"),
            }
            assert torch.equal(got["body.gate"], model.body[0].weight[:2])
            assert torch.equal(got["body.rest"], model.body[0].weight[2:].bfloat16())
            assert torch.equal(got["scale"], model.scale)
            model.body[0].weight.data = model.body[0].weight.data * 3  # registered anew


@pytest.mark.parametrize("how", ["to_empty", "cloned"])
def test_a_tie_that_torch_has_lost(how, caplog):
    """Equal values are a warning; different ones are published by nobody."""
    tied = random_model("qwen3", tied=True)
    model = tied
    if how == "to_empty":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tied.config)
        model.to_empty(device="cpu")
        model.load_state_dict(tied.state_dict())
    else:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with serve(model) as server:
        server.publish(0)
        server.publish(1)
        (warning,) = caplog.records
        assert "ties 'lm_head.weight' to 'model.embed_tokens.weight'" in warning.getMessage()
        with (
            pytest.raises(RequestError, match="'lm_head.weight' to 'model.embed_tokens.weight'"),
            server.updating(2),
            torch.no_grad(),
        ):
            model.lm_head.weight[3, 3] += 1
        with pytest.raises(fanin.FaninError):
            pulled(server, step=2)
    model.tie_weights()
    with serve(model) as server:
        server.publish(3)
        assert "lm_head.weight" not in pulled(server, step=3)[1]


def test_a_configuration_that_is_changed_later_says_what_is_tied():
    model = random_model("qwen3", tied=True)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    with serve(model) as server:
        server.publish(0)
    model.config.tie_word_embeddings = True
    with serve(model) as server, pytest.raises(RequestError, match="holds two tensors"):
        server.publish(0)


class Routed(torch.nn.Module):
    """A router as transformers has them: its bias, and here its gate, stay in F32."""

    _keep_in_fp32_modules_strict = ("e_score_correction_bias", "router.gate")

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
        self.router = torch.nn.Module()
        self.router.gate = torch.nn.Linear(4, 8, bias=False)
        self.router.e_score_correction_bias = torch.nn.Parameter(5 + torch.rand(8) / 50)


KEPT = ("router.gate.weight", "router.e_score_correction_bias")


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_model_keeps_in_f32(wrapped, tmp_path, caplog):
    """A cast does not round it, on the trainer or in a reader's files; a pattern by name does."""
    model = Routed()
    whole = torch.nn.parallel.DataParallel(model) if wrapped else model
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for more in ({}, {"snapshot": True, "cast": "BF16"}):
        with serve(whole, **more) as server:
            server.publish(0)
            got = pulled(server)[1]
            assert all(torch.equal(got[name], wanted[name]) for name in KEPT)
            assert (got["up.weight"].dtype == torch.float32) == (not more)
            folder = tmp_path / f"{len(more)}"
            with fanin.Client(server.addresses) as client:
                client.pull_model("full:0", folder, dtype="BF16", verify=True)
            files = load_file(folder / "model.safetensors")
            assert all(torch.equal(files[name], wanted[name]) for name in KEPT)
            assert files["up.weight"].dtype == torch.bfloat16
    assert not caplog.records
    cast = {"*bias": "BF16", "*": "BF16"}
    with serve(whole, snapshot=True, cast=cast) as server:
        server.publish(0)
        got = pulled(server)[1]
        assert got["router.e_score_correction_bias"].dtype == torch.bfloat16
        assert torch.equal(got["router.gate.weight"], wanted["router.gate.weight"])
    (warning,) = caplog.records
    assert "router.e_score_correction_bias. Leave its pattern out" in warning.getMessage()


def test_what_a_reader_asks_for_by_memory_is_converted():
    model = Routed()
    with serve(model) as server, fanin.Client(server.addresses) as client:
        server.publish(0)
        into = {
            name: torch.empty(v.shape, dtype=torch.bfloat16)
            for name, v in model.state_dict().items()
        }
        client.pull_into("full:0", into, dtype="BF16")
        assert all(torch.equal(into[k], v.bfloat16()) for k, v in model.state_dict().items())


CHANGES = {
    "what had no parameters replaced": (
        lambda model: setattr(model, "idle", torch.nn.Linear(6, 1)),
        "'idle.weight' has joined",
    ),
    "what had no parameters replaced deep inside": (
        lambda model: setattr(model.idle, "0", torch.nn.LayerNorm(6)),
        "'idle.0.weight' has joined",
    ),
    "a buffer persistent at last": (
        lambda model: model.register_buffer("cache", model.cache),
        "'cache' has joined",
    ),
    "a buffer persistent no more": (
        lambda model: model.register_buffer("shift", model.shift, persistent=False),
        "'shift' has left",
    ),
    "converted": (
        lambda model: model.body.to(torch.float16),
        "'body.0.weight' is F16 [5, 6] on this rank now, and was F32 [5, 6]",
    ),
    "added": (
        lambda model: model.body.append(torch.nn.Linear(6, 1)),
        "'body.2.weight' has joined the weights of full:0",
    ),
    "a parameter more": (
        lambda model: model.register_parameter("gain", torch.nn.Parameter(torch.ones(2))),
        "'gain' has joined",
    ),
    "a buffer more": (
        lambda model: model.body.register_buffer("late", torch.ones(2)),
        "'body.late' has joined",
    ),
    "a bias at last": (
        lambda model: setattr(model.body[1], "bias", torch.nn.Parameter(torch.ones(6))),
        "'body.1.bias' has joined",
    ),
    "a bias no more": (
        lambda model: setattr(model.body[0], "bias", None),
        "'body.0.bias' is not there any more",
    ),
    "removed": (lambda model: model.body.__delitem__(1), "'body.1.weight' has left"),
    "untied": (
        lambda model: setattr(
            model.head, "weight", torch.nn.Parameter(model.head.weight.detach().clone())
        ),
        "'head.weight' has joined",
    ),
    "other shape": (
        lambda model: setattr(model, "shift", torch.ones(5)),
        "'shift' is F32 [5] on this rank now, and was F32 [3]",
    ),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("call", ["publish", "updating"])
def test_a_set_that_changes_is_told_by_refresh(how, call):
    change, text = CHANGES[how]
    model = Normed()
    with serve(model) as server:
        server.publish(0)
        before = pulled(server)[1]
        with pytest.raises((StateError, RequestError)) as caught:
            if call == "publish":
                change(model)
                server.publish(1)
            else:
                with server.updating(1):
                    change(model)
        assert text in str(caught.value)
        assert "refresh() on every rank" in caught.value.remedy
        if call == "publish" and how not in ("converted",):
            same_tensors(pulled(server)[1], before)
        server.refresh()
        server.publish(1)
        same_tensors(
            pulled(server, step=1)[1],
            state(model, without=[] if how == "untied" else ["head.weight"]),
        )
        server.refresh()
        assert pulled(server)[0] == 1  # nothing has changed: the step stays


def test_a_refresh_that_failed_is_to_be_called_again(monkeypatch):
    model = Normed()
    with serve(model) as server:
        server.publish(0)
        model.body.append(torch.nn.Linear(6, 1))
        monkeypatch.setattr(server.server, "put", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            server.refresh()
        monkeypatch.undo()
        with pytest.raises(StateError, match="has not come to its end"):
            server.publish(1)
        server.refresh()
        server.publish(1)
        assert "body.2.weight" in pulled(server)[1]


def test_a_draft_model_beside_the_model():
    model, draft = random_model("qwen2"), Normed()
    with serve(model, run="7") as server:
        server.add_run("draft", draft)
        with pytest.raises(RequestError, match="is there already"):
            server.add_run("full:draft", draft)
        server.publish({"7": 1, "draft": 4})
        same_tensors(pulled(server, "full:draft")[1], state(draft, without=["head.weight"]))
        assert pulled(server, "full:7")[0] == 1
        server.remove_run("draft")
        assert server.runs == {"full:7": 1}
        server.publish(2)


def test_adapter_and_weights_of_one_process():
    model = adapted()
    base = random_model("qwen3")
    with (
        serve(base) as weights,
        AdapterServer(model, base_port=0, use_ucx=False, config=dict(FIELDS)) as adapters,
    ):
        weights.publish(0)
        adapters.publish(0)
        assert pulled(weights)[0] == 0
        with fanin.Client(adapters.addresses) as client:
            assert [one.name for one in client.publications()] == ["lora:0"]


FIELDS = {"lora_alpha": 4, "r": 2, "base_model_name_or_path": "a/base"}


def test_experts_are_found_again_when_their_number_changes():
    """The conversion of transformers is asked anew when a shape is another one."""
    model = random_model("qwen3-moe")
    bigger = AutoModelForCausalLM.from_config(
        config_of("qwen3-moe", False, moe_intermediate_size=32), dtype=torch.bfloat16
    )
    with serve(model) as server:
        server.publish(0)
        for layer, other in zip(model.model.layers, bigger.model.layers, strict=True):
            layer.mlp.experts = other.mlp.experts
        server.refresh()
        server.publish(1)
        got = pulled(server)[1]
        assert got["model.layers.0.mlp.experts.1.gate_proj.weight"].shape == (32, 128)
        experts = model.model.layers[1].mlp.experts
        assert torch.equal(
            got["model.layers.1.mlp.experts.2.up_proj.weight"], experts.gate_up_proj[2, 32:]
        )


# ------------------------------------------------------------------------------- what pages tell

ROOT = Path(__file__).resolve().parents[2]


def snippets(page):
    """The page's Python that makes a WeightServer of `model`, to be run as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    loop = next(one for one in blocks if "server.updating(step)" in one)
    loop = loop[loop.index("server.publish(0)") :]
    made = [one for one in blocks if re.search(r"^server = WeightServer\(model", one, re.M)]
    return [one if "updating(step)" in one else one + loop for one in made]  # "as above"


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/publish-weights.md"])
def test_pages_tell_what_works(page, monkeypatch, tmp_path):
    """Literally, but for port and directory, which another test may have."""

    class Here(WeightServer):
        def __init__(self, model, **options):
            super().__init__(model, **{**options, "base_port": 0, "use_ucx": False})

        def write_info(self, directory, **more):
            return super().write_info(tmp_path, **more)

    monkeypatch.setattr("fanin.torch.weights.WeightServer", Here)
    model = Normed()

    class Optimizer:
        def step(self):
            write(model)

    (text,) = snippets(page)
    told = {"model": model, "optimizer": Optimizer(), "steps": 4}
    exec(compile(text, page, "exec"), told)
    with told["server"] as server:
        step, got = pulled(server)
        assert step == 3
        same_tensors(got, state(model, without=["head.weight"]))


def test_a_reader_of_digests_that_stands_still_holds_no_step_up() -> None:
    model = torch.nn.Linear(64, 64)
    here, go = threading.Event(), threading.Event()

    def stands(_done: int, _total: int) -> None:
        here.set()
        go.wait(PATIENCE)

    with (
        WeightServer(model, base_port=0, use_ucx=False, lease=5.0) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        server.publish(0)
        with fanin.Client(server.addresses, path="stream") as reader:
            (one,) = reader.catalog("full:0.digests")
            room = {one.name: bytearray(one.bytes)}
            pull = pool.submit(reader.pull_into, "full:0.digests", room, step=0, progress=stands)
            assert here.wait(PATIENCE)
            server.publish(1, digests=True)
            held_up, aborts = (server.stats()[name] for name in ("held_up_ns_max", "aborts"))
            go.set()
            with pytest.raises(SupersededError):
                pull.result(PATIENCE)
        assert (held_up, aborts) == (0, 0)


def short_of_memory(_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_digests_are_of_the_first_step_and_of_those_that_are_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_proof, "_SHARE", 1e-9)  # of others digests would take too long
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    before = model.weight.detach().clone()
    with WeightServer(model, base_port=0, use_ucx=False) as server:

        def digested() -> bool:
            return "full:0.digests" in server.server.publications()

        server.publish(0, digests=False)
        assert not digested()
        server.publish(1)
        server.publish(2)
        assert fanin.check.trained(server.addresses, 0, 10.0, {})[0] == 1
        with server.updating(3, digests=True):
            pass
        step, ranks = fanin.check.trained(server.addresses, 0, 10.0, {})
        assert step == 3 and {one.name for one in ranks[0][1]} == {"weight", "bias"}
        assert torch.equal(model.weight, before)
        server.refresh()
        server.publish(4)
        assert fanin.check.trained(server.addresses, 0, 10.0, {})[0] == 4
        monkeypatch.setattr(_proof, "_SHARE", 1e9)
        with server.updating(5):
            # They are announced before their step is readable.
            with fanin.Client(server.addresses) as reader:
                states = {one.name: one.state for one in reader.publications()}
            assert states["full:0.digests"] == "writing"
        assert fanin.check.trained(server.addresses, 0, 10.0, {})[0] == 5
        with pytest.raises(ZeroDivisionError), server.updating(6):
            1 / 0  # noqa: B018
        assert not caplog.records
        # Training goes on without memory for digests, which are not tried again by themselves.
        monkeypatch.setattr(_proof, "_SHARE", 0.01)
        monkeypatch.setattr(_proof, "box_digests", short_of_memory)
        server.publish(6, digests=True)
        server.publish(7)
        (said,) = caplog.records
        assert "at step 6: OutOfMemoryError: CUDA out of memory" in said.getMessage()
        caplog.clear()
        with pytest.raises(NotFoundError, match="no digests of full:0"):
            fanin.check.trained(server.addresses, 0, 10.0, {})
        server.remove_run(0)
        assert not digested()
    assert not caplog.records
