"""A stand-in for ExLlamaV3 and torch whose steps take a fixed time: what our engine adds to one can be measured.

A step is as on a GPU: Python launches many small pieces of work and lets go of the GIL in each of them, then it waits
without the GIL until the GPU is done. `shims` writes modules by the names of the real ones into a folder: with that
folder on its path a process loads these instead, also a worker's.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAGE = 256
LAUNCHES = 40  # pieces of work in a step
LAUNCH_HELD_S, LAUNCH_FREE_S = 12e-6, 13e-6  # of each, with the GIL and without
WAIT_S = 300e-6  # until the GPU is done
_JOB_S = 80e-6  # more Python for each job: its sampler, its bookkeeping
_BLOCK = bytes(1 << 18)  # crc32 lets go of the GIL for blocks of more than 5 kB
_PACE = "MODELYARD_BENCH_PACE"


def _held(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _pace() -> float:
    """Seconds a byte of crc32, without the GIL: found once, and told to the processes that this one starts."""
    if _PACE not in os.environ:
        taken = []
        for _ in range(200):
            began = time.perf_counter()
            zlib.crc32(_BLOCK)
            taken.append(time.perf_counter() - began)
        os.environ[_PACE] = str(min(taken) / len(_BLOCK))
    return float(os.environ[_PACE])


def _free(seconds: float) -> Callable[[], object]:
    block = bytes(max(8192, int(seconds / _pace())))
    return lambda: zlib.crc32(block)


class Tensor:
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows, self.shape = rows, (len(rows), len(rows[0]))

    def tolist(self) -> list[list[int]]:
        return [list(row) for row in self.rows]


class Config:
    @staticmethod
    def from_directory(_where: str) -> Config:
        return Config()


class Model:
    @staticmethod
    def from_config(_config: Config) -> Model:
        return Model()

    def load(self, callback: Callable[[int, int], None], **_: Any) -> None:
        callback(1, 1)

    def unload(self) -> None:
        pass

    def warmup(self, **_: Any) -> None:
        pass


class Tokenizer(Model):
    pass


class Cache:
    def __init__(self, _model: Model, max_num_tokens: int, **_: Any) -> None:
        self.max_num_tokens = max_num_tokens


class CustomSampler:
    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def forward(self, *_: Any) -> None:
        _held(_JOB_S / 2)


class Job:
    cached_pages = cached_tokens = 0

    def __init__(self, input_ids: Tensor, max_new_tokens: int, sampler: Any, identifier: Any = None, **_: Any) -> None:
        self.prompt, self.left, self.sampler, self.identifier = input_ids, max_new_tokens, sampler, identifier

    def receive_sample(self) -> dict[str, Any]:
        _held(_JOB_S / 2)
        self.left -= 1
        told: dict[str, Any] = {"job": self, "stage": "streaming", "eos": not self.left, "serial": 0, "text": "x"}
        told |= {"token_ids": Tensor([[7]]), "identifier": self.identifier}
        return told if self.left else told | {"eos_reason": "max_new_tokens", "time_prefill": 0.1, "time_generate": 0.1}


class Generator:
    def __init__(self, **_: Any) -> None:
        self.jobs: list[Job] = []
        self.pagetable = SimpleNamespace(all_pages=[], unreferenced_pages={})
        self._launch, self._wait = _free(LAUNCH_FREE_S), _free(WAIT_S)

    def enqueue(self, job: Job) -> None:
        self.jobs.append(job)

    def cancel(self, job: Job) -> None:
        self.jobs.remove(job)

    def iterate(self) -> list[dict[str, Any]]:
        for _ in range(LAUNCHES):
            _held(LAUNCH_HELD_S)
            self._launch()
        for job in self.jobs:
            job.sampler.forward()
        self._wait()
        told = [job.receive_sample() for job in self.jobs]
        self.jobs = [job for job in self.jobs if job.left]
        return told

    def close(self) -> None:
        pass


CacheLayer_fp16 = CacheLayer_quant = None
SS_Argmax = SS_Sample = SS_Temperature = SS_TopK = SS_TopP = SS_MinP = SS_LogitBias = lambda **called: called


class Torch:
    long = "long"
    cuda = SimpleNamespace(empty_cache=lambda: None, synchronize=lambda *_: None)

    @staticmethod
    def tensor(rows: list[list[int]], **_: Any) -> Tensor:
        return Tensor(rows)

    @staticmethod
    def from_numpy(array: Any) -> Any:
        return array


def shims(folder: Path) -> Path:
    (folder / "exllamav3.py").write_text("from bench.paced import *\n")
    told = "from bench.paced import Torch\nlong, cuda, tensor, from_numpy = (\n"
    (folder / "torch.py").write_text(told + "    Torch.long, Torch.cuda, Torch.tensor, Torch.from_numpy\n)\n")
    return folder
