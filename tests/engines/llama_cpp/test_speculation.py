"""Speculation: the same answers as without, with several tokens a step where guesses come true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.engine import CacheInfo, Chunk, Tokens
from modelyard.core.request import Constraint, Sampling
from modelyard.engines.llama_cpp import loading, speculation
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.speculation import (
    AcceptanceRate,
    DraftCost,
    Drafts,
    NgramIndex,
    Speculator,
    draft_length,
)
from tests.engines.llama_cpp.exact_models import VOCAB, chanting_model, recurrent_model, sliding_model
from tests.engines.llama_cpp.helpers import GREEDY, Tap, answer, id_prompt, running, said
from tests.engines.reading import accepted, assert_alike, end, ids, read

MODES = ("off", "ngram")


@asynccontextmanager
async def opened(speculation: str = "ngram", **options: Any) -> AsyncIterator[LlamaCppEngine]:
    chosen = {"path": str(chanting_model()), "speculation": speculation} | options
    async with running({"main": CacheInfo(256, 4)}, **chosen) as engine:
        yield engine


def words(seed: int, count: int = 12) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


RUNS = [words(seed) * 3 for seed in range(4)]
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(Sampling(temperature=0.7, seed=3), id="sampled"),
    pytest.param(Sampling(temperature=0.9, seed=4, top_k=20, top_p=0.9, min_p=0.02), id="truncated"),
    pytest.param(Sampling(temperature=0, frequency_penalty=0.3, repetition_penalty=1.1), id="penalties"),
    pytest.param(Sampling(temperature=0.5, seed=5, mirostat=2), id="mirostat"),
]


async def told(engine: LlamaCppEngine, run: list[int], **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(run, **({"max_tokens": 40} | fields))))


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_text_is_the_one_that_comes_without_guesses(sampling: Sampling) -> None:
    answers = {}
    for mode in MODES:
        async with opened(mode) as engine:
            answers[mode] = [ids(await told(engine, run, sampling=sampling)) for run in RUNS]
            guessed = engine.stats().guessed_tokens
    assert guessed > 0
    assert answers["ngram"] == answers["off"]


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
async def test_streams_that_guess_side_by_side_say_what_each_says_alone(sampling: Sampling) -> None:
    async with opened() as engine:
        jobs = (told(engine, run, sampling=sampling, session=str(n)) for n, run in enumerate(RUNS))
        together = [ids(chunks) for chunks in await asyncio.gather(*jobs)]
        assert engine.stats().guessed_tokens > 0
    async with opened("off") as engine:
        assert together == [ids(await told(engine, run, sampling=sampling)) for run in RUNS]


async def test_logprobs_belong_to_their_tokens() -> None:
    answers = []
    for mode in MODES:
        async with opened(mode) as engine:
            answers.append(await told(engine, RUNS[0]))
    assert_alike(*answers)


async def test_text_that_repeats_itself_takes_fewer_steps_than_tokens() -> None:
    async with opened() as engine:
        tap = Tap(engine)
        chunks = await told(engine, RUNS[0], max_tokens=120)
        stats = engine.stats()
    steps = [chunk for _, chunk in tap.seen if isinstance(chunk, Tokens)]
    assert len(ids(chunks)) == 120
    assert stats.accepted_tokens > 0
    assert len(steps) == 120 - stats.accepted_tokens


# --- where it ends ----------------------------------------------------------------------------------------------------


async def test_every_length_is_kept() -> None:
    async with opened() as engine:
        whole = ids(await told(engine, RUNS[0], max_tokens=24))
        for length in range(1, 24):
            chunks = await told(engine, RUNS[0], max_tokens=length)
            assert ids(chunks) == whole[:length]
            assert end(chunks).reason == "length"
            assert end(chunks).usage.output == length


async def test_every_stop_id_ends_the_answer_where_it_stands() -> None:
    async with opened() as engine:
        whole = ids(await told(engine, RUNS[0], max_tokens=60))
        assert engine.stats().accepted_tokens > 0
        for stop in dict.fromkeys(whole):
            chunks = await told(engine, RUNS[0], max_tokens=60, stop_ids=(stop,))
            assert ids(chunks) == whole[: whole.index(stop)]
            assert end(chunks).reason == "stop"


async def test_full_window_ends_an_answer_at_its_last_token() -> None:
    async with running({"main": CacheInfo(64, 1)}, path=str(chanting_model()), speculation="ngram") as engine:
        chunks = await told(engine, RUNS[0], max_tokens=100)
    assert len(ids(chunks)) == 64 - len(RUNS[0])
    assert end(chunks).reason == "window"


async def test_cancelled_in_the_middle_the_sequence_holds_what_was_said() -> None:
    async with opened() as engine:
        CancelAtRun(engine)
        chunks = await told(engine, RUNS[0], max_tokens=200)
        assert end(chunks).reason == "cancelled"
        turn = RUNS[0] + ids(chunks) + words(9)
        held = engine._caches["main"].slots[0].tokens
        assert list(held) == turn[: len(held)]
        second = await told(engine, turn)
        assert accepted(second).cached_tokens == len(held)
    async with opened("off") as fresh:
        assert_alike(second, await told(fresh, turn))


class CancelAtRun(Tap):
    """Cancels a job when it says more than one token in a step, once."""

    done = False

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if isinstance(chunk, Tokens) and len(chunk.ids) > 1 and not self.done:
            self.done = True
            job.cancel()


async def test_kv_behind_a_wrong_guess_is_gone() -> None:
    """The next turn reads from exactly where the answer ended, and says what a fresh engine says."""
    async with opened() as engine:
        first = await told(engine, RUNS[0], sampling=Sampling(temperature=0.7, seed=4))
        stats = engine.stats()
        assert stats.guessed_tokens > stats.accepted_tokens
        turn = RUNS[0] + ids(first) + words(7)
        second = await told(engine, turn)
        assert accepted(second).cached_tokens == len(RUNS[0]) + len(ids(first)) - 1
    async with opened("off") as fresh:
        assert_alike(second, await told(fresh, turn))


# --- constraints ------------------------------------------------------------------------------------------------------

CHANT = "red, green, blue; "


@pytest.mark.parametrize("count", [2, 6])
async def test_grammar_holds_inside_an_accepted_run(count: int) -> None:
    asked = {"constraint": Constraint("regex", f"({CHANT}){{{count}}}"), "max_tokens": 80, "logprobs": None}
    async with running(speculation="ngram") as engine:
        chunks = await answer(engine, f"Say it often: {CHANT * 3}", **asked)
        assert engine.stats().accepted_tokens > 0
    assert said(chunks) == CHANT * count
    assert end(chunks).reason == "stop"


async def test_what_a_grammar_forbids_is_not_tried() -> None:
    """The text offers «green» after «red, »; the grammar does not."""
    asked = {"constraint": Constraint("regex", "(red, blue; )+end"), "max_tokens": 30, "logprobs": None}
    async with running(speculation="ngram") as engine:
        seen = Watch(engine)
        await answer(engine, f"Say it often: {CHANT * 3}", **asked)
    assert seen.tried
    assert all("green" not in text for text in seen.tried)


class Watch:
    """The texts that were tried."""

    def __init__(self, engine: LlamaCppEngine) -> None:
        self.tried: list[str] = []
        self._speculator = engine._caches["main"].speculator
        assert self._speculator is not None
        self._draft = self._speculator.draft
        self._speculator.draft = self._watched  # type: ignore[method-assign]

    def _watched(self, streams: Mapping[int, LlamaCppJob]) -> Drafts:
        found = self._draft(streams)
        self.tried += [said([Tokens(guess)]) for guess in found.values()]
        return found


# --- where it is left alone -------------------------------------------------------------------------------------------


async def test_model_that_cannot_go_back_is_not_guessed_for(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(path=str(recurrent_model())) as engine:
        assert len(ids(await told(engine, RUNS[0]))) == 40
        assert engine.stats().guessed_tokens == 0
    assert "cannot take tokens back" in caplog.text


@pytest.mark.parametrize("full", [True, False])
async def test_sliding_window_is_guessed_for_only_where_it_keeps_what_lies_behind_it(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loading.context_parameters

    def parameters(info: Any, options: Any) -> Any:
        params = made(info, options)
        params.swa_full = full
        return params

    monkeypatch.setattr(loading, "_parameters", parameters)
    async with opened(path=str(sliding_model())) as engine:
        assert (engine._caches["main"].speculator is not None) == full


class Parrot:
    """A source that says what it is told to."""

    is_free = is_synchronized = True

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def begin(self, sequence: int, job: LlamaCppJob) -> None: ...
    def end(self, sequence: int) -> None: ...
    def close(self) -> None: ...

    def draft(self, counts: Mapping[int, int]) -> Drafts:
        return {sequence: self.tokens[:count] for sequence, count in counts.items()}


async def speculating(*tokens: int, measured: bool = True, **fields: Any) -> tuple[Speculator, dict[int, LlamaCppJob]]:
    speculator = Speculator(Parrot(*tokens), 4, 64, measured=measured)
    job = LlamaCppJob(id_prompt([1, 2, 3], **({"max_tokens": 50} | fields)), asyncio.get_running_loop(), 1)
    speculator.begin(0, job)
    return speculator, {0: job}


async def test_guesses_that_come_true_unasked_bring_guessing_back() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9)
    for _ in range(40):
        speculator.measure(1, 0, 0.010)
        speculator.measure(1, 4, 0.040)  # a row costs three quarters of a step
    assert speculator.draft(jobs) == {}
    steps = 0
    while not (guesses := speculator.draft(jobs)) and steps < 40:
        speculator.observe(0, 0, 0, 7)  # what had not been tried came
        steps += 1
    assert 0 < steps < 40
    assert guesses[0][0] == 7


async def test_guesses_that_fail_are_given_up() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9)
    speculator.measure(1, 0, 0.010)
    assert speculator.draft(jobs)
    assert not speculator.is_idle
    for _ in range(20):
        speculator.observe(0, 2, 0, 5)
    assert speculator.draft(jobs) == {}
    assert speculator.is_idle


async def test_one_that_rests_wakes_when_somebody_comes() -> None:
    speculator, jobs = await speculating(7)  # nobody knows yet what a step takes
    speculator.draft(jobs)
    assert speculator.is_idle
    speculator.begin(1, jobs[0])
    assert not speculator.is_idle


async def test_guess_ends_before_a_token_that_ends_the_job() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9, measured=False, stop_ids=(9,))
    assert speculator.draft(jobs) == {0: [7, 8]}


@pytest.mark.parametrize(("seed", "measured", "guesses"), [(None, True, True), (1, True, False), (1, False, True)])
async def test_seeded_job_is_left_alone_where_times_decide(seed: int | None, measured: bool, guesses: bool) -> None:
    speculator, jobs = await speculating(7, 8, measured=measured, sampling=Sampling(temperature=1.0, seed=seed))
    speculator.measure(1, 0, 0.010)
    assert bool(speculator.draft(jobs)) == guesses
    speculator.end(0)


# When guessing pays: tables of costs and chances, with steps whose seconds are given and not measured.


@pytest.mark.parametrize(
    ("acceptance", "price", "expected"),
    [
        pytest.param(0.5, 0.3, 1, id="the second of two would cost more than it brings"),
        pytest.param(0.9, 0.42, 8, id="a CPU, a text that repeats itself"),
        pytest.param(0.4, 0.42, 0, id="a CPU, a text that does not"),
        pytest.param(0.5, 0.02, 5, id="a GPU, where rows are cheap"),
        pytest.param(0.95, 0.85, 3, id="many streams: a batch is full of certain rows"),
        pytest.param(1.0, 0.5, 8, id="never a miss"),
        pytest.param(0.0, 0.5, 0, id="never a hit"),
        pytest.param(0.9, 0.0, 8, id="rows for nothing"),
        pytest.param(1.0, 1.0, 0, id="rows as dear as steps"),
    ],
)
def test_width(acceptance: float, price: float, expected: int) -> None:
    assert draft_length(acceptance, price, 8) == expected


def test_more_rows_never_follow_from_worse_odds() -> None:
    chances = [step / 20 for step in range(21)]
    for price in chances:
        widths = [draft_length(chance, price, 8) for chance in chances]
        assert widths == sorted(widths)
    for chance in chances:
        widths = [draft_length(chance, price, 8) for price in chances]
        assert widths == sorted(widths, reverse=True)


def learned(plain: float, wide: float, *, streams: int = 1, guessed: int = 4, steps: int = 60) -> DraftCost:
    price = DraftCost()
    for _ in range(steps):
        price.observe(streams, 0, plain)
        price.observe(streams, guessed, wide)
    return price


@pytest.mark.parametrize(
    ("price", "streams", "expected"),
    [
        pytest.param(learned(0.008, 0.008 + 4 * 0.0034), 1, 0.42, id="a CPU"),
        pytest.param(learned(0.010, 0.0102), 1, 0.005, id="a GPU"),
        pytest.param(learned(0.031, 0.031 + 8 * 0.0034, streams=8, guessed=8), 8, 0.87, id="many streams"),
        pytest.param(learned(0.010, 0.100), 1, 1.0, id="a row that costs more than a step"),
        pytest.param(learned(0.010, 0.009), 1, 0.0, id="a row that seems to win time"),
    ],
)
def test_price_is_what_was_measured(price: DraftCost, streams: int, expected: float) -> None:
    assert price.per_row(streams) == pytest.approx(expected, abs=0.02)


def test_nothing_is_tried_before_a_step_without_guesses_was_seen() -> None:
    price = DraftCost()
    assert price.per_row(1) == 1.0
    price.observe(1, 3, 0.010)  # nothing to hold it against
    assert price.per_row(1) == 1.0
    price.observe(1, 0, 0.008)
    assert 0 < price.per_row(1) < 0.5
    assert price.per_row(2) == 1.0


def test_one_stalled_step_does_not_turn_guessing_off() -> None:
    price = learned(0.010, 0.012)
    price.observe(1, 4, 3.0)
    assert draft_length(0.7, price.per_row(1), 8) > 0


def test_dear_rows_are_tried_again_after_a_while() -> None:
    price = learned(0.010, 0.060)
    assert draft_length(0.9, price.per_row(1), 8) == 0
    for _ in range(1000):
        price.observe(1, 0, 0.010)
    assert draft_length(0.9, price.per_row(1), 8) > 0


def test_record_follows_what_became_of_the_guesses() -> None:
    record = AcceptanceRate()
    assert record.rate == 0.5
    for _ in range(60):
        record.update(4, 4)
    assert record.rate > 0.98
    for _ in range(60):
        record.update(4, 0)
    assert record.rate < 0.1


def test_guesses_behind_a_miss_do_not_count() -> None:
    one, other = AcceptanceRate(), AcceptanceRate()
    one.update(8, 2)
    other.update(3, 2)
    assert one.rate == other.rate


def test_bad_record_is_forgotten_by_and_by() -> None:
    record = AcceptanceRate()
    for _ in range(60):
        record.update(1, 0)
    for _ in range(1500):
        record.decay()
    assert record.rate > 0.4


# Guesses from a text's own past: against a plain search, in any pieces it may come in.

TEXTS = st.lists(st.integers(0, 2), max_size=120)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        pytest.param([], 4, [], id="nothing said"),
        pytest.param([1, 2, 3], 4, [], id="nothing before it"),
        pytest.param([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5], id="what followed then"),
        pytest.param([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5], id="the last time counts"),
        pytest.param([7, 7, 7, 7], 3, [7, 7, 7], id="a run goes on"),
        pytest.param([1, 2, 3, 4, 1, 2, 3], 6, [4, 1, 2, 3, 4, 1], id="a text that repeats itself goes on"),
        pytest.param([1, 2, 3, 4, 2, 3], 2, [], id="two alike are not enough"),
        pytest.param([2_000_000, 1, 2, 5, 2_000_000, 1, 2], 1, [5], id="large ids"),
    ],
)
def test_guess(text: list[int], count: int, expected: list[int]) -> None:
    assert NgramIndex(text).draft(count) == expected


def searched(text: list[int], count: int) -> list[int]:
    """The same, the slow way."""
    places = [at for at in range(3, len(text)) if text[at - 3 : at] == text[-3:]]
    if not places:
        return []
    grown = list(text)
    for at in range(places[-1], places[-1] + count):
        grown.append(grown[at])
    return grown[len(text) :]


@given(TEXTS, st.integers(1, 9))
def test_guess_is_what_a_search_finds(text: list[int], count: int) -> None:
    assert NgramIndex(text).draft(count) == searched(text, count)


@given(st.lists(TEXTS, max_size=6), st.integers(1, 9))
def test_text_that_comes_in_pieces_is_one_text(pieces: list[list[int]], count: int) -> None:
    grown, whole = NgramIndex(), []
    for piece in pieces:
        grown.extend(piece)
        whole += piece
        assert len(grown) == len(whole)
        assert grown.draft(count) == searched(whole, count)


def test_long_text_is_taken_in_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_BITE", 40)
    text = NgramIndex([*range(97), 1, 2, 3])
    assert [text.draft(1) for _ in range(3)] == [[], [], [4]]
