"""Families whose tags hold tokens, or are made of several: quoted in ordinary text they mean nothing."""

from __future__ import annotations

import pytest

from modelyard.core.engine import Piece
from modelyard.scanner.formats import load
from tests.scanner.reading import TOOLS, Heard, pieces, scan
from tests.scanner.writers import written

DSML = ["｜DSML｜", "<think>", "</think>", "<｜end▁of▁sentence｜>"]
GLM = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"]
M3 = ["]<]minimax[>[", "<mm:think>", "</mm:think>", "[e~["]
TOKENS = {"deepseek_v32": DSML, "deepseek_v4": DSML, "glm45": GLM, "glm47": GLM, "minimax_m3": M3}
MORE = {"minimax_m3": [*M3, "<tool_call>", "</tool_call>"]}


def _by_token(text: str, format: str, specials: list[str]) -> list[Heard]:
    """Every character on its own, but for the tokens."""
    cut = pieces(text, load(format), specials)
    singles = [[p] if p.special else [Piece(char) for char in p.text] for p in cut]
    return scan([p for each in singles for p in each], format, specials=specials)


def _turn(format: str) -> str:
    weather, now = TOOLS[0], TOOLS[3]
    return written()[format]("Hm.", "So.", [(weather, {"city": "a < b", "days": 3}), (now, {})])


@pytest.mark.parametrize(("format", "specials"), [*TOKENS.items(), *MORE.items()])
def test_a_turn_reads_the_same_where_only_some_parts_of_tags_are_tokens(format: str, specials: list[str]) -> None:
    raw = _turn(format)
    assert _by_token(raw, format, specials) == scan([raw], format)


@pytest.mark.parametrize(("format", "specials"), TOKENS.items())
def test_a_turn_that_is_quoted_without_its_tokens_is_text(format: str, specials: list[str]) -> None:
    raw = _turn(format)
    assert "".join(b.text for b in scan([Piece(raw)], format, specials=specials)) == raw


@pytest.mark.parametrize(("format", "specials"), TOKENS.items())
def test_tokens_that_stand_anywhere_else_are_not_shown(format: str, specials: list[str]) -> None:
    stray = [p for token in specials for p in (Piece(token, special=True), Piece("w. "))]
    shown = "".join(block.text for block in scan(stray, format, specials=specials))
    assert shown.split() == ["w."] * len(specials)


def test_a_value_may_quote_its_own_closing_tag() -> None:
    head = [Piece("<tool_call>", True), Piece("write_file"), Piece("<arg_key>", True), Piece("content")]
    value = [Piece("</arg_key>", True), Piece("<arg_value>", True), Piece("x</arg_value></tool_call>")]
    ends = [Piece("</arg_value>", True), Piece("</tool_call>", True)]
    heard = scan([*head, *value, *ends], "glm45", specials=GLM)
    assert heard == [Heard("tool_call", '{"content": "x</arg_value></tool_call>"}', "write_file")]


def test_a_closing_tag_that_is_a_token_ends_a_value_whatever_follows() -> None:
    head = [Piece("<tool_call>", True), Piece("get_weather"), Piece("<arg_key>", True), Piece("city")]
    value = [Piece("</arg_key>", True), Piece("<arg_value>", True), Piece("Rome"), Piece("</arg_value>", True)]
    odd = [Piece("<arg_key>", True), Piece("odd"), Piece("</arg_key>", True), Piece("<arg_value>", True), Piece("1")]
    heard = scan([*head, *value, *odd, Piece("</arg_value>", True), Piece("</tool_call>", True)], "glm45", specials=GLM)
    assert heard == [Heard("tool_call", '{"city": "Rome", "odd": 1}', "get_weather")]
