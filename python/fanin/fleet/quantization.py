# SPDX-License-Identifier: Apache-2.0
"""Which of a trainer's runs is quantized as a sync wants it: the trainer quantizes, not the sync.

A WeightServer publishes a model in several ways as several runs: ``full:0``, ``full:0-fp8``. Each
run's metadata has its ``quantization_config``, whose keys are Hugging Face's.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fanin._quantization import LISTS, is_fit
from fanin._served import tells_digests
from fanin.engine.trainers import Published
from fanin.errors import FaninError, NotFoundError, PullTimeoutError, RequestError, first_of
from fanin.mapping._quantized import read_quantization

_PLAIN = ("bf16", "bfloat16", "none")
# What a quantization_config has if it leaves them out.
_LEFT_OUT = {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "float"}
_TAKEN = 'null, "bf16", "fp8", or a quantization_config of Hugging Face'


@dataclass(frozen=True)
class Wanted:
    """How a sync wants the weights to be quantized.

    Args:
        keys: of a quantization_config; None: not at all.
        skip: patterns of modules that are not to be.
    """

    keys: Mapping[str, Any] | None
    skip: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.keys is None:
            return "bf16"
        return "fp8" if self.keys == {"quant_method": "fp8"} else json.dumps(dict(self.keys))


@dataclass(frozen=True)
class Run:
    """A run, and the quantization_config by which the trainer quantizes it; None: it does not."""

    name: str
    quantization: Mapping[str, Any] | None


def wanted_of(quantization: Any, skip: Any = None, known: Wanted | None = None) -> Wanted | None:
    """What callers mean, None: they say nothing.

    Args:
        quantization: null, "bf16", "fp8", a quantization_config, or an object with
            ``quantization`` and ``skip_modules``.
        skip: patterns of modules.
        known: what was said before, for *skip* alone.

    Raises RequestError for what is none of these.
    """
    if isinstance(quantization, dict) and "quantization" in quantization:
        if quantization.keys() - {"quantization", "skip_modules"}:
            raise _unknown(quantization)
        skip = quantization.get("skip_modules") if skip is None else skip
        quantization = quantization["quantization"]
    skip = _patterns(skip)
    keys: dict[str, Any] | None
    if quantization is None:
        if known is not None:
            return Wanted(known.keys, skip) if skip else known
        if not skip:
            return None
        raise RequestError.make(
            "skip_modules is given, and no quantization",
            'give quantization "fp8"',
            key="skip_modules",
        )
    if isinstance(quantization, str):
        keys = {"quant_method": quantization}
    elif isinstance(quantization, dict) and isinstance(quantization.get("quant_method"), str):
        keys = {name: value for name, value in quantization.items() if name not in LISTS}
        skip += tuple(one for name in LISTS for one in _patterns(quantization.get(name)))
    else:
        raise _unknown(quantization)
    method = keys["quant_method"].lower().replace("_", "-")
    return Wanted(None if method in _PLAIN else keys | {"quant_method": method}, skip)


def _unknown(quantization: Any) -> RequestError:
    return RequestError.make(
        f"quantization {quantization!r} is unknown", f"give {_TAKEN}", key="quantization"
    )


def _patterns(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, list) and all(isinstance(one, str) and one for one in given):
        return tuple(given)
    raise RequestError.make(
        f"skip_modules {given!r} is no list of texts", "give a list", key="skip_modules"
    )


def look_for(
    client: Any, run: str, wanted: Wanted, without: Container[str], timeout: float
) -> Run | FaninError:
    """The run of the model of *run* that is quantized as *wanted*, or why there is none yet.

    They are named as *run*, or one name begins with the other and a dash. without: names of other
    models. Raises RequestError if no run will do.
    """
    infos = [one for one in client.publications(timeout=timeout) if _is_of(one.name, run)]
    infos = [one for one in infos if one.name.removeprefix("full:") not in without]
    ready = {one.name for one in infos if one.state != "unpublished"}
    late = sorted({one.name for one in infos} - ready)
    if not infos:
        return NotFoundError.make(
            f"no rank of the trainer that answers publishes full:{run}",
            "check the run, and that WeightServer has been made on every rank",
            key=f"full:{run}",
        )
    found = {}
    for name in sorted(ready):
        entries = tuple(client.catalog(name, timeout=timeout, owners=False))
        metadata = client.metadata(name, timeout)
        found[name.removeprefix("full:")] = Published(entries, metadata, "", "")
    try:
        return chosen(found, wanted, run)
    except RequestError as error:
        if not late:
            raise
        told = f"{error.message}; {', '.join(late)} has no step yet"
        return PullTimeoutError.make(told, "publish a first step", key=late[0])


def _is_of(name: str, run: str) -> bool:
    kind, _, other = name.partition(":")
    near = other == run or other.startswith(run + "-") or run.startswith(other + "-")
    return kind == "full" and near and not tells_digests(other)


def chosen(published: Mapping[str, Published], wanted: Wanted, own: str) -> Run:
    """The run that is quantized as *wanted*; *own*, if it is among several.

    Raises RequestError that says what is published, and how to publish what is wanted.
    """
    runs = [Run(name, read_quantization(one.quantization)) for name, one in published.items()]
    fit = [one for one in runs if _fits(wanted.keys, one.quantization)]
    why = [f"full:{one.name} is {_told(one.quantization)}" for one in runs]
    if fit and wanted.keys is not None:
        torn = {one.name: _quantized(published[one.name], wanted.skip) for one in fit}
        fit = [one for one in fit if not torn[one.name]]
        why += [f"full:{name} quantizes {first_of(all_)}" for name, all_ in torn.items() if all_]
    if len(fit) == 1:
        return fit[0]
    for one in fit:
        if one.name == own:
            return one
    if fit:
        names = ", ".join(f"full:{one.name}" for one in fit)
        raise RequestError.make(
            f"quantization {wanted} fits several runs: {names}",
            "give more keys of the quantization_config, such as weight_block_size",
            key="quantization",
        )
    raise RequestError.make(
        f"no run of the trainer is published as {wanted}: {'; '.join(why)}",
        f"publish one: {_line(wanted, own)}",
        key="quantization",
    )


def _fits(keys: Mapping[str, Any] | None, told: Mapping[str, Any] | None) -> bool:
    if keys is None or told is None:
        return keys is told
    return all(
        told.get(name, _LEFT_OUT.get(name)) == value
        for name, value in keys.items()
        if value is not None
    )


def _told(quantization: Mapping[str, Any] | None) -> str:
    if quantization is None:
        return "not quantized"
    return json.dumps({k: v for k, v in quantization.items() if k not in LISTS})


def _quantized(published: Published, skip: Sequence[str]) -> list[str]:
    """Modules that are to be left out, and are published in fp8."""
    names = (entry.name for entry in published.entries if entry.dtype.startswith("F8_"))
    modules = [name.removesuffix(".weight") for name in names]
    return [one for one in modules if any(is_fit(entry, one) for entry in skip)]


def _line(wanted: Wanted, run: str) -> str:
    if wanted.keys is None:
        return f'server.add_run("{run}-bf16", model)'
    how = '"fp8"' if str(wanted) == "fp8" else repr(dict(wanted.keys))
    skip = f", skip_modules={list(wanted.skip)!r}" if wanted.skip else ""
    return f'server.add_run("{run}-fp8", model, quantize={how}{skip}) of the WeightServer'
