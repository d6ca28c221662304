"""Settings of models, their caches and the routes to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from msgspec.structs import fields as struct_fields
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from modelyard.accounts.settings import PriceSettings
from modelyard.core.request import Sampling


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Modality = Literal["text", "image", "audio"]
OneOrMore = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _lower(value: Any) -> Any:
    """Names of data types, which the engine knows (its KV_TYPES)."""
    return value.lower() if isinstance(value, str) else value


SamplerName = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"
]


class DecodingSettings(BaseModel):
    """Sampling defaults. Values of a request override those of its model, which override the general ones."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(
        default=None, ge=0, le=100, description="Randomness; 0 always selects the most likely token."
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="Sample from the most likely tokens whose probabilities add up to this."
    )
    top_k: int | None = Field(
        default=None, ge=-1, description="Sample from this many of the most likely tokens; 0 or -1 means all."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Drop tokens less likely than this fraction of the most likely one."
    )
    typical_p: float | None = Field(default=None, ge=0, le=1, description="Locally typical sampling; 1 turns it off.")
    repetition_penalty: float | None = Field(
        default=None, ge=0, le=100, description="Divides the logit of tokens already used; 1 turns it off."
    )
    presence_penalty: float | None = Field(
        default=None, description="Subtracted from the logit of tokens already used; 0 turns it off."
    )
    frequency_penalty: float | None = Field(
        default=None, description="Subtracted from the logit of a token once per use; 0 turns it off."
    )
    dry_multiplier: float | None = Field(
        default=None, ge=0, description="Strength of DRY, which penalizes repeated phrases; 0 turns it off."
    )
    dry_base: float | None = Field(
        default=None, ge=0, description="Growth of DRY's penalty with the length of a phrase."
    )
    dry_allowed_length: int | None = Field(
        default=None, ge=0, description="Phrases up to this length get no DRY penalty."
    )
    dry_penalty_last_n: int | None = Field(default=None, ge=-1, description="Tokens that DRY looks back; -1 means all.")
    dry_sequence_breakers: list[str] | None = Field(default=None, description="Texts at which DRY stops matching.")
    xtc_probability: float | None = Field(
        default=None, ge=0, le=1, description="Probability that XTC removes the most likely tokens."
    )
    xtc_threshold: float | None = Field(
        default=None, ge=0, le=1, description="XTC removes tokens above this probability."
    )
    mirostat: int | None = Field(default=None, ge=0, le=2, description="Mirostat version, 1 or 2; 0 turns it off.")
    mirostat_tau: float | None = Field(default=None, ge=0, description="Target entropy of Mirostat.")
    mirostat_eta: float | None = Field(default=None, ge=0, description="Learning rate of Mirostat.")
    beam_size: int | None = Field(
        default=None, ge=1, description="Beams of beam search, if the engine supports it (CTranslate2)."
    )
    seed: int | None = Field(default=None, description="Seed of the random generator, for reproducible sampling.")
    logit_bias: dict[int, float] | None = Field(default=None, description="Added to the logits of tokens, by token id.")
    top_n_sigma: float | None = Field(
        default=None, le=100, description="Keep tokens within so many standard deviations of the best; negative: off."
    )
    dynatemp_range: float | None = Field(
        default=None, ge=0, le=100, description="The temperature moves by this much with the entropy; 0: it is fixed."
    )
    dynatemp_exponent: float | None = Field(
        default=None, ge=0, le=100, description="How the entropy maps to the temperature; unset means 1."
    )
    adaptive_target: float | None = Field(
        default=None,
        le=1,
        description="Prefer tokens near this probability, adapted over time; negative: off. Set min_p as well, such as "
        "0.05: else many tokens of almost no probability are as near as likely ones.",
    )
    adaptive_decay: float | None = Field(
        default=None, ge=0, le=0.99, description="How slowly adaptive_target adapts; unset means 0.9."
    )
    repeat_last_n: int | None = Field(
        default=None, ge=-1, description="Tokens that penalties look back at; -1: the window; unset means 64."
    )
    samplers: list[SamplerName] | None = Field(
        default=None,
        description="The samplers that are used, in this order: penalties, dry, top_n_sigma, top_k, typ_p, top_p, "
        "min_p, xtc, temperature, adaptive_p; unset means those that have values, in this order.",
    )
    min_tokens: int | None = Field(
        default=None, ge=0, description="Tokens of an answer before one that ends it is possible."
    )
    ignore_eos: bool | None = Field(
        default=None, description="No token ends an answer: only a limit or a stop string does, for measurements."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Output limit if the client sets none; unset means the rest of the window."
    )
    max_repeated_tokens: int | None = Field(
        default=None,
        ge=0,
        description="End an answer that repeats itself: the same pattern of up to 512 tokens, five times and for this "
        "many tokens; 0 turns it off, unset means 512. A DRY penalty comes first, if the engine has one.",
    )
    stop: OneOrMore = Field(default_factory=list, description="Stop strings, in addition to those of the client.")

    def sampling(self) -> Sampling:
        values = {name: value for name in _PARAMETERS if (value := getattr(self, name)) is not None}
        if (breakers := values.get("dry_sequence_breakers")) is not None:
            values["dry_sequence_breakers"] = tuple(breakers)
        if samplers := values.get("samplers"):
            values["samplers"] = tuple(samplers)
        return Sampling(**values)


_PARAMETERS = tuple(f.name for f in struct_fields(Sampling))


class RouteSettings(BaseModel):
    """One rule of the router: a name without wildcards comes before every pattern, then the first match applies."""

    model_config = ConfigDict(extra="forbid")

    match: OneOrMore = Field(
        default_factory=lambda: ["*"],
        min_length=1,
        description="Glob, or list of globs, on the requested model name; case is ignored. One without wildcards comes "
        "before all others.",
    )
    override: bool = Field(
        default=False,
        description="Let a pattern also take the names of other models: this route answers to the ids, aliases and "
        "caches that it matches. Otherwise a pattern leaves them alone.",
    )
    endpoint: str | None = Field(
        default=None,
        min_length=1,
        description='Glob on the path of the request, such as "/v1/messages*"; unset matches every path.',
    )
    model: str | None = Field(
        default=None, description="Model for the request, in its default cache unless cache is set."
    )
    cache: str | None = Field(default=None, description="Cache for the request; it implies the model.")
    fallback: OneOrMore = Field(
        default_factory=list,
        description="Models, aliases or caches that are tried in this order if the route's own cannot answer: it is "
        "not loaded, its queue is full, it fails before the first token, or it cannot take such a request.",
    )
    fallback_wait_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a request waits for a model, in its queue or until it is loaded, before the next one "
        "is tried; unset: as long as without a fallback. The last one is always waited for.",
    )
    allow_remote: bool = Field(
        default=False, description="Allow requests on this route to use models that send data to another server."
    )
    mcp: OneOrMore = Field(
        default_factory=list,
        description="MCP servers (of mcp.servers) whose tools the model is offered in every request of this route. The "
        "gateway calls them; clients that do not know MCP see only the answer.",
    )
    auto_compact: bool = Field(
        default=False,
        description="Where a conversation nearly fills the window, let the model summarize its oldest turns, in place "
        "of an error. The newest turns stay as they are; the response header x-modelyard-compacted says what was done.",
    )

    @model_validator(mode="after")
    def _require_target(self) -> Self:
        if self.model is None and self.cache is None:
            raise ValueError("a route needs cache or model, the target of its requests")
        return self


Parallel = Annotated[int, Field(ge=1)] | Literal["auto"]


class CacheSettings(BaseModel):
    """A named KV context of a model, isolated from its other caches. The weights are shared."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="The model, by its name under [models].")
    n_ctx: int = Field(
        gt=0, description="Window of ONE conversation in tokens; memory is used for n_ctx × parallel tokens."
    )
    parallel: Parallel = Field(
        default=1,
        description="Conversations at the same time; auto: up to 8, as many as fit into the machine's memory beside "
        "the weights.",
    )
    description: str = Field(default="", description="Purpose of the cache, shown by modelyard check.")
    type_k: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_k", "cache_type_k", "gguf_type_k"),
        description="Data type of cached keys, such as f16, q8_0 or q4_0; unset means the model's.",
    )
    type_v: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_v", "cache_type_v", "gguf_type_v"),
        description="Data type of cached values; unset means the model's.",
    )
    share_across_keys: bool | None = Field(
        default=None,
        description="Let API keys reuse each other's KV in this cache. Then a key can find out what another one has "
        "sent, by counts and times; unset means the model's.",
    )
    overflow: Literal["clamp", "strict"] = Field(
        default="clamp",
        description="If the prompt fits but not with max_tokens: limit the output (clamp) or refuse (strict).",
    )
    n_batch: int | None = Field(default=None, gt=0, description="Prompt tokens passed to the engine at a time.")
    n_ubatch: int | None = Field(default=None, gt=0, description="Tokens that the engine computes at a time.")
    flash_attn: bool | None = Field(default=None, description="Use flash attention; unset lets the engine choose.")
    kv_unified: bool | None = Field(
        default=None, description="Let this cache's conversations share one pool of KV cells; unset means the model's."
    )
    n_threads: int | None = Field(
        default=None, gt=0, description="CPU threads of this cache; unset lets the engine choose."
    )

    _lower_types = field_validator("type_k", "type_v", mode="before")(_lower)


class ModelSettings(BaseModel):
    """A model. Other keys are fields of its backend and are collected in `options`."""

    model_config = ConfigDict(extra="forbid")

    backend: str | None = Field(
        default=None,
        description="Engine. Unset: engine.backend, else by path: llama_cpp for GGUF, ct2 for CTranslate2.",
    )
    path: str | None = Field(
        default=None, validation_alias=AliasChoices("path", "model_path"), description="File or folder of the weights."
    )
    tokenizer_path: str | None = Field(
        default=None, description="File or folder of the tokenizer, if it is not with the weights."
    )
    chat_template: str | None = Field(
        default=None, description="The Jinja chat template, as text or as the path of a file."
    )
    prompt_format: str | None = Field(
        default=None,
        description="Name of a built-in chat template, such as generic, for a model that has no template of its own.",
    )
    force_prompt_format: bool = Field(
        default=False,
        description="Use prompt_format even if the model has its own template. Its wording differs from the model's.",
    )
    format: str | None = Field(
        default=None, description="Output format of reasoning and tool calls, such as hermes; unset detects it."
    )
    tools_prompt: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Describe tools and their call format in the system prompt: if the template does not support tools "
        "(auto), always (instead of the template's support), or never.",
    )
    tool_stream: bool = Field(
        default=True, description="Stream the arguments of tool calls; false sends each call when it is complete."
    )
    constrain_calls: bool = Field(
        default=False,
        description="Constrain every tool call to its schema; false does so only if the client requires a call or "
        "marks a tool as strict.",
    )
    spm_infill: bool = Field(
        default=False,
        description="Fill-in-the-middle prompts begin with the text after the gap (suffix, prefix, middle), as some "
        "models were trained; false begins with the text before it.",
    )
    system_prompt: str | None = Field(
        default=None, description="System prompt of conversations that begin with none of their own."
    )
    lora_adapter: str | None = Field(
        default=None, description="LoRA adapter of requests that name none, by its name under lora."
    )
    enable_thinking: bool | None = Field(
        default=None, description="Thinking switch of the template if the client sets none."
    )
    show_thinking: bool = Field(
        default=True, description="Send the reasoning to clients; usage includes it either way."
    )
    enabled: bool | None = Field(
        default=None, description="Load at start. Unset means true under [models], false under engine.models."
    )
    autoload: bool = Field(default=False, description="Load at the first request, if it is not loaded.")
    aliases: OneOrMore = Field(default_factory=list, description="Other names for clients.")
    replicas: int = Field(default=1, ge=1, description="Identical instances to load.")
    replica_max: int = Field(default=1, ge=1, description="Maximum number of instances; unset means replicas.")
    target_inflight: int | None = Field(
        default=None,
        ge=1,
        description="Requests passed to one instance at a time; unset means the capacity of its caches.",
    )
    idle_ttl_s: float | None = Field(
        default=None,
        ge=0,
        description="Unload after this many seconds without a request, until the next one; 0 means never, unset means "
        "scheduler.idle_ttl_s.",
    )
    modalities: list[Modality] = Field(default=["text"], min_length=1, description="Types of input.")
    n_ctx: int | None = Field(
        default=None,
        gt=0,
        validation_alias=AliasChoices("n_ctx", "gguf_n_ctx", "llama_server_n_ctx", "vllm_max_model_len"),
        description="Window of a model without [caches]; unset means 4096. Ignored if caches refer to the model.",
    )
    type_k: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_k", "cache_type_k", "gguf_type_k"),
        description="Data type of cached keys for caches that set none; unset means f16.",
    )
    type_v: str | None = Field(
        default=None,
        validation_alias=AliasChoices("type_v", "cache_type_v", "gguf_type_v"),
        description="Data type of cached values for caches that set none; unset means f16.",
    )
    share_across_keys: bool = Field(
        default=False,
        description="Let API keys reuse each other's KV in caches that set nothing. False: a prompt is compared with "
        "those of its own key only.",
    )
    parallel: Parallel | None = Field(
        default=None,
        description="Conversations at the same time of a model without [caches]: a number, or auto for up to 8, as "
        "many as fit into the machine's memory; unset: target_inflight, else 1.",
    )
    decoding: DecodingSettings = Field(
        default=DecodingSettings(), description="Sampling defaults of this model; they override [decoding]."
    )
    price: PriceSettings | None = Field(
        default=None,
        description="What this model's tokens cost, per million, in accounts.currency; unset: nothing.",
    )
    description: str = Field(default="", description="Shown in model lists.")
    placement: Literal["auto", "inline", "process"] = Field(
        default="auto",
        description="Where the engine runs: in the gateway (inline), in a child process, or as is best for the engine.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Python interpreter for the process of the engine, such as ~/vllm-env/bin/python; Modelyard need "
        "not be installed there. Unset: the interpreter of the gateway.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the backend. They can also be set directly in the section of the model.",
    )

    _lower_types = field_validator("type_k", "type_v", mode="before")(_lower)

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = {key: value for key, value in data.items() if key not in MODEL_KEYS}
        if not own or not isinstance(data.get("options", {}), dict):
            return data
        common = {key: value for key, value in data.items() if key in MODEL_KEYS}
        return common | {"options": data.get("options", {}) | own}

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.python is not None and self.placement == "inline":
            raise ValueError("python sets the interpreter of a process, but placement is inline; remove one of them")
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
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
