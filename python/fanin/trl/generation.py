# SPDX-License-Identifier: Apache-2.0
"""PullMixin: a TRL trainer's vLLM server pulls the weights that it generates with.

TRL's trainers make one object, VLLMGeneration, which gathers the model, sends it to the vLLM server
over NCCL when the training step has changed, and asks the server for completions. Here a class
derived from it takes its place: nothing is gathered or sent, the engine is told the step, and no
completion is handed on that another step may have made.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from fanin.errors import FaninError, RequestError, StateError, UnreachableError
from fanin.names import AdapterName
from fanin.pool import EnginePool
from fanin.sync import Registry
from fanin.trl.publish import PublishCallback

_Result = TypeVar("_Result")
_REPLACED = "VLLMGeneration"
_lock = threading.Lock()


class _Client(VLLMClient):  # type: ignore[misc, unused-ignore]
    """TRL's client, whose answers must be of the model that was asked for."""

    #: While other ranks wait for completions: why there are none.
    failures: list[Exception] | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.failures is None:
            return super().generate(*args, **kwargs)
        try:
            return super().generate(*args, **kwargs)
        except Exception as error:
            # Raised when the others have been told: here they would wait for ever.
            self.failures.append(error)
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None}

    def _post(self, url: str, **kwargs: Any) -> Any:
        answer = super()._post(url, **kwargs)
        asked = (kwargs.get("json") or {}).get("model")
        told = answer.get("model") if isinstance(answer, dict) else None
        if asked is not None and told is not None and told != asked:
            raise StateError.make(
                f"{self.base_url} was asked for {asked!r} and answered as {told!r}",
                "check what stands between the trainer and the engine",
                address=self.base_url,
            )
        return answer


class _Adapters:
    """How one engine gets an adapter's steps: under a name of each step's own."""

    def __init__(self, client: _Client, lora_name: str, timeout: float) -> None:
        if not client.get_server_info().get("lora_config"):
            raise RequestError.make(
                f"the engine at {client.base_url} loads no adapters",
                "start it with --enable-lora and --max-lora-rank",
                address=client.base_url,
            )
        self._client = client
        self._name = lora_name
        self._pool = EnginePool([client.base_url], timeout=timeout)

    def sync(self, publish: PublishCallback, step: int) -> None:
        result = self._pool.update_weights(publish.trainer(), self._name, step)
        if result.step != step:
            raise StateError.make(
                f"step {step} passed to {result.step} while the engine pulled it",
                "let one trainer publish, and nothing step while it generates",
            )
        self._client.model = result.lora_name

    def check(self, step: int) -> None:
        """The name says the step, and the client compares the answers' names."""


class _Weights:
    """How one engine gets a whole model's steps: into its own parameters, while it is paused."""

    def __init__(self, client: _Client, publish: PublishCallback, timeout: float) -> None:
        config = client.get_server_info().get("weight_transfer_config") or {}
        if config.get("backend") != "fanin":
            raise RequestError.make(
                f"the engine at {client.base_url} has the weight transfer backend "
                f"{config.get('backend')!r}",
                'start it with --weight-transfer-config \'{"backend": "fanin"}\' and '
                "VLLM_PLUGINS=fanin",
                address=client.base_url,
            )
        self._client = client
        self._registry = Registry(publish.trainer(), run=publish.run, timeout=timeout)
        self._registry.add(client.base_url, kind="vllm")

    def sync(self, publish: PublishCallback, step: int) -> None:
        self._registry.sync(step)

    def check(self, step: int) -> None:
        """Raises StateError unless the engine's weights are this step's."""
        told = self._client._get(f"{self._client.base_url}/weight_info")["weight_version"]
        if told != f"step-{step}":
            raise StateError.make(
                f"the weights of {self._client.base_url} are {told!r}, not those of step {step}",
                "let nobody else update the engine; if it was started again, train() again",
                address=self._client.base_url,
            )


class _Generation(VLLMGeneration):  # type: ignore[misc, unused-ignore]
    """TRL's generation by a vLLM server, with weights that the server pulls."""

    def __init__(
        self,
        *args: Any,
        publish: PublishCallback,
        lora_name: str,
        max_lag: int,
        timeout: float,
        **kwargs: Any,
    ) -> None:
        self._publish = publish
        self._lora_name = lora_name
        self._max_lag = max_lag
        self._timeout = timeout
        self._engine: Any = None
        #: The world and the step that the engine has.
        self._world: str | None = None
        self._synced: int | None = None
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            raise RequestError.make(
                f"vllm_mode is {self.mode!r}: an engine inside of the trainer's processes",
                "give vllm_mode='server', and start vLLM by itself",
            )
        self._on_main(self._connect)

    def _connect(self) -> None:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.vllm_client = _Client(base_url=url, connection_timeout=self.server_timeout)

    def sync_weights(self) -> None:
        """The engine gets the step that is published; on every rank, which all raise alike.

        Blocks until it has it, at most ``timeout`` seconds and a little.
        """
        publish = self._publish
        if publish.server is None:
            publish.open(self.model, 0)  # evaluate() before train()
        step, world = self._published(), publish.trainer().world_id
        if world != self._world:
            self._engine = None
        self._world, self._synced = world, None
        self._on_main(lambda: self._sync(step))
        self._synced = step

    def _sync(self, step: int) -> None:
        if self._engine is None:
            self._engine = self._make_engine()
        self._engine.sync(self._publish, step)

    def _make_engine(self) -> Any:
        if self._publish.adapter:
            return _Adapters(self.vllm_client, self._lora_name, self._timeout)
        return _Weights(self.vllm_client, self._publish, self._timeout)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's call. Raises StateError rather than return what another step generated."""
        if self._world is not None and self._world != self._publish.trainer().world_id:
            self.sync_weights()  # a training that began again
        step, synced = self._published(), self._synced
        if synced is None or step - synced > self._max_lag:
            has = "no weights" if synced is None else f"the weights of step {synced}"
            raise StateError.make(
                f"the trainer is at step {step}, and the engine has {has}",
                "call sync_weights() before; if it is meant to lag, say by how many steps: max_lag",
            )
        self._on_main(lambda: self._begin(synced))
        try:
            completions = super().generate(*args, **kwargs)
        except BaseException:
            if self.accelerator.is_main_process:
                self.vllm_client.failures = None
            raise
        self._on_main(lambda: self._end(synced))
        return completions

    def _begin(self, step: int) -> None:
        self._engine.check(step)
        self.vllm_client.failures = []

    def _end(self, step: int) -> None:
        failures, self.vllm_client.failures = self.vllm_client.failures, None
        if failures:
            raise failures[0]
        # Whatever has changed the engine's weights meanwhile has changed them for good.
        self._engine.check(step)

    def _published(self) -> int:
        step = self._publish.step
        if step is None:
            raise StateError.make(
                "the trainer is inside of an optimizer step, or the last one did not end",
                "generate between two steps; train() again after an error",
            )
        return step

    def _on_main(self, what: Callable[[], _Result]) -> _Result:
        """What the main process does for all: its result, or its error, on every rank."""
        outcome: list[Any] = [(None, None)]
        own: Exception | None = None
        if self.accelerator.is_main_process:
            try:
                outcome = [(what(), None)]
            except Exception as caught:
                own = caught
                outcome = [(None, _portable(caught))]
        broadcast_object_list(outcome, from_process=0)
        result, error = outcome[0]
        if error is not None:
            raise own or error
        return result  # type: ignore[no-any-return, unused-ignore]


def _portable(error: Exception) -> FaninError:
    """As it can be sent to other ranks, whatever the error holds."""
    if isinstance(error, FaninError):
        return error
    return UnreachableError.make(f"the main process failed: {type(error).__name__}: {error}")


class PullMixin:
    """Before a TRL trainer among the bases: its vLLM server pulls what the trainer publishes.

    The trainer takes the arguments below beside its own. Its own must ask for a vLLM server:
    ``use_vllm=True, vllm_mode="server"``. vLLM is started with ``VLLM_PLUGINS=fanin
    VLLM_SERVER_DEV_MODE=1`` and ``--enable-lora``, or for all weights ``--weight-transfer-config
    '{"backend": "fanin"}'``.

    It cannot generate with other weights unseen. Before and after each call it compares the
    engine's step with the trainer's. An adapter has its step in its name. All weights have it as
    the engine's ``weight_version``. An engine that was started again, or that another process has
    updated, has another one. Every rank then raises StateError. If the engine cannot pull, every
    rank raises PoolError or SyncError. If the engine cannot be reached for completions, the main
    process raises the error of TRL's client. The others raise UnreachableError.

    Args:
        publish: what publishes; default: ``PublishCallback()``, on 127.0.0.1:6000 and up.
        lora_name: the prefix of adapters' names in the engine: ``policy-run0-step7``.
        max_lag: how many steps the engine's weights may be behind the trainer's when it generates.
            0: none; more for trainers that are told to sync only now and then.
        pull_timeout: seconds that the engine may take for one step.

    Raises:
        RequestError: the trainer does not generate with a vLLM server, or not through TRL's
            VLLMGeneration; vLLM was started without what it needs.
    """

    def __init__(
        self,
        *args: Any,
        publish: PublishCallback | None = None,
        lora_name: str = "policy",
        max_lag: int = 0,
        pull_timeout: float = 120.0,
        **kwargs: Any,
    ) -> None:
        publish = PublishCallback() if publish is None else publish
        AdapterName(lora_name, publish.run, 0)
        if isinstance(max_lag, bool) or not isinstance(max_lag, int) or max_lag < 0:
            raise RequestError.make(f"max_lag {max_lag!r} is no number of steps", "give 0 or more")
        make = functools.partial(
            _Generation, publish=publish, lora_name=lora_name, max_lag=max_lag, timeout=pull_timeout
        )
        with _in_place_of_trls(type(self), make):
            super().__init__(*args, **kwargs)
        if not isinstance(getattr(self, "vllm_generation", None), _Generation):
            raise RequestError.make(
                f"{type(self).__name__} does not generate by TRL's VLLMGeneration",
                "give use_vllm=True and vllm_mode='server'; a trainer that talks to vLLM by itself "
                "gets a PublishCallback, and its engines a fanin.pool or fanin.sync",
            )
        self.publish = publish
        self.add_callback(publish)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _in_place_of_trls(trainer: type, make: Callable[..., Any]) -> Iterator[None]:
    """While a trainer is made, *make* is what the modules of its classes call VLLMGeneration.

    TRL has no argument for it. Under a lock: of two trainers that are made at once in one process,
    each gets its own.
    """
    modules = {sys.modules[one.__module__] for one in trainer.__mro__ if one.__module__}
    modules.add(vllm_generation)
    with _lock:
        before = [
            (module, vars(module)[_REPLACED]) for module in modules if _REPLACED in vars(module)
        ]
        try:
            for module, _ in before:
                setattr(module, _REPLACED, make)
            yield
        finally:
            for module, was in before:
                setattr(module, _REPLACED, was)
