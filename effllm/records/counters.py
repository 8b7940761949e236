"""What a training loop counts.  Standard library alone, because the training process imports it.

A new counter is a field of `Counters`, at the end, and its increment in the recorder: the ring, the report of
a window, the totals and the files have the fields of this class.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any


class Counters:
    """Counts of one rank: running totals in the recorder and the ring, of one window or of all ranks elsewhere."""

    # These may change in every iteration: `RingWriter` packs them by name.
    tokens: int = 0  # positions without padding
    tokens_processed: int = 0  # all positions
    tokens_loss: int = 0  # positions with a label
    samples: int = 0
    # These change less often: `RingWriter.take` packs them when they do.
    generated_tokens: int = 0  # without prompts
    prompt_tokens: int = 0  # of what was generated


FIELDS = tuple(Counters.__annotations__)
NUM_FREQUENT = FIELDS.index("samples") + 1

_values = attrgetter(*FIELDS)


def by_name(record: Counters) -> dict[str, Any]:
    """Return the counters of a record that has them, as keyword arguments for another."""
    return dict(zip(FIELDS, _values(record), strict=True))
