# SPDX-License-Identifier: Apache-2.0
"""``nixl-fetch map``: a recorded mapping, whose fields nixl-fetch has checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from telling import Failed, print_json, print_table, say, size


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _own(tensor: dict[str, Any]) -> str | None:
    """Why nothing published fills it; None: something does."""
    return tensor["own"] if isinstance(tensor.get("own"), str) else None


def _bytes_of(source: dict[str, Any], box: dict[str, Any]) -> int:
    bits = re.search(r"\d+", source["dtype"])
    return int(math.prod(box["extent"], start=int(bits[0]) if bits else 8)) // 8


def _mode(module: dict[str, Any]) -> str:
    """How a module is filled: "boxes", "loader"; "own": nothing published goes into it."""
    if "fallback" in module:
        return "loader"
    return "boxes" if any(_list(tensor.get("sources")) for tensor in module["tensors"]) else "own"


class _Shown:
    """What is shown: all, or what takes of published tensors like a pattern."""

    def __init__(self, modules: list[dict[str, Any]], key: str) -> None:
        self.key, self.all = key, modules
        self.modules = [module for module in modules if self._shows(module)]
        self.sources = [s for m in modules for t in m["tensors"] for s in self.sources_of(t)]
        self.boxes = [(source, box) for source in self.sources for box in source["boxes"]]
        self.bytes = sum(_bytes_of(*one) for one in self.boxes)

    def wants(self, name: str) -> bool:
        return not self.key or fnmatchcase(name, self.key)

    def sources_of(self, tensor: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in _list(tensor.get("sources")) if self.wants(one["name"])]

    def tensors_of(self, module: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in module["tensors"] if not self.key or self.sources_of(one)]

    def _shows(self, module: dict[str, Any]) -> bool:
        taken = module.get("fallback", {}).get("taken", ())
        return (
            not self.key
            or bool(self.tensors_of(module))
            or any(self.wants(str(one)) for one in taken)
        )

    def rows(self) -> Iterator[tuple[str, ...]]:
        for module in self.modules:
            why = module["fallback"]["why"] if "fallback" in module else ""
            mode = _mode(module) + (f": {why}" if why else "")
            yield f"{module['path'] or '.'} ({module['class']})", "", "", "", "", "", mode
            for tensor in module["tensors"]:
                name = f"  {tensor['name']}"
                for source in self.sources_of(tensor):
                    for box in source["boxes"]:
                        places = (str(box["offset"]), str(box["extent"]), str(box["at"]))
                        yield name, source["name"], *places, str(_bytes_of(source, box)), ""
                if _own(tensor) is not None and not self.key:
                    yield name, "-", "", "", "", "", f"own: {_own(tensor)}"


def _tell_text(document: dict[str, Any], shown: _Shown) -> None:
    engine, published = document["engine"], document["published"]
    print_table("TENSOR SOURCE OFFSET EXTENT AT> BYTES> MODE", shown.rows())
    say(f"{engine['name']} {engine['version']}, {document['model']}")
    for kind, place in document["ranks"].items():
        if isinstance(place, dict):
            say(f"{kind} rank {place.get('rank', 0)} of {place.get('size', 0)}")
    tensors = [tensor for module in shown.all for tensor in module["tensors"]]
    into = sum(not shown.key or bool(shown.sources_of(tensor)) for tensor in tensors)
    own = sum(_own(tensor) is not None for tensor in tensors)
    loaders = sum("fallback" in module for module in shown.all)
    say(
        f"{len(shown.boxes)} boxes, {size(shown.bytes)}, of {len(shown.sources)} published tensors "
        f"go into {into} tensors of {len(shown.all)} modules"
    )
    say(
        f"{own} tensors are the engine's own, {loaders} modules are the loader's, "
        f"{len(published['unwanted'])} of {published['count']} published tensors are not wanted"
    )


def _tensor(shown: _Shown, tensor: dict[str, Any]) -> dict[str, Any]:
    sources = [
        {**source, "bytes": sum(_bytes_of(source, box) for box in source["boxes"])}
        for source in shown.sources_of(tensor)
    ]
    told = {name: tensor.get(name) for name in ("name", "role", "dtype", "shape")}
    return {
        **told,
        "own": _own(tensor),
        "padded": bool(_list(tensor.get("fills"))),
        "sources": sources,
    }


def _module(shown: _Shown, module: dict[str, Any]) -> dict[str, Any]:
    fallback = module.get("fallback", {})
    return {
        "path": module["path"],
        "class": module["class"],
        "mode": _mode(module),
        "why": fallback.get("why"),
        "taken": fallback.get("taken", []),
        "tensors": [_tensor(shown, tensor) for tensor in shown.tensors_of(module)],
    }


def main(as_json: bool, path: str, key: str) -> int:
    """*key*: a pattern of published names; "": all."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    shown = _Shown(document["modules"], key)
    if key and not shown.modules:
        why = f"{path} takes no published tensor like '{key}'"
        raise Failed("NOT_FOUND", "cannot show the key", why, "leave out --key to see all")
    if not as_json:
        _tell_text(document, shown)
        return 0
    about, published = document["engine"], document["published"]
    print_json(
        {
            "engine": about["name"],
            "version": about["version"],
            "model": document["model"],
            "ranks": document["ranks"],
            "published": published["count"],
            "digest": published["digest"],
            "unwanted": published["unwanted"],
            "modules": [_module(shown, module) for module in shown.modules],
            "sources": len(shown.sources),
            "boxes": len(shown.boxes),
            "bytes": shown.bytes,
        }
    )
    return 0
