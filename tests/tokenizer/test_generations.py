from __future__ import annotations

from modelyard.tokenizer.generations import Generations


def test_what_was_put_is_found() -> None:
    cache = Generations(10_000)
    cache.put("one", [1])
    assert cache.get("one") == [1]
    assert cache.get("two") is None
    assert "one" in cache
    assert "two" not in cache


def test_what_is_known_stays_as_it_is() -> None:
    cache = Generations(10_000)
    cache.put("one", [1])
    cache.put("one", [2])
    assert cache.get("one") == [1]


def test_what_is_asked_for_stays_and_the_rest_is_forgotten() -> None:
    cache = Generations(10_000)
    cache.put("asked", [1])
    cache.put("never", [2])
    for number in range(200):
        cache.put(f"another {number}", [3])
        assert cache.get("asked") == [1]
    assert "never" not in cache


def test_the_old_generation_is_asked_by_itself() -> None:
    cache = Generations(1_000)
    cache.put("one", [1])
    assert cache.revived("one") is None  # it is young
    while "one" in cache.young:
        cache.put(f"another {len(cache.young)}", [2])
    assert cache.revived("one") == [1]
    assert "one" in cache.young
