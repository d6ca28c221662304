"""Log probabilities of a text, computed by vLLM. Run as a script: `prompt_logprobs.py REQUEST RESULT`.

It runs in vLLM's environment, which need not have this package: it imports nothing from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def main(request: Path, result: Path) -> None:
    content = json.loads(request.read_text())
    result.write_text(json.dumps(prompt_logprobs(**content)))


def prompt_logprobs(arguments: Mapping[str, Any], ids: list[int], top: int) -> list[dict[int, float]]:
    """Log probabilities by token, for each token of the text except the first, which has no context."""
    vllm = import_module("vllm")
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=top)
    (output,) = vllm.LLM(**arguments).generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    rows: Iterable[Any] = output.prompt_logprobs
    return [{int(token): float(entry.logprob) for token, entry in row.items()} for row in rows if row]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
