"""The release: links that work on a package index, a dated section of the changelog, and what is printed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from modelyard import __version__
from setup import release

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/me/modelyard"


def test_every_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_tag():
    text = release.absolute_links((ROOT / "README.md").read_text(), REPOSITORY, __version__)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(target.startswith(("https://", "http://", "#")) for target in targets)
    own = [target for target in targets if target.startswith(REPOSITORY)]
    assert own
    for target in own:
        kind, tag, path = target.removeprefix(f"{REPOSITORY}/").split("/", 2)
        assert (kind in ("blob", "raw"), tag) == (True, f"v{__version__}")
        assert (ROOT / path.partition("#")[0]).exists(), path


def test_without_a_repository_links_keep_their_words_only():
    assert (
        release.absolute_links("see [docs](docs/cli.md) and [x](https://x.y)", "", "1")
        == "see docs and [x](https://x.y)"
    )


def test_pictures_are_linked_as_files_not_as_pages():
    assert "/raw/v1/a.png" in release.absolute_links("![a](a.png)", REPOSITORY, "1")


def test_the_version_has_a_dated_section_of_the_changelog():
    release.check_version((ROOT / "CHANGELOG.md").read_text(), __version__)
    with pytest.raises(SystemExit, match="no section"):
        release.check_version("## Unreleased\n", __version__)


def test_the_staged_project_has_urls_and_stays_valid(tmp_path: Path):
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    release.prepare(tmp_path, REPOSITORY)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Homepage"] == REPOSITORY
    assert project["scripts"] == {"modelyard": "modelyard.cli:main"}
    assert (ROOT / "modelyard" / "py.typed").is_file()
    assert "Typing :: Typed" in project["classifiers"]


def test_the_commands_name_both_files_and_the_tag(tmp_path: Path):
    shown = "\n".join(release.publishing_commands(tmp_path / "a.whl", tmp_path / "a.tar.gz", REPOSITORY))
    assert f"git tag -a v{__version__}" in shown
    assert "twine upload" in shown
    assert "a.whl" in shown
