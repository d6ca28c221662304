from __future__ import annotations

import json

from modelyard.core.engine import Piece
from modelyard.core.events import BlockDelta
from modelyard.core.request import Tool
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load
from tests.scanner.reading import TOOLS, calls_of, scan

PYTHON = Tool("python", parameters={"properties": {"code": {"type": "string"}}})


def test_code_is_a_call_of_the_tool_that_runs_it() -> None:
    blocks = scan(list('<|python_tag|>x = {"a": 1}\nprint(x < 2)\n<|eom_id|>'), "llama3_json", tools=[PYTHON])
    assert [(n, json.loads(a)) for n, a in calls_of(blocks)] == [("python", {"code": 'x = {"a": 1}\nprint(x < 2)\n'})]


def test_code_that_is_cut_off_is_an_incomplete_call() -> None:
    blocks = scan(["<|python_tag|>print(1"], "llama3_json", tools=[PYTHON], cut=True)
    assert calls_of(blocks, complete=False) == [("python", '{"code": "print(1')]


def test_brackets_of_ordinary_text_wait_no_longer_than_they_must() -> None:
    scanner = Scanner(load("llama3_json"), tools=TOOLS, new_id=lambda: "c")
    told = [scanner.feed([Piece(text)]) for text in ("if {", " x[", "0] ", '{"', "a", '": 1}')]
    texts = ["".join(e.text for e in events if isinstance(e, BlockDelta)) for events in told]
    assert "".join(texts) == 'if { x[0] {"a": 1}'
    assert texts[:3] == ["if ", "{ x", "[0] "]
