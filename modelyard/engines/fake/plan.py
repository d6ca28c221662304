"""From a rule's steps to what a text job does: token ids to say, waits, endings. Compiled once a rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.fake.dialects import FormatWriter, Segment
from modelyard.engines.fake.script import ScriptStep


class Say(Struct, frozen=True):
    ids: list[int]


class Wait(Struct, frozen=True):
    seconds: float


class Prefill(Struct, frozen=True):
    seconds: float
    reports: int


class Ending(Struct, frozen=True):
    """The job fails or the engine dies, as the step says."""

    step: ScriptStep


class Repeat(Struct, frozen=True):
    times: int
    deeds: tuple[Deed, ...]


class Hang(Struct, frozen=True):
    pass


Deed = Say | Wait | Prefill | Ending | Repeat | Hang


def walk(deeds: Iterable[Deed]) -> Iterator[Deed]:
    """Repeats unrolled as they are reached: a script may repeat a million times."""
    for deed in deeds:
        if isinstance(deed, Repeat):
            for _ in range(deed.times):
                yield from walk(deed.deeds)
        else:
            yield deed


class Compiler:
    def __init__(self, vocab: Tokenizer) -> None:
        self._vocab = vocab
        self._filler = filler(vocab)

    def compile(self, steps: Sequence[ScriptStep], writer: FormatWriter) -> tuple[Deed, ...]:
        deeds = self._steps(steps, writer)
        return tuple(joined([*deeds, Say(self._ids(writer.end()))]))

    def _steps(self, steps: Sequence[ScriptStep], writer: FormatWriter) -> list[Deed]:
        return [deed for step in steps for deed in self._step(step, writer)]

    def _step(self, step: ScriptStep, writer: FormatWriter) -> list[Deed]:
        if step.repeat is not None:
            return self._repeat(step, step.repeat, writer)
        if step.delay is not None:
            return [Wait(step.delay)]
        if step.prefill is not None:
            return [Prefill(step.prefill, step.progress)]
        if step.hang is not None:
            return [Hang()] if step.hang else []
        if step.fail is not None or step.die is not None:
            return [Ending(step)]
        return [Say(self._said(step, writer))]

    def _said(self, step: ScriptStep, writer: FormatWriter) -> list[int]:
        if step.raw is not None:
            return self._vocab.encode(step.raw)
        if step.tokens is not None:
            return self._ids(writer.text("")) + words(self._filler, step.tokens)
        if step.think is not None:
            return self._ids(writer.think(step.think))
        if step.call is not None:
            return self._ids(writer.calls(step.calls))
        return self._ids(writer.text(step.text or ""))

    def _repeat(self, step: ScriptStep, times: int, writer: FormatWriter) -> list[Deed]:
        """The first round may open what the later ones only go on with, so it is compiled apart."""
        if times == 0:
            return []
        first = self._steps(step.steps, writer)
        return first if times == 1 else [*first, Repeat(times - 1, tuple(self._steps(step.steps, writer)))]

    def _ids(self, segments: Iterable[Segment]) -> list[int]:
        encode, plain = self._vocab.encode, self._vocab.encode_plain
        return [token for text, special in segments if text for token in (encode(text) if special else plain(text))]


def joined(deeds: Iterable[Deed]) -> list[Deed]:
    """Neighbouring words as one, so that a job without delays speaks in one go."""
    out: list[Deed] = []
    for deed in deeds:
        if isinstance(deed, Say) and out and isinstance(last := out[-1], Say):
            out[-1] = Say(last.ids + deed.ids)
        elif not isinstance(deed, Say) or deed.ids:
            out.append(deed)
    return out


def filler(vocab: Tokenizer) -> list[int]:
    """Tokens that are one whole word each; where a vocabulary has none, whatever it makes of one."""
    found = [token for token in range(min(vocab.size, 4096)) if _is_word(vocab.token_bytes(token))]
    return found[:97] or vocab.encode_plain(" word")


def _is_word(spelling: bytes) -> bool:
    return len(spelling) > 3 and spelling[:1] == b" " and spelling[1:].isalpha() and spelling[1:].islower()


def words(filler: list[int], count: int) -> list[int]:
    return (filler * (count // len(filler) + 1))[:count]
