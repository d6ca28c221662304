from __future__ import annotations

import pytest

from modelyard.config.problems import ConfigPath, ConfigProblem, format_path, suggest


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("http", "port"), "http.port"),
        (("routes", 0, "match"), "routes[0].match"),
        (("models", "qwen2.5", "path"), 'models."qwen2.5".path'),
        ((), ""),
    ],
)
def test_a_path_is_written_as_in_toml(path: ConfigPath, text: str) -> None:
    assert format_path(path) == text


def test_a_problem_omits_empty_parts() -> None:
    assert str(ConfigProblem("f", "a.b", "is wrong.")) == "f: a.b: is wrong."
    assert str(ConfigProblem("f", "", "is wrong.")) == "f: is wrong."


def test_no_similar_word_gives_no_suggestion() -> None:
    assert suggest("zzz", ["port", "host"]) == ""
    assert suggest("prt", ["port", "host"]) == " Did you mean 'port'?"
