from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.config import ConfigError
from modelyard.config.sources import find_files, read_file


def write(folder: Path, *names: str) -> list[Path]:
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}" if file.suffix == ".json" else "")
    return files


def test_a_named_file_stands_alone(tmp_path: Path) -> None:
    write(tmp_path, "config/settings.json", "modelyard.toml", "mine.toml")
    assert find_files(Path("mine.toml"), {"LLM_POOL_SETTINGS_PATH": "x.json"}, tmp_path) == [tmp_path / "mine.toml"]


def test_pool_files_go_before_modelyard_toml(tmp_path: Path) -> None:
    files = write(tmp_path, "config/settings.json", "config/local.json", "modelyard.toml")
    assert find_files(None, {}, tmp_path) == files[:2]


def test_modelyard_toml_is_found_last(tmp_path: Path) -> None:
    assert find_files(None, {}, tmp_path) == []
    files = write(tmp_path, "modelyard.toml")
    assert find_files(None, {}, tmp_path) == files


def test_variables_replace_the_pool_files(tmp_path: Path) -> None:
    write(tmp_path, "config/settings.json", "config/local.json", "else/s.json", "else/local.json", "l.json")
    env = {"LLM_POOL_SETTINGS_PATH": "else/s.json"}
    assert find_files(None, env, tmp_path) == [tmp_path / "else/s.json", tmp_path / "else/local.json"]
    env["LLM_POOL_LOCAL_SETTINGS_PATH"] = str(tmp_path / "l.json")
    assert find_files(None, env, tmp_path) == [tmp_path / "else/s.json", tmp_path / "l.json"]
    del env["LLM_POOL_SETTINGS_PATH"]
    assert find_files(None, env, tmp_path) == [tmp_path / "config/settings.json", tmp_path / "l.json"]


def test_a_file_that_a_variable_names_must_exist(tmp_path: Path) -> None:
    (missing, *_) = find_files(None, {"LLM_POOL_SETTINGS_PATH": "gone.json"}, tmp_path)
    with pytest.raises(ConfigError, match=r"gone\.json: there is no such file"):
        read_file(missing)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"[http\n", "is not valid TOML"),
        ("a.json", b'{"a": }', "is not valid JSON: Expecting value: line 1 column 7"),
        ("a.json", b"[1]", "must hold a table at its top, found list"),
        ("a.json", b"\xff\xfe\x00", "is not valid JSON"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
        ("a.yaml", b"a: 1", r"a configuration is a \.toml or a \.json file"),
    ],
)
def test_a_broken_file_is_told_by_its_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_file(tmp_path / name)
    assert error.value.problems[0].source == str(tmp_path / name)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "a.toml")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_file(tmp_path / "a.json") == {"a": 1}
