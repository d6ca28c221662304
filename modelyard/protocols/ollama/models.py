"""Ollama's endpoints that generate nothing: embeddings, lists and descriptions of models, changes of the library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import EmbeddingRequest
from modelyard.protocols.common.extensions import check_positive, present
from modelyard.protocols.common.json import decode, dumps, encode
from modelyard.protocols.common.openai_fields import require_model
from modelyard.protocols.common.vectors import shortened
from modelyard.protocols.ollama.fields import KeepAlive, nanoseconds, read_keep_alive, write_time

# --- embeddings -------------------------------------------------------------------------------------------------------


class OllamaEmbedBody(Struct):
    """Of `/api/embed`, and of `/api/embeddings`, its older form, which takes one `prompt`."""

    model: limits.Name | None = None
    input: limits.Text | Annotated[list[limits.Text], Meta(max_length=limits.MAX_INPUTS)] | None = None
    prompt: limits.Text | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: KeepAlive = None


_embed_decoder = msgspec.json.Decoder(OllamaEmbedBody)


def read_embed(body: bytes) -> EmbeddingRequest:
    """A long input is truncated unless the client forbids it."""
    parsed = decode(_embed_decoder, body)
    check_positive("dimensions", parsed.dimensions)
    inputs = (parsed.input,) if isinstance(parsed.input, str) else tuple(parsed.input or ())
    return _embedding_request(parsed, inputs, "input")


def read_embeddings(body: bytes) -> EmbeddingRequest:
    parsed = decode(_embed_decoder, body)
    return _embedding_request(parsed, (parsed.prompt or "",), "prompt")


def _embedding_request(body: OllamaEmbedBody, inputs: tuple[str, ...], name: str) -> EmbeddingRequest:
    if not inputs or "" in inputs:
        raise InvalidRequest(f"{name} is empty: send a text", param=name)
    return EmbeddingRequest(
        model=require_model(body.model),
        inputs=inputs,
        dimensions=body.dimensions,
        truncate=body.truncate is not False,
        keep_alive=read_keep_alive(body.keep_alive),
    )


def write_embed(vectors: Sequence[Sequence[float]], tokens: int, request: EmbeddingRequest, seconds: float) -> bytes:
    rows = [vector if request.dimensions is None else shortened(vector, request.dimensions) for vector in vectors]
    counts = {"total_duration": nanoseconds(seconds), "load_duration": 0, "prompt_eval_count": tokens}
    return encode({"model": request.model, "embeddings": rows} | counts)


def write_embeddings(vectors: Sequence[Sequence[float]]) -> bytes:
    return encode({"embedding": vectors[0]})


# --- models -----------------------------------------------------------------------------------------------------------


class OllamaModel(Struct, frozen=True, kw_only=True):
    """A model as the lists show it. `modified` and `expires` are unix times; `expires` is None for a model that stays.
    Sizes are bytes, `parameters` is a number."""

    name: str
    size: int = 0
    modified: float = 0.0
    format: str = "gguf"
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    parent: str = ""
    context: int | None = None
    loaded_size: int = 0
    gpu_size: int = 0
    expires: float | None = None


_LATEST = ":latest"
_FOREVER = "2318-01-01T00:00:00Z"


def tagged(name: str) -> str:
    """Every model of Ollama has a tag; some clients depend on it."""
    return name if ":" in name else name + _LATEST


def write_tags(models: Iterable[OllamaModel]) -> bytes:
    rows = [_row(m) | {"modified_at": write_time(m.modified), "size": m.size} | _details(m) for m in models]
    return encode({"models": rows})


def write_ps(models: Iterable[OllamaModel]) -> bytes:
    rows = [
        _row(m)
        | {
            "size": m.loaded_size,
            "size_vram": m.gpu_size,
            "expires_at": _FOREVER if m.expires is None else write_time(m.expires),
            "context_length": m.context or 0,
        }
        | _details(m)
        for m in models
    ]
    return encode({"models": rows})


def _row(model: OllamaModel) -> dict[str, Any]:
    """The digest identifies the file by name, size and time: to read gigabytes for a list would take minutes."""
    digest = hashlib.sha256(f"{model.name} {model.size} {model.modified}".encode()).hexdigest()
    return {"name": tagged(model.name), "model": tagged(model.name), "digest": digest}


def _details(model: OllamaModel) -> dict[str, Any]:
    details = {
        "parent_model": model.parent,
        "format": model.format,
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": _count(model.parameters),
        "quantization_level": model.quantization,
    }
    return {"details": details}


def _count(number: int) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number) if number else ""


class OllamaDescription(Struct, frozen=True, kw_only=True):
    """What `/api/show` tells. `info` is the metadata of the file under its own names."""

    model: OllamaModel
    capabilities: tuple[str, ...] = ("completion",)
    template: str = ""
    system: str = ""
    license: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


def write_show(shown: OllamaDescription) -> bytes:
    model, architecture = shown.model, shown.model.family or "modelyard"
    info: dict[str, Any] = {"general.architecture": architecture}
    info |= {"general.parameter_count": model.parameters} if model.parameters else {}
    info |= shown.info
    if model.context is not None:
        info[f"{architecture}.context_length"] = model.context  # of a conversation here: clients plan with it
    parameters = [*_parameters(shown.parameters)]
    if model.context is not None:
        parameters.append(("num_ctx", str(model.context)))
    body = {
        "modelfile": _modelfile(shown, parameters),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),
        "template": shown.template,
        "model_info": info,
        "capabilities": shown.capabilities,
        "modified_at": write_time(model.modified),
    }
    return encode(body | _details(model) | present(system=shown.system or None, license=shown.license or None))


def _parameters(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            yield name, dumps(one) if isinstance(one, str) else str(one)


def _modelfile(shown: OllamaDescription, parameters: Iterable[tuple[str, str]]) -> str:
    lines = [f"FROM {tagged(shown.model.parent or shown.model.name)}"]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    lines += [f'SYSTEM """{shown.system}"""'] if shown.system else []
    return "\n".join(lines) + "\n"


# --- changes of the library -------------------------------------------------------------------------------------------


class OllamaModelBody(Struct):
    """Of `pull`, `delete` and `show`. `name` is the older name of `model`."""

    model: limits.Name | None = None
    name: limits.Name | None = None
    stream: bool | None = None

    @property
    def chosen(self) -> str:
        return require_model(self.model or self.name)


class OllamaCopyBody(Struct):
    source: limits.Name = ""
    destination: limits.Name = ""


Files = Annotated[dict[limits.Name, limits.Name], Meta(max_length=1000)]


class OllamaCreateBody(Struct):
    model: limits.Name | None = None
    name: limits.Name | None = None
    from_: limits.Name | None = field(default=None, name="from")
    files: Files | None = None
    adapters: Files | None = None
    template: limits.Text | None = None
    license: limits.Text | Annotated[list[limits.Text], Meta(max_length=100)] | None = None
    system: limits.Text | None = None
    parameters: limits.JsonObject | None = None
    messages: Annotated[list[limits.JsonObject], limits.Messages] | None = None
    modelfile: limits.Text | None = None
    quantize: limits.Word | None = None
    stream: bool | None = None


_model_decoder = msgspec.json.Decoder(OllamaModelBody)
_copy_decoder = msgspec.json.Decoder(OllamaCopyBody)
_create_decoder = msgspec.json.Decoder(OllamaCreateBody)


def read_model(body: bytes) -> OllamaModelBody:
    return decode(_model_decoder, body)


def read_copy(body: bytes) -> OllamaCopyBody:
    parsed = decode(_copy_decoder, body)
    if not parsed.source or not parsed.destination:
        raise InvalidRequest(
            "source and destination are required", param="source" if not parsed.source else "destination"
        )
    return parsed


class NewModel(Struct, frozen=True, kw_only=True):
    """A model to create. It is the model `base`, or the uploaded file with the digest `file`, with other settings:
    `sampling` under our names, and with `max_tokens` and `stop`. `ignored` are parameters without effect."""

    name: str
    base: str = ""
    file: str = ""
    adapter: str = ""
    system: str | None = None
    template: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    ignored: tuple[str, ...] = ()


_PARAMETERS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
_GO_TEMPLATE = ("{{ .", "{{- .", "{{.", "{{-", "{{ if", "{{ range", "$.")


def read_create(body: bytes) -> tuple[NewModel, bool]:
    """The model, and whether its progress is streamed. What would change the model and cannot be done is refused."""
    parsed = decode(_create_decoder, body)
    if parsed.modelfile is not None:
        raise Unsupported(
            "modelfile is no field any more: send from, system, parameters and adapters", param="modelfile"
        )
    if parsed.quantize:
        raise Unsupported("models are not quantized here: pull a quantized file", param="quantize")
    if parsed.messages:
        raise Unsupported("a model cannot begin with messages here: send them in each request", param="messages")
    if parsed.template and any(mark in parsed.template for mark in _GO_TEMPLATE) and "{%" not in parsed.template:
        raise Unsupported(
            "templates are Jinja here, and this one is Go's: leave it out, the model's file has its own",
            param="template",
        )
    if parsed.template and "{%" not in parsed.template and "{{" not in parsed.template:
        raise InvalidRequest("template must be the text of a Jinja template", param="template")  # never a path
    file, adapter = _only(parsed.files, "files"), _only(parsed.adapters, "adapters")
    if bool(parsed.from_) == bool(file):
        raise InvalidRequest(
            "send either from, a model that exists, or files with one uploaded GGUF file", param="from"
        )
    given = parsed.parameters or {}
    sampling = {ours: given[name] for name, ours in _PARAMETERS.items() if name in given}
    if given.get("num_predict") in (-1, -2):  # no limit
        del sampling["max_tokens"]
    model = NewModel(
        name=require_model(parsed.model or parsed.name),
        base=parsed.from_ or "",
        file=file,
        adapter=adapter,
        system=parsed.system,
        template=parsed.template or None,
        sampling=sampling,
        window=given.get("num_ctx"),
        ignored=tuple(str(name)[:100] for name in given if name not in _PARAMETERS and name != "num_ctx"),
    )
    return model, parsed.stream is not False


def renamed(model: NewModel, name: str, base: str) -> NewModel:
    return replace(model, name=name, base=base)


def _only(files: Mapping[str, str] | None, field_name: str) -> str:
    """The digest of the only file; empty if there is none."""
    if not files:
        return ""
    if len(files) > 1:
        raise Unsupported(f"{field_name} has {len(files)} files, and one is supported", param=field_name)
    return next(iter(files.values()))


def write_status(status: str, **more: Any) -> bytes:
    """A line of progress: `total` and `completed` are bytes."""
    return encode({"status": status} | more) + b"\n"


def write_version(version: str) -> bytes:
    return encode({"version": version})
