"""What a search knows: the noise of the machine out of all repeated measurements."""

from __future__ import annotations

import math
import random

import pytest

from modelyard.core.knobs import Setting
from modelyard.tune.ledger import Ledger, leader

A, B = Setting((("n", 1),)), Setting((("n", 2),))


def test_before_anything_is_measured_some_noise_is_believed():
    spread, freedom = Ledger().noise()
    assert 0.01 < spread < 0.1
    assert freedom > 0


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_many_repeats_tell_the_noise_whatever_the_settings_are_worth(noise):
    dice, ledger = random.Random(1), Ledger()
    for n in range(20):
        for _ in range(10):
            ledger.add(Setting((("n", n),)), (n + 1) * math.exp(dice.gauss(0, noise)))
    assert ledger.noise()[0] == pytest.approx(noise, rel=0.2)


def test_more_measurements_reach_less_far():
    ledger = Ledger()
    assert ledger.reach(1, 1, 0.9) > ledger.reach(4, 4, 0.9)
    assert ledger.reach(4, 4, 0.99) > ledger.reach(4, 4, 0.9)


def test_the_leader_has_the_highest_mean():
    assert leader({A: [1.0, 4.0], B: [3.0, 3.0]}) == B


def test_what_was_last_behind_stands_last():
    ledger = Ledger()
    for setting in (A, B, A):
        ledger.is_behind(setting, 0.5)
    assert list(ledger.behind) == [B, A]


def test_failures_count_as_trials():
    ledger = Ledger()
    ledger.add(A, 1.0)
    ledger.failures[B] = "died"
    assert ledger.trials == 2
