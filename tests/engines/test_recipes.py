# SPDX-License-Identifier: Apache-2.0
"""docs/recipes: every piece of Python is Python, and what needs nobody else's package runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import fanin
import pytest
import torch
from fanin.torch import WeightServer

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
PAGES = sorted(page.stem for page in RECIPES.glob("*.md") if page.stem != "README")


def pieces(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (RECIPES / f"{page}.md").read_text(), re.M | re.S)


def compiled(piece: str) -> None:
    """As it stands, or as a part of a function, or as the head of a block."""
    text = textwrap.dedent(piece).replace("=...", "=None").replace(", ...)", ")")
    for form in (text, f"async def part():\n{textwrap.indent(text, '    ')}", f"{text}    pass\n"):
        try:
            compile(form, "recipe", "exec")
            return
        except SyntaxError as error:
            wrong = error
    raise wrong


@pytest.mark.parametrize("page", PAGES)
def test_the_code_is_python(page: str) -> None:
    found = pieces(page)
    assert found
    for piece in found:
        # Lines that belong to several places of a file are told apart by comments.
        for part in re.split(r"^# [\w/.]+(?:\.py)?,? .*\n|^# \w+\.\w+.*\n", piece, flags=re.M):
            compiled(part)


class _Holder(torch.nn.Module):
    """Modules made of a tree of shapes."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__()
        for name, value in tree.items():
            if isinstance(value, dict):
                setattr(self, name, _Holder(value))
            else:
                setattr(self, name, torch.nn.Parameter(torch.randn(*value)))


def test_torchtitans_names() -> None:
    """A layer of its Qwen3: fused and interleaved q, k and v, stacked experts."""
    (code,) = [piece for piece in pieces("torchtitan") if piece.startswith("import re")]
    scope: dict[str, Any] = {}
    exec(compile(code, "torchtitan.md", "exec"), scope)

    groups, heads_per_kv, head, width, experts = 2, 2, 8, 32, 3
    layer = "model.layers.{}."

    class Adapter:
        from_hf_map = {
            "model.embed_tokens.weight": "tok_embeddings.weight",
            layer + "self_attn.q_proj.weight": "layers.{}.attention.qkv_linear.wq.weight",
            layer + "self_attn.k_proj.weight": "layers.{}.attention.qkv_linear.wk.weight",
            layer + "self_attn.v_proj.weight": "layers.{}.attention.qkv_linear.wv.weight",
            layer + "self_attn.rotary_emb.inv_freq": None,
            layer + "mlp.experts.{}.down_proj.weight": "layers.{}.moe.experts.w2_EDF",
        }

    rows = groups * (heads_per_kv + 2) * head
    attention = {"qkv_linear": {"wqkv": {"weight": (rows, width)}}}
    moe = {"experts": {"w2_EDF": (experts, width, 16)}}
    layers = {"11": {"attention": attention, "moe": moe}}
    model = _Holder({"tok_embeddings": {"weight": (64, width)}, "layers": layers})

    held = dict(model.named_parameters())
    fused = held["layers.11.attention.qkv_linear.wqkv.weight"].detach()
    fused = fused.reshape(groups, heads_per_kv + 2, head, width)
    layer = layer.format(11)
    expected = {
        "model.embed_tokens.weight": held["tok_embeddings.weight"].detach(),
        layer + "self_attn.q_proj.weight": fused[:, :heads_per_kv].reshape(-1, width),
        layer + "self_attn.k_proj.weight": fused[:, heads_per_kv].reshape(-1, width),
        layer + "self_attn.v_proj.weight": fused[:, heads_per_kv + 1].reshape(-1, width),
    }
    for expert in range(experts):
        stacked = held["layers.11.moe.experts.w2_EDF"].detach()
        expected[layer + f"mlp.experts.{expert}.down_proj.weight"] = stacked[expert]

    names = scope["hf_names"](Adapter, heads_per_kv=heads_per_kv, head_dim=head)
    with WeightServer(model, run="0", base_port=0, names=names) as server:
        server.publish(0)
        with fanin.Client(server.addresses) as client:
            assert {entry.name for entry in client.catalog("full:0")} == set(expected)
            pulled = {name: torch.zeros(value.shape) for name, value in expected.items()}
            client.pull_into("full:0", pulled, step=0)
    for name, value in expected.items():
        assert torch.equal(pulled[name], value), name


def test_a_run_that_is_paused_while_it_is_trained() -> None:
    """verl's and miles' pages: no hook at the optimizer, no copy, no step twice."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with WeightServer(model, run="0", base_port=0) as server:
        server.publish(1)
        for step in (2, 3):
            server.pause(reason="the trainer is training")
            with fanin.Client(server.addresses) as client:
                pulled = {"weight": torch.zeros(4, 4)}
                with pytest.raises(fanin.PausedError, match="the trainer is training"):
                    client.pull_into("full:0", pulled, timeout=5.0)
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                server.resume(step=step)
                assert client.pull_into("full:0", pulled, timeout=5.0).step == step
                assert torch.equal(pulled["weight"], model.weight.detach())
