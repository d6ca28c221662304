"""Which architectures may share a batch: `python -m bench.company [--write] [ARCHITECTURE …]`.

llama.cpp computes some architectures wrongly when several sequences share a batch. Each tiny model of the tests runs in
a bare context, without the engine: two to four sequences, whose prompts and generated tokens share batches in random
mixtures, against one sequence per batch. So a difference is llama.cpp's own. Ties count as equal. A model that ends its
process counts as wrong. `--write` updates `modelyard/library/company.json`, which the engine obeys.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from modelyard.library.architectures import COMPANY_FILE, DIFFUSION, ENCODERS, refusal
from tests.engines.llama_cpp import architectures

_WINDOW, _SEQUENCES, _NEW = 256, 4, 6
_UBATCHES = (16, 64, 256)
_LONGEST = 200
# Wrong tokens that other runs have seen, also in a bare replay, with prompts that are rare here.
_SEEN = {"deepseek4": "1 of 36 answers was another, by 0.54"}
_TOLERANCE = 0.1  # a batch adds in another order: see the distances that are printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="update the table that the engine obeys")
    parser.add_argument("--rounds", type=int, default=8, help="per size of micro-batches; 60 take 15 s a model")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return _child(arguments.names[0], arguments.rounds)
    architectures.write_missing()
    names = arguments.names or [
        name for name in architectures.ARCHITECTURES | architectures.UNTESTED if _generates(name)
    ]
    faults = {name: found for name in names if (found := faults_of(name, arguments.rounds) or _SEEN.get(name))}
    for name in names:
        print(f"{name}: {faults.get(name, 'may share a batch')}")
    if arguments.write:
        known = json.loads(COMPANY_FILE.read_text()) if COMPANY_FILE.is_file() else {"together": [], "alone": {}}
        together = {*known["together"], *names} - set(faults)
        alone = {name: why for name, why in known["alone"].items() if name not in names} | faults
        table = {"together": sorted(together), "alone": dict(sorted(alone.items()))}
        COMPANY_FILE.write_text(json.dumps(table, indent=1) + "\n")
    return 0


def _generates(name: str) -> bool:
    return refusal(name) is None and name not in ENCODERS | DIFFUSION


def faults_of(name: str, rounds: int = 8) -> str:
    """What differed, of a child process: an assertion of llama.cpp ends it. Empty if nothing did."""
    command = [sys.executable, "-m", "bench.company", "--child", name, "--rounds", str(rounds)]
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=Path(__file__).parent.parent
    )
    if done.returncode == 1:  # an exception here is no fault of llama.cpp
        raise RuntimeError(done.stderr)
    if done.returncode:
        asserted = [line for line in done.stderr.splitlines() if "GGML_ASSERT" in line]
        reason = asserted[-1].partition("GGML_ASSERT")[2] if asserted else str(done.returncode)
        return f"llama.cpp ends the process: {reason}"
    worst, wrong, count = done.stdout.split()[-3:]
    print(f"{name}: {float(worst):.4f}", flush=True)
    return f"the logits of {wrong} of {count} tokens are others, by up to {float(worst):.2f}" if int(wrong) else ""


# --- the child --------------------------------------------------------------------------------------------------------


def _child(name: str, rounds: int) -> int:
    from modelyard.engines.llama_cpp.binding import lib

    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(architectures.model(name)).encode(), params)
    far = [each for u in _UBATCHES for seed in range(rounds) for each in _round(lib, model, Random(seed), u)]
    print(max(far), sum(each > _TOLERANCE for each in far), len(far))
    return 0


def _round(lib: Any, model: Any, random: Random, ubatch: int) -> list[float]:
    """How far the logits of each token are from those of the sequence alone, as a share of their length."""
    count = random.randint(2, _SEQUENCES)
    texts = [[random.randrange(3, 250) for _ in range(random.randint(4, _LONGEST))] for _ in range(count)]
    alone, together = _Run(lib, model, ubatch), _Run(lib, model, ubatch)
    greedy = [together.read(n, text) for n, text in enumerate(texts)]
    full = [[*text, *(int(row.argmax()) for row in rows[:-1])] for text, rows in zip(texts, greedy, strict=True)]
    together.close()
    together, prompts, seed = _Run(lib, model, ubatch), [len(text) for text in texts], random.random()
    # The same pieces in the same order, each in a batch of its own: rounding alone may choose another expert.
    expected = alone.mixed(full, prompts, Random(seed), solo=True)
    found = together.mixed(full, prompts, Random(seed))
    alone.close()
    together.close()
    pairs = zip((row for rows in found for row in rows), (row for rows in expected for row in rows), strict=True)
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


class _Run:
    """A bare context."""

    def __init__(self, lib: Any, model: Any, ubatch: int) -> None:
        from modelyard.engines.llama_cpp.batch import LlamaBatch

        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = _WINDOW * _SEQUENCES, _WINDOW * _SEQUENCES, ubatch
        params.n_seq_max, params.kv_unified = _SEQUENCES, False
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1
        self._lib, self._context = lib, lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context")
        self._size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = LlamaBatch(_WINDOW * _SEQUENCES)

    def close(self) -> None:
        self._lib.llama_free(self._context)

    def read(self, sequence: int, text: list[int]) -> list[Any]:
        """The logits of each greedy token of one sequence, alone in each batch."""
        found: list[Any] = []
        ids, at = text, 0
        for _ in range(_NEW):
            found += self._decode([(sequence, ids, at)])
            at, ids = at + len(ids), [int(found[-1].argmax())]
        return found

    def mixed(
        self, texts: Sequence[list[int]], prompts: Sequence[int], random: Random, *, solo: bool = False
    ) -> list[list[Any]]:
        """The same tokens in random company: the logits after each prompt and after each generated token."""
        done, found = [0] * len(texts), [list[Any]() for _ in texts]
        while any(at < len(text) for at, text in zip(done, texts, strict=True)):
            parts = []
            for n, (at, text) in enumerate(zip(done, texts, strict=True)):
                size = 1 if at >= prompts[n] else min(random.choice([1, 7, 16, 40, 90]), prompts[n] - at)
                if at < len(text) and random.random() < 0.8:
                    parts.append((n, text[at : at + size], at))
            for (n, ids, at), logits in zip(parts, self._decode_parts(parts, solo), strict=True):
                done[n] = at + len(ids)
                if done[n] >= prompts[n]:
                    found[n].append(logits)
        return found

    def _decode_parts(self, parts: list[tuple[int, list[int], int]], solo: bool) -> list[Any]:
        if solo:
            return [row for part in parts for row in self._decode([part])]
        return self._decode(parts) if parts else []

    def _decode(self, parts: list[tuple[int, list[int], int]]) -> list[Any]:
        self._batch.clear()
        rows = [self._batch.add(np.asarray(ids, np.int32), at, n, last=True) for n, ids, at in parts]
        if self._lib.llama_decode(self._context, self._batch.raw) != 0:
            raise RuntimeError("llama_decode failed")
        pointers = [self._lib.llama_get_logits_ith(self._context, row) for row in rows]
        return [np.ctypeslib.as_array(pointer, shape=(self._size,)).copy() for pointer in pointers]


if __name__ == "__main__":
    sys.exit(main())
