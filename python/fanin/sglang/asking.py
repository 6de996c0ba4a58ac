# SPDX-License-Identifier: Apache-2.0
"""How SGLang's schedulers are asked for digests of what they hold: by its route of checksums.

``POST /weights_checker`` hands its ``action`` to every rank of tensor parallelism, and answers with
texts of each. The plugin (:mod:`fanin.sglang.guard`) knows one action more. Neither SGLang nor
PyTorch is needed to ask.
"""

from __future__ import annotations

import json
import time
from typing import Any

from fanin._http import FAILURES, ask_json, base_url
from fanin.errors import PeerError, RequestError

_PATH = "/weights_checker"
_ACTION = "fanin.served_digests"
_LONGEST = 1 << 28  # bytes of an answer


def is_sglang(engine: Any, timeout: float, api_key: str | None = None) -> bool:
    """Whether *engine* is an ``sglang.Engine``, or the URL of a server of SGLang's. One that
    does not answer is none."""
    if not isinstance(engine, str):
        return hasattr(engine, "tokenizer_manager") and hasattr(engine, "loop")
    deadline = time.monotonic() + timeout
    try:
        reply = ask_json("GET", base_url(engine), "/model_info", deadline=deadline, api_key=api_key)
    except FAILURES:
        return False
    return reply.status == 200 and told_by_sglang(reply)


def told_by_sglang(reply: Any) -> bool:
    """Whether a server's answer to ``/model_info`` is one of SGLang's."""
    told = reply.json()
    return isinstance(told, dict) and "model_path" in told


def ask(
    engine: Any, publication: str, step: int, timeout: float, api_key: str | None = None
) -> list[dict[str, Any]]:
    """What every rank of *engine* answers to :func:`fanin.sglang.held.answer`.

    Blocks *timeout* seconds at most and a little; an ``sglang.Engine`` as long as it takes. Raises
    RequestError: it cannot be asked, or a rank has refused; PeerError: it has no plugin.
    """
    action = f"{_ACTION} {publication} {step}"
    good, said, ranks = (
        _by_url(engine, action, timeout, api_key)
        if isinstance(engine, str)
        else _by_object(engine, action)
    )
    where = engine if isinstance(engine, str) else "the engine"
    if not good and "Unsupported action" not in said:
        raise RequestError.make(f"{where}: SGLang gives no digests: {said}", "its log says more")
    try:
        return [dict(json.loads(one["checksums"][_ACTION])) for one in ranks]
    except (KeyError, TypeError, ValueError):
        raise PeerError.make(
            f"{where}: SGLang knows no digests: {said}",
            "have fanin of the same version as here where SGLang runs, as a package of which it"
            " loads the plugin (SGLANG_PLUGINS, if it is set, must name fanin)",
        ) from None


def _by_url(url: str, action: str, timeout: float, api_key: str | None) -> tuple[bool, str, Any]:
    try:
        reply = ask_json(
            "POST",
            base_url(url),
            _PATH,
            {"action": action},
            deadline=time.monotonic() + timeout,
            api_key=api_key,
            limit=_LONGEST,
        )
    except FAILURES as error:
        raise RequestError.make(f"{url}{_PATH}: {error}", "look into the engine's log") from error
    told = reply.json()
    ranks = told.get("ranks") if isinstance(told, dict) else None
    return reply.status == 200, f"status {reply.status}: {reply.reason}", ranks


def _by_object(engine: Any, action: str) -> tuple[bool, str, Any]:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    asked = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
    good, said, ranks, _ = engine.loop.run_until_complete(asked)
    return good, said, ranks


def question(told: str) -> tuple[str, int] | None:
    """The publication and the step in an action; None: it is SGLang's own."""
    name, _, rest = told.partition(" ")
    publication, _, step = rest.rpartition(" ")
    return (publication, int(step)) if name == _ACTION and step.isdecimal() else None


def text_of(answer: dict[str, Any]) -> dict[str, str]:
    """A rank's answer, where the route has its checksums."""
    return {_ACTION: json.dumps(answer, separators=(",", ":"))}
