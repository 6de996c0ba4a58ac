# SPDX-License-Identifier: Apache-2.0
"""Words of Hugging Face's ``quantization_config`` that trainers, engines and a sync share.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase

QUANTIZATION = "quantization"
"""The pair of a publication's metadata that has its ``quantization_config`` as JSON."""
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Keys under which modules are listed that are not quantized."""
WEIGHT = ".weight"
SCALES = ("_scale_inv", "_scale")
"""What the name of a weight's scales has behind the weight's."""


def is_fit(entry: str, name: str) -> bool:
    """Whether an entry of a list of modules fits the tensor or the module *name*: as whole dotted
    parts anywhere in it, or as a pattern for all of it."""
    module = name.removesuffix(WEIGHT)
    return f".{entry}." in f".{module}." or fnmatchcase(module, entry) or fnmatchcase(name, entry)


def scale_of(name: str, names: Container[str]) -> str:
    """The name of a tensor's scales among *names*, "" if it has none."""
    return next((name + end for end in SCALES if name + end in names), "")
