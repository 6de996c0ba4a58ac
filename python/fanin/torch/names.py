# SPDX-License-Identifier: Apache-2.0
"""Functions for ``WeightServer(names=...)``: how trainers keep weights, and engines want them.

Each is given a stored tensor's name and shape, and answers with slices of it, without a copy::

    WeightServer(model, names=experts(first=16 * rank))
    WeightServer(model, names=chain(experts(), vocabulary(151936)))
    WeightServer(model, names=megatron(config, tp_rank=1, tp_size=2, first_layer=24))

:func:`fanin.torch.chain` asks one function after the other. No torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fanin.torch._names import NamesFunction, Published, Slice

__all__ = ["checkpoint", "experts", "gate_up", "megatron", "vocabulary"]

Shape = tuple[int, ...]


def checkpoint(model: Any) -> NamesFunction:
    """The names and tensors that transformers saves *model* as; what ``names=None`` does.

    To be chained with others. Models that are not transformers' keep their names.
    """
    from fanin.torch._weights import checkpoint_names

    return checkpoint_names(model) or (lambda name, shape: name)


_STACKED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
    "w1": ("gate_proj",),
    "w2": ("down_proj",),
    "w3": ("up_proj",),
}


def experts(*, first: int = 0) -> NamesFunction:
    """Stacked experts to one tensor an expert.

    ``...experts.gate_up_proj`` of [E, 2 x width, hidden] becomes ``...experts.<first +
    e>.gate_proj.weight`` and ``up_proj.weight`` of [width, hidden] for e < E. ``down_proj``, and
    ``w1`` (gate), ``w3`` (up), ``w2`` (down) and ``w13`` likewise. Others stay.

    Args:
        first: the number of the first stacked expert, where a plain tensor has this rank's only. A
            DTensor has all.

    Returns:
        A function for ``names=``.
    """

    def split(name: str, shape: Shape) -> Published:
        head, found, leaf = name.removesuffix(".weight").rpartition(".experts.")
        if not found or leaf not in _STACKED or len(shape) < 3:
            return name
        targets = _STACKED[leaf]
        return [
            Slice(f"{head}.experts.{first + expert}.{target}.weight", (expert, *part))
            for expert in range(shape[0])
            for target, part in _equal_parts(name, targets, shape[1])
        ]

    return split


def _equal_parts(
    name: str, targets: Sequence[str], size: int
) -> list[tuple[str, tuple[slice, ...]]]:
    """Target and index of each part of a dimension of *size*."""
    if len(targets) == 1:
        return [(targets[0], ())]
    width, rest = divmod(size, len(targets))
    if rest:
        raise ValueError(f"{size} elements of {name} are not {len(targets)} equal parts")
    return [(target, (slice(at * width, (at + 1) * width),)) for at, target in enumerate(targets)]


def gate_up(name: str, shape: Shape) -> Published:
    """``...gate_up_proj.weight`` of [2 x width, hidden] to ``gate_proj`` and ``up_proj``.

    To be given as ``names=gate_up``. Other names stay; biases are split as weights are.
    """
    head, found, leaf = name.rpartition("gate_up_proj.")
    if not found or leaf not in ("weight", "bias"):
        return name
    parts = _equal_parts(name, ("gate_proj", "up_proj"), shape[0])
    return [Slice(f"{head}{target}.{leaf}", index) for target, index in parts]


def vocabulary(
    size: int, pattern: str = r"(^|\.)(embed_tokens|lm_head|word_embeddings|wte)\.weight$"
) -> NamesFunction:
    """Leaves out the rows that pad the vocabulary: those from *size* on.

    Args:
        size: the rows that stay.
        pattern: a regular expression that tells the tensors (searched for).

    Returns:
        A function for ``names=``. It raises ValueError for a tensor of fewer rows.
    """

    def cut(name: str, shape: Shape) -> Published:
        if not re.search(pattern, name) or shape[0] == size:
            return name
        if shape[0] < size:
            raise ValueError(f"{name} has {shape[0]} rows, not {size}")
        return Slice(name, (slice(0, size),))

    return cut


# -------------------------------------------------------------------------------- Megatron


class _Model(NamedTuple):
    """A Megatron model's numbers, and which part of it this rank has."""

    heads: int
    groups: int
    head_dim: int
    rows: int
    """Of the vocabulary."""
    rank: int
    size: int
    layer: int
    expert: int
    expert_part: tuple[int, int] | None
    """Rank and size of the group that shares an expert; None: nobody has said."""
    expert_width: int | None
    """Of whole experts; None: the configuration does not say."""


def megatron(
    config: Any,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    first_layer: int = 0,
    first_expert: int = 0,
    expert_tp_rank: int | None = None,
    expert_tp_size: int | None = None,
) -> NamesFunction:
    """Megatron-Core's GPTModel to the names of Llama, Qwen2, Qwen3 and Qwen3-MoE.

    ``linear_qkv`` has the query heads of a group, its key and its value one behind the other. It
    becomes q_proj, k_proj and v_proj of as many parts as there are groups. ``linear_fc1`` becomes
    gate_proj and up_proj. Vocabularies lose the rows that pad them. Tensor-parallel parts, plain
    tensors to PyTorch, get their places in the whole ones.

    Args:
        config: of the model as transformers has it: ``num_attention_heads``,
            ``num_key_value_heads``, ``head_dim`` (or ``hidden_size``), ``vocab_size``, and of
            experts ``moe_intermediate_size``; an object, or a mapping.
        tp_rank: this rank in its tensor-parallel group.
        tp_size: the ranks of that group.
        first_layer: the number of this pipeline stage's first layer in the whole model.
        first_expert: the number of this rank's first expert.
        expert_tp_rank: this rank in its expert-tensor-parallel group. Default: 0 of 1, where an
            expert's width is ``moe_intermediate_size``.
        expert_tp_size: the ranks of that group (``expert_tensor_parallel_size``, which is
            ``tensor_model_parallel_size`` unless Megatron was told otherwise).

    Returns:
        A function for ``names=``. It raises ValueError for unknown names and for shapes that do not
            fit. Experts in one matrix (``experts.weight1``) are unknown: use grouped or sequential
            experts. An expert's shape does not fit either where nothing says whether the expert is
            whole.

    Raises:
        ValueError: *config* lacks a field; only one of *expert_tp_rank* and *expert_tp_size* is
            given.
    """

    def told(field: str, default: Any = None) -> Any:
        value = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"the configuration has no {field}")
        return int(value)

    part = None
    if expert_tp_rank is not None and expert_tp_size is not None:
        part = expert_tp_rank, expert_tp_size
    elif expert_tp_rank is not None or expert_tp_size is not None:
        raise ValueError("give both expert_tp_rank and expert_tp_size, or neither")
    heads = told("num_attention_heads")
    model = _Model(
        heads,
        told("num_key_value_heads", heads),
        told("head_dim", told("hidden_size", 0) // heads),
        told("vocab_size"),
        tp_rank,
        tp_size,
        first_layer,
        first_expert,
        part,
        told("moe_intermediate_size", 0) or None,
    )
    if model.groups % tp_size:
        raise ValueError(f"{model.groups} groups of heads are not {tp_size} equal parts")
    return lambda name, shape: _megatron(model, name, shape)


_WHOLE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_BY_COLUMNS = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight"}
_FC = re.compile(
    r"mlp\.(?:(?P<shared>shared_experts)\.|experts\.local_experts\.(?P<local>\d+)\.|"
    r"(?P<grouped>experts)\.)?linear_fc(?P<which>[12])\.weight(?P<number>\d*)"
)


def _megatron(model: _Model, name: str, shape: Shape) -> Published:
    if name == "decoder.final_layernorm.weight":
        return "model.norm.weight"
    if name == "embedding.word_embeddings.weight":
        return _rows_of_vocabulary(model, "model.embed_tokens.weight", shape)
    if name == "output_layer.weight":
        return _rows_of_vocabulary(model, "lm_head.weight", shape)
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if found is None:
        raise ValueError(f"megatron() does not know {name}")
    layer, leaf = f"model.layers.{model.layer + int(found[1])}", found[2]
    if leaf in _WHOLE:
        return f"{layer}.{_WHOLE[leaf]}"
    if leaf in _BY_COLUMNS:
        return _columns(model, f"{layer}.{_BY_COLUMNS[leaf]}", shape)
    if leaf in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        return _interleaved(model, f"{layer}.self_attn", leaf.rpartition(".")[2], name, shape)
    fc = _FC.fullmatch(leaf)
    if fc is None or bool(fc["grouped"]) != bool(fc["number"]):
        raise ValueError(f"megatron() does not know {name}")
    return _projection(model, layer, fc, name, shape)


def _rows_of_vocabulary(model: _Model, key: str, shape: Shape) -> Slice:
    whole = (model.rows, *shape[1:])
    first = min(model.rank * shape[0], model.rows)
    count = min(shape[0], model.rows - first)
    if model.size * shape[0] < model.rows:
        raise ValueError(f"{model.size} times {shape[0]} rows are fewer than {model.rows}")
    return Slice(key, (slice(0, count),), (first, *(0 for _ in shape[1:])), whole)


def _columns(model: _Model, key: str, shape: Shape) -> Slice:
    return Slice(key, (), (0, model.rank * shape[1]), (shape[0], model.size * shape[1]))


def _rows(
    model: _Model, key: str, shape: Shape, part: slice, of: int | None = None, at: int = 0
) -> Slice:
    """Rows *part* of a stored tensor as the rank's rows of *key*, from its row *at* on.

    of: rows of *key* that the rank has in all, default: these.
    """
    mine = part.stop - part.start if of is None else of
    place = (model.rank * mine + at, *(0 for _ in shape[1:]))
    return Slice(key, (part,), place, (model.size * mine, *shape[1:]))


def _interleaved(model: _Model, layer: str, leaf: str, name: str, shape: Shape) -> list[Slice]:
    groups = model.groups // model.size
    widths = {"q": model.heads // model.groups * model.head_dim}
    widths |= {"k": model.head_dim, "v": model.head_dim}
    if shape[0] != groups * sum(widths.values()):
        raise ValueError(
            f"{name} has {shape[0]} rows; {groups} groups of {model.heads // model.groups} query "
            f"heads of {model.head_dim} have {groups * sum(widths.values())}"
        )
    out, row = [], 0
    for group in range(groups):
        for letter, width in widths.items():
            key, part = f"{layer}.{letter}_proj.{leaf}", slice(row, row + width)
            out.append(_rows(model, key, shape, part, groups * width, group * width))
            row += width
    return out


def _projection(
    model: _Model, layer: str, fc: re.Match[str], name: str, shape: Shape
) -> Slice | list[Slice]:
    number = fc["local"] or fc["number"]
    where = f"{layer}.mlp"
    if number:
        where += f".experts.{model.expert + int(number)}"
        rank, size = _part_of_expert(model, name, shape[1] if fc["which"] == "2" else shape[0] // 2)
        model = model._replace(rank=rank, size=size)
    elif fc["shared"]:
        where += ".shared_experts"
    if fc["which"] == "2":
        return _columns(model, f"{where}.down_proj.weight", shape)
    return [
        _rows(model, f"{where}.{target}.weight", shape, part[0])
        for target, part in _equal_parts(name, ("gate_proj", "up_proj"), shape[0])
    ]


def _part_of_expert(model: _Model, name: str, width: int) -> tuple[int, int]:
    """Rank and size of the group that shares the expert, of whose width the rank has so much.

    A part looks like a whole expert of a narrower model, so nothing is taken for granted.
    """
    part, whole = model.expert_part, model.expert_width
    if part is None and whole is None:
        raise ValueError(
            f"whether {name} is a whole expert cannot be told: give moe_intermediate_size in the "
            "configuration, or expert_tp_rank and expert_tp_size"
        )
    rank, size = part or (0, 1)
    if whole is not None and width * size != whole:
        raise ValueError(
            f"{name} has {width} of an expert's moe_intermediate_size, {whole}, which {size} such "
            "parts do not make: give expert_tp_rank and expert_tp_size as Megatron has them "
            "(get_expert_tensor_parallel_rank() and get_expert_tensor_parallel_world_size())"
        )
    return rank, size
