"""Config, Model, Cache and Tokenizer. They check the order in which the real ones must be created."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

_LONGEST = 6  # tokens to match


class Config:
    def __init__(self, where: str, library: Any) -> None:
        assert isinstance(where, str)
        self.directory, self.library = Path(where), library
        about = json.loads((self.directory / "config.json").read_text())
        assert about["architectures"] == ["LlamaForCausalLM"], "Unknown architecture in config.json"
        self.vocab_size: int = about["vocab_size"]


class Tokenizer:
    def __init__(self, config: Config) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(config.directory / "tokenizer.json"))

    @staticmethod
    def from_config(config: Config) -> Tokenizer:
        return Tokenizer(config)

    def is_whole(self, ids: list[int]) -> bool:
        """Whether the text ends with a complete character."""
        return not self.tokenizer.decode(ids, skip_special_tokens=False).endswith("\ufffd")


class Model:
    def __init__(self, config: Config) -> None:
        self.config, self.caches, self.loaded, self.warm = config, [], False, False
        self._noise = np.random.default_rng(7).normal(size=config.vocab_size)

    @staticmethod
    def from_config(config: Config) -> Model:
        return Model(config)

    def load(self, callback: Callable[[int, int], None] | None = None, **called: Any) -> None:
        self.config.library.calls.setdefault("load", []).append(called)
        self.config.library.before_load()
        if self.caches:
            assert called["max_chunk_size"] <= self.caches[0].max_num_tokens, "Cache too small for batch shape"
        for number in range(4):
            if callback is not None:
                callback(number, 3)
        self.loaded = True
        for cache in self.caches:
            cache.initialized = True

    def warmup(self, cache: Cache, max_chunk_size: int, max_batch_size: int) -> list[str]:
        assert self.loaded
        assert cache.owner is None, "the passes write into pages"
        assert max_chunk_size <= cache.max_num_tokens
        self.warm = True
        return []

    def unload(self) -> None:
        self.loaded = False
        for cache in self.caches:
            cache.initialized = False

    def logits(self, ids: list[int]) -> Any:
        """The token that followed the same tokens before is likely; the rest is noise that depends on the last two."""
        row = np.roll(self._noise, (ids[-1] * 31 + (ids[-2] if len(ids) > 1 else 0) * 17) % self.config.vocab_size)
        if (copied := _copied(ids)) is not None:
            row[copied] += 12
        return row


def _copied(ids: list[int]) -> int | None:
    for length in range(min(_LONGEST, len(ids) - 1), 0, -1):
        tail = ids[-length:]
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == tail:
                return ids[start + length]
    return None


class Cache:
    def __init__(
        self,
        model: Model,
        max_num_tokens: int,
        layer_type: str,
        max_batch_size: int = 16,
        k_bits: int | None = None,
        v_bits: int | None = None,
    ) -> None:
        assert not model.loaded, "Construct the Cache BEFORE calling model.load()"
        assert max_num_tokens % 256 == 0, "max_num_tokens must be a multiple of 256."
        assert (layer_type == "quant") == (k_bits is not None) == (v_bits is not None)
        assert all(bits is None or 2 <= bits <= 8 for bits in (k_bits, v_bits))
        self.max_num_tokens, self.initialized, self.owner = max_num_tokens, False, None
        model.caches.append(self)
