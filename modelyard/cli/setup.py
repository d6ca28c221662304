"""`modelyard setup`: the llama.cpp library of this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from modelyard.cli.console import out, run_or_exit
from modelyard.cli.models import make_progress
from modelyard.library.llama_cpp_package import Variant


def setup(
    build: Annotated[
        bool,
        typer.Option("--build", help="Compile llama.cpp for this machine; CC, CXX and CMAKE_ARGS are used."),
    ] = False,
    library: Annotated[
        str | None,
        typer.Option(
            metavar="KIND|PATH|VERSION",
            help="Use another library: cpu, cuda, cuda12, vulkan or metal; a file or a folder; a version of the npm "
            "package, of xllamacpp or of llama-cpp-python. Default: the best one that works here.",
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Compile it again, without caches.")] = False,
    media: Annotated[
        bool, typer.Option("--media", help="Compile what images and audio need (libmtmd), for the library in use.")
    ] = False,
    background: Annotated[
        bool, typer.Option("--background", help="With --build: return at once; the next start uses the library.")
    ] = False,
) -> None:
    """Set up the llama.cpp engine: fetch the library for this machine, test it and use it from now on.

    The first serve or run does the same by itself. A GPU is found and used: docs/gpu.md. A library that is compiled
    here can be faster, and CMAKE_ARGS can add a GPU that no prebuilt one supports:
    [bold]CMAKE_ARGS=-DGGML_CUDA=ON modelyard setup --build[/bold]

    For images and audio in the engine: [bold]modelyard setup --media[/bold].
    """
    from modelyard.engines.llama_cpp import setup as engine

    if background:
        log = run_or_exit(engine.build_in_background)
        _print(f"llama.cpp is compiled in the background; the log is {log}. The next start uses it.")
        return
    if media and not build:
        _print(f"Images and audio work on this machine: {run_or_exit(partial(engine.set_up_media, fresh=rebuild))}")
        return
    if build or rebuild:
        make = partial(engine.set_up_build, fresh=rebuild)
    elif library in get_args(Variant):
        make = partial(engine.set_up_variant, cast("Variant", library), make_progress())
    elif library is not None:
        make = partial(engine.set_up_library, library, make_progress())
    else:
        make = partial(engine.set_up, make_progress())
    folder: Path = run_or_exit(make)
    _print(f"llama.cpp works on this machine: {folder}")
    if media:
        _print(f"Images and audio work on this machine: {run_or_exit(engine.set_up_media)}")
    if hint := engine.setup_hint(folder):
        _print(hint)


def _print(line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)
