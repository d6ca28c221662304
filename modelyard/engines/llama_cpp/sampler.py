"""What a request adds to the logits of single tokens or takes from them: biases, and penalties for what was just said.

llama.cpp looks each token of the vocabulary up in a table of those that were said. Here the few that are meant are
changed where they lie, for as long as a token is chosen, and put back: whoever looks next finds the row as it was.
"""

from __future__ import annotations

import ctypes
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.core.engine import IdLogprob
from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.binding import LogitBias, lib, short
from modelyard.engines.llama_cpp.numpy_sampler import NumpySampler

Row = npt.NDArray[np.float32]
Change = tuple[npt.NDArray[np.intp], Row]  # tokens, and logits for them

PENALTY_WINDOW = 64  # tokens that penalties look back at


class Penalties:
    """`recent`: what was said before, of which the last count."""

    def __init__(self, repetition: float, frequency: float, presence: float, recent: Sequence[int] | Any) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._recent: deque[int] = deque((int(token) for token in recent[-PENALTY_WINDOW:]), PENALTY_WINDOW)

    def change(self, row: Row) -> Change:
        ids, counts = np.unique(np.array(self._recent, np.intp), return_counts=True)
        found = row[ids]
        # To divide a negative logit would make it likelier.
        found = np.where(found <= 0, found * self._repetition, found / self._repetition)
        return ids, (found - counts * self._frequency - self._presence).astype(np.float32)

    def accept(self, token: int) -> None:
        self._recent.append(token)


class LogitProcessor:
    def __init__(self, biases: Mapping[int, float], penalties: Penalties | None) -> None:
        self._biased = np.fromiter(biases, np.intp, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._penalties = penalties

    def pick(self, row: Row, choose: Callable[[Row], int]) -> int:
        before = row[self._biased]
        row[self._biased] = before + self._biases
        try:
            return choose(row) if self._penalties is None else self._penalised(self._penalties, row, choose)
        finally:
            row[self._biased] = before

    def _penalised(self, penalties: Penalties, row: Row, choose: Callable[[Row], int]) -> int:
        ids, logits = penalties.change(row)
        before = row[ids]
        row[ids] = logits
        try:
            token = choose(row)
        finally:
            row[ids] = before
        penalties.accept(token)
        return token


# A request's sampling settings as what chooses its tokens, and log probabilities of the raw distribution.

_NONE = (1.0, 0.0, 0.0)  # penalties that change nothing
_BREAKERS = ("\n", ":", '"', "*")


class JobSampler:
    """What chooses a job's tokens: numpy where it can, else samplers in C. It owns memory outside Python: `close` it.

    `prompt` is what the job begins with: penalties and DRY look back into it, as those of llama.cpp's own server do.
    """

    def __init__(self, sampling: Sampling, vocab: Any, n_vocab: int, window: int, prompt: Any = ()) -> None:
        self._window, self._n_vocab = window, n_vocab
        self._keep: list[Any] = []  # what C points to must live as long as the chain
        self._raw: int | None = None
        seed = (sampling.seed if sampling.seed is not None else secrets.randbits(32)) & 0xFFFFFFFF
        self._is_greedy = _is_greedy(sampling)
        self._tilt = _tilt(sampling, n_vocab, prompt)
        self._dice: NumpySampler | None = None
        if sampling.dry_multiplier or not (self._is_greedy or _is_usual(sampling)):
            self._raw = self._made(sampling, vocab, seed, prompt)
        elif not self._is_greedy:
            self._dice = NumpySampler(sampling, seed)

    @property
    def takes_the_best(self) -> bool:
        """Of the row's logits as they are."""
        return self._is_greedy and self._tilt is None and self._raw is None

    @property
    def dice(self) -> NumpySampler | None:
        """Where they alone decide, on the row's logits as they are."""
        return self._dice if self._tilt is None else None

    def _made(self, sampling: Sampling, vocab: Any, seed: int, prompt: Any) -> int:
        raw: int = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in self._samplers(sampling, vocab, self._n_vocab, seed):
            short.sampler_chain_add(raw, sampler)
        if back := _looks_back(sampling, self._window):
            for token in np.asarray(prompt, np.int32)[-back:].tolist():
                short.sampler_accept(raw, token)
        return raw

    def pick(self, context: Any, row: int, logits: npt.NDArray[np.float32] | None = None) -> int:
        """The next token after that row; the chain remembers it. `logits`: the row's, where somebody has them."""
        if self._raw is not None:
            token: int = short.sampler_sample(self._raw, context, row)
            return token
        if logits is None:
            logits = logits_row(context, row, self._n_vocab)
        return self._choose(logits) if self._tilt is None else self._tilt.pick(logits, self._choose)

    def _choose(self, logits: npt.NDArray[np.float32]) -> int:
        return int(logits.argmax()) if self._dice is None else self._dice.pick(logits)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            short.sampler_free(raw)

    def _samplers(self, s: Sampling, vocab: Any, n_vocab: int, seed: int) -> list[Any]:
        chain = [*self._biases(s, n_vocab), *_penalties(s, n_vocab), *self._dry(s, vocab)]
        temperature = 1.0 if s.temperature is None else s.temperature
        if _is_greedy(s):
            return [*chain, short.sampler_init_greedy()]
        if s.mirostat:
            return [*chain, short.sampler_init_temp(temperature), _mirostat(s, n_vocab, seed)]
        return [*chain, *_truncations(s, seed), short.sampler_init_temp(temperature), short.sampler_init_dist(seed)]

    def _biases(self, s: Sampling, n_vocab: int) -> list[Any]:
        if not s.logit_bias:
            return []
        pairs = [LogitBias(token, bias) for token, bias in s.logit_bias.items() if 0 <= token < n_vocab]
        biases = (LogitBias * len(pairs))(*pairs)
        self._keep.append(biases)
        return [short.sampler_init_logit_bias(n_vocab, len(pairs), ctypes.addressof(biases))]

    def _dry(self, s: Sampling, vocab: Any) -> list[Any]:
        if not s.dry_multiplier:
            return []
        words = [word.encode() for word in s.dry_sequence_breakers or _BREAKERS]
        breakers = (ctypes.c_char_p * len(words))(*words)
        self._keep.append(breakers)
        base = 1.75 if s.dry_base is None else s.dry_base
        allowed = 2 if s.dry_allowed_length is None else s.dry_allowed_length
        back = _dry_window(s, self._window)
        return [short.sampler_init_dry(vocab, s.dry_multiplier, base, allowed, back, breakers, len(words))]


def _is_greedy(s: Sampling) -> bool:
    return s.top_k == 1 or (s.temperature is not None and s.temperature <= 0)


def _is_usual(s: Sampling) -> bool:
    """It cuts by nothing but top_k, top_p and min_p."""
    return not (s.mirostat or s.xtc_probability or (s.typical_p is not None and s.typical_p < 1))


def _tilt(s: Sampling, n_vocab: int, prompt: Any) -> LogitProcessor | None:
    biases = {token: bias for token, bias in (s.logit_bias or {}).items() if 0 <= token < n_vocab}
    penalties = None if _strengths(s) == _NONE else Penalties(*_strengths(s), prompt)
    return LogitProcessor(biases, penalties) if biases or penalties is not None else None


def _penalties(s: Sampling, n_vocab: int) -> list[Any]:
    strengths = _strengths(s)
    return [] if strengths == _NONE else [short.sampler_init_penalties(n_vocab, PENALTY_WINDOW, *strengths)]


def _strengths(s: Sampling) -> tuple[float, float, float]:
    return s.repetition_penalty or 1.0, s.frequency_penalty or 0.0, s.presence_penalty or 0.0


def _dry_window(s: Sampling, window: int) -> int:
    asked = s.dry_penalty_last_n
    return window if asked is None or asked < 0 else asked  # to llama.cpp a negative number means never


def _looks_back(s: Sampling, window: int) -> int:
    """How many tokens of the past count."""
    penalties = 0 if _strengths(s) == _NONE else PENALTY_WINDOW
    return max(penalties, _dry_window(s, window) if s.dry_multiplier else 0)


def _truncations(s: Sampling, seed: int) -> list[Any]:
    chain: list[Any] = []
    if s.top_k is not None and s.top_k > 0:
        chain.append(short.sampler_init_top_k(s.top_k))
    if s.typical_p is not None and s.typical_p < 1:
        chain.append(short.sampler_init_typical(s.typical_p, 1))
    if s.top_p is not None and s.top_p < 1:
        chain.append(short.sampler_init_top_p(s.top_p, 1))
    if s.min_p:
        chain.append(short.sampler_init_min_p(s.min_p, 1))
    if s.xtc_probability:
        threshold = 0.1 if s.xtc_threshold is None else s.xtc_threshold
        chain.append(short.sampler_init_xtc(s.xtc_probability, threshold, 1, seed))
    return chain


def _mirostat(s: Sampling, n_vocab: int, seed: int) -> Any:
    tau = 5.0 if s.mirostat_tau is None else s.mirostat_tau
    eta = 0.1 if s.mirostat_eta is None else s.mirostat_eta
    if s.mirostat == 1:
        return short.sampler_init_mirostat(n_vocab, seed, tau, eta, 100)
    return short.sampler_init_mirostat_v2(seed, tau, eta)


def logits_row(context: Any, row: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """A view of the row's logits: valid until the next decode, and writable."""
    return _view(short.get_logits_ith(context, row), n_vocab)


@lru_cache(64)
def logits_rows(address: int, rows: int, n_vocab: int) -> npt.NDArray[np.float32]:
    """A view of all logits of a decode in which every row has some: they lie one behind the other."""
    return _view(address, rows * n_vocab).reshape(rows, n_vocab)


@lru_cache(1024)
def _view(address: int, count: int) -> npt.NDArray[np.float32]:
    """Making one takes longer than to find a maximum in it, and a context's buffer rarely moves."""
    row: Any = (ctypes.c_float * count).from_address(address)
    return np.frombuffer(row, np.float32)


def token_logprob(logits: npt.NDArray[np.float32], token: int, top: int) -> IdLogprob:
    """Of the model's own distribution, before any sampler; take it before a mask changes the logits."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - peak).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top := min(top, len(logits)):
        ids = np.argpartition(logits, -top)[-top:]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), float(logits[i]) - total) for i in ids)
    return IdLogprob(token, float(logits[token]) - total, best)
