# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers: they publish what they train, and vLLM pulls it.

A trainer that only trains (SFT, DPO, Hugging Face's own) gets a callback::

    from fanin.trl import PublishCallback

    trainer = SFTTrainer(..., callbacks=[PublishCallback(base_port=6000, info="/shared/run")])

One that generates with a vLLM server (GRPO, RLOO, distillation, and the experimental trainers that
make TRL's VLLMGeneration) gets a mixin, in place of TRL's own transfer of weights::

    from fanin.trl import PullMixin
    from trl import GRPOConfig, GRPOTrainer

    class Trainer(PullMixin, GRPOTrainer):
        pass

    args = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=...)
    trainer = Trainer(model=..., args=args, publish=PublishCallback(base_port=6000), ...)

A model that PEFT made publishes its adapter, which vLLM loads under a name for each step; any
other publishes all its weights, which vLLM pulls into its parameters. Completions never come of
another step than the trainer's, see :class:`PullMixin`.

TRL, transformers and PyTorch are imported when the classes are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin._lazy import lazily

if TYPE_CHECKING:
    from fanin.trl.generation import PullMixin
    from fanin.trl.publish import PublishCallback

__all__ = ["PublishCallback", "PullMixin"]

__getattr__ = lazily(__name__, {"PublishCallback": "publish", "PullMixin": "generation"})
