"""Whole requests: conversations with tools, sampling, constraints and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from modelyard.core.request import Constraint, Reasoning, Request, Sampling, Tool, ToolChoice
from tests.strategies.messages import conversations
from tests.strategies.values import json_objects, names, texts


def offered_tools(
    *, custom: bool = False, server: bool = False, deferred: bool = False, namespaces: bool = False
) -> SearchStrategy[tuple[Tool, ...]]:
    schemas = json_objects().map(lambda o: {"type": "object", "properties": o})
    kinds = [
        st.builds(
            Tool,
            names(),
            texts(),
            schemas,
            namespace=st.sampled_from([None, "space"]) if namespaces else st.none(),
            strict=st.sampled_from([None, True, False]),
            deferred=st.booleans() if deferred else st.just(False),
        )
    ]
    if custom:
        kinds.append(st.builds(Tool, names(), texts(), kind=st.just("custom")))
    if server:
        kinds.append(st.builds(Tool, names(), kind=st.just("server"), type=st.just("web_search_20250305")))
    return st.lists(st.one_of(kinds), max_size=3, unique_by=lambda tool: tool.name).map(tuple)


def tool_choices(tools: Sequence[Tool]) -> SearchStrategy[ToolChoice]:
    simple = st.sampled_from([ToolChoice(), ToolChoice("none"), ToolChoice("required")])
    functions = [tool.name for tool in tools if tool.kind != "server"]
    return simple | st.sampled_from([ToolChoice("named", name) for name in functions]) if functions else simple


def _optional(values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | values


def samplings() -> SearchStrategy[Sampling]:
    share = _optional(st.floats(0, 1))
    return st.builds(
        Sampling,
        temperature=_optional(st.floats(0, 2)),
        top_p=share,
        top_k=_optional(st.integers(0, 100)),
        min_p=share,
        presence_penalty=_optional(st.floats(-2, 2)),
        frequency_penalty=_optional(st.floats(-2, 2)),
        dry_sequence_breakers=_optional(st.lists(texts(), min_size=1, max_size=2).map(tuple)),
        seed=_optional(st.integers(0, 2**31)),
        logit_bias=_optional(st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), min_size=1, max_size=2)),
    )


def constraints(*, named: bool = False, json_object: bool = True) -> SearchStrategy[Constraint]:
    """`named` schemas carry name, description and strict, as OpenAI's wires do."""
    schema = json_objects().map(lambda o: msgspec.json.encode({"type": "object", "properties": o}).decode())
    more: dict[str, Any] = {}
    if named:
        more = {
            "name": names(),
            "description": _optional(texts(1)),
            "strict": st.sampled_from([None, True, False]),
        }
    kinds: list[SearchStrategy[Constraint]] = [st.builds(Constraint, st.just("json_schema"), schema, **more)]
    kinds += [st.builds(Constraint, st.just(kind), texts(1)) for kind in ("gbnf", "regex", "lark")]
    if json_object:
        kinds.append(st.just(Constraint("json_object")))
    return st.one_of(kinds)


def reasonings(
    *, efforts: Sequence[str] = ("low", "medium", "high"), budgets: bool = True
) -> SearchStrategy[Reasoning]:
    return st.builds(
        Reasoning,
        enabled=st.sampled_from([None, True, False]),
        effort=st.sampled_from([None, *efforts]),
        budget=_optional(st.integers(1024, 65536)) if budgets else st.none(),
    )


def requests(
    *,
    tools: bool = True,
    custom: bool = False,
    server: bool = False,
    deferred: bool = False,
    namespaces: bool = False,
    sampling: bool = True,
    constrained: bool = True,
    named_constraints: bool = False,
    json_object: bool = True,
    reasoning: bool = True,
    logprobs: bool = False,
    n: bool = False,
    extras: bool = True,
    **conversation: bool,
) -> SearchStrategy[Request]:
    """A whole request. `extras` are the extension fields besides sampling; other switches as for `conversations`."""
    schemas = constraints(named=named_constraints, json_object=json_object)
    fields: dict[str, SearchStrategy[Any]] = {
        "model": names(),
        "messages": conversations(tools=tools, custom=custom, namespaces=namespaces, **conversation),
        "sampling": samplings() if sampling else st.just(Sampling()),
        "max_tokens": _optional(st.integers(1, 100_000)),
        "stop": st.lists(texts(1), max_size=3).map(tuple),
        "n": st.integers(1, 4) if n else st.just(1),
        "logprobs": _optional(st.integers(0, 20)) if logprobs else st.none(),
        "constraint": _optional(schemas) if constrained else st.none(),
        "reasoning": reasonings() if reasoning else st.just(Reasoning()),
        "stream": st.booleans(),
        "user": _optional(names()),
    }
    plain = st.fixed_dictionaries(fields | (_EXTRAS if extras else {}))
    offered = offered_tools(custom=custom, server=server, deferred=deferred, namespaces=namespaces)
    return st.builds(lambda a, b: Request(**a, **b), plain, offered.flatmap(_tool_use) if tools else st.just({}))


_EXTRAS: dict[str, SearchStrategy[Any]] = {
    "lora_adapter": _optional(names()),
    "chat_template_kwargs": st.sampled_from([{}, {"flavour": "plain"}]),
    "documents": st.sampled_from([(), ({"title": "a", "text": "b"},)]),
    "priority": st.sampled_from([None, "main", "background"]),
}


def _tool_use(tools: tuple[Tool, ...]) -> SearchStrategy[dict[str, Any]]:
    """Tools, and how they may be used; both are silent where there are none."""
    if not tools:
        return st.just({})
    return st.fixed_dictionaries(
        {
            "tools": st.just(tools),
            "tool_choice": tool_choices(tools),
            "parallel_tool_calls": st.sampled_from([None, True, False]),
        }
    )
