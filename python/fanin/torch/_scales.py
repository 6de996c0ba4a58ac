# SPDX-License-Identifier: Apache-2.0
"""Whether PEFT's layers compute with the scales that engines will take from the configuration.

No torch in here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fanin.errors import RequestError
from fanin.torch._names import PREFIX, on_disk

_SCALED = re.compile(r"(.*)\.lora_(?:embedding_)?B(?:\.|$)")


def _scale(alpha: Any, rank: Any, config: Mapping[str, Any]) -> float:
    return float(alpha) / (math.sqrt(float(rank)) if config.get("use_rslora") else float(rank))


def _of_layer(config: Mapping[str, Any], pattern: str, default: str, name: str) -> Any:
    """As PEFT does: of the patterns the first that fits the end of the layer's name."""
    for key, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return config[default]


def _told(path: str, config: Mapping[str, Any]) -> float:
    """The scale of the layer of that path by the configuration."""
    name = on_disk(path).removeprefix(PREFIX)
    alpha = _of_layer(config, "alpha_pattern", "lora_alpha", name)
    return _scale(alpha, _of_layer(config, "rank_pattern", "r", name), config)


class Scales:
    """The scales of an adapter's layers."""

    def __init__(self, adapter: str | None) -> None:
        self._adapter = adapter
        self._layers: list[tuple[str, Any]] = []
        self._passed: tuple[list[float], Mapping[str, Any]] | None = None

    def look(self, root: Any) -> None:
        """Finds the layers: those of PEFT's that have a scale for the adapter."""
        self._passed = None
        self._layers = [
            (path, module)
            for path, module in root.named_modules()
            if all(
                isinstance(told := getattr(module, name, None), Mapping) and self._adapter in told
                for name in ("scaling", "r", "lora_alpha")
            )
        ]

    def of(self, path: str, config: Callable[[], Mapping[str, Any] | None]) -> float:
        """What the parameter of that path is multiplied by: lora_B by its layer's scale, of PEFT's
        layers as they compute, of others as *config* tells."""
        found = _SCALED.match(path)
        if found is None:
            return 1.0
        layers = dict(self._layers)
        if found[1] in layers:
            return float(layers[found[1]].scaling[self._adapter])
        return _told(found[1], config() or {})

    def check(self, config: Mapping[str, Any]) -> None:
        """RequestError: a layer was given a scale that *config* does not tell (by ``set_scale()``,
        or by ``hotswap_adapter()``, which leaves the model's configuration as it was).

        A ``lora_alpha`` that was changed by hand, under layers that are as they were made, is taken
        at its word.
        """
        # Tensors where PEFT prepared them for compiled swaps. Readers wait for what is done here.
        scales = [float(layer.scaling[self._adapter]) for _, layer in self._layers]
        if (scales, config) == self._passed:
            return
        ranks = {config.get("r"), *(config.get("rank_pattern") or {}).values()}
        for (path, layer), scale in zip(self._layers, scales, strict=True):
            rank = layer.r[self._adapter]
            made = _scale(layer.lora_alpha[self._adapter], rank, config)
            # PEFT pads ranks, and raises the configuration's, without a word to the layer.
            if rank not in ranks or not math.isclose(scale, made, rel_tol=1e-6):
                _refuse_other(path, scale, config)
        self._passed = scales, config


def _refuse_other(path: str, scale: float, config: Mapping[str, Any]) -> None:
    told = _told(path, config)
    if not math.isclose(scale, told, rel_tol=1e-6):
        raise RequestError.make(
            f"PEFT computes '{path}' with the scale {scale:g}, and the adapter's configuration "
            f"gives {told:g}",
            "undo set_scale() or scale_layer(), or set lora_alpha in the model's peft_config, "
            "which hotswap_adapter() leaves as it was",
            key=path,
        )
