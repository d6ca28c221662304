"""A model's definition made from its settings: tokenizer, template, output format, and where each came from.

It needs no engine and no weights. One that cannot be made keeps its fault, which fails that model alone when it loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, field

from modelyard import plugins
from modelyard.config.engine_options import engine_options
from modelyard.core.errors import ModelyardError
from modelyard.gateway.model import Model, TextPipeline
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import TemplateSource, builtin, find_template
from modelyard.prompt.translation import SOURCE
from modelyard.router.catalog import ModelEntry
from modelyard.router.settings import ModelSettings
from modelyard.scanner.detect import detect, with_hermes_calls
from modelyard.scanner.formats import load as load_format
from modelyard.tokenizer import FileTokenizer, open_tokenizer


class Definition(Struct):
    model: Model
    notes: list[tuple[str, str]] = field(default_factory=list)  # what people may want to know, as rows


def define(entry: ModelEntry, settings: ModelSettings) -> Definition:
    notes = _cache_notes(entry)
    try:
        module = plugins.load("engines", entry.backend)
        if settings.python is None:  # else it need not work here
            plugins.verify(module)
        options = engine_options(settings)
        kind = module.kind(options)
        text = (_text_parts if kind == "text" else _counting)(entry, settings, module, options, notes)
        translates = _translates(settings, text)
    except ModelyardError as error:
        return Definition(_model(entry, "text", fault=error), [*notes, ("fault", error.message)])
    return Definition(_model(entry, kind, text, getattr(module, "REMOTE", False), translates=translates), notes)


def _counting(
    entry: ModelEntry, settings: ModelSettings, module: Any, options: Any, notes: list[tuple[str, str]]
) -> TextPipeline | None:
    """Of an engine that renders by itself, and whose tokenizer is here: its tokens are known before it is asked.

    Where they cannot be, it is no fault: the engine counts when it is up.
    """
    if not getattr(module, "COUNTS_LOCALLY", False):
        return None
    try:
        return _text_parts(entry, settings, module, options, notes)
    except ModelyardError as error:
        notes.append(("tokenizer", f"the engine's own, once it is loaded: {error.message}"))
        return None


def _translates(settings: ModelSettings, text: TextPipeline | None) -> bool:
    if text is not None:
        return text.renderer.translates
    return settings.prompt_format is not None and SOURCE in builtin(settings.prompt_format)


def _model(
    entry: ModelEntry,
    kind: Any,
    text: TextPipeline | None = None,
    remote: bool = False,
    fault: ModelyardError | None = None,
    translates: bool = False,
) -> Model:
    return Model(
        name=entry.name,
        kind=kind,
        remote=remote,
        text=text,
        sampling=entry.configured_sampling if remote else entry.sampling,
        max_tokens=entry.max_tokens,
        stop=entry.stop,
        show_thinking=entry.show_thinking,
        tool_stream=entry.tool_stream,
        constrain_calls=entry.constrain_calls,
        modalities=entry.modalities,
        translates=translates,
        fault=fault,
    )


def _text_parts(
    entry: ModelEntry, settings: ModelSettings, module: Any, options: Any, notes: list[tuple[str, str]]
) -> TextPipeline:
    where: Path = Path(settings.tokenizer_path) if settings.tokenizer_path else module.tokenizer_path(options)
    vocab = open_tokenizer(where)
    embedded = module.chat_template(options) or vocab.template
    if embedded and module.kind(options) == "chat":  # it uses the file's own, whatever format is named here
        settings = settings.model_copy(update={"prompt_format": None})
    source = _template(entry, settings, embedded, getattr(module, "PROMPT_FORMAT", None), where)
    format_ = detect(settings.format, source.text + (source.for_tools or ""), entry.name)
    form = load_format(format_.format)
    stops = {vocab.specials[text] for text in (*form.stop_tokens, *source.stops) if text in vocab.specials}
    spelled = tuple(text for text in source.stops if text not in vocab.specials)
    renderer = Renderer(
        _compiled(source.text, vocab),
        vocab,
        thinking_default=entry.enable_thinking,
        tools_template=_compiled(source.for_tools, vocab) if source.for_tools else None,
        tools_prompt=settings.tools_prompt,
    )
    notes += [
        ("tokenizer", f"{where}, {vocab.size} tokens"),
        ("template", f"from {source.origin}"),
        ("format", f"{form.name}: {format_.why}"),
        ("tools", "told in words, called as hermes does" if renderer.describes_tools else "by the template"),
    ]
    told = with_hermes_calls(form) if renderer.describes_tools else None
    return TextPipeline(renderer, vocab, form, tuple(sorted(vocab.eos | stops)), told, stop_strings=spelled)


def _template(
    entry: ModelEntry, settings: ModelSettings, embedded: str | None, fallback: str | None, where: Path
) -> TemplateSource:
    return find_template(
        chat_template=settings.chat_template,
        prompt_format=settings.prompt_format,
        embedded=embedded,
        folder=where if where.is_dir() else where.parent,
        name=entry.name,
        fallback=fallback,
    )


def _compiled(text: str, vocab: FileTokenizer) -> ChatTemplate:
    return ChatTemplate(text, bos_token=vocab.bos_token, eos_token=vocab.eos_token)


def _cache_notes(entry: ModelEntry) -> list[tuple[str, str]]:
    return [
        (f"cache {name}", f"{cache.info.parallel} × {cache.info.window} tokens {cache.info.description}".rstrip())
        for name, cache in entry.caches.items()
    ]
