"""A model that mentions its own markup: every marker of every format in text, reasoning and arguments.

Three vocabularies of bytes have the markers of a format as control tokens, as added tokens that are no control tokens,
and not at all.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from modelyard.scanner.formats import load, names
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.scanner.helpers import marker_tokens
from tests.scanner.test_cases import CASES, _cuts_a_marker, _expected, _options, _quotations, _summary
from tests.scanner.vocabulary_tokens import Result, VocabularyTokens, quote_in_arguments, quote_in_prose
from tests.scanner.writers import WRITERS

KINDS = ("control", "added", "none")
OTHERS = ("<|other|>", "<other_tool>", "</b>", "\n\n")  # tokens that are no markers

every_format = pytest.mark.parametrize("format", names())


@cache
def _vocabulary(format: str, kind: str) -> VocabularyTokens:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [*(marker_tokens(load(format)) if kind != "none" else ()), *OTHERS]
    tokens = [AddedToken(text, normalized=False, special=kind == "control") for text in texts]
    (tokenizer.add_special_tokens if kind == "control" else tokenizer.add_tokens)(tokens)
    return VocabularyTokens(HuggingFaceTokenizer.from_text(str(tokenizer.to_str())))


def _results(format: str) -> dict[str, Result]:
    prose = {f"prose, {kind}": quote_in_prose(_vocabulary(format, kind), format) for kind in KINDS[:2]}
    ways = ("{}.,c", "a,.{0}{0}")
    arguments = {
        f"arguments, {kind}": quote_in_arguments(_vocabulary(format, kind), format, *OTHERS[:3], ways=ways)
        for kind in KINDS
    }
    return prose | arguments


@every_format
def test_what_a_model_says_about_its_own_markup_is_kept(format: str) -> None:
    results = _results(format)
    assert [(what, *wrong) for what, result in results.items() for wrong in result.wrong] == []
    markers = marker_tokens(load(format))
    assert results["prose, control"].checked >= len(markers)
    if format in WRITERS:
        left_out = Counter[str]()
        for result in results.values():
            left_out.update(result.left_out)
        assert results["arguments, control"].checked > len(markers), left_out


@every_format
def test_a_case_reads_the_same_if_markers_are_added_tokens(format: str) -> None:
    """Qwen, GLM and others do not flag `<think>` and `<tool_call>` as control tokens."""
    form, tokens = load(format), _vocabulary(format, "added")
    for case in CASES[format]:
        if _cuts_a_marker(case, tokens.texts.difference(OTHERS)):
            continue
        ids = tokens.encode_quoting(case["raw"], _quotations(format, case), form.markers)
        found = _summary(tokens.scan(form, tokens.pieces(ids), "in groups", **_options(case)))
        assert found == _expected(case), case["name"]
