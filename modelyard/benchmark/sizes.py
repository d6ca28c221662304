"""How many words make a wanted number of tokens, where nobody here knows the tokenizer: guessed, then learned. Pure."""

from __future__ import annotations

from modelyard.benchmark.workload import Ask

_SLOPE = 1.5  # tokens a word, of texts like ours
_STEADY = 4  # samples after which one more moves it by a quarter of what it was wrong


class WordSizes:
    """Learns from what the server counts of first prompts, which hold more than our words: templates, system prompts.

    Of one length there is one error to find; whether the words or what is around them cause it does not matter.
    """

    def __init__(self) -> None:
        self._around = 0.0  # tokens beyond those that the words are taken for
        self._samples = self._words = self._tokens = 0

    def first(self, ask: Ask) -> str:
        """What begins a conversation, so that all of it is as long as wanted."""
        return ask.cut((ask.tokens - self._around) / _SLOPE)

    def more(self, ask: Ask) -> str:
        """What comes later in one: words alone."""
        return ask.cut(ask.tokens * self._words / self._tokens if self._tokens else ask.tokens / _SLOPE)

    def learn(self, text: str, prompt_tokens: int) -> None:
        """Of a prompt with nothing before it; 0 where the server did not tell."""
        if not prompt_tokens:
            return
        words = len(text.split())
        self._samples += 1
        self._words += words
        self._tokens += prompt_tokens
        self._around += (prompt_tokens - _SLOPE * words - self._around) / min(self._samples, _STEADY)
