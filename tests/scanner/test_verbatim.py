from __future__ import annotations

from collections.abc import Sequence

import pytest

from modelyard.scanner.lexer import Tape
from modelyard.scanner.verbatim import verbatim


def _read(chunks: Sequence[str], ends: tuple[str, ...]) -> tuple[list[str], str, str]:
    """What was said after each chunk, which end it was, and what is left."""
    tape, said = Tape({}), [""]

    def say(text: str) -> None:
        said[-1] += text

    steps = verbatim(tape, ends, say)
    for chunk in chunks:
        tape.push(chunk)
        try:
            next(steps)
        except StopIteration as over:
            return said, over.value, tape.text[tape.at :]
        said.append("")
    tape.ended = True
    with pytest.raises(StopIteration) as ended:
        next(steps)
    return said, ended.value.value, tape.text[tape.at :]


def test_everything_before_the_end_is_said_and_the_end_stays() -> None:
    assert _read(["a\n b</x>c"], ("</x>",)) == (["a\n b"], "</x>", "</x>c")


def test_only_what_may_become_the_end_waits() -> None:
    assert _read(["a <", "/y> </", "x>"], ("</x>",)) == (["a ", "</y> ", ""], "</x>", "</x>")


def test_the_first_of_several_ends_wins() -> None:
    assert _read(["a|b;c"], (";", "|")) == (["a"], "|", "|b;c")


def test_without_an_end_everything_is_said() -> None:
    assert _read(["ab</"], ("</x>",)) == (["ab", "</"], "", "")
