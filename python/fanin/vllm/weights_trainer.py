# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of the backend ``fanin``, for code that is written to vLLM's trainer engines.

Such code makes an engine by ``trainer_init`` on every rank and calls ``send_weights`` on every rank
once a step. Here nothing is sent: the ranks publish what they hold by
:class:`fanin.torch.WeightServer`, and rank 0 tells the engine which step to pull. Between two
``send_weights`` the publication is paused, because the weights are written then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from fanin.errors import PeerError, RequestError
from fanin.torch import WeightServer

__all__ = ["TrainerEngine", "TrainerInit"]


@dataclass
class TrainerInit(TrainerInitInfo):
    """What ``WeightTransferTrainerFactory.trainer_init`` takes for this backend.

    Args:
        run: the publication is ``full:<run>``.
        step: what the weights are called now. Each ``send_weights`` adds one.
        timeout: seconds for one update of the engine.
        init: more fields for the engine's init_info.
        server: more arguments of :class:`fanin.torch.WeightServer`.
    """

    backend: ClassVar[str] = "fanin"

    run: str = "0"
    step: int = 0
    timeout: float = 120.0
    init: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)


class TrainerEngine(TrainerWeightTransferEngine[TrainerInit]):
    """One rank of the trainer. Every call is made on every rank, by one thread.

    If one rank fails, or rank 0 with the engine, all ranks raise, so that none waits for another.
    """

    init_info_cls = TrainerInit

    def __init__(self, server: WeightServer, step: int, **options: Any) -> None:
        super().__init__(**options)
        self._server = server
        self._step = step

    @property
    def step(self) -> int:
        """Of the last ``send_weights``."""
        return self._step

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: Any, source: Any = None
    ) -> TrainerEngine:
        """Publishes the weights as they are, and points the engine at all ranks.

        Blocks until all ranks have come here and the engine has answered.

        Args:
            init_info: the options of this backend.
            client: vLLM's, which calls the engine.
            source: vLLM's ModuleSource, or the torch.nn.Module itself.

        Returns:
            This rank of the trainer.

        Raises:
            FaninError: as :class:`fanin.torch.WeightServer`; and what *client* raises.
        """
        model = _module_of(source)
        server = WeightServer(model, **{"run": init_info.run, "base_port": 0, **init_info.server})
        one = cls(
            server,
            init_info.step,
            client=client,
            source=source if source is not model else None,
            is_sender=init_info.is_sender,
        )
        info: dict[str, Any] = {"trainer": server.addresses, "run": init_info.run}
        info |= {"timeout": init_info.timeout, **init_info.init}
        try:
            one._together(lambda: server.publish(init_info.step))
            one._by_sender(lambda: client.init_weight_transfer_engine(info))
            server.pause(reason="between two send_weights")
        except BaseException:
            server.close()
            raise
        return one

    def send_weights(self) -> None:
        """Publishes the weights as the next step, and has the engine pull it.

        Returns when every worker has it, on every rank. After an error the weights may be written
        again, too, and the next call is a new try.
        """
        # Also if it fails: on some ranks it is published by then, and a step is never another one.
        step = self._step = self._step + 1
        try:
            self._together(lambda: self._server.resume(step=step))
            self._by_sender(lambda: self._drive(step))
        finally:
            self._server.pause(reason="between two send_weights")

    def _drive(self, step: int) -> None:
        refused: Exception | None = None
        try:
            self.client.start_weight_update()
        except Exception as error:
            # Workers that an earlier failure left in the middle refuse to start, and go on.
            refused = error
        try:
            self.client.update_weights({"step": step})
        except Exception as error:
            raise error from refused
        self.client.finish_weight_update(f"step-{step}")

    def _by_sender(self, call: Callable[[], object]) -> None:
        """Rank 0 calls; all ranks wait for it and raise if it failed."""
        self._together(call if self.is_sender else lambda: None)

    def _together(self, call: Callable[[], object]) -> None:
        """Every rank calls, waits for the others, and raises if it or another one failed."""
        failure: BaseException | None = None
        try:
            call()
        except BaseException as error:
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        # By the server's own group: the job may have ranks that are none of the trainer's.
        said: list[str | None] = self._server._ranks.gather(text)
        if failure is not None:
            raise failure
        for rank, other in enumerate(said):
            if other is not None:
                raise PeerError.make(f"rank {rank} failed: {other}", "see its log", rank=rank)

    def shutdown(self) -> None:
        """Withdraws the publication and closes the server. The engine stays as it is."""
        with contextlib.suppress(Exception):
            if self.is_sender and hasattr(self.client, "shutdown_weight_transfer_engine"):
                self.client.shutdown_weight_transfer_engine()
        self._server.close()


def _module_of(source: Any) -> torch.nn.Module:
    if isinstance(source, torch.nn.Module):
        return source
    model = getattr(source, "module", None) or getattr(source, "_module", None)
    if isinstance(model, torch.nn.Module):
        return model
    raise RequestError.make(
        f"a source of the type {type(source).__name__} hands out gathered tensors, and this "
        "backend reads the trainer's own memory",
        "give ModuleSource(model) or the model, or publish by fanin.torch.WeightServer",
    )
