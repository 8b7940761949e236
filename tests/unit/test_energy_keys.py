"""Keys of the energy keep their names in the trackers of a Trainer; all other keys are unchanged."""

from types import SimpleNamespace

import pytest

from effllm.hooks import _energy_keys


@pytest.fixture
def module():
    return SimpleNamespace(rewrite_logs=lambda logs: {f"train/{key}": value for key, value in logs.items()})


def test_only_keys_of_the_energy_have_no_prefix(module):
    _energy_keys.wrap_rewrite_logs(module)

    assert module.rewrite_logs({"energy_step/power_avg_w": 300.0, "loss": 2.0, "energy_of_mine": 1.0}) == {
        "energy_step/power_avg_w": 300.0,
        "train/loss": 2.0,
        "train/energy_of_mine": 1.0,
    }


def test_function_of_transformers_is_wrapped_once(module):
    _energy_keys.wrap_rewrite_logs(module)
    wrapped = module.rewrite_logs
    _energy_keys.wrap_rewrite_logs(module)

    assert module.rewrite_logs is wrapped


def test_other_version_of_the_function_is_left_as_it_is():
    module = SimpleNamespace(rewrite_logs=lambda logs: None)
    _energy_keys.wrap_rewrite_logs(module)
    _energy_keys.wrap_rewrite_logs(SimpleNamespace())

    assert module.rewrite_logs({"loss": 2.0}) is None
