"""The usual difference between the two ranks of a group, from its changes over windows. No I/O.

Two values of one window have no scatter of their own.  Explanation of the rule: docs/stragglers.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from effllm.job.health.robust import MAD_SIGMA, median

#: A rank of two is an outlier if it takes longer than its peer by this share, while the usual difference is not known.
PAIR = 0.2
#: Number of windows from which on the usual difference is known.
KNOWN = 30
#: Changes over one window show noise, and changes over several windows show slow drifts of the load.
LAGS = (1, 5, 10)
#: A deviation from n changes is raised by this number over n, because few changes may be small by chance.
UNSURE = 3.0


class PairScatter:
    """The deviation of the difference between two healthy ranks.

    Args:
        windows: number of windows over which the difference is observed.
    """

    def __init__(self, windows: int) -> None:
        self._ranks: Sequence[int] = ()
        self._shares: deque[float] = deque(maxlen=windows)

    def add(self, ranks: Sequence[int], share: float, z: float) -> float:
        """Add the difference of a window; return the deviation of a healthy difference, as a share.

        Args:
            ranks: the two ranks.
            share: second value minus first value, as a share of the base.
            z: a rank is an outlier at this many deviations.
        """
        if ranks != self._ranks:
            self._ranks = ranks
            self._shares.clear()
        self._shares.append(share)
        known = list(self._shares)
        if len(known) < KNOWN:
            return max(_deviation(known, LAGS[0]), PAIR / z)
        deviation = max(_deviation(known, lag) for lag in LAGS)
        # Noise makes each of two ranks the slower one in half of the windows: so often in a row is no noise.
        sides = known[-KNOWN:]
        is_one_sided = min(sides) >= PAIR or max(sides) <= -PAIR
        return min(deviation, PAIR / z) if is_one_sided else deviation


def _deviation(shares: Sequence[float], lag: int) -> float:
    """Return the robust deviation of one share from its changes, each of which has the errors of two windows."""
    changes = sorted(abs(after - before) for before, after in zip(shares, shares[lag:], strict=False))
    if not changes:
        return 0.0
    return (1.0 + UNSURE / len(changes)) * MAD_SIGMA * median(changes) / math.sqrt(2)
