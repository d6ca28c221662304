"""Samples tokens with a top_k: numpy finds the most likely tokens of a row, and llama.cpp's samplers draw one of them.

llama.cpp's samplers take a list of tokens, by default of the whole vocabulary. A top_k comes first and leaves some
dozens, so they get these alone: the token is the one that they would draw from all, and a row takes microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.logit_columns import Row, TopTokens

_TOKEN = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
# llama_token_data_array
_LIST = np.dtype(
    {
        "names": ["data", "size", "selected", "sorted"],
        "formats": [np.uint64, np.uint64, np.int64, np.bool_],
        "offsets": [0, 8, 16, 24],
        "itemsize": 32,
    }
)


class TopKSampler:
    """The sampler of one job. It owns the samplers, which `close` frees; the first is the top_k."""

    def __init__(self, top_k: int, samplers: Iterable[int]) -> None:
        self.limit = top_k
        self.chain: int | None = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        for sampler in samplers:
            short.sampler_chain_add(self.chain, sampler)

    def sample(self, row: Row) -> int:
        """Of logits that are not finite, which no sampler takes: any token."""
        return int(row.argmax())

    def close(self) -> None:
        chain, self.chain = self.chain, None
        if chain is not None:
            short.sampler_free(chain)


class TopKDraw:
    """Draws the tokens of several such jobs."""

    def __init__(self, samplers: Sequence[TopKSampler], members: Sequence[int]) -> None:
        self._samplers, self._members, self._lines = samplers, members, np.array(members)
        self._lists = np.zeros(len(members), _LIST)
        self._addresses = [self._lists.ctypes.data + at * _LIST.itemsize for at in range(len(members))]
        self._resize(64)

    def _resize(self, count: int) -> None:
        self._tokens = np.zeros(count, _TOKEN)
        self._ids, self._logits = self._tokens["id"], self._tokens["logit"]

    def draw(self, top: TopTokens, tokens: list[int]) -> None:
        """Adds the tokens of these jobs, unless a row has none or its logits are not finite."""
        count = len(top.ids)
        if count > len(self._tokens):
            self._resize(2 * count)
        self._ids[:count], self._logits[:count] = top.ids, top.logits
        starts = top.borders[self._lines]
        lists = self._lists
        lists["data"] = starts * _TOKEN.itemsize + self._tokens.ctypes.data
        lists["size"] = sizes = top.borders[self._lines + 1] - starts
        lists["selected"], lists["sorted"] = -1, False
        usable = self._usable(top, sizes.tolist())
        for each, address, is_usable in zip(self._samplers, self._addresses, usable, strict=True):
            if is_usable and each.chain is not None:
                short.sampler_apply(each.chain, address)
        drawn = self._ids[starts + lists["selected"]].tolist()
        for at, token, is_usable in zip(self._members, drawn, usable, strict=True):
            if is_usable:
                tokens[at] = token

    def _usable(self, top: TopTokens, sizes: list[int]) -> list[bool]:
        if all(sizes) and isfinite(float(np.add.reduce(top.logits))):
            return [True] * len(sizes)
        borders = top.borders.tolist()
        return [
            size > 0 and bool(np.isfinite(top.logits[borders[at] : borders[at + 1]]).all())
            for at, size in zip(self._members, sizes, strict=True)
        ]
