"""A draft model: it follows its jobs, does not change answers, and must have the same tokens."""

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
from tests.engines.llama_cpp.exact_models import exact_model, other_model, recurrent_model, repetitive_model
from tests.engines.llama_cpp.helpers import Tap, answer, model_file, running, spec, text_of
from tests.engines.llama_cpp.test_speculation import RUNS, SAMPLINGS, CancelAtRun, generate, words
from tests.engines.reading import accepted, assert_alike, end, ids

CACHES = {"main": CacheInfo(256, 4)}


@asynccontextmanager
async def opened(draft: Path | None, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    drafting = {"draft_model_path": str(draft), "speculation": "draft"} if draft else {"speculation": "off"}
    chosen = {"path": str(exact_model()), "draft_p_min": 0.0, **drafting} | options
    async with running(CACHES, **chosen) as engine:
        yield engine


async def answers_of(draft: Path | None, sampling: Sampling) -> tuple[list[list[int]], float]:
    """Answers, and the share of drafted tokens that were accepted."""
    async with opened(draft) as engine:
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
async def test_concurrent_streams_with_drafts_generate_what_each_generates_alone(draft: Any) -> None:
    async with opened(draft()) as engine:
        jobs = (generate(engine, run, session=str(n)) for n, run in enumerate(RUNS))
        together = [ids(chunks) for chunks in await asyncio.gather(*jobs)]
        assert engine.stats().guessed_tokens > 0
    async with opened(None) as engine:
        assert together == [ids(await generate(engine, run)) for run in RUNS]


async def test_drafts_stay_right_over_several_turns_and_conversations() -> None:
    """The draft model's KV follows the jobs of each sequence."""
    async with opened(exact_model()) as engine:
        for turn in range(3):
            for n in (0, 1):
                run = RUNS[n] + [word for seed in range(turn) for word in words(10 * n + seed)]
                await generate(engine, run, session=str(n), max_tokens=10)
        stats = engine.stats()
    assert stats.accepted_tokens > 0.95 * stats.guessed_tokens


async def test_unlikely_tokens_are_not_drafted() -> None:
    async with opened(exact_model(), draft_p_min=1.0) as engine:
        assert len(ids(await generate(engine, RUNS[0]))) == 40
        assert engine.stats().guessed_tokens == 0


async def test_the_draft_model_reads_a_long_prompt_in_slices() -> None:
    async with opened(exact_model()) as engine:
        tap = Tap(engine)
        await generate(engine, words(1, 100), max_tokens=60)
    lengths = [len(chunk.ids) for _, chunk in tap.seen if hasattr(chunk, "ids")]
    first = next(at for at, length in enumerate(lengths) if length > 1)
    assert first >= 100 // 16  # as many steps as it has slices to read


async def test_drafts_stay_right_after_a_cancelled_job() -> None:
    async with opened(exact_model()) as engine:
        CancelAtRun(engine)
        chunks = await generate(engine, RUNS[0], max_tokens=200)
        assert end(chunks).reason == "cancelled"
        turn = RUNS[0] + ids(chunks) + words(9)
        before = engine.stats()
        second = await generate(engine, turn)
        after = engine.stats()
        assert accepted(second).cached_tokens > 0
    assert after.accepted_tokens - before.accepted_tokens > 0.95 * (after.guessed_tokens - before.guessed_tokens)
    async with opened(None) as fresh:
        assert_alike(second, await generate(fresh, turn))


async def test_a_failing_draft_model_does_not_fail_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(exact_model()) as engine:
        whole = ids(await generate(engine, RUNS[0]))
        with monkeypatch.context() as patched:
            patched.setattr("modelyard.engines.llama_cpp.draft_model.lib", FailingLibrary())
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
