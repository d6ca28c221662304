"""The script language."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.core.errors import Overloaded, Unavailable
from modelyard.engines.fake import Options
from modelyard.engines.fake.script import Script, ScriptRule, ScriptStep
from tests.engines.fake.stage import answer


class Talk:
    def __init__(self, user: str, result: str | None = None) -> None:
        self.user, self.result = user, result
        self.tools: dict[str, dict[str, Any]] = {}


def rule(**fields: Any) -> ScriptRule:
    return ScriptRule.model_validate({"steps": [{"text": "x"}]} | fields)


def test_first_rule_that_fits_wins() -> None:
    rules = [rule(when="rain"), rule(when="sun"), rule()]
    script = Script(rules)
    assert script.choose(Talk("will the sun shine")) is rules[1]
    assert script.choose(Talk("rain or sun")) is rules[0]
    assert script.choose(Talk("neither")) is rules[2]


def test_no_rule_may_fit() -> None:
    assert Script([rule(when="rain")]).choose(Talk("sun")) is None


def test_turn_counts_the_matches_of_one_pattern_in_one_session() -> None:
    first, second = rule(when="go", turn=1), rule(when="go", turn=2)
    script = Script([first, second])
    assert script.choose(Talk("go"), "a") is first
    assert script.choose(Talk("go"), "b") is first
    assert script.choose(Talk("stay"), "a") is None
    assert script.choose(Talk("go"), "a") is second
    assert script.choose(Talk("go"), "a") is None


def test_result_looks_at_the_tools_answer() -> None:
    script = Script([rule(result="sunny")])
    assert script.choose(Talk("x", "it is sunny")) is not None
    assert script.choose(Talk("sunny")) is None


def test_rules_are_read_from_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.toml"
    path.write_text('[[script]]\nwhen = "hi"\nsteps = [{text = "hello"}, {delay = 0.5}]\n')
    (read,) = Options(script=path).script
    assert read.when == "hi"
    assert [step.text for step in read.steps] == ["hello", None]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "cannot be read"), ("[[script", "not valid TOML"), ("x = 1", r"\[\[script\]\] tables and nothing else")],
)
def test_unreadable_script_file_is_named_in_the_error(tmp_path: Path, content: str | None, complaint: str) -> None:
    path = tmp_path / "demo.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValidationError, match=complaint):
        Options(script=str(path))


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        ({}, "has none"),
        ({"text": "a", "think": "b"}, "text and think"),
        ({"text": "a", "progress": 3}, "'progress' belongs to a 'prefill' step"),
        ({"text": "a", "kind": "invalid"}, "'kind' belongs to a 'fail' step"),
        ({"fail": "x", "kind": "cancelled"}, "kind must be one of"),
        ({"tokens": 0}, "greater than or equal to 1"),
        ({"speak": "a"}, "Extra inputs"),
    ],
)
def test_bad_step_is_refused_with_a_reason(step: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ScriptStep.model_validate(step)


def test_bad_pattern_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        rule(when="(")


def test_errors_are_of_the_kind_that_the_step_names() -> None:
    assert isinstance(ScriptStep(fail="full", kind="overloaded").error, Overloaded)
    assert isinstance(ScriptStep(die="boom").error, Unavailable)
    assert ScriptStep(text="x").error is None


@pytest.mark.parametrize("kind", ["invalid", "rate_limited", "not_found", "timeout", "internal", "too_large"])
def test_every_kind_of_failure_can_be_scripted(kind: Any) -> None:
    error = ScriptStep(fail="why", kind=kind).error
    assert error is not None
    assert error.kind == kind
    assert error.message == "why"


async def test_rules_decide_by_the_last_user_turn_of_the_prompt() -> None:
    script = [{"when": "^sun$", "steps": [{"text": "warm"}]}, {"steps": [{"text": "cold"}]}]
    assert await answer("sun", script=script) == "warm"
    assert await answer("the sun", script=script) == "cold"


async def test_repeated_steps_and_filler_words_are_played() -> None:
    script = [{"steps": [{"repeat": 3, "steps": [{"text": "ab "}]}, {"repeat": 0, "steps": [{"text": "never"}]}]}]
    assert await answer(script=script) == "ab ab ab "
