# SPDX-License-Identifier: Apache-2.0
"""What becomes of a served model after its server was made: other adapters under the same name,
modules that join, memory that moves, runs that come while another thread trains."""

from __future__ import annotations

import json

import pytest
import torch
from fanin import Client
from fanin.errors import HostError, RequestError, StateError
from fanin.torch import WeightServer
from models import same_tensors
from peft import get_peft_model, inject_adapter_in_model
from test_torch_server import BASE, Puller, adapted, fill, lora, serve, trained, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


@pytest.fixture
def pull(tmp_path):
    return Puller(tmp_path)


@pytest.fixture
def alone():
    """torch.distributed with this process as its only rank."""
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    yield
    torch.distributed.destroy_process_group()


def configuration(pull):
    """What the last pull has brought."""
    return json.loads((pull.path / "adapter_config.json").read_text())


# ------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"lora_alpha": 64, "use_rslora": True},
        {"lora_alpha": 64, "r": 8, "target_modules": ["q_proj", "v_proj", "embed"]},
        {"bias": "all", "r": 2},
        {"target_modules": ["v_proj"]},
    ],
    ids=lambda options: ",".join(options),
)
def test_an_adapter_that_is_made_anew_under_its_name(pull, tmp_path, options, snapshot):
    model = adapted()
    with serve(model, snapshot=snapshot) as server:
        server.publish(0)
        with server.updating(1):
            model.delete_adapter("default")
            model.add_adapter("default", lora(base_model_name_or_path=BASE, **options))
            model.set_adapter("default")
            fill(model, 2)
        step, got = pull(server)
    assert step == 1
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    wanted = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    pulled = configuration(pull)
    for field in ("r", "lora_alpha", "use_rslora", "bias"):
        assert pulled[field] == wanted[field], field
    assert sorted(pulled["target_modules"]) == sorted(wanted["target_modules"])
    same_tensors(
        got, {key: value for key, value in values(model).items() if ".embed.weight" not in key}
    )


def test_a_configuration_that_is_changed_in_place_is_the_next_steps(pull):
    model = adapted()
    config = model.peft_config["default"]
    with serve(model) as server:
        server.publish(0)
        config.lora_alpha, config.bias = 99, "all"
        pull(server, step=0)
        assert (configuration(pull)["lora_alpha"], configuration(pull)["bias"]) == (6, "none")
        with server.updating(1):
            fill(model, 2)
        same_tensors(pull(server, step=1)[1], values(model))
        assert (configuration(pull)["lora_alpha"], configuration(pull)["bias"]) == (99, "all")


def test_a_configuration_that_cannot_be_published_leaves_the_last_step(pull):
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        model.peft_config["default"].base_model_name_or_path = None
        with pytest.raises(RequestError, match="does not name its base model"):
            server.publish(1)
        assert pull(server)[0] == 0


@pytest.mark.parametrize("refuses", ["set_metadata", "put"])
def test_a_configuration_that_was_not_told_to_its_end_is_told_again(pull, monkeypatch, refuses):
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        model.peft_config["default"].bias = "all"

        def refuse(*_, **__):
            raise HostError.make("no memory")

        monkeypatch.setattr(server.server, refuses, refuse)
        with pytest.raises(HostError, match="no memory"):
            server.publish(1)
        monkeypatch.undo()
        server.publish(1)
        same_tensors(pull(server, step=1)[1], values(model))
        assert configuration(pull)["bias"] == "all"


def test_a_refresh_tells_the_models_new_configuration():
    class Config:
        hidden_size = 3

        def to_json_string(self):
            return json.dumps({"hidden_size": self.hidden_size})

    model = torch.nn.Linear(3, 3)
    model.config = Config()
    with WeightServer(model, base_port=0, use_ucx=False) as server:
        server.publish(0)
        with server.updating(1):
            model.weight = torch.nn.Parameter(torch.ones(3, 4))
            model.config.hidden_size = 4
            server.refresh()
        with Client(server.addresses) as client:
            config = json.loads(client.metadata("full:0")["config"])
        assert config["hidden_size"] == 4


# ----------------------------------------------------------------------------------- what is saved


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 24))
        self.register_buffer("score_bias", torch.randn(4))
        self.register_buffer("load", torch.randn(4), persistent=False)


class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(24, 16)
        self.gate = Gate()
        self.norm = torch.nn.BatchNorm1d(24)


def routed():
    model = get_peft_model(
        Routed(), lora(target_modules=["q_proj"], modules_to_save=["gate", "norm"])
    )
    model.peft_config["default"].base_model_name_or_path = BASE
    return model


def test_buffers_of_modules_to_save_belong_to_the_adapter(pull):
    model = routed()
    model.add_adapter("other", lora(target_modules=["q_proj"], modules_to_save=["gate", "norm"]))
    gate = model.base_model.model.gate.modules_to_save["default"]
    norm = model.base_model.model.norm.modules_to_save["default"]
    with serve(model, adapter="default") as server:
        server.publish(0)
        got = pull(server, step=0)[1]
        same_tensors(got, values(model))
        prefix = "base_model.model."
        assert {f"{prefix}gate.score_bias", f"{prefix}norm.num_batches_tracked"} <= got.keys()
        with server.updating(1):
            gate.score_bias.add_(1.0)
        same_tensors(pull(server, step=1)[1], values(model))
        norm.train()(torch.randn(5, 24))  # its forward writes
        with pytest.raises(StateError, match="num_batches_tracked'.*outside of updating"):
            server.publish(2)


def test_lora_that_joins_further_modules(pull):
    model = adapted(lora(target_modules=["q_proj"]))
    config = model.peft_config["default"]
    with serve(model) as server:
        server.publish(0)
        before = {id(param) for param in trained(model)}
        with server.updating(1):
            joins = lora(target_modules=["v_proj"], base_model_name_or_path=BASE)
            inject_adapter_in_model(joins, model.base_model.model, adapter_name="default")
            config.target_modules = {"q_proj", "v_proj"}
            model.peft_config["default"] = config
            fill(model, 2)
        assert before < {id(param) for param in trained(model)}
        same_tensors(pull(server, step=1)[1], values(model))


@pytest.mark.parametrize(
    ("module", "told", "joins_at"),
    [("layers.1.q_proj", True, 1), ("layers.0.v_proj", False, 1), ("layers.1.q_proj", False, 2)],
    ids=["told", "beside other lora", "elsewhere"],
)
def test_the_step_that_joined_lora_is_first_in(module, told, joins_at):
    model = adapted(lora(target_modules=["layers.0.q_proj"]))
    config = model.peft_config["default"]
    with serve(model) as server, Client(server.addresses) as client:
        server.publish(0)
        for step in (1, 2):
            with server.updating(step):
                if step == 1:
                    joins = lora(target_modules=[module], base_model_name_or_path=BASE)
                    inject_adapter_in_model(joins, model.base_model.model, adapter_name="default")
                if not told:
                    model.peft_config["default"] = config
            published = {entry.name for entry in client.catalog("lora:0")}
            assert (published == values(model).keys()) == (step >= joins_at)


def test_the_base_model_is_looked_through_before_an_update_begins():
    looks = []

    class Watched(dict):
        def __len__(self):
            looks.append(self)
            return super().__len__()

    model = adapted()
    head = model.base_model.model.head
    head._parameters = Watched(head._parameters)
    with serve(model) as server:
        begin = server.server.begin_update
        server.publish(0)
        looks.clear()
        looked = []
        server.server.begin_update = lambda run: (looked.extend(looks), looks.clear(), begin(run))
        with server.updating(1):
            fill(model, 2)
        assert (len(looked), looks) == (1, [])
        server.publish(2)
        assert (len(looked), looks) == (2, [])


def test_names_with_compile_around_parallel(pull):
    model = adapted()
    for wrapped in (
        torch.compile(torch.nn.DataParallel(model)),
        torch.nn.DataParallel(torch.compile(model)),
        torch.compile(torch.nn.DataParallel(torch.compile(model))),
    ):
        with serve(wrapped) as server:
            server.publish(0)
            same_tensors(pull(server)[1], values(model))


# ----------------------------------------------------------------------------------------- sharding


class Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))


def split(model, mesh):
    """Tensor parallelism of the model's weights."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            spread = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
            module.weight = torch.nn.Parameter(spread)


def pulled(server):
    into = {"0.weight": torch.empty(8, 8)}
    with Client(server.addresses) as client:
        client.pull_into("full:0", into, timeout=10)
    return into["0.weight"]


@pytest.mark.usefixtures("alone")
def test_a_refresh_is_told_no_buffers_of_a_module_further_outside():
    model = Around()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    split(model, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    with WeightServer(model.inner, base_port=0, use_ucx=False) as server:
        server.publish(0)
        model.unshard()
        for call in (lambda: server.publish(1), server.refresh):
            with pytest.raises(StateError, match="'0.weight' is FSDP's temporary unsharded buffer"):
                call()
        model.reshard()
        server.refresh()
        server.publish(1)
        assert torch.equal(pulled(server), model.inner[0].weight.full_tensor())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("over", ["fsdp", "tensor parallelism"])
def test_a_server_is_not_made_of_buffers_of_a_module_further_outside(over):
    model = Around()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    if over != "fsdp":
        split(model, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    model.unshard()
    with pytest.raises(StateError, match="'0.weight' is FSDP's temporary unsharded buffer"):
        WeightServer(model.inner, base_port=0, use_ucx=False)
    model.reshard()
    with WeightServer(model.inner, base_port=0, use_ucx=False) as server:
        server.publish(0)
        assert torch.equal(pulled(server), model.inner[0].weight.full_tensor())


@pytest.mark.usefixtures("alone")
def test_a_refresh_is_told_of_another_mesh():
    model = Around().inner
    split(model, init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",)))
    with WeightServer(model, base_port=0, use_ucx=False) as server:
        server.publish(0)
        both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "rows"))
        for step, mesh, placements in (
            (1, both, [Replicate(), Shard(0)]),
            (2, init_device_mesh("cpu", (1,)), [Shard(1)]),
        ):
            whole = model[0].weight.full_tensor().detach()
            model[0].weight = torch.nn.Parameter(distribute_tensor(whole + 1, mesh, placements))
            server.refresh()
            server.publish(step)
            assert torch.equal(pulled(server), whole + 1)


# ------------------------------------------------------------------------------------------- writes


def give_other_memory(model):
    for param in trained(model):
        param.data = param.data.clone()


@pytest.mark.parametrize(
    "move", [give_other_memory, lambda model: model.to(torch.bfloat16)], ids=["data", "to"]
)
def test_writes_before_the_memory_moves_are_refused(pull, move):
    model = adapted()
    with serve(model) as server, Client(server.addresses) as client:
        server.publish(0)
        move(model)  # by itself it writes nothing
        server.publish(1)
        model.load_state_dict({key: 2 * value for key, value in model.state_dict().items()})
        give_other_memory(model)
        with pytest.raises(StateError, match="written outside of updating.*after step 1"):
            server.publish(2)
        assert [info.state for info in client.publications()] == ["unpublished"]
        server.publish(2)
        same_tensors(pull(server, step=2)[1], values(model))


def test_swapped_tensors_are_not_written(pull):
    """With torch.__future__'s switch to() puts other tensors into the parameters, and counts."""
    model = adapted()
    with serve(model) as server:
        server.publish(0)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(torch.bfloat16)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        server.publish(1)
        same_tensors(pull(server, step=1)[1], values(model))


# --------------------------------------------------------------------------------- several threads


@pytest.mark.parametrize("change", ["add_run", "remove_run"])
@pytest.mark.parametrize("during", ["optimizer", "updating"])
def test_runs_that_come_and_go_meanwhile(monkeypatch, change, during):
    """As another thread does it: in the middle of a look through the runs."""
    model = adapted()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    for param in trained(model):
        param.grad = torch.ones_like(param)
    with serve(model) as server:
        server.add_run("1")
        # An update of one run of two that lend the same memory would be refused.
        server.publish({"0": 0, "1": 0} if during == "optimizer" else {"0": 0})
        parameters = server._runs["lora:0"].parameters
        looked = "lent" if during == "optimizer" else "counts"
        look, changed = getattr(parameters, looked), []

        def meanwhile(param):
            if not changed:
                changed.append(change)
                if change == "add_run":
                    server.add_run("2")
                else:
                    server.remove_run("1")
            return look(param)

        monkeypatch.setattr(parameters, looked, meanwhile)
        if during == "optimizer":
            optimizer.step()
        else:
            with server.updating({"0": 1}):
                optimizer.step()
        assert changed == [change]
