"""Stands in for vLLM in every test run: the calls that the engine uses, in the same shapes, over the fake engine."""

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.llm import LLM
from vllm.inputs import TokensPrompt
from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncEngineArgs", "SamplingParams", "TokensPrompt"]
