"""Markdown of a model as HTML that is safe to show: highlighted code, tables and maths.

What a model writes is untrusted. Three layers keep it harmless: HTML in the text is escaped, nh3 removes every tag and
attribute that is not listed here, and the page's Content-Security-Policy loads nothing from other servers. An image in
the text becomes a link: its address would tell a foreign server what was said.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import nh3
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight as highlight_code
from pygments.formatters.html import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_MAX_FORMULA = 2000  # characters; a longer formula is shown as it was written
_MAX_HIGHLIGHTED = 50_000  # characters of one code block
_MAX_NESTING = 20  # of quotes and lists
_MAX_BLOCK = 6000  # characters of a paragraph, list or table: parsing a hostile one takes quadratic time
_MAX_LINES = 4000  # that are split at once: each may be a block, and takes 0.1 ms

_MATHML_TAGS = {
    *("math", "mrow", "mi", "mn", "mo", "ms", "mspace", "mtext", "mfrac", "msqrt", "mroot", "mstyle", "mpadded"),
    *("mphantom", "menclose", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts"),
    *("mprescripts", "none", "mtable", "mtr", "mtd", "mfenced", "merror"),
}
_TAGS = {
    *("p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "del", "code", "pre", "blockquote"),
    *("ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "span", "div", "button"),
    *_MATHML_TAGS,
}
_ATTRIBUTES = {
    "a": {"href", "title"},
    "ol": {"start"},
    "th": {"align"},
    "td": {"align"},
    "button": {"class", "type", "aria-label"},
    "span": {"class"},
    "div": {"class"},
    "pre": {"class"},
    **{tag: {"mathvariant", "stretchy", "fence", "separator", "lspace", "rspace", "width"} for tag in _MATHML_TAGS},
    "math": {"display"},
    "mtable": {"columnalign", "rowspacing", "columnspacing"},
}


_ALIGNMENT = re.compile(r'style="text-align:(left|center|right)"')  # of a cell: styles are not let through


def to_html(text: str) -> str:
    """A block of `split_blocks` as safe HTML."""
    if len(text) > _MAX_BLOCK and not text.startswith(("```", "~~~")):
        return f'<p class="text">{html.escape(text)}</p>'
    return sanitize(_ALIGNMENT.sub(r'align="\1"', _parser().render(text)))


def sanitize(markup: str) -> str:
    return nh3.clean(
        markup,
        tags=_TAGS,
        attributes=_ATTRIBUTES,
        url_schemes={"http", "https", "mailto"},
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )


def split_blocks(text: str) -> list[str]:
    """The paragraphs, lists, tables and code blocks of a text, which can be rendered one by one. All but the last one
    are complete: more text does not change them. Beyond so many lines, everything belongs to the last one."""
    lines = text.split("\n")
    tokens = _splitter().parse("\n".join(lines[:_MAX_LINES]))
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map]
    starts = sorted({0, *starts})
    return ["\n".join(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


@lru_cache(1)
def _splitter() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": _MAX_NESTING}).enable("table")
    parser.use(dollarmath_plugin).use(amsmath_plugin)
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


# --- the parser -------------------------------------------------------------------------------------------------------


@lru_cache(1)
def _parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough, without HTML. Formulas are in $…$, $$…$$, \\(…\\), \\[…\\] and
    \\begin{…}…\\end{…}."""
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": _MAX_NESTING})
    parser.enable(["table", "strikethrough"])
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=True)
    parser.use(amsmath_plugin)
    parser.inline.ruler.before("escape", "math_brackets", _math_brackets)
    for rule, display in _FORMULAS.items():
        parser.add_render_rule(rule, _display_formula if display else _inline_formula)
    parser.add_render_rule("fence", _code_block)
    parser.add_render_rule("code_block", _code_block)
    parser.add_render_rule("image", _image_link)
    return parser


_FORMULAS = {"math_inline": False, "math_inline_double": True, "math_block": True, "amsmath": True}
_BRACKETS = {"\\(": ("\\)", "math_inline"), "\\[": ("\\]", "math_inline_double")}


def _math_brackets(state: StateInline, silent: bool) -> bool:
    """A rule of markdown-it for \\(…\\) and \\[…\\], which may span lines of a paragraph."""
    found = _BRACKETS.get(state.src[state.pos : state.pos + 2])
    if found is None:
        return False
    closing, kind = found
    end = state.src.find(closing, state.pos + 2, state.pos + 2 + _MAX_FORMULA)
    if end < 0:
        return False
    if not silent:
        state.push(kind, "math", 0).content = state.src[state.pos + 2 : end]
    state.pos = end + 2
    return True


def _inline_formula(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    return formula(tokens[index].content, display=False)


def _display_formula(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    return formula(tokens[index].content, display=True)


@lru_cache(512)  # a growing text is rendered again and again
def formula(tex: str, *, display: bool) -> str:
    """MathML, which browsers draw without a script; the source if it cannot be read."""
    source = f"<code>{html.escape(tex)}</code>"
    if len(tex) > _MAX_FORMULA:
        return source
    try:
        return convert(tex.strip(), display="block" if display else "inline")
    except Exception:  # the library raises many types for malformed input
        return source


_PREVIEWED = ("html", "svg", "xhtml")


def _code_block(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    code, language = tokens[index].content, (tokens[index].info.split() or [""])[0]
    label = html.escape(language)
    is_page = language.lower() in _PREVIEWED or code.lstrip()[:4].lower() == "<svg"
    preview = '<button type="button" class="preview-code" aria-label="Preview">Preview</button>' if is_page else ""
    return (
        f'<div class="code"><div class="code-head"><span>{label}</span>'
        f'<span>{preview}<button type="button" class="copy-code" aria-label="Copy the code">Copy</button></span></div>'
        f'<pre class="mono"><code>{highlight(code, language)}</code></pre></div>'
    )


@lru_cache(256)
def highlight(code: str, language: str) -> str:
    """The code as HTML with Pygments' classes; plain if the language is unknown."""
    lexer = _lexer(language) if len(code) <= _MAX_HIGHLIGHTED else None
    if lexer is None:
        return html.escape(code)
    return str(highlight_code(code, lexer, HtmlFormatter(nowrap=True)))


@lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


def _image_link(_: Any, tokens: Sequence[Token], index: int, *__: Any) -> str:
    token = tokens[index]
    source = html.escape(str(token.attrs.get("src", "")), quote=True)
    return f'<a href="{source}">{html.escape(token.content or "image")}</a>'


# --- the style of highlighted code ------------------------------------------------------------------------------------

_LIGHT, _DARK = "xcode", "github-dark"


@lru_cache(1)
def code_css() -> str:
    """Rules for the classes that `highlight` writes, for both themes. Backgrounds are the page's own."""
    rules = [*_rules(_LIGHT, ".markdown .code"), *_rules(_DARK, ".body--dark .markdown .code")]
    return "\n".join(rules)


def _rules(style: str, prefix: str) -> list[str]:
    rules = HtmlFormatter(style=style).get_style_defs(prefix).splitlines()  # type: ignore[no-untyped-call]
    kept = [re.sub(r"background(-color)?:[^;}]*;?", "", rule) for rule in rules if f"{prefix} ." in rule]
    return [rule.partition("/*")[0].strip() for rule in kept if re.search(r"{\s*\S+:", rule)]
