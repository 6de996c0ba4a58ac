# SPDX-License-Identifier: Apache-2.0
"""What can happen to one worker of vLLM on an adapter's way into its slots:
`--worker-extension-cls`."""

from __future__ import annotations

from typing import Any


def once(owner: Any, method: str) -> None:
    """The next call of that method runs short of memory."""
    whole = getattr(owner, method)

    def short(*args: Any, **options: Any) -> Any:
        setattr(owner, method, whole)
        raise MemoryError(f"no memory in {method.strip('_')}")

    setattr(owner, method, short)


class HurtingSlots:
    """Methods for `collective_rpc`."""

    def hurt(self, rank: int, method: str) -> bool:
        """In the worker of this rank, the next time that an image is taken or put into a slot, or
        that vLLM loads an adapter."""
        from fanin.engine.slot_images import Image
        from fanin.vllm.slots_worker import Slots

        mine = self.vllm_config.parallel_config.rank == rank  # type: ignore[attr-defined]
        if mine and method == "load":
            once(self.model_runner.lora_manager, "_load_adapter")  # type: ignore[attr-defined]
        elif mine:
            once({"take": Slots, "put": Image}[method], method)
        return bool(mine)

    def adapters(self) -> list[int]:
        """Of this worker, by vLLM's numbers."""
        return sorted(self.list_loras())  # type: ignore[attr-defined]

    def scribble(self, path: str, whole: bool) -> None:
        """Writes into the newest adapter's slot: over one element, or over all that a module has of
        lora_B."""
        import torch

        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        index = manager.lora_index_to_id.index(max(manager.list_adapters()))
        with torch.inference_mode():
            slot = manager.modules[path].lora_b_stacked[0][index]
            slot.zero_() if whole else slot[..., 1, 1].add_(1)
