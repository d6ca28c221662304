"""The texts that prompts are made of."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from modelyard.benchmark import texts


@pytest.mark.parametrize("prose", [texts.account, texts.tool_output])
def test_every_line_is_filled_in_and_the_dice_alone_decide(prose: texts.Prose) -> None:
    lines = list(islice(prose(random.Random(1)), 500))
    assert lines == list(islice(prose(random.Random(1)), 500))
    assert lines != list(islice(prose(random.Random(2)), 500))
    assert not any("{who" in line or "{n" in line or "{file" in line for line in lines)
    assert all(line.strip() for line in lines)
