# SPDX-License-Identifier: Apache-2.0
"""A trainer of TRL, which a test drives: one rank of it, run as a program.

A random model learns to say even words (GRPO) or to say a prompt again (SFT), so that every step
changes the weights. What TRL logs goes to the test: `sampling/sampling_logp_difference/max` is how
far vLLM's log probabilities of its own completions are from the trainer's for the same tokens.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

from worlds import Control

PROMPTS = ["w5 w9 w13 w17", "w21 w33 w48 w7", "w100 w3 w81", "w44 w45 w46 w47 w48"]


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: how many tokens of a completion are even."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class Trial:
    """One training that the options describe."""

    def __init__(self, options: dict[str, Any], control: Control) -> None:
        import torch
        from datasets import Dataset
        from fanin.trl import PublishCallback
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        torch.set_num_threads(1)
        self.options = options
        self.control = control
        model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options["model"])
        tokenizer.pad_token = tokenizer.eos_token
        more = options.get("publish", {})
        self.publish = PublishCallback(base_port=0, info=options.get("info"), **more)
        make = self.grpo if options["trainer"] == "grpo" else self.sft
        column = "prompt" if options["trainer"] == "grpo" else "text"
        data = Dataset.from_dict({column: PROMPTS * 8})
        self.trainer = make(model, tokenizer, data)
        self.trainer.add_callback(self.watcher())

    def arguments(self) -> dict[str, Any]:
        return {
            "output_dir": self.options["scratch"],
            "max_steps": self.options["steps"],
            "learning_rate": self.options["rate"],
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            **self.options.get("arguments", {}),
        }

    def lora(self) -> Any:
        if not self.options["lora"]:
            return None
        from peft import LoraConfig
        from vllm_server import ALPHA, MODULES, RANK

        rank = self.options.get("rank", RANK)
        return LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM")

    def grpo(self, model: Any, tokenizer: Any, data: Any) -> Any:
        from fanin.trl import PullMixin
        from trl import GRPOConfig, GRPOTrainer

        class Trainer(PullMixin, GRPOTrainer):
            pass

        engine = {"use_vllm": True, "vllm_mode": "server"}
        engine["vllm_server_base_url"] = self.options["engine"]
        return Trainer(
            model=model,
            reward_funcs=even_words,
            args=GRPOConfig(
                **{
                    "per_device_train_batch_size": 4,
                    "num_generations": 4,
                    "max_completion_length": 8,
                    "generation_kwargs": {"ignore_eos": True},
                    **engine,
                    **self.arguments(),
                }
            ),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=self.lora(),
            publish=self.publish,
            **self.options.get("mixin", {}),
        )

    def sft(self, model: Any, tokenizer: Any, data: Any) -> Any:
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            model=model,
            args=SFTConfig(**{"per_device_train_batch_size": 2, **self.arguments()}),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=self.lora(),
            callbacks=[self.publish],
        )

    def watcher(self) -> Any:
        """Tells each step, and does what the test says before the next one."""
        from transformers import TrainerCallback

        trial = self

        class Watcher(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                trial.control.say("step", step=state.global_step, published=trial.publish.step)
                trial.obey(args)

        return Watcher()

    def obey(self, args: Any) -> None:
        if not self.options.get("driven"):
            return
        while (command := self.control.hear())["event"] != "go":
            if command["event"] == "save":
                self.save(command["directory"])
            elif command["event"] == "forget":
                # As a trainer does that forgets to send: it believes that the engine is up to date.
                self.trainer._last_loaded_step = self.trainer.state.global_step
            self.control.say("done")

    def save(self, directory: str) -> None:
        model = self.trainer.model
        if self.options.get("publish", {}).get("merge"):
            model = copy.deepcopy(model).merge_and_unload()
        if self.trainer.accelerator.is_main_process:
            model.save_pretrained(directory)

    def run(self) -> None:
        self.trainer.train()
        logs = self.trainer.state.log_history
        self.control.say("trained", logs=logs, addresses=list(self.publish.trainer().addresses))
        while (command := self.control.hear())["event"] != "exit":
            if command["event"] == "save":
                self.save(command["directory"])
            self.control.say("done")
        self.publish.close()


def main() -> None:
    control = Control()
    options = json.loads(sys.argv[1])
    if "rendezvous" in options:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options["port"])}
    try:
        trial = Trial(options, control)
        control.say("ready")
        trial.run()
    except Exception as error:
        control.say("failed", kind=type(error).__name__, message=str(error))
        raise


if __name__ == "__main__":
    main()
