"""The space of settings: what is around one, and what cannot go together."""

from __future__ import annotations

from modelyard.core.knobs import Knob, Setting
from modelyard.tune.space import Space, is_scale
from tests.tune.landscapes import BAD, KNOBS, SPACE

KV = next(knob for knob in KNOBS if knob.name == "kv")
FLASH = next(knob for knob in KNOBS if knob.name == "flash")


def test_the_grid_leaves_out_what_cannot_run():
    assert SPACE.size == len(list(SPACE.grid())) == 6 * 6 * 3 * 4
    assert all(SPACE.allows(setting) for setting in SPACE.grid())


def test_what_is_around_a_setting_differs_in_one_stage_only():
    around = SPACE.around(BAD.but({"flash": "on"}), (KV,))
    assert [setting["kv"] for setting in around] == ["q8_0", "q4_0"]
    assert all(len(setting.changes(BAD.but({"flash": "on"}))) == 1 for setting in around)


def test_a_value_that_needs_another_brings_it_along():
    around = SPACE.around(BAD, (KV,))
    assert [(setting["kv"], setting["flash"]) for setting in around] == [("q8_0", "on"), ("q4_0", "on")]


def test_knobs_of_one_stage_are_turned_together():
    both = Space([Knob(name="a", values=(1, 2), stage=1), Knob(name="b", values=(1, 2, 3), stage=1)])
    assert len(both.stages) == 1
    assert len(both.around(Setting((("a", 1), ("b", 1))), both.stages[0])) == 5


def test_a_value_that_nothing_can_help_is_left_out():
    stuck = Space([Knob(name="a", values=(1, 2), stage=1)], lambda setting: "no" if setting["a"] == 2 else None)
    assert stuck.around(Setting((("a", 1),)), stuck.stages[0]) == []


def test_stages_come_in_order_whatever_the_knobs_order_is():
    space = Space([KV, FLASH])
    assert [stage[0].name for stage in space.stages] == ["flash", "kv"]


def test_words_and_switches_are_no_scale():
    assert is_scale(True, (1, 2.5))
    assert not is_scale(True, ("on", "off"))
    assert not is_scale(True, (False, True))
    assert not is_scale(False, (-1, 0, 8))
