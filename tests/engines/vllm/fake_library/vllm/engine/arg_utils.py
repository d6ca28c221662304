from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class AsyncEngineArgs:
    """The arguments that tests set. `additional_config`, which vLLM has for platforms, configures the fake library."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int = 4096
    max_num_seqs: int = 8
    block_size: int = 16
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    structured_outputs_config: Any = None
    scheduling_policy: str = "fcfs"
    disable_log_stats: bool = False
    speculative_config: dict[str, Any] | None = None
    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    additional_config: dict[str, Any] = field(default_factory=dict)
