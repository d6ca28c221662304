"""What 100 short questions about a long input cost: tokens evaluated, and processor time, of `POST /v1/decisions`.

    python -m bench.decisions [--tokens 8000] [--questions 100] [--parallel 1]

An input is read with one question, and another one of the same length with all of them, on the default model in this
process. The claim: the second costs at most 1.3 times reading the input, and the questions' own tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import httpx

from modelyard.library import default_model
from tests.live_server import LiveServer, live_server


def text(server: LiveServer, seed: str, tokens: int) -> str:
    """Lines of so many tokens."""
    lines = [f"{seed} {number}: paid on day {number % 31}." for number in range(tokens // 8)]
    body = {"model": "smollm2", "content": "\n".join(lines)}
    ids = httpx.post(f"{server.url}/tokenize", json=body, timeout=600).raise_for_status().json()["tokens"]
    body = {"model": "smollm2", "tokens": ids[:tokens]}
    cut: str = httpx.post(f"{server.url}/detokenize", json=body, timeout=600).raise_for_status().json()["content"]
    return cut


def question(number: int) -> dict[str, str]:
    return {"type": "predicate", "instructions": f"The order {number} was paid."}


def measure(server: LiveServer, given: str, questions: int) -> tuple[int, float, float, Any]:
    """Tokens evaluated, processor time, wall time, and the reply."""
    engine: Any = server.app.scheduler.engine("smollm2")
    before, cpu, wall = engine.stats().evaluated_tokens, time.process_time(), time.perf_counter()
    body = {"model": "smollm2", "input": given, "questions": [question(number) for number in range(questions)]}
    reply = httpx.post(f"{server.url}/v1/decisions", json=body, timeout=3600)
    reply.raise_for_status()
    spent = time.process_time() - cpu, time.perf_counter() - wall
    return engine.stats().evaluated_tokens - before, *spent, reply.json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=1)
    given = parser.parse_args()
    default_model.fetch()
    model = {"backend": "llama_cpp", "path": "smollm2", "n_ctx": 16384, "parallel": given.parallel, "n_threads": 1}
    with live_server({"models": {"smollm2": model}}) as server:
        measure(server, "Warm-up", 1)
        one_tokens, one_cpu, one_wall, one = measure(server, text(server, "Invoice", given.tokens), 1)
        print(
            f"the input: {one_tokens} tokens evaluated, {one_cpu:.1f} s of processor time, {one_wall:.1f} s", flush=True
        )
        tokens, cpu, wall, many = measure(server, text(server, "Receipt", given.tokens), given.questions)
        print(f"{given.questions} questions: {tokens} tokens, {cpu:.1f} s of processor time, {wall:.1f} s", flush=True)
        own = many["usage"]["input_tokens"] - one["usage"]["input_tokens"]
        _, whole_cpu, _, _ = measure(server, text(server, "Ticket", given.tokens + own), 1)
    print(f"the questions' own tokens: {own}")
    print(f"an input with as many tokens as both: {whole_cpu:.1f} s of processor time")
    print(f"tokens evaluated / (1.3 × input + own): {tokens / (1.3 * one_tokens + own):.2f} (at most 1)")
    allowed_cpu = 1.3 * one_cpu + whole_cpu - one_cpu
    print(f"processor time / (1.3 × input + own tokens as input): {cpu / allowed_cpu:.2f} (at most 1)")
    print(f"processor time / that of the input: {cpu / one_cpu:.2f}")


if __name__ == "__main__":
    main()
