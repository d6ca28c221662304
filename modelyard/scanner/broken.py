"""What is left of a call that broke after its first arguments were sent: it ends there, and the rest is text.

Nobody can say what a broken call was to become, and nothing may be lost: it ends at the first character that could not
be sent on, and all from there is text, but no marker. Up to the tag that closes the call, or the next marker of any
kind, that includes the tags which count only inside of calls. Where nothing stands around calls, no other call begins
inside of the brackets that the broken one left open. (A word that a limit cut off is no text, but the end of the call
that it was cut from.)

A member of a list does not take the others with it: what follows its own brackets is read again.
"""

from __future__ import annotations

from collections.abc import Callable

from modelyard.scanner.lexer import Alphabet, Steps, Tape

Show = Callable[[int], None]  # gives the tape up to there as text


def between(
    tape: Tape, letters: Alphabet, close: tuple[str, ...], show: Show, seam: Callable[[], None]
) -> Steps[str | None]:
    """The rest of a broken call that stands between markers; `seam` says that something was dropped."""
    inside, closing = letters.inside(close), tuple(map(tape.mark, close))
    while True:
        found = inside.find(tape)
        show(found.start() if found else len(tape.text) if tape.ended else inside.hold(tape))
        if found is None:
            if tape.ended:
                return None
            yield
        elif letters.stands(tape):
            return None
        else:
            tape.at = found.end()
            seam()
            if found.group() in closing:
                return None


def bracketed(tape: Tape, letters: Alphabet, show: Show, depth: int, *, sent: bool = True) -> Steps[bool]:
    """The rest of a broken call that left so many brackets open. True: they were closed.

    If nothing of it was sent, this may be prose, and a call that begins in it counts.
    """
    while True:
        found = letters.find(tape)
        is_naked = found is not None and found.group() in letters.naked
        end = len(tape.text) if tape.ended else letters.hold(tape)
        if found:
            end = found.end() if is_naked and sent else found.start()
        end, depth = _balance(tape.text, tape.at, end, depth)
        show(end)
        if depth <= 0:
            return True
        if (found and not (is_naked and sent)) or (tape.ended and not found):
            return False
        if not found:
            yield


def _balance(text: str, at: int, end: int, depth: int) -> tuple[int, int]:
    """Where between `at` and `end` so many open brackets are closed, and how many are still open there."""
    for place in range(at, end):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth <= 0:
            return place + 1, 0
    return end, depth
