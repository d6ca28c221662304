"""Where a server of ours listens."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from modelyard.engines.managed.listening import Listening, listening, private


@pytest.mark.parametrize(
    ("at", "url"),
    [
        (Listening("/run/it.sock"), "http://localhost"),
        (Listening("127.0.0.1", 80), "http://127.0.0.1:80"),
        (Listening("::1", 80), "http://[::1]:80"),
    ],
)
def test_where_it_is_spoken_to(at: Listening, url: str) -> None:
    assert at.place("it", 1.0).base_url == url


def test_a_private_folder_is_nobody_elses_and_needs_no_key() -> None:
    with private("modelyard-test-") as name:
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
    folder = private("modelyard-test-")
    try:
        at = listening(folder, None, None)
        assert at.place("it", 1.0).socket == at.host == f"{folder.name}/server.sock"
        assert at.place("it", 1.0).headers == {}
        assert listening(folder, None, None, "mine").key == "mine"
    finally:
        folder.cleanup()


def test_an_address_has_a_port_and_a_key_of_its_own_each_time() -> None:
    one, two = (listening(None, None, None) for _ in range(2))
    assert one.host == "127.0.0.1"
    assert one.port
    assert one.key != two.key
    assert one.place("it", 1.0).headers == {"authorization": f"Bearer {one.key}"}
    assert listening(None, "::1", 8123, "mine") == Listening("::1", 8123, "mine")
