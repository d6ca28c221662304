"""Reads the jobs of text engines, and compares two runs of the same job."""

from __future__ import annotations

from modelyard.core.engine import Accepted, Chunk, End, Generation, Tokens
from modelyard.core.tokenizer import IdLogprob

# A row that is computed alone uses another kernel than one in a batch, which adds in another order. With unquantized
# weights the best log probabilities move by less than 0.001, so two runs must agree within `TOLERANCE`
# (tests/engines/llama_cpp/test_isolation.py shows it with the bare C API). Quantized weights also round activations to
# eight bits: on SmolLM2 Q4_1 the bare library differed from itself by 0.28, as much as with another KV type.
# Comparisons there are coarse (`ROUNDED`); tests that need exact results use unquantized models.
TOLERANCE = 1e-2
ROUNDED = 0.5


async def read(generation: Generation[Chunk]) -> list[Chunk]:
    return [chunk async for batch in generation for chunk in batch]


async def until(generation: Generation[Chunk], kind: type) -> list[Chunk]:
    """Reads up to the first batch that has such a chunk."""
    chunks: list[Chunk] = []
    while not any(isinstance(chunk, kind) for chunk in chunks):
        chunks += await anext(generation)
    return chunks


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.ids]


def logprobs(chunks: list[Chunk]) -> list[IdLogprob]:
    return [each for chunk in chunks if isinstance(chunk, Tokens) for each in chunk.logprobs or ()]


def accepted(chunks: list[Chunk]) -> Accepted:
    """Checks that Accepted is first, End is last, and each occurs once."""
    first = chunks[0]
    assert isinstance(first, Accepted)
    assert sum(isinstance(chunk, Accepted) for chunk in chunks) == 1
    end(chunks)
    return first


def end(chunks: list[Chunk]) -> End:
    last = chunks[-1]
    assert isinstance(last, End)
    assert sum(isinstance(chunk, End) for chunk in chunks) == 1
    assert (last.error is not None) == (last.reason == "error")
    return last


def assert_alike(one: list[Chunk], other: list[Chunk], tolerance: float = TOLERANCE) -> None:
    """The same greedy answer. Texts may differ only after a tie: two best tokens closer than the tolerance. Both jobs
    must have requested at least two logprobs."""
    assert logprobs(one), "nothing to compare"
    for a, b in zip(logprobs(one), logprobs(other), strict=False):
        if a.id != b.id:
            assert _margin(a) < tolerance, f"{a} and {b} differ without a tie"
            return
        assert abs(a.logprob - b.logprob) < tolerance, f"{a} and {b} differ too much"
    assert len(ids(one)) == len(ids(other)), "one answer is longer than the other"


def _margin(choice: IdLogprob) -> float:
    (_, best), (_, second), *_ = choice.top
    return best - second
