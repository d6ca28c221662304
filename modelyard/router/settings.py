"""Settings of models, their caches and the routes to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from msgspec.structs import fields as struct_fields
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from modelyard.core.request import Sampling


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Modality = Literal["text", "image", "audio"]
OneOrMore = Annotated[
    list[str],
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class DecodingSettings(BaseModel):
    """Defaults of sampling. A request's own values win over a model's, a model's over the general ones."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(
        default=None, ge=0, le=100, description="Randomness; 0 always takes the likeliest token."
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="Sample from the likeliest tokens that add up to this share."
    )
    top_k: int | None = Field(
        default=None, ge=-1, description="Sample from so many of the likeliest tokens; 0 or -1 means all."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Drop tokens less likely than this share of the best one."
    )
    typical_p: float | None = Field(default=None, ge=0, le=1, description="Locally typical sampling; 1 turns it off.")
    repetition_penalty: float | None = Field(
        default=None, ge=0, le=100, description="Divides the score of tokens already used; 1 turns it off."
    )
    presence_penalty: float | None = Field(
        default=None, description="Lowers tokens that were used at all; 0 turns it off."
    )
    frequency_penalty: float | None = Field(
        default=None, description="Lowers tokens by how often they were used; 0 is off."
    )
    dry_multiplier: float | None = Field(
        default=None, ge=0, description="Strength of DRY, which breaks repeated phrases; 0 is off."
    )
    dry_base: float | None = Field(
        default=None, ge=0, description="How fast DRY's penalty grows with a phrase's length."
    )
    dry_allowed_length: int | None = Field(
        default=None, ge=0, description="Phrases up to this length are free of DRY's penalty."
    )
    dry_penalty_last_n: int | None = Field(
        default=None, ge=-1, description="How many tokens DRY looks back; -1 means all."
    )
    dry_sequence_breakers: list[str] | None = Field(
        default=None, description="Texts at which DRY starts to count anew."
    )
    xtc_probability: float | None = Field(
        default=None, ge=0, le=1, description="Chance that XTC removes the likeliest tokens."
    )
    xtc_threshold: float | None = Field(
        default=None, ge=0, le=1, description="Tokens above this probability are XTC's to remove."
    )
    mirostat: int | None = Field(default=None, ge=0, le=2, description="Mirostat version, 1 or 2; 0 turns it off.")
    mirostat_tau: float | None = Field(default=None, ge=0, description="Surprise that Mirostat steers to.")
    mirostat_eta: float | None = Field(default=None, ge=0, description="How fast Mirostat corrects itself.")
    beam_size: int | None = Field(
        default=None, ge=1, description="Beams to search, where the engine can (CTranslate2)."
    )
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    logit_bias: dict[int, float] | None = Field(default=None, description="Added to the score of a token, by token id.")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest answer where the client names none; unset means the room left in the window.",
    )
    stop: OneOrMore = Field(default_factory=list, description="Stop strings added to the client's own.")

    def sampling(self) -> Sampling:
        asked = {n: value for n in _KNOBS if (value := getattr(self, n)) is not None}
        if breakers := asked.get("dry_sequence_breakers"):
            asked["dry_sequence_breakers"] = tuple(breakers)
        return Sampling(**asked)


_KNOBS = tuple(f.name for f in struct_fields(Sampling))


class RouteSettings(BaseModel):
    """One rule of the router. The first whose `match` and `endpoint` fit a request decides."""

    model_config = ConfigDict(extra="forbid")

    match: OneOrMore = Field(
        default_factory=lambda: ["*"],
        min_length=1,
        description="Glob, or list of globs, on the model name that the client asks for; case does not count.",
    )
    endpoint: str | None = Field(
        default=None,
        min_length=1,
        description='Glob on the request\'s path, such as "/v1/messages*"; unset fits every path.',
    )
    model: str | None = Field(
        default=None, description="Model to send the request to, in its default cache unless cache is set."
    )
    cache: str | None = Field(default=None, description="Cache to send the request to; it names its model itself.")
    allow_remote: bool = Field(
        default=False, description="Whether requests on this route may go to models that send data to another server."
    )

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Self:
        if self.model is None and self.cache is None:
            raise ValueError("a route needs cache or model, the place to send requests to")
        return self


class CacheSettings(BaseModel):
    """A named KV context of a model, isolated from the model's other caches; the weights are shared."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="The model, by its name under [models].")
    n_ctx: int = Field(gt=0, description="Window of ONE conversation in tokens; the memory taken is n_ctx × parallel.")
    parallel: int = Field(default=1, ge=1, description="Conversations that fit at a time.")
    description: str = Field(default="", description="What the cache is for; shown by modelyard check.")
    type_k: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_k", "cache_type_k", "gguf_type_k"),
        description="Number format of cached keys, such as f16, q8_0 or q4_0; unset means the model's.",
    )
    type_v: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_v", "cache_type_v", "gguf_type_v"),
        description="Number format of cached values; unset means the model's.",
    )
    overflow: Literal["clamp", "strict"] = Field(
        default="clamp",
        description="When the prompt fits but max_tokens more do not: shorten the answer (clamp) or refuse (strict).",
    )
    n_batch: int | None = Field(
        default=None, gt=0, description="Tokens of a prompt that are handed to the engine at a time."
    )
    n_ubatch: int | None = Field(default=None, gt=0, description="Tokens that the engine computes at a time.")
    flash_attn: bool | None = Field(
        default=None, description="Flash attention on or off; unset lets the engine choose."
    )
    n_threads: int | None = Field(
        default=None, gt=0, description="CPU threads of this cache; unset lets the engine choose."
    )


class ModelSettings(BaseModel):
    """A model. Keys that are none of these are the backend's own and gather in `options`."""

    model_config = ConfigDict(extra="forbid")

    backend: str | None = Field(
        default=None,
        description="Engine that runs the model. Unset: engine.backend, else by path: llama_cpp for GGUF, ct2 for CT2.",
    )
    path: str | None = Field(
        default=None,
        validation_alias=AliasChoices("path", "model_path"),
        description="File or folder of the weights.",
    )
    tokenizer_path: str | None = Field(
        default=None, description="File or folder of the tokenizer, where it is not with the weights."
    )
    chat_template: str | None = Field(
        default=None, description="The Jinja chat template, as text or as the path of a file."
    )
    prompt_format: str | None = Field(default=None, description="Name of a built-in chat template, such as generic.")
    format: str | None = Field(
        default=None, description="How the model writes reasoning and tool calls, such as hermes; unset is found out."
    )
    tools_prompt: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether the system prompt tells in words how to call tools: where the template knows none (auto), "
        "always (in place of the template's own way), or never.",
    )
    tool_stream: bool = Field(
        default=True,
        description="Whether a tool call's arguments are sent as they come; false holds each call until it is whole.",
    )
    constrain_calls: bool = Field(
        default=False,
        description="Whether every tool call is held to its schema; else only where the client demands a call or marks "
        "a tool as strict.",
    )
    enable_thinking: bool | None = Field(
        default=None, description="Template's thinking switch where the client sets none."
    )
    show_thinking: bool = Field(
        default=True, description="Whether clients see the reasoning; it counts in usage either way."
    )
    enabled: bool | None = Field(
        default=None, description="Load at start. Unset means true under [models], false under engine.models."
    )
    autoload: bool = Field(default=False, description="Load at the first request for it, where it is not loaded.")
    aliases: OneOrMore = Field(default_factory=list, description="Other names that clients may ask for.")
    replicas: int = Field(default=1, ge=1, description="Identical instances to load.")
    replica_max: int = Field(
        default=1, ge=1, description="Most instances that may be loaded; unset means as many as replicas."
    )
    target_inflight: int | None = Field(
        default=None,
        ge=1,
        description="Requests handed to one instance at a time; unset means as many as its caches hold.",
    )
    idle_ttl_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds without a request after which it is unloaded until the next one; 0 means never, unset "
        "means scheduler.idle_ttl_s.",
    )
    modalities: list[Modality] = Field(default=["text"], min_length=1, description="What the model can read.")
    n_ctx: int | None = Field(
        default=None,
        gt=0,
        validation_alias=AliasChoices("n_ctx", "gguf_n_ctx", "llama_server_n_ctx", "vllm_max_model_len"),
        description="Window of a model without [caches]; unset means 4096. Ignored where caches name it.",
    )
    type_k: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_k", "cache_type_k", "gguf_type_k"),
        description="Number format of cached keys for caches that set none of their own; unset means f16.",
    )
    type_v: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_v", "cache_type_v", "gguf_type_v"),
        description="Number format of cached values for caches that set none of their own; unset means f16.",
    )
    parallel: int | None = Field(
        default=None,
        ge=1,
        description="Conversations at a time of a model without [caches]; unset: target_inflight, else 1.",
    )
    decoding: DecodingSettings = Field(
        default=DecodingSettings(), description="Sampling defaults of this model, over the general [decoding]."
    )
    description: str = Field(default="", description="Shown in model lists.")
    placement: Literal["auto", "inline", "process"] = Field(
        default="auto",
        description="Where the engine runs: in the gateway's process, in a child, or as its kind suggests.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment that the engine's own process runs in, such as "
        "~/vllm-env/bin/python; this program need not be installed there. Unset: the gateway's own.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="The backend's own fields. They may also stand directly in the model's section.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = {key: value for key, value in data.items() if key not in MODEL_KEYS}
        if not own or not isinstance(data.get("options", {}), dict):
            return data
        common = {key: value for key, value in data.items() if key in MODEL_KEYS}
        return common | {"options": data.get("options", {}) | own}

    @model_validator(mode="after")
    def _python_has_a_process(self) -> Self:
        if self.python is not None and self.placement == "inline":
            raise ValueError("python is the interpreter of a process, and placement is inline; leave one of them out")
        return self

    @model_validator(mode="after")
    def _replicas_fit(self) -> Self:
        if "replica_max" not in self.model_fields_set:
            self.replica_max = self.replicas
        if self.replicas > self.replica_max:
            raise ValueError(f"replicas is {self.replicas}, more than replica_max ({self.replica_max})")
        return self


MODEL_KEYS = frozenset(ModelSettings.model_fields).union(
    str(name)
    for info in ModelSettings.model_fields.values()
    if isinstance(info.validation_alias, AliasChoices)
    for name in info.validation_alias.choices
)
