"""Settings of knobs: changes, order and differences."""

from __future__ import annotations

import pytest

from modelyard.core.knobs import Loss, Setting

OLD = Setting.of({"n_threads": 1, "flash_attn": "off", "n_ubatch": 512})


def test_a_changed_setting_keeps_the_order_of_its_knobs():
    new = OLD.but({"flash_attn": "on", "unknown": 3})
    assert new.pairs == (("n_threads", 1), ("flash_attn", "on"), ("n_ubatch", 512))
    assert hash(new.but({"flash_attn": "off"})) == hash(OLD)


def test_changes_are_the_differing_knobs():
    assert OLD.but({"n_threads": 2}).changes(OLD) == {"n_threads": 2}
    assert OLD.changes(OLD) == {}


def test_a_subset_of_a_setting_is_a_setting():
    assert OLD.only(["n_ubatch", "n_threads"]) == Setting((("n_threads", 1), ("n_ubatch", 512)))
    assert str(OLD.only(["n_ubatch"])) == "n_ubatch = 512"


def test_a_loss_is_a_fraction():
    assert Loss(10.1, 10.0).rise == pytest.approx(0.01)
