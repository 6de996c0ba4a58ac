#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""validate.py SCHEMAS OUTPUTS: whether what nixl-fetch printed is what its schemas say.

OUTPUTS holds files NAME.*.json, each with JSON texts one after the other; NAME.json in SCHEMAS
describes each. Every schema must have an output, and must refuse it with one more field.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator


def texts(path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    rest = path.read_text().strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].strip()


def main(schemas: Path, outputs: Path) -> None:
    seen = dict.fromkeys((path.stem for path in schemas.glob("*.json")), 0)
    for path in sorted(outputs.glob("*.json")):
        name = path.name.split(".")[0]
        schema = json.loads((schemas / f"{name}.json").read_text())
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        for value in texts(path):
            for error in validator.iter_errors(value):
                sys.exit(f"{path.name}: {error.json_path}: {error.message[:400]}")
            if validator.is_valid({**value, "no_such_field": 1}):
                sys.exit(f"{name}.json allows fields that it does not name")
            seen[name] += 1
    missing = [name for name, count in seen.items() if count == 0]
    if missing:
        sys.exit(f"no output for the schemas {missing}")
    print(" ".join(f"{name}:{count}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
