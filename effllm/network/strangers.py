"""Who was refused at the door: counted each time, told once for each address and reason; pure.

That a handshake failed and who hung up are told apart by those who see it, and put together here: an address that no
agent comes from belongs to the oldest failure that has none.
"""

from __future__ import annotations

from collections import deque

OTHER_JOB = "another job's key"
OTHER_SECRET = "another secret"  # noqa: S105 - a reason
NO_KEY = "no key"
NO_PROTOCOL = "it does not speak as agents do"

MOST_ADDRESSES = 1000
MOST_EXPECTED = 2**20
MOST_WAITING = 20_000  # of a second
NAMELESS_AFTER_S = 5.0  # a peer that is busy confirms late
NAMED_WITHIN_S = 0.5  # the kernel tells of the end of a connection once its peer has confirmed it


class Strangers:
    """Connections that failed, addresses that hung up, and what is told of them."""

    def __init__(self) -> None:
        self._counted = 0
        self._repeated = 0  # of them, without a line, since that was last asked
        self._told: set[tuple[str, str]] = set()
        self._expected: set[str] = set()
        self._lines: list[str] = []
        self._accounted = 0  # connections that may end without being a stranger's
        self._failed: deque[tuple[float, str]] = deque()  # when, and why
        self._strange: deque[tuple[float, str]] = deque()  # when hung up who was never seen at the gate
        self._late: deque[tuple[float, str]] = deque()  # failures whose address has not come yet
        self._usual: deque[tuple[float, str]] = deque(maxlen=MOST_WAITING)  # ... and who was

    @property
    def count(self) -> int:
        """How many were refused."""
        return self._counted + len(self._failed) + len(self._late)

    # --- what is seen

    def admit(self, address: str) -> None:
        """Note who was let in at the gate."""
        if len(self._expected) < MOST_EXPECTED:
            self._expected.add(address)

    def refuse(self, address: str, why: str) -> None:
        """Note who was refused at the gate."""
        self.admit(address)  # its hanging up is no news
        self._count(address, why)

    def account(self) -> None:
        """Note a handshake that the gate decided: how its connection ends is no news."""
        self._accounted += 1

    def fail(self, why: str, now_s: float) -> None:
        """Note a connection that ended in its handshake, before the gate."""
        self._failed.append((now_s, why))
        if len(self._failed) > MOST_WAITING:
            self._count("", self._failed.popleft()[1])

    def end(self, now_s: float) -> None:
        """Note a connection that ended otherwise."""
        if self._accounted:
            self._accounted -= 1
        else:
            self.fail(NO_PROTOCOL, now_s)  # more have ended than were decided on: one of them was a stranger's

    def hang_up(self, address: str, now_s: float) -> None:
        """Note the address of a connection that has ended."""
        (self._usual if address in self._expected else self._strange).append((now_s, address))

    # --- what is told

    def take(self, now_s: float) -> list[str]:
        """Return what is to be told since the last call."""
        while self._failed and now_s - self._failed[0][0] > 2 * NAMED_WITHIN_S:
            self._name_burst()
        while self._strange and now_s - self._strange[0][0] > 3 * NAMED_WITHIN_S:  # no failure to come
            self._count_end(self._strange.popleft()[1])
        while self._late and now_s - self._late[0][0] > NAMELESS_AFTER_S:
            self._count("", self._late.popleft()[1])
        lines, self._lines = self._lines, []
        return lines

    def take_repeated(self) -> int:
        """Return how many were rejected since the last call without a line of their own."""
        repeated, self._repeated = self._repeated, 0
        return repeated

    def _name_burst(self) -> None:
        """Put the oldest failure, and those about as old, together with who hung up then."""
        since_s = self._failed[0][0]
        reasons = []
        while self._failed and self._failed[0][0] <= since_s + NAMED_WITHIN_S:
            reasons.append(self._failed.popleft()[1])
        near = {address for seconds, address in self._strange if seconds <= since_s + 2 * NAMED_WITHIN_S}
        if len(set(reasons)) > 1 and len(near) > 1:  # who failed for which of them is not known
            reasons = [" or ".join(sorted(set(reasons)))] * len(reasons)
        while self._usual and self._usual[0][0] < since_s - NAMED_WITHIN_S:
            self._usual.popleft()
        for why in reasons:
            if self._strange and self._strange[0][0] <= since_s + 2 * NAMED_WITHIN_S:
                self._count(self._strange.popleft()[1], why)
            elif not self._usual:
                self._late.append((since_s, why))
            elif why != NO_PROTOCOL:  # else an agent of ours broke off
                self._count(self._usual.popleft()[1], why)

    def _count_end(self, address: str) -> None:
        """Count who hung up when nothing failed."""
        if self._late:
            self._count(address, self._late.popleft()[1])
            return
        self._accounted += 1  # its end was taken for an agent's
        self._count(address, NO_PROTOCOL)

    def _count(self, address: str, why: str) -> None:
        self._counted += 1
        if (address, why) in self._told:
            self._repeated += 1
        elif len(self._told) < MOST_ADDRESSES:
            self._told.add((address, why))
            where = f"at {address}" if address else "whose address could not be seen"
            self._lines.append(f"a stranger {where} was refused: {why}")
        elif len(self._told) == MOST_ADDRESSES:
            self._told.add(("", ""))
            self._lines.append(f"strangers at {MOST_ADDRESSES} addresses were refused; further ones are only counted")
        else:
            self._repeated += 1
