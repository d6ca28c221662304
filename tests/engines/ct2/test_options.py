from __future__ import annotations

import pytest
from pydantic import ValidationError

from modelyard.engines.ct2 import options as module
from modelyard.engines.ct2.options import Ct2Options


def test_compute_type_is_int8_where_nothing_is_said():
    assert Ct2Options(path="x").compute_type == "int8"


@pytest.mark.parametrize(
    ("cores", "capacity", "own", "expected"),
    [
        (8, 1, {}, (1, 8)),
        (8, 4, {}, (4, 2)),
        (2, 4, {}, (4, 1)),
        (8, 4, {"inter_threads": 1}, (1, 8)),
        (8, 4, {"intra_threads": 8}, (4, 8)),
        (8, 0, {}, (1, 8)),
    ],
)
def test_cores_are_shared_between_the_batches(
    cores: int, capacity: int, own: dict[str, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_cores", lambda: cores)
    options = Ct2Options(path="x", **own)
    assert (options.workers(capacity), options.threads(capacity)) == expected


@pytest.mark.parametrize(
    "wrong", [{"device": "tpu"}, {"compute_type": "int4"}, {"inter_threads": 0}, {"n_gpu_layers": 1}]
)
def test_what_it_does_not_know_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValidationError):
        Ct2Options(path="x", **wrong)
