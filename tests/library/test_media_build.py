"""The build of libmtmd: what it is linked to, and where it goes. No compiler runs here."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.library import media_build
from modelyard.library.llama_cpp_build import BuildFailed
from modelyard.library.llama_cpp_package import PACKAGES, package_folder


def test_it_is_linked_to_the_libraries_of_the_folder_whatever_their_release(tmp_path: Path) -> None:
    names = ("libllama.v0.5.0.so", "libggml.v0.5.0.so", "libggml-base.so", "libggml-cpu-zen4.so", "libllama.so.0")
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in media_build.link_libraries(tmp_path)] == list(names[:3])
    (tmp_path / "libggml-base.so").unlink()
    with pytest.raises(BuildFailed, match="no libggml-base"):
        media_build.link_libraries(tmp_path)


def test_a_package_of_another_release_is_refused() -> None:
    other = next(package for package in PACKAGES if package.release != media_build.LLAMA_CPP_RELEASE)
    with pytest.raises(BuildFailed, match=r"setup --build"):
        media_build.link_libraries(package_folder(other))


def test_functions_that_the_library_lacks_are_added() -> None:
    source = media_build.absent_functions(b"\0llama_process\0llama_batch_ext_init\0")
    assert "llama_batch_ext_clear" in source
    assert "llama_process" not in source


def test_a_library_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    monkeypatch.setattr(media_build, "_build", lambda target, _: built.append(target))
    target = media_build.build(tmp_path)
    target.touch()
    assert media_build.build(tmp_path) == target
    media_build.build(tmp_path, fresh=True)
    assert built == [target, target]
