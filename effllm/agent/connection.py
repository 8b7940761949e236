"""The connection of an agent to the aggregator, whose address may change."""

from __future__ import annotations

import zmq

from effllm.agent.notices import Notices
from effllm.agent.trainer import Trainer
from effllm.config.settings import secret_path
from effllm.network import secret
from effllm.network.curve import AgentKeys
from effllm.network.transport import AgentLink, make_context


class Connection:
    """A link to the newest address of the aggregator.

    Args:
        trainer: the agent's trainer; its facts have the address.
        poller: wakes the agent when a message arrives.
        notices: reports the reason of a missing connection.
    """

    def __init__(self, trainer: Trainer, poller: zmq.Poller, notices: Notices) -> None:
        self._trainer, self._poller, self._notices = trainer, poller, notices
        self._context = make_context()
        self.link: AgentLink | None = None
        self.endpoint = ""
        self._job = ""

    def follow(self) -> bool:
        """Connect to the newest address; return whether an earlier link was closed."""
        endpoint, job = self._trainer.facts.endpoint, self._trainer.facts.job
        if not endpoint or (endpoint, job) == (self.endpoint, self._job):
            return False
        self.endpoint, self._job = endpoint, job
        was_linked = self.disconnect()
        keys: AgentKeys | None = None
        if self._trainer.facts.secured:
            try:
                keys = AgentKeys.of(secret.read(secret_path(self._trainer.config)), job)
            except secret.SecretError as error:
                self._notices.no_metrics(f"no metrics of this rank: {error}")
                return was_linked
        self.link = AgentLink(self._context, endpoint, keys)
        self.link.connect()
        self._poller.register(self.link.socket, zmq.POLLIN)
        self._poller.register(self.link.monitor, zmq.POLLIN)
        return was_linked

    def disconnect(self) -> bool:
        """Close the link; return whether a link was open."""
        if self.link is None:
            return False
        self._poller.unregister(self.link.socket)
        self._poller.unregister(self.link.monitor)
        self.link.close()
        self.link = None
        return True

    @property
    def is_up(self) -> bool:
        """Whether the handshake with the aggregator has succeeded and the connection is still open."""
        return self.link is not None and self.link.connected

    @property
    def sent_bytes(self) -> int:
        return self.link.sent_bytes if self.link else 0

    def close(self) -> None:
        """Close the link and the context; wait at most 0.2 s for unsent messages."""
        if self.link:
            self.link.close()
        self._context.destroy(linger=200)
