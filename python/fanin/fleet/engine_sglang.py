# SPDX-License-Identifier: Apache-2.0
"""SGLang by its sessions for weights, with fanin's loader inside."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from fanin._http import Reply
from fanin.errors import FaninError, PeerError, PullTimeoutError, RequestError, UnreachableError
from fanin.mapping._checks import check_patterns
from fanin.sglang.request import LOADER, TOLD, Request, encode

from .driver import CHECKPOINT, UNSAID, Driver, InitInfo, Options, Pulled, launches

_LOOK = 5.0  # seconds for what answers at once in an engine that lives


class SGLang(Driver):
    """SGLang 0.5.23 with ``--custom-weight-loader fanin.sglang.load`` and fanin's plugin.

    SGLang takes a loader's return for success; the plugin puts what came of it into the answer. An
    answer without that is none.
    """

    kind = "sglang"
    _PLUGIN = "have fanin of the same version as here where SGLang runs"
    _START = f"start SGLang with --custom-weight-loader {LOADER}"
    _MODES = {"retract": "retract", "abort": "abort", "keep": "in_place"}

    def check_options(self, options: Options) -> None:
        if options.pause_mode not in self._MODES:
            raise RequestError.make(
                f"{self.wire.url}: SGLang cannot pause with mode {options.pause_mode!r}",
                "give one of " + ", ".join(self._MODES),
            )
        if options.prefetch is True:
            raise RequestError.make(
                f"{self.wire.url}: SGLang cannot read ahead",
                'leave prefetch "auto", or false',
                key="prefetch",
            )

    def health(self, deadline: float) -> str:
        reply = self.wire.get("/model_info", deadline)
        said = self._version(reply, "/model_info", "check the URL: this is not SGLang")
        return CHECKPOINT if said == UNSAID else said

    def pause(self, options: Options, deadline: float) -> None:
        mode = self._MODES[options.pause_mode]
        self.wire.post("/pause_generation", {"mode": mode}, deadline)

    def init(self, info: InitInfo, deadline: float) -> None:
        """Nothing to tell: each request says where the trainer is. Looks whether it can work."""
        reply = self.wire.get("/server_info", deadline)
        body = reply.json()
        if reply.status != 200 or not isinstance(body, dict):
            raise self.wire.refusal(reply, "/server_info", "check the URL")
        loaders = body.get("custom_weight_loader")
        if isinstance(loaders, list) and LOADER not in loaders:
            raise RequestError.make(f"{self.wire.url} has no loader {LOADER}", self._START)
        for key, name in (("dp_size", "data"), ("pp_size", "pipeline")):
            size = body.get(key)
            if isinstance(size, int) and size > 1:
                raise RequestError.make(
                    f"{self.wire.url}: SGLang does not update tensors under {name} parallelism"
                    f" ({key} is {size})",
                    f"start it with {key.replace('_', '-')} 1, as several endpoints if need be",
                    key=key,
                )
        if "draft_run" in info.more:
            raise RequestError.make(
                f"{self.wire.url}: SGLang's draft models are not updated",
                "leave draft_run out: the draft stays as SGLang has loaded it",
                key="draft_run",
            )
        size = body.get("tp_size")
        self._ranks = size if isinstance(size, int) and size > 0 else 1

    def start(self, may_be_open: bool, deadline: float) -> None:
        try:
            self._post("/begin_weight_update", {"selector": "target"}, deadline)
        except (UnreachableError, PullTimeoutError):
            raise
        except FaninError as error:
            if not may_be_open and "already open" not in error.message:
                raise

    def update(self, info: InitInfo, step: int, options: Options, deadline: float) -> None:
        if not hasattr(self, "_ranks"):
            self.init(info, min(deadline, time.monotonic() + _LOOK))
        request = Request(
            trainer=info.trainer,
            run=info.run,
            step=step,
            timeout=info.timeout,
            server_name=info.server_name,
            unused=check_patterns("unused", info.more.get("unused", ()), key="unused"),
            keep=check_patterns("keep", info.more.get("keep", ()), key="keep"),
            config=info.more.get("config", "check"),
            external_kv=info.more.get("external_kv", "drop"),
        )
        body = {
            "serialized_named_tensors": [encode(request)] * self._ranks,
            "selector": "target",  # a draft stays as SGLang has loaded it
            "load_format": LOADER,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        path = "/update_weights_from_tensor"
        self._told(self._post(path, body, deadline), path)

    def finish(self, step: int, version: str, options: Options, deadline: float) -> Pulled:
        path = "/end_weight_update"
        pulled = self._told(self._post(path, {}, deadline), path)
        self._of_one_launch(self._holding(pulled, step), self._PLUGIN)
        if not options.keep_caches:
            self.wire.post("/flush_cache", None, deadline)
        self._post(
            "/update_weight_version",
            {"new_version": version, "abort_all_requests": False},
            deadline,
        )
        self._proven(version, deadline)
        return pulled

    def _told(self, reply: Reply, path: str) -> Pulled:
        """What fanin's plugin has put into the answer."""
        body = reply.json()
        message = str(body.get("message")) if isinstance(body, dict) else ""
        try:
            told, _ = json.JSONDecoder().raw_decode(message.partition(TOLD)[2])
            return Pulled(
                int(told["step"]),
                int(told["bytes"]),
                float(told["seconds"]),
                str(told["how"]),
                launches(told),
                external=told.get("external_kv") is True,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise PeerError.make(
                f"{self.wire.url}{path} says that all is well, and not what was pulled",
                "install fanin where SGLang runs, as a package of which it loads the plugin"
                " (SGLANG_PLUGINS, if it is set, must name fanin)",
            ) from None

    def resume(self, deadline: float) -> None:
        self.wire.post("/continue_generation", {}, deadline)

    def _post(self, path: str, body: Mapping[str, Any], deadline: float) -> Reply:
        reply = self.wire.ask("POST", path, body, deadline)
        content = reply.json()
        said = content.get("success") if isinstance(content, dict) else None
        if reply.status == 200 and said is True:
            return reply
        remedy = "look into the engine's log, then sync again"
        if "load_format" in reply.reason:
            remedy = self._START
        raise self.wire.refusal(reply, path, remedy)
