"""The counters of a training loop.  Standard library only, because the training process imports this module.

To add a counter, append a field to `Counters` and increment it in the recorder.  The ring, the reports, the totals and
the files have the fields of this class.
"""

from __future__ import annotations


class Counters:
    """Counts of a training loop.

    The recorder and the ring have running totals of one rank.  Other records have sums over a window or over all ranks.
    """

    # The next four fields may change in every iteration: `RingWriter` packs these fields by name.
    tokens: int = 0  # positions without padding
    tokens_processed: int = 0  # all positions
    tokens_loss: int = 0  # positions with a label
    samples: int = 0
    # The next fields change less often: `RingWriter.replace_totals` packs these fields.
    generated_tokens: int = 0  # without prompts
    prompt_tokens: int = 0  # prompts of generated text
    counts_rejected: int = 0  # calls whose counts were not whole numbers of at least 0


FIELDS = tuple(Counters.__annotations__)
NUM_FREQUENT = FIELDS.index("samples") + 1
