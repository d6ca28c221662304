"""`make release`: build sdist and wheel, try both in fresh environments, and print the commands that publish them.

    python -m setup.release --repository https://example.org/me/modelyard --python python3.11 --python python3.13

The build is made from the committed files. A package index shows README.md without the repository, so its relative
links are made absolute for the version's tag; `--repository` also becomes the project's URL. Nothing is published.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelyard import __version__

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_DEMO = '[models.demo]\nbackend = "fake"\nn_ctx = 4096\nscript = [{ steps = [{ text = "It works." }] }]\n'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make release")
    parser.add_argument("--repository", default=os.environ.get("REPOSITORY", ""), help="URL of the public repository")
    parser.add_argument("--python", action="append", help="interpreters to try it with; default: this one")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    check_version((ROOT / "CHANGELOG.md").read_text("utf-8"), __version__)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder) / "stage"
        export(stage)
        prepare(stage, options.repository)
        run([sys.executable, "-m", "hatchling", "build", "-d", str(options.out)], cwd=stage)
    wheel, sdist = (next(options.out.glob(f"modelyard-{__version__}{end}")) for end in ("-*.whl", ".tar.gz"))
    for python in options.python or [sys.executable]:
        smoke_test(python, wheel)
    smoke_test((options.python or [sys.executable])[0], sdist)
    print("\n".join(publishing_commands(wheel, sdist, options.repository)))
    return 0


def check_version(changelog: str, version: str) -> None:
    """The changelog has a dated section for it."""
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")


def export(stage: Path) -> None:
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(stage, filter="data")


def prepare(stage: Path, repository: str) -> None:
    """Links and URLs for the package index. Without a repository, links lose their targets and keep their words."""
    readme, project = stage / "README.md", stage / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text("utf-8"), repository, __version__), "utf-8")
    if repository:
        urls = {"Homepage": repository, "Documentation": f"{repository}/blob/v{__version__}/docs/README.md"}
        urls["Changelog"] = f"{repository}/blob/v{__version__}/CHANGELOG.md"
        table = "\n".join(["[project.urls]", *(f"{name} = {json.dumps(url)}" for name, url in urls.items())])
        text = project.read_text("utf-8")
        project.write_text(text.replace("[project.scripts]", f"{table}\n\n[project.scripts]", 1), "utf-8")


def absolute_links(text: str, repository: str, version: str) -> str:
    if not repository:
        return _LINK.sub(r"\2", text)

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository.rstrip('/')}/{kind}/v{version}/{found[3]})"

    return _LINK.sub(absolute, text)


def smoke_test(python: str, package: Path) -> None:
    """Install it in an empty environment and home; ask a scripted model through the command that users run."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run([python, "-m", "venv", str(home / "venv")])
        program = home / "venv" / "bin" / "modelyard"
        run([str(home / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", str(package)])
        env = {**os.environ, "HOME": str(home), "MODELYARD_CACHE": str(home / "cache")}
        shown = run([str(program), "--version"], env=env).strip()
        if shown != __version__:
            raise SystemExit(f"{package.name} says that it is {shown}")
        (home / "demo.toml").write_text(_DEMO)
        run([str(program), "check", "--config", str(home / "demo.toml")], cwd=home, env=env)
        with served(program, home, env) as url:
            answer = post(
                f"{url}/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
            )
        if answer["choices"][0]["message"]["content"] != "It works.":
            raise SystemExit(f"{package.name} answers {answer}")
    version = run([python, "-c", "import platform; print(platform.python_version())"]).strip()
    print(f"{package.name} on Python {version}: installed, checked and answered in {time.monotonic() - began:.0f} s")


@contextmanager
def served(program: Path, home: Path, env: dict[str, str]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(program), "serve", "--port", str(port), "--config", str(home / "demo.toml")]
    with subprocess.Popen(command, cwd=home, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/health/live", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the installed server did not start") from None
            time.sleep(0.1)


def post(url: str, body: object) -> dict[str, list[dict[str, dict[str, str]]]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer: dict[str, list[dict[str, dict[str, str]]]] = json.load(reply)
        return answer


def publishing_commands(wheel: Path, sdist: Path, repository: str) -> Iterator[str]:
    yield "\nTo publish it:"
    if not repository:
        yield "  # first build again with REPOSITORY=URL: this README has no links to the documents"
    yield f"  git tag -a v{__version__} -m 'Modelyard {__version__}' && git push origin v{__version__}"
    yield f"  python -m pip install twine && python -m twine check {wheel} {sdist}"
    yield f"  python -m twine upload {wheel} {sdist}"


def run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
