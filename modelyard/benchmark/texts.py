"""Texts of our own that prompts are made of: an account of a harbour town, and what an agent's tools would print."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_PEOPLE = ("Marta", "Ilse", "Tomas", "Henrik", "Noor", "Pavel", "Greta", "Samir", "Lotte", "Oskar", "Vera", "Juno")
_PLACES = ("the mill", "the ferry", "the east pier", "the old school", "the customs house", "the rope yard", "the dam")
_THINGS = ("a ledger", "two lanterns", "the spare key", "a crate of lemons", "the tide table", "a torn map", "the bell")
_TIMES = ("before dawn", "after the market", "in the second winter", "on a Thursday", "at low water", "all summer long")

_ACCOUNT = (
    "{who} came to {where} {when} and found {what} where nobody had left it.",
    "Nothing in the town was said twice, so {who} wrote it down and hid the paper near {where}.",
    "The keeper of {where} counted the boats {when}, and the number was never the one in the book.",
    "If the wind turned, {who} said, {what} would have to be carried to {where} by hand.",
    "{who} and {who2} had quarrelled over {what} for so long that neither remembered who had owned it first.",
    "It rained {when}; the gutters of {where} ran over, and the cellar smelled of tar and apples.",
    "A letter for {who2} had waited at {where} since spring, with three stamps and no sender.",
    "What {who} wanted was simple: a dry room, {what}, and somebody who would not ask.",
    "The children made a game of it: one had to reach {where} with {what} and not be seen by {who}.",
    "On the map {where} stood on the wrong bank of the river, which {who} took as a warning.",
    "There were four ways to mend a net, and {who2} knew five, the last of them only {when}.",
    "They paid {who} in salt and stories, and {when} in nothing at all.",
    "A stranger asked the price of {what}; {who} named a sum so odd that it had to be true.",
    "From the roof of {where} one saw the lighthouse, the quarry, and how far away everything else was.",
    "{who2} kept two clocks, one for trains and one for {who}, and both of them were slow.",
    "Because the bridge was closed {when}, everybody learned how long a short way can be.",
    "The doctor advised rest, {who2} advised soup, and {who} went back to {where} with {what} under one arm.",
    "Somebody had painted the door of {where} green, and from then on it was the green door, whatever its colour.",
    "When the lamps failed {when}, {who} told the way by the sound of the water under {where}.",
    "The council met, agreed that {what} was lost, and adjourned to look for it.",
)
_FILES = (
    "harbour/tides.py",
    "harbour/ledger.py",
    "yard/cranes.py",
    "yard/berths.py",
    "post/letters.py",
    "tests/bells.py",
)
_NAMES = ("depth", "berth", "cargo", "signal", "tide", "moor", "weigh", "ledger", "crane", "pilot", "buoy", "hatch")
_TOOLS = (
    "{file}:{n}: def {name}_of({name2}: int, limit: int = {m}) -> int:",
    "{file}:{n}:     return max(0, {name2} - limit) * {m}",
    "{file}:{n}:     if {name} is None: raise ValueError('no {name} for {name2} {m}')",
    "FAILED {file}::test_{name}_keeps_{name2} - assert {n} == {m}",
    "{n} passed, {m} failed in the {name} suite; the first failure was in {file}",
    "$ grep -rn '{name}' {file} | wc -l\n{n}",
    '{{"{name}": {n}, "{name2}": [{m}, {n}, null], "file": "{file}"}}',
    "-    {name} = {name2} + {n}\n+    {name} = {name2} + {m}",
    "I changed {name} in {file} at line {n}; {name2} still expects {m}, so its test must follow.",
    "TODO({name}): {file} reads {name2} twice, once at line {n} and again at line {m}.",
)


Prose = Callable[[random.Random], Iterator[str]]


def account(dice: random.Random) -> Iterator[str]:
    """Sentences without end."""
    while True:
        who, who2 = dice.sample(_PEOPLE, 2)
        slots = {"where": dice.choice(_PLACES), "what": dice.choice(_THINGS), "when": dice.choice(_TIMES)}
        yield dice.choice(_ACCOUNT).format(who=who, who2=who2, **slots)


def tool_output(dice: random.Random) -> Iterator[str]:
    """Lines without end."""
    while True:
        name, name2 = dice.sample(_NAMES, 2)
        slots = {"file": dice.choice(_FILES), "n": dice.randrange(1, 900), "m": dice.randrange(1, 900)}
        yield dice.choice(_TOOLS).format(name=name, name2=name2, **slots)
