"""Golden files: the expected output of a protocol.

`MODELYARD_GOLDEN=write pytest …` rewrites them; read the diff before committing it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import msgspec
import pytest

_HOME = Path(__file__).parent / "golden"


def check_golden(protocol: str, name: str, data: bytes) -> None:
    """Fail with a diff if `data` differs from `golden/<protocol>/<name>`.

    A name without an ending gets `.json` for a JSON object and `.txt` otherwise. JSON is kept indented, in the order
    of its keys; everything else byte by byte.
    """
    path = _HOME / protocol / _with_ending(name, data)
    now = msgspec.json.format(data, indent=2) + b"\n" if path.suffix == ".json" else data
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(now)
    if not path.exists():
        pytest.fail(f"there is no golden file {path}: write it with MODELYARD_GOLDEN=write")
    _compare(path.name, path.read_bytes(), now)


def _with_ending(name: str, data: bytes) -> str:
    if "." in name:
        return name
    return name + (".json" if data.startswith(b"{") else ".txt")


def _compare(name: str, golden: bytes, now: bytes) -> None:
    if golden == now:
        return
    before, after = golden.decode().splitlines(), now.decode().splitlines()
    diff = "\n".join(difflib.unified_diff(before, after, f"golden/{name}", "now", lineterm=""))
    pytest.fail(diff or f"golden/{name}: only line endings differ")
