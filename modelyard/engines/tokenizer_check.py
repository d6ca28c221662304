"""Whether a Hugging Face tokenizer that nobody vouches for splits every text in bounded time.

Its patterns come with the model's files. Linear ones (`tokenizer/patterns.py`), which all common models have, are
trusted with any text. With all others a child process of the pool splits texts on which such patterns blow up, first;
if it takes too long, the tokenizer is refused. One that passes is never run on the event loop.
"""

from __future__ import annotations

import time
from pathlib import Path

from tokenizers import Tokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed
from modelyard.tokenizer.huggingface import read_text, tokenizer_file, unknown_patterns
from modelyard.tokenizer.patterns import probes

_PROBE_S = 0.5  # of CPU time; a common pattern takes 0.02


def check_tokenizer(path: Path) -> None:
    """Raises if a pattern of the tokenizer at or in this path takes too long."""
    file = tokenizer_file(path)
    text = read_text(file)
    if not (patterns := unknown_patterns(text)):
        return
    try:
        pool.call(try_patterns, text, patterns)
    except Stopped as stopped:
        raise _refused(f"{file}: {stopped.why}") from None
    except InvalidRequest as error:
        raise _refused(f"{file}: {error.message}") from None


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{why}: a prompt could stop the server. Its pattern is damaged or hostile; use the original model's tokenizer",
        code="tokenizer_too_slow",
    )


@sandboxed(Limits(cpu_s=30, wall_s=120, memory=2 << 30))
def try_patterns(text: str, patterns: list[str]) -> None:
    tokenizer = Tokenizer.from_str(text)
    for pattern in patterns:
        for probe in probes(pattern):
            began = time.process_time()
            try:
                tokenizer.encode_batch_fast([probe], add_special_tokens=False)
            except BaseException as error:  # a panic of the library is no Exception
                raise InvalidRequest(f"{pattern[:200]!r} fails on {probe[:8]!r}…: {error}") from None
            if (took := time.process_time() - began) > _PROBE_S:
                raise InvalidRequest(
                    f"{pattern[:200]!r} takes {took:.1f} s for {len(probe)} characters of {probe[:8]!r}…"
                )
