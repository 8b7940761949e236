"""The time that the readings of a device may take in its driver.

Calls may hold a lock that the training needs, so slow devices are read less often: values between two readings are
interpolated, and the error of an energy says so.
"""

from __future__ import annotations

import time

#: The time in calls of the driver, as shares of a core: of full readings, of readings at window edges, and of power
#: readings of GPUs without an energy counter.
FULL_SHARE, EDGE_SHARE, POWER_SHARE = 0.001, 0.0005, 0.0005
#: Maximum CPU time of the additional reads at window edges, including the thread's wake-ups, as a share of a core.
MAX_EDGE_SHARE = 0.005
WAKE_S = 160e-6  # CPU time of a wake-up (110 us, measured at 10 Hz) and of Python in a reading
#: Time of a reading that is not counted: of a GPU, what may be Python's and not the driver's; of another device, which
#: holds no lock that the training needs, more.
OWN_S, OTHER_S = 100e-6, 0.020
#: Unused time for readings at edges that is kept, in seconds: several edges may follow each other.
KEPT_CREDIT_S = 20.0
MAX_INTERVAL_S = 30.0
#: Weights of a new full reading in the average duration: the first if it is slower than the average, the second if it
#: is faster, because slow devices are read rarely.  A call that takes longer than the third value counts as it does.
CALL_RISE, CALL_FALL, MAX_COUNTED_S = 0.05, 0.2, 0.1


class DriverTime:
    """Average durations of the readings of one device, and the number of readings that the budget allows."""

    def __init__(self) -> None:
        self.full_s = self.energy_s = 0.0  # average durations of full readings, and of energy alone
        self._num_full = self._num_energy = 0
        self._credit_s, self._credited_s = KEPT_CREDIT_S * EDGE_SHARE, time.monotonic()  # for readings at edges

    def add(self, took_s: float, *, is_gpu: bool, energy_only: bool) -> None:
        """Add a reading of ``took_s`` seconds.

        The average duration is used, because other processes on the core delay about one reading in a hundred.
        """
        took_s = max(took_s - (OWN_S if is_gpu else OTHER_S), 0.0)
        took_s = min(took_s, MAX_COUNTED_S)  # after one hanging call, sampling must not be slow for an hour
        if energy_only:
            self._num_energy += 1
            self.energy_s += (took_s - self.energy_s) * max(CALL_RISE, 1 / self._num_energy)
            return
        self._num_full += 1
        if self._num_full > 1:  # the first reading of a driver may take long
            weight = CALL_RISE if took_s > self.full_s else CALL_FALL
            self.full_s += (took_s - self.full_s) * max(weight, 1 / (self._num_full - 1))

    def affordable(self, wanted: int, within_s: float, *, is_limited: bool) -> int:
        """Return the number of readings at an edge, at most ``wanted``, for which the budget has time.

        Args:
            wanted: the number of requested readings.
            within_s: seconds since the previous edge.
            is_limited: whether the time in the driver is limited; the CPU time is limited to one reading or more.
        """
        count = min(wanted, max(int(MAX_EDGE_SHARE * within_s / (self.energy_s + WAKE_S)), 1))
        if not is_limited:
            return count
        now_s = time.monotonic()
        earned_s = EDGE_SHARE * (now_s - self._credited_s)
        kept_s = max(KEPT_CREDIT_S * EDGE_SHARE, self.energy_s)  # a slow device is read, too
        self._credit_s, self._credited_s = min(self._credit_s + earned_s, kept_s), now_s
        paid = min(wanted, int(self._credit_s / self.energy_s)) if self.energy_s else wanted
        self._credit_s -= paid * self.energy_s
        return min(count, paid)

    @property
    def full_apart_s(self) -> float:
        """Mean seconds between the full readings that the budget allows; 0 if calls take no time."""
        return min(self.full_s / FULL_SHARE, MAX_INTERVAL_S)

    @property
    def edge_apart_s(self) -> float:
        """Mean seconds between the readings at edges that the budget allows; 0 if calls take no time."""
        return min(self.energy_s / EDGE_SHARE, MAX_INTERVAL_S)

    @property
    def power_apart_s(self) -> float:
        """Seconds between the power readings of a GPU without an energy counter that the budget allows."""
        return self.energy_s / POWER_SHARE
