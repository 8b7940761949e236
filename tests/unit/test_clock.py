"""The offset between the unix clock and the monotonic clock."""

from types import SimpleNamespace

from effllm.records import clock


def test_pause_between_two_clocks_does_not_change_their_offset(monkeypatch):
    """The unix clock is 1,000 s ahead; in the first two tries the process is stopped for 5 ms after a read."""
    now_ns, pauses_ns = [0], iter([5_000_000, 0, 0, 0, 5_000_000, 0])

    def read(offset_ns):
        at_ns = now_ns[0]
        now_ns[0] += 100 + next(pauses_ns, 0)
        return at_ns + offset_ns

    clocks = SimpleNamespace(monotonic_ns=lambda: read(0), time_ns=lambda: read(10**12))
    monkeypatch.setattr(clock, "time", clocks)

    assert clock.unix_minus_monotonic_ns() == 10**12
