"""A request's sampling settings as the sampler of its job, and log probabilities of the raw distribution."""

from __future__ import annotations

import ctypes
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from modelyard.core.request import Sampling
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.llama_cpp.batch_sampler import MIN_TEMPERATURE, BatchSampler, NumpySampler, TopKSampler
from modelyard.engines.llama_cpp.binding import LogitBias, lib, short, waiting
from modelyard.engines.llama_cpp.logit_columns import Row

PENALTY_WINDOW = 64  # tokens that penalties look back at
# llama.cpp's order
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_NO_PENALTIES = (1.0, 0.0, 0.0)
_ALL_TOKENS = 1 << 24  # no window is longer
_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
_MAX_DRY_SAMPLERS = 8


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
        breakers = s.dry_sequence_breakers or _SEQUENCE_BREAKERS
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


class JobSampler:
    """Samples a job's tokens: with numpy if possible, else with llama.cpp's sampler chain on all logits.

    `prompt` are the job's first tokens: penalties and DRY look back into it, as in llama-server.
    """

    def __init__(self, sampling: Sampling, dry: DrySamplers, n_vocab: int, window: int, prompt: Any = ()) -> None:
        self._n_vocab = n_vocab
        self._c_arrays: list[Any] = []  # the chain points to them
        self._chain: int | None = None
        self._draw: NumpySampler | TopKSampler | None = None
        self._alone: BatchSampler | None = None  # it alone, once it is needed
        self._processor = logit_processor(_with_named_samplers(sampling), n_vocab, prompt)
        seed = (sampling.seed if sampling.seed is not None else secrets.randbits(32)) & 0xFFFFFFFF
        sampling = _with_named_samplers(sampling)
        if sampling.top_k is not None and sampling.top_k > n_vocab:  # memory is reserved for so many
            sampling = replace(sampling, top_k=n_vocab)
        greedy = _is_greedy(sampling)
        if sampling.dry_multiplier or not (greedy or _is_supported_by_numpy(sampling)):
            self._chain = self._create_chain(sampling, dry, window, seed, prompt)
        elif sampling.top_k and sampling.top_k > 0 and not greedy:
            self._draw = TopKSampler(sampling.top_k, _top_k_samplers(sampling, seed))
        elif not greedy:
            self._draw = NumpySampler(sampling, seed)

    @property
    def is_greedy(self) -> bool:
        """It takes the best token of the unchanged logits."""
        return self._draw is None and self._processor is None and self._chain is None

    @property
    def batched(self) -> NumpySampler | TopKSampler | None:
        """What may sample together with that of other jobs: it alone decides, on the unchanged logits."""
        return self._draw if self._processor is None else None

    @property
    def lone_temperature(self) -> float | None:
        """The temperature, if the request sets nothing else, not even a seed."""
        draw = self._draw
        if self._processor is not None or not isinstance(draw, NumpySampler) or draw.is_seeded or draw.truncates:
            return None
        return draw.temperature

    def logits(self, context: Any, row: int) -> Row:
        return logits_row(context, row, self._n_vocab)

    def sample(self, context: Any, row: int, logits: Row | None = None) -> int:
        """The token after that row of the last decode; penalties count it from now on. `logits`: its row, if known."""
        if self._chain is not None:
            token: int = short.sampler_sample(self._chain, context, row)
            return token
        if logits is None:
            logits = logits_row(context, row, self._n_vocab)
        return self._choose(logits) if self._processor is None else self._processor.sample(logits, self._choose)

    def _choose(self, logits: Row) -> int:
        if self._draw is None:
            return int(logits.argmax())
        if self._alone is None:
            self._alone = BatchSampler([self._draw])
        return self._alone.sample(logits[None])[0]

    def close(self) -> None:
        if isinstance(self._draw, TopKSampler):
            self._draw.close()
        chain, self._chain = self._chain, None
        if chain is not None:
            short.sampler_free(chain)

    # --- llama.cpp's chain --------------------------------------------------------------------------------------------

    def _create_chain(self, s: Sampling, dry: DrySamplers, window: int, seed: int, prompt: Any) -> int:
        chain: int = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in self._samplers(s, dry, window, seed):
            short.sampler_chain_add(chain, sampler)
        lookback = max(
            0 if _penalty_strengths(s) == _NO_PENALTIES else _penalty_window(s, window),
            _dry_window(s, window) if s.dry_multiplier else 0,
        )
        if lookback:
            for token in np.asarray(prompt, np.int32)[-lookback:].tolist():
                short.sampler_accept(chain, token)
        return chain

    def _samplers(self, s: Sampling, dry: DrySamplers, window: int, seed: int) -> Iterator[Any]:
        """In llama.cpp's order, or in the request's. The bias comes first, and what chooses a token last."""
        if s.logit_bias:
            pairs = [LogitBias(token, bias) for token, bias in s.logit_bias.items() if 0 <= token < self._n_vocab]
            biases = (LogitBias * len(pairs))(*pairs)
            self._c_arrays.append(biases)
            yield short.sampler_init_logit_bias(self._n_vocab, len(pairs), ctypes.addressof(biases))
        chooses = _is_greedy(s) or bool(s.mirostat)
        for name in SAMPLERS if s.samplers is None else s.samplers:
            if name == "penalties" and (strengths := _penalty_strengths(s)) != _NO_PENALTIES:
                yield short.sampler_init_penalties(self._n_vocab, _penalty_window(s, window), *strengths)
            elif name == "dry" and s.dry_multiplier:
                yield dry.copy(s, window)
            elif name == "temperature" and not _is_greedy(s):
                yield _temperature(s)
            elif not chooses and (truncation := _truncation(name, s, seed)) is not None:
                yield truncation
        if _is_greedy(s):
            yield short.sampler_init_greedy()
        elif s.mirostat:
            yield self._mirostat(s, seed)
        elif _is_adaptive(s):
            yield short.sampler_init_adaptive_p(s.adaptive_target, _value(s.adaptive_decay, 0.9), seed)
        else:
            yield short.sampler_init_dist(seed)

    def _mirostat(self, s: Sampling, seed: int) -> Any:
        tau, eta = _value(s.mirostat_tau, 5.0), _value(s.mirostat_eta, 0.1)
        if s.mirostat == 1:
            return short.sampler_init_mirostat(self._n_vocab, seed, tau, eta, 100)
        return short.sampler_init_mirostat_v2(seed, tau, eta)


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


def _with_named_samplers(s: Sampling) -> Sampling:
    """Without the values of samplers that `samplers` does not name."""
    if s.samplers is None:
        return s
    unused = {value: None for name, values in _VALUES.items() if name not in s.samplers for value in values}
    if s.temperature is not None and s.temperature <= 0:
        unused.pop("temperature", None)  # the most likely token, as without any sampler
    return replace(s, **unused)


def _is_greedy(s: Sampling) -> bool:
    return s.top_k == 1 or (s.temperature is not None and s.temperature <= 0)


def _is_adaptive(s: Sampling) -> bool:
    return s.adaptive_target is not None and s.adaptive_target >= 0


def _is_supported_by_numpy(s: Sampling) -> bool:
    if s.samplers is not None and not _is_usual_order(s.samplers):
        return False
    if _is_adaptive(s) or s.dynatemp_range or (s.top_n_sigma is not None and s.top_n_sigma > 0):
        return False
    return not (s.mirostat or s.xtc_probability or (s.typical_p is not None and s.typical_p < 1))


def _is_usual_order(samplers: Sequence[str]) -> bool:
    places = [SAMPLERS.index(name) for name in samplers if name in SAMPLERS]
    return places == sorted(places)


def _penalty_window(s: Sampling, window: int) -> int:
    last_n = PENALTY_WINDOW if s.repeat_last_n is None else s.repeat_last_n
    return window if last_n < 0 else last_n


def _penalty_strengths(s: Sampling) -> tuple[float, float, float]:
    return s.repetition_penalty or 1.0, s.frequency_penalty or 0.0, s.presence_penalty or 0.0


def _dry_window(s: Sampling, window: int) -> int:
    last_n = s.dry_penalty_last_n
    return window if last_n is None or last_n < 0 else last_n  # a negative number turns llama.cpp's DRY off


def _value(value: float | None, default: float) -> float:
    return default if value is None else value


# --- logit processors -------------------------------------------------------------------------------------------------


class Penalties:
    """Repetition, frequency and presence penalties for the last tokens."""

    def __init__(
        self,
        repetition: float,
        frequency: float,
        presence: float,
        recent: Sequence[int] | Any,
        window: int = PENALTY_WINDOW,
    ) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self.recent: deque[int] = deque((int(token) for token in recent[max(0, len(recent) - window) :]), window)

    def penalized(self, row: Row) -> tuple[npt.NDArray[np.intp], Row]:
        """The tokens that are penalized, and their new logits."""
        ids, counts = np.unique(np.array(self.recent, np.intp), return_counts=True)
        logits = row[ids]
        # Dividing a negative logit would make the token more likely.
        logits = np.where(logits <= 0, logits * self._repetition, logits / self._repetition)
        return ids, (logits - counts * self._frequency - self._presence).astype(np.float32)


class LogitProcessor:
    """Biases and penalties. It changes the few logits in place while a token is chosen, and restores them.

    llama.cpp looks up each token of the vocabulary in a table of recent ones instead.
    """

    def __init__(self, biases: Mapping[int, float], penalties: Penalties | None) -> None:
        self._biased = np.fromiter(biases, np.intp, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._penalties = penalties

    def sample(self, row: Row, choose: Callable[[Row], int]) -> int:
        before = row[self._biased]
        row[self._biased] = before + self._biases
        try:
            return choose(row) if self._penalties is None else self._sample_penalized(self._penalties, row, choose)
        finally:
            row[self._biased] = before

    def _sample_penalized(self, penalties: Penalties, row: Row, choose: Callable[[Row], int]) -> int:
        ids, logits = penalties.penalized(row)
        before = row[ids]
        row[ids] = logits
        try:
            token = choose(row)
        finally:
            row[ids] = before
        penalties.recent.append(token)
        return token


def logit_processor(s: Sampling, n_vocab: int, prompt: Any) -> LogitProcessor | None:
    biases = {token: bias for token, bias in (s.logit_bias or {}).items() if 0 <= token < n_vocab}
    strengths = _penalty_strengths(s)
    window = _penalty_window(s, _ALL_TOKENS)
    penalties = None if strengths == _NO_PENALTIES or not window else Penalties(*strengths, prompt, window)
    return LogitProcessor(biases, penalties) if biases or penalties is not None else None


# --- logits -----------------------------------------------------------------------------------------------------------


def logits_row(context: Any, row: int, n_vocab: int) -> Row:
    """A writable view of the row's logits, valid until the next decode."""
    return _view(short.get_logits_ith(context, row), n_vocab)


@lru_cache(64)
def logits_rows(address: int, rows: int, n_vocab: int) -> Row:
    """A view of all logits of a decode in which every row has logits: they are contiguous."""
    return _view(address, rows * n_vocab).reshape(rows, n_vocab)


@lru_cache(1024)
def _view(address: int, count: int) -> Row:
    """Creating a view takes longer than finding its maximum, and a context's buffer rarely moves."""
    row: Any = (ctypes.c_float * count).from_address(address)
    return np.frombuffer(row, np.float32)


def token_logprob(logits: Row, token: int, top: int, *, ranked: bool = False) -> IdLogprob:
    """Of the model's own distribution, before any sampler or mask. `ranked`: with its rank among all tokens."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - peak).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top := min(top, len(logits)):
        ids = np.argpartition(logits, -top)[-top:]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), float(logits[i]) - total) for i in ids)
    rank = int((logits > logits[token]).sum()) + 1 if ranked else None
    return IdLogprob(token, float(logits[token]) - total, best, rank)
