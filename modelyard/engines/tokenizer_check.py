"""Whether a Hugging Face tokenizer that nobody vouches for splits every text in bounded time.

Its patterns come with the model's files. Linear ones (`tokenizer/patterns.py`), which all common models have, are
trusted with any text. With all others a child process of the pool splits texts on which such patterns blow up, first;
if it takes too long, the tokenizer is refused. No list of texts is complete, so with one that passes a child splits
each text of a client before this process does, with the same patterns and no vocabulary: a text that passes takes as
long here, in a thread. It costs 5 ms for each text that is not in the token cache.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed
from modelyard.tokenizer.huggingface import Vet, read_text, tokenizer_file, unknown_patterns, without_vocabulary
from modelyard.tokenizer.patterns import probes

_PROBE_S = 0.5  # of CPU time; a common pattern takes 0.02
_TEXT_S, _CHARACTER_S = 0.1, 4e-6  # of CPU time; a common pattern takes a tenth for each character


def check_tokenizer(path: Path) -> Vet | None:
    """Raises if a pattern of the tokenizer at or in this path takes too long. What each text has to pass; None: texts
    pass without it."""
    file = tokenizer_file(path)
    text = read_text(file)
    if unread := unknown_patterns(text, "decoder"):
        raise _refused(f"{file}: the decoder's pattern {unread[0][:200]!r} may take long")
    if not (patterns := unknown_patterns(text, "normalizer", "pre_tokenizer")):
        return None
    try:
        pool.call(try_patterns, text, patterns)
    except Stopped as stopped:
        raise _refused(f"{file}: {stopped.why}") from None
    except InvalidRequest as error:
        raise _refused(f"{file}: {error.message}") from None
    return partial(_vet, without_vocabulary(text))


def _vet(patterns: str, text: str, is_plain: bool) -> None:
    try:
        pool.call(try_text, patterns, text, is_plain)
    except Stopped as stopped:
        raise _too_slow(stopped.why) from None


def _too_slow(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's tokenizer cannot split this text: {why}. Its pattern is unusual; change the text, or use another "
        "model",
        code="tokenizer_too_slow",
    )


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


@sandboxed(Limits(cpu_s=5, wall_s=20, memory=1 << 30))
def try_text(patterns: str, text: str, is_plain: bool) -> None:
    """`is_plain`: as `PlainEncoder`, which looks for no added tokens and holds the GIL."""
    tokenizer, began = Tokenizer.from_str(patterns), time.process_time()
    try:
        if not is_plain:
            tokenizer.encode_batch_fast([text], add_special_tokens=False)
        elif tokenizer.pre_tokenizer is not None:
            normalizer = tokenizer.normalizer
            tokenizer.pre_tokenizer.pre_tokenize_str(text if normalizer is None else normalizer.normalize_str(text))
    except BaseException as error:  # a panic of the library is no Exception
        raise _too_slow(f"its pattern takes too many steps ({error})") from None
    if (took := time.process_time() - began) > _TEXT_S + _CHARACTER_S * len(text):
        raise _too_slow(f"it takes {took:.1f} s for {len(text)} characters")
