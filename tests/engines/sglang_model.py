# SPDX-License-Identifier: Apache-2.0
"""A model whose loader does what SGLang's loaders do, without SGLang: a stand-in.

Fused qkv of which a tensor-parallel rank takes its rows, an embedding that is padded, experts in
one parameter, loaders as attributes of parameters, absorbed weights that are made after loading,
and, if it is asked for, a projection that is made of two published tensors by computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

HIDDEN, INTER, VOCABULARY, PADDED, EXPERTS, LAYERS = 16, 24, 30, 32, 4, 2
HEADS = 4


def _loaded_rows(parameter: Any, loaded: Any, rank: int, size: int, at: int = 0) -> None:
    rows = loaded.shape[0] // size
    parameter.data.narrow(0, at, rows).copy_(loaded.narrow(0, rank * rows, rows))


class _Projection(nn.Module):
    """Several published tensors, one below the other, each divided by rows."""

    def __init__(self, parts: dict[str, int], columns: int, rank: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sum(parts.values()) // size, columns), False)
        starts, at = {}, 0
        for name, rows in parts.items():
            starts[name] = at
            at += rows // size

        def load(parameter: Any, loaded: Any, shard: str) -> None:
            _loaded_rows(parameter, loaded, rank, size, starts[shard])

        self.weight.weight_loader = load  # type: ignore[attr-defined]


class _Columns(nn.Module):
    """Divided by columns."""

    def __init__(self, rows: int, columns: int, rank: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns // size), False)

        def load(parameter: Any, loaded: Any) -> None:
            width = columns // size
            parameter.data.copy_(loaded.narrow(1, rank * width, width))

        self.weight.weight_loader = load  # type: ignore[attr-defined]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(EXPERTS, 2 * INTER, HIDDEN), False)
        self.w2_weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INTER), False)


class _Layer(nn.Module):
    def __init__(self, rank: int, size: int, computes: bool) -> None:
        super().__init__()
        self.qkv_proj = _Projection(dict.fromkeys("qkv", HIDDEN), HIDDEN, rank, size)
        self.o_proj = _Columns(HIDDEN, HIDDEN, rank, size)
        self.experts = _Experts()
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(HIDDEN), False)
        self.attn = nn.Module()
        self.attn.k_scale = nn.Parameter(torch.tensor(-1.0), False)
        self.absorbed: Any = None
        if computes:
            self.fused = nn.Module()
            self.fused.weight = nn.Parameter(torch.zeros(2 * HIDDEN, HIDDEN), False)


class StandIn(nn.Module):
    """The model of one tensor-parallel rank."""

    def __init__(self, rank: int = 0, size: int = 1, computes: bool = False) -> None:
        super().__init__()
        self.made_with = rank, size, computes
        self.embed = nn.Module()
        self.embed.org_vocab_size = VOCABULARY
        self.embed.weight = nn.Parameter(torch.zeros(PADDED, HIDDEN), False)
        self.layers = nn.ModuleList(_Layer(rank, size, computes) for _ in range(LAYERS))
        self.computes = computes
        self.post_loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """As SGLang's models do it: by name, through the parameter's own loader."""
        parameters = dict(self.named_parameters())
        kept: dict[str, Any] = {}
        for name, loaded in weights:
            if name == "embed.weight":
                parameter = parameters[name]
                parameter[: loaded.shape[0]].data.copy_(loaded)
                parameter[loaded.shape[0] :].data.fill_(0)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                stem, _, which = name.removesuffix("_proj.weight").rpartition(".")
                parameter = parameters[f"{stem}.qkv_proj.weight"]
                parameter.weight_loader(parameter, loaded, which)
            elif ".experts." in name:
                self._expert(parameters, name, loaded)
            elif self.computes and name.endswith((".a.weight", ".b.weight")):
                stem = name[: -len(".a.weight")]
                kept[name] = loaded
                both = [kept.get(f"{stem}.{part}.weight") for part in "ab"]
                if all(half is not None for half in both):
                    parameters[f"{stem}.fused.weight"].data.copy_(-torch.cat(both, dim=0))
            elif name in parameters:
                parameter = parameters[name]
                loader = getattr(parameter, "weight_loader", None)
                if loader is None:
                    parameter.data.copy_(loaded)
                else:
                    loader(parameter, loaded)
            else:
                raise KeyError(name)
        self.post_load_weights()

    @staticmethod
    def _expert(parameters: dict[str, Any], name: str, loaded: Any) -> None:
        stem, _, rest = name.partition(".experts.")
        number, which, _ = rest.split(".")
        if which == "down_proj":
            parameters[f"{stem}.experts.w2_weight"].data[int(number)].copy_(loaded)
        else:
            rows = slice(0, INTER) if which == "gate_proj" else slice(INTER, 2 * INTER)
            parameters[f"{stem}.experts.w13_weight"].data[int(number)][rows].copy_(loaded)

    def post_load_weights(self) -> None:
        """Makes what attention reads of the loaded weights."""
        self.post_loads += 1
        for layer in self.layers:
            layer.absorbed = layer.o_proj.weight.detach().clone()


def published(computes: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint."""
    yield "embed.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        stem = f"layers.{layer}"
        for which in ("q", "k", "v", "o"):
            yield f"{stem}.{which}_proj.weight", (HIDDEN, HIDDEN)
        yield f"{stem}.norm.weight", (HIDDEN,)
        for expert in range(EXPERTS):
            yield f"{stem}.experts.{expert}.gate_proj.weight", (INTER, HIDDEN)
            yield f"{stem}.experts.{expert}.up_proj.weight", (INTER, HIDDEN)
            yield f"{stem}.experts.{expert}.down_proj.weight", (HIDDEN, INTER)
        if computes:
            yield f"{stem}.a.weight", (HIDDEN, HIDDEN)
            yield f"{stem}.b.weight", (HIDDEN, HIDDEN)
