# SPDX-License-Identifier: Apache-2.0
"""One rank of test_torch_merge.py, _packed.py and _transform.py (a child of worlds.py).

It is told to `run` a case below, which fails by an assertion.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fanin.errors import RequestError, StateError
from fanin.torch import WeightServer, _factors
from merged import adapted, four_bits, pulled, rounded, same, saved, unpacked
from peft import LoraConfig
from quantized import whole_in_fp8
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from worlds import run_cases

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sharded(model: Any, layout: str) -> Any:
    """FSDP2, of the rows, of the columns where there are any, or of replicas."""
    mesh = init_device_mesh("cpu", (SIZE,))
    more: dict[str, Any] = {}
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replica", "shard"))
    if layout == "columns":
        more["shard_placement_fn"] = lambda param: Shard(min(param.dim() - 1, 1))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def whole(model: Any) -> dict[str, Any]:
    held = model.state_dict().items()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in held}


def merged(adapter: str, layout: str, dtype: str, wide: bool) -> None:
    """What is pulled is what PEFT saves, at the next step as well; the model stays as it is."""

    def make() -> Any:
        return adapted(adapter, dtype, wide)

    model = sharded(make(), layout)
    before = whole(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        WeightServer(model, base_port=0, use_ucx=False, merge=True) as server,
    ):
        server.publish(0)
        dist.barrier()
        if RANK == 0:
            same(pulled(server), saved(make, Path(folder)))
        dist.barrier()
        after = whole(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        with server.updating(1), torch.no_grad():
            for path, param in model.named_parameters():
                if ".lora_" in path:
                    param.mul_(-1.5)
        later = whole(model)
        dist.barrier()
        if RANK == 0:

            def stepped() -> Any:
                model = make()
                model.load_state_dict(later)
                return model

            same(pulled(server), saved(stepped, Path(folder) / "1"))
        dist.barrier()


def rounded_to_fp8(adapter: str, layout: str) -> None:
    """Blocks that ranks share are those of the whole merged tensors; at the next step as well."""

    def make() -> Any:
        return adapted(adapter)

    model = sharded(make(), layout)
    with (
        tempfile.TemporaryDirectory() as folder,
        WeightServer(model, base_port=0, use_ucx=False, merge=True, quantize="fp8") as server,
    ):
        for step in range(2):
            with server.updating(step), torch.no_grad():
                for path, param in model.named_parameters():
                    if ".lora_" in path:
                        param.mul_(-1.5)
            now = whole(model)
            dist.barrier()
            if RANK == 0:

                def stepped(state: Any = now) -> Any:
                    model = make()
                    model.load_state_dict(state)
                    return model

                got = pulled(server)
                same(got, rounded(saved(stepped, Path(folder) / str(step)), got))
            dist.barrier()


def split_rows_of_dora() -> None:
    try:
        WeightServer(sharded(adapted("dora"), "columns"), base_port=0, merge=True)
    except RequestError as error:
        assert "scales whole rows" in str(error) and "q_proj" in (error.key or ""), error
    else:
        raise AssertionError("norms of parts of rows")


def dequantized(storage: str, kind: str, nested: bool, **options: Any) -> None:
    """Each rank dequantizes and merges the range of packed values that FSDP2 gave it; with
    quantize= it then rounds them to fp8."""
    model = four_bits(storage, kind, nested)
    wanted = unpacked(model)
    if options:
        wanted = whole_in_fp8(wanted, "_scale_inv")
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with WeightServer(model, base_port=0, use_ucx=False, merge=True, **options) as server:
        server.publish(0)
        dist.barrier()
        if RANK == 0 and options:
            same(in_a_directory(server), wanted)
        elif RANK == 0:
            same({k: v + 0 for k, v in pulled(server).items()}, wanted)
        held = server._runs["full:0"].parameters.held()
        cut = [0 < box.extent[1] < shard.shape[1] for shard, box, _ in held if len(shard.shape) > 1]
        dist.barrier()
        assert SIZE == 2 or any(cut), "this rank holds no part of a row"


def in_a_directory(server: WeightServer) -> dict[str, Any]:
    """What the command pulls, as engines load it."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "model"
        command = [os.environ["NIXL_FETCH"], "pull", ",".join(server.addresses), "full:0", str(to)]
        subprocess.run(command, check=True, timeout=60)
        config = json.loads((to / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "fp8"
        return dict(load_file(to / "model.safetensors"))


def transformed() -> None:
    """Rows that a transform computes of shards, and factors that it gathers."""
    from test_torch_transform import model_of_corrections, serve, wanted_of

    model = model_of_corrections()
    wanted = wanted_of(model)
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    with serve(fully_shard(model, mesh=mesh)) as server:
        server.publish(0)
        dist.barrier()
        if RANK == 0:
            same(pulled(server), wanted)
        dist.barrier()


def refused_on_one_rank(how: str, quantize: str | None) -> None:
    """That rank refuses; the others do not wait for it, and its last step's results stay."""
    model = sharded(adapted("linear"), "fsdp")
    options = {"base_port": 0, "use_ucx": False, "merge": True, "quantize": quantize}
    with WeightServer(model, **options) as server:
        server.publish(0)
        dist.barrier()
        before = pulled(server) if RANK == 0 else {}
        dist.barrier()
        norm = model.get_base_model().model.norm.weight._local_tensor.untyped_storage()
        if RANK == 1 and how == "switched off":
            model.disable_adapter_layers()
        if RANK == 1 and how.startswith("is not"):
            model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
            model.set_adapter("other")
        if RANK == 1 and how == "offloaded":
            norm.resize_(0)
        with torch.no_grad():
            for path, param in model.named_parameters():
                if ".lora_" in path:
                    param.mul_(-1.5)
        try:
            server.publish(1)
        except (RequestError, StateError) as error:
            assert how in str(error), error
            told = "rank 1 does not publish step 1" in str(error)
            assert RANK == 1 or (how == "offloaded" and told), error
        else:
            assert RANK != 1 and how != "offloaded"
        dist.barrier()
        kept = how == "switched off" and quantize is None
        mine = server._runs["full:0"].parameters.held() if kept else ()
        for shard, box, values in mine:
            rows = (slice(at, at + n) for at, n in zip(box.offset, box.extent, strict=True))
            if RANK == 0 and ".q_proj." in shard.name:
                assert not torch.equal(values, before[shard.name][tuple(rows)])
        dist.barrier()


def ended_in(collective: str, quantize: str | None) -> None:
    """Rank 1 is killed in that collective of a step; the others say so, and nobody reads it."""
    model = sharded(adapted("linear"), "fsdp")
    server = WeightServer(model, base_port=0, use_ucx=False, merge=True, quantize=quantize)
    server.publish(0)
    dist.barrier()
    if RANK == 1:
        module, name = (_factors, "_all_gather")
        if collective == "maximum":
            module, name = dist, "all_reduce"
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    try:
        server.publish(1)
    except StateError as error:
        assert "the ranks' collective broke off" in error.message, error
        assert (error.key, "start all ranks again" in error.remedy) == ("full:0", True), error
    else:
        raise AssertionError("published")
    assert server.runs == {"full:0": 0}
    server.close()


if __name__ == "__main__":
    run_cases(globals())
