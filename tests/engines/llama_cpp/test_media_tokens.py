"""Images in an array of token ids: equal pictures have equal ids, and no chunk is cut."""

from __future__ import annotations

import numpy as np
import pytest

from modelyard.engines.llama_cpp.media_tokens import count_positions, media_ids, text_ids, whole_chunks

TEXT = np.arange(5, dtype=np.int32)
PICTURE, SOUND = media_ids(b"picture", 16, 4), media_ids(b"sound", 8, 8)
PROMPT = np.concatenate([TEXT, PICTURE, SOUND, TEXT])


def test_the_same_content_has_the_same_ids_and_other_content_has_others() -> None:
    assert np.array_equal(PICTURE, media_ids(b"picture", 16, 4))
    assert not np.isin(PICTURE, media_ids(b"another", 16, 4)).any()
    assert PICTURE.max() < 0
    assert PICTURE.dtype == np.int32


@pytest.mark.parametrize(("count", "positions"), [(5, 5), (21, 9), (29, 17), (34, 22)])
def test_a_picture_may_have_fewer_positions_than_tokens(count: int, positions: int) -> None:
    assert count_positions(PROMPT[:count]) == positions


@pytest.mark.parametrize(
    ("count", "kept"), [(3, 3), (5, 5), (6, 5), (20, 5), (21, 21), (22, 21), (28, 21), (29, 29), (33, 33), (34, 34)]
)
def test_a_prefix_has_no_part_of_a_chunk(count: int, kept: int) -> None:
    assert whole_chunks(PROMPT, count) == kept


def test_text_is_what_remains_without_media() -> None:
    assert text_ids(PROMPT).tolist() == [*range(5), *range(5)]
    assert text_ids(TEXT) is TEXT
