"""Prints the signatures that the engine uses, of the vLLM in the path: `python library_signatures.py`."""

import dataclasses
import inspect
import json
from typing import Any

from vllm import LLM, AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

METHODS = ("from_engine_args", "generate", "abort", "shutdown", "remove_lora", "get_tokenizer")


def fields(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    return list(kind.__struct_fields__)


def parameters(call: Any) -> dict[str, str]:
    return {name: each.kind.name for name, each in inspect.signature(call).parameters.items() if name != "self"}


if __name__ == "__main__":
    printed = {
        "calls": {name: parameters(getattr(AsyncLLM, name)) for name in METHODS}
        | {"tokens_input": parameters(tokens_input), "LLM.generate": parameters(LLM.generate)},
        "fields": {
            kind.__name__: fields(kind)
            for kind in (AsyncEngineArgs, SamplingParams, StructuredOutputsParams, LoRARequest)
        },
        "delta": RequestOutputKind.DELTA.name,
        "is_dict": issubclass(TokensPrompt, dict),
        "request_errors": issubclass(VLLMValidationError, VLLMClientError),
        "dead_error": issubclass(EngineDeadError, Exception),
        "coroutines": [name for name in METHODS if inspect.iscoroutinefunction(getattr(AsyncLLM, name))],
        "generators": [name for name in METHODS if inspect.isasyncgenfunction(getattr(AsyncLLM, name))],
    }
    print("\n" + json.dumps(printed))
