# SPDX-License-Identifier: Apache-2.0
"""vLLM's layerwise reload, as far as fanin leans on it. No other file touches its internals.

vLLM keeps of each module what its tensors were before processing ("skeletons": metadata without
memory) and can put them in the place of the tensors that its kernels use. Loading then fills
skeletons, processing makes kernel tensors of them, and these are copied into the memory that was
there before, so that CUDA graphs hold. None of that is an interface that vLLM promises:
:func:`check_version` says so for versions that were not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fanin.errors import HostError

__all__ = [
    "abandon",
    "begin",
    "check_version",
    "end",
    "skeletons",
    "unloaded",
]

_TRIED = ("0.32",)


def check_version() -> str:
    """vLLM's version. Raises HostError if its reload is not one of those that were tried."""
    import vllm

    version = str(vllm.__version__)
    if not any(version == known or version.startswith(known + ".") for known in _TRIED):
        raise HostError.make(
            f"vLLM {version} may reload weights in another way than {', '.join(_TRIED)}",
            f"install vLLM {_TRIED[-1]}, or a fanin that knows {version}",
        )
    return version


def _layerwise() -> Any:
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise


def _infos(model: Any) -> Iterator[tuple[str, Any, Any]]:
    layerwise = _layerwise()
    for name, module in model.named_modules():
        yield name, module, layerwise.get_layerwise_info(module)


# ------------------------------------------------------------------ life cycle


def begin(model: Any) -> None:
    """Puts skeletons in the place of the model's tensors; its kernels' tensors are kept aside.

    What an earlier reload left behind is put back first: vLLM would skip such modules.
    """
    abandon(model)
    _layerwise().initialize_layerwise_reload(model)


def abandon(model: Any) -> None:
    """Puts the kernels' tensors back wherever a skeleton is in their place. Again: does nothing.

    Their bytes are what was last written to them.
    """
    layerwise = _layerwise()
    for _, module, info in _infos(model):
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            # Tensors that are never skeletons had their loaders wrapped as well.
            for tensor in layerwise.get_layer_tensors(module).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()


@contextmanager
def skeletons(model: Any) -> Iterator[None]:
    """Within it the model's tensors are skeletons; after it the kernels' are back."""
    begin(model)
    try:
        yield
    finally:
        abandon(model)


def end(model: Any, model_config: Any) -> None:
    """Processes what loading alone has not: attention, padded modules, tied embeddings."""
    _layerwise().finalize_layerwise_reload(model, model_config)
    refresh_ties(model)


def unloaded(model: Any) -> list[str]:
    """Modules with parameters of which nothing was loaded since :func:`begin`.

    Not those that have none of their own: attention's scales, and what is tied to another module.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    missing: list[str] = []
    filled: set[int] = set()
    waiting = []
    for name, module, info in _infos(model):
        if not info.can_load():
            filled.update(id(tensor) for tensor in module._parameters.values())
        elif info.load_numel > 0:
            filled.update(id(tensor) for tensor in info.kernel_tensors[0].values())
        elif not is_deferred_attention_layer(module):
            waiting.append((name, info.kernel_tensors[0]))
    for name, parameters in waiting:
        if any(id(tensor) not in filled for tensor in parameters.values()):
            missing.append(name)
    return missing


def refresh_ties(model: Any) -> None:
    """Processes modules anew that share a parameter with one before them.

    What they made of it beside it (on the CPU: a packed copy of tied embeddings) is stale when only
    the other module was loaded.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    owners: dict[int, Any] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        for tensor in module._parameters.values():
            if tensor is None or tensor.numel() == 0:
                continue
            if owners.setdefault(id(tensor), module) is not module and isinstance(
                method, QuantizeMethodBase
            ):
                method.process_weights_after_loading(module)
