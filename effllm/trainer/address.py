"""The address of the aggregator: rank 0 opens and publishes it, the other ranks search for it.

This module runs in the training process, before the first iteration.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable
from typing import Any

from effllm.config.place import Place
from effllm.config.settings import Config, secret_path
from effllm.network import discovery, interface, listening, secret
from effllm.records.board import Board
from effllm.records.facts import FoundAddress
from effllm.trainer.declared import Declared


class AggregatorAddress:
    """The address of the aggregator in one session; it sets the endpoint, the job and ``secured`` in ``declared``.

    ``write`` is called with the result of the search for the address, perhaps in the search's thread.  The board's
    method ``welcome`` returns the endpoint that has admitted the agent.
    """

    _generation = 0  # number of addresses that this process has opened or searched; a part of their records' key

    def __init__(
        self,
        config: Config,
        place: Place,
        declared: Declared,
        write: Callable[[FoundAddress], None],
        board: Board,
    ) -> None:
        self._config, self._place, self._declared = config, place, declared
        self._write, self._board = write, board
        self.listener: socket.socket | None = None  #: rank 0's listening socket for the aggregator
        self.is_session_over = False  #: whether the search must end

    def open_or_search(self) -> Callable[[], None]:
        """On rank 0, listen and publish the address; return the start of a search, to be called when the agent runs.

        Raises:
            DiscoveryError: rank 0 has no address, or the limit of open files is too low for the number of ranks.
            OSError: rank 0 cannot listen, or the secret cannot be read.
        """
        is_secured = discovery.is_secured(self._config) and self._make_secret()
        config = self._config
        self._declared.set(secured=is_secured)
        if config.endpoint:
            if is_secured:
                secret.read(secret_path(config))
            self._declared.set(endpoint=config.endpoint)
            self._warn_of_openness()
            return lambda: None
        AggregatorAddress._generation += 1
        source = discovery.record_source(self._place, config, AggregatorAddress._generation)
        if self._place.rank != 0:
            assert source is not None
            search = discovery.Search(source, config, is_secured, self._write, self._may_end_search)
            return search.start
        record = {"endpoint": self._listen(source, is_secured), "job": secrets.token_hex(8)}
        self._declared.set(**record)
        self._warn_of_openness()
        if source is not None:
            self._declared.set(address_file=str(getattr(source, "path", "")))
            if is_secured:
                record = secret.sign(secret.read(secret_path(config)), record, source.key)
            discovery.publish_record(source, record, self._write)
        return lambda: None

    def _listen(self, source: Any, is_secured: bool) -> str:
        """Listen on rank 0 and return the endpoint; after an error, publish the reason to the other ranks."""
        try:
            address = self._own_address()
            self.listener = listener = listening.listen_within(address, self._config.ports)
            if is_secured:
                secret.read_or_create(secret_path(self._config))
        except (listening.DiscoveryError, OSError) as error:
            if source is not None:
                discovery.publish_record(source, {"refused": str(error), "job": ""}, self._write)
                if path := getattr(source, "path", None):
                    atexit.register(discovery.remove_record, path, "")
            raise
        return interface.endpoint(address, listener.getsockname()[1])

    def _own_address(self) -> str:
        if self._place.world_size > 1 and (remedy := listening.open_files_remedy(self._place.world_size)):
            raise listening.DiscoveryError(remedy)
        return listening.own_address(self._place, self._config)

    def _make_secret(self) -> bool:
        """Make the secret of a job on one host; return whether this succeeded, and ``True`` for any other job."""
        config, place = self._config, self._place
        if config.security != "auto" or config.endpoint or not place.one_host:
            return True
        try:
            self._config = discovery.config_with_secret(config)
        except secret.SecretError as error:
            if place.rank == 0:
                print_line(f"reports have no keys, so other users of this host can forge reports: {error}")
            return False
        self._declared.set(config=self._config)
        return True

    def _warn_of_openness(self) -> None:  # others than the job's ranks may connect
        facts = self._declared.facts
        if self._place.rank == 0 and not facts.secured and (line := discovery.openness_warning(facts.endpoint)):
            print_line(line)

    def _may_end_search(self, endpoint: str) -> bool:
        """Whether the search may end; the search's thread may call this method."""
        return self.is_session_over or self._board.admitted_by() == endpoint


def print_line(line: str) -> None:
    """Print a line on stderr, before the first iteration or after the last one."""
    if sys.__stderr__ is None:  # without stderr at the start of Python, a file of the script may have its number
        return
    with contextlib.suppress(OSError):
        os.write(2, f"[EfficientLLM] {line}\n".encode(errors="replace"))
