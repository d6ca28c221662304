"""Choosing a sequence, copying KV and keeping checkpoints: decision tables and invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.llama_cpp.sequences import (
    MIN_DISTANCE,
    Checkpoint,
    CheckpointLimits,
    Checkpoints,
    CopyCosts,
    CopyMethod,
    MovedBlock,
    SequenceChoice,
    SequenceSlot,
    TokenIds,
    add_checkpoint,
    checkpoint_positions,
    checkpoints_within,
    choose_copy_method,
    choose_sequence,
    common_prefix,
    is_checkpoint_useful,
    is_intact,
    latest_checkpoint,
    moved_blocks,
    neighbouring_id,
    prefix_order,
    reusable_tokens,
)


def run(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def slot(index: int, *tokens: int, **fields: Any) -> SequenceSlot:
    return SequenceSlot(index, run(*tokens), **fields)


def test_a_sequence_of_another_scope_shares_nothing_and_is_evicted_like_any_other() -> None:
    other, own = slot(0, 1, 2, 3, scope="ann", use_order=2), slot(1, 1, 2, scope="bob", use_order=1)
    assert choose_sequence([other, own], run(1, 2, 3, 4), None, scope="bob") == SequenceChoice(1, 2)
    assert choose_sequence([other], run(1, 2, 3, 4), None, scope="bob") == SequenceChoice(0, 0, lost=3)
    named = slot(0, 1, 2, 3, scope="ann", session="s")
    assert choose_sequence([named], run(1, 2, 3, 4), "s", scope="bob") == SequenceChoice(0, 0, lost=3)
    assert reusable_tokens(other, run(1, 2, 3, 4), (), "bob", can_rewind=True) == 0
    assert reusable_tokens(other, run(1, 2, 3, 4), (), "ann", can_rewind=True) == 3


OLD_MAIN = slot(0, 9, 9, 9, use_order=1)
NEW_MAIN = slot(1, 8, 8, 8, use_order=3)
BACKGROUND = slot(2, 7, 7, 7, use_order=2, priority="background")
EMPTY = slot(3)
SYSTEM = tuple(range(100, 140))


@pytest.mark.parametrize(
    ("slots", "prompt", "session", "expected"),
    [
        pytest.param([slot(0), slot(1)], run(1, 2), None, SequenceChoice(0, 0), id="the lowest empty one"),
        pytest.param([slot(0, busy=True), slot(1)], run(1), None, SequenceChoice(1, 0), id="never a busy one"),
        pytest.param(
            [slot(0, 1, 2, 3), slot(1, 1, 9, session="a")],
            run(1, 2, 3),
            "a",
            SequenceChoice(0, 3),
            id="the longest prefix, not the session's own",
        ),
        pytest.param(
            [slot(0, 8, 8, session="a"), slot(1)],
            run(1, 2, 3),
            "a",
            SequenceChoice(1, 0),
            id="an empty one, not the session's own that shares nothing",
        ),
        pytest.param(
            [slot(0, 1, 2, use_order=2), slot(1, 1, 2, session="a", use_order=1)],
            run(1, 2, 3),
            "a",
            SequenceChoice(1, 2),
            id="the session's own of equals",
        ),
        pytest.param(
            [slot(0), slot(1, 1, 2, 3)], run(1, 2, 3, 4), None, SequenceChoice(1, 3), id="the one it continues"
        ),
        pytest.param(
            [slot(0, 1, 2), slot(1, 1, 2, 3)],
            run(1, 2, 3, 4),
            None,
            SequenceChoice(1, 3),
            id="the longer of two prefixes",
        ),
        pytest.param(
            [slot(0, 1, 2, use_order=1), slot(1, 1, 2, use_order=2)],
            run(1, 2, 3),
            None,
            SequenceChoice(1, 2),
            id="the later of equals",
        ),
        pytest.param(
            [slot(0, 1, 5, 5, 5, 5, 5, 5), slot(1)],
            run(1, 2),
            None,
            SequenceChoice(1, 0),
            id="a short prefix is read again, a long tail stays",
        ),
        pytest.param(
            [slot(0, 1, 2, 3, 4, session="a"), slot(1)],
            run(1, 2, 3, 9),
            "b",
            SequenceChoice(0, 3, lost=1),
            id="a short tail is lost, a long prefix stays",
        ),
        pytest.param(
            [slot(0, *SYSTEM, 5, 6, 7, prompt_length=40), slot(1)],
            run(*SYSTEM, 8, 9),
            None,
            SequenceChoice(0, 40),
            id="an answer that comes back differently",
        ),
        pytest.param(
            [slot(0, *SYSTEM, *SYSTEM, prompt_length=40), slot(1)],
            run(*SYSTEM),
            None,
            SequenceChoice(0, 40),
            id="the same prompt once more",
        ),
        pytest.param(
            [slot(0, *SYSTEM, 5, 6, 7, prompt_length=40, busy=True), slot(1)],
            run(*SYSTEM),
            None,
            SequenceChoice(1, 0),
            id="the same prompt while it runs",
        ),
        pytest.param([OLD_MAIN, NEW_MAIN, BACKGROUND, EMPTY], run(1), None, SequenceChoice(3, 0), id="an empty one"),
        pytest.param(
            [OLD_MAIN, NEW_MAIN, BACKGROUND],
            run(1),
            None,
            SequenceChoice(2, 0, lost=3),
            id="background is lost first",
        ),
        pytest.param(
            [OLD_MAIN, NEW_MAIN], run(1), None, SequenceChoice(0, 0, lost=3), id="then the least recently used"
        ),
        pytest.param(
            [slot(0, *SYSTEM, use_order=1), slot(1, 8, use_order=2)],
            run(1),
            None,
            SequenceChoice(1, 0, lost=1),
            id="a cheap one before an old one",
        ),
        pytest.param(
            [slot(0, 9, 9, use_order=1), slot(1, 8, 8, use_order=2), slot(2, 8, 8, 8, busy=True, use_order=3)],
            run(1),
            None,
            SequenceChoice(1, 0),
            id="a superseded state before all",
        ),
        pytest.param(
            [slot(0, 1, 2, 3, adapters=(("x", 1.0),))],
            run(1, 2, 3, 4),
            None,
            SequenceChoice(0, 0, lost=3),
            id="no KV of other adapters",
        ),
    ],
)
def test_the_right_sequence_is_chosen(
    slots: list[SequenceSlot], prompt: TokenIds, session: str | None, expected: SequenceChoice
) -> None:
    assert choose_sequence(slots, prompt, session) == expected


def test_a_copy_of_the_prefix_spares_the_tail_of_another() -> None:
    """The pattern of agents without sessions: one system prompt, and each its own conversation behind it."""
    other, prompt = slot(0, *SYSTEM, 5, 6, 7, 8, prompt_length=44), run(*SYSTEM, 9)
    assert choose_sequence([other, slot(1)], prompt, None, longest=40, copy_cost=0.5) == SequenceChoice(1, 0)
    assert choose_sequence([other, slot(1)], prompt, None, longest=40, copy_cost=2) == SequenceChoice(0, 40, lost=4)


def test_what_is_parked_is_not_lost() -> None:
    slots, parked = [OLD_MAIN, NEW_MAIN], [slot(9, *NEW_MAIN.tokens)]
    assert choose_sequence(slots, run(1), None, parked=parked) == SequenceChoice(1, 0)
    assert choose_sequence(slots, run(1), None, parked=[slot(9, 8, 8, 8, scope="eve")]) == SequenceChoice(0, 0, lost=3)


def test_moved_kv_is_used_by_its_own_session_only() -> None:
    moved = slot(0, 1, 2, 3, 4, session="a", exact=2)
    shared = [reusable_tokens(moved, run(1, 2, 3, 4), (), "", who, can_rewind=True) for who in ("a", "b", None)]
    assert shared == [4, 2, 2]


@pytest.mark.parametrize(
    ("own", "idle", "running", "expected"),
    [
        pytest.param(9, [2, 5, 9], {3, 4}, 2, id="the edge of those that run"),
        pytest.param(9, [2, 5, 9], {3, 4, 6}, 5, id="a gap before an edge"),
        pytest.param(5, [2, 5, 9], {3, 4}, 5, id="its own, if no other is better"),
        pytest.param(9, [2, 5, 9], set(), 9, id="its own, if none runs"),
    ],
)
def test_a_job_runs_beside_the_others(own: int, idle: list[int], running: set[int], expected: int) -> None:
    assert neighbouring_id(own, idle, running) == expected


@given(st.lists(st.integers(0, 63), max_size=200), st.integers(1, 8))
def test_jobs_stay_neighbours_in_any_order_of_arrival_and_departure(events: list[int], most: int) -> None:
    """One that leaves is replaced, as under load, wherever the new one's KV is."""
    running: set[int] = set()
    for event in events:
        if len(running) == most:
            running.remove(sorted(running)[event % most])
        idle = [index for index in range(64) if index not in running]
        running.add(neighbouring_id(idle[event % len(idle)], idle, running))
        assert max(running) - min(running) < most


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_the_tree_knows_the_longest_prefix_that_any_other_leaf_holds(rows: list[list[int]]) -> None:
    leaves = [slot(index, *row, scope="ab"[index % 2]) for index, row in enumerate(rows)]
    order = prefix_order(leaves)
    after = [shared for _, shared in [*order, (None, 0)][1:]]
    for (each, shared), following in zip(order, after, strict=True):
        others = (other for other in leaves if other is not each and other.scope == each.scope)
        assert max(shared, following) == max((common_prefix(each.tokens, o.tokens) for o in others), default=0)


# --- copies -----------------------------------------------------------------------------------------------------------


def at(*places: int) -> tuple[Checkpoint, ...]:
    return tuple(Checkpoint(place, np.zeros(1, np.uint8)) for place in places)


@pytest.mark.parametrize(
    ("held", "can_cut", "expected"),
    [
        pytest.param(slot(0, 1, 2, 3, 9), True, 3, id="up to the divergence"),
        pytest.param(slot(0, 1, 2, adapters=(("x", 1.0),)), True, 0, id="another adapter"),
        pytest.param(slot(0, 1, 2), False, 2, id="all of it without a cut"),
        pytest.param(slot(0, 1, 2, 3, 9), False, 0, id="no checkpoint"),
        pytest.param(
            slot(0, 1, 2, 3, 9, checkpoints=at(1, 2, 4)), False, 2, id="last checkpoint before the divergence"
        ),
        pytest.param(slot(0, 1, 2, 3, 9, checkpoints=at(4)), False, 0, id="checkpoint after the divergence"),
        pytest.param(slot(0, 7, 2, 3, checkpoints=at(1)), False, 0, id="nothing in common"),
    ],
)
def test_reusable_tokens_end_where_the_kv_can_be_cut(held: SequenceSlot, can_cut: bool, expected: int) -> None:
    assert reusable_tokens(held, run(1, 2, 3, 4), (), can_rewind=can_cut) == expected


CPU = CopyCosts(token=1e-3, byte=5e-10)
SLOW = CopyCosts(token=4e-3, byte=5e-10, decodes=3)
GPU = CopyCosts(token=7e-6, byte=2e-10)
KIB = 1 << 10


@pytest.mark.parametrize(
    ("saved", "held", "window", "token_bytes", "costs", "ways", "expected"),
    [
        pytest.param(255, 255, 4096, 23 * KIB, CPU, ["stream", "state"], None, id="too few tokens"),
        pytest.param(256, 256, 4096, 23 * KIB, CPU, ["stream", "state"], "state", id="a short sequence"),
        pytest.param(2000, 2000, 2048, 23 * KIB, CPU, ["stream", "state"], "stream", id="a nearly full sequence"),
        pytest.param(2000, 2000, 2048, 23 * KIB, CPU, ["state"], "state", id="from another context"),
        pytest.param(2000, 2000, 2048, 23 * KIB, CPU, [], None, id="from another layout"),
        pytest.param(300, 300, 131072, 128 * KIB, CPU, ["stream"], None, id="a huge stream for a few tokens"),
        pytest.param(300, 8000, 8192, 512 * KIB, CPU, ["state"], None, id="a long conversation for a few tokens"),
        pytest.param(300, 8000, 8192, 16 * KIB, CPU, ["state"], "state", id="the same in a small model"),
        pytest.param(4000, 4000, 8192, 128 * KIB, GPU, ["state"], None, id="evaluating is faster than copying"),
        pytest.param(
            4000, 4000, 8192, 2 * KIB, GPU, ["stream", "state"], "state", id="copying is faster than evaluating"
        ),
    ],
)
def test_kv_is_copied_if_that_is_cheaper_than_evaluating(
    saved: int,
    held: int,
    window: int,
    token_bytes: int,
    costs: CopyCosts,
    ways: list[CopyMethod],
    expected: CopyMethod | None,
) -> None:
    assert choose_copy_method(saved, held * token_bytes, held, window, costs, ways) == expected


@pytest.mark.parametrize(
    ("oldest", "newest", "keep", "n_swa", "only_forward", "expected"),
    [
        pytest.param(0, 9, 10, 0, False, True, id="all there"),
        pytest.param(-1, -1, 10, 0, False, False, id="nothing there"),
        pytest.param(0, 8, 10, 0, False, False, id="the end is missing"),
        pytest.param(1, 9, 10, 0, False, False, id="the start is missing"),
        pytest.param(6, 9, 10, 4, False, True, id="the window is there"),
        pytest.param(7, 9, 10, 4, False, False, id="the window has moved on"),
        pytest.param(0, 2, 3, 4, False, True, id="shorter than the window"),
        pytest.param(9, 9, 10, 0, True, True, id="a recurrent state at the end"),
        pytest.param(11, 11, 10, 0, True, False, id="a recurrent state beyond the cut"),
        pytest.param(9, 9, 10, 4, True, False, id="a hybrid without its window"),
    ],
)
def test_a_cut_sequence_is_used_only_if_it_is_intact(
    oldest: int, newest: int, keep: int, n_swa: int, only_forward: bool, expected: bool
) -> None:
    assert is_intact(oldest, newest, keep, n_swa=n_swa, only_forward=only_forward) is expected


RUNS = st.lists(st.integers(0, 2), max_size=8).map(lambda tokens: run(*tokens))
ADAPTERS = st.sampled_from([(), (("x", 1.0),), (("x", 0.5),)])
SLOTS = st.lists(
    st.builds(
        dict,
        tokens=RUNS,
        prompt_length=st.integers(0, 8),
        session=st.sampled_from([None, "a", "b"]),
        adapters=ADAPTERS,
        priority=st.sampled_from(["main", "background"]),
        use_order=st.integers(0, 9),
        busy=st.booleans(),
    ),
    min_size=1,
    max_size=5,
).map(lambda rows: [SequenceSlot(index, **row) for index, row in enumerate(rows)])


@given(SLOTS, RUNS, st.sampled_from([None, "a"]), ADAPTERS)
def test_chosen_sequence_is_idle_and_keeps_only_its_own_verified_prefix(
    slots: list[SequenceSlot], prompt: TokenIds, session: str | None, adapters: Any
) -> None:
    slots[0].busy = False
    choice = choose_sequence(slots, prompt, session, adapters)
    chosen = slots[choice.index]
    assert not chosen.busy
    assert list(chosen.tokens[: choice.keep]) == list(prompt[: choice.keep])
    assert choice.keep == 0 or chosen.adapters == adapters
    for other in slots:
        shared = reusable_tokens(other, prompt, adapters, can_rewind=True)
        assert list(other.tokens[:shared]) == list(prompt[:shared])
        assert shared == 0 or other.adapters == adapters


@given(SLOTS, RUNS, st.sampled_from([None, "a"]), ADAPTERS)
def test_nothing_worth_a_copy_is_lost_while_there_is_an_empty_sequence(
    slots: list[SequenceSlot], prompt: TokenIds, session: str | None, adapters: Any
) -> None:
    slots[0].busy = False
    choice = choose_sequence(slots, prompt, session, adapters, copy_cost=0)
    chosen, idle = slots[choice.index], [slot for slot in slots if not slot.busy]
    assert choice.lost <= len(chosen.tokens) - choice.keep
    if not all(len(slot.tokens) for slot in idle):
        assert choice.lost == 0


@given(RUNS, RUNS)
def test_common_prefix_is_the_longest(a: TokenIds, b: TokenIds) -> None:
    n = common_prefix(a, b)
    assert list(a[:n]) == list(b[:n])
    assert n == min(len(a), len(b)) or a[n] != b[n]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoints_at(*tokens: int, size: int = 10) -> Checkpoints:
    return tuple(Checkpoint(one, np.zeros(size, np.uint8)) for one in tokens)


def tokens(held: Checkpoints) -> list[int]:
    return [one.tokens for one in held]


@pytest.mark.parametrize(
    ("held", "keep", "expected"), [((), 9, None), ((5,), 4, None), ((5,), 5, 5), ((5, 9, 12), 11, 9), ((5, 9), 99, 9)]
)
def test_the_latest_checkpoint_before_the_cut_is_found(held: tuple[int, ...], keep: int, expected: int | None) -> None:
    found = latest_checkpoint(checkpoints_at(*held), keep)
    assert (found.tokens if found else None) == expected


def test_a_cut_keeps_only_earlier_checkpoints() -> None:
    assert tokens(checkpoints_within(checkpoints_at(5, 9, 12), 9)) == [5, 9]


@pytest.mark.parametrize(
    ("held", "new", "expected"),
    [
        pytest.param((), 100, [100], id="the first"),
        pytest.param((100, 200), 300, [100, 200, 300], id="room for it"),
        pytest.param((100, 150, 300), 400, [100, 300, 400], id="the smallest gap is dropped"),
        pytest.param((30, 200, 400), 500, [200, 400, 500], id="the first is near the start"),
        pytest.param((100, 300, 500), 510, [300, 500, 510], id="never the new one"),
        pytest.param((100, 300, 500), 300, [100, 300], id="later ones are invalid"),
    ],
)
def test_the_checkpoint_whose_loss_costs_the_fewest_tokens_is_dropped(
    held: tuple[int, ...], new: int, expected: list[int]
) -> None:
    assert tokens(add_checkpoint(checkpoints_at(*held), checkpoints_at(new)[0], CheckpointLimits(3, 1000))) == expected


def test_the_bytes_of_checkpoints_are_limited() -> None:
    assert tokens(add_checkpoint(checkpoints_at(100, 150, 300), checkpoints_at(400)[0], CheckpointLimits(9, 25))) == [
        300,
        400,
    ]
    assert tokens(add_checkpoint(checkpoints_at(100), checkpoints_at(200, size=26)[0], CheckpointLimits(9, 25))) == [
        100
    ]


@given(st.lists(st.integers(1, 500), unique=True, max_size=12), st.integers(0, 4), st.integers(0, 60))
def test_checkpoints_are_ordered_and_within_their_limits(made: list[int], count: int, size: int) -> None:
    held: Checkpoints = ()
    for one in made:
        held = add_checkpoint(held, checkpoints_at(one)[0], CheckpointLimits(count, size))
        assert tokens(held) == sorted(set(tokens(held)))
        assert len(held) <= count
        assert sum(each.size for each in held) <= size


def test_a_checkpoint_near_another_is_not_useful() -> None:
    assert is_checkpoint_useful((), MIN_DISTANCE)
    assert not is_checkpoint_useful((), MIN_DISTANCE - 1)
    assert not is_checkpoint_useful(checkpoints_at(100), 100 + MIN_DISTANCE - 1)
    assert is_checkpoint_useful(checkpoints_at(100), 100 + MIN_DISTANCE)


@pytest.mark.parametrize(
    ("length", "start", "partings", "held", "expected"),
    [
        pytest.param(300, 0, [], (), [292], id="shortly before the end"),
        pytest.param(300, 0, [100, 0, 300], (), [100, 292], id="at divergences"),
        pytest.param(300, 280, [100], (), [], id="nothing in the cached part"),
        pytest.param(300, 0, [100, 110], (), [100, 292], id="not two near each other"),
        pytest.param(300, 150, [200], (180,), [292], id="not near an existing one"),
        pytest.param(20, 0, [10], (), [], id="a short prompt"),
    ],
)
def test_a_prompt_pauses_at_useful_checkpoints(
    length: int, start: int, partings: list[int], held: tuple[int, ...], expected: list[int]
) -> None:
    assert checkpoint_positions(length, start, partings, checkpoints_at(*held)) == expected


@pytest.mark.parametrize(
    ("length", "start", "inner", "expected"),
    [
        pytest.param(900, 0, 4, [180, 360, 540, 720, 892], id="spread over the prompt"),
        pytest.param(900, 600, 4, [728, 856, 892], id="over what is read"),
        pytest.param(200, 0, 4, [128, 192], id="not closer than 128"),
        pytest.param(9000, 0, 4, [2048, 4096, 6144, 8192, 8992], id="whole micro-batches"),
        pytest.param(900, 0, 0, [892], id="none wanted"),
    ],
)
def test_a_long_prompt_has_checkpoints_inside(length: int, start: int, inner: int, expected: list[int]) -> None:
    assert checkpoint_positions(length, start, [], (), inner) == expected


# --- moved blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "prompt", "least", "expected"),
    [
        pytest.param("abcdefgh", "abefgh", 3, [MovedBlock(4, 2, 4)], id="text was removed"),
        pytest.param("abcdefghijkl", "abefijkl", 2, [MovedBlock(4, 2, 2), MovedBlock(8, 4, 4)], id="twice"),
        pytest.param("abcdefgh", "abefghxy", 3, [MovedBlock(4, 2, 4)], id="and new text follows"),
        pytest.param("abcdefgh", "abefgh", 5, [], id="too short"),
        pytest.param("abcdefgh", "abefgh", 0, [], id="off"),
        pytest.param("abcdefgh", "abxcdefgh", 3, [], id="text was inserted: nothing can be read before what is held"),
        pytest.param("abcdefgh", "efgh", 3, [], id="no prefix"),
        pytest.param("abxecdefgh", "abefgh", 3, [MovedBlock(6, 2, 4)], id="the first token occurs before"),
    ],
)
def test_text_behind_what_was_removed_moves(held: str, prompt: str, least: int, expected: list[MovedBlock]) -> None:
    a, b = (run(*text.encode()) for text in (held, prompt))
    assert moved_blocks(a, b, common_prefix(a, b), least) == expected


def test_an_image_never_moves() -> None:
    held, prompt = run(1, 2, -7, -7, 3, 4, 5), run(1, 3, 4, 5)
    assert moved_blocks(held, prompt, 1, 2) == []
    assert moved_blocks(run(1, 2, 3, 4, 5), run(1, 3, 4, -9), 1, 2) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4))
def test_moved_blocks_spell_the_prompt_and_move_only_forward(a: list[int], b: list[int], least: int) -> None:
    held, prompt = run(*a), run(*b)
    source = target = start = common_prefix(held, prompt)
    for block in moved_blocks(held, prompt, start, least):
        assert (block.count >= least, block.target) == (True, target)
        assert block.source >= max(source, block.target)
        assert (held[block.source :][: block.count] == prompt[block.target :][: block.count]).all()
        source, target = block.source + block.count, block.target + block.count


def test_the_sequence_with_most_of_the_text_is_chosen_if_blocks_may_move() -> None:
    prompt = run(*b"ab", *b"efghijkl")
    held = slot(0, *b"abcdefghijkl", use_order=1)
    assert choose_sequence([held, slot(1)], prompt, None, cache_reuse=4) == SequenceChoice(0, 10, lost=2)
    assert choose_sequence([held, slot(1)], prompt, None).index == 1
    assert choose_sequence([held, slot(1)], prompt, None, scope="other", cache_reuse=4).index == 1
