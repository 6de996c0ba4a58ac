# SPDX-License-Identifier: Apache-2.0
"""What came of a pull, in SGLang's own answer; and an engine whose weights are torn does nothing.

SGLang takes the return of a custom loader for success, and its scheduler does not survive an
exception in one. So this is a plugin of SGLang's (the entry point ``sglang.srt.plugins``), which
stands around some of its methods in every scheduler process:

* the update by :data:`~fanin.sglang.request.LOADER` answers what the loader says came of it, and is
  a failure if the loader was not heard;
* after a pull that failed when bytes may have been written the scheduler is paused; the end of the
  update is refused, and ``/continue_generation`` does nothing, until a whole pull has succeeded or
  a whole checkpoint was loaded from disk;
* the end of an update says which step is there;
* with ``FANIN_REQUIRE_STEP`` requests get HTTP 503 until an update has ended well;
* the route of checksums also gives digests of what the model holds (:mod:`fanin.sglang.held`);
* an adapter without a place in the model is not loaded (:mod:`fanin.sglang.lora_guard`).

Nothing here imports SGLang or PyTorch before SGLang calls it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fanin.config import inference_setting

from . import external_kv
from .asking import question
from .lora_guard import load
from .request import LOADER, TOLD

_log = logging.getLogger("fanin.sglang")

_REMEDY = "sync again; until then nothing is generated"
_NO_STEP = (
    "fanin: FANIN_REQUIRE_STEP is set, and this engine has only its checkpoint yet; sync it, and "
    "start SGLang with --skip-server-warmup"
)


@dataclass(slots=True)
class Standing:
    """How the weights of this process stand. One thread, the scheduler's.

    Args:
        heard: an update is under way whose answer will tell its outcome.
        failure: why that update failed.
        pulled: what the last pull that ended well did.
        loaded: a pull has ended well since the update began.
        stays: KV of the old weights that no end of an update drops.
        served: an update has ended well since the process began.
    """

    heard: bool = False
    failure: str = ""
    pulled: dict[str, Any] = field(default_factory=dict)
    loaded: bool = False
    stays: str = ""
    served: bool = False
    _torn: dict[int, str] = field(default_factory=dict)

    @property
    def torn(self) -> str:
        """Why the weights of a model are not the whole of one step, "" if they are."""
        return next(iter(self._torn.values()), "")

    def begin(self) -> None:
        """An update begins."""
        self.heard, self.loaded, self.failure = True, False, ""

    def succeed(
        self, model: int, step: int, moved: int, seconds: float, how: str, worlds: set[str]
    ) -> None:
        """A whole pull into a model, which *model* stands for, has ended well on all ranks.

        worlds: the launch of the trainer that it is of.
        """
        before = self.pulled if self.loaded else {}
        self.pulled = {
            "step": step,
            "bytes": moved + before.get("bytes", 0),
            "seconds": round(seconds + before.get("seconds", 0.0), 6),
            "how": how,
            "worlds": sorted(worlds.union(before.get("worlds", []))),
        }
        self.loaded = True
        self._torn.pop(model, None)

    def fail(self, model: int, why: str, torn: bool) -> None:
        """A pull has failed. torn: on some rank bytes may have been written."""
        self.failure = self.failure or why
        if torn:
            self._torn[model] = why

    def forget(self) -> None:
        """All weights came from elsewhere."""
        self._torn, self.pulled = {}, {}

    def told(self) -> str:
        """For an answer."""
        return TOLD + json.dumps(self.pulled)


standing = Standing()
"""Of this process."""


def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.update_weights_from_tensor``."""
    if getattr(request, "load_format", None) != LOADER:
        return original(manager, request)
    # SGLang notes it as soon as the loader has returned.
    version, request.weight_version = request.weight_version, None
    standing.begin()
    standing.stays = external_kv.what_stays(getattr(manager, "scheduler", None))
    try:
        output = original(manager, request)
    finally:
        standing.heard = False
    if not output.success:
        return output
    if standing.failure or not standing.loaded:
        output.success = False
        output.message = f"fanin: {standing.failure or 'the loader has not pulled anything'}"
        scheduler = getattr(manager, "scheduler", None)
        if standing.torn and scheduler is not None:
            scheduler._engine_paused = True
        return output
    if version is not None:
        manager.record_weight_version_after_update(version)
    output.message = standing.told()
    return output


def end(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.end_weight_update``."""
    if standing.torn:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

        message = f"fanin: the weights are not whole: {standing.torn}; {_REMEDY}"
        return EndWeightUpdateReqOutput(success=False, message=message)
    output = original(manager, request)
    if output.success and standing.pulled:
        scheduler = getattr(manager, "scheduler", None)
        if external_kv.storage_of(scheduler) is not None:
            standing.pulled["external_kv"] = True
        why = external_kv.drop(scheduler)
        output.success = not why
        standing.served |= output.success
        output.message = f"fanin: {why}; {_REMEDY}" if why else standing.told()
    return output


def from_disk(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.update_weights_from_disk``."""
    output = original(manager, request)
    if output.success:
        standing.forget()
        standing.served = True
    return output


def check(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.check_weights``."""
    asked = question(request.action)
    if asked is None:
        return original(manager, request)
    from .held import answer

    return answer(manager, *asked)


def go_on(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around ``Scheduler.continue_generation``."""
    if standing.torn:
        scheduler._engine_paused = True
        _log.error("fanin: stays paused: %s; %s", standing.torn, _REMEDY)
        return None
    return original(scheduler, request)


def answer(
    original: Callable[..., Any], scheduler: Any, request: Any, *more: Any, **by: Any
) -> Any:
    """Around the scheduler's methods that take a request, with ``FANIN_REQUIRE_STEP``.

    SGLang's health check is such a request, and nobody sees what it generates.
    """
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.utils import is_health_check_generate_req

    if standing.served or is_health_check_generate_req(request):
        return original(scheduler, request, *more, **by)
    refused = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": _NO_STEP}
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=refused), request)
    return None


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

HOOKS: dict[str, Callable[..., Any]] = {
    f"{_MANAGER}.update_weights_from_tensor": update,
    f"{_MANAGER}.end_weight_update": end,
    f"{_MANAGER}.update_weights_from_disk": from_disk,
    f"{_SCHEDULER}.continue_generation": go_on,
    f"{_MANAGER}.check_weights": check,
    "sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter": load,
}
"""By the path of the method that they stand around."""


def register() -> None:
    """The plugin: SGLang calls this in each of its processes before anything else is made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = dict(HOOKS)
    if inference_setting("require_step"):
        hooks |= {
            f"{_SCHEDULER}._handle_{kind}_request": answer for kind in ("generate", "embedding")
        }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
