# SPDX-License-Identifier: Apache-2.0
"""PublishCallback: each optimizer step of a Hugging Face or TRL trainer is published."""

from __future__ import annotations

import os
import sys
from typing import Any

from transformers import TrainerCallback

from fanin.errors import RequestError, StateError
from fanin.info import TrainerInfo
from fanin.names import check_run

_KINDS = ("lora", "full")


def _is_adapter(model: Any) -> bool:
    """Whether PEFT made *model*; its configuration is what names an adapter."""
    return hasattr(model, "peft_config")


class PublishCallback(TrainerCallback):
    """Publishes the trained weights by reference: at the start of training, and at each step.

    Give it to the trainer on every rank. When training begins, after the model was sharded, it
    makes the server and publishes the step that training is at: 0, or the step that it resumes at.
    Around each ``optimizer.step()`` readers are kept out, and what it left is published as the
    trainer's next ``global_step``.

    It serves until :meth:`close`, or until the process ends: also after training, at its last step.
    A training that begins again is another world, at step 0. Use it from the trainer's thread, with
    one trainer.

    The trainer's calls raise the servers' errors. They raise RequestError for DeepSpeed ZeRO-3.
    Without ``snapshot=True`` they also do so for other DeepSpeed stages and for
    ``load_best_model_at_end``. These write parameters where no callback is asked before.

    Args:
        weights: "lora": PEFT's adapter, by :class:`fanin.torch.AdapterServer`; "full": the whole
            model, by :class:`fanin.torch.WeightServer`; None: "lora" if PEFT made the model, unless
            *arguments* say ``merge=True``.
        run: the run under which engines ask for it.
        info: rank 0 writes ``nixl_info.json`` into this directory when training begins.
        arguments: what else the server is made with: ``base_port``, ``name``, ``bind``,
            ``advertise``, ``allow``, ``port_by``, ``lease``, ``snapshot``, ``cast``, ``names``, ...
            For "full" also ``merge=True``, which publishes an adapter merged into its base and
            leaves both as they are, and ``quantize``.
    """

    def __init__(
        self,
        *,
        weights: str | None = None,
        run: str | int = "0",
        info: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        if weights is not None and weights not in _KINDS:
            raise RequestError.make(
                f"weights is {weights!r}", "give 'lora', 'full', or None for what the model is"
            )
        self.run = check_run(run)
        self._weights = weights
        self._info = info
        self._arguments = arguments
        self._server: Any = None
        self._adapter = False
        self._step: int | None = None
        self._update: Any = None

    # -- what is published ------------------------------------------------------------------

    @property
    def server(self) -> Any:
        """The AdapterServer or WeightServer; None before training begins and after close()."""
        return self._server

    @property
    def adapter(self) -> bool:
        """Whether it is an adapter that is published, and not the whole model."""
        return self._adapter

    @property
    def step(self) -> int | None:
        """The step that can be read now: None before the first, and inside of an update."""
        return None if self._server is None or self._update is not None else self._step

    def trainer(self) -> TrainerInfo:
        """Where the ranks listen, and what they publish; not on disk. Does not block.

        Raises StateError if nothing is published.
        """
        if self._server is None:
            raise StateError.make("nothing is published yet", "train() first")
        return TrainerInfo(
            addresses=tuple(self._server.addresses),
            world_id=self._server.world_id,
            run=self.run,
            server_name=self._server.server.name,
            step=self._step,
            secret_file=self._server.secret_file,
        )

    def open(self, model: Any, step: int) -> None:
        """Makes the server for *model* as it is now and publishes it as *step*.

        On every rank; blocks until all have come. It first closes an earlier publication. The
        trainer's begin calls it.
        """
        self.close()
        server = self._make(model)
        try:
            server.publish(step)
            if self._info is not None:
                server.write_info(self._info)
        except BaseException:
            server.close(0)
            raise
        self._server, self._step = server, step

    def close(self) -> None:
        """Ends serving; an update that was not ended is aborted. Again: does nothing."""
        self._abort()
        server, self._server, self._step = self._server, None, None
        if server is not None:
            server.close()

    def _make(self, model: Any) -> Any:
        merge = bool(self._arguments.get("merge"))
        kind = self._weights or ("lora" if _is_adapter(model) and not merge else "full")
        if kind == "full" and _is_adapter(model) and not merge:
            raise RequestError.make(
                "weights is 'full', but PEFT made the model: its base and its adapter are two "
                "models, and neither is what was trained",
                "publish weights='lora', or merge=True, or train a model without an adapter",
            )
        self._adapter = kind == "lora"
        if self._adapter:
            from fanin.torch import AdapterServer

            return AdapterServer(model, run=self.run, **self._arguments)
        from fanin.torch import WeightServer

        return WeightServer(model, run=self.run, **self._arguments)

    # -- the trainer's events ---------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the server and publishes the step that training begins at."""
        self._refuse(args)
        self.open(kwargs["model"], state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins the update: readers are waited for, at most the lease."""
        self._abort()
        if self._server is None:
            raise StateError.make(
                "the trainer steps, but nothing is published: the callback was closed",
                "close() it after the training",
            )
        update = self._server.updating(state.global_step + 1)
        update.__enter__()
        self._update = update

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publishes what the optimizer has written."""
        update, self._update = self._update, None
        self._step = None
        update.__exit__(None, None, None)
        self._step = state.global_step + 1

    def _abort(self) -> None:
        """Ends the update of a step that raised: nobody may read what it left."""
        update, self._update = self._update, None
        if update is None:
            return
        self._step = None
        cause = StateError.make("the optimizer step did not end")
        try:
            update.__exit__(type(cause), cause, None)
        except StateError as error:
            if error is not cause:
                raise

    def _refuse(self, args: Any) -> None:
        """Trainers that write parameters where no callback is asked before."""
        copies = bool(self._arguments.get("snapshot"))
        plugin = getattr(args, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            raise RequestError.make(
                "DeepSpeed ZeRO-3 keeps no parameter of the model between two layers",
                "shard by FSDP2: accelerate's fsdp_version 2",
            )
        if plugin is not None and not copies:
            raise RequestError.make(
                "DeepSpeed writes the parameters inside of backward()",
                "publish copies: PublishCallback(snapshot=True)",
            )
        if getattr(args, "load_best_model_at_end", False) and not copies:
            raise RequestError.make(
                "load_best_model_at_end writes the parameters behind the last step",
                "turn it off, or publish copies: PublishCallback(snapshot=True)",
            )

    def __del__(self) -> None:
        # At the interpreter's end the server closes itself.
        if getattr(self, "_server", None) is not None and not sys.is_finalizing():
            self.close()
