# SPDX-License-Identifier: Apache-2.0
"""Which parts of a published model go where in an engine's modules, found out by running the
engine's own loader without weights.

A mapping is data: boxes of published tensors, and destinations in parameters and buffers. It needs
no knowledge of the model or of the engine, and no list of what loaders may do::

    recording = fanin.mapping.record(client.catalog(run), model.load_weights, model)
    mapping = recording.mapping()           # every element once, or an error that names the tensor
    packed = mapping.pack(model)            # onto the live parameters
    client.pull_into(run, packed.tensors, dtype=packed.dtype)
    packed.settle()
    mapping.save("rank0.json")              # fanin.mapping.load() reads it again

PyTorch is imported when :func:`record` is first used. How vLLM's model is brought into the state
in which its loader works is in ``fanin.vllm.reload``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin._lazy import lazily
from fanin.mapping._errors import MappingError, Refusal
from fanin.mapping._file import FORMAT, load
from fanin.mapping._mapping import (
    About,
    Bridge,
    Fill,
    Leaf,
    Mapping,
    Module,
    PackedMapping,
    Piece,
    Source,
    layer_of,
    unwanted,
)

if TYPE_CHECKING:
    from fanin.mapping._record import Recording, Target, key_digest, record
    from fanin.mapping._state import ModelState
    from fanin.mapping._trace import Trace

__all__ = [
    "FORMAT",
    "About",
    "Bridge",
    "Fill",
    "Leaf",
    "Mapping",
    "MappingError",
    "ModelState",
    "Module",
    "PackedMapping",
    "Piece",
    "Recording",
    "Refusal",
    "Source",
    "Target",
    "Trace",
    "key_digest",
    "layer_of",
    "load",
    "record",
    "unwanted",
]

_RECORD = ("Recording", "Target", "key_digest", "record")  # need PyTorch, as these two do
_WITH_TORCH = {"ModelState": "_state", "Trace": "_trace", **dict.fromkeys(_RECORD, "_record")}
__getattr__ = lazily(__name__, _WITH_TORCH)
