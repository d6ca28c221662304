import math
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams

_ERROR = {"auto": 0.0, "fp8": 0.02}  # how much a number format changes the probabilities


@dataclass
class Logprob:
    logprob: float


@dataclass
class RequestOutput:
    prompt_logprobs: list[dict[int, Logprob] | None]


class LLM:
    """Each token of the prompt has the probability 1/4, the token above it 1/8."""

    def __init__(self, model: str, *, kv_cache_dtype: str = "auto", **arguments: Any) -> None:
        if kv_cache_dtype not in _ERROR:
            raise ValueError(f"{kv_cache_dtype} is not a supported number format")
        self._error, self._most = _ERROR[kv_cache_dtype], arguments["max_logprobs"]

    def generate(
        self, prompts: dict[str, list[int]], sampling_params: SamplingParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        del use_tqdm
        if (sampling_params.prompt_logprobs or 0) > self._most:
            raise ValueError("more log probabilities than allowed")
        ids = prompts["prompt_token_ids"]
        return [RequestOutput([None, *map(self._row, ids[1:])])]

    def _row(self, id: int) -> dict[int, Logprob]:
        return {id: Logprob(math.log(0.25 - self._error)), id + 1: Logprob(math.log(0.125 + self._error))}
