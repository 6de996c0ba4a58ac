# SPDX-License-Identifier: Apache-2.0
"""What the driver asks of the loader inside SGLang, in the shape of a tensor.

SGLang's route ``/update_weights_from_tensor`` takes pickled tensors, one list for each
tensor-parallel rank, and hands them to the loader that ``load_format`` names. The one tensor that
is sent here is JSON, byte by byte. Neither PyTorch nor SGLang is needed to write it: the pickle is
made by hand, of globals that SGLang's unpickler lets through.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fanin.errors import PeerError, RequestError
from fanin.mapping._checks import check_patterns
from fanin.names import check_run, check_step

from .external_kv import CHOICES

LOADER = "fanin.sglang.load"
"""What ``--custom-weight-loader`` and ``load_format`` say."""

NAME = "fanin.request"
TOLD = "fanin has pulled: "
"""What SGLang's message has before the JSON object of ``step``, ``bytes``, ``seconds``, ``how``."""

_ALWAYS = ("trainer", "run", "step", "timeout")
_LONGEST = 8 << 20  # bytes; a world of 65536 ranks has addresses of 2 MB


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Immutable.

    Args:
        trainer: a path, or the ranks' addresses.
        run: of ``full:<run>``.
        step: this one exactly.
        timeout: seconds for the pull.
        server_name: demand this job's ranks.
        unused: patterns of published names that the model does not have.
        keep: patterns of the model's parameters that no rank publishes.
        config: "check" that trainer and engine have one, or "ignore".
        external_kv: "drop", or "keep", KV of the old weights that lies outside of the engine.
    """

    trainer: str | Sequence[str] = ()
    run: str = "0"
    step: int = 0
    timeout: float = 60.0
    server_name: str | None = None
    unused: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    config: str = "check"
    external_kv: str = "drop"

    def to_json(self) -> dict[str, Any]:
        """What json writes; what is as it would be anyway is left out."""
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name in _ALWAYS or getattr(self, one.name) != one.default
        }


def encode(request: Request) -> str:
    """``[("fanin.request", uint8 tensor)]`` as SGLang's route wants it: a pickle in base64."""
    content = json.dumps(request.to_json(), separators=(",", ":")).encode()
    pieces = [
        pickle.PROTO + b"\x02",
        pickle.EMPTY_LIST,
        _plain(NAME),
        pickle.GLOBAL + b"torch\nByteTensor\n",
        _plain(list(content)),
        pickle.TUPLE1,
        pickle.REDUCE,
        pickle.TUPLE2,
        pickle.APPEND,
        pickle.STOP,
    ]
    return base64.b64encode(b"".join(pieces)).decode("ascii")


def _plain(value: Any) -> bytes:
    """The opcodes of a value of built-in types, without protocol and end."""
    return pickle.dumps(value, 2)[2:-1]


def decode(named_tensors: Any) -> Request:
    """The request in what SGLang hands to its loader. Raises RequestError, PeerError."""
    content = _content(named_tensors)
    try:
        body = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise PeerError.make(
            f"the request to {LOADER} is no JSON: {error}", "let fanin.sync send it"
        ) from None
    if not isinstance(body, dict):
        raise PeerError.make(f"the request to {LOADER} is no object", "let fanin.sync send it")
    unknown = sorted(set(body) - {one.name for one in fields(Request)})
    if unknown:
        raise RequestError.make(
            f"the field {unknown[0]!r} is unknown to {LOADER}",
            "let driver and engine run the same version of fanin",
            key=unknown[0],
        )
    return Request(
        _trainer(body.get("trainer")),
        check_run(body.get("run", "0")),
        check_step(body.get("step", -1)),
        _seconds(body.get("timeout", 60.0)),
        _server_name(body.get("server_name")),
        check_patterns("unused", body.get("unused", ()), key="unused"),
        check_patterns("keep", body.get("keep", ()), key="keep"),
        _choice(body, "config", ("check", "ignore")),
        _choice(body, "external_kv", CHOICES),
    )


def _content(named_tensors: Any) -> bytes:
    entries = list(named_tensors.items() if isinstance(named_tensors, dict) else named_tensors)
    named = [tensor for name, tensor in entries if name == NAME]
    if len(entries) != 1 or len(named) != 1:
        raise PeerError.make(
            f"{LOADER} was given {len(entries)} tensors, and wants the one named {NAME}",
            "weights are pulled from the trainer's ranks: send a request, not tensors",
        )
    tensor = named[0]
    if str(tensor.dtype) != "torch.uint8" or tensor.dim() != 1 or tensor.numel() > _LONGEST:
        raise PeerError.make(f"{NAME} is no request", "let fanin.sync send it")
    content: bytes = tensor.cpu().numpy().tobytes()
    return content


def _trainer(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise RequestError.make(
        f"trainer {value!r} is none", "give the path of a nixl_info.json, or a list of addresses"
    )


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise RequestError.make(f"timeout {value!r} is not above 0", "give seconds")
    return float(value)


def _choice(body: dict[str, Any], name: str, choices: tuple[str, str]) -> str:
    value = body.get(name, choices[0])
    if value in choices:
        return str(value)
    raise RequestError.make(f"{name} is {value!r}", f"give one of {choices}", key=name)


def _server_name(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise RequestError.make(f"server_name {value!r} is no name", "leave it out or give one")
