"""A chat template: sandboxed Jinja with Hugging Face's semantics, compiled once and asked what it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.runtime import Context

from modelyard.core.errors import InvalidRequest
from modelyard.prompt.sandbox import Refusal, Steps, environment

MAX_OUTPUT = 64 << 20  # characters: many times the longest window

_environment = environment()


class TemplateFailed(InvalidRequest):
    """The template could not render this conversation."""

    default_code = "template_failed"


class TemplateRefused(TemplateFailed):
    """The template said no, in its own words."""

    default_code = "template_refused"


def local_now() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """`extra_tokens` are further named tokens that templates use, such as `pad_token` or `image_token`."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        extra_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = local_now,
    ) -> None:
        self.source = source
        # Jinja would flatten its globals anew for each render; here they are laid under the variables once.
        self._fixed: dict[str, Any] = {
            **_environment.globals,
            "strftime_now": lambda form: now().strftime(form),
            "bos_token": bos_token,
            "eos_token": eos_token,
            **(extra_tokens or {}),
        }
        try:
            tree = _environment.parse(source)
            self._words = frozenset(_words(tree))
            self._template = _environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is broken in line {error.lineno}: {error.message}", code="template_broken"
            ) from error
        except RecursionError:
            raise InvalidRequest("the chat template is nested too deeply", code="template_broken") from None

    def mentions(self, name: str) -> bool:
        """Whether the template's code uses this variable, attribute, key or string (a role, say)."""
        return name in self._words

    def render(self, variables: Mapping[str, Any]) -> str:
        variables = {**self._fixed, **variables, "range": Steps().range}
        context = Context(_environment, variables, self._template.name, self._template.blocks)
        try:
            return _joined(self._template.root_render_func(context))
        except Refusal as error:
            raise TemplateRefused(f"the chat template refuses this conversation: {error.message}") from error
        except RecursionError:
            raise TemplateFailed("the chat template calls itself without end") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            where = self._line(error.__traceback__)
            raise TemplateFailed(f"the chat template failed{where}: {error}") from error

    def _line(self, trace: TracebackType | None) -> str:
        found = ""
        while trace is not None:
            if trace.tb_frame.f_globals.get("environment") is _environment:
                found = f" in line {self._template.get_corresponding_lineno(trace.tb_lineno)}"
            trace = trace.tb_next
        return found


def _joined(chunks: Iterator[str]) -> str:
    parts: list[str] = []
    room = MAX_OUTPUT
    for chunk in chunks:
        parts.append(chunk)
        room -= len(chunk)
        if room < 0:
            raise TemplateError(f"the rendered prompt is longer than {MAX_OUTPUT} characters")
    return "".join(parts)


def _words(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        word = {nodes.Name: "name", nodes.Getattr: "attr", nodes.Const: "value"}[type(node)]
        if isinstance(value := getattr(node, word), str):
            yield value
