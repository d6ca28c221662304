"""Steps compiled to deeds."""

from modelyard.engines.fake.dialects import format_writer
from modelyard.engines.fake.plan import Compiler, Hang, Prefill, Repeat, Say, Wait, filler, walk, words
from modelyard.engines.fake.script import ScriptStep
from tests.engines.fake.stage import vocabulary


def compile_steps(*steps: ScriptStep) -> list[object]:
    return list(Compiler(vocabulary()).compile(steps, format_writer("hermes")))


def test_neighbouring_words_are_said_in_one_go() -> None:
    (say,) = compile_steps(ScriptStep(text="a"), ScriptStep(think="b"), ScriptStep(tokens=3))
    assert isinstance(say, Say)


def test_waits_stay_between_words() -> None:
    kinds = [
        type(d)
        for d in compile_steps(
            ScriptStep(prefill=1, progress=2), ScriptStep(text="a"), ScriptStep(delay=1), ScriptStep(hang=True)
        )
    ]
    assert kinds == [Prefill, Say, Wait, Hang]


def test_repeats_are_unrolled_only_when_played() -> None:
    deeds = compile_steps(ScriptStep(repeat=10**12, steps=(ScriptStep(text="a"),)))
    assert [type(d) for d in deeds] == [Say, Repeat]
    played = walk(deeds)
    assert [type(next(played)) for _ in range(5)] == [Say] * 5


def test_filler_words_are_one_token_each_and_survive_a_round_trip() -> None:
    made = words(filler(vocabulary()), 500)
    assert len(made) == 500
    text = vocabulary().decode(made)
    assert len(text.split()) == 500
