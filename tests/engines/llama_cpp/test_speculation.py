"""Speculation: the same answers in fewer steps; when drafts pay; and drafts from the text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.engine import CacheInfo, Chunk, Tokens
from modelyard.core.errors import ModelyardError
from modelyard.core.request import Constraint, Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import speculation
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.speculation import (
    AcceptanceRate,
    DraftCost,
    Drafts,
    NgramIndex,
    Speculator,
    draft_length,
    most_likely_token,
)
from tests.engines.llama_cpp import architectures
from tests.engines.llama_cpp.exact_models import (
    VOCAB,
    exact_model,
    other_model,
    recurrent_model,
    repetitive_model,
    sliding_model,
)
from tests.engines.llama_cpp.helpers import GREEDY, Tap, answer, id_prompt, model_file, running, spec, text_of
from tests.engines.reading import accepted, assert_alike, end, ids, read

MODES = ("off", "ngram")


@asynccontextmanager
async def opened(speculation: str = "ngram", **options: Any) -> AsyncIterator[LlamaCppEngine]:
    chosen = {"path": str(repetitive_model()), "speculation": speculation} | options
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


async def generate(engine: LlamaCppEngine, run: list[int], **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(run, **({"max_tokens": 40} | fields))))


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_answers_are_the_same_as_without_speculation(sampling: Sampling) -> None:
    answers = {}
    for mode in MODES:
        async with opened(mode) as engine:
            answers[mode] = [ids(await generate(engine, run, sampling=sampling)) for run in RUNS]
            guessed = engine.stats().guessed_tokens
    assert guessed > 0
    assert answers["ngram"] == answers["off"]


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
async def test_concurrent_streams_with_drafts_generate_what_each_generates_alone(sampling: Sampling) -> None:
    async with opened() as engine:
        jobs = (generate(engine, run, sampling=sampling, session=str(n)) for n, run in enumerate(RUNS))
        together = [ids(chunks) for chunks in await asyncio.gather(*jobs)]
        assert engine.stats().guessed_tokens > 0
    async with opened("off") as engine:
        assert together == [ids(await generate(engine, run, sampling=sampling)) for run in RUNS]


async def test_logprobs_are_the_same_as_without_speculation() -> None:
    answers = []
    for mode in MODES:
        async with opened(mode) as engine:
            answers.append(await generate(engine, RUNS[0]))
    assert_alike(*answers)


async def test_repetitive_text_takes_fewer_steps_than_tokens() -> None:
    async with opened() as engine:
        tap = Tap(engine)
        chunks = await generate(engine, RUNS[0], max_tokens=120)
        stats = engine.stats()
    steps = [chunk for _, chunk in tap.seen if isinstance(chunk, Tokens)]
    assert len(ids(chunks)) == 120
    assert stats.accepted_tokens > 0
    assert len(steps) == 120 - stats.accepted_tokens


# --- where it ends ----------------------------------------------------------------------------------------------------


async def test_every_max_tokens_is_respected() -> None:
    async with opened() as engine:
        whole = ids(await generate(engine, RUNS[0], max_tokens=24))
        for length in range(1, 24):
            chunks = await generate(engine, RUNS[0], max_tokens=length)
            assert ids(chunks) == whole[:length]
            assert end(chunks).reason == "length"
            assert end(chunks).usage.output == length


async def test_every_stop_id_ends_the_answer() -> None:
    async with opened() as engine:
        whole = ids(await generate(engine, RUNS[0], max_tokens=60))
        assert engine.stats().accepted_tokens > 0
        for stop in dict.fromkeys(whole):
            chunks = await generate(engine, RUNS[0], max_tokens=60, stop_ids=(stop,))
            assert ids(chunks) == whole[: whole.index(stop)]
            assert end(chunks).reason == "stop"


async def test_a_full_window_ends_the_answer() -> None:
    async with running({"main": CacheInfo(64, 1)}, path=str(repetitive_model()), speculation="ngram") as engine:
        chunks = await generate(engine, RUNS[0], max_tokens=100)
    assert len(ids(chunks)) == 64 - len(RUNS[0])
    assert end(chunks).reason == "window"


async def test_after_a_cancellation_the_sequence_holds_the_output() -> None:
    async with opened() as engine:
        CancelAtRun(engine)
        chunks = await generate(engine, RUNS[0], max_tokens=200)
        assert end(chunks).reason == "cancelled"
        turn = RUNS[0] + ids(chunks) + words(9)
        held = engine._caches["main"].slots[0].tokens
        assert list(held) == turn[: len(held)]
        second = await generate(engine, turn)
        assert accepted(second).cached_tokens == len(held)
    async with opened("off") as fresh:
        assert_alike(second, await generate(fresh, turn))


class CancelAtRun(Tap):
    """Cancels a job once, when it generates more than one token in a step."""

    done = False

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if isinstance(chunk, Tokens) and len(chunk.ids) > 1 and not self.done:
            self.done = True
            job.cancel()


async def test_the_kv_of_rejected_drafts_is_removed() -> None:
    """The next turn continues exactly where the answer ended."""
    async with opened() as engine:
        first = await generate(engine, RUNS[0], sampling=Sampling(temperature=0.7, seed=4))
        stats = engine.stats()
        assert stats.guessed_tokens > stats.accepted_tokens
        turn = RUNS[0] + ids(first) + words(7)
        second = await generate(engine, turn)
        assert accepted(second).cached_tokens == len(RUNS[0]) + len(ids(first)) - 1
    async with opened("off") as fresh:
        assert_alike(second, await generate(fresh, turn))


# --- constraints ------------------------------------------------------------------------------------------------------

CHANT = "red, green, blue; "


@pytest.mark.parametrize("count", [2, 6])
async def test_a_grammar_holds_within_accepted_drafts(count: int) -> None:
    asked = {"constraint": Constraint("regex", f"({CHANT}){{{count}}}"), "max_tokens": 80, "logprobs": None}
    async with running(speculation="ngram") as engine:
        chunks = await answer(engine, f"Say it often: {CHANT * 3}", **asked)
        assert engine.stats().accepted_tokens > 0
    assert text_of(chunks) == CHANT * count
    assert end(chunks).reason == "stop"


async def test_drafts_that_the_grammar_forbids_are_not_tried() -> None:
    """The text offers «green» after «red, »; the grammar does not."""
    asked = {"constraint": Constraint("regex", "(red, blue; )+end"), "max_tokens": 30, "logprobs": None}
    async with running(speculation="ngram") as engine:
        seen = Watch(engine)
        await answer(engine, f"Say it often: {CHANT * 3}", **asked)
    assert seen.tried
    assert all("green" not in text for text in seen.tried)


class Watch:
    """Collects the texts of all drafts."""

    def __init__(self, engine: LlamaCppEngine) -> None:
        self.tried: list[str] = []
        self._speculator = engine._contexts[0].speculator
        assert self._speculator is not None
        self._draft = self._speculator.draft
        self._speculator.draft = self._watched  # type: ignore[method-assign]

    def _watched(self, streams: Mapping[int, LlamaCppJob]) -> Drafts:
        found = self._draft(streams)
        self.tried += [text_of([Tokens(guess)]) for guess in found.values()]
        return found


# --- where it is left alone -------------------------------------------------------------------------------------------


async def test_a_model_that_cannot_rewind_has_no_speculation(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(path=str(recurrent_model())) as engine:
        assert len(ids(await generate(engine, RUNS[0]))) == 40
        assert engine.stats().guessed_tokens == 0
    assert "cannot rewind: no speculation" in caplog.text


@pytest.mark.parametrize("wrong", [True, False])
async def test_drafts_are_taken_back_from_a_sliding_window(wrong: bool) -> None:
    """Far beyond the window, whose cells are used again and again."""
    run = RUNS[0] * 4
    async with opened(path=str(sliding_model()), swa_full=False, speculation="off") as engine:
        expected = await generate(engine, run, max_tokens=120)
    async with opened(path=str(sliding_model()), swa_full=False) as engine:
        speculator = engine._contexts[0].speculator
        assert speculator is not None
        if wrong:
            speculator._drafter = FixedDrafter(*range(5, 13))
        assert_alike(await generate(engine, run, max_tokens=120), expected)
        assert engine.stats().guessed_tokens > (100 if wrong else -1)


class PartlyRight:
    """Drafts the next tokens of the expected answer, up to `right` of them, and then others."""

    is_free = is_synchronized = True
    is_joint = False

    def __init__(self, expected: Mapping[tuple[int, ...], list[int]]) -> None:
        self._expected = expected
        self._jobs: dict[int, LlamaCppJob] = {}
        self._calls = 0

    def begin(self, sequence: int, job: LlamaCppJob) -> None:
        self._jobs[sequence] = job

    def end(self, sequence: int) -> None:
        del self._jobs[sequence]

    def close(self) -> None: ...

    def draft(self, counts: Mapping[int, int]) -> Drafts:
        self._calls += 1
        return {sequence: self._draft(self._jobs[sequence], count) for sequence, count in counts.items()}

    def _draft(self, job: LlamaCppJob, count: int) -> list[int]:
        right = (self._calls + job.arrival) % 4
        answer = self._expected[tuple(job.ids[: job.prompt_tokens].tolist())][job.n_output :]
        return [*answer[:right], *((token + 1) % 250 for token in answer[right:])][:count]


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "nemotron_h", "kimi-k3"])
async def test_drafts_are_taken_back_from_a_hybrid_model(name: str) -> None:
    """Side by side, with drafts that are right for different lengths; afterwards an edit starts from a checkpoint."""
    runs = [[token % 240 + 3 for token in words(seed, 20)] for seed in range(3)]
    edits = [[*run[:-2], 7, 9, 11] for run in runs]
    path = str(architectures.model(name))
    async with opened("off", path=path) as engine:
        alone = {tuple(run): await generate(engine, run, max_tokens=30) for run in [*runs, *edits]}
    async with opened(path=path, draft_n_max=5) as engine:
        speculator = engine._contexts[0].speculator
        assert speculator is not None
        speculator._drafter = PartlyRight({run: ids(answer) for run, answer in alone.items()})
        for batch in (runs, edits):
            prompts = [id_prompt(run, max_tokens=30, session=str(at)) for at, run in enumerate(batch)]
            for run, found in zip(batch, await asyncio.gather(*map(read, map(engine.generate, prompts))), strict=True):
                assert_alike(found, alone[tuple(run)])
        stats = engine.stats()
    assert stats.guessed_tokens - 50 > stats.accepted_tokens > 50


async def test_a_hybrid_model_keeps_no_more_states_unless_drafts_are_wanted() -> None:
    async with opened("auto", path=str(architectures.model("lfm2"))) as engine:
        assert engine._contexts[0].speculator is None


class FixedDrafter:
    """Always drafts the same tokens."""

    is_free = is_synchronized = True
    is_joint = False

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def begin(self, sequence: int, job: LlamaCppJob) -> None: ...
    def end(self, sequence: int) -> None: ...
    def close(self) -> None: ...

    def draft(self, counts: Mapping[int, int]) -> Drafts:
        return {sequence: self.tokens[:count] for sequence, count in counts.items()}


async def speculating(*tokens: int, measured: bool = True, **fields: Any) -> tuple[Speculator, dict[int, LlamaCppJob]]:
    speculator = Speculator(FixedDrafter(*tokens), 4, 64, measured=measured)
    job = LlamaCppJob(id_prompt([1, 2, 3], **({"max_tokens": 50} | fields)), asyncio.get_running_loop(), "main", 256, 1)
    speculator.begin(0, job)
    return speculator, {0: job}


async def test_untried_drafts_that_match_bring_drafting_back() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9)
    for _ in range(40):
        speculator.measure(1, 0, 0.010)
        speculator.measure(1, 4, 0.040)  # a row costs three quarters of a step
    assert speculator.draft(jobs) == {}
    steps = 0
    while not (guesses := speculator.draft(jobs)) and steps < 40:
        speculator.observe(0, 0, 0, 7)  # the untried token was sampled
        steps += 1
    assert 0 < steps < 40
    assert guesses[0][0] == 7


class SlowDrafter(FixedDrafter):
    """Takes as long as two steps."""

    is_free, is_joint = False, True

    def __init__(self, clock: list[float], *tokens: int) -> None:
        super().__init__(*tokens)
        self.clock = clock

    def draft(self, counts: Mapping[int, int]) -> Drafts:
        self.clock[0] += 0.020
        return super().draft(counts)


async def test_what_drafting_takes_counts_for_the_step_that_tries_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the step before it drafts, as on a GPU: its own duration must not look longer."""
    clock = [0.0]
    monkeypatch.setattr(speculation.time, "perf_counter", lambda: clock[0])
    speculator, jobs = await speculating()
    speculator._drafter = SlowDrafter(clock, 7, 8, 9, 9)
    speculator.measure(1, 0, 0.010)
    for _ in range(60):
        drafts = speculator.draft(jobs)
        speculator.measure(1, 0, 0.010 + 0.020 * bool(drafts))  # it ended with the drafts of the next one
        if drafts:
            speculator.observe(0, len(drafts[0]), len(drafts[0]), 7)  # all are right
            speculator.measure(1, len(drafts[0]), 0.011)
    assert speculator._cost._step_s[1] == pytest.approx(0.010)
    assert speculator._cost.per_row(1) > 0.4  # four rows take 31 ms where a step without them takes 10


async def test_drafts_that_come_to_nothing_end_drafting() -> None:
    speculator, jobs = await speculating()
    speculator._drafter = SlowDrafter([0.0])
    speculator.measure(1, 0, 0.010)
    tries = 0
    for _ in range(60):
        assert speculator.draft(jobs) == {}
        tries += not speculator.is_idle
        speculator.observe(0, 0, 0, 7)
    assert tries < 10


async def test_streams_that_must_have_drafts_of_one_length_get_it() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9, measured=False)
    speculator._drafter = SlowDrafter([0.0], 7, 8, 9, 9)
    jobs[1] = LlamaCppJob(id_prompt([1, 2], max_tokens=50), asyncio.get_running_loop(), "main", 256, 2)
    speculator.begin(1, jobs[1])
    assert {len(draft) for draft in speculator.draft(jobs).values()} == {4}


async def test_rejected_drafts_end_drafting() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9)
    speculator.measure(1, 0, 0.010)
    assert speculator.draft(jobs)
    assert not speculator.is_idle
    for _ in range(20):
        speculator.observe(0, 2, 0, 5)
    assert speculator.draft(jobs) == {}
    assert speculator.is_idle


async def test_a_new_job_ends_the_idle_state() -> None:
    speculator, jobs = await speculating(7)  # the duration of a step is unknown
    speculator.draft(jobs)
    assert speculator.is_idle
    speculator.begin(1, jobs[0])
    assert not speculator.is_idle


async def test_a_draft_ends_before_a_stop_token() -> None:
    speculator, jobs = await speculating(7, 8, 9, 9, measured=False, stop_ids=(9,))
    assert speculator.draft(jobs) == {0: [7, 8]}


@pytest.mark.parametrize(("seed", "measured", "guesses"), [(None, True, True), (1, True, False), (1, False, True)])
async def test_a_seeded_job_is_not_drafted_if_times_decide(seed: int | None, measured: bool, guesses: bool) -> None:
    speculator, jobs = await speculating(7, 8, measured=measured, sampling=Sampling(temperature=1.0, seed=seed))
    speculator.measure(1, 0, 0.010)
    assert bool(speculator.draft(jobs)) == guesses
    speculator.end(0)


# --- when drafts pay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "price", "expected"),
    [
        pytest.param(0.5, 0.3, 1, id="the second would cost more than it yields"),
        pytest.param(0.9, 0.42, 8, id="CPU, repetitive text"),
        pytest.param(0.4, 0.42, 0, id="CPU, other text"),
        pytest.param(0.5, 0.02, 5, id="GPU"),
        pytest.param(0.95, 0.85, 3, id="many streams"),
        pytest.param(1.0, 0.5, 8, id="always accepted"),
        pytest.param(0.0, 0.5, 0, id="never accepted"),
        pytest.param(0.9, 0.0, 8, id="free rows"),
        pytest.param(1.0, 1.0, 0, id="rows cost as much as steps"),
    ],
)
def test_the_draft_length_pays(acceptance: float, price: float, expected: int) -> None:
    assert draft_length(acceptance, price, 8) == expected


def test_lower_acceptance_or_higher_cost_never_lengthens_drafts() -> None:
    chances = [step / 20 for step in range(21)]
    for price in chances:
        widths = [draft_length(chance, price, 8) for chance in chances]
        assert widths == sorted(widths)
    for chance in chances:
        widths = [draft_length(chance, price, 8) for price in chances]
        assert widths == sorted(widths, reverse=True)


def learned(plain: float, wide: float, *, streams: int = 1, drafted: int = 4, steps: int = 60) -> DraftCost:
    price = DraftCost()
    for _ in range(steps):
        price.observe(streams, 0, plain)
        price.observe(streams, drafted, wide)
    return price


@pytest.mark.parametrize(
    ("price", "streams", "expected"),
    [
        pytest.param(learned(0.008, 0.008 + 4 * 0.0034), 1, 0.42, id="CPU"),
        pytest.param(learned(0.010, 0.0102), 1, 0.005, id="GPU measured"),
        pytest.param(learned(0.031, 0.031 + 8 * 0.0034, streams=8, drafted=8), 8, 0.87, id="many streams"),
        pytest.param(learned(0.010, 0.100), 1, 1.0, id="a row that costs more than a step"),
        pytest.param(learned(0.010, 0.009), 1, 0.0, id="a row that seems to save time"),
    ],
)
def test_the_cost_is_measured(price: DraftCost, streams: int, expected: float) -> None:
    assert price.per_row(streams) == pytest.approx(expected, abs=0.02)


def test_nothing_is_drafted_before_a_step_without_drafts_was_measured() -> None:
    price = DraftCost()
    assert price.per_row(1) == 1.0
    price.observe(1, 3, 0.010)  # nothing to hold it against
    assert price.per_row(1) == 1.0
    price.observe(1, 0, 0.008)
    assert 0 < price.per_row(1) < 0.5
    assert price.per_row(2) == 1.0


def test_one_stalled_step_does_not_end_drafting() -> None:
    price = learned(0.010, 0.012)
    price.observe(1, 4, 3.0)
    assert draft_length(0.7, price.per_row(1), 8) > 0


def test_expensive_rows_are_tried_again_after_a_while() -> None:
    price = learned(0.010, 0.060)
    assert draft_length(0.9, price.per_row(1), 8) == 0
    for _ in range(1000):
        price.observe(1, 0, 0.010)
    assert draft_length(0.9, price.per_row(1), 8) > 0


def test_the_acceptance_rate_follows_the_results() -> None:
    record = AcceptanceRate()
    assert record.rate == 0.5
    for _ in range(60):
        record.update(4, 4)
    assert record.rate > 0.98
    for _ in range(60):
        record.update(4, 0)
    assert record.rate < 0.1


def test_tokens_after_a_rejected_one_do_not_count() -> None:
    one, other = AcceptanceRate(), AcceptanceRate()
    one.update(8, 2)
    other.update(3, 2)
    assert one.rate == other.rate


def test_a_low_acceptance_rate_fades() -> None:
    record = AcceptanceRate()
    for _ in range(60):
        record.update(1, 0)
    for _ in range(1500):
        record.decay()
    assert record.rate > 0.4


# --- drafts from the text ---------------------------------------------------------------------------------------------

TEXTS = st.lists(st.integers(0, 2), max_size=120)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        pytest.param([], 4, [], id="empty"),
        pytest.param([1, 2, 3], 4, [], id="nothing before"),
        pytest.param([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5], id="what followed before"),
        pytest.param([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5], id="the last occurrence counts"),
        pytest.param([7, 7, 7, 7], 3, [7, 7, 7], id="a run continues"),
        pytest.param([1, 2, 3, 4, 1, 2, 3], 6, [4, 1, 2, 3, 4, 1], id="a repetition continues"),
        pytest.param([1, 2, 3, 4, 2, 3], 2, [], id="two equal tokens are not enough"),
        pytest.param([2_000_000, 1, 2, 5, 2_000_000, 1, 2], 1, [5], id="large ids"),
    ],
)
def test_the_index_drafts_what_followed_before(text: list[int], count: int, expected: list[int]) -> None:
    assert NgramIndex(text).draft(count) == expected


def searched(text: list[int], count: int) -> list[int]:
    """The same by a linear search."""
    places = [at for at in range(3, len(text)) if text[at - 3 : at] == text[-3:]]
    if not places:
        return []
    grown = list(text)
    for at in range(places[-1], places[-1] + count):
        grown.append(grown[at])
    return grown[len(text) :]


@given(TEXTS, st.integers(1, 9))
def test_the_index_drafts_what_a_search_finds(text: list[int], count: int) -> None:
    assert NgramIndex(text).draft(count) == searched(text, count)


@given(st.lists(TEXTS, max_size=6), st.integers(1, 9))
def test_a_text_may_be_indexed_in_pieces(pieces: list[list[int]], count: int) -> None:
    grown, whole = NgramIndex(), []
    for piece in pieces:
        grown.extend(piece)
        whole += piece
        assert len(grown) == len(whole)
        assert grown.draft(count) == searched(whole, count)


def test_a_long_text_is_indexed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_CHUNK", 40)
    text = NgramIndex([*range(97), 1, 2, 3])
    assert [text.draft(1) for _ in range(3)] == [[], [], [4]]


# A draft model: it follows its jobs, does not change answers, and must have the same tokens.

CACHES = {"main": CacheInfo(256, 4)}


@asynccontextmanager
async def with_draft_model(draft: Path | None, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    drafting = {"draft_model_path": str(draft), "speculation": "draft"} if draft else {"speculation": "off"}
    chosen = {"path": str(exact_model()), "draft_p_min": 0.0, **drafting} | options
    async with running(CACHES, **chosen) as engine:
        yield engine


async def answers_of(draft: Path | None, sampling: Sampling) -> tuple[list[list[int]], float]:
    """Answers, and the share of drafted tokens that were accepted."""
    async with with_draft_model(draft) as engine:
        answers = [ids(await generate(engine, run, sampling=sampling)) for run in RUNS]
        stats = engine.stats()
    return answers, stats.accepted_tokens / max(1, stats.guessed_tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_answers_are_the_same_as_without_a_draft_model(sampling: Sampling) -> None:
    plain, _ = await answers_of(None, sampling)
    for draft in (exact_model(), other_model()):
        assert (await answers_of(draft, sampling))[0] == plain


async def test_a_model_that_drafts_for_itself_is_nearly_always_accepted() -> None:
    _, share = await answers_of(exact_model(), Sampling(temperature=0))
    assert share > 0.95


async def test_a_different_model_is_rarely_accepted() -> None:
    _, share = await answers_of(other_model(), Sampling(temperature=0))
    assert share < 0.1


@pytest.mark.parametrize("draft", [exact_model, other_model])
async def test_concurrent_streams_with_drafts_generate_what_each_generates_alone_with_a_draft_model(draft: Any) -> None:
    async with with_draft_model(draft()) as engine:
        jobs = (generate(engine, run, session=str(n)) for n, run in enumerate(RUNS))
        together = [ids(chunks) for chunks in await asyncio.gather(*jobs)]
        assert engine.stats().guessed_tokens > 0
    async with with_draft_model(None) as engine:
        assert together == [ids(await generate(engine, run)) for run in RUNS]


async def test_drafts_stay_right_over_several_turns_and_conversations() -> None:
    """The draft model's KV follows the jobs of each sequence."""
    async with with_draft_model(exact_model()) as engine:
        for turn in range(3):
            for n in (0, 1):
                run = RUNS[n] + [word for seed in range(turn) for word in words(10 * n + seed)]
                await generate(engine, run, session=str(n), max_tokens=10)
        stats = engine.stats()
    assert stats.accepted_tokens > 0.95 * stats.guessed_tokens


async def test_unlikely_tokens_are_not_drafted() -> None:
    async with with_draft_model(exact_model(), draft_p_min=1.0) as engine:
        assert len(ids(await generate(engine, RUNS[0]))) == 40
        assert engine.stats().guessed_tokens == 0


async def test_the_draft_model_reads_a_long_prompt_in_slices() -> None:
    async with with_draft_model(exact_model()) as engine:
        tap = Tap(engine)
        await generate(engine, words(1, 100), max_tokens=60)
    lengths = [len(chunk.ids) for _, chunk in tap.seen if hasattr(chunk, "ids")]
    first = next(at for at, length in enumerate(lengths) if length > 1)
    assert first >= 100 // 16  # as many steps as it has slices to read


async def test_drafts_stay_right_after_a_cancelled_job() -> None:
    async with with_draft_model(exact_model()) as engine:
        CancelAtRun(engine)
        chunks = await generate(engine, RUNS[0], max_tokens=200)
        assert end(chunks).reason == "cancelled"
        turn = RUNS[0] + ids(chunks) + words(9)
        before = engine.stats()
        second = await generate(engine, turn)
        after = engine.stats()
        assert accepted(second).cached_tokens > 0
    assert after.accepted_tokens - before.accepted_tokens > 0.95 * (after.guessed_tokens - before.guessed_tokens)
    async with with_draft_model(None) as fresh:
        assert_alike(second, await generate(fresh, turn))


async def test_a_failing_draft_model_does_not_fail_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with with_draft_model(exact_model()) as engine:
        whole = ids(await generate(engine, RUNS[0]))
        with monkeypatch.context() as patched:
            patched.setattr("modelyard.engines.llama_cpp.speculation.lib", FailingLibrary())
            assert ids(await generate(engine, RUNS[0])) == whole
        drafted = engine.stats().guessed_tokens
        assert ids(await generate(engine, RUNS[0])) == whole
        assert engine.stats().guessed_tokens == drafted
    assert "failed with code 1: drafts are off" in caplog.text


class FailingLibrary:
    def llama_decode(self, *_: object) -> int:
        return 1


async def test_default_model_drafts_for_itself() -> None:
    """It is quantized, so rows round differently in a batch: not all drafts are accepted."""
    asked = {"max_tokens": 24, "logprobs": 2}
    async with running(speculation="draft", draft_model_path=str(model_file()), draft_p_min=0.5) as engine:
        chunks = await answer(engine, "Count from one to ten.", **asked)
        stats = engine.stats()
    assert stats.guessed_tokens > 0
    assert stats.accepted_tokens > 0.5 * stats.guessed_tokens
    assert text_of(chunks)


# --- what is refused --------------------------------------------------------------------------------------------------


async def refusal(**options: Any) -> str:
    engine = llama_cpp.create(spec(**({"speculation": "draft"} | options)))
    with pytest.raises(ModelyardError) as caught:
        await engine.open(lambda *_: None)
    await engine.close()
    return caught.value.message


async def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(model_file().read_bytes().replace(b"<jupyter_start>", b"<jupiter_start>", 1))
    assert "'<jupiter_start>' there and '<jupyter_start>' in the model" in await refusal(draft_model_path=str(other))


async def test_a_draft_model_with_another_vocabulary_size_is_refused() -> None:
    assert "it has 256 tokens" in await refusal(draft_model_path=str(exact_model()))


async def test_a_draft_model_that_cannot_rewind_is_refused() -> None:
    message = await refusal(path=str(repetitive_model()), draft_model_path=str(recurrent_model()))
    assert "cannot rewind" in message


async def test_a_missing_draft_model_is_named() -> None:
    assert "nowhere.gguf" in await refusal(draft_model_path="/nowhere.gguf")


def test_speculation_draft_needs_a_draft_model() -> None:
    with pytest.raises(ValueError, match="needs a draft_model_path"):
        llama_cpp.Options(path="x.gguf", speculation="draft")


def test_the_most_likely_token_has_its_softmax_probability() -> None:
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    token, chance = most_likely_token(logits)
    assert token == 1
    assert chance == pytest.approx((np.exp(logits) / np.exp(logits).sum()).max())
