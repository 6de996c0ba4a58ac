# SPDX-License-Identifier: Apache-2.0
"""What was computed with the old weights and lies outside of vLLM's engine.

Connectors find KV of a prompt, and outputs of encoders, by its tokens, whatever the weights were.
The end of an update drops what a connector can drop. What it cannot drop would answer with the new
weights, so :class:`fanin.vllm.weights.Engine` refuses an engine that has such a connector. Contact
with vLLM's connectors, for the versions that :data:`fanin.vllm.patches.SUPPORTED` has.
"""

from __future__ import annotations

from typing import Any

from fanin.errors import RequestError

__all__ = ["CHOICES", "has_some", "refuse_what_stays", "what_stays"]

#: Of init_info's ``external_kv``.
CHOICES = ("drop", "keep")
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")


def refuse_what_stays(vllm_config: Any) -> None:
    """Raises RequestError if the engine keeps something outside that no update drops."""
    stays = what_stays(vllm_config)
    if stays:
        raise RequestError.make(
            "the engine keeps outside of itself what the weights of before have computed, and"
            f" nothing drops it at an update: {'; '.join(stays)}",
            'start vLLM without it, or init with {"external_kv": "keep"} (Registry: init=) if you'
            " empty it before the engine goes on, or if answers may use it",
            key="external_kv",
        )


def what_stays(vllm_config: Any) -> list[str]:
    """What of the engine's connectors a reset leaves, [] if it leaves nothing."""
    found = []
    if _named(vllm_config, "kv") is not None:
        found += _of_connector(vllm_config.kv_transfer_config)
    encoders = _named(vllm_config, "ec")
    if encoders is not None:
        found.append(f"{encoders} cannot drop outputs of encoders")
    return found


def has_some(vllm_config: Any) -> bool:
    """Whether the engine has a connector: what lies there may be other engines', too."""
    return any(_named(vllm_config, kind) is not None for kind in ("kv", "ec"))


def _named(vllm_config: Any, kind: str) -> Any:
    """The connector of KV, or of encoders' outputs; None: there is none."""
    transfer = getattr(vllm_config, f"{kind}_transfer_config", None)
    return getattr(transfer, f"{kind}_connector", None)


def _of_connector(transfer: Any) -> list[str]:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if name == "MultiConnector":  # takes the answer None of one that drops nothing for success
        children = [
            KVTransferConfig(**{"engine_id": transfer.engine_id, **child})
            for child in extra.get("connectors", [])
        ]
        return [text for child in children for text in _of_connector(child)]
    kind = KVConnectorFactory.get_connector_class(transfer)
    if getattr(kind, "reset_cache", None) in (None, KVConnectorBase_V1.reset_cache):
        return [f"{name} does not implement reset_cache"]
    if name == "OffloadingConnector":
        spec = extra.get("spec_name", _SPECS[0])
        if spec not in _SPECS:
            return [f"{name} may leave what {spec} keeps"]
        if extra.get("secondary_tiers"):
            return [f"{name} leaves its secondary tiers"]
    return []
