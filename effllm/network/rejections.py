"""Rejected peers: each peer is counted; each address and reason is reported once. No I/O."""

from __future__ import annotations

OTHER_JOB = "another job's key"
OTHER_SECRET = "another secret"  # noqa: S105 - a reason
NO_KEY = "no key"
NO_PROTOCOL = "not the protocol of agents"

MAX_ADDRESSES = 1000
MAX_UNSEEN = 10  # failed handshakes from unknown addresses that are not counted: agents may have been killed
MAX_ADMITTED = 2**20


class Rejections:
    """The count of rejected peers, and the lines that report them."""

    def __init__(self) -> None:
        self.count = 0
        self._unseen = 0
        self._repeated = 0  # rejections since the last `take_repeated` that have no line of their own
        self._reported: set[tuple[str, str]] = set()
        self._admitted: set[str] = set()
        self._lines: list[str] = []

    def admit(self, address: str) -> None:
        if len(self._admitted) < MAX_ADMITTED:
            self._admitted.add(address)

    def reject(self, address: str, why: str) -> None:
        """Count a rejected peer.

        A connection that ends during its handshake is not counted if its host has an admitted agent, because
        an agent was probably killed.  The first MAX_UNSEEN such connections from unknown addresses are also not
        counted.

        Args:
            address: the peer's address; empty if it is unknown.
            why: a reason, which is a constant of this module.
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
            self._lines.append(f"peers at {MAX_ADDRESSES} addresses were rejected; further peers are only counted")
            return
        where = f"at {address}" if address else "with an unknown address"
        self._lines.append(f"a peer {where} was rejected: {why}")

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def take_repeated(self) -> int:
        """Return the number of rejections since the last call that have no line of their own."""
        repeated, self._repeated = self._repeated, 0
        return repeated
