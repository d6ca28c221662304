"""Which CUDA library has code for a GPU, and NVIDIA's own libraries beside it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import cuda_package
from modelyard.library.cuda_package import (
    CUDA_BUILDS,
    RuntimeWheel,
    add_runtime,
    fetch_cuda,
    find_installed,
    misfit,
    runtime_folders,
)
from modelyard.library.llama_cpp_package import LibraryPackage, libraries_dir, packages_for
from modelyard.library.progress import OnBytes, ProgressReporter

CUDA13, CUDA12 = CUDA_BUILDS
NO_CODE, NO_PTX, OLD = "it has no code", "its PTX needs a driver for CUDA 13.1", "it needs a driver for CUDA 13"


@pytest.mark.parametrize(
    ("capability", "driver", "newest", "older"),
    [
        ((8, 6), (13, 0), None, None),  # RTX 3090
        ((8, 9), (13, 0), None, None),  # RTX 4090
        ((12, 0), (13, 0), None, None),  # RTX 5090
        ((12, 0), (12, 8), OLD, None),
        ((9, 0), (13, 0), NO_PTX, None),  # H100, H200
        ((9, 0), (13, 1), None, None),
        ((8, 0), (13, 0), NO_PTX, None),  # A100
        ((7, 5), (12, 4), OLD, None),  # RTX 2080
        ((7, 0), (13, 1), NO_CODE, None),  # V100
        ((10, 0), (13, 0), NO_PTX, None),  # B200
        ((6, 1), (12, 2), OLD, "its PTX needs a driver for CUDA 12.4"),  # GTX 1080
        ((3, 5), (12, 4), OLD, NO_CODE),
        ((8, 6), (11, 8), OLD, "it needs a driver for CUDA 12"),
    ],
)
def test_a_library_fits_a_gpu_by_its_code_and_the_driver(
    capability: tuple[int, int], driver: tuple[int, int], newest: str | None, older: str | None
) -> None:
    for build, expected in ((CUDA13, newest), (CUDA12, older)):
        found = misfit(build, capability, driver)
        assert (found is None) == (expected is None)
        assert (expected or "") in (found or "")


def wheel_of(folder: Path, files: tuple[str, ...]) -> RuntimeWheel:
    """A wheel on the disk, as the package index would give it."""
    with zipfile.ZipFile(folder / "cublas.whl", "w") as archive:
        for name in (*files, "libnvblas.so.12"):
            archive.writestr(f"nvidia/cublas/lib/{name}", name.encode())
    digest = hashlib.sha256((folder / "cublas.whl").read_bytes()).hexdigest()
    return RuntimeWheel("cublas==12", digest, 1, files)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with one wheel; nothing is installed."""
    folder = tmp_path / "index"
    folder.mkdir()

    def download(_: str, target: Path, on_bytes: OnBytes, size: int) -> Path:
        found = folder / "cublas.whl"
        if not found.exists():
            raise Unavailable("the package index cannot be reached")
        return found.rename(target / found.name)

    monkeypatch.setattr(cuda_package, "pip_download", download)
    monkeypatch.setattr(cuda_package, "runtime_folders", lambda: iter(()))
    return folder


def test_only_the_libraries_that_are_needed_are_unpacked_and_only_once(tmp_path: Path, index: Path) -> None:
    target = tmp_path / "library"
    target.mkdir()
    wheel = wheel_of(index, ("libcublas.so.12", "libcublasLt.so.12"))
    add_runtime(target, [wheel], ProgressReporter(write_line=lambda _: None))
    assert sorted(file.name for file in target.iterdir()) == ["libcublas.so.12", "libcublasLt.so.12"]
    add_runtime(target, [wheel], ProgressReporter(write_line=lambda _: None))  # the index is empty now
    assert not list(tmp_path.glob(".cuda-*"))


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path: Path, index: Path) -> None:
    target = tmp_path / "library"
    target.mkdir()
    wheel_of(index, ("libcublas.so.12",))
    wrong = RuntimeWheel("cublas==12", "0" * 64, 1, ("libcublas.so.12",))
    with pytest.raises(InvalidRequest, match=r"has the hash .* expected 000") as refused:
        add_runtime(target, [wrong], ProgressReporter(write_line=lambda _: None))
    assert refused.value.code == "checksum_mismatch"
    assert not list(target.iterdir())


def test_installed_libraries_are_linked_instead_of_fetched(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, target = tmp_path / "site" / "nvidia" / "cublas" / "lib", tmp_path / "library"
    installed.mkdir(parents=True)
    target.mkdir()
    (installed / "libcublas.so.12").write_text("x")
    folders = list(runtime_folders({"LD_LIBRARY_PATH": "/opt/a:/opt/b"}, [str(tmp_path / "site")]))
    assert folders[:3] == [installed, Path("/opt/a"), Path("/opt/b")]
    assert find_installed("libcublas.so.12", folders) == installed / "libcublas.so.12"
    monkeypatch.setattr(cuda_package, "runtime_folders", lambda: iter(folders))
    wheel = RuntimeWheel("cublas==12", "0" * 64, 1, ("libcublas.so.12",))
    add_runtime(target, [wheel], ProgressReporter(write_line=lambda _: None))
    assert (target / "libcublas.so.12").readlink() == installed / "libcublas.so.12"


def test_the_cuda_12_plugin_is_put_beside_the_library_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_package, "packages_for", lambda variant, _=None: packages_for(variant, "linux-x64"))
    monkeypatch.setattr(cuda_package, "add_runtime", lambda folder, *_: (folder / "libcudart.so.12").touch())

    def fetched(package: LibraryPackage, _: ProgressReporter) -> Path:
        folder = libraries_dir() / package.folder_name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("libllama.so" if package.variant == "cpu" else "libggml-cuda.so")).touch()
        return folder

    monkeypatch.setattr(cuda_package, "fetch", fetched)
    folder = fetch_cuda(CUDA12)
    assert folder.name == "linux-x64-cuda12-3.22.1"
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["libcudart.so.12", "libggml-cuda.so", "libllama.so"]
    assert fetch_cuda(CUDA12) == folder
    monkeypatch.setattr(cuda_package, "packages_for", lambda *_: [])
    with pytest.raises(Unavailable, match="no prebuilt CUDA library"):
        fetch_cuda(CUDA13)
