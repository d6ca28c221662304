"""The text engines under the conformance suite: how to create each, and what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any, cast

import pytest
from msgspec.structs import replace

import modelyard_fake as fake
from modelyard import plugins
from modelyard.core.engine import CacheInfo, Capabilities, EngineInfo, EngineSpec, Prompt, TextEngine, TokenRun
from modelyard.core.request import Sampling
from modelyard.core.tokenizer import Tokenizer
from modelyard.workers.process_engine import create_process_engine
from modelyard.workers.transport import HeartbeatConfig
from tests.engines.ct2 import helpers as ct2_helpers
from tests.engines.exllamav3 import helpers as exllama_helpers
from tests.engines.fake import helpers as fake_helpers
from tests.engines.llama_cpp import helpers as llama_helpers
from tests.engines.llama_cpp.lora_files import write_lora
from tests.engines.llama_cpp.short_model import LAYERS, short_model_file
from tests.engines.reading import ROUNDED, TOLERANCE
from tests.engines.vllm import helpers as vllm_helpers
from tests.engines.vllm import real_vllm
from tests.workers.split_engine import RayEngine, RemoteMachineEngine, SplitEngine

GREEDY = Sampling(temperature=0)
PATIENT = HeartbeatConfig(worker_misses=1000)
TOPICS = ("Tell me about the city of Paris and its river.", "Why is the sky blue on a clear day in summer?")
Caches = Mapping[str, CacheInfo]


class Subject(ABC):
    """An engine under test."""

    backend: str
    tolerance = TOLERANCE  # of the log probabilities of two runs of a job
    reuses_kv = True  # a prompt finds the KV of an earlier one
    is_behind_worker = False  # it is reached by messages, which cannot load files
    reports_progress = False  # prefill reports its progress and can be cancelled
    block: int | None = None  # tokens of a KV block, if several conversations share blocks
    fluent_file: Path | None = None  # the file of a model that can repeat a text, if the default one cannot

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def file(self) -> Path:
        """A file that the engine reads; a broken copy must fail the load."""

    @abstractmethod
    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        """`slow`: a test can cancel its jobs during prefill and during decoding."""

    def create(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> TextEngine:
        spec = self.spec(caches, slow=slow, file=file)
        return cast(TextEngine, plugins.engine(self.backend).create(spec))

    def prompt_for(self, pattern: str) -> str:
        """A prompt that makes the engine repeat the pattern."""
        return pattern * 5

    def write_adapter(self, folder: Path) -> Path | None:
        """Writes a LoRA adapter that changes every answer; None if the engine has none."""
        del folder
        return None


class Fake(Subject):
    backend = "fake"
    reports_progress = True
    tokenizer = property(lambda self: fake_helpers.tokenizer())
    file = property(lambda self: fake.tokenizer_path(fake.Options()) / "tokenizer.json")

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        timing: dict[str, Any] = {"token_delay": 0.001, "prefill_rate": 5000.0} if slow else {"token_delay": 0}
        return EngineSpec("demo", fake.Options(echo=True, tokenizer_path=file, **timing), caches)

    def prompt_for(self, pattern: str) -> str:
        return fake_helpers.chatml(("user", pattern))


class LlamaCpp(Subject):
    """On a model of two layers, which is fast; the whole one is slow enough to be cancelled."""

    backend = "llama_cpp"
    tolerance = ROUNDED
    reports_progress = True
    tokenizer = property(lambda self: llama_helpers.vocabulary())
    file = property(lambda self: short_model_file())
    fluent_file = property(lambda self: llama_helpers.model_file())

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        usual = llama_helpers.model_file() if slow else short_model_file()
        return llama_helpers.spec(caches, path=str(file or usual))

    def write_adapter(self, folder: Path) -> Path | None:
        return write_lora(folder / "adapter.gguf", width=576, layers=LAYERS, seed=1, strength=0.1)


class Ct2(Subject):
    """On a tiny random model, which is fast."""

    backend = "ct2"
    reuses_kv = False
    tokenizer = property(lambda self: ct2_helpers.tokenizer())
    file = property(lambda self: ct2_helpers.tiny_folder() / "model.bin")
    fluent_file = property(lambda self: ct2_helpers.model_folder() / "model.bin")

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        del slow
        if file is not None and file.exists() and file != self.fluent_file:  # a broken file among intact ones
            for name in ("config.json", "vocabulary.json"):
                copyfile(ct2_helpers.tiny_folder() / name, file.parent / name)
        return ct2_helpers.spec(caches, **({"path": str(file)} if file is not None else {}))


class ExLlamaV3(Subject):
    """On the fake ExLlamaV3, or on the real one if MODELYARD_EXL3_MODEL names a model. It reports progress, but it
    computes a short prompt in one step with the first token."""

    backend = "exllamav3"
    tolerance = TOLERANCE if exllama_helpers.REAL is None else ROUNDED
    tokenizer = property(lambda self: exllama_helpers.tokenizer())
    file = property(lambda self: next(exllama_helpers.model_folder().glob("*.safetensors")))

    def create(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, exllama_helpers.make(self.spec(caches, slow=slow, file=file), slow=slow))

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        del slow
        if file is not None and file.exists():  # a broken file among intact ones
            for name in ("config.json", "tokenizer.json"):
                copyfile(exllama_helpers.model_folder() / name, file.parent / name)
        return exllama_helpers.spec(caches, **({"path": str(file.parent)} if file is not None else {}))


class Vllm(Subject):
    """On the fake vLLM, which keeps KV in blocks of tokens like the real one."""

    backend = "vllm"
    block = vllm_helpers.BLOCK
    tokenizer = property(lambda self: fake_helpers.tokenizer())
    file = property(lambda self: vllm_helpers.model_folder() / "model.safetensors")

    def create(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> TextEngine:
        vllm_helpers.use_fake_library()
        return super().create(caches, slow=slow, file=file)

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        if file is not None and file.exists():  # a broken file among intact ones
            copyfile(vllm_helpers.model_folder() / "config.json", file.parent / "config.json")
        options: dict[str, Any] = {} if file is None else {"vllm_model": str(file.parent)}
        timing = {"token_delay": 0.001, "prefill_rate": 5000.0} if slow else {}
        first = vllm_helpers.adapter(vllm_helpers.model_folder() / "first")
        return vllm_helpers.spec(caches, timing, lora={"first": str(first)}, **options)

    def prompt_for(self, pattern: str) -> str:
        return fake_helpers.chatml(("user", pattern))

    def write_adapter(self, folder: Path) -> Path | None:
        return vllm_helpers.adapter(folder / "law")


class RealVllm(Subject):
    """The real vLLM on the CPU, in a worker that outlives the tests: make test-vllm."""

    backend = "vllm"
    is_behind_worker = True
    block = real_vllm.BLOCK
    tokenizer = property(lambda self: real_vllm.tokenizer())
    file = property(lambda self: real_vllm.model_folder() / "model.safetensors")

    def create(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, real_vllm.SharedVllmEngine(self.spec(caches, slow=slow, file=file)))

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        del slow
        if file is not None and file.exists():
            copyfile(real_vllm.model_folder() / "config.json", file.parent / "config.json")
        options: dict[str, Any] = {} if file is None else {"vllm_model": str(file.parent)}
        first = real_vllm.write_adapter(vllm_helpers.model_folder() / "first_real")
        return real_vllm.spec(caches, lora={"first": str(first)}, **options)

    def write_adapter(self, folder: Path) -> Path | None:
        return real_vllm.write_adapter(folder / "law", seed=2)


class InProcess(Subject):
    """The engine of another subject in its own process. The heartbeat is patient: the machine may be busy."""

    is_behind_worker = True

    def __init__(self, inner: Subject) -> None:
        self._inner, self.backend = inner, inner.backend
        self.tolerance, self.reuses_kv = inner.tolerance, inner.reuses_kv
        self.reports_progress, self.block = inner.reports_progress, inner.block

    tokenizer = property(lambda self: self._inner.tokenizer)
    file = property(lambda self: self._inner.file)
    fluent_file = property(lambda self: self._inner.fluent_file)

    def create(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> TextEngine:
        spec = self.spec(caches, slow=slow, file=file)
        return cast(TextEngine, create_process_engine(replace(spec, backend=self.backend), PATIENT))

    def spec(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        return self._inner.spec(caches, slow=slow, file=file)

    def prompt_for(self, pattern: str) -> str:
        return self._inner.prompt_for(pattern)

    def write_adapter(self, folder: Path) -> Path | None:
        return self._inner.write_adapter(folder)


class InWorker(InProcess):
    """The engine of another subject in a worker, reached through a scheduler as from a gateway."""

    def __init__(self, inner: Subject, engine: type[SplitEngine]) -> None:
        super().__init__(inner)
        self._engine = engine

    def create(self, caches: Caches, *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, self._engine(self.backend, self.spec(caches, slow=slow, file=file), PATIENT))


SUBJECTS: dict[str, Subject] = {
    "fake": Fake(),
    "llama_cpp": LlamaCpp(),
    "ct2": Ct2(),
    "exllamav3": ExLlamaV3(),
    "vllm": Vllm(),
    "vllm_real": RealVllm(),
    "fake_process": InProcess(Fake()),
    "llama_cpp_process": InProcess(LlamaCpp()),
    "llama_cpp_split": InWorker(LlamaCpp(), SplitEngine),
    "llama_cpp_machines": InWorker(LlamaCpp(), RemoteMachineEngine),
    "llama_cpp_ray": InWorker(LlamaCpp(), RayEngine),
}
CLUSTER = ("llama_cpp_machines", "llama_cpp_ray")  # need a network or a Ray cluster: make test-cluster


def params(names: Iterable[str]) -> list[Any]:
    """The subjects as parameters of a test, with their markers."""
    marks = dict.fromkeys(CLUSTER, pytest.mark.cluster) | {"vllm_real": pytest.mark.vllm}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


# Loading a model in a process twenty times takes too long.
SLOW_TO_LOAD = ("llama_cpp_process", "llama_cpp_split", "vllm_real", *CLUSTER)
FAST_TO_LOAD = params(name for name in SUBJECTS if name not in SLOW_TO_LOAD)
REUSING_KV = params(name for name, subject in SUBJECTS.items() if subject.reuses_kv)
REPORTING_PROGRESS = params(name for name, subject in SUBJECTS.items() if subject.reports_progress)


def reusable_tokens(subject: Subject, tokens: int) -> int:
    """The cached tokens of a prompt of this length that is sent again: all but the last, in whole blocks."""
    block = subject.block or 1
    return (tokens - 1) // block * block if subject.reuses_kv else 0


def prompt(subject: Subject, text: str = TOPICS[0], *, raw: bool = False, **fields: Any) -> Prompt:
    """`text` is the user message, or with `raw` the whole prompt."""
    whole = text if raw else fake_helpers.chatml(("user", text))
    defaults = {"sampling": GREEDY, "max_tokens": 6, "cache": "main", "logprobs": 2}
    return Prompt(parts=(TokenRun(subject.tokenizer.encode(whole)),), **defaults | fields)


_SWITCHES = ("generates", "multi_turn", "tools", "structured", "streaming", "logprobs", "lora", "embeddings", "rerank")


def assert_declared(info: EngineInfo) -> None:
    """The engine must not claim more than its module declares, which is what the documentation shows."""
    actual, declared = info.capabilities, plugins.engine(info.backend).capabilities
    assert isinstance(declared, Capabilities)
    assert [name for name in _SWITCHES if getattr(actual, name) and not getattr(declared, name)] == []
    assert set(actual.modalities) <= set(declared.modalities)
    assert set(actual.thinking_modes) <= set(declared.thinking_modes)
    assert set(declared.ignored) <= set(actual.ignored)
