"""Metrics of GRPO: the values of a step, and the rewards within each group of completions."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from effllm.instruments._number import members_of, number, record
from effllm.instruments._statistics import Statistics, moments_of
from effllm.instruments.tracker import MetricTracker

#: Maximum number of positions in a group, from the best reward, whose mean rewards are stored.
MAX_PLACES = 256


class GRPOMetricsTracker(MetricTracker):
    """A `MetricTracker` with the values of GRPO steps and the rewards of groups."""

    def __init__(self) -> None:
        super().__init__()
        self._rewards = Statistics(max_recent=1)
        self._group_std = Statistics(max_recent=1)
        self._by_place: list[Statistics] = []  # of the best reward of each group, then of the second, and so on
        # Groups with a finite reward, groups without one, groups of equal rewards; rewards that are not numbers.
        self._num_groups = self._num_empty = self._num_equal = self._num_missing = 0

    def update_grpo_step(
        self,
        step: int,
        policy_loss: Any = None,
        mean_reward: Any = None,
        reward_components: Mapping[str, Any] | None = None,
        kl_divergence: Any = None,
        **others: Any,
    ) -> None:
        """Add the values of a step; ``None`` is left out.

        Args:
            step: number of the step.
            policy_loss: loss of the policy.
            mean_reward: mean over all completions of the step.
            reward_components: mean of each reward function, kept as ``reward/NAME``.
            kl_divergence: divergence from the reference model.
            others: more metrics by name.
        """
        values = {"policy_loss": policy_loss, "mean_reward": mean_reward, "kl_divergence": kl_divergence, **others}
        if isinstance(reward_components, Mapping):
            values |= {f"reward/{name}": value for name, value in reward_components.items()}
        elif reward_components is not None:
            self._warn_once(f"reward_components is {type(reward_components).__name__}, not a dictionary", "components")
        self.update_batch({name: value for name, value in values.items() if value is not None}, step)

    def update_group_rewards(self, rewards: Iterable[Any]) -> None:
        """Add the rewards of one group: the completions of one prompt.

        ``None``, and rewards that are not finite numbers, are counted and left out; a group without a finite reward
        counts as empty.
        """
        group = []
        for given in members_of(rewards):
            reward = given if type(given) is float else number(given)
            if reward is None:
                self._num_missing += 1
                if given is not None:
                    self._warn_once(f"a reward of type {type(given).__name__} is not a number in CPU memory", "rewards")
                continue
            self._rewards.add(reward)
            if math.isfinite(reward):
                group.append(reward)
            record("group/reward", reward)
        if not group:
            self._num_empty += 1
            return
        self._num_groups += 1
        if len(group) > 1:
            self._num_equal += min(group) == max(group)
            self._group_std.add(deviation := moments_of(group).std)
            record("group/reward_std", deviation)
        for place, reward in enumerate(sorted(group, reverse=True)[:MAX_PLACES]):
            if place == len(self._by_place):
                self._by_place.append(Statistics(max_recent=1))
            self._by_place[place].add(reward)

    def get_reward_distribution(self) -> dict[str, Any]:
        """Return the distribution of rewards over all groups; NaN without rewards.

        ``rank_distribution`` has the mean reward of the best completion of each group as ``1``, of the second as ``2``,
        and so on.  ``equal_groups`` counts groups whose rewards are all equal: their advantages are 0, so these groups
        do not change the policy.
        """
        rewards = self._rewards.moments
        return {
            "reward_mean": rewards.mean,
            "reward_std": rewards.std,
            "group_std_mean": self._group_std.moments.mean,
            "groups": self._num_groups,
            "empty_groups": self._num_empty,
            "equal_groups": self._num_equal,
            "missing_rewards": self._num_missing,
            "not_finite": dict(rewards.not_finite),
            "rank_distribution": {str(n): of_place.moments.mean for n, of_place in enumerate(self._by_place, 1)},
        }


_tracker: GRPOMetricsTracker | None = None
_trainer: weakref.ref[Any] | None = None  # the trainer whose metrics are in the tracker


def grpo_tracker() -> GRPOMetricsTracker:
    """Return the tracker that the newest GRPO trainer of TRL in this process fills.

    The first process has the groups of the whole job.  In the other processes the tracker remains empty.
    """
    global _tracker
    _tracker = _tracker or GRPOMetricsTracker()
    return _tracker


def tracker_of(trainer: Any) -> GRPOMetricsTracker:
    """Return the tracker of a trainer; a trainer other than the last one gets a new one, also in `grpo_tracker`."""
    global _tracker, _trainer
    if _trainer is None or _trainer() is not trainer:
        _tracker = None if _trainer is not None else _tracker  # the first trainer gets a tracker that exists
        _trainer = weakref.ref(trainer)
    return grpo_tracker()
