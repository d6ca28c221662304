"""ExLlamaV3 in process: EXL3 weights on NVIDIA GPUs, continuous batching, prompts cached in pages.

Limits:

- Prompts are read in chunks of at least 256 tokens, and the last chunk also samples the first token: reading a short
  prompt cannot be interrupted.
- A LoRA adapter would apply to all jobs at once, and the decoding paths ignore it: adapters are refused.
- Typical sampling, Mirostat and beam search do not exist: they are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from modelyard.core.engine import Engine, EnginePlugin, EngineSpec
from modelyard.core.errors import ModelyardError
from modelyard.engines.hf_folder import read_config
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.plugins import MissingLibrary
from modelyard.telemetry.system import read_gpus
from modelyard_exllamav3.model_folder import estimate as estimate
from modelyard_exllamav3.model_folder import find_folder
from modelyard_exllamav3.options import CAPABILITIES as CAPABILITIES
from modelyard_exllamav3.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard_exllamav3.options import ExllamaOptions as Options

_NEEDED = ("torch", "exllamav3", "llguidance")


def verify() -> None:
    """Checks that the packages are installed. Does not import them: the first import compiles kernels for minutes."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise MissingLibrary(
            f"exllamav3 needs the Python package {missing[0]!r}: install a build of torch for your CUDA version, then "
            "pip install 'modelyard[exllamav3]'"
        )


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that reads the engine's generations."""
    verify()
    from modelyard_exllamav3.engine import ExllamaEngine

    return ExllamaEngine(spec)


def tokenizer_path(options: Options) -> Path:
    """A quantized model has its tokenizer beside the weights."""
    return find_folder(options.path)


def takes_folder(folder: Path) -> int:
    with suppress(ModelyardError):  # it has no configuration
        quantization = read_config(folder).get("quantization_config")
        return 2 * (isinstance(quantization, dict) and quantization.get("quant_method") == "exl3")
    return 0


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    yield from try_options(("path", find_folder, spec.options.path))
    if not read_gpus():
        yield "backend", "ExLlamaV3 computes on NVIDIA GPUs, and this machine has none"


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    capabilities=CAPABILITIES,
    # A step on a GPU takes about a millisecond: a busy gateway in the same interpreter would slow down every step.
    own_process=lambda _: True,
    tokenizer_path=tokenizer_path,
    live_overrides=LIVE_OVERRIDES,
    verify=verify,
    estimate=estimate,
    faults=faults,
    takes_folder=takes_folder,
    title="ExLlamaV3",
    distributions=("exllamav3",),
    tuning=__name__,
)
