"""CTranslate2 in process: int8 on CPUs and GPUs, beam search, micro-batches.

Limits:

- No KV outlives a job: every prompt is read in full, in one pass. A job that is cancelled meanwhile ends after it.
- Jobs share a batch if they start together, with the same sampling and prompts of nearly the same length. A running
  batch takes no new jobs: another batch starts beside it (`inter_threads`).
- A beam search returns nothing before its end and cannot be stopped.
- Logits are not accessible: no constrained output, no seed per job, no logit bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from modelyard.core.engine import Engine, EnginePlugin, EngineSpec
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.library.model_files import folder_format
from modelyard.plugins import MissingLibrary
from modelyard_ct2.model_folder import estimate as estimate
from modelyard_ct2.model_folder import find_folder
from modelyard_ct2.options import CAPABILITIES as CAPABILITIES
from modelyard_ct2.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard_ct2.options import Ct2Options as Options


def verify() -> None:
    if find_spec("ctranslate2") is None:
        raise MissingLibrary("ct2 needs the Python package 'ctranslate2': install it with pip install 'modelyard[ct2]'")


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that reads the engine's generations."""
    verify()
    from modelyard_ct2.engine import Ct2Engine

    return Ct2Engine(spec)


def tokenizer_path(options: Options) -> Path:
    """A converted model has its tokenizer beside the weights."""
    return find_folder(options.path)


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    yield from try_options(("path", find_folder, spec.options.path))
    if spec.options.device == "cuda" and find_spec("ctranslate2") is not None:
        import ctranslate2

        if not ctranslate2.get_cuda_device_count():
            yield "device", "CTranslate2 finds no GPU on this machine: set auto or cpu"


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    capabilities=CAPABILITIES,
    tokenizer_path=tokenizer_path,
    live_overrides=LIVE_OVERRIDES,
    verify=verify,
    estimate=estimate,
    faults=faults,
    takes_folder=lambda folder: 2 * (folder_format(folder) == "ct2"),
    title="CTranslate2",
    distributions=("ctranslate2",),
    tuning=__name__,
)
