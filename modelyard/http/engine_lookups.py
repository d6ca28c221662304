"""What clients of other servers look up before they send a prompt: llama-server's /props, /slots and /lora-adapters,
vLLM's /version, LM Studio's /api/v0/models.

All but `POST /slots/{id}` only read: the settings of a server are those of its configuration. `?model=` names a model,
as in llama-server's router; without it the default model answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from modelyard import __version__
from modelyard.core import limits
from modelyard.core.engine import Control, Engine, TextEngine
from modelyard.core.errors import InvalidRequest, Unavailable, Unsupported
from modelyard.core.protocol import ModelCard
from modelyard.core.request import MEDIA_MARK
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import Model
from modelyard.http.models import ModelEndpoints
from modelyard.http.ollama import LibraryOperations, ModelFile
from modelyard.http.request_context import RequestContext, read_body
from modelyard.http.settings import HttpSettings
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL
from modelyard.protocols.llama_completion import generation_settings
from modelyard.router.router import Target


class EngineLookups:
    def __init__(
        self, gateway: Gateway, models: ModelEndpoints, settings: HttpSettings, library: LibraryOperations | None
    ) -> None:
        self._gateway, self._models, self._settings, self._library = gateway, models, settings, library

    async def props(self, request: HttpRequest) -> Response:
        target, model = await self._model(request)
        entry, engine = self._gateway.lookup.router.catalog.models[model.name], self._gateway.leases.engine(model.name)
        limit = -1 if model.entry.max_tokens is None else model.entry.max_tokens
        params = generation_settings(model.sampling) | {
            "n_predict": limit,
            "max_tokens": limit,
            "stop": model.entry.stop,
        }
        body: dict[str, Any] = {
            "default_generation_settings": {"params": params, "n_ctx": target.window},
            "total_slots": entry.caches[target.cache].info.parallel if engine is None else _places(engine, target),
            "model_alias": model.name,
            "model_path": model.name,  # its file is no concern of a client
            "modalities": {kind: name in model.modalities for kind, name in _MODALITIES.items()},
            "media_marker": MEDIA_MARK,
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "build_info": f"modelyard {__version__}",
            "is_sleeping": engine is None,
        }
        return _json(body | _template_fields(model))

    async def slots(self, request: HttpRequest) -> Response:
        """`?fail_on_no_slot=1` is llama-server's check for load balancers."""
        target, model = await self._model(request)
        engine = self._gateway.leases.engine(model.name)
        rows = [] if engine is None else list(_slots(engine, target))
        if request.query_params.get("fail_on_no_slot") and rows and all(row["is_processing"] for row in rows):
            raise Unavailable(f"every slot of {model.name!r} is in use", code="no_slot_available")
        return _json(rows)

    async def change_slot(self, request: HttpRequest) -> Response:
        """`?action=save`, `restore` or `erase`: of the caller's own KV only, in files that only the caller can name."""
        started, context = time.perf_counter(), RequestContext.of(request.scope)
        action, id = request.query_params.get("action", ""), request.path_params["id"]
        if (change := _SLOT_ACTIONS.get(action)) is None or not id.isdecimal():
            raise InvalidRequest("send POST /slots/{number}?action=save, restore or erase", param="action")
        body = await read_body(request.receive, context, self._settings, _MAX_SLOT_BODY)
        name = decode(_slot_decoder, body).filename if body else ""
        if not name and action != "erase":
            raise InvalidRequest("filename is required", param="filename", code="missing_required_parameter")
        target, model = await self._model(request)
        if (engine := self._gateway.leases.engine(model.name)) is None:
            raise Unavailable(f"the model {model.name!r} is not loaded: it has no slots yet", code="model_not_loaded")
        if not isinstance(engine, TextEngine):
            raise Unsupported(f"the engine of {model.name!r} has no slots to save", code="unsupported_control")
        scope = "" if target.share_across_keys else context.caller().key
        moved = await engine.control(Control(change.op, target.cache, name, int(id[:9]), scope))
        if moved is None:
            raise Unsupported(f"the engine of {model.name!r} has no slots to save", code="unsupported_control")
        reply: dict[str, Any] = {"id_slot": int(id[:9]), change.tokens: moved.tokens}
        if action != "erase":
            spent = (time.perf_counter() - started) * 1000
            reply |= {"filename": name, change.bytes: moved.bytes, "timings": {f"{action}_ms": spent}}
        return _json(reply)

    async def lora_adapters(self, request: HttpRequest) -> Response:
        """The loaded ones. A request chooses one with `lora_adapter`."""
        _, model = await self._model(request)
        engine = self._gateway.leases.engine(model.name)
        adapters = () if engine is None else engine.stats().adapters
        return _json([{"id": at, "path": name, "scale": scale} for at, (name, scale) in enumerate(adapters)])

    async def version(self, _request: HttpRequest) -> Response:
        return _json({"version": __version__})

    async def lm_studio_models(self, request: HttpRequest) -> Response:
        """Every model that can answer. Under this path chat, completions and embeddings are those of /v1."""
        cards = self._models.answering(RequestContext.of(request.scope))
        return _json({"object": "list", "data": await asyncio.to_thread(lambda: list(map(self._lm_studio, cards)))})

    async def lm_studio_model(self, request: HttpRequest) -> Response:
        card = self._models.card(request.path_params["id"], RequestContext.of(request.scope))
        return _json(await asyncio.to_thread(self._lm_studio, card))

    def _lm_studio(self, card: ModelCard) -> dict[str, Any]:
        """Reads the model's file."""
        file = ModelFile() if self._library is None else self._library.describe(card.root)
        is_loaded = card.state == "ready"
        kinds = {"embedding": "embeddings", "vision": "vlm"}
        body: dict[str, Any] = {
            "id": card.id,
            "object": "model",
            "type": next((kind for name, kind in kinds.items() if name in card.capabilities), "llm"),
            "publisher": "modelyard",
            "arch": file.architecture,
            "compatibility_type": file.format or "other",
            "quantization": file.quantization,
            "state": "loaded" if is_loaded else "not-loaded",
            "max_context_length": card.context,
        }
        if is_loaded:
            body["loaded_context_length"] = card.context
        if "tools" in card.capabilities:
            body["capabilities"] = ["tool_use"]
        return body

    async def _model(self, request: HttpRequest) -> tuple[Target, Model]:
        name = request.query_params.get("model") or DEFAULT_MODEL
        return await self._gateway.lookup.find_defined(name, RequestContext.of(request.scope).caller())


class SlotBody(msgspec.Struct):
    filename: limits.Name = ""
    model: limits.Name = ""


class _SlotAction(msgspec.Struct, frozen=True):
    """Of an engine; `tokens` and `bytes` are the names of the counts in the reply."""

    op: Literal["save_slot", "restore_slot", "erase_slot"]
    tokens: str
    bytes: str = ""


_slot_decoder = msgspec.json.Decoder(SlotBody)
_MAX_SLOT_BODY = 1 << 16
_SLOT_ACTIONS = {
    "save": _SlotAction("save_slot", "n_saved", "n_written"),
    "restore": _SlotAction("restore_slot", "n_restored", "n_read"),
    "erase": _SlotAction("erase_slot", "n_erased"),
}
_MODALITIES = {"vision": "image", "video": "video", "audio": "audio"}


def _template_fields(model: Model) -> dict[str, Any]:
    """Empty for a model that another server renders and tokenizes for."""
    if model.text is None:
        return {"chat_template": "", "bos_token": "", "eos_token": ""}
    tokenizer, template = model.text.tokenizer, model.text.renderer.template_source
    bos, *ends = (
        "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
        for token in (tokenizer.bos, *sorted(tokenizer.eos))
    )
    ends.sort(key=lambda text: text not in template)  # of several, the one that ends a turn
    return {"chat_template": template, "bos_token": bos, "eos_token": ends[0] if ends else ""}


def _places(engine: Engine, target: Target) -> int:
    cache = engine.info.caches.get(target.cache)
    return 1 if cache is None else cache.parallel


def _slots(engine: Engine, target: Target) -> Iterator[dict[str, Any]]:
    """An engine that does not tell which of its places are in use fills them in order."""
    stats = engine.stats()
    known = stats.caches[target.cache].sequences if target.cache in stats.caches else ()
    for at in range(_places(engine, target)):
        running = known[at].running if at < len(known) else at < stats.running
        yield {"id": at, "n_ctx": target.window, "speculative": stats.guessed_tokens > 0, "is_processing": running}


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
