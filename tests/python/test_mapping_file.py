# SPDX-License-Identifier: Apache-2.0
"""Files of mappings that nobody has saved so."""

from __future__ import annotations

from pathlib import Path

import pytest
from fanin.errors import RequestError
from fanin.mapping import load

GOOD = Path(__file__).parents[1] / "support" / "mapping.json"


@pytest.mark.parametrize("key", ["modules", "at", "name"])
def test_a_key_that_is_there_twice_is_refused(key: str, tmp_path: Path) -> None:
    """Of two offsets, say, one reader would take the first and another one the last."""
    text = GOOD.read_text()
    assert load(GOOD).modules
    at = text.index(f'"{key}":')
    file = tmp_path / "rank0.json"
    file.write_text(f'{text[:at]}"{key}": 1, {text[at:]}')
    with pytest.raises(RequestError, match=f"'{key}' is there twice"):
        load(file)
