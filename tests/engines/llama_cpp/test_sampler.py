"""Sampling settings on the default model, logprobs, and logit processors."""

from __future__ import annotations

import asyncio
import ctypes
import math
from math import inf
from random import Random
from threading import get_ident
from typing import Any

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.binding import lib, short, waiting
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.logit_columns import Row
from modelyard.engines.llama_cpp.logits import LogitProcessor, Penalties, logit_processor, token_logprob
from modelyard.engines.llama_cpp.sampler import Sampler
from modelyard.engines.llama_cpp.sampler_chain import PENALTY_WINDOW, DrySamplers
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp import reference
from tests.engines.llama_cpp.exact_models import VOCAB, exact_model
from tests.engines.llama_cpp.helpers import answer, id_prompt, running, shared_loop, vocabulary
from tests.engines.llama_cpp.tiny_models import coder
from tests.engines.reading import end, ids, logprobs, read
from tests.real_models import GEMMA_ROUNDS, gemma, gemma_vocabulary

TEXT = "Name some animals."
LOOP = "<|im_start|>" + " ".join(["red blue green gold"] * 8)  # makes the model say a phrase again and again


async def sampled(engine: LlamaCppEngine, text: str = TEXT, max_tokens: int = 6, **sampling: object) -> list[int]:
    chunks = await answer(engine, text, sampling=Sampling(**sampling), max_tokens=max_tokens, logprobs=None)
    assert end(chunks).error is None
    return ids(chunks)


@shared_loop
async def test_a_seed_reproduces_an_answer(engine: LlamaCppEngine) -> None:
    await sampled(engine, max_tokens=1)  # from here on each run evaluates the same single token
    runs = {seed: [await sampled(engine, temperature=1.5, seed=seed) for _ in range(2)] for seed in (1, 2)}
    assert runs[1][0] == runs[1][1]
    assert runs[2][0] == runs[2][1]
    assert runs[1][0] != runs[2][0]


@shared_loop
async def test_choices_with_seeds_are_the_same_beside_other_streams(engine: LlamaCppEngine) -> None:
    async def choices() -> list[list[int]]:
        return list(
            await asyncio.gather(*(sampled(engine, temperature=0.9, seed=seed, max_tokens=24) for seed in (1, 2)))
        )

    alone = await choices()
    others = [asyncio.create_task(sampled(engine, f"Tell me of {n}.", temperature=1.0, max_tokens=40)) for n in (1, 2)]
    await asyncio.sleep(0)  # they are in the queue before
    beside = await choices()
    assert beside == alone
    assert alone[0] != alone[1]
    await asyncio.gather(*others)


@shared_loop
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_no_token_ends_an_answer_before_its_minimum(
    engine: LlamaCppEngine, logprobs: int | None, temperature: float
) -> None:
    ends = tuple(vocabulary().eos)
    greedy = {"stop_ids": ends, "max_tokens": 12, "logprobs": logprobs}
    text = "<|im_start|>user\nSay Yes.<|im_end|>\n<|im_start|>assistant\nYes."  # the model ends here
    assert len(ids(await answer(engine, text, **greedy))) == 0
    least = Sampling(temperature=temperature, seed=1, min_tokens=5)
    assert 5 <= len(ids(await answer(engine, text, sampling=least, **greedy))) <= 12
    endless = await answer(engine, text, sampling=Sampling(temperature=temperature, ignore_eos=True), **greedy)
    assert (len(ids(endless)), end(endless).reason) == (12, "length")
    assert not set(ends) & set(ids(endless))


@shared_loop
async def test_unseeded_answers_differ(engine: LlamaCppEngine) -> None:
    assert len({tuple(await sampled(engine, temperature=2.0)) for _ in range(3)}) > 1


@shared_loop
async def test_top_k_of_one_is_greedy_at_any_temperature(engine: LlamaCppEngine) -> None:
    await sampled(engine, max_tokens=1)
    assert await sampled(engine, temperature=5.0, top_k=1) == await sampled(engine, temperature=0.0)


@shared_loop
@pytest.mark.parametrize("narrow", [{"top_p": 0.0001}, {"min_p": 0.9999}, {"top_k": 1, "seed": 3}])
async def test_narrow_truncation_leaves_only_the_best_token(engine: LlamaCppEngine, narrow: dict[str, float]) -> None:
    await sampled(engine, max_tokens=1)
    assert await sampled(engine, temperature=1.0, **narrow) == await sampled(engine, temperature=0.0)


@shared_loop
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 3.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 20.0}]
)
async def test_penalties_break_a_loop(engine: LlamaCppEngine, penalty: dict[str, float]) -> None:
    looped = await sampled(engine, LOOP, 8, temperature=0)
    assert len(set(looped)) < len(looped)
    free = await sampled(engine, LOOP, 8, temperature=0, **penalty)
    assert len(set(free)) > len(set(looped))


@shared_loop
async def test_bias_forbids_and_forces_tokens(engine: LlamaCppEngine) -> None:
    first = (await sampled(engine, max_tokens=1, temperature=0))[0]
    assert first not in await sampled(engine, temperature=0, logit_bias={first: -math.inf})
    forced = vocabulary().encode_plain("x")[0]
    assert await sampled(engine, max_tokens=3, temperature=1.0, logit_bias={forced: 100.0}) == [forced] * 3


@shared_loop
async def test_a_bias_of_an_unknown_token_is_ignored(engine: LlamaCppEngine) -> None:
    await sampled(engine, max_tokens=1)
    free = await sampled(engine, temperature=0)
    assert await sampled(engine, temperature=0, logit_bias={10**6: 100.0, -5: 100.0}) == free


@shared_loop
@pytest.mark.parametrize("back", [None, -1, 64])
async def test_dry_breaks_a_loop(engine: LlamaCppEngine, back: int | None) -> None:
    """Unset and -1 mean the whole context. With this strength nothing longer than the allowed length comes twice."""
    looped = await sampled(engine, LOOP, 18, temperature=0)
    dry = {"dry_multiplier": 1000.0, "dry_allowed_length": 2, "dry_sequence_breakers": ("\u2603",)}
    free = await sampled(engine, LOOP, 18, temperature=0, dry_penalty_last_n=back, **dry)
    assert _longest_repeat(looped) > 3
    assert _longest_repeat(free) <= 2


@shared_loop
async def test_dry_without_lookback_does_nothing(engine: LlamaCppEngine) -> None:
    await sampled(engine, LOOP, 1)
    free = await sampled(engine, LOOP, 18, temperature=0, dry_multiplier=5.0, dry_penalty_last_n=0)
    assert free == await sampled(engine, LOOP, 18, temperature=0)


def _longest_repeat(ids: list[int]) -> int:
    """Of the runs of tokens that come at least twice."""
    runs = [tuple(ids[a:b]) for a in range(len(ids)) for b in range(a + 1, len(ids) + 1)]
    return max((len(run) for run in runs if runs.count(run) > 1), default=0)


@shared_loop
@pytest.mark.parametrize(
    "sampling",
    [
        {"typical_p": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"mirostat": 1},
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
        {"dry_multiplier": 0.8},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7, "repetition_penalty": 1.1},
        {"top_k": 0},
        {"top_k": 10**6},
        {"temperature": 100.0},
    ],
    ids=str,
)
async def test_every_setting_runs_and_is_reproducible(engine: LlamaCppEngine, sampling: dict[str, object]) -> None:
    await sampled(engine, max_tokens=1)
    chosen = {"temperature": 1.0, "seed": 5} | sampling
    first = await sampled(engine, max_tokens=4, **chosen)
    assert first
    assert first == await sampled(engine, max_tokens=4, **chosen)


@shared_loop
async def test_logprobs_are_those_of_the_model_before_sampling(engine: LlamaCppEngine) -> None:
    await sampled(engine, max_tokens=1)
    plain = await answer(engine, TEXT, max_tokens=1, logprobs=3)
    hot = await answer(engine, TEXT, max_tokens=1, logprobs=3, sampling=Sampling(temperature=3.0, seed=1, top_k=2))
    assert plain[-2].logprobs[0].top == hot[-2].logprobs[0].top  # type: ignore[union-attr,index]


async def test_samplers_reach_all_262144_tokens_of_a_real_vocabulary() -> None:
    vocabulary = gemma_vocabulary()
    prompt = [vocabulary.bos, *vocabulary.encode("<ul>\n  <li><b>One</b></li>\n  <li>")]
    (best, *_), last = vocabulary.encode("<b>"), vocabulary.size - 1

    async def sampled(count: int = 4, **sampling: Any) -> list[int]:
        chunks = await read(engine.generate(id_prompt(prompt, sampling=Sampling(**sampling), max_tokens=count)))
        assert end(chunks).error is None
        return ids(chunks)

    async with running({"main": CacheInfo(256, 2)}, path=str(gemma())) as engine:
        plain = await read(engine.generate(id_prompt(prompt, max_tokens=1, logprobs=20)))
        (found,), greedy = logprobs(plain), await sampled(temperature=0)
        assert found.id == greedy[0] == best
        assert greedy == await sampled(temperature=5.0, top_k=1) == await sampled(temperature=1.0, min_p=0.9999, seed=3)
        hot = {"temperature": 1.5, "top_p": 0.95, "seed": 7}
        together = await asyncio.gather(sampled(**hot), sampled(**hot | {"seed": 8}))
        assert together[0] == await sampled(**hot)
        assert together[0] != together[1]
        assert await sampled(2, temperature=0, logit_bias={last: 100.0}) == [last, last]
        assert best not in await sampled(temperature=0, logit_bias={best: -inf})
        assert await sampled(1, temperature=0, logit_bias={best: -inf}) == [found.top[1][0]]
    row = reference.logprobs(gemma(), prompt, [[16]])[0]
    assert [row[token] for token, _ in found.top[:3]] == pytest.approx(
        [value for _, value in found.top[:3]], abs=GEMMA_ROUNDS
    )


def test_token_logprob_is_a_log_softmax() -> None:
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    expected = np.log(np.exp(logits) / np.exp(logits).sum())
    found = token_logprob(logits, 2, 9)
    assert found.logprob == pytest.approx(expected[2], abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2, 0, 3]
    assert [value for _, value in found.top] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert token_logprob(logits, 0, 0).top == ()


# --- looking back into the prompt -------------------------------------------------------------------------------------


def expected_best(run: list[int], presence: float = 0.0, frequency: float = 0.0) -> int:
    """By hand: the model's own opinion, less what the last 64 tokens of the prompt cost. A token's logit and its log
    probability differ by the same number for all of them."""
    (logprobs,) = reference.logprobs(exact_model(), run, [[512]])
    counts = np.bincount(run[-64:], minlength=VOCAB)
    return int((logprobs - frequency * counts - presence * (counts > 0)).argmax())


@pytest.mark.parametrize(("presence", "frequency"), [(50.0, 0.0), (0.0, 20.0), (1.5, 0.5)])
async def test_penalties_count_the_last_tokens_of_the_prompt(presence: float, frequency: float) -> None:
    penalties = Sampling(temperature=0, presence_penalty=presence, frequency_penalty=frequency)
    changed = 0
    async with running({"main": CacheInfo(256, 1)}, path=str(exact_model())) as engine:
        for seed in range(12):
            run = Random(seed).choices(range(VOCAB), k=100)
            sampled_ids = ids(await read(engine.generate(id_prompt(run, max_tokens=1, sampling=penalties))))
            assert sampled_ids == [expected_best(run, presence, frequency)]
            changed += sampled_ids != [expected_best(run)]
    assert changed


@shared_loop
async def test_dry_sees_repetitions_of_the_prompt(engine: LlamaCppEngine) -> None:
    text = "<|im_start|>one two three four five six. one two three four five six. one two three"
    (four,) = vocabulary().encode_plain(" four")
    assert await sampled(engine, text, 1, temperature=0) == [four]
    assert await sampled(engine, text, 1, temperature=0, dry_multiplier=50.0) != [four]
    assert await sampled(engine, text, 1, temperature=0, dry_multiplier=50.0, dry_penalty_last_n=3) == [four]


# --- logit processors -------------------------------------------------------------------------------------------------

ROW_SIZE = 300


def a_row(seed: int = 1) -> Row:
    return np.random.default_rng(seed).normal(0, 3, ROW_SIZE).astype(np.float32)


def as_llama_cpp(
    row: Row, biases: dict[int, float], strengths: tuple[float, float, float], sampled_ids: list[int]
) -> Row:
    data = (lib.llama_token_data * ROW_SIZE)(*[(token, value, 0.0) for token, value in enumerate(row.tolist())])
    array = lib.llama_token_data_array(data, ROW_SIZE, -1, False)
    pairs = (lib.llama_logit_bias * len(biases))(*biases.items())
    for sampler in (
        lib.llama_sampler_init_logit_bias(ROW_SIZE, len(biases), pairs),
        lib.llama_sampler_init_penalties(ROW_SIZE, PENALTY_WINDOW, *strengths),
    ):
        for token in sampled_ids:
            lib.llama_sampler_accept(sampler, token)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        lib.llama_sampler_free(sampler)
    return np.array([array.data[at].logit for at in range(ROW_SIZE)], np.float32)


def seen(processor: LogitProcessor, row: Row) -> Row:
    """The row that the sampler sees."""
    found: list[Row] = []
    processor.sample(row, lambda changed: (found.append(changed.copy()), 5)[1])
    return found[0]


@pytest.mark.parametrize("biases", [{}, {3: 4.0, 299: -inf, 7: -2.5}])
@pytest.mark.parametrize("strengths", [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.4, 0.7), (1.2, -0.5, -1.0)])
@pytest.mark.parametrize("count", [0, 10, 100])
def test_biases_and_penalties_are_those_of_llama_cpp(
    biases: dict[int, float], strengths: tuple[float, float, float], count: int
) -> None:
    sampled_ids = np.random.default_rng(2).integers(0, 40, count).tolist()
    processor, row = LogitProcessor(biases, Penalties(*strengths, sampled_ids)), a_row()
    expected = as_llama_cpp(row, biases, strengths, sampled_ids)
    np.testing.assert_allclose(seen(processor, row), expected, rtol=1e-5, atol=1e-5)


def test_the_row_is_restored_also_if_sampling_fails() -> None:
    processor, row = LogitProcessor({3: 4.0, 5: -inf}, Penalties(1.5, 0.1, 0.1, [3, 5, 9])), a_row()
    processor.sample(row, lambda changed: int(changed.argmax()))
    assert (row == a_row()).all()

    def fail(changed: Row) -> int:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 ours
        processor.sample(row, fail)
    assert (row == a_row()).all()


def test_a_sampled_token_counts_within_the_penalty_window() -> None:
    processor, row = LogitProcessor({}, Penalties(1.0, 0.0, 10.0, [])), a_row()
    assert seen(processor, row)[5] == row[5]  # and says 5
    assert seen(processor, row)[5] == pytest.approx(row[5] - 10)
    for _ in range(PENALTY_WINDOW):
        processor.sample(row, lambda _: 6)
    assert seen(processor, row)[5] == row[5]


def test_a_dry_sampler_is_created_once_and_copied() -> None:
    words = GgufTokenizer(coder())  # few: a sampler looks through all of them for its breakers
    dry = DrySamplers(words._vocab)
    sampling = Sampling(dry_multiplier=0.8, dry_sequence_breakers=("\n", "stop"))
    for _ in range(3):
        short.sampler_free(dry.copy(sampling, 64))
    assert len(dry._created) == 1
    for window in range(9):
        dry.prepare(sampling, window)
    assert len(dry._created) == 8
    dry.close()


@shared_loop
async def test_a_dry_sampler_is_not_created_on_the_engines_thread(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created_on: list[int] = []
    create = waiting.sampler_init_dry
    monkeypatch.setattr(
        waiting, "sampler_init_dry", lambda *arguments: created_on.append(get_ident()) or create(*arguments)
    )
    assert await sampled(engine, dry_multiplier=0.8, dry_sequence_breakers=("a", "b", "c"), max_tokens=2)
    assert engine._thread is not None
    assert len(created_on) == 1
    assert engine._thread.ident not in created_on


# --- next to llama.cpp's own samplers ---------------------------------------------------------------------------------


def chain_tokens(row: Any, count: int, *samplers: int) -> list[int]:
    """What llama.cpp's own chain draws from the row, again and again."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers:
        short.sampler_chain_add(chain, sampler)
    tokens = []
    for _ in range(count):
        entries = (lib.llama_token_data * len(row))(*((at, float(value), 0.0) for at, value in enumerate(row)))
        data = lib.llama_token_data_array(entries, len(row), -1, False)
        lib.llama_sampler_apply(chain, ctypes.byref(data))
        tokens.append(entries[data.selected].id)
        short.sampler_accept(chain, tokens[-1])
    short.sampler_free(chain)
    return tokens


@pytest.mark.parametrize("seed", [1, 42, 2**32 - 2])
def test_a_seed_gives_the_tokens_of_llama_cpp(seed: int) -> None:
    """Temperature, top_k, top_p and min_p: what numpy computes here."""
    row = np.random.default_rng(seed).normal(0, 2.5, 3000).astype(np.float32)
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=seed)
    ours = Sampler(sampling, DrySamplers(None), len(row), 64)
    assert ours.is_batched
    theirs = chain_tokens(
        row,
        60,
        short.sampler_init_top_k(40),
        short.sampler_init_top_p(0.95, 1),
        short.sampler_init_min_p(0.05, 1),
        short.sampler_init_temp(0.8),
        short.sampler_init_dist(seed),
    )
    assert [ours.sample(None, 0, row.copy()) for _ in range(60)] == theirs
    assert len(set(theirs)) > 5


def names_of(sampling: Sampling) -> list[str]:
    """The samplers of the chain that a request gets."""
    made = Sampler(sampling, DrySamplers(None), 100, 64)
    chain = made.chain
    assert chain is not None, "numpy computes it"
    count = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(("llama_sampler_chain_n", lib.raw))(chain)
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(("llama_sampler_chain_get", lib.raw))
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("llama_sampler_name", lib.raw))
    found = [name(get(chain, at)).decode().lstrip("+?") for at in range(count)]
    made.close()
    return found


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        (Sampling(top_n_sigma=1.5, top_k=20), ["top-n-sigma", "top-k", "temp", "dist"]),
        (Sampling(dynatemp_range=0.5, temperature=0.9), ["temp-ext", "dist"]),
        (Sampling(adaptive_target=0.5, min_p=0.1), ["min-p", "temp", "adaptive-p"]),
        (Sampling(samplers=("temperature", "top_k"), top_k=20, top_p=0.5), ["temp", "top-k", "dist"]),
        (Sampling(samplers=("min_p", "penalties"), repetition_penalty=1.3, min_p=0.1), ["min-p", "penalties", "dist"]),
    ],
)
def test_each_sampler_of_llama_server_is_in_its_place(sampling: Sampling, names: list[str]) -> None:
    assert names_of(sampling) == names


def test_samplers_that_are_not_named_do_nothing() -> None:
    row = np.array([0.0, 1.0, 5.0, 4.9], np.float32)
    only_top_k = Sampling(samplers=("top_k",), top_k=2, top_p=0.0, repetition_penalty=100.0, seed=1)
    drawn = {Sampler(only_top_k, DrySamplers(None), 4, 64, [2]).is_batched}
    sampler = Sampler(only_top_k, DrySamplers(None), 4, 64, [2])
    assert drawn == {True}
    assert {sampler._choose(row) for _ in range(50)} == {2, 3}


@pytest.mark.parametrize(("last_n", "penalized"), [(None, {1, 2}), (1, {2}), (0, set()), (-1, {1, 2, 3})])
def test_penalties_look_back_as_far_as_asked(last_n: int | None, penalized: set[int]) -> None:
    prompt = [3, *[1] * 63, 2]
    processor = logit_processor(Sampling(presence_penalty=9.0, repeat_last_n=last_n), 4, prompt)
    found = set() if processor is None else set(processor._penalties.penalized(np.ones(4, np.float32))[0].tolist())
    assert found == penalized
