"""Models of the library in the configuration: what their files decide, and who wins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import modelyard_vllm
from modelyard import plugins
from modelyard.config import library_models
from modelyard.config.library_models import (
    LibraryModel,
    choose_parallel,
    choose_window,
    default_for_any_name,
    folder_backend,
    read_facts,
    read_library_models,
)
from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.engine import CacheInfo, EnginePlugin
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.llama_cpp.model_shape import ModelShape
from modelyard.engines.llama_cpp.options import Options, context_layouts
from modelyard.library import model_files, models
from modelyard.library.model_files import LibraryEntry
from modelyard.library.variants import MemoryBudget
from tests.library.files import gguf_bytes

GB = 2**30
BUDGET = MemoryBudget(16 * GB)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def add(name: str, *, data: bytes | None = None, **more: Any) -> Path:
    file = Path(f"{name}.gguf").absolute()
    file.write_bytes(data or gguf_bytes(template="{{ messages }}"))
    model_files.put_entry(LibraryEntry(name, str(file), **more))
    return file


def folder(name: str, config: dict[str, Any], **files: Any) -> Path:
    path = Path(name).absolute()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"0123456789")
    for file, value in files.items():
        (path / f"{file}.json").write_text(json.dumps(value))
    return path


def load(text: str = "", env: dict[str, str] | None = None) -> Config:
    Path("modelyard.toml").write_text(text)
    return load_config(env=env or {}, cwd=Path.cwd(), library=lambda: read_library_models(BUDGET)).config


# --- the window -------------------------------------------------------------------------------------------------------

LLAMA_8B = ModelShape(5 * GB, 131_072, 32, 4096, 32, 128_256, 32 * 1024, 32 * 1024)


@pytest.mark.parametrize(
    ("budget", "window", "parallel", "reason"),
    [
        (MemoryBudget(1000 * GB), 65_536, 8, "trained 131072, and more is slow on a CPU"),
        (MemoryBudget(64 * GB), 65_536, 2, "trained 131072, and more is slow on a CPU"),
        (MemoryBudget(24 * GB), 49_152, 1, "trained 131072, bounded by the memory: 24.0 GiB of memory may be used"),
        (MemoryBudget(11 * GB), 32_768, 1, "bounded by the memory"),
        (MemoryBudget(7 * GB), 12_288, 1, "bounded by the memory"),
        (MemoryBudget(1 * GB), 4_096, 1, "bounded by the memory"),
        (MemoryBudget(64 * GB, 80 * GB), 65_536, 2, "bounded by the memory: 80.0 GiB of GPU memory may be used"),
        (MemoryBudget(64 * GB, 140 * GB), 131_072, 2, "as trained"),
        (MemoryBudget(64 * GB, 24 * GB), 49_152, 1, "bounded by the memory: 24.0 GiB of GPU memory may be used"),
    ],
)
def test_the_window_is_the_trained_one_bounded_by_the_memory(
    budget: MemoryBudget, window: int, parallel: int, reason: str
):
    choice = choose_window(LLAMA_8B, budget)
    assert (choice.window, choice.parallel) == (window, parallel)
    assert reason in choice.reason


def test_a_small_model_gets_its_trained_window_and_an_unknown_length_is_short():
    small = ModelShape(10**8, 8192, 30, 576, 9, 49_152, 5760, 5760)
    choice = choose_window(small, BUDGET)
    assert (choice.window, choice.parallel, choice.reason) == (8192, 4, "as trained")
    unknown = choose_window(ModelShape(10**8, 0, 30, 576, 9, 49_152, 5760, 5760), BUDGET)
    assert (unknown.window, unknown.reason) == (4096, "trained length unknown")


SMALL = ModelShape(10**8, 8192, 30, 576, 9, 49_152, 5760, 5760)
TALK, SIDE = CacheInfo(8192), CacheInfo(8192, 2)


@pytest.mark.parametrize(
    ("shape", "caches", "budget", "parallel"),
    [
        (SMALL, {"main": TALK, "fast": SIDE}, MemoryBudget(64 * GB), 8),
        (SMALL, {"main": TALK, "fast": SIDE}, MemoryBudget(16 * GB), 3),
        (SMALL, {"main": TALK, "fast": SIDE}, MemoryBudget(4 * GB), 2),
        (SMALL, {"main": TALK, "fast": CacheInfo(8192, 100)}, MemoryBudget(16 * GB), 1),
        (SMALL, {"main": CacheInfo(8192, type_k="q8_0", type_v="q8_0"), "fast": SIDE}, MemoryBudget(16 * GB), 6),
        (LLAMA_8B, {"main": CacheInfo(32_768)}, MemoryBudget(64 * GB, 24 * GB), 1),
        (LLAMA_8B, {"main": CacheInfo(8192)}, MemoryBudget(64 * GB, 24 * GB), 6),
    ],
)
def test_auto_keeps_as_many_conversations_as_fit_beside_the_weights(
    shape: ModelShape, caches: dict[str, CacheInfo], budget: MemoryBudget, parallel: int
):
    assert choose_parallel(shape, caches, ["main"], budget) == parallel


def test_auto_becomes_a_number_when_the_configuration_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library_models, "machine_budget", lambda **_: BUDGET)
    known, gone = add("known"), Path("gone.gguf")
    config = load(
        f'[models.a]\npath = "{known}"\nparallel = "auto"\n[models.b]\npath = "{gone}"\n'
        '[caches.c]\nmodel = "b"\nn_ctx = 4096\nparallel = "auto"\n[caches.d]\nmodel = "b"\nn_ctx = 64\n'
    )
    assert (config.models["a"].parallel, config.caches["c"].parallel, config.caches["d"].parallel) == (8, 4, 1)
    found = config.router().catalog.models
    assert (found["a"].caches["a"].info.parallel, found["b"].caches["c"].info.parallel) == (8, 4)


def test_the_built_in_model_serves_its_conversations_in_one_context_of_a_gigabyte(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(library_models, "machine_budget", lambda **_: BUDGET)
    entry = load().router().catalog.models["smollm2"]
    infos = {name: cache.info for name, cache in entry.caches.items()}
    assert {name: info.parallel for name, info in infos.items()} == {"main": 3, "fast": 2}
    assert len(context_layouts(infos, Options(path=""))) == 1


# --- what files say ---------------------------------------------------------------------------------------------------


def test_the_sampling_values_of_the_file_become_the_models_defaults():
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter("x.gguf", "llama")
    writer.add_context_length(1024)
    writer.add_block_count(1)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 7)
    writer.add_float32("general.sampling.penalty_repeat", 1.5)
    writer.add_string("general.sampling.sequence", "edskypmxt")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model_files.put_entry(LibraryEntry("x", str(Path("x.gguf").absolute())))
    decoding = load().models["x"].decoding
    assert (decoding.temperature, decoding.top_k, decoding.repetition_penalty, decoding.top_p) == (0.5, 7, 1.5, None)


def test_a_folder_brings_its_shape_and_its_generation_config():
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "vocab_size": 100,
    }
    generation = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": 2}
    facts = read_facts(folder("f", config, generation_config=generation))
    assert facts.sampling == {"temperature": 0.6, "top_p": 0.95}
    shape = facts.shape
    assert (shape.trained, shape.key, shape.weights, shape.purpose.task) == (2048, 64, 10, "chat")
    assert read_facts(folder("g", config, generation_config={"do_sample": False})).sampling == {"temperature": 0.0}


def test_an_encoder_folder_is_no_chat_model():
    assert read_facts(folder("bert", {"architectures": ["BertModel"]})).shape.purpose.task == "embedding"
    assert read_facts(folder("st", {"architectures": ["Other"]}, modules=[])).shape.purpose.task == "embedding"


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("{% if enable_thinking is defined and not enable_thinking %}x{% endif %}", True),
        ("{%- if thinking %}<think>{% endif %}", True),
        ("You are a reasoning model with thinking. {{ message.reasoning }}{{ message['thinking'] }}", False),
        (None, False),
    ],
)
def test_a_file_tells_whether_its_template_switches_thinking(template: str | None, switches: bool):
    add("x", data=gguf_bytes(template=template))
    assert [model.switches_thinking for model in read_library_models(BUDGET)] == [switches]
    made = folder("f", {"architectures": ["LlamaForCausalLM"]}, tokenizer_config={"chat_template": template})
    assert read_facts(made).switches_thinking == switches


def test_a_file_is_read_once_until_it_changes(monkeypatch: pytest.MonkeyPatch):
    file, reads = add("one"), list[Path]()

    def counted(path: Path) -> library_models.ModelFacts:
        reads.append(path)
        return read_facts(path)

    monkeypatch.setattr(library_models, "read_facts", counted)
    first = read_library_models(BUDGET)
    assert read_library_models(BUDGET) == first
    assert len(reads) == 1
    file.write_bytes(gguf_bytes() + b"\0")
    assert read_library_models(BUDGET)[0].stamp != first[0].stamp
    assert len(reads) == 2


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_build")
def test_the_engine_follows_from_the_format(monkeypatch: pytest.MonkeyPatch):
    exl3 = folder("exl3", {"quantization_config": {"quant_method": "exl3"}})
    ct2 = Path("ct2").absolute()
    ct2.mkdir()
    (ct2 / "model.bin").touch()
    (ct2 / "vocabulary.json").touch()
    plain = folder("plain", {})
    assert folder_backend(exl3) == {"backend": "exllamav3"}
    assert folder_backend(ct2) == {"backend": "ct2"}
    monkeypatch.setattr(modelyard_vllm, "find_spec", lambda name: None)
    monkeypatch.setattr(modelyard_vllm.env, "is_ready", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert folder_backend(plain) == {"backend": "vllm"}
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/vllm")
    assert folder_backend(plain) == {"backend": "vllm_serve"}
    assert load(f'[models.m]\npath = "{exl3}"').models["m"].backend == "exllamav3"


def test_a_plugin_takes_the_folders_of_its_own_format(monkeypatch: pytest.MonkeyPatch):
    loaded = plugins.load("engines", "toy")
    engines = {
        "any": replace(loaded, takes_folder=lambda _: 1),
        "own": replace(
            loaded, takes_folder=lambda path: 2 * path.name.endswith("-own"), library_options=lambda *_: {"speed": 2.0}
        ),
    }
    monkeypatch.setattr(plugins, "names", lambda _: ("any", "bare", "own"))
    monkeypatch.setattr(plugins, "engine", lambda name: engines[name] if name != "bare" else _fail())
    assert folder_backend(folder("x-own", {})) == {"backend": "own"}
    assert folder_backend(folder("x", {})) == {"backend": "any"}
    model_files.put_entry(LibraryEntry("m", str(Path("x-own").absolute())))
    (model,) = read_library_models(BUDGET)
    assert model.table is not None
    assert (model.table["backend"], model.table["speed"]) == ("own", 2.0)


def _fail() -> EnginePlugin:
    raise plugins.BrokenPlugin("cannot be imported")


@pytest.mark.usefixtures("real_build")
def test_vllm_takes_the_memory_of_the_window_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modelyard_vllm, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/vllm")
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 2048}
    model_files.put_entry(LibraryEntry("v", str(folder("v", config))))
    options = load().models["v"].options
    assert options == {"vllm_kv_cache_memory_bytes": 256 << 20, "vllm_dtype": "float32", "vllm_enforce_eager": True}
    (model,) = read_library_models(MemoryBudget(GB, 80 * GB))
    assert model.table is not None
    assert model.table["vllm_gpu_memory_utilization"] == 0.01
    assert "vllm_dtype" not in model.table


def test_a_model_with_a_projector_runs_in_a_llama_server_if_there_is_one(monkeypatch: pytest.MonkeyPatch):
    add("eyes", projector="/x/mmproj.gguf")
    monkeypatch.setattr(library_models.libmtmd, "find_library", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/llama-server")
    model = load().models["eyes"]
    assert (model.backend, model.options["llama_server_mmproj_path"]) == ("llama_server", "/x/mmproj.gguf")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert load().models["eyes"].backend == "llama_cpp"


def test_with_libmtmd_a_model_with_a_projector_runs_in_process(monkeypatch: pytest.MonkeyPatch):
    add("eyes", projector="/x/mmproj.gguf")
    monkeypatch.setattr(library_models.libmtmd, "find_library", lambda: Path("libmtmd.so"))
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/llama-server")
    model = load().models["eyes"]
    assert (model.backend, model.options["mmproj"]) == ("llama_cpp", "/x/mmproj.gguf")


@pytest.mark.usefixtures("real_build")
def test_a_model_that_cannot_run_here_is_not_served_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modelyard_vllm, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(modelyard_vllm.env, "is_ready", lambda: False)
    model_files.put_entry(LibraryEntry("folder", str(folder("f", {}))))
    model_files.put_entry(LibraryEntry("gone", "/nowhere.gguf"))
    add("broken", data=b"GGUX")
    reasons = {model.entry.name: model.reason for model in read_library_models(BUDGET) if model.table is None}
    assert "needs vLLM" in reasons["folder"]
    assert reasons["gone"] == "/nowhere.gguf is missing"
    assert "not a readable GGUF file" in reasons["broken"]
    assert list(load().models) == ["smollm2"]


# --- the configuration ------------------------------------------------------------------------------------------------


def test_library_models_are_served_on_demand_beside_the_configured_ones():
    add("mine", source="o/r", quant="Q4_K_M", owned=True, commit="c")
    config = load('[models.own]\nbackend = "fake"\n')
    assert list(config.models) == ["mine", "own"]
    model = config.models["mine"]
    assert (model.backend, model.enabled, model.autoload, model.n_ctx) == ("llama_cpp", False, True, 512)
    assert model.description == "o/r Q4_K_M"
    assert list(config.library_models) == ["mine"]
    with pytest.raises(NotFound, match=r"Models: mine, own"):
        config.router().resolve("other", "/v1/messages")


def test_a_section_of_its_name_changes_single_settings_and_one_with_a_path_replaces_it():
    add("mine")
    config = load('[models.mine]\nn_ctx = 256\naliases = ["m"]\n[models.own]\nbackend = "fake"\n')
    assert (config.models["mine"].n_ctx, config.models["mine"].autoload) == (256, True)
    assert config.router().resolve("m", "/").model == "mine"
    config = load('[models.mine]\nbackend = "fake"\npath = "x"\n')
    assert (config.models["mine"].backend, config.models["mine"].enabled, config.library_models) == ("fake", True, {})


def test_a_section_for_a_library_model_alone_keeps_the_default_rules():
    add("mine")
    config = load("[models.mine]\nn_ctx = 256\n")
    assert (config.default_model, config.models["mine"].n_ctx) == ("mine", 256)


def test_variables_change_library_models():
    add("My-Model.v2")
    assert load(env={"MODELYARD_MODELS__MY_MODEL_V2__N_CTX": "128"}).models["My-Model.v2"].n_ctx == 128


def test_aliases_and_caches_of_the_configuration_win():
    add("fast")
    add("nick")
    own = '[models.own]\nbackend = "fake"\naliases = ["nick"]\n[caches.fast]\nmodel = "own"\nn_ctx = 9\n'
    assert list(load(own).models) == ["own"]


def test_a_pulled_model_answers_to_its_name_whatever_the_patterns_of_routes():
    add("gpt-x")
    own = '[models.own]\nbackend = "fake"\n[[routes]]\nmatch = ["GPT-*", "*"]\nmodel = "own"\n'
    router = load(own).router()
    assert [router.resolve(name, "/").model for name in ("gpt-x", "gpt-y")] == ["gpt-x", "own"]
    assert load(own + "override = true\n").router().resolve("gpt-x", "/").model == "own"


def test_routes_and_the_default_may_name_library_models():
    add("mine")
    text = 'default_model = "mine"\n[models.own]\nbackend = "fake"\n[[routes]]\nmatch = "claude-*"\nmodel = "mine"\n'
    config = load(text)
    assert config.router().resolve("claude-x", "/").model == "mine"
    assert config.router().resolve("anything", "/").model == "mine"


def test_a_setting_switches_it_off():
    add("mine")
    assert list(load("library = false\n").models) == ["smollm2"]
    assert list(load(env={"MODELYARD_LIBRARY": "false"}).models) == ["smollm2"]


# --- names that no model has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "first"), [('[models.mine]\nbackend = "fake"\n', "mine"), ("", "pulled")])
def test_a_command_that_names_no_model_means_one_of_the_file_before_those_of_the_library(text: str, first: str):
    add("pulled", owned=True)
    Path("modelyard.toml").write_text(text)
    loaded = load_config(env={}, cwd=Path.cwd(), library=lambda: read_library_models(BUDGET))
    assert next(iter(loaded.config.models)) == "pulled"
    assert loaded.first_model == first


def test_without_a_configuration_the_model_pulled_last_answers_to_unknown_names():
    add("first")
    add("second", owned=True, commit="c")
    add("converted", owned=True)
    router = load().router()
    assert router.resolve("claude-sonnet", "/").model == "second"
    assert router.resolve("claude-haiku", "/").model == "second"
    assert router.resolve("first", "/").model == "first"


def test_a_pulled_model_is_found_by_its_name_and_the_built_in_one_answers_to_the_rest():
    add("embedder", data=gguf_bytes())
    (model,) = read_library_models(BUDGET)
    other = LibraryModel(model.entry, model.table, "embedding", is_chat=False)
    assert default_for_any_name([other]) is None
    config = load_config(env={}, cwd=Path.cwd(), library=lambda: [other]).config
    router = config.router()
    assert router.resolve("embedder", "/").model == "embedder"
    assert router.resolve("claude-sonnet", "/").cache == "main"
    assert router.resolve("claude-haiku", "/").cache == "fast"


def test_a_model_without_a_chat_template_answers_to_its_own_name_only():
    add("talker", commit="c")
    add("base", data=gguf_bytes(), commit="c")
    assert [model.is_chat for model in read_library_models(BUDGET)] == [True, False]
    assert load().router().resolve("claude-sonnet", "/").model == "talker"
    assert load().router().resolve("base", "/").model == "base"


def test_a_request_that_names_no_model_gets_the_only_one_that_can_chat():
    Path("base.gguf").write_bytes(gguf_bytes())
    Path("talker.gguf").write_bytes(gguf_bytes(template="{{ messages }}"))
    models = "".join(f'[models.{name}]\npath = "{name}.gguf"\n' for name in ("base", "talker"))
    assert load(models).router().resolve("default", "/").model == "talker"
    assert load(f"{models}enabled = false").router().resolve("default", "/").model == "base"
    both = load(models.replace('base.gguf"', 'base.gguf"\nprompt_format = "generic"')).router()
    with pytest.raises(InvalidRequest, match=r"model is required.* base, talker"):
        both.resolve("default", "/")


@pytest.mark.parametrize("source", ["name", "settings", "folder"])
def test_a_template_outside_of_the_file_makes_a_chat_model(source: str):
    settings = {"prompt_format": "generic"} if source == "settings" else {}
    add("qwen-base" if source == "name" else "base", data=gguf_bytes(), settings=settings)
    if source == "folder":
        Path("chat_template.jinja").write_text("{{ messages }}")
    assert [model.is_chat for model in read_library_models(BUDGET)] == [True]


def test_names_are_found_in_any_case():
    add("Qwen3-8B")
    router = load('[models.own]\nbackend = "fake"\n').router()
    assert router.resolve("qwen3-8b", "/").model == "Qwen3-8B"


def test_the_built_in_model_stays_available_on_demand_if_it_is_here(cache: Path, monkeypatch: pytest.MonkeyPatch):
    add("mine")
    assert list(load().models) == ["mine"]
    monkeypatch.setattr("modelyard.config.load.is_fetched", lambda: True)
    config = load()
    assert (config.models["smollm2"].enabled, config.models["smollm2"].autoload) == (False, True)
    assert config.router().resolve("whatever", "/").model == "mine"


def test_a_broken_list_does_not_stop_the_configured_models(cache: Path, caplog: pytest.LogCaptureFixture):
    (cache / "models").mkdir(parents=True)
    (cache / "models/library.json").write_text("{")
    assert list(load('[models.own]\nbackend = "fake"\n').models) == ["own"]
    assert "library.json cannot be read" in caplog.text


def test_a_removed_model_leaves_the_configuration():
    add("mine")
    models.remove_model("mine")
    assert list(load().models) == ["smollm2"]
