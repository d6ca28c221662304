"""What was seen of one answer, and of a round of them. Pure: times come in from outside."""

from __future__ import annotations

from msgspec import Struct


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer as its reader saw it. Seconds since it was asked for, `began_s` since its round began.

    `gaps_s` has one value for each token after those that came first: several that come at once share their wait.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    began_s: float = 0.0
    ttft_s: float | None = None  # None: no token came
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    is_counted: bool = False  # nobody told the numbers of tokens: the output's is of pieces that came
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first; None where too few came, or all at once."""
        spent = sum(self.gaps_s)
        return len(self.gaps_s) / spent if spent > 0 else None

    @property
    def evaluated_tokens(self) -> int:
        """Of the prompt: those that no cache had."""
        return max(0, self.prompt_tokens - self.cached_tokens)


class Round(Struct, frozen=True, kw_only=True):
    """Answers that were asked for by `streams` at a time, and how long all of them took together."""

    streams: int
    wall_s: float
    samples: tuple[Sample, ...]

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]


class Arrivals:
    """Tokens noted as they come; `sample` says what it came to."""

    def __init__(self, asked_at: float) -> None:
        self._asked = self._last = asked_at
        self._ttft: float | None = None
        self._gaps: list[float] = []
        self.tokens = 0

    def add(self, at: float, tokens: int = 1) -> None:
        if tokens < 1:
            return
        if self._ttft is None:
            self._ttft = at - self._asked
        else:
            self._gaps += [(at - self._last) / tokens] * tokens
        self._last = at
        self.tokens += tokens

    def sample(
        self,
        at: float,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int | None = None,
        error: str | None = None,
    ) -> Sample:
        """`output_tokens` as the server has told them. Where they are others than came one by one (a piece of several
        tokens), each piece is taken to have held the same number of them."""
        told = output_tokens is not None
        share = self.tokens / output_tokens if output_tokens else 1.0
        return Sample(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens if output_tokens is not None else self.tokens,
            ttft_s=self._ttft,
            total_s=at - self._asked,
            gaps_s=tuple(gap * share for gap in self._gaps),
            is_counted=not told,
            error=error,
        )
