"""Finds a model's chat template. The first source that has one wins:

1. `chat_template` of the model: the text itself or the path of a file
2. the model file's own metadata
3. `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json` in the model's folder
4. `prompt_format` of the model: the name of a template in `prompt/templates/`
5. the family, by the model's name
6. the engine's own default (`fallback`), where it has one

Without any, the model takes bare prompts only: `missing` is what a chat request is told.

A model's own template has the wording that the model was trained on. A built-in one has the markers, the roles and the
structure of its family in words of ours, so `prompt_format` comes before it only with `force_prompt_format`.
"""

from __future__ import annotations

import difflib
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from modelyard.core.errors import InvalidRequest
from modelyard.library.gguf import read_contents

_TEMPLATES = Path(__file__).parent / "templates"
_ALIASES = {"chatml": "generic"}
# part of a model's name → built-in template of that family; the first match wins
_FAMILIES = (
    ("qwen", "qwen3_template"),
    ("qwq", "qwen3_template"),
    ("llama-3", "llama3_template"),
    ("llama3", "llama3_template"),
    ("mistral", "mistral_template"),
    ("mixtral", "mistral_template"),
    ("ministral", "mistral_template"),
    ("devstral", "mistral_template"),
    ("translategemma", "translategemma_template"),
    ("gemma-4", "gemma4_template"),
    ("gemma4", "gemma4_template"),
    ("smollm", "generic"),
    ("hermes", "generic"),
    ("chatml", "generic"),
)


# end-of-turn texts of the built-in templates; one that is not a token of the vocabulary becomes a stop string
_STOPS = {
    "generic": ("<|im_end|>",),
    "gemma4_template": ("<turn|>",),
    "llama3_template": ("<|eot_id|>",),
    "mistral_template": ("</s>",),
    "qwen3_template": ("<|im_end|>",),
    "translategemma_template": ("<end_of_turn>",),
}


class TemplateSource(NamedTuple):
    """`for_tools` is the variant that some models have for requests with tools; `stops` end a turn in addition to the
    model's end tokens."""

    text: str
    origin: str
    for_tools: str | None = None
    stops: tuple[str, ...] = ()
    missing: str | None = None


def find_template(
    *,
    chat_template: str | None = None,
    prompt_format: str | None = None,
    force_prompt_format: bool = False,
    embedded: str | None = None,
    embedded_for_tools: str | None = None,
    folder: Path | None = None,
    name: str = "",
    fallback: str | None = None,
) -> TemplateSource:
    if chat_template:
        return _explicit(chat_template, folder)
    if prompt_format and force_prompt_format:
        return _built_in(prompt_format, f"prompt_format {prompt_format}, because of force_prompt_format")
    if embedded:
        return _own(TemplateSource(embedded, "the model file's metadata", embedded_for_tools), prompt_format)
    if folder is not None and (found := _in_folder(folder)) is not None:
        return _own(found, prompt_format)
    if prompt_format:
        return _built_in(prompt_format, f"prompt_format {prompt_format}, because the model has no template of its own")
    for part, family in _FAMILIES:
        if part in name.lower():
            return _built_in(family, f"the built-in {family}, because the name {name!r} contains {part!r}")
    if fallback:
        return _built_in(fallback, f"the engine's default, {fallback}")
    return TemplateSource("", "nowhere: chat requests are refused", missing=_how_to_get_one(name, folder))


def engine_template(prompt_format: str, model: Path | None, *, force: bool) -> str | None:
    """The template for an engine that renders by itself, if it does not find one: `model`, a GGUF file or a folder, has
    none of its own, or `force` replaces it. A file that cannot be read is the engine's to report."""
    if force:
        return builtin(prompt_format)
    try:
        return builtin(prompt_format) if model is not None and not _has_template(model) else None
    except (OSError, ValueError, InvalidRequest):
        return None


def _has_template(model: Path) -> bool:
    if model.is_dir():
        return _in_folder(model) is not None
    status = model.stat()
    return _gguf_has_template(model, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _gguf_has_template(file: Path, changed: int, size: int) -> bool:  # noqa: ARG001 - the key of the cache
    return bool(read_contents(file, lists="none")[0].get("tokenizer.chat_template"))


def formats() -> tuple[str, ...]:
    return tuple(sorted({path.stem for path in _TEMPLATES.glob("*.jinja")} | {"chatml"}))


def prompt_formats() -> tuple[str, ...]:
    """Every name that `prompt_format` accepts: also those without the suffix of the file."""
    return tuple(sorted({*formats(), *(name.removesuffix("_template") for name in formats())}))


def _own(source: TemplateSource, prompt_format: str | None) -> TemplateSource:
    if prompt_format is None:
        return source
    why = f"prompt_format {prompt_format} is for models without a template; force_prompt_format = true would use it"
    return source._replace(origin=f"{source.origin}; {why}")


def _built_in(name: str, origin: str) -> TemplateSource:
    return TemplateSource(builtin(name), origin, stops=_STOPS[_file(name).stem])


@cache
def builtin(name: str) -> str:
    return _file(name).read_text("utf-8")


def _file(name: str) -> Path:
    known = _ALIASES.get(name, name)
    for stem in (known, f"{known}_template"):
        if known.replace("_", "").isalnum() and (path := _TEMPLATES / f"{stem}.jinja").is_file():
            return path
    close = difflib.get_close_matches(name, formats(), 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InvalidRequest(
        f"there is no prompt_format {name!r}; choose one of {', '.join(formats())}.{hint}", code="unknown_prompt_format"
    )


def _explicit(chat_template: str, folder: Path | None) -> TemplateSource:
    if "{" in chat_template or "\n" in chat_template:
        return TemplateSource(chat_template, "chat_template")
    path = Path(chat_template).expanduser()
    for place in (path, folder / path if folder is not None else path):
        if place.is_file():
            return TemplateSource(_read(place), f"chat_template {place}")
    raise InvalidRequest(
        f"chat_template {chat_template!r} is neither a template (it has no braces) nor a file that exists",
        code="template_missing",
        param="chat_template",
    )


def _in_folder(folder: Path) -> TemplateSource | None:
    if (path := folder / "chat_template.jinja").is_file():
        return TemplateSource(_read(path), str(path))
    for file in ("chat_template.json", "tokenizer_config.json"):
        path = folder / file
        if path.is_file() and (found := _in_json(path)) is not None:
            return found
    return None


def _in_json(path: Path) -> TemplateSource | None:
    try:
        value: Any = msgspec.json.decode(_read(path))
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path} is not valid JSON: {error}. Download it again", code="template_broken") from error
    template = value.get("chat_template") if isinstance(value, dict) else None
    if isinstance(template, str):
        return TemplateSource(template, str(path))
    if not isinstance(template, list):
        return None
    named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
    default = named.get("default") or next(iter(named.values()), None)
    return TemplateSource(default, str(path), named.get("tool_use")) if isinstance(default, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", code="template_broken") from error


def _how_to_get_one(name: str, folder: Path | None) -> str:
    where = f" in {folder}" if folder is not None else ""
    return (
        f"the model {name!r} has no chat template{where}. What to do: 1. find the source model it was made from; "
        "2. look for its chat_template.jinja, chat_template.json or the chat_template in its tokenizer_config.json; "
        "3. compare it with the model's documentation; 4. set chat_template to its text or path, or set prompt_format "
        f"to one of {', '.join(formats())}. Without one it takes bare prompts only (/v1/completions)"
    )
