"""Rejected peers: each is counted; each address and reason is reported once; pure."""

from __future__ import annotations

OTHER_JOB = "another job's key"
OTHER_SECRET = "another secret"  # noqa: S105 - a reason
NO_KEY = "no key"
NO_PROTOCOL = "not the protocol of agents"

MAX_ADDRESSES = 1000
MAX_UNSEEN = 10  # uncounted failed handshakes from unknown addresses: they may be those of killed agents
MAX_ADMITTED = 2**20


class Rejections:
    """The count of rejected peers, and the lines that report them."""

    def __init__(self) -> None:
        self.count = 0
        self._unseen = 0
        self._repeated = 0  # rejections without a line of their own since the last `take_repeated`
        self._reported: set[tuple[str, str]] = set()
        self._admitted: set[str] = set()
        self._lines: list[str] = []

    def admit(self, address: str) -> None:
        if len(self._admitted) < MAX_ADMITTED:
            self._admitted.add(address)

    def reject(self, address: str, why: str) -> None:
        """Count a rejected peer.

        A connection from the host of an admitted agent that ends in its handshake is not counted: an agent was
        killed.  The first MAX_UNSEEN from unknown addresses are not counted either.

        Args:
            address: the peer's; empty if unknown.
            why: one of this module's reasons.
        """
        if why == NO_PROTOCOL and address in self._admitted:
            return
        if why == NO_PROTOCOL and not address:
            self._unseen += 1
            if self._unseen <= MAX_UNSEEN:
                return
        self.count += 1
        if (address, why) in self._reported or len(self._reported) > MAX_ADDRESSES:
            self._repeated += 1
            return
        self._reported.add((address, why))
        if len(self._reported) > MAX_ADDRESSES:
            self._lines.append(f"peers at {MAX_ADDRESSES} addresses were rejected; further ones are only counted")
            return
        where = f"at {address}" if address else "of unknown address"
        self._lines.append(f"a peer {where} was rejected: {why}")

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def take_repeated(self) -> int:
        """Return the number of rejections without a line of their own since the last call."""
        repeated, self._repeated = self._repeated, 0
        return repeated
