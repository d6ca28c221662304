"""A text read through vLLM: how likely it held each token and its rivals. Run as a script, `odds.py ORDER ANSWER`.

It runs in the environment that vLLM lies in, which need not have this package: nothing of it is imported here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def main(order: Path, answer: Path) -> None:
    told = json.loads(order.read_text())
    answer.write_text(json.dumps(prompt_logprobs(told["arguments"], told["ids"], told["rivals"])))


def prompt_logprobs(arguments: Mapping[str, Any], ids: list[int], rivals: int) -> list[dict[int, float]]:
    vllm = import_module("vllm")
    call = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=rivals)
    (read,) = vllm.LLM(**arguments).generate({"prompt_token_ids": ids}, call, use_tqdm=False)
    return to_plain(read.prompt_logprobs)


def to_plain(told: Iterable[Any]) -> list[dict[int, float]]:
    """Logarithms by token, for each token but the first: before that there is nothing to guess from."""
    return [{int(token): float(one.logprob) for token, one in row.items()} for row in told if row]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
