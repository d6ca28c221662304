"""`modelyard import`: each source's documented configuration becomes an accepted file, and the differences are said.

`MODELYARD_GOLDEN=write` rewrites the golden files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.errors import ModelyardError
from modelyard.library import default_model
from modelyard_import import read, write
from tests.cli_process import run

HERE = Path(__file__).parent
VARIABLES = [f"{vendor}_API_KEY" for vendor in ("OPENAI", "ANTHROPIC", "GEMINI", "GROQ", "OPENROUTER", "AZURE")]
SOURCES, GOLDEN = HERE / "sources", HERE / "golden"
CASES = {
    "llama-bridge": ["llama-bridge.toml"],
    "infer-server": ["infer-server.toml"],
    "llm-pool": ["llm-pool/settings.json", "llm-pool/local.json"],
    "llama-swap": ["llama-swap.yaml"],
    "llama-swap-difficult": ["llama-swap-difficult.yaml"],
    "litellm": ["litellm.yaml"],
    "litellm-difficult": ["litellm-difficult.yaml"],
    "modelfile": ["pirate.Modelfile"],
    "modelfile-difficult": ["difficult.Modelfile"],
}


@pytest.fixture(autouse=True)
def _no_keys_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def imported(files: list[Path], folder: Path) -> Config:
    """The configuration that the written file gives."""
    kind, draft = read(files)
    (folder / "modelyard.toml").write_text(write(kind, files, draft))
    return load_config(folder / "modelyard.toml", env=dict.fromkeys(draft.variables, "a key")).config


@pytest.mark.parametrize("case", CASES)
def test_a_documented_configuration_becomes_its_golden_file(case: str) -> None:
    files = [SOURCES / name for name in CASES[case]]
    kind, draft = read(files)
    text = write(kind, files, draft).replace(f"{SOURCES}{os.sep}", "")
    golden = GOLDEN / f"{case}.toml"
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_written_file_is_accepted(case: str, tmp_path: Path) -> None:
    assert imported([SOURCES / name for name in CASES[case]], tmp_path).models


@pytest.mark.parametrize("case", ["llama-bridge", "infer-server", "llm-pool"])
def test_an_import_means_what_the_seeds_own_file_means(case: str, tmp_path: Path) -> None:
    """Apart from what the import adds on purpose, and prints."""
    files = [SOURCES / name for name in CASES[case]]
    found = imported(files, tmp_path)
    variables = dict(zip(("LLM_POOL_SETTINGS_PATH", "LLM_POOL_LOCAL_SETTINGS_PATH"), map(str, files), strict=False))
    first = None if len(files) > 1 else files[0]
    direct = load_config(first, env=variables if len(files) > 1 else {}, cwd=tmp_path / "elsewhere").config
    assert found.models.keys() == direct.models.keys()
    for name, model in found.models.items():
        ours, theirs = (each.model_dump(exclude={"tool_stream"}) for each in (model, direct.models[name]))
        theirs["options"] = {key: value for key, value in theirs["options"].items() if value is not None}
        assert ours == theirs
    for name, cache in found.caches.items():
        assert cache.overflow == "strict"
        assert cache.model_dump(exclude={"overflow"}) == direct.caches[name].model_dump(exclude={"overflow"})
    assert found.routes == direct.routes
    assert found.scheduler == direct.scheduler
    assert (found.http.port, found.http.responses_dialect) == (direct.http.port, direct.http.responses_dialect)


def test_the_command_writes_the_file_prints_the_differences_and_replaces_nothing(tmp_path: Path) -> None:
    source = str(SOURCES / "llama-swap.yaml")
    first = run("import", source, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "changed models.qwen.n_ctx: 8192 tokens: of one conversation" in first.stdout
    assert "dropped models.embed.unlisted: has no counterpart" in first.stdout
    assert "changed apiKeys[0]: the key works as before; the file holds its hash only" in first.stdout
    assert "to do apiKeys[1]: the environment variable SWAP_KEY is not set" in first.stdout
    assert "sk-plain" not in (tmp_path / "modelyard.toml").read_text() + first.stdout
    again = run("import", source, cwd=tmp_path)
    assert again.returncode == 1
    assert "--force replaces it" in again.stderr
    assert run("import", source, "--force", cwd=tmp_path).returncode == 0


def test_no_secret_of_a_difficult_file_is_copied(tmp_path: Path) -> None:
    for name, secrets in {
        "llama-swap-difficult": ["sk-hidden"],
        "litellm-difficult": ["sk-1234", "hf_secret", "AKIA-plain", "pw"],
    }.items():
        kind, draft = read([SOURCES / f"{name}.yaml"])
        text = write(kind, [SOURCES / f"{name}.yaml"], draft)
        assert not [secret for secret in secrets if f'"{secret}"' in text]


def test_a_modelfile_over_a_real_model_passes_check(tmp_path: Path) -> None:
    """The file is used in place."""
    (tmp_path / "Modelfile").write_text(f"FROM {default_model.fetch()}\nPARAMETER num_ctx 2048\nSYSTEM Be brief.\n")
    assert run("import", "Modelfile", cwd=tmp_path).returncode == 0
    checked = run("check", "modelyard.toml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2048" in checked.stdout


def ollama_folder(root: Path) -> Path:
    """As Ollama stores a model: a manifest that names blobs."""
    blobs, layers = root / "blobs", []
    blobs.mkdir(parents=True)
    contents = {
        "params": json.dumps({"temperature": 0.5, "stop": ["<end>"]}),
        "system": "Be brief.",
        "template": "{{ .Prompt }}",
    }
    for index, (kind, text) in enumerate([("model", None), *contents.items()]):
        blob = blobs / f"sha256-{index:064}"
        blob.symlink_to(default_model.fetch()) if text is None else blob.write_text(text)
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{index:064}"})
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / "smollm2" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return root


def test_ollamas_folder_becomes_its_models_with_the_files_in_place(tmp_path: Path) -> None:
    found = imported([ollama_folder(tmp_path / "models")], tmp_path)
    model = found.models["smollm2"]
    assert Path(model.path or "").samefile(default_model.fetch())
    assert (model.decoding.temperature, model.decoding.stop) == (0.5, ["<end>"])
    assert (model.system_prompt, model.autoload) == ("Be brief.", True)
    assert found.http.ollama_port == 11434


def test_a_modelfile_finds_its_base_in_ollamas_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama_folder(tmp_path / "models")))
    (tmp_path / "my.modelfile").write_text("FROM smollm2\nPARAMETER temperature 0\n")
    model = imported([tmp_path / "my.modelfile"], tmp_path).models["my"]
    assert Path(model.path or "").samefile(default_model.fetch())
    assert model.decoding.temperature == 0


def test_lm_studios_folder_becomes_its_models_with_their_projectors(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "owner" / "Repo-GGUF"
    folder.mkdir(parents=True)
    for name in ("a-Q4.gguf", "mmproj-a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (folder / name).write_bytes(b"GGUF")
    found = imported([tmp_path / "models"], tmp_path)
    assert found.models.keys() == {"a-Q4", "b"}
    assert found.models["a-Q4"].options["mmproj"].endswith("mmproj-a.gguf")
    assert found.models["b"].path == str(folder / "b-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.yaml", "models: [", "not valid YAML"),
        ("config.yaml", "a: 1", "neither LiteLLM's model_list nor llama-swap's models"),
        ("config.yaml", "model_list:\n  - model_name: x", "model_list[0] needs model_name and litellm_params"),
        ("config.yaml", "models: {x: {cmd: llama-server --port 1}}", "names no model"),
        ("notes.txt", "hello", "no configuration that can be imported"),
        ("a.toml", "[modells.x]\npath = 'x.gguf'", "Did you mean 'models'"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelyardError) as error:
        read([tmp_path / name])
    assert says in error.value.message


def test_a_folder_without_models_and_a_missing_file_are_named(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "there are no models"), (tmp_path / "none", "there is no file or folder")):
        with pytest.raises(ModelyardError, match=says):
            read([path])
