"""Builds a model's definition from its settings: tokenizer, template, output format, and where each comes from.

It needs no engine and no weights. A definition that fails keeps its error; only that model fails, when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from modelyard import plugins
from modelyard.config.library_models import LibraryModel, recommended_sampling
from modelyard.config.settings import engine_options
from modelyard.core.engine import Capabilities, EnginePlugin, Media
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.core.request import DEFAULT_SAMPLING, Message, Request, Sampling, Text
from modelyard.gateway.model import THINKING_MODES, UNKNOWN_ENGINE, VERBATIM, Model, TextPipeline
from modelyard.prompt.media import image_placeholder
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate, hermes_calls
from modelyard.prompt.template_source import TemplateSource, builtin, find_template
from modelyard.prompt.translation import SOURCE
from modelyard.router.router import ModelEntry, with_default_sampling
from modelyard.router.settings import ModelSettings
from modelyard.scanner.detect import detect, with_hermes_calls
from modelyard.scanner.formats import load as load_format
from modelyard.tokenizer import FileTokenizer, open_tokenizer
from modelyard.workers.interpreter import interpreter_path


def define_model(entry: ModelEntry) -> Model:
    settings, notes = entry.settings, _cache_notes(entry)
    try:
        if settings.backend is None:
            raise Unavailable(f"{entry.name!r} waits for a scheduler that defines it", code="scheduler_lost")
        module = plugins.engine(entry.backend)
        if settings.python is None and settings.tokenizer_path is None:  # else the engine may work only elsewhere
            module.verify()
        options = engine_options(settings)
        kind = module.kind_of(options)
        text = (_text_pipeline if kind == "text" else _local_counting)(entry, module, options, notes)
        translates = _translates(settings, text)
        capabilities = _capabilities(settings, module, options)
    except ModelyardError as error:
        return _model(entry, kind="text", fault=error, notes=(*notes, ("fault", error.message)))
    known: dict[str, Any] = {"kind": kind, "text": text, "translates": translates, "capabilities": capabilities}
    if capabilities is not None and "modalities" not in settings.model_fields_set:
        known["modalities"] = capabilities.modalities
    if len(known.get("modalities", settings.modalities)) > 1 and module.count_media is not None:
        known["count_media"] = partial(_count_media, module.count_media, options, settings.python)
    recommended = _recommended_sampling(module, options, notes)
    return _model(entry, recommended, remote=module.remote, notes=tuple(notes), **known)


def _count_media(count: Any, options: Any, python: str | None, media: Sequence[Media]) -> list[int]:
    found: list[int] = count(options, media, python and interpreter_path(python))
    return found


def _recommended_sampling(module: EnginePlugin, options: Any, notes: list[tuple[str, str]]) -> Sampling:
    """What the model's own file recommends."""
    find = module.tokenizer_path
    if find is None:
        return Sampling()
    try:
        found = recommended_sampling(find(options))
    except (ModelyardError, OSError, ValueError):  # without a local file, or with one that only its engine reads
        return Sampling()
    if found:
        notes.append(("sampling", ", ".join(f"{name} {value:g}" for name, value in found.items()) + " from its file"))
    values: dict[str, Any] = found | {name: int(found[name]) for name in ("top_k", "mirostat") if name in found}
    return Sampling(**values)


def define_later(entry: ModelEntry, held: LibraryModel) -> Model:
    """A model that reads its files at its first request. What it can do is told by what the library knows of it."""
    settings = entry.settings
    try:
        module = plugins.engine(entry.backend)
        kind = module.kind_of(engine_options(settings))
    except ModelyardError as error:
        return _model(entry, kind="text", fault=error)
    expected = replace(
        UNKNOWN_ENGINE,
        generates=held.task == "chat",
        chat=held.is_chat or bool(settings.chat_template or settings.prompt_format),
        embeddings=held.task == "embedding",
        rerank=held.task == "reranking",
        thinking_modes=THINKING_MODES if held.switches_thinking else THINKING_MODES[:1],
        infill=False,
    )
    return _model(entry, remote=module.remote, kind=kind, capabilities=expected, define=lambda: define_model(entry))


def trial_fault(model: Model) -> ModelyardError | None:
    """Why the model's template cannot render one short message. A template may parse and still fail."""
    only_reads = model.capabilities is not None and not model.capabilities.generates
    if model.text is None or model.translates or not model.talks or only_reads:
        return None
    try:
        model.text.renderer.text(Request(model=model.name, messages=(Message("user", (Text("Hi"),)),)))
    except ModelyardError as error:
        return error
    return None


def _local_counting(
    entry: ModelEntry, module: EnginePlugin, options: Any, notes: list[tuple[str, str]]
) -> TextPipeline | None:
    """The pipeline of an engine that renders by itself, if its tokenizer is available here: tokens are counted before
    the request is sent. Without it, the engine counts once it is loaded."""
    if not module.counts_locally:
        return None
    try:
        return _text_pipeline(entry, module, options, notes)
    except ModelyardError as error:
        notes.append(("tokenizer", f"the engine's, once it is loaded: {error.message}"))
        return None


def _translates(settings: ModelSettings, text: TextPipeline | None) -> bool:
    if text is not None:
        return text.renderer.translates
    return settings.prompt_format is not None and SOURCE in builtin(settings.prompt_format)


def _model(entry: ModelEntry, file: Sampling = DEFAULT_SAMPLING, *, remote: bool = False, **known: Any) -> Model:
    """`file`: what its file recommends, for what the settings do not set."""
    configured = entry.sampling.over(file)
    return Model(
        entry=entry,
        remote=remote,
        sampling=configured if remote else with_default_sampling(configured),
        configured_sampling=configured,
        **{"modalities": tuple(entry.settings.modalities)} | known,
    )


def _text_pipeline(entry: ModelEntry, module: EnginePlugin, options: Any, notes: list[tuple[str, str]]) -> TextPipeline:
    settings = entry.settings
    if settings.tokenizer_path:
        where = Path(settings.tokenizer_path)
    elif module.tokenizer_path is not None:
        where = module.tokenizer_path(options)
    else:
        raise InvalidRequest(f"the engine {entry.backend!r} has no tokenizer: set tokenizer_path", code="no_tokenizer")
    tokenizer = _open_tokenizer(where)
    source = _template(entry, tokenizer, module.prompt_format, where)
    if source.missing is not None and settings.format in (None, "auto"):
        format, why = VERBATIM, "without a chat template, everything is text"
    else:
        detected = detect(settings.format, source.text + (source.for_tools or ""), entry.name)
        format, why = load_format(detected.format), detected.why
    writer, specials = format.writer, tokenizer.specials
    stops = {tokenizer.specials[text] for text in (*format.stop_tokens, *source.stops) if text in tokenizer.specials}
    stop_strings = tuple(text for text in source.stops if text not in tokenizer.specials)
    renderer = Renderer(
        _compile(source.text, tokenizer),
        tokenizer,
        thinking_default=settings.enable_thinking,
        tools_template=_compile(source.for_tools, tokenizer) if source.for_tools else None,
        tools_prompt=settings.tools_prompt,
        marks_media=module.marks_media,
        image_placeholder=_own_image_placeholder(tokenizer, source),
        write_calls=hermes_calls if writer is None else lambda calls, dumps: writer.write(calls, dumps, specials),
        results=format.results,
        missing=source.missing,
    )
    taught = "the hermes format" if writer is None else "its own format"
    notes += [
        ("tokenizer", f"{where}, {tokenizer.size} tokens"),
        ("template", f"from {source.origin}"),
        ("format", f"{format.name}: {why}"),
    ]
    if source.missing is None:
        how = f"described as text, calls in {taught}" if renderer.describes_tools else "by the template"
        notes.append(("tools", how))
    tools_format = with_hermes_calls(format) if renderer.describes_tools and writer is None else None
    return TextPipeline(
        renderer,
        tokenizer,
        format,
        tuple(sorted(tokenizer.eos | stops)),
        tools_format,
        stop_strings=stop_strings,
        rerank_template=tokenizer.named_template("rerank"),
    )


def _own_image_placeholder(tokenizer: FileTokenizer, source: TemplateSource) -> str | None:
    """How the model's own template writes an image, if another template is used: that one cannot know."""
    own = tokenizer.template
    return image_placeholder(_compile(own, tokenizer)) if own is not None and own != source.text else None


def _open_tokenizer(path: Path) -> FileTokenizer:
    """A damaged GGUF file may kill the process that reads its vocabulary, and a hostile tokenizer.json never come to an
    end: a child reads it first."""
    if path.suffix.lower() == ".gguf":
        from modelyard.engines.llama_cpp import file_check

        file_check.check_vocabulary(path)
        return open_tokenizer(path)
    from modelyard.engines.tokenizer_check import check_tokenizer
    from modelyard.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer.load(path, check_tokenizer(path))


def _template(entry: ModelEntry, tokenizer: FileTokenizer, fallback: str | None, where: Path) -> TemplateSource:
    settings = entry.settings
    return find_template(
        chat_template=settings.chat_template,
        prompt_format=settings.prompt_format,
        force_prompt_format=settings.force_prompt_format,
        embedded=tokenizer.template,
        embedded_for_tools=tokenizer.named_template("tool_use"),
        folder=where if where.is_dir() else where.parent,
        name=entry.name,
        fallback=fallback,
    )


def _capabilities(settings: ModelSettings, module: EnginePlugin, options: Any) -> Capabilities | None:
    """None: known once the model is loaded. Where only a worker has the file, the gateway has a copy of its header."""
    if module.capabilities_of is None:
        return None
    header = Path(settings.tokenizer_path) if settings.tokenizer_path else None
    try:
        return module.capabilities_of(options, header if header and header.suffix == ".gguf" else None)
    except ModelyardError:
        return None


def _compile(text: str, tokenizer: FileTokenizer) -> ChatTemplate:
    return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def _cache_notes(entry: ModelEntry) -> list[tuple[str, str]]:
    return [
        (f"cache {name}", f"{cache.info.parallel} × {cache.info.window} tokens {cache.info.description}".rstrip())
        for name, cache in entry.caches.items()
    ]
