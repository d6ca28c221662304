"""The shape of a model, read from the header of its GGUF file: what decides how much memory it needs.

llama.cpp derives its caches from the same numbers. Most are in the metadata; which layers have a sliding window, and of
which length, the architecture says if the file does not (`_SLIDING`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from modelyard.core.errors import InvalidRequest
from modelyard.library import architectures
from modelyard.library.gguf import ModelPurpose, TensorInfo, model_purpose, read_contents
from modelyard.library.model_files import split_parts

_MAX_LAYERS = 1 << 16  # more means a corrupt number
_POSITION_TABLE = "position_embd.weight"


# Recurrent and hybrid ones that can take back tokens of the last decode, as the pinned release of llama.cpp has it.
ROLLBACK_ARCHITECTURES = frozenset(
    (
        "bailingmoe3",
        "deepseek4",
        "glm5-next",
        "kimi-k3",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen4exp",
    )
)


# Those whose MTP layers llama.cpp runs: one, where it asserts that, or several in turn.
_ONE_MTP_LAYER = {
    *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "nemotron_h_moe"),
    *("qwen35", "qwen35moe"),
}
_MTP_LAYERS = {"hy_v3", "mimo2", "step35"}
# Files that draft for another model, by architecture, and the kind of drafts.
HEAD_FILES = {"gemma4-assistant": "mtp", "eagle3": "eagle3", "dflash": "dflash"}
# Those of whose layers llama.cpp gives the inputs, which EAGLE-3 reads.
FEATURE_ARCHITECTURES = {
    *("bailingmoe3", "deepseek4", "gemma3n", "gemma4", "gpt-oss", "hunyuan_vl", "lfm2", "llama", "mimo2", "minimax-01"),
    *("minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"),
    "qwen4exp",
}


class ModelShape(Struct, frozen=True):
    """`key` and `value` are the widths of one token's KV, summed over the layers that keep all tokens; `sliding_key`
    and `sliding_value` are those of the layers that need only the last `sliding_window`. `padded_value` is `value`
    without flash attention. `state` counts the numbers that the recurrent layers keep for a sequence, `activations`
    those that a layer computes for a token, `attention_activations` those of its attention, besides the scores."""

    weights: int
    trained: int
    layers: int
    width: int
    heads: int
    vocab: int
    key: int
    value: int
    sliding_key: int = 0
    sliding_value: int = 0
    sliding_window: int = 0
    padded_value: int | None = None
    state: int = 0
    activations: int = 0
    attention_activations: int = 0
    head_size: int = 0
    files: tuple[tuple[int, list[TensorInfo]], ...] = ()  # size and tensors of each
    purpose: ModelPurpose = ModelPurpose()
    architecture: str = ""
    positions: int | None = None  # rows of the table of learned positions: no text may be longer
    mtp_layers: int = 0  # that can draft
    unused_mtp_layers: int = 0  # of an architecture whose MTP layers are not run
    mtp_key: int = 0  # widths of one token's KV in the MTP layers
    mtp_value: int = 0
    feature_width: int = 0  # of the target that an EAGLE-3 file reads

    def head_shape(self) -> ModelShape | None:
        """The MTP layers as a model of their own; their weights count for the model."""
        if not self.mtp_layers:
            return None
        own = {"weights": 0, "files": (), "layers": self.mtp_layers, "key": self.mtp_key, "value": self.mtp_value}
        return structs.replace(self, **own, sliding_key=0, sliding_value=0, padded_value=None, state=0)


def read_model_shape(file: Path) -> ModelShape:
    try:
        parts = split_parts(file)
        contents = [read_contents(part, lists="short") for part in parts]
        sizes = [part.stat().st_size for part in parts]
        return _model_shape(contents[0][0], tuple(zip(sizes, (tensors for _, tensors in contents), strict=True)))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{file} has invalid metadata: {error}", code="model_unreadable") from error


def _model_shape(metadata: Mapping[str, Any], files: tuple[tuple[int, list[TensorInfo]], ...]) -> ModelShape:
    facts = _Facts(metadata)
    tensors = {tensor.name: tensor.shape for _, found in files for tensor in found}
    attention = list(_attention_layers(facts, tensors))
    widest = max((layer.value for layer in attention), default=0)
    full = [layer for layer in attention if not layer.slides]
    sliding = [layer for layer in attention if layer.slides]
    tokens = metadata.get("tokenizer.ggml.tokens", 0)
    return ModelShape(
        weights=sum(size for size, _ in files),
        trained=facts.number("context_length"),
        layers=facts.blocks,
        width=facts.width,
        heads=facts.heads,
        vocab=facts.number("vocab_size") or (len(tokens) if isinstance(tokens, list) else int(tokens)),
        key=sum(layer.key for layer in full),
        value=sum(layer.value for layer in full),
        sliding_key=sum(layer.key for layer in sliding),
        sliding_value=sum(layer.value for layer in sliding),
        sliding_window=_sliding_window(facts) if sliding else 0,
        padded_value=sum(layer.value if layer.is_index else widest for layer in full),
        state=_state_numbers(facts) * sum(map(facts.is_recurrent, range(facts.layers))),
        activations=max(_activations(facts, tensors), _latent_activations(facts)),
        attention_activations=_latent_activations(facts),
        head_size=facts.number("attention.value_length", facts.head_size),
        files=files,
        purpose=model_purpose(metadata),
        architecture=facts.architecture,
        positions=tensors[_POSITION_TABLE][0] if _POSITION_TABLE in tensors else None,
        feature_width=facts.number("target_hidden_size"),
        **_mtp_layers(facts, tensors),
    )


def _mtp_layers(facts: _Facts, tensors: Mapping[str, Any]) -> dict[str, int]:
    """A file may name layers whose tensors are in another file."""
    count = facts.number("nextn_predict_layers")
    one, several = facts.architecture in _ONE_MTP_LAYER, facts.architecture in _MTP_LAYERS
    layers = range(facts.layers, facts.layers + count)
    needed = ["nextn.eh_proj"]  # llama.cpp asserts that it has them
    if facts.architecture == "mimo2":
        needed += ["attn_qkv", "ffn_gate"]
    has_all = all(f"blk.{layer}.{name}.weight" in tensors for layer in layers for name in needed)
    if not (several or (one and count <= 1)) or not has_all:
        return {"unused_mtp_layers": count}
    heads = sum(facts.kv_heads[facts.layers :])
    key, value = (facts.number(f"attention.{name}", facts.head_size) for name in ("key_length", "value_length"))
    return {"mtp_layers": count, "mtp_key": heads * key, "mtp_value": heads * value}


class _Facts:
    """The metadata by llama.cpp's names."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.architecture = str(metadata.get("general.architecture", ""))
        self._metadata = metadata
        self.blocks = self.number("block_count")
        if self.blocks > _MAX_LAYERS:
            raise ValueError(f"{self.blocks} layers")
        self.layers = max(0, self.blocks - self.number("nextn_predict_layers"))  # the rest only drafts
        self.width, self.heads = self.number("embedding_length"), self.number("attention.head_count")
        self.head_size = self.width // self.heads if self.heads else 0
        self.kv_heads = self.per_layer("attention.head_count_kv", self.heads)

    def get(self, name: str) -> Any:
        return self._metadata.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: int = 0) -> int:
        """Of several the largest."""
        value = self.get(name)
        if value is None:
            return default
        return int(max(value, default=default) if isinstance(value, list) else value)

    def per_layer(self, name: str, default: int = 0) -> list[int]:
        """One for each layer. In a damaged file some may be missing."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, list):
            return [int(value)] * self.blocks
        return [int(each) for each in value] + [default] * (self.blocks - len(value))

    def is_recurrent(self, layer: int) -> bool:
        if self.architecture in _RECURRENT or self.architecture == "falcon-h1":
            return True
        if self.architecture in _INTERVALS or self.get("full_attention_interval"):
            marked = self.get("attention.recurrent_layers")
            if isinstance(marked, list):
                return layer < len(marked) and bool(marked[layer])
            return (layer + 1) % max(
                1, self.number("full_attention_interval", _INTERVALS.get(self.architecture, 1))
            ) != 0
        return self.kv_heads[layer] == 0 and not self._is_feed_forward_layer(layer)

    def attends(self, layer: int) -> bool:
        if self.architecture in _RECURRENT or self._is_feed_forward_layer(layer):
            return False
        return self.architecture == "falcon-h1" or not self.is_recurrent(layer)

    def _is_feed_forward_layer(self, layer: int) -> bool:
        """Nemotron-H gives a layer one of three tasks."""
        return self.architecture.startswith("nemotron_h") and self.per_layer("feed_forward_length")[layer] > 0


# --- attention --------------------------------------------------------------------------------------------------------


class _AttentionLayer(Struct, frozen=True):
    key: int
    value: int
    slides: bool = False
    is_index: bool = False  # in a cache of its own, whose values are not padded to the widest of the model


# Sliding windows by architecture: the window if the file has none, every how many layers one keeps all tokens, and
# whether that is the first of them or the last. A list in the file (`sliding_window_pattern`) says it for each layer.
_SLIDING = {
    "afmoe": (0, 4, "last"),
    "cohere2": (0, 4, "last"),
    "cohere2moe": (0, 4, "first"),
    "deepseek4": (0, 0, "last"),
    "dots3note": (0, 0, "last"),
    "exaone-moe": (128, 4, "last"),
    "exaone4": (4096, 4, "last"),
    "gemma2": (4096, 2, "last"),
    "gemma3": (0, 6, "last"),
    "gemma3n": (0, 5, "last"),
    "gemma4": (0, 6, "last"),
    "gpt-oss": (0, 2, "last"),
    "granite_swa": (0, 4, "last"),
    "laguna": (0, 4, "first"),
    "lfm2": (0, 0, "last"),
    "llama4": (8192, 4, "last"),
    "maple": (0, 4, "last"),
    "mellum": (0, 4, "last"),
    "mimo2": (0, 4, "last"),
    "muse-glimmer": (0, 4, "last"),
    "olmo2": (0, 4, "last"),
    "plamo3": (0, 8, "last"),
    "smallthinker": (0, 4, "first"),
    "spark2_5": (0, 4, "last"),
    "step35": (0, 4, "last"),
}
_FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}  # whatever the file says
_INDEXED_RATIO = 4  # DeepSeek 4 looks up which of these vectors a token needs
_EXAONE4_32B = 64  # layers; smaller ones have no windows
_FIRST_LAYERS_WITH_KV = {"gemma3n": 20}  # the others use theirs
_WITHOUT_KV = (architectures.ENCODERS | architectures.DIFFUSION) - {"t5encoder", "llama-embed"}


def _sliding_window(facts: _Facts) -> int:
    if facts.architecture not in _SLIDING:
        return 0  # a few files have a window that llama.cpp does not use
    if facts.architecture == "exaone4" and facts.layers != _EXAONE4_32B:
        return 0
    default, *_ = _SLIDING[facts.architecture]
    window = facts.number("attention.sliding_window", default)
    return _FIXED_WINDOWS.get(facts.architecture, window) if window else 0


def _slides(facts: _Facts, layer: int) -> bool:
    if not _sliding_window(facts):
        return False
    _, every, keeper = _SLIDING[facts.architecture]
    pattern = facts.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return bool(pattern[layer])
    every = every if pattern is None else int(pattern)
    return not every or layer % every != (0 if keeper == "first" else every - 1)


def _attention_layers(facts: _Facts, tensors: Mapping[str, tuple[int, ...]]) -> list[_AttentionLayer]:
    if facts.architecture in _WITHOUT_KV:
        return []
    # One vector per token is both key and value.
    is_latent = bool(facts.get("attention.key_length_mla")) or facts.architecture == "deepseek4"
    ratios = facts.get("attention.compress_ratios")
    last = facts.layers - facts.number("attention.shared_kv_layers")
    layers: list[_AttentionLayer] = []
    for layer in range(min(last, _FIRST_LAYERS_WITH_KV.get(facts.architecture, last))):
        if not facts.attends(layer):
            continue
        slides, heads = _slides(facts, layer), facts.kv_heads[layer]
        sizes = [facts.number(f"attention.{name}", facts.head_size) for name in ("key_length", "value_length")]
        if slides:
            sizes = [
                facts.number(f"attention.{name}_swa", size)
                for name, size in zip(("key_length", "value_length"), sizes, strict=True)
            ]
        indexed = facts.number("attention.indexer.key_length") if f"blk.{layer}.indexer.attn_k.weight" in tensors else 0
        layers.append(_AttentionLayer(heads * sizes[0] + indexed, 0 if is_latent else heads * sizes[1], slides))
        if f"blk.{layer}.indexer.k_proj.weight" in tensors:  # beside the KV, of one head
            values = sizes[1] if facts.architecture == "minimax-m3" else 0
            layers.append(_AttentionLayer(facts.number("attention.indexer.key_length"), values, is_index=True))
        elif isinstance(ratios, list) and (ratio := int(ratios[layer])):  # a vector for so many tokens, too
            index = facts.number("attention.indexer.key_length") if ratio == _INDEXED_RATIO else 0
            layers.append(_AttentionLayer(-(-(heads * sizes[0] + index) // ratio), 0))
    if facts.architecture == "graniteswitch":  # one head that finds the tokens that switch adapters
        layers.append(_AttentionLayer(facts.head_size, facts.head_size))
    return layers


# --- states -----------------------------------------------------------------------------------------------------------

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
# All but every so many layers are recurrent. Elsewhere those without KV heads are.
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}


def _state_numbers(facts: _Facts) -> int:
    """Of one recurrent layer and sequence: the last inputs of the convolution, and the state itself."""
    kernel = facts.number("ssm.conv_kernel")
    if head := facts.number("wkv.head_size"):
        return facts.width * (facts.number("token_shift_count", 2) + head)
    if cached := facts.number("shortconv.l_cache"):
        return facts.width * (cached - 1)
    if head := facts.number("kda.head_dim"):
        heads = facts.per_layer("attention.head_count")[0]
        return heads * head * (3 * (kernel - 1 if kernel else 3) + head)
    if facts.architecture == "minimax-01":
        return facts.heads * facts.number("attention.key_length", facts.head_size) ** 2
    inner, state = facts.number("ssm.inner_size"), facts.number("ssm.state_size")
    return inner * state + max(0, kernel - 1) * (inner + 2 * facts.number("ssm.group_count") * state)


# --- activations ------------------------------------------------------------------------------------------------------


def _activations(facts: _Facts, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """The numbers of one token that llama.cpp holds at the widest point of a layer, measured on models of each kind."""
    feed = facts.number("feed_forward_length")
    is_gated = any(".ffn_gate.weight" in name for name in tensors) or any(
        shape[0] == 2 * feed for name, shape in tensors.items() if name.endswith(".ffn_up.weight")
    )
    widest = [3 * feed + 4 * facts.width if is_gated else max(2 * feed, 8 * facts.width)]
    if used := facts.number("expert_used_count"):
        inner = used * facts.number("expert_feed_forward_length", feed)
        outer = used * facts.width
        # The outputs of the experts take the place of their inner values, if they fit there.
        widest.append(3 * inner + 4 * facts.width if 2 * inner >= outer else 2 * inner + 2 * outer)
    widest.append(7 * facts.number("ssm.inner_size") + facts.width)
    return max(widest)


def _latent_activations(facts: _Facts) -> int:
    """Each head compares its query with the latent vectors themselves."""
    if not facts.get("attention.key_length_mla"):
        return 0
    return facts.heads * (2 * facts.number("attention.key_length") + facts.number("attention.value_length"))
