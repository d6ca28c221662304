"""Lists, descriptions, embeddings and changes of the library, as Ollama writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.protocols.ollama import models
from tests.protocols.golden import check_golden

MODEL = models.OllamaModel(
    name="smollm2",
    size=94_000_000,
    modified=1_700_000_000.5,
    family="llama",
    parameters=134_515_008,
    quantization="Q4_K_M",
    context=8192,
    loaded_size=120_000_000,
    expires=1_700_000_300,
)


def create(**fields: Any) -> models.NewModel:
    return models.read_create(json.dumps({"model": "new", "from": "old"} | fields).encode())[0]


def test_lists_match_their_golden_files() -> None:
    check_golden("ollama", "tags", models.write_tags([MODEL]))
    check_golden("ollama", "ps", models.write_ps([MODEL]))


def test_a_description_matches_its_golden_file() -> None:
    shown = models.OllamaDescription(
        model=MODEL,
        capabilities=("completion", "tools"),
        template="{{ messages }}",
        system="Be brief.",
        parameters={"temperature": 0.5, "stop": ["A", 'B"']},
        info={"llama.block_count": 30, "llama.context_length": 999},
    )
    check_golden("ollama", "show", models.write_show(shown))


def test_parameters_become_settings_under_our_names() -> None:
    made = create(
        system="Be brief.", parameters={"temperature": 0.1, "repeat_penalty": 1.2, "num_predict": 5, "num_ctx": 64}
    )
    assert made.sampling == {"temperature": 0.1, "repetition_penalty": 1.2, "max_tokens": 5}
    assert (made.window, made.system, made.base) == (64, "Be brief.", "old")
    assert create(parameters={"num_gpu": 1, "num_predict": -1}).ignored == ("num_gpu",)


@pytest.mark.parametrize(
    "fields",
    [
        {"quantize": "q4_K_M"},
        {"modelfile": "FROM x"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"template": "{{ .System }} {{ .Prompt }}"},
        {"files": {"a.gguf": "sha256:1", "b.gguf": "sha256:2"}},
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        create(**fields)


def test_a_jinja_template_is_taken() -> None:
    assert create(template="{% for message in messages %}{{ message.content }}{% endfor %}").template


def test_a_template_is_never_the_path_of_a_file() -> None:
    with pytest.raises(InvalidRequest, match="the text of a Jinja template"):
        create(template="/etc/passwd")


def test_a_model_is_made_from_a_model_or_from_a_file() -> None:
    assert create(**{"from": None}, files={"a.gguf": "sha256:1"}).file == "sha256:1"
    for body in ({"from": None}, {"files": {"a.gguf": "sha256:1"}}):
        with pytest.raises(InvalidRequest, match="either from"):
            create(**body)


def test_embeddings_take_one_text_or_several_and_are_truncated() -> None:
    request = models.read_embed(b'{"model": "m", "input": ["a", "b"], "dimensions": 2, "keep_alive": "1m"}')
    assert (request.inputs, request.truncate, request.keep_alive) == (("a", "b"), True, 60)
    assert not models.read_embed(b'{"model": "m", "input": "a", "truncate": false}').truncate
    vectors = json.loads(models.write_embed([[3.0, 4.0, 9.0]], 5, request, 0.5))
    assert vectors["embeddings"] == [[0.6, 0.8]]
    assert (vectors["prompt_eval_count"], vectors["total_duration"]) == (5, 500_000_000)
    with pytest.raises(InvalidRequest, match="input is empty"):
        models.read_embed(b'{"model": "m", "input": []}')


def test_every_name_has_a_tag() -> None:
    assert [models.tagged(name) for name in ("a", "a:b")] == ["a:latest", "a:b"]
