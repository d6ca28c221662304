"""llama.cpp's sampler chain for a request, and which requests need it.

A top_k comes first and leaves some dozens of tokens, so its chain gets these alone (`top_k_chain`): the token is the
one that it would draw from all. The samplers of `whole_chain` take a list of the whole vocabulary, and some sort it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
from msgspec.structs import replace

from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.binding import LogitBias, lib, short, waiting

PENALTY_WINDOW = 64  # tokens that penalties look back at
# llama.cpp's order
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
NO_PENALTIES = (1.0, 0.0, 0.0)
_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
_MAX_DRY_SAMPLERS = 8

MIN_TEMPERATURE = 1e-6  # below it only overflows change


class DrySamplers:
    """The DRY samplers of one model. Creating one takes long, copying it does not: those that were used last are kept.

    `prepare` creates one on another thread than the engine's, which then copies it.
    """

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._created: dict[tuple[Any, ...], int] = {}  # the most recently used last
        self._lock = Lock()  # never held while a sampler is created: the engine's thread must not wait for that

    def prepare(self, s: Sampling, window: int) -> None:
        if s.dry_multiplier:
            short.sampler_free(self.copy(s, window))

    def copy(self, s: Sampling, window: int) -> int:
        base, allowed = _value(s.dry_base, 1.75), _value(s.dry_allowed_length, 2)
        settings = s.dry_multiplier, base, allowed, _dry_window(s, window)
        breakers = _SEQUENCE_BREAKERS if s.dry_sequence_breakers is None else s.dry_sequence_breakers
        with self._lock:
            created = self._created.pop((*settings, breakers), None)
            if created is not None:
                self._created[(*settings, breakers)] = created
                return int(short.sampler_clone(created))
        words = (ctypes.c_char_p * len(breakers))(*(word.encode("utf-8", "replace") for word in breakers))
        created = int(waiting.sampler_init_dry(self._vocab, *settings, words, len(breakers)))
        copied = int(short.sampler_clone(created))
        with self._lock:
            if (duplicate := self._created.pop((*settings, breakers), None)) is not None:
                short.sampler_free(duplicate)
            self._created[(*settings, breakers)] = created
            if len(self._created) > _MAX_DRY_SAMPLERS:
                short.sampler_free(self._created.pop(next(iter(self._created))))
        return copied

    def close(self) -> None:
        with self._lock:
            for sampler in self._created.values():
                short.sampler_free(sampler)
            self._created.clear()


def create_chain(samplers: Iterable[int]) -> int:
    """It owns its samplers; free it once."""
    chain: int = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers:
        short.sampler_chain_add(chain, sampler)
    return chain


def whole_chain(s: Sampling, dry: DrySamplers, n_vocab: int, window: int, seed: int, prompt: Any) -> int:
    """For all logits of a row: every sampler that the request sets."""
    chain = create_chain(_samplers(s, dry, n_vocab, window, seed))
    lookback = max(
        0 if penalty_strengths(s) == NO_PENALTIES else penalty_window(s, window),
        _dry_window(s, window) if s.dry_multiplier else 0,
    )
    if lookback:
        for token in np.asarray(prompt, np.int32)[-lookback:].tolist():
            short.sampler_accept(chain, token)
    return chain


def _samplers(s: Sampling, dry: DrySamplers, n_vocab: int, window: int, seed: int) -> Iterator[Any]:
    """In llama.cpp's order, or in the request's. The bias comes first, and what chooses a token last."""
    if s.logit_bias:
        pairs = [LogitBias(token, bias) for token, bias in s.logit_bias.items() if 0 <= token < n_vocab]
        biases = (LogitBias * len(pairs))(*pairs)
        yield short.sampler_init_logit_bias(n_vocab, len(pairs), ctypes.addressof(biases))
    chooses = is_greedy(s) or bool(s.mirostat)
    for name in SAMPLERS if s.samplers is None else s.samplers:
        if name == "penalties" and (strengths := penalty_strengths(s)) != NO_PENALTIES:
            yield short.sampler_init_penalties(n_vocab, penalty_window(s, window), *strengths)
        elif name == "dry" and s.dry_multiplier:
            yield dry.copy(s, window)
        elif name == "temperature" and not is_greedy(s):
            yield _temperature(s)
        elif not chooses and (truncation := _truncation(name, s, seed)) is not None:
            yield truncation
    if is_greedy(s):
        yield short.sampler_init_greedy()
    elif s.mirostat:
        yield _mirostat(s, n_vocab, seed)
    elif _is_adaptive(s):
        yield short.sampler_init_adaptive_p(s.adaptive_target, _value(s.adaptive_decay, 0.9), seed)
    else:
        yield short.sampler_init_dist(seed)


def _mirostat(s: Sampling, n_vocab: int, seed: int) -> Any:
    tau, eta = _value(s.mirostat_tau, 5.0), _value(s.mirostat_eta, 0.1)
    if s.mirostat == 1:
        return short.sampler_init_mirostat(n_vocab, seed, tau, eta, 100)
    return short.sampler_init_mirostat_v2(seed, tau, eta)


def top_k_chain(s: Sampling, seed: int) -> int:
    """For the top tokens of a row, in any order; the first sampler is the top_k."""
    return create_chain(_top_k_samplers(s, seed))


def _top_k_samplers(s: Sampling, seed: int) -> Iterator[Any]:
    for name in ("top_k", "top_p", "min_p"):
        if (truncation := _truncation(name, s, seed)) is not None:
            yield truncation
    yield short.sampler_init_temp(max(_value(s.temperature, 1.0), MIN_TEMPERATURE))
    yield short.sampler_init_dist(seed)


def _temperature(s: Sampling) -> Any:
    temperature = _value(s.temperature, 1.0)
    if not s.dynatemp_range or s.mirostat:
        return short.sampler_init_temp(temperature)
    return short.sampler_init_temp_ext(temperature, s.dynatemp_range, _value(s.dynatemp_exponent, 1.0))


def _truncation(name: str, s: Sampling, seed: int) -> Any | None:
    """The sampler of that name, if the request sets its value."""
    if name == "top_n_sigma" and s.top_n_sigma is not None and s.top_n_sigma > 0:
        return short.sampler_init_top_n_sigma(s.top_n_sigma)
    if name == "top_k" and s.top_k is not None and s.top_k > 0:
        return short.sampler_init_top_k(s.top_k)
    if name == "typ_p" and s.typical_p is not None and s.typical_p < 1:
        return short.sampler_init_typical(s.typical_p, 1)
    if name == "top_p" and s.top_p is not None and s.top_p < 1:
        return short.sampler_init_top_p(s.top_p, 1)
    if name == "min_p" and s.min_p:
        return short.sampler_init_min_p(s.min_p, 1)
    if name == "xtc" and s.xtc_probability:
        return short.sampler_init_xtc(s.xtc_probability, _value(s.xtc_threshold, 0.1), 1, seed)
    return None


# sampler → the values without which it does nothing
_VALUES = {
    "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "temperature": ("temperature", "dynatemp_range"),
    "adaptive_p": ("adaptive_target",),
}


def with_named_samplers(s: Sampling) -> Sampling:
    """Without the values of samplers that `samplers` does not name."""
    if s.samplers is None:
        return s
    unused = {value: None for name, values in _VALUES.items() if name not in s.samplers for value in values}
    if s.temperature is not None and s.temperature <= 0:
        unused.pop("temperature", None)  # the most likely token, as without any sampler
    return replace(s, **unused)


def is_greedy(s: Sampling) -> bool:
    return s.top_k == 1 or (s.temperature is not None and s.temperature <= 0)


def _is_adaptive(s: Sampling) -> bool:
    return s.adaptive_target is not None and s.adaptive_target >= 0


def is_supported_by_numpy(s: Sampling) -> bool:
    if s.samplers is not None and not _is_usual_order(s.samplers):
        return False
    if _is_adaptive(s) or s.dynatemp_range or (s.top_n_sigma is not None and s.top_n_sigma > 0):
        return False
    return not (s.mirostat or s.xtc_probability or (s.typical_p is not None and s.typical_p < 1))


def _is_usual_order(samplers: Sequence[str]) -> bool:
    places = [SAMPLERS.index(name) for name in samplers if name in SAMPLERS]
    return places == sorted(places)


def penalty_window(s: Sampling, window: int) -> int:
    last_n = PENALTY_WINDOW if s.repeat_last_n is None else s.repeat_last_n
    return window if last_n < 0 else last_n


def penalty_strengths(s: Sampling) -> tuple[float, float, float]:
    return s.repetition_penalty or 1.0, s.frequency_penalty or 0.0, s.presence_penalty or 0.0


def _dry_window(s: Sampling, window: int) -> int:
    last_n = s.dry_penalty_last_n
    return window if last_n is None or last_n < 0 else last_n  # a negative number turns llama.cpp's DRY off


def _value(value: float | None, default: float) -> float:
    return default if value is None else value
