"""Isolation on the real model: secrets of one conversation never appear in another. And how exact comparisons can
be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo, Chunk, Control, Prompt
from tests.engines.llama_cpp import reference
from tests.engines.llama_cpp.exact_models import VOCAB, exact_model, recurrent_model, sliding_model
from tests.engines.llama_cpp.helpers import chatml, model_file, prompt, running, text_of
from tests.engines.reading import ROUNDED, TOLERANCE, assert_alike, read

SECRETS = ("zebra", "violin", "Norway", "pepper", "castle", "tulip")
HOMES = {secret: ("main", "fast")[n % 2] for n, secret in enumerate(SECRETS)}


@pytest.mark.parametrize(("seed", "copies"), [(1, False), (2, True)])
async def test_no_secret_leaks_between_conversations(seed: int, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches of two sequences and six conversations, so that sequences are also taken over; and, with `copies`,
    everything that two of them have in common is copied from one to the other."""
    if copies:
        monkeypatch.setattr(
            "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved > 0
        )
    random = Random(seed)
    got: dict[str, list[list[Chunk]]] = {secret: [] for secret in SECRETS}
    caches = {"main": CacheInfo(256, 2), "fast": CacheInfo(256, 2)}
    async with running(caches, n_ubatch=64, n_batch=64, share_across_caches=copies) as engine:
        while waiting := [secret for secret in SECRETS if len(got[secret]) < 2]:
            batch = _fitting(random.sample(waiting, len(waiting)))[: random.randint(1, 4)]
            jobs = {s: engine.generate(_turn(s, HOMES[s], got[s])) for s in batch}
            for secret, job in jobs.items():
                got[secret].append(await read(job))
        assert (engine.stats().copied_tokens > 0) == copies
    for secret, answers in got.items():
        assert not any(other in text_of(chunks) for chunks in answers for other in SECRETS if other != secret)
    assert sum(secret in text_of(got[secret][0]) for secret in SECRETS) >= 4, (
        "the model must repeat its secrets, or the test shows nothing"
    )
    await _compare_with_each_alone(got)


_alone: dict[tuple[int, ...], list[Chunk]] = {}  # by prompt: most of them occur in both cases


async def _compare_with_each_alone(got: dict[str, list[list[Chunk]]]) -> None:
    async with running({"main": CacheInfo(256, 1)}, n_ubatch=64, n_batch=64) as engine:
        for secret, answers in got.items():
            for n, mixed in enumerate(answers):
                turn = _turn(secret, "main", answers[:n])
                if tuple(turn.ids) not in _alone:
                    _alone[tuple(turn.ids)] = await read(engine.generate(turn))
                assert_alike(mixed, _alone[tuple(turn.ids)], ROUNDED)
            await engine.control(Control("evict"))


def _turn(secret: str, cache: str, before: list[list[Chunk]]) -> Prompt:
    turns = [("user", f"The secret word is {secret}. Say the secret word.")]
    for chunks in before:
        turns += [("assistant", f"The secret word is{text_of(chunks)}"), ("user", "Say it again.")]
    return prompt(chatml(*turns, opening="The secret word is"), cache=cache, session=secret, max_tokens=4)


def _fitting(order: list[str]) -> list[str]:
    """At most two per cache, like the scheduler."""
    return [s for n, s in enumerate(order) if sum(HOMES[o] == HOMES[s] for o in order[:n]) < 2]


# --- differences of llama.cpp from itself, which the tolerances of other tests are based on ---------------------------

CHUNKINGS = ([16], [1], [512], [30, 10], [8, 15, 1])


def run(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(40)]


MODELS = [exact_model, sliding_model, recurrent_model]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_unquantized_weights_give_the_same_logprobs_in_any_batch(model: Callable[[], Path], seed: int) -> None:
    found = reference.logprobs(model(), run(seed), CHUNKINGS)
    assert np.abs(found - found[0]).max() < TOLERANCE / 2


@pytest.mark.parametrize("model", MODELS)
def test_one_changed_token_changes_logprobs_by_more_than_the_tolerance(model: Callable[[], Path]) -> None:
    """Nearly always those of the next token; other tests compare answers of several tokens."""
    moved = [_moved_by_one(model(), run(seed), place) for seed in range(10) for place in (0, 5, 20, 30)]
    assert np.quantile(moved, 0.1) > TOLERANCE
    assert np.median(moved) > 10 * TOLERANCE


def _moved_by_one(file: Path, ids: list[int], place: int) -> float:
    other = [*ids[:place], (ids[place] + 1) % VOCAB, *ids[place + 1 :]]
    one, two = (reference.logprobs(file, each, [[512]])[0] for each in (ids, other))
    return float(abs(one.max() - two[one.argmax()]))


def test_quantized_weights_agree_coarsely() -> None:
    found = reference.logprobs(model_file(), prompt("Who are you?").ids, CHUNKINGS)
    best = np.argsort(-found[0])[:2]
    assert np.abs(found - found[0])[:, best].max() < ROUNDED
