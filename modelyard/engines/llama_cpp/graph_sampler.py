"""Samples in llama.cpp's graph, on an NVIDIA GPU, while all requests of a context set the same temperature and nothing
else, not even a seed.

The GPU draws the token of each row, and only tokens cross to the CPU. If one row of a step needs its logits on the CPU,
those of all cross, and sampling some in the graph costs more than it saves: so it samples all jobs or none. Setting or
removing samplers makes llama.cpp reserve its graphs again, which takes as long as three to six steps: so all sequences
get theirs at once, after some requests in a row that are alike, and keep them until another request comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from modelyard.core.errors import Internal
from modelyard.engines.llama_cpp.binding import short
from modelyard.engines.llama_cpp.sampler_chain import create_chain
from modelyard.libllama import llama_sampler_backend_apply, llama_sampler_backend_init, llama_sampler_i

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp draws one
_FEWEST, _MOST = 16, 1024  # requests in a row that are alike, before the graph samples
MAX_SEQUENCES = 32  # of a context; more were not measured


class GraphSampler:
    """The samplers of a context: of all its sequences, or none. Each is a chain of llama.cpp's samplers for the
    temperature and the draw, and one of ours.

    llama.cpp copies to the CPU what the last sampler of a chain leaves of a row, also its logits and probabilities.
    Ours drops them. It is called when a graph is built, not when it is computed.
    """

    def __init__(self, context: Any, sequences: int, *, accepts: bool, has_memory: Callable[[], bool]) -> None:
        """With `accepts` the next random number is drawn when a token is accepted: so llama.cpp samples several rows of
        a sequence in one decode."""
        self._context, self._sequences = context, sequences
        self._accepts, self._has_memory = accepts, has_memory
        self._chains: list[int] = []  # by sequence, while the graph samples
        self._is_reached = False
        self._row_dropper = llama_sampler_i(  # C keeps its address
            backend_init=llama_sampler_backend_init(self._init), backend_apply=llama_sampler_backend_apply(_drop_row)
        )
        self._temperature: float | None = None  # of the last request
        self._alike = 0  # requests in a row with it
        self._needed = _FEWEST  # so many, before the graph samples
        self._sampled = 0  # requests since it does

    @property
    def is_active(self) -> bool:
        """False: the CPU samples."""
        return bool(self._chains)

    def admit(self, temperature: float | None, running: Iterable[float | None]) -> None:
        """Decides with each new request who samples all jobs from now on. A temperature is None if the graph cannot
        sample the request; `running` are those of the other jobs. No decode may be in flight."""
        self._alike = self._alike + 1 if temperature == self._temperature else 1
        self._temperature = temperature
        if self._chains:
            self._sampled += 1
            if self._alike == 1:
                self._stop()
        elif temperature is not None and self._is_worth_it(temperature, running):
            self.start(temperature)

    def start(self, temperature: float) -> None:
        self._chains, self._sampled = [self._chain(temperature) for _ in range(self._sequences)], 0
        if not all(self._attach(sequence, chain) for sequence, chain in enumerate(self._chains)):
            self.detach()
            self._needed = sys.maxsize  # this device cannot

    def sample(self, sequence: int, row: int) -> int:
        """The token that the last decode drew for that row. Call it for rows of a sequence in their order, and only for
        those whose tokens are used."""
        token: int = short.get_sampled_token_ith(self._context, row)
        if token < 0:
            raise Internal("llama.cpp sampled no token in its graph")
        if self._accepts:
            short.sampler_accept(self._chains[sequence], token)
        return token

    def detach(self) -> None:
        for sequence in range(self._sequences):
            short.set_sampler(self._context, sequence, None)
        self.close()

    def close(self) -> None:
        """When they are detached, or the context is freed."""
        for chain in self._chains:
            short.sampler_free(chain)
        self._chains = []

    def _is_worth_it(self, temperature: float, running: Iterable[float | None]) -> bool:
        return self._alike >= self._needed and all(other == temperature for other in running) and self._has_memory()

    def _stop(self) -> None:
        """After few requests it was not worth it: next time more must be alike before."""
        self.detach()
        self._needed = min(2 * self._needed, _MOST) if self._sampled < _FEWEST else _FEWEST

    def _chain(self, temperature: float) -> int:
        draws = short.sampler_init_temp(temperature), short.sampler_init_dist(_RANDOM_SEED)
        return create_chain((*draws, short.sampler_init(self._row_dropper, None)))

    def _attach(self, sequence: int, chain: int) -> bool:
        """Whether the graph will draw the tokens. llama.cpp leaves what a device cannot compute, and all that follows,
        to the CPU, and does not say so."""
        self._is_reached = False
        return bool(short.set_sampler(self._context, sequence, chain)) and self._is_reached

    def _init(self, *_: Any) -> bool:
        self._is_reached = True
        return True


def _drop_row(_sampler: Any, _context: Any, _graph: Any, data: Any) -> None:
    data.contents.logits = data.contents.probs = None
