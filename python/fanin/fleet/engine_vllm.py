# SPDX-License-Identifier: Apache-2.0
"""vLLM by the routes of its weight transfer, which are there with ``VLLM_SERVER_DEV_MODE=1``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fanin._http import Reply
from fanin.engine.weights_state import METHOD
from fanin.errors import (
    FaninError,
    PeerError,
    PullTimeoutError,
    StateError,
    SupersededError,
    UnreachableError,
)

from .driver import Driver, InitInfo, Options, Pulled, Tell, launches

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class VLLM(Driver):
    """vLLM 0.32 with ``--weight-transfer-config '{"backend": "fanin"}'``."""

    kind = "vllm"
    reads_ahead = True
    _PLUGIN = "start vLLM with fanin's plugin, of the same version as here"
    _DEV = "start vLLM with VLLM_SERVER_DEV_MODE=1"
    _BACKEND = 'start vLLM with --weight-transfer-config \'{"backend": "fanin"}\''

    def check_options(self, options: Options) -> None:
        del options  # all modes

    def health(self, deadline: float) -> str:
        alive = self.wire.get("/health", deadline)
        if alive.status != 200:
            raise self.wire.refusal(alive, "/health", "look into the engine's log")
        return self._version(self.wire.get("/weight_info", deadline), "/weight_info", self._DEV)

    def pause(self, options: Options, deadline: float) -> None:
        mode = "keep" if options.pause_mode == "retract" else options.pause_mode
        query = {"mode": mode, "clear_cache": "false" if options.keep_caches else "true"}
        self.wire.post(f"/pause?{urlencode(query)}", None, deadline)
        self._check_paused(deadline)

    def _check_paused(self, deadline: float) -> None:
        reply = self.wire.get("/is_paused", deadline)
        body = reply.json()
        if reply.status != 200 or not isinstance(body, dict) or body.get("is_paused") is not True:
            raise StateError.make(
                f"{self.wire.url} was paused, and does not say that it is: {reply.reason}",
                "see who else resumes it, and that this is vLLM",
            )

    def init(self, info: InitInfo, deadline: float) -> None:
        body: dict[str, Any] = {
            "trainer": info.trainer if isinstance(info.trainer, str) else list(info.trainer),
            "run": info.run,
            "timeout": info.timeout,
            **info.more,
        }
        self._post("/init_weight_transfer_engine", {"init_info": body}, deadline)
        self._states(deadline)

    def start(self, may_be_open: bool, deadline: float) -> None:
        try:
            self._post("/start_weight_update", None, deadline)
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            # An update that was left open is gone on with: of several workers one may have failed
            # alone, and the others then refuse a new start.
            if not may_be_open and "already active" not in error.message:
                raise

    def ahead(self, step: int, deadline: float, tell: Tell) -> str:
        wanted = {"update_info": {"step": step, "prefetch": True}}
        try:
            self._post("/update_weights", wanted, deadline)
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            return error.message
        pause = _FIRST_PAUSE
        while True:
            found = [state.get("ahead") for state in self._states(deadline)]
            states = [one for one in found if isinstance(one, dict) and one.get("step") == step]
            failed = [one for one in states if one.get("state") == "failed"]
            # What other workers have read by then is harmless: the update installs it only if the
            # trainer is still the launch that it is of, from which all others pull.
            if failed or len(states) < len(found):
                return self._not_ahead(failed)
            tell(_sum(states, "bytes"), _sum(states, "total"))
            if all(one.get("state") == "ready" for one in states):
                return ""
            time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _not_ahead(self, failed: list[dict[str, Any]]) -> str:
        if not failed:
            return "a worker reads nothing ahead"
        why = str(failed[0].get("why"))
        if failed[0].get("code") == "FANIN_ERR_SUPERSEDED":
            raise SupersededError.make(f"{self.wire.url}: {why}", "sync the newest step")
        return why

    def update(self, info: InitInfo, step: int, options: Options, deadline: float) -> None:
        self._pull(step, options, deadline)

    def _pull(self, step: int, options: Options, deadline: float) -> None:
        body = {"step": step, **({"keep_caches": True} if options.keep_caches else {})}
        self._post("/update_weights", {"update_info": body}, deadline)
        # A resume of another registry may have come behind this one's pause.
        self._check_paused(deadline)

    def update_draft(self, step: int, version: str, options: Options, deadline: float) -> None:
        self._post("/start_draft_weight_update", None, deadline)
        self._pull(step, options, deadline)
        self._post("/finish_weight_update", {"weight_version": version}, deadline)
        for state in self._states(deadline):
            if state.get("drafts") is True and state.get("draft_step") != step:
                raise PeerError.make(
                    f"{self.wire.url}: a worker says that its draft model holds step"
                    f" {state.get('draft_step')}, after step {step} was pulled",
                    "see that nobody else updates this engine, then sync again",
                )

    def finish(self, step: int, version: str, options: Options, deadline: float) -> Pulled:
        self._post("/finish_weight_update", {"weight_version": version}, deadline)
        self._proven(version, deadline)
        return self._of_one_launch(self._holding(self._held(deadline), step), self._PLUGIN)

    def holds(self, step: int, world: str, deadline: float) -> bool:
        held = self._held(deadline)
        return held is not None and (held.step, held.worlds) == (step, frozenset((world,)))

    def _held(self, deadline: float) -> Pulled | None:
        """What the workers that answer hold, None if one of them has nothing whole."""
        pulled = None
        for state in self._states(deadline):
            if not isinstance(state.get("step"), int) or state.get("dirty"):
                return None
            one = _pulled(state)
            pulled = one if pulled is None else _joined(pulled, one)
        return pulled

    def _states(self, deadline: float) -> list[dict[str, Any]]:
        """What each worker says of its weights; see :mod:`fanin.engine.weights_state`."""
        body = self._post("/collective_rpc", {"method": METHOD}, deadline).json()
        found = body.get("results") if isinstance(body, dict) else None
        good = isinstance(found, list) and found and all(isinstance(one, dict) for one in found)
        if not isinstance(found, list) or not good or "dirty" not in found[0]:
            raise PeerError.make(
                f"{self.wire.url} does not say what its workers hold", self._PLUGIN
            )
        return found

    def disown(self, why: str, deadline: float) -> None:
        body = {"method": "fanin_disown_weights", "args": [why]}
        self._post("/collective_rpc", body, deadline)

    def resume(self, deadline: float) -> None:
        self.wire.post("/resume", None, deadline)

    def _post(self, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply:
        reply = self.wire.ask("POST", path, body, deadline)
        if reply.status == 200:
            return reply
        remedy = self._DEV if reply.status == 404 else "look into the engine's log, then sync again"
        if "not configured" in reply.reason:
            remedy = self._BACKEND
        raise self.wire.refusal(reply, path, remedy)


def _sum(values: list[dict[str, Any]], name: str) -> int:
    found = (value.get(name) for value in values)
    return sum(one for one in found if isinstance(one, int) and not isinstance(one, bool))


def _pulled(state: Mapping[str, Any]) -> Pulled:
    """What one worker says of its last update."""
    last = state.get("last")
    told = last if isinstance(last, dict) else {}
    read = told.get("read")
    return Pulled(
        state["step"],
        _sum([told], "bytes"),
        float(read) if isinstance(read, int | float) else 0.0,
        str(told.get("path")),
        launches(told),
        1,
        state.get("external_kv") is True,
        state.get("drafts") is True,
        str(state.get("basis", "")),
        _sum([told], "whole"),
        _sum([told], "since"),
    )


def _joined(one: Pulled, other: Pulled) -> Pulled:
    """Of two workers of an engine; of another step if theirs differ."""
    hows = dict.fromkeys([*one.how.split("; "), other.how])
    deltas = one.whole or other.whole  # of some workers; the others have read all
    return Pulled(
        one.step if one.step == other.step else -1,
        one.bytes + other.bytes,
        max(one.seconds, other.seconds),
        "; ".join(hows),
        one.worlds | other.worlds,
        (one.workers or 0) + (other.workers or 0),
        one.external or other.external,
        one.drafts or other.drafts,
        f"{one.basis} {other.basis}",
        (one.whole or one.bytes) + (other.whole or other.bytes) if deltas else 0,
        max(one.since, other.since),
    )
