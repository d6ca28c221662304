from __future__ import annotations

from random import Random

import pytest

from modelyard.gateway.repetition import RepetitionDetector

random = Random(7)


def first_found(detector: RepetitionDetector, ids: list[int], chunk: int = 1) -> int | None:
    """How many tokens were read when it was found."""
    for at in range(0, len(ids), chunk):
        if detector.feed(ids[at : at + chunk]):
            return at + chunk
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 64, 100])
@pytest.mark.parametrize("chunk", [1, 7])
def test_a_pattern_is_found_once_it_fills_the_threshold(size: int, chunk: int) -> None:
    before = [random.randrange(50_000) for _ in range(300)]
    pattern = [random.randrange(4) for _ in range(size)]
    found = first_found(RepetitionDetector(512), [*before, *(pattern * 1000)[:1200]], chunk)
    assert found is not None
    assert 512 <= found - 300 + 16 <= 512 + 64 + 16 + chunk + size


def test_a_long_pattern_must_stand_there_five_times() -> None:
    pattern = [random.randrange(50_000) for _ in range(512)]
    found = first_found(RepetitionDetector(512), pattern * 8)
    assert found is not None
    assert 5 * 512 <= found <= 5 * 512 + 64


def test_a_pattern_longer_than_512_tokens_is_no_repetition() -> None:
    pattern = [random.randrange(50_000) for _ in range(513)]
    assert first_found(RepetitionDetector(512), pattern * 20) is None


def test_text_that_differs_a_little_each_time_is_no_repetition() -> None:
    lines = [[*range(100, 140), number] for number in range(200)]
    assert first_found(RepetitionDetector(512), [token for line in lines for token in line]) is None


def test_four_repetitions_are_allowed() -> None:
    pattern = [random.randrange(50_000) for _ in range(200)]
    after = [random.randrange(50_000) for _ in range(500)]
    assert first_found(RepetitionDetector(512), pattern * 4 + after) is None


def test_a_cleared_detector_begins_again() -> None:
    detector = RepetitionDetector(128)
    assert first_found(detector, [5] * 192) == 128
    detector.clear()
    assert first_found(detector, [5] * 100) is None


def test_text_counts_about_four_characters_as_a_token() -> None:
    detector = RepetitionDetector(64, is_text=True)
    read = next(count for count in range(1, 500) if detector.feed_text("I will try again. "))
    assert 64 * 4 <= read * 18 <= 128 * 4 + 18
