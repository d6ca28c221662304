"""The player of beats."""

import asyncio

from modelyard.engines.fake.player import BURST, ROOM, Paced, Pause, Player, Put, Standstill


def player(*beats: Put | Paced | Pause | Standstill, delay: float = 0.0) -> Player[list[int]]:
    return Player(iter(beats), delay, lambda: None)


async def read(playing: Player[list[int]]) -> list[list[int]]:
    return [item async for batch in playing.box for item in batch]


async def test_everything_is_there_at_once_where_nothing_waits() -> None:
    playing = player(Put([[0]]), Paced([1, 2, 3], list))
    playing.play()
    assert await anext(playing.box) == [[0], [1, 2, 3]]
    assert playing.box.closed
    assert playing.spoken == 3


async def test_units_come_one_by_one_with_a_delay() -> None:
    playing = player(Paced([1, 2], list), Pause(0.001), Put([[9]]), delay=0.0001)
    playing.play()
    assert await read(playing) == [[1], [2], [9]]


async def test_long_speech_is_cut_into_bursts() -> None:
    playing = player(Paced(list(range(BURST + 1)), list))
    playing.play()
    assert [len(item) for item in await read(playing)] == [BURST, 1]


async def test_full_box_stops_the_player_until_the_reader_has_read() -> None:
    playing = player(*(Paced([i], list) for i in range(2 * ROOM)))
    playing.play()
    assert playing.spoken == ROOM
    assert len(await read(playing)) == 2 * ROOM


async def test_reader_does_not_wake_a_player_that_stands_still() -> None:
    playing = player(Put([[0]] * ROOM), Standstill(), Put([[1]]))
    playing.play()
    await anext(playing.box)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    playing.stop([[2]])
    assert await read(playing) == [[2]]


async def test_stop_cancels_what_was_to_come() -> None:
    playing = player(Pause(0), Put([[1]]))
    playing.play()
    playing.stop([[7]])
    await asyncio.sleep(0)
    assert await read(playing) == [[7]]
