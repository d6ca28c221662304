from __future__ import annotations

from collections.abc import Sequence

from modelyard.core.engine import CacheInfo, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard.engines.ct2.batch import Ct2Job, next_batch
from modelyard.engines.ct2.options import Ct2Options


class NoLoop:
    """Jobs are only looked at."""


def jobs(*lengths: int, sampling: Sequence[Sampling] = ()) -> list[Ct2Job]:
    made = []
    for index, length in enumerate(lengths):
        how = sampling[index] if sampling else Sampling()
        job = Ct2Job(
            Prompt(parts=(TokenRun([1] * length),), sampling=how, max_tokens=5 + index), NoLoop(), lambda: None
        )
        job.fit(CacheInfo(4096), Ct2Options(path="x"))
        made.append(job)
    return made


def lengths(batch: list[Ct2Job]) -> list[int]:
    return [job.prompt_tokens for job in batch]


def test_jobs_of_nearly_the_same_length_share_a_batch_longest_first():
    assert lengths(next_batch(jobs(100, 104, 98), slack=16)) == [104, 100, 98]


def test_equally_long_ones_stay_in_their_order():
    waiting = jobs(50, 50, 50)
    assert next_batch(waiting, slack=16) == waiting


def test_the_oldest_leads_and_others_wait():
    assert lengths(next_batch(jobs(100, 500, 110), slack=16)) == [110, 100]


def test_a_batch_is_nowhere_wider_than_its_slack():
    assert lengths(next_batch(jobs(100, 110, 95), slack=10)) == [110, 100]


def test_without_slack_only_the_same_length_goes_along():
    assert lengths(next_batch(jobs(7, 8, 7), slack=0)) == [7, 7]


def test_other_sampling_is_another_batch():
    how = [Sampling(temperature=0.5), Sampling(temperature=0.6), Sampling(temperature=0.5)]
    waiting = jobs(10, 10, 10, sampling=how)
    assert next_batch(waiting, slack=16) == [waiting[0], waiting[2]]


def test_how_much_each_may_say_parts_nobody_but_beams():
    assert len(next_batch(jobs(10, 10), slack=16)) == 2
    assert len(next_batch(jobs(10, 10, sampling=[Sampling(beam_size=2)] * 2), slack=16)) == 1
