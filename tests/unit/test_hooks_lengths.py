"""The largest micro-batch of a Hugging Face Trainer, from its arguments or its sampler."""

from types import SimpleNamespace

import pytest

from effllm.hooks._trainer_facts import max_positions


class Trainer:
    """A stand-in; the real trainers run in tests/frameworks."""

    def __init__(self, lengths=None, multiple=None):
        sampler = SimpleNamespace(lengths=lengths)
        loader = SimpleNamespace(batch_sampler=SimpleNamespace(batch_sampler=SimpleNamespace(sampler=sampler)))
        self.callback_handler = SimpleNamespace(train_dataloader=loader)
        self.data_collator = SimpleNamespace(pad_to_multiple_of=multiple)


class SFTTrainer(Trainer):
    """Has the name of TRL's class."""


class RewardTrainer(Trainer):
    """Has the name of TRL's class."""


class DataCollatorForPreference:
    """Has the name of TRL's class; older versions have no ``max_length``."""

    def __init__(self, **known):
        self.__dict__.update(known)


class Sub(SFTTrainer):
    """A trainer of a user."""


def args(**known):
    return SimpleNamespace(per_device_train_batch_size=4, **known)


@pytest.mark.parametrize("kind", [SFTTrainer, Sub])
def test_sft_trainer_cuts_sequences_at_its_max_length(kind):
    assert max_positions(kind(), args(max_length=1024)) == 4096
    assert max_positions(kind(multiple=100), args(max_length=1024)) == 4400


def test_length_without_a_cut_is_no_limit():
    assert max_positions(Trainer(), args(max_length=1024)) is None
    assert max_positions(SFTTrainer(), args(max_length=None)) is None
    assert max_positions(SFTTrainer(), args(max_length=9, dataset_kwargs={"skip_prepare_dataset": True})) is None


def test_a_pair_has_two_sequences():
    trainer = Trainer()
    trainer.data_collator = DataCollatorForPreference(max_length=100, pad_to_multiple_of=64)

    assert max_positions(trainer, args(max_length=9)) == 2 * 4 * 128
    assert max_positions(RewardTrainer(), args(max_length=100)) == 2 * 4 * 100


def test_collator_that_does_not_cut_gives_no_limit():
    trainer = Trainer()
    trainer.data_collator = DataCollatorForPreference()

    assert max_positions(trainer, args(max_length=100)) is None


def test_sampler_with_lengths_limits_the_micro_batch():
    assert max_positions(Trainer([5, 900, 30]), args()) == 3600
    assert max_positions(SFTTrainer([5, 900, 30]), args(max_length=500)) == 2000
    assert max_positions(Trainer([5.0, 900.0]), args()) is None


def test_trainer_without_a_dataloader_has_no_limit():
    assert max_positions(None, args()) is None
