"""Tiny models of many architectures: each generates or embeds as in a fresh context, or is refused in a sentence.

A usual run has one or two architectures of each kind; `MODELYARD_ARCHITECTURES=all` runs all of them, and so does
`MODELYARD_GOLDEN=write`, which updates the table in docs/engines.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.library.architectures import DIFFUSION, ENCODERS, TESTED, company, is_tested, may_share_batch, refusal
from tests.docs.pages import DOCS
from tests.engines.llama_cpp.architecture_run import GEMMA, ArchitectureResult, run_all
from tests.engines.llama_cpp.architectures import ARCHITECTURES, DRAFT_FILES, UNTESTED, WINDOW, WITH_HEADS, model
from tests.engines.llama_cpp.exact_models import write
from tests.engines.reading import ids, read

USUAL = (  # noqa: SIM905
    "llama qwen3 qwen2vl phi3 falcon chatglm glm4 command-r "  # dense
    "gpt2 starcoder mpt bloom refact "  # learned positions, or biases instead
    "gemma2 gemma3 gemma3n gemma4 cohere2 gpt-oss llama4 mimo2 "  # sliding windows
    "qwen3moe glm4moe grok minimax-m2 ernie4_5-moe "  # experts
    "deepseek2 minicpm3 glm-dsa deepseek4 "  # latent attention
    "mamba mamba2 rwkv7 "  # recurrent
    "jamba falcon-h1 granitehybrid nemotron_h lfm2 qwen3next qwen35 kimi-linear kimi-k3 minimax-01 "  # hybrid
    "t5 t5encoder bert nomic-bert modern-bert gemma-embedding dream"  # encoders and diffusion
).split()
PAGE = DOCS / "engines.md"
BEGIN, END = "<!-- architectures: begin -->\n", "<!-- architectures: end -->"
WRITES = os.environ.get("MODELYARD_GOLDEN") == "write"

Results = Mapping[str, ArchitectureResult]


@pytest.fixture(scope="module")
def results() -> Results:
    return run_all(list(ARCHITECTURES) if WRITES or os.environ.get("MODELYARD_ARCHITECTURES") == "all" else USUAL)


def test_reused_edited_cancelled_copied_evicted_restored_and_drafted_answers_are_those_of_a_fresh_context(
    results: Results,
) -> None:
    assert {name: result.faults for name, result in results.items() if result.faults} == {}
    generating = [result for result in results.values() if result.task == "chat" and result.refused is None]
    assert len(generating) >= 40
    assert all(result.reused for result in generating)
    assert {result.memory for result in generating} == {"attention", "sliding window", "recurrent", "hybrid"}
    assert sum(result.drafts > 0 for result in generating) >= 10


def test_models_that_draft_with_heads_answer_as_in_a_fresh_context() -> None:
    """Their own layers, several in turn, an assistant that attends to their KV, and EAGLE-3."""
    results = run_all([*WITH_HEADS, *(f"{target}+{drafts}" for target, drafts in DRAFT_FILES.items())])
    assert {name: result.faults for name, result in results.items() if result.faults or result.refused} == {}
    assert all(result.drafts and result.reused for result in results.values())


def test_a_real_model_with_a_sliding_window_answers_as_in_a_fresh_context() -> None:
    (result,) = run_all([GEMMA]).values()
    assert (result.faults, result.memory) == ([], "sliding window")
    assert result.reused


def test_a_model_with_learned_positions_has_no_longer_window(results: Results) -> None:
    assert {results[name].window for name in ("gpt2", "starcoder", "mpt")} == {WINDOW}
    assert results["llama"].window > WINDOW


def test_an_encoder_decoder_is_refused_when_it_is_loaded(results: Results) -> None:
    assert "'t5' is an encoder-decoder, which this engine does not run" in (results["t5"].refused or "")


@pytest.mark.parametrize("name", ["cogvlm", "eagle3", "wavtokenizer-dec"])
def test_what_llama_cpp_cannot_compute_is_refused_before_it_is_loaded(name: str, tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    write(file, {"general.architecture": name}, {})
    spec = EngineSpec("other", llama_cpp.Options(path=str(file)), {})
    with pytest.raises(InvalidRequest, match=f"the architecture '{name}' ") as refused:
        loading.check_before_loading(file, spec)
    assert refused.value.code == "architecture_unsupported"


def test_models_that_embed_or_diffuse_do_not_generate(results: Results) -> None:
    for name in ("bert", "t5encoder", "dream"):
        assert results[name].refused == "this model does not generate"
    assert results["bert"].embeds
    assert not results["deepseek4"].embeds


def test_only_a_tested_architecture_shares_the_process_of_the_gateway(tmp_path: Path) -> None:
    assert {name for name in ARCHITECTURES if refusal(name) is None} == TESTED
    file = model("llama")
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes().replace(b"llama", b"qllam"))
    options = llama_cpp.Options(path=str(file), n_gpu_layers=0)
    assert not llama_cpp.own_process(options)
    assert llama_cpp.own_process(options.model_copy(update={"path": str(other)}))
    assert llama_cpp.own_process(options.model_copy(update={"draft_model_path": str(other)}))
    assert not is_tested("a later one")


def test_check_names_an_architecture_that_cannot_run() -> None:
    spec = EngineSpec("t5", llama_cpp.Options(path=str(model("t5"))), {})
    ((field, message),) = llama_cpp.faults(spec)
    assert field == "path"
    assert "is an encoder-decoder" in message


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_of_architectures_shows_these_results(results: Results) -> None:
    text = PAGE.read_text()
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    fresh = "\n".join(_rows(results)) + "\n"
    if WRITES:
        PAGE.write_text(text.replace(BEGIN + table + END, BEGIN + fresh + END))
    assert set(fresh.splitlines()) <= set(table.splitlines()), "run the tests with MODELYARD_GOLDEN=write"
    assert len(table.splitlines()) == len(ARCHITECTURES) + 2


def _rows(results: Results) -> Iterator[str]:
    yield "| architecture | use | memory | an edit is read from | drafts | embeddings | shares batches |"
    yield "|---|---|---|---|---|---|---|"
    for name, result in sorted(results.items()):
        yield f"| `{name}` | {' | '.join(_cells(result))} |"


def _cells(result: ArchitectureResult) -> tuple[str, ...]:
    if result.task != "chat" or result.refused is not None:
        use = "refused: encoder-decoder" if result.task == "chat" else result.task
        return use, "", "", "", "yes" if result.embeds else "", ""
    return (
        "chat, window limited to its positions" if result.window == WINDOW else "chat",
        result.memory,
        "the edit" if result.rewinds else "a checkpoint",
        "yes" if result.speculates else "",
        "yes" if result.embeds else "no",
        "yes" if may_share_batch(result.name) else "no",
    )


# --- company ----------------------------------------------------------------------------------------------------------


def test_the_table_of_company_has_every_architecture_that_generates() -> None:
    """`python -m bench.company --write` makes it."""
    table = company()
    assert not set(table["together"]) & set(table["alone"])
    known = {name for name in ARCHITECTURES | UNTESTED if refusal(name) is None and name not in ENCODERS | DIFFUSION}
    assert {*table["together"], *table["alone"]} == known
    assert {"deepseek4", "plamo2"} <= set(table["alone"])
    assert not may_share_batch("a later one")


async def test_an_architecture_that_is_wrong_in_company_has_one_sequence_per_batch() -> None:
    options = llama_cpp.Options(path=str(model("deepseek4")), n_threads=1)
    engine = LlamaCppEngine(EngineSpec("alone", options, {"main": CacheInfo(256, 3)}))
    await engine.open(lambda *_: None)
    try:
        (context,) = engine._contexts
        seen: list[int] = []
        decode = context._decode
        context._decode = lambda sequences: seen.append(len(found := list(sequences))) or decode(found)  # type: ignore
        texts = [[5 + n, *range(9, 60 + n)] for n in range(3)]
        prompts = [
            Prompt(parts=(TokenRun(t),), sampling=Sampling(temperature=0), max_tokens=6, cache="main") for t in texts
        ]
        answers = await asyncio.gather(*(read(engine.generate(prompt)) for prompt in prompts))
    finally:
        await engine.close()
    assert [len(ids(chunks)) for chunks in answers] == [6, 6, 6]
    assert set(seen) == {1}
