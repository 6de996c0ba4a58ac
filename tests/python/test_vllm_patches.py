# SPDX-License-Identifier: Apache-2.0
"""What fanin replaces in vLLM stands in one table, and nothing else does."""

from __future__ import annotations

import ast
from pathlib import Path
from types import FunctionType

import pytest
from fanin.errors import RequestError
from fanin.vllm import patches

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "python/fanin/vllm"
# They put back what vLLM's reload has put on a module's tensors: state, no function of a class.
OF_MODULES = {"reload.py"}


@pytest.mark.parametrize("row", patches.TABLE, ids=lambda row: row.target.partition(":")[2])
def test_each_row_says_why_and_has_a_test(row: patches.Patch) -> None:
    path, _, name = row.test.partition("::")
    assert row.why and f"def {name}(" in (ROOT / path).read_text()


def breaches(source: str) -> list[int]:
    """Lines that put something into an object that may be vLLM's."""
    tree = ast.parse(source)
    theirs, functions = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            theirs.update(one.asname or one.name for one in node.names)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.add(node.name)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("setattr", "delattr", "FunctionType"):
                found.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("currentframe", "_getframe"):
            found.append(node.lineno)
        for target in getattr(node, "targets", ()) if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                value = node.value
                new = isinstance(value, ast.Lambda) or getattr(value, "id", "") in functions
                if target.value.id in theirs or (new and target.value.id != "self"):
                    found.append(node.lineno)
    return found


def test_nothing_else_assigns_to_vllm() -> None:
    found = {
        path.name: breaches(path.read_text())
        for path in sorted(FOLDER.glob("*.py"))
        if path.name != "patches.py" and path.name not in OF_MODULES
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(list(FOLDER.glob("*.py"))) <= 15


def test_what_would_be_a_breach() -> None:
    assert breaches("from vllm.a import B\nB.c = 1") == [2]
    assert breaches("def f(): ...\nx.g = f\nsetattr(x, 'g', f)\ninspect.currentframe()") == [
        2,
        3,
        4,
    ]
    assert breaches("self.a = f\nx.b = 3") == []


def test_a_target_that_takes_something_else_is_named_and_left() -> None:
    def sleep(self: object, level: int) -> int:
        return level

    theirs = FunctionType(sleep.__code__, {"__name__": "vllm.v1.engine.core"}, "sleep")
    theirs.__module__ = "vllm.v1.engine.core"
    core = type("Core", (), {"sleep": theirs})
    with pytest.raises(RequestError, match=r"EngineCore.sleep takes .level., .* .level, mode."):
        patches.put(core, "EngineCore")
    patches.put(core, "EngineCore", must=False)
    assert core().sleep(3) == 3 and not hasattr(core.sleep, "fanin_wraps")
