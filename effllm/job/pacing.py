"""The periods of saved states, acknowledgements and reads of messages; they are longer with many ranks. No I/O.

In a world of up to a thousand ranks the state is saved, and reports are acknowledged, after every window.  Ten thousand
acknowledgements per second would take as much time as the reports.  Agents can store a thousand reports.
"""

from __future__ import annotations

LARGE_WORLD = 1000  # a world with more ranks is large
RANKS_PER_S = 1000.0  # acknowledged ranks per second in a large world
BUFFER_DIVISOR = 8  # an eighth of an agent's buffer may wait for an acknowledgement
ENDING_S = 1.0  # maximum wait for a state at the end; after its BYE an agent waits four seconds for its last Ack
LARGE_PAUSE_S = 0.002  # pause between two reads of the socket; a wake-up takes more time than a frame
QUIET_S, LARGE_QUIET_S = 1.0, 3.0  # see `quiet_s`; reports may be a second apart
LARGE_REPORT_EVERY_S = 0.5  # at most two frames a second from each agent of a large world


class Pace:
    """The times at which the state is saved; an agent can store ``agent_buffer_size`` reports."""

    def __init__(self, agent_buffer_size: int) -> None:
        self._max_unsaved_windows = max(agent_buffer_size // BUFFER_DIVISOR, 1)
        self._unsaved_windows = 0  # windows that closed since the last saved state
        self._saved_s = float("-inf")  # time of the last saved state
        self._ending_s: float | None = None  # first check after a rank left, in a large world

    def count_closed(self, windows: int) -> None:
        self._unsaved_windows += windows

    def note_saved(self, now_s: float) -> None:
        self._unsaved_windows, self._saved_s = 0, now_s

    def is_due(self, now_s: float, world_size: int, is_ending: bool) -> bool:
        """Whether the state must be saved now; sooner if ranks are leaving or windows are short."""
        if not self._unsaved_windows:
            return False
        every_s, since_s = save_every_s(world_size), self._saved_s
        if is_ending and every_s > ENDING_S:
            # The last reports arrive between BYEs, and would have to wait if the state were saved at once.
            self._ending_s = now_s if self._ending_s is None else self._ending_s
            every_s, since_s = ENDING_S, max(since_s, self._ending_s)
        return self._unsaved_windows >= self._max_unsaved_windows or now_s - since_s >= every_s


def is_large(world_size: int) -> bool:
    """Whether a world is too large for an acknowledgement of every rank after each window."""
    return world_size > LARGE_WORLD


def save_every_s(world_size: int) -> float:
    """Return the minimum time between two saved states; 0 means after every window."""
    return world_size / RANKS_PER_S if is_large(world_size) else 0.0


def late_every_s(world_size: int) -> float:
    """Return the seconds for which late reports are collected, because each turn recomputes sums of whole windows."""
    return save_every_s(world_size) / 2


def quiet_s(world_size: int) -> float:
    """Return the seconds without a message after which a rank's connection is tested at the end of the job."""
    return LARGE_QUIET_S if is_large(world_size) else QUIET_S


def report_every_s(world_size: int) -> float:
    """Return the requested pause of agents between two frames of reports; 0 means no request."""
    return LARGE_REPORT_EVERY_S if is_large(world_size) else 0.0


def pause_s(world_size: int) -> float:
    """Return the seconds for which the aggregator waits for more frames after it has read all frames."""
    return LARGE_PAUSE_S if is_large(world_size) else 0.0
