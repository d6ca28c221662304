"""What a format writes around the results of calls is what the public templates of its family write."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from modelyard.core.output_format import RESULTS
from modelyard.prompt.template import results_as_text
from modelyard.scanner.detect import detect
from modelyard.scanner.formats import load, names
from tests.prompt.conversations import CONVERSATIONS
from tests.prompt.plain_jinja import PlainTemplate
from tests.public_templates import public_templates

# Their templates know only a role for results, without marks of their own inside of the message.
BY_ROLE = {
    *("apriel", "gigachat3", "granite", "harmony", "internlm2", "jamba", "kimi_k3", "llama3_json", "llama4_pythonic"),
    *("phi4mini", "plain", "seed_oss", "think", "xlam"),
}
# No public template of these families writes results. `hunyuan` has the tags of `hy_v3`, without the suffix.
WITHOUT_TEMPLATE = {
    *("dots", "firefunction_v2", "functionary_v32", "hunyuan", "inkling", "longcat", "olmo3", "step3"),
}
# The one public template of the family, vLLM's, is not its makers': they document tokens around results.
OTHER_TEMPLATE = {
    "functiongemma": "<start_function_response>response:find_city{value:<escape>\0<escape>}<end_function_response>"
}
# Their templates write the result as JSON, or in an object or list with other keys, between the marks.
WRAPPED = {"cohere_command", "cohere_command4", "ernie45", "mistral"}


@cache
def _written() -> dict[str, list[tuple[str, str]]]:
    """What templates write between a call and its result, and after the result, by format."""
    found, (_, *messages) = defaultdict(list), CONVERSATIONS["an earlier result"]["messages"]  # without a system prompt
    for source in public_templates().values():
        text = PlainTemplate(source).render({**CONVERSATIONS["an earlier result"], "messages": messages}) or ""
        before, result, after = text.partition("WORD-RESULT")
        if result:
            found[detect(None, source, "").format].append((before.rpartition("WORD-ARGUMENT")[2], after))
    return found


def _result(format: str) -> str:
    result = {"role": "tool", "content": "\0", "name": "find_city", "tool_call_id": "abcdef123"}
    return str(results_as_text([result], load(format).results)[0]["content"])


def _is_written(format: str, before: str, after: str) -> bool:
    opening, _, closing = _result(format).partition("\0")
    if format in WRAPPED:
        return opening in before and closing in after
    return before.endswith(opening) and after.startswith(closing)


def test_results_are_written_as_a_template_of_the_family_writes_them() -> None:
    for format in sorted({*names()} - BY_ROLE - WITHOUT_TEMPLATE - {*OTHER_TEMPLATE}):
        assert any(_is_written(format, *one) for one in _written()[format]), (format, _written()[format][:2])
    for format, text in OTHER_TEMPLATE.items():
        assert _result(format) == text


def test_formats_without_marks_of_their_own_have_the_usual_ones() -> None:
    assert [
        format for format in sorted(BY_ROLE | WITHOUT_TEMPLATE - {"hunyuan"}) if load(format).results != RESULTS
    ] == []
    assert {format for format in names() if not _written()[format]} == WITHOUT_TEMPLATE
    marks = ("tool_response>", "tool_output>", "tool_result>")
    for format in BY_ROLE - {"plain", "think"}:  # these are of many families
        assert not [one for one in _written()[format] if any(mark in one[0] for mark in marks)], format
