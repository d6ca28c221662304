"""A draft model: in step with its job, never trusted, and refused where its tokens mean something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import ModelyardError
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp.draft_model import most_likely_token
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.exact_models import chanting_model, exact_model, other_model, recurrent_model
from tests.engines.llama_cpp.helpers import Tap, answer, model_file, running, said, spec
from tests.engines.llama_cpp.test_speculation import RUNS, SAMPLINGS, CancelAtRun, told, words
from tests.engines.reading import accepted, assert_alike, end, ids

CACHES = {"main": CacheInfo(256, 4)}


@asynccontextmanager
async def opened(draft: Path | None, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    drafting = {"draft_model_path": str(draft), "speculation": "draft"} if draft else {"speculation": "off"}
    chosen = {"path": str(exact_model()), "draft_p_min": 0.0, **drafting} | options
    async with running(CACHES, **chosen) as engine:
        yield engine


async def spoken(draft: Path | None, sampling: Sampling) -> tuple[list[list[int]], float]:
    """Answers, and the share of guesses that came true."""
    async with opened(draft) as engine:
        answers = [ids(await told(engine, run, sampling=sampling)) for run in RUNS]
        stats = engine.stats()
    return answers, stats.accepted_tokens / max(1, stats.guessed_tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_text_is_the_one_that_comes_without_a_draft_model(sampling: Sampling) -> None:
    plain, _ = await spoken(None, sampling)
    for draft in (exact_model(), other_model()):
        assert (await spoken(draft, sampling))[0] == plain


async def test_model_that_drafts_for_itself_is_always_right() -> None:
    _, share = await spoken(exact_model(), Sampling(temperature=0))
    assert share > 0.95


async def test_model_of_another_opinion_is_hardly_ever_right() -> None:
    _, share = await spoken(other_model(), Sampling(temperature=0))
    assert share < 0.1


@pytest.mark.parametrize("draft", [exact_model, other_model])
async def test_streams_that_draft_side_by_side_say_what_each_says_alone(draft: Any) -> None:
    async with opened(draft()) as engine:
        jobs = (told(engine, run, session=str(n)) for n, run in enumerate(RUNS))
        together = [ids(chunks) for chunks in await asyncio.gather(*jobs)]
        assert engine.stats().guessed_tokens > 0
    async with opened(None) as engine:
        assert together == [ids(await told(engine, run)) for run in RUNS]


async def test_next_turns_of_several_conversations_are_guessed_right_again() -> None:
    """The draft model's own KV follows its jobs, from one to the next in a sequence, and never takes another's."""
    async with opened(exact_model()) as engine:
        for turn in range(3):
            for n in (0, 1):
                run = RUNS[n] + [word for seed in range(turn) for word in words(10 * n + seed)]
                await told(engine, run, session=str(n), max_tokens=10)
        stats = engine.stats()
    assert stats.accepted_tokens > 0.95 * stats.guessed_tokens


async def test_draft_model_that_is_not_sure_does_not_guess() -> None:
    async with opened(exact_model(), draft_p_min=1.0) as engine:
        assert len(ids(await told(engine, RUNS[0]))) == 40
        assert engine.stats().guessed_tokens == 0


async def test_long_prompt_is_read_in_slices_before_anything_is_guessed() -> None:
    async with opened(exact_model()) as engine:
        tap = Tap(engine)
        await told(engine, words(1, 100), max_tokens=60)
    lengths = [len(chunk.ids) for _, chunk in tap.seen if hasattr(chunk, "ids")]
    first = next(at for at, length in enumerate(lengths) if length > 1)
    assert first >= 100 // 16  # as many steps as it has slices to read


async def test_cancelled_job_leaves_the_draft_in_step() -> None:
    async with opened(exact_model()) as engine:
        CancelAtRun(engine)
        chunks = await told(engine, RUNS[0], max_tokens=200)
        assert end(chunks).reason == "cancelled"
        turn = RUNS[0] + ids(chunks) + words(9)
        before = engine.stats()
        second = await told(engine, turn)
        after = engine.stats()
        assert accepted(second).cached_tokens > 0
    assert after.accepted_tokens - before.accepted_tokens > 0.95 * (after.guessed_tokens - before.guessed_tokens)
    async with opened(None) as fresh:
        assert_alike(second, await told(fresh, turn))


async def test_draft_that_fails_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(exact_model()) as engine:
        whole = ids(await told(engine, RUNS[0]))
        with monkeypatch.context() as patched:
            patched.setattr("modelyard.engines.llama_cpp.draft_model.lib", Failing())
            assert ids(await told(engine, RUNS[0])) == whole
        guessed = engine.stats().guessed_tokens
        assert ids(await told(engine, RUNS[0])) == whole
        assert engine.stats().guessed_tokens == guessed
    assert "answered 1 to the draft model" in caplog.text


class Failing:
    def llama_decode(self, *_: object) -> int:
        return 1


async def test_default_model_drafts_for_itself() -> None:
    """Quantized, so rows that are read together round otherwise than alone: nearly all guesses come true."""
    asked = {"max_tokens": 24, "logprobs": 2}
    async with running(speculation="draft", draft_model_path=str(model_file()), draft_p_min=0.5) as engine:
        chunks = await answer(engine, "Count from one to ten.", **asked)
        stats = engine.stats()
    assert stats.guessed_tokens > 0
    assert stats.accepted_tokens > 0.5 * stats.guessed_tokens
    assert said(chunks)


# --- what is refused --------------------------------------------------------------------------------------------------


async def refusal(**options: Any) -> str:
    engine = llama_cpp.create(spec(**({"speculation": "draft"} | options)))
    with pytest.raises(ModelyardError) as caught:
        await engine.open(lambda *_: None)
    await engine.close()
    return caught.value.message


async def test_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(model_file().read_bytes().replace(b"<jupyter_start>", b"<jupiter_start>", 1))
    assert "'<jupiter_start>' to it and '<jupyter_start>' to the model" in await refusal(draft_model_path=str(other))


async def test_draft_model_of_another_size_of_vocabulary_is_refused() -> None:
    assert "it has 256 tokens" in await refusal(draft_model_path=str(exact_model()))


async def test_draft_model_that_cannot_go_back_is_refused() -> None:
    told = await refusal(path=str(chanting_model()), draft_model_path=str(recurrent_model()))
    assert "cannot go back" in told


async def test_draft_model_that_is_missing_is_told() -> None:
    assert "nowhere.gguf" in await refusal(draft_model_path="/nowhere.gguf")


def test_drafting_without_a_model_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="needs a draft_model_path"):
        llama_cpp.Options(path="x.gguf", speculation="draft")


def test_best_is_the_peak_of_a_softmax() -> None:
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    token, chance = most_likely_token(logits)
    assert token == 1
    assert chance == pytest.approx((np.exp(logits) / np.exp(logits).sum()).max())
