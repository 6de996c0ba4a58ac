# SPDX-License-Identifier: Apache-2.0
"""AdapterServer with real PyTorch and PEFT: one process, and two ranks over gloo."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import json
import os
import socket
import weakref

import fanin.check
import numpy
import pytest
import torch
from fanin import Client
from fanin._digest import box_digest
from fanin._served import scaled
from fanin.errors import (
    FaninError,
    NotFoundError,
    PausedError,
    PullTimeoutError,
    RequestError,
    StateError,
)
from fanin.info import read_info
from fanin.server import Stream
from fanin.torch import AdapterServer, Slice, chain, per_expert, slot
from fanin.torch import _world as world_module
from fanin.torch._publisher import Publisher
from fanin.torch._world import Report, base_port_for, choose_addresses
from models import same_tensors
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from vllm_server import free_ports
from worlds import case_world, run_case, run_cases

BASE = "a/base-model"


class Block(torch.nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.q_proj = torch.nn.Linear(24, 16, bias=bias)
        self.v_proj = torch.nn.Linear(16, 24, bias=bias)

    def forward(self, x):
        return self.v_proj(self.q_proj(x))


class Base(torch.nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 24)
        self.layers = torch.nn.ModuleList([Block(bias), Block(bias)])
        self.head = torch.nn.Linear(24, 32, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lora(**options):
    return LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **options}
    )


def adapted(config=None, name="default", seed=1):
    torch.manual_seed(seed)
    model = get_peft_model(Base(), config or lora(), adapter_name=name)
    model.peft_config[name].base_model_name_or_path = BASE
    fill(model, seed)
    return model


def fill(model, seed):
    """New values for every trained parameter, written in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn(param.shape, generator=generator))


def serve(model, **options):
    return AdapterServer(model, **{"base_port": 0, "use_ucx": False, **options})


class Puller:
    """Pulls into a new directory each time."""

    def __init__(self, directory):
        self.directory, self.count = directory, 0

    def __call__(self, server, run="0", timeout=10.0, **options):
        self.count += 1
        path = self.directory / str(self.count)
        with Client(server.addresses) as client:
            result = client.pull_adapter(run, str(path), timeout=timeout, **options)
        self.path = path
        return result.step, load_file(path / "adapter_model.safetensors")


@pytest.fixture
def pull(tmp_path):
    return Puller(tmp_path)


def values(model, name="default"):
    return {
        key: value.detach().clone()
        for key, value in get_peft_model_state_dict(model, adapter_name=name).items()
    }


# -------------------------------------------------------------------------------- what is published


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"lora_bias": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["head"]},
        {"target_modules": ["embed", "v_proj"]},
        {"bias": "all"},
        {"bias": "lora_only", "target_modules": ["v_proj"]},
        {"rank_pattern": {"layers.0.q_proj": 5, ".*q_proj": 2}, "alpha_pattern": {"v_proj": 1}},
        {"use_rslora": True, "task_type": "FEATURE_EXTRACTION"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_the_directory_is_what_peft_saves(pull, tmp_path, options):
    model = adapted(lora(**options))
    saved = {
        key: value
        for key, value in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    with serve(model) as server:
        server.publish(7)
        step, got = pull(server)
    assert step == 7
    same_tensors(got, saved)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    written = json.loads((pull.path / "adapter_config.json").read_text())
    wanted = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for config in (written, wanted):
        for field, value in config.items():
            if field in ("target_modules", "modules_to_save") and isinstance(value, list):
                config[field] = sorted(value)
    wanted.pop("auto_mapping")
    written.pop("auto_mapping")
    assert written == wanted
    assert list(written["rank_pattern"]) == list(options.get("rank_pattern", {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"alpha_pattern": {"layers.0.q_proj": 1}}]
)
def test_digests_are_of_what_engines_make_of_it(pull, options, dtype):
    """In each type that an engine may have, lora_B times the scale of PEFT's layer."""
    model = adapted(lora(**options)).to(dtype)
    layers = {n: m for n, m in model.named_modules() if n.endswith(("q_proj", "v_proj"))}
    scales = {name: layer.scaling["default"] for name, layer in layers.items()}
    with serve(model) as server:
        server.publish(1)
        assert server.server.publications() == ["lora:0"]
        with server.updating(2, digests=True):
            fill(model, 2)
        step, ((layouts, held),) = fanin.check.trained(server.addresses, "lora:0", 10.0, {})
        assert step == 2 and {one.name for one in layouts} == values(model).keys()
        whole = values(model)
        for one in held:
            layer, _, part = one.name.partition(".lora_")
            scale = scales[layer] if part == "B.weight" else 1.0
            for kind, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
                made = whole[one.name].to(kind, copy=True)
                made *= scale  # as vLLM does
                assert one.digests[scaled(name, scale)] == box_digest(made)
        assert len(set(scales.values())) == (2 if "alpha_pattern" in options else 1)
        server.remove_run(0)
        assert server.server.publications() == []


def test_peft_loads_what_is_pulled(pull):
    model = adapted().eval()
    tokens = torch.arange(8).reshape(1, 8)
    with serve(model) as server:
        server.publish(1)
        pull(server)
    torch.manual_seed(1)
    fresh = PeftModel.from_pretrained(Base(), pull.path).eval()
    with torch.no_grad():
        assert torch.equal(fresh(tokens), model(tokens))


def test_wrappers_and_missing_prefix(pull):
    model = adapted()
    wanted = values(model)
    with serve(torch.compile(model)) as server:
        server.publish(1)
        same_tensors(pull(server)[1], wanted)
    with serve(model.base_model.model, config=model.peft_config["default"]) as server:
        server.publish(1)
        same_tensors(pull(server)[1], wanted)


# ------------------------------------------------------------------------------ storage that moves


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def step_of(optimizer, model):
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-9, momentum=0.5),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ],
    ids=["single", "foreach", "fused", "sgd", "adafactor"],
)
@pytest.mark.parametrize("call", ["publish", "updating", "pause"])
def test_writes_outside_of_updating_are_refused(pull, make, call):
    model = adapted()
    optimizer = make(trained(model))
    with serve(model) as server, Client(server.addresses) as client:
        server.publish(0)
        step_of(optimizer, model)
        with pytest.raises(StateError) as caught:
            if call == "publish":
                server.publish(1)
            elif call == "updating":
                with server.updating(1):
                    pytest.fail("the body has run")
            else:
                server.pause()
        assert "with server.updating(step): optimizer.step()" in caught.value.remedy
        assert "after step 0" in str(caught.value)
        assert caught.value.key == "lora:0"
        # What is there is of no step: nobody gets it.
        assert [info.state for info in client.publications()] == ["unpublished"]
        server.publish(1)
        same_tensors(pull(server, step=1)[1], values(model))
        with server.updating(2):
            step_of(optimizer, model)
        same_tensors(pull(server, step=2)[1], values(model))


def test_a_pull_that_reads_what_is_written_outside_starts_again(pull):
    """It is reading while the step is withdrawn, and gets the next one, whole."""
    model = adapted()
    streams = {"path": "stream"}  # others may have read all before it is told of
    with serve(model, lease=60.0) as server, Client(server.addresses, **streams) as client:
        server.publish(0)
        told = []

        def progress(done, total):
            if not told:
                told.append(done)
                with torch.no_grad():
                    trained(model)[0].add_(1.0)
                with pytest.raises(StateError, match="outside of updating"):
                    server.publish(1)
                server.publish(1)

        result = client.pull_adapter("0", pull.directory / "one", timeout=10, progress=progress)
        assert (result.step, told != []) == (1, True)
        same_tensors(load_file(pull.directory / "one" / "adapter_model.safetensors"), values(model))


def test_snapshots_may_be_written_at_any_time(pull):
    model = adapted()
    optimizer = torch.optim.AdamW(trained(model), lr=0.1)
    with serve(model, snapshot=True) as server:
        for step in range(3):
            server.publish(step)
            same_tensors(pull(server, step=step)[1], values(model))
            step_of(optimizer, model)


def test_what_does_not_write_is_not_refused(pull):
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        model.eval()(torch.arange(8)).square().mean().backward()
        model.train()
        torch.nn.utils.clip_grad_norm_(trained(model), 1.0)
        model.zero_grad()
        model.load_state_dict(values(model), strict=False, assign=True)  # other memory
        server.publish(1)
        same_tensors(pull(server, step=1)[1], values(model))
        server.pause()
        fill(model, 9)  # a checkpoint that is loaded
        server.resume(step=2)
        server.pause()
        server.resume()
        server.publish(3)
        same_tensors(pull(server, step=3)[1], values(model))


def test_writes_after_a_pause_are_refused(pull):
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        server.pause()
        server.resume()
        fill(model, 5)
        with pytest.raises(StateError, match="after step 0"):
            server.publish(1)
        server.publish(1)
        same_tensors(pull(server, step=1)[1], values(model))


def test_old_storage_is_held_until_it_is_replaced(pull):
    model = adapted()
    owner, attribute = model.base_model.model.layers[0].q_proj.lora_A["default"], "weight"
    array = numpy.arange(72, dtype=numpy.float32).reshape(3, 24)
    alive = weakref.ref(array)
    owner.weight.data = torch.from_numpy(array)
    del array
    with serve(model) as server:
        server.publish(0)
        before = values(model)
        getattr(owner, attribute).data = torch.zeros(3, 24)
        gc.collect()
        assert alive() is not None, "readers of step 0 read this memory"
        same_tensors(pull(server, step=0)[1], before)
        server.publish(1)
        gc.collect()
        assert alive() is None, "nobody reads it any more"
        same_tensors(pull(server, step=1)[1], values(model))


def test_storage_that_is_gone_is_not_read(pull):
    model = adapted()
    weight = trained(model)[0]
    with serve(model) as server, Client(server.addresses) as client:
        server.publish(0)
        size = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        with pytest.raises(StateError, match="trainer memory offloaded"):
            server.publish(1)
        assert [info.state for info in client.publications()] == ["unpublished"]
        weight.untyped_storage().resize_(size)
        fill(model, 5)
        server.publish(1)
        same_tensors(pull(server, step=1)[1], values(model))


def test_what_publish_refuses_leaves_the_last_step(pull):
    model = adapted()
    owner = model.base_model.model.layers[1].v_proj.lora_B["default"]
    with serve(model) as server:
        server.publish(0)
        weight, owner.weight = owner.weight, None
        with pytest.raises(RequestError, match="not there"):
            server.publish(1)
        owner.weight = weight
        same_tensors(pull(server, step=0)[1], values(model))


def test_an_adapter_that_is_deleted():
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        with pytest.raises(RequestError, match="no LoRA parameters"):
            with server.updating(1):
                model.delete_adapter("default")


def test_padded_and_transposed_storage(pull):
    model = adapted()
    layer = model.base_model.model.layers[0].q_proj
    layer.lora_A["default"].weight.data = torch.randn(24, 3).t()
    layer.lora_B["default"].weight.data = torch.randn(16, 7)[:, 2:5]
    with serve(model) as server:
        server.publish(0)
        same_tensors(pull(server)[1], values(model))


# -------------------------------------------------------------------------------------- the updates


def test_an_exception_aborts(pull):
    model = adapted()
    with serve(model, lease=0.1) as server:
        server.publish(0)
        with pytest.raises(ZeroDivisionError), server.updating(1):
            fill(model, 2)
            _ = 1 / 0
        with pytest.raises(PullTimeoutError):
            pull(server, timeout=0.2)
        assert server.runs == {"lora:0": 0}
        with server.updating(1):
            fill(model, 3)
        same_tensors(pull(server)[1], values(model))
        assert server.stats()["aborts"] == 1


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_open_update_is_not_committed_by_another_call(pull, snapshot):
    """A task or thread that publishes meanwhile would show half of what is being written."""
    model = adapted()
    with serve(model, lease=0.1, snapshot=snapshot) as server:
        server.publish(0)
        first = values(model)
        with server.updating(1):
            fill(model, 2)
            for call in (server.publish, lambda step: server.updating(step).__enter__()):
                with pytest.raises(StateError, match="step 1 of lora:0 is being written") as caught:
                    call(2)
                assert "one thread or task" in caught.value.remedy
            if snapshot:
                same_tensors(pull(server)[1], first)
            fill(model, 3)
        assert server.runs == {"lora:0": 1}
        same_tensors(pull(server)[1], values(model))
        with pytest.raises(StateError, match="step 2 of lora:0 is"), server.updating(2):
            server.publish(3)
        server.publish(2)  # the block has ended, by an exception
        assert server.runs == {"lora:0": 2}


def test_a_call_beside_another_is_refused_on_this_rank_alone(monkeypatch):
    """Also before the first one has begun its update. Other ranks go by the first one."""
    checked, others, told = Publisher._check_step, [], []

    def check(self, run, step):
        checked(self, run, step)
        if step == 1:
            others.append(pool.submit(server.publish, 2))
            concurrent.futures.wait(others, timeout=0.2)

    with serve(adapted()) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        server.publish(0)
        monkeypatch.setattr(Publisher, "_check_step", check)
        monkeypatch.setattr(type(server), "_unpublished", lambda *words: told.append(words))
        with server.updating(1), pytest.raises(StateError, match="step 1 of lora:0 is being"):
            others[0].result(60)
        assert server.runs == {"lora:0": 1} and not told


def test_a_run_that_is_resumed_at_a_step_is_not_updated_meanwhile(monkeypatch):
    goes_on = Publisher._continue

    def go_on(self, runs, step):
        goes_on(self, runs, step)
        with pytest.raises(StateError, match="step 1 of lora:0 is being written"):
            server.publish(2)

    with serve(adapted()) as server:
        server.publish(0)
        server.pause()
        monkeypatch.setattr(Publisher, "_continue", go_on)
        server.resume(step=1)
        assert server.runs == {"lora:0": 1}


def test_steps_are_checked_before_anything_is_written():
    model = adapted()
    with serve(model) as server:
        server.publish(3)
        none = "of lora:0 is no step.*an integer from 0 to 18446744073709551615"
        for step, why in [(3, "not above"), *((one, none) for one in (-1, True, "4", 1 << 64))]:
            with pytest.raises(RequestError, match=why) as caught, server.updating(step):
                pytest.fail("the body ran")
            assert caught.value.key == "lora:0"
        assert server.stats()["updates"] == 1


def test_several_runs(pull):
    model = adapted(name="alice")
    model.add_adapter("bob", lora(r=5))
    model.peft_config["bob"].base_model_name_or_path = BASE
    model.set_adapter("bob")
    fill(model, 4)
    with serve(model, run=None) as server:
        with pytest.raises(RequestError, match="these runs: none"):
            server.publish(0)
        server.add_run("a", adapter="alice")
        server.add_run("b")  # the active one
        with pytest.raises(RequestError, match="is there already"):
            server.add_run("a", adapter="alice")
        with pytest.raises(RequestError, match="lora:a, lora:b"), server.updating(1):
            pass
        with pytest.raises(NotFoundError, match="lora:c"):
            server.publish({"c": 1})
        with pytest.raises(RequestError, match="lora:b is named twice in .*name it once") as caught:
            server.publish({"a": 10, "b": 20, "lora:b": 21})
        assert caught.value.key == "lora:b"
        server.publish({"a": 10, "b": 20})
        same_tensors(pull(server, run="a")[1], values(model, "alice"))
        same_tensors(pull(server, run="b")[1], values(model, "bob"))
        with server.updating({"b": 21}):
            fill(model, 6)
        assert pull(server, run="a")[0] == 10
        step, got = pull(server, run="b")
        assert step == 21
        same_tensors(got, values(model, "bob"))
        # One run that cannot be committed leaves none half-committed.
        weight = model.base_model.model.layers[0].q_proj.lora_A["bob"].weight
        size = weight.untyped_storage().nbytes()
        with pytest.raises(StateError, match="offloaded"), server.updating({"a": 11, "b": 22}):
            weight.untyped_storage().resize_(0)
        assert server.runs == {"lora:a": 10, "lora:b": 21}
        weight.untyped_storage().resize_(size)
        server.remove_run("a")
        with pytest.raises(FaninError), Client(server.addresses) as client:
            client.metadata("a")
        with pytest.raises(NotFoundError):
            server.remove_run("a")
        server.publish(22)
        server.add_run("a", adapter="alice")
        assert server.runs == {"lora:b": 22, "lora:a": None}
        with pytest.raises(RequestError, match="last step 10"), server.updating({"a": 10}):
            pytest.fail("the body ran")
        server.publish({"a": 11})
        same_tensors(pull(server, run="a")[1], values(model, "alice"))


def test_which_adapter(pull):
    model = adapted(name="alice")
    model.add_adapter("bob", lora())
    model.base_model.set_adapter(["alice", "bob"])
    with pytest.raises(RequestError, match="'alice', 'bob'"):
        serve(model)
    with pytest.raises(RequestError, match="'alice', 'bob'"):
        serve(model, adapter="carol")
    with serve(model, adapter="alice") as server:
        server.publish(0)
        same_tensors(pull(server)[1], values(model, "alice"))


def test_snapshots_and_cast(pull):
    model = adapted()
    with pytest.raises(RequestError, match="without snapshot"):
        serve(model, cast="BF16")
    with serve(model, snapshot=True, cast="BF16") as server:
        server.publish(0)
        wanted = {key: value.to(torch.bfloat16) for key, value in values(model).items()}
        with pytest.raises(ZeroDivisionError), server.updating(1):
            fill(model, 2)
            same_tensors(pull(server)[1], wanted)
            _ = 1 / 0
        same_tensors(pull(server)[1], wanted)
        with server.updating(1):
            fill(model, 3)
        wanted = {key: value.to(torch.bfloat16) for key, value in values(model).items()}
        fill(model, 4)
        same_tensors(pull(server, step=1)[1], wanted)


def test_pause_and_resume(pull):
    model = adapted()
    layer = model.base_model.model.layers[0].q_proj.lora_A["default"]
    array = numpy.ones((3, 24), dtype=numpy.float32)
    alive = weakref.ref(array)
    layer.weight.data = torch.from_numpy(array)
    del array
    with serve(model, lease=0.1) as server:
        server.publish(0)
        with pytest.raises(StateError, match="not paused"):
            server.resume()
        server.pause(reason="the engine sleeps on this device")
        layer.weight.data = torch.from_numpy(numpy.zeros((3, 24), dtype=numpy.float32))
        gc.collect()
        assert alive() is None, "memory is let go while paused"
        with pytest.raises(PausedError, match="the engine sleeps on this device"):
            pull(server)
        with pytest.raises(StateError, match="is paused"), server.updating(1):
            pytest.fail("the body ran")
        layer.weight.data = torch.ones(3, 24)
        server.resume("0")
        step, got = pull(server)
        assert step == 0
        same_tensors(got, values(model))

        # Other values come back: the old step is not shown again.
        server.pause()
        with pytest.raises(RequestError, match="not above"):
            server.resume(step=0)
        weight, size = layer.weight, layer.weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        with pytest.raises(StateError, match="offloaded"):
            server.resume(step=5)
        with pytest.raises(PausedError, match="trainer memory offloaded"):
            pull(server)
        weight.untyped_storage().resize_(size)
        fill(model, 8)
        server.resume(step=5)
        step, got = pull(server)
        assert step == 5
        same_tensors(got, values(model))
        with server.updating(6):
            fill(model, 9)
        same_tensors(pull(server, step=6)[1], values(model))


class FakeCuda:
    """Streams and events that write down what is ordered behind what."""

    def __init__(self):
        self.log = []

    def current_stream(self, device):
        cuda = self

        class FakeStream:
            cuda_stream = 100 + device
            name = f"stream {device}"

            def wait_event(self, event):
                cuda.log.append(f"{self.name} waits for {event.on}")

        return FakeStream()

    def Event(self):
        cuda = self

        class FakeEvent:
            def record(self, stream):
                self.on = stream.name

            def synchronize(self):
                cuda.log.append(f"host waits for {self.on}")

        return FakeEvent()


@pytest.mark.parametrize("snapshot", [False, True])
def test_cuda_streams(monkeypatch, snapshot):
    """A commit goes onto the first device's stream, behind the others' work."""
    cuda = FakeCuda()
    with serve(adapted(), snapshot=snapshot) as server:
        monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
        monkeypatch.setattr(torch.cuda, "Event", cuda.Event)
        commit = server.server.commit

        def committed(publication, step, *, stream, **options):
            cuda.log.append(f"commit {step} on {stream}")
            commit(publication, step, **options)

        monkeypatch.setattr(server.server, "commit", committed)
        server._runs["lora:0"].parameters.devices = [0, 1]
        server.publish(0)
        ordered = ["stream 0 waits for stream 1", f"commit 0 on {Stream(100, 0)}"]
        if snapshot:
            ordered.append("stream 1 waits for stream 0")
        assert cuda.log == ordered
        cuda.log.clear()
        with server.updating(1):
            # By reference a commit that has not taken effect would be withdrawn.
            assert cuda.log == ([] if snapshot else ["host waits for stream 0"])


# -------------------------------------------------------------------------------- names and slices


class Stacked(torch.nn.Module):
    """Adapters of several runs and experts in one parameter each: [runs, E, r, in]."""

    def __init__(self, runs=2, experts=3):
        super().__init__()
        torch.manual_seed(3)
        self.experts = torch.nn.Module()
        for name in ("w1", "w2"):
            for part, shape in (("lora_A", (4, 24)), ("lora_B", (16, 4))):
                value = torch.nn.Parameter(torch.randn(runs, experts, *shape))
                setattr(self.experts, f"{name}_{part}", value)


def slot_values(model, run, experts=3):
    prefix = "base_model.model.experts"
    return {
        f"{prefix}.{e}.{to}.{part}.weight": getattr(model.experts, f"{name}_{part}")[run, e]
        for e in range(experts)
        for name, to in (("w1", "gate_proj"), ("w2", "down_proj"))
        for part in ("lora_A", "lora_B")
    }


FIELDS = {"lora_alpha": 8, "r": 4, "base_model_name_or_path": BASE}


def test_slots_of_stacked_runs(pull):
    model = Stacked()
    with serve(model, run=None) as server:
        for run in range(2):
            server.add_run(run, names=chain(slot(run), per_expert), config=FIELDS)
        server.publish({0: 1, 1: 1})
        for run in range(2):
            same_tensors(pull(server, run=run)[1], slot_values(model, run))
            assert json.loads((pull.path / "adapter_config.json").read_text())["lora_alpha"] == 8
        with server.updating({1: 2}), torch.no_grad():
            model.experts.w1_lora_A[1].neg_()
        assert pull(server, run=1, step=2)[0] == 2
        same_tensors(pull(server, run=1)[1], slot_values(model, 1))
        assert pull(server, run=0)[0] == 1


def test_runs_that_share_a_parameter_are_written_one_by_one(pull):
    model = Stacked()
    with serve(model, run=None) as server:
        for run in range(2):
            server.add_run(run, names=chain(slot(run), per_expert), config=FIELDS)
        server.publish({0: 1, 1: 1})

        def write(run):
            with torch.no_grad():
                for param in model.parameters():
                    param[run].add_(1.0)

        for step in (2, 3):
            for run in range(2):
                with server.updating({run: step}):
                    write(run)
        for run in range(2):
            same_tensors(pull(server, run=run, step=3)[1], slot_values(model, run))
        write(1)  # outside: it can be either's
        both = "lora:0 was written .* so are those of lora:1"
        with pytest.raises(StateError, match=both), server.updating({0: 4}):
            pass
        server.publish({1: 4})
        with server.updating({0: 4}):
            write(0)
        same_tensors(pull(server, run=1, step=4)[1], slot_values(model, 1))


def test_names_that_change_with_the_shape(pull):
    model = Stacked()
    one = chain(slot(0), per_expert)
    with serve(model, names=one, config=FIELDS) as server:
        server.publish(1)
        with server.updating(2):
            for name, param in list(model.experts.named_parameters()):
                setattr(model.experts, name, torch.nn.Parameter(param.detach()[:, :2].clone()))
        same_tensors(pull(server, step=2)[1], slot_values(model, 0, experts=2))


def test_names_functions_that_are_wrong():
    model = adapted()
    with pytest.raises(RequestError, match="publishes 'x'.*again"):
        serve(model, names=lambda name, shape: "x")
    with pytest.raises(RequestError, match="out of range"):
        serve(model, names=lambda name, shape: Slice(name, (99,)))
    with pytest.raises(RequestError, match=r"names\(\) returned \[5\] for '.*lora_A") as caught:
        serve(model, names=lambda name, shape: [5])
    assert "return a name, None" in caught.value.remedy
    with pytest.raises(RequestError, match="names is 3"):
        serve(model, names=3)


def test_names_may_leave_out(pull):
    model = adapted(lora(target_modules=["q_proj"]))
    with serve(model, names=lambda n, s: n if "layers.0" in n else None) as server:
        server.publish(0)
        same_tensors(pull(server)[1], {k: v for k, v in values(model).items() if "layers.0" in k})


# ---------------------------------------------------------------------------------------- refusals


def replaced(change):
    model = adapted()
    owner = model.base_model.model.layers[0].q_proj.lora_A["default"]
    owner.weight = torch.nn.Parameter(change(owner.weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.to("meta"), "meta device"),
        (lambda w: w.to_sparse(), "sparse"),
        (lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "quantized"),
        (lambda w: torch.complex(w, w).conj().imag, r"neg\(\).*resolve_neg\(\)"),
        (lambda w: torch.complex(w, w).conj(), r"conj\(\).*resolve_conj\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_published(change, message):
    with pytest.raises(RequestError, match=message) as caught:
        serve(replaced(change))
    assert "layers.0.q_proj.lora_A" in str(caught.value)
    assert caught.value.remedy


def test_models_that_cannot_be_published():
    with pytest.raises(RequestError, match="no LoRA parameters in Base"):
        serve(Base())
    with pytest.raises(RequestError, match="give the torch.nn.Module"):
        serve({"lora_A": 1})
    model = adapted()
    model.peft_config["default"].base_model_name_or_path = None
    with pytest.raises(RequestError, match="does not name its base model"):
        serve(model)
    with pytest.raises(RequestError, match="no PEFT configuration"):
        serve(Stacked())
    with pytest.raises(RequestError, match="lacks lora_alpha, r"):
        serve(Stacked(), config={"base_model_name_or_path": "x"})
    with pytest.raises(RequestError, match="config is a int") as caught:
        serve(model, config=5)
    assert caught.value.key == "config" and "PEFT's configuration" in caught.value.remedy
    with pytest.raises(RequestError, match="no run"):
        serve(adapted(), run="a/b")
    with pytest.raises(RequestError, match="not initialised"):
        serve(adapted(), group=object())


def test_transformers_names_the_base_model(pull):
    model = adapted()
    model.peft_config["default"].base_model_name_or_path = None
    model.base_model.model.name_or_path = "from/transformers"
    with serve(model) as server:
        server.publish(0)
        pull(server)
    config = json.loads((pull.path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "from/transformers"


# ------------------------------------------------------------------------------- addresses and ends


def reports(*hosts, local=None):
    return [
        Report(None, host, f"net-{host}", None if local is None else local[i], bytes(16))
        for i, host in enumerate(hosts)
    ]


def test_addresses_of_one_host():
    here = choose_addresses(reports("a", "a"), None, None, None)
    assert (here.bind, here.advertise, here.open) == ("127.0.0.1", "127.0.0.1", False)
    here = choose_addresses(reports("a"), "10.1.2.3", None, "10.0.0.0/8")
    assert (here.bind, here.advertise, here.open) == ("10.1.2.3", "10.1.2.3", True)
    here = choose_addresses(reports("a"), None, "10.1.2.3", "10.0.0.0/8")
    assert (here.bind, here.advertise, here.open) == ("10.1.2.3", "10.1.2.3", True)
    with pytest.raises(RequestError, match="nothing says who may read"):
        choose_addresses(reports("a"), "10.1.2.3", None, None)


def test_addresses_of_several_hosts(monkeypatch):
    with pytest.raises(RequestError, match=r"several hosts \(a, b\)"):
        choose_addresses(reports("a", "b"), None, "127.0.0.2", "10.0.0.0/8")
    with pytest.raises(RequestError, match="bind is 127.0.0.1"):
        choose_addresses(reports("a", "b"), "127.0.0.1", "10.0.0.1", "10.0.0.0/8")
    monkeypatch.setattr(world_module, "route_address", lambda targets: "10.9.9.9")
    with pytest.raises(RequestError, match=r"several hosts \(a, b\), and nothing says who"):
        choose_addresses(reports("a", "b"), None, None, None)
    there = choose_addresses(reports("a", "b"), None, None, "10.0.0.0/8")
    assert (there.bind, there.advertise, there.open) == ("10.9.9.9", "10.9.9.9", True)
    there = choose_addresses(reports("a", "b"), None, "pod-0.trainer", "10.0.0.0/8")
    assert (there.bind, there.advertise, there.open) == ("10.9.9.9", "pod-0.trainer", True)
    monkeypatch.setattr(world_module, "route_address", lambda targets: None)
    with pytest.raises(RequestError, match="not found out"):
        choose_addresses(reports("a", "b"), None, None, "10.0.0.0/8")


def test_ports():
    hosts = reports("a", "a", "b", "b")
    assert [base_port_for(hosts, r, 6000, "global") + r for r in range(4)] == list(
        range(6000, 6004)
    )
    assert [base_port_for(hosts, r, 6000, "local") + r for r in range(4)] == [
        6000, 6001, 6000, 6001,
    ]  # fmt: skip
    given = reports("a", "b", local=[3, 5])
    assert [base_port_for(given, r, 6000, "local") + r for r in range(2)] == [6003, 6005]
    assert base_port_for(hosts, 3, 0, "local") == 0
    for port, by in [(65534, "global"), (70000, "global"), (6000, "other"), (-1, "local")]:
        with pytest.raises(RequestError):
            base_port_for(hosts, 3, port, by)


def test_port_in_use_is_named():
    with serve(adapted()) as server:
        port = int(server.addresses[0].rpartition(":")[2])
        with pytest.raises(RequestError, match=str(port)):
            serve(adapted(), base_port=port)


def test_close():
    model = adapted()
    server = serve(model)
    server.publish(0)
    held = weakref.ref(server)
    server.close()
    server.close()
    with pytest.raises(StateError, match="the server is closed"):
        server.publish(1)
    with pytest.raises(StateError, match="the server is closed"):
        server.add_run("1")
    del server
    gc.collect()
    assert held() is None


# ------------------------------------------------------------------------------ two ranks over gloo


def sharded(root=True, config=None, **options):
    from torch.distributed.fsdp import fully_shard

    model = adapted(config)
    for layer in model.base_model.model.layers:
        fully_shard(layer, **options)
    if root:
        fully_shard(model, **options)
    return model


def gathered(model):
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in get_peft_model_state_dict(model).items()
    }


def compare(server, model, rank, scratch, **options):
    """Rank 0 pulls from both and compares with what all ranks hold together."""
    from pathlib import Path

    wanted = gathered(model) if isinstance(model, torch.nn.Module) else model
    if rank == 0:
        directory = Path(scratch) / f"{os.urandom(8).hex()}"
        directory.mkdir()
        same_tensors(Puller(directory)(server, **options)[1], wanted)
    torch.distributed.barrier()


def fsdp2(rank, scratch):
    model = sharded()
    server = serve(model)
    assert len(set(server.addresses)) == 2
    server.publish(0)
    compare(server, model, rank, scratch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(1, 4):
        model(torch.arange(8)).square().mean().backward()
        with server.updating(step):
            optimizer.step()
        optimizer.zero_grad()
        compare(server, model, rank, scratch, step=step)
    server.close()


def unsharded_buffers(rank, scratch):
    model = sharded()
    server = serve(model, lease=0.1)
    server.publish(0)
    with torch.no_grad():
        model(torch.arange(8))
    # A forward without backward leaves the root group's parameters whole; nothing of the layers.
    server.publish(1)
    compare(server, model, rank, scratch)
    model.base_model.model.layers[0].unshard()
    with pytest.raises(StateError, match="temporary unsharded buffer") as caught:
        server.publish(2)
    assert "reshard" in caught.value.remedy
    with pytest.raises(StateError, match="temporary unsharded buffer"):
        serve(model)
    model.base_model.model.layers[0].reshard()
    server.publish(2)
    compare(server, model, rank, scratch)
    server.close()


def unsharded_over_tensor_parallel(rank, scratch):
    """FSDP's buffers are DTensors as well, of the tensor-parallel mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    model = adapted()
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(param.detach(), mesh["tensor"], [Shard(0)])
            trains = param.requires_grad
            setattr(module, name, torch.nn.Parameter(spread, requires_grad=trains))
    fully_shard(model, mesh=mesh["data"])
    server = serve(model, lease=0.1)
    inner = serve(model.base_model.model, config=model.peft_config["default"])
    server.publish(0)
    inner.publish(0)
    model.unshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    with pytest.raises(StateError, match="temporary unsharded buffer") as caught:
        server.publish(1)
    assert "reshard" in caught.value.remedy
    with pytest.raises(StateError, match="temporary unsharded buffer"):
        serve(model)
    with pytest.raises(StateError, match="temporary unsharded buffer"), server.updating(1):
        pass
    with pytest.raises(StateError, match="temporary unsharded buffer"):
        inner.publish(1)  # whose module knows nothing of FSDP
    model.reshard()
    for one in (server, inner):
        one.publish(1)
        compare(one, model, rank, scratch)
        one.close()


def written_then_moved(rank, scratch):
    """A DTensor's writes are counted apart from its part's, and to() swaps another one into it."""
    model = sharded()
    with serve(model) as server:
        server.publish(0)
        model.to(torch.bfloat16)
        server.publish(1)
        fill_sharded(model)
        model.to(torch.float32)
        with pytest.raises(StateError, match="written outside of updating"):
            server.publish(2)
        server.publish(2)
        compare(server, model, rank, scratch)


def root_group(rank, scratch):
    """All LoRA parameters in the root's group, which stays unsharded after a forward."""
    from torch.distributed.fsdp import fully_shard

    model = adapted()
    fully_shard(model)
    server = serve(model, lease=0.1)
    server.publish(0)
    with torch.no_grad():
        model(torch.arange(8))
    with pytest.raises(StateError, match="temporary unsharded buffer"):
        server.publish(1)
    model.reshard()
    server.publish(1)
    compare(server, model, rank, scratch)
    server.close()


def ignored_parameters(rank, scratch):
    """LoRA that FSDP is told to leave alone is replicated and plain, and that is all right."""
    from torch.distributed.fsdp import fully_shard

    model = adapted()
    kept = {param for param in model.parameters() if param.requires_grad}
    fully_shard(model, ignored_params=kept)
    server = serve(model)
    server.publish(0)
    compare(server, model, rank, scratch)
    server.close()


def other_placements(rank, scratch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    flat = init_device_mesh("cpu", (1, 2))
    for on, placements in [
        (mesh, [Shard(0)]),
        (mesh, [Shard(1)]),
        (mesh, [Replicate()]),
        (flat, [Shard(1), Shard(0)]),
        (flat, [Replicate(), Shard(0)]),
    ]:
        model = adapted(lora(r=5))
        wanted = values(model)
        for module in list(model.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                if param.requires_grad:
                    spread = distribute_tensor(param.detach(), on, placements)
                    setattr(module, name, torch.nn.Parameter(spread))
        with serve(model) as server:
            server.publish(0)
            compare(server, wanted, rank, scratch)
    # Pieces that lie apart: rows 0, 1, 3 here and 2, 4 there, each rank's in one local tensor.
    model = adapted(lora(r=5, target_modules=["q_proj"]))
    wanted = values(model)
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            if param.requires_grad:
                value = param.detach()
                parts = [
                    part.chunk(2)[rank] for part in value.chunk(2) if len(part.chunk(2)) > rank
                ]
                local = DTensor.from_local(
                    torch.cat(parts),
                    mesh,
                    [_StridedShard(0, split_factor=2)],
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
                setattr(module, name, torch.nn.Parameter(local))
    with serve(model) as server:
        server.publish(0)
        compare(server, wanted, rank, scratch)


def partial_and_fsdp1(rank, scratch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    model = adapted()
    owner = model.base_model.model.layers[0].q_proj.lora_A["default"]
    summand = DTensor.from_local(owner.weight.detach(), mesh, [Partial()])
    owner.weight = torch.nn.Parameter(summand, requires_grad=False)
    with pytest.raises(RequestError, match="summands, not weights"):
        serve(model)
    for original in (False, True):
        model = adapted()
        model.requires_grad_(True)
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=original
        )
        with pytest.raises(RequestError, match="FSDP1") as caught:
            serve(wrapped)
        assert "fully_shard" in caught.value.remedy


def slices_of_shards(rank, scratch):
    from torch.distributed.fsdp import fully_shard

    model = Stacked(runs=2, experts=3)
    wanted = slot_values(model, 1)
    fully_shard(model)  # over the runs: each run's slot lies on one rank
    with serve(model, names=chain(slot(1), per_expert), config=FIELDS) as server:
        server.publish(0)
        compare(server, wanted, rank, scratch)
    model = Stacked(runs=2, experts=3)
    fully_shard(model.experts, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(3))
    with serve(model, names=chain(slot(1), per_expert), config=FIELDS) as server:
        server.publish(0)
        compare(server, wanted, rank, scratch)


def assign_load_of_shards(rank, scratch):
    model = sharded()
    with serve(model) as server:
        server.publish(0)
        other = sharded()
        fill_sharded(other)
        with server.updating(1):
            model.load_state_dict(other.state_dict(), assign=True)
        compare(server, other, rank, scratch, step=1)
        with server.updating(2):
            model.to(torch.bfloat16)
        compare(server, model, rank, scratch, step=2)


def fill_sharded(model):
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(1.5)


def one_rank_fails(rank, scratch):
    model = adapted()
    if rank == 1:
        model.delete_adapter("default")
    with pytest.raises(RequestError, match="rank 1 could not describe its parameters") as caught:
        serve(model)
    assert caught.value.rank == 1
    # A port that only rank 1 cannot have: both are known to be free before the second is taken.
    base = [free_ports(2) if rank == 0 else 0]
    torch.distributed.broadcast_object_list(base)
    with socket.socket() as taken, serve(adapted()) as server:
        if rank == 1:
            taken.bind(("127.0.0.1", base[0] + 1))
            taken.listen()
        torch.distributed.barrier()
        with pytest.raises(FaninError, match="rank 1 could not start its server"):
            serve(adapted(), base_port=base[0])
        server.publish(0)
        torch.distributed.barrier()


def several_hosts(rank, scratch):
    was = world_module.network_of_host
    world_module.network_of_host = lambda: f"net-{rank}"
    try:
        with pytest.raises(RequestError, match="several hosts.*nothing says who may read"):
            serve(adapted())
        with pytest.raises(RequestError, match="advertise is 127.0.0.1.*several hosts"):
            serve(adapted(), advertise="127.0.0.1", allow="10.0.0.0/8")
    finally:
        world_module.network_of_host = was


def information(rank, scratch):
    with serve(adapted()) as server:
        server.publish(4)
        path = server.write_info(os.path.join(scratch, "info"))
        assert (path is None) == (rank == 1)
        torch.distributed.barrier()
        info = read_info(os.path.join(scratch, "info"))
        assert info.addresses == tuple(server.addresses)
        assert info.world_id == server.world_id
        torch.distributed.barrier()


def replicas_of_slots(rank, scratch):
    """One expert of one of two runs that lie in the same parameters is another one's on rank 1."""
    model = Stacked()
    with torch.no_grad():
        model.experts.w2_lora_B[1, 2, 15, 3] += rank
    with serve(model, run=None) as server:
        for run in range(2):
            server.add_run(run, names=chain(slot(run), per_expert), config=FIELDS)
        server.publish({0: 1})
        compare(server, slot_values(model, 0), rank, scratch)
        with pytest.raises(RequestError) as caught:
            server.publish({1: 1})
        assert caught.value.key == "base_model.model.experts.2.down_proj.lora_B.weight"


def modules_that_join(rank, scratch):
    """What joins is compared whole, and so is what has got another shape."""
    model = adapted(lora(target_modules=["q_proj"]))

    def renew(r, seed):
        model.delete_adapter("default")
        config = lora(r=r, base_model_name_or_path=BASE)  # v_proj as well
        model.add_adapter("default", config)
        model.set_adapter("default")
        fill(model, seed)

    with serve(model) as server:
        server.publish(0)
        with server.updating(1):
            renew(2, 4)
        compare(server, model, rank, scratch, step=1)
        with pytest.raises(RequestError, match="other values"), server.updating(2):
            renew(3, 5 + rank)


TWO_RANKS = [
    fsdp2,
    unsharded_buffers,
    unsharded_over_tensor_parallel,
    written_then_moved,
    root_group,
    ignored_parameters,
    other_placements,
    partial_and_fsdp1,
    slices_of_shards,
    assign_load_of_shards,
    one_rank_fails,
    several_hosts,
    information,
    replicas_of_slots,
    modules_that_join,
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with case_world(2, tmp_path_factory.mktemp("ranks"), "test_torch_server.py") as world:
        yield world


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda one: one.__name__)
def test_two_ranks(ranks, tmp_path, case):
    run_case(ranks, case.__name__, str(tmp_path))


if __name__ == "__main__":
    own = int(os.environ["RANK"])
    run_cases({one.__name__: functools.partial(one, own) for one in TWO_RANKS})
