"""The form before a load: what it sends, and what it says about memory."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.workbench.pages.load import chosen, fit


@pytest.mark.parametrize(
    ("kind", "given", "sent"),
    [
        ("boolean", "on", True),
        ("boolean", "off", False),
        ("integer", 8.0, 8),
        ("number", 0.5, 0.5),
        ("string", "x", "x"),
    ],
)
def test_a_value_is_sent_as_its_schema_wants_it(kind: str, given: Any, sent: Any) -> None:
    value = chosen({"type": kind}, given)
    assert (value, type(value)) == (sent, type(sent))


def told(free: int) -> dict[str, Any]:
    estimate = {"weights": 2**30, "kv": 2**29, "compute": 0, "total": 3 * 2**29}
    return {"estimate": estimate, "free": free, "fits": free >= estimate["total"]}


def test_the_sentence_says_whether_it_fits() -> None:
    assert "1.5 GB (weights 1.0 GB, kv 512 MB, compute 0 B); 2.0 GB are free: it fits." in fit(told(2**31))
    assert "does not fit" in fit(told(2**30))
