"""The engines under the conformance suite, each told how to be made and how to be brought to say something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any, Protocol, cast

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TextEngine, TokenRun
from modelyard.core.request import Sampling
from modelyard.core.tokenizer import Tokenizer
from modelyard.engines import ct2, fake, llama_cpp, vllm
from modelyard.workers.process_engine import create_process_engine
from modelyard.workers.transport import HeartbeatConfig
from tests.engines.ct2 import helpers as ct2_stage
from tests.engines.exllamav3 import helpers as exl3_stage
from tests.engines.fake import helpers as fake_helpers
from tests.engines.llama_cpp import helpers as llama_stage
from tests.engines.llama_cpp.lora_files import write_lora
from tests.engines.reading import ROUNDED, TOLERANCE
from tests.engines.vllm import helpers as vllm_stage
from tests.engines.vllm import real_vllm as vllm_real
from tests.workers.split import FarEngine, RayEngine, SplitEngine

GREEDY = Sampling(temperature=0)
PATIENT = HeartbeatConfig(patience=1000)
TOPICS = ("Tell me about the city of Paris and its river.", "Why is the sky blue on a clear day in summer?")


class Subject(Protocol):
    """`slow` asks for an engine that one can catch in the middle of reading and of speaking."""

    tolerance: float  # how far two runs of a job may be apart
    reuses: bool  # what one job has read is there for the next
    tells_progress: bool  # reading a prompt is told, and can be broken off

    @property
    def vocabulary(self) -> Tokenizer: ...
    @property
    def file(self) -> Path:
        """What the engine reads; a broken copy must keep it from opening."""
        ...

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine: ...
    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec: ...
    def repeating(self, pattern: str) -> str:
        """The user's or the whole text that brings the engine to say the pattern."""
        ...

    def adapter(self, folder: Path) -> Path | None:
        """A LoRA adapter that changes every answer, made in the folder; None where none does."""
        ...


class Fake:
    tolerance = TOLERANCE
    reuses = tells_progress = True
    vocabulary = property(lambda self: fake_helpers.tokenizer())
    file = property(lambda self: fake.tokenizer_path(fake.Options()) / "tokenizer.json")

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, fake.create(self.spec(caches, slow=slow, file=file)))

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        pace: dict[str, Any] = {"token_delay": 0.001, "prefill_rate": 5000.0} if slow else {"token_delay": 0}
        return EngineSpec("demo", fake.Options(echo=True, tokenizer_path=file, **pace), caches)

    def repeating(self, pattern: str) -> str:
        return fake_helpers.chatml(("user", pattern))

    def adapter(self, folder: Path) -> Path | None:
        return None


class LlamaCpp:
    tolerance = ROUNDED
    reuses = tells_progress = True
    vocabulary = property(lambda self: llama_stage.vocabulary())
    file = property(lambda self: llama_stage.model_file())

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, llama_cpp.create(self.spec(caches, slow=slow, file=file)))

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        options = {"path": str(file)} if file is not None else {}
        return llama_stage.spec(caches, **options)

    def repeating(self, pattern: str) -> str:
        return pattern * 5

    def adapter(self, folder: Path) -> Path | None:
        return write_lora(folder / "adapter.gguf", width=576, layers=30, seed=1, strength=0.1)


class Ct2:
    tolerance = TOLERANCE
    reuses = tells_progress = False
    vocabulary = property(lambda self: ct2_stage.vocabulary())
    file = property(lambda self: ct2_stage.tiny_folder() / "model.bin")

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, ct2.create(self.spec(caches, slow=slow, file=file)))

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        if file is not None and file.exists():  # the one file that is broken, among others that are not
            for name in ("config.json", "vocabulary.json"):
                copyfile(ct2_stage.tiny_folder() / name, file.parent / name)
        options = {"path": str(file)} if file is not None else {}
        return ct2_stage.spec(caches, **options)

    def repeating(self, pattern: str) -> str:
        return pattern * 5

    def adapter(self, folder: Path) -> Path | None:
        return None


class Exl3:
    """On the fake ExLlamaV3, or on the real one if MODELYARD_EXL3_MODEL names a model."""

    tolerance = TOLERANCE if exl3_stage.REAL is None else ROUNDED
    reuses, tells_progress = True, False  # told it is, but a short prompt is read in one go with the first token
    vocabulary = property(lambda self: exl3_stage.vocabulary())
    file = property(lambda self: next(exl3_stage.model_folder().glob("*.safetensors")))

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, exl3_stage.make(self.spec(caches, slow=slow, file=file), slow=slow))

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        if file is not None and file.exists():  # the one file that is broken, among others that are not
            for name in ("config.json", "tokenizer.json"):
                copyfile(exl3_stage.model_folder() / name, file.parent / name)
        options = {"path": str(file.parent)} if file is not None else {}
        return exl3_stage.spec(caches, **options)

    def repeating(self, pattern: str) -> str:
        return pattern * 5

    def adapter(self, folder: Path) -> Path | None:
        return None


class Vllm:
    """On the fake vLLM, which keeps KV in blocks of tokens like the real one."""

    tolerance = TOLERANCE
    reuses, tells_progress = True, False
    block = vllm_stage.BLOCK
    vocabulary = property(lambda self: fake_helpers.tokenizer())
    file = property(lambda self: vllm_stage.model_folder() / "model.safetensors")

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        vllm_stage.use_fake_library()
        return cast(TextEngine, vllm.create(self.spec(caches, slow=slow, file=file)))

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        if file is not None and file.exists():  # the one file that is broken, among others that are not
            copyfile(vllm_stage.model_folder() / "config.json", file.parent / "config.json")
        options: dict[str, Any] = {} if file is None else {"vllm_model": str(file.parent)}
        pace = {"token_delay": 0.001, "prefill_rate": 5000.0} if slow else {}
        first = vllm_stage.adapter(vllm_stage.model_folder() / "first")
        return vllm_stage.spec(caches, pace, lora={"first": str(first)}, **options)

    def repeating(self, pattern: str) -> str:
        return fake_helpers.chatml(("user", pattern))

    def adapter(self, folder: Path) -> Path | None:
        return vllm_stage.adapter(folder / "law")


class RealVllm(Vllm):
    """On the CPU, by its own interpreter, in a worker that lasts: make test-vllm."""

    block = vllm_real.BLOCK
    vocabulary = property(lambda self: vllm_real.vocabulary())
    file = property(lambda self: vllm_real.model_folder() / "model.safetensors")

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, vllm_real.SharedVllmEngine(self.spec(caches, slow=slow, file=file)))

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        if file is not None and file.exists():
            copyfile(vllm_real.model_folder() / "config.json", file.parent / "config.json")
        options: dict[str, Any] = {} if file is None else {"vllm_model": str(file.parent)}
        first = vllm_real.write_adapter(vllm_stage.model_folder() / "first_real")
        return vllm_real.spec(caches, lora={"first": str(first)}, **options)

    def repeating(self, pattern: str) -> str:
        return pattern * 5

    def adapter(self, folder: Path) -> Path | None:
        return vllm_real.write_adapter(folder / "law", seed=2)


class InAProcess:
    """Another subject's engine in a process of its own. Nobody is impatient: the machine may be busy."""

    def __init__(self, backend: str, inner: Subject) -> None:
        self._backend, self._inner = backend, inner
        self.tolerance, self.reuses, self.tells_progress = inner.tolerance, inner.reuses, inner.tells_progress

    vocabulary = property(lambda self: self._inner.vocabulary)
    file = property(lambda self: self._inner.file)

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(
            TextEngine, create_process_engine(self._backend, self.spec(caches, slow=slow, file=file), "text", PATIENT)
        )

    def spec(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> EngineSpec:
        return self._inner.spec(caches, slow=slow, file=file)

    def repeating(self, pattern: str) -> str:
        return self._inner.repeating(pattern)

    def adapter(self, folder: Path) -> Path | None:
        return self._inner.adapter(folder)


class Split(InAProcess):
    """Another subject's engine in a worker, reached through a scheduler as a gateway reaches it."""

    def __init__(self, backend: str, inner: Subject, kind: type[SplitEngine]) -> None:
        super().__init__(backend, inner)
        self._kind = kind

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        return cast(TextEngine, self._kind(self._backend, self.spec(caches, slow=slow, file=file), PATIENT))


SUBJECTS: dict[str, Subject] = {
    "fake": Fake(),
    "llama_cpp": LlamaCpp(),
    "ct2": Ct2(),
    "exllamav3": Exl3(),
    "vllm": Vllm(),
    "vllm_real": RealVllm(),
    "fake_process": InAProcess("fake", Fake()),
    "llama_cpp_process": InAProcess("llama_cpp", LlamaCpp()),
    "llama_cpp_split": Split("llama_cpp", LlamaCpp(), SplitEngine),
    "llama_cpp_machines": Split("llama_cpp", LlamaCpp(), FarEngine),
    "llama_cpp_ray": Split("llama_cpp", LlamaCpp(), RayEngine),
}
CLUSTER = ("llama_cpp_machines", "llama_cpp_ray")  # with a network, or a Ray, of their own: make test-cluster


def chosen(names: Iterable[str]) -> list[Any]:
    """These subjects as the parameters of a test."""
    return [pytest.param(name, marks=_mark(name)) if _mark(name) is not None else name for name in names]


def _mark(name: str) -> Any:
    return pytest.mark.cluster if name in CLUSTER else pytest.mark.vllm if name == "vllm_real" else None


# Starting a process with a real model twenty times is for a benchmark.
SLOWLY_LOADED = ("llama_cpp_process", "llama_cpp_split", "vllm_real")
RELOADED = chosen(name for name in SUBJECTS if name not in (*SLOWLY_LOADED, *CLUSTER))
REUSING = chosen(name for name, subject in SUBJECTS.items() if subject.reuses)
TELLING = chosen(name for name, subject in SUBJECTS.items() if subject.tells_progress)


def keeps_blocks(subject: Subject) -> bool:
    """Whether the KV of several conversations lies side by side, in blocks that any of them may find again."""
    return hasattr(subject, "block")


def reread(subject: Subject, tokens: int) -> int:
    """How many of a prompt's tokens are there already when it comes again: all but the last, in whole blocks."""
    block: int = getattr(subject, "block", 1)
    return (tokens - 1) // block * block


def prompt(subject: Subject, text: str = TOPICS[0], *, raw: bool = False, **fields: Any) -> Prompt:
    """`raw` text is the whole prompt, else it is the user's turn."""
    whole = text if raw else fake_helpers.chatml(("user", text))
    chosen = {"sampling": GREEDY, "max_tokens": 6, "cache": "main", "logprobs": 2} | fields
    return Prompt(parts=(TokenRun(subject.vocabulary.encode(whole)),), **chosen)
