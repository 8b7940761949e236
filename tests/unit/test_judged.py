"""Jobs of the second generator (benchmarks/judged): planted causes are found, and healthy jobs are not accused."""

from cases import cases, repeats

from benchmarks.judged.healthy import HEALTHY
from benchmarks.judged.judging import MAX_EXCESS, is_accused, is_wrong, over, virtual

#: Kinds of which every job of the seeds 22 to 31 was right.
KINDS = (
    "loader_turn", "between_rank_0", "saves_of_rank_0", "pauses_all", "compilations", "warmup", "slow_rank",
    "slow_rank_forward", "slow_several", "slow_in_window", "wandering", "uneven", "comm_profiled", "idle_duty",
    "throttled_one", "limited_one", "cool_clocks", "checkpoint_rank_0", "restarts", "failed", "generation",
)  # fmt: skip


@cases("kind", KINDS[: repeats(6, 100)])
def test_planted_cause_is_found_and_its_gain_is_within_the_bound(kind):
    for seed in range(22, 22 + repeats(1, 5)):
        found = virtual(kind, seed)

        assert not is_wrong(found), found
        assert over(found) <= MAX_EXCESS, found


def test_healthy_jobs_are_not_accused():
    found = [virtual(HEALTHY, seed) for seed in range(22, 22 + repeats(6, 60))]

    assert [one for one in found if is_accused(one)] == []
