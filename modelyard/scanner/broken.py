"""What is left of a call that broke after its first arguments were sent: rubble between markers, else text.

Between markers everything up to the closing one, or to the next of any kind, belongs to the broken call and is not
shown. Where nothing stands around calls, nobody can say where a broken one ends, and nothing may be lost: it ends at
the first character that could not be sent on, and all from there is text. Only inside of the brackets that it left open
does no other call begin. (A word that a limit cut off is no text, but the end of the call that it was cut from.)
"""

from __future__ import annotations

from collections.abc import Callable

from modelyard.scanner.lexer import Alphabet, Steps, Tape


def skip(tape: Tape, letters: Alphabet, close: tuple[str, ...]) -> Steps[str | None]:
    """The rest of a broken call, up to its end or the next marker of any kind."""
    while (found := letters.find(tape)) is None or found.group() in letters.naked:
        if found:
            tape.at = found.end()
            continue
        tape.at = letters.hold(tape)
        if tape.ended:
            tape.at = len(tape.text)
            return None
        yield
    tape.at = found.end() if found.group() in map(tape.mark, close) else found.start()
    return None


def as_text(tape: Tape, letters: Alphabet, show: Callable[[int], None], depth: int) -> Steps[str | None]:
    """The rest of a broken call that left so many brackets open; `show` gives the tape up to there as text."""
    while True:
        found = letters.find(tape)
        is_naked = found is not None and found.group() in letters.naked
        end = len(tape.text) if tape.ended else letters.hold(tape)
        if found:
            end = found.end() if is_naked else found.start()
        end, depth = _balance(tape.text, tape.at, end, depth)
        show(end)
        if depth <= 0 or (found and not is_naked) or (tape.ended and not found):
            return None
        if not found:
            yield


def _balance(text: str, at: int, end: int, depth: int) -> tuple[int, int]:
    """Where between `at` and `end` so many open brackets are closed, and how many are still open there."""
    for place in range(at, end):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth <= 0:
            return place + 1, 0
    return end, depth
