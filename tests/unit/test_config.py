"""effllm/config/settings.py: every variable has a default, accepts valid values, and reports invalid values."""

import dataclasses
import itertools
from pathlib import Path

import msgspec
import pytest
from cases import cases

from effllm.config.settings import (
    ALL_VARIABLES,
    COMMON,
    MIN_WINDOW_S,
    VARIABLES,
    Config,
    ConfigError,
    read_config,
    secret_path,
    unknown_variables,
)
from effllm.config.switches import PREFIX, is_enabled
from effllm.records.orders import Orders
from effllm.trainer.lifecycle import _config_with

GOOD = {
    "METRICS_ENABLED": ("off", False),
    "COLLECTION_INTERVAL": ("0.25", 0.25),
    "HISTORY_SIZE": ("16", 16),
    "LOG_INTERVAL": ("1", 1),
    "RUN_DIR": ("/scratch/my runs", "/scratch/my runs"),
    "RUN_FOLDER_MB": ("500", 500),
    "RUN_NAME": ("llama-7b_v1.2", "llama-7b_v1.2"),
    "TAGS": ("team=vision, ablation=3,baseline", "ablation=3,baseline,team=vision"),
    "SINKS": ("console, csv:a=b:c=1:2,", ("console", "csv:a=b:c=1:2")),
    "DEVICE": ("simulated", "simulated"),
    "ROLE": ("rollout", "rollout"),
    "WARMUP": ("1.5s", "1.5s"),
    "MIN_COVERAGE": ("0.9", 0.9),
    "PARAMETERS": ("active", "active"),
    "PEAK_TFLOPS": ("989.4", 989.4),
    "NODE_POWER": ("https://bmc-17/redfish/v1", "https://bmc-17/redfish/v1"),
    "NODE_POWER_CREDENTIALS": ("/home/me/.config/bmc", "/home/me/.config/bmc"),
    "BASELINE_SECONDS": ("10", 10.0),
    "CARBON_INTENSITY": ("321.5", 321.5),
    "PUE": ("1.2", 1.2),
    "PRICE_PER_KWH": ("0.25", 0.25),
    "PRICE_PER_GPU_HOUR": ("2.5", 2.5),
    "ENDPOINT": ("127.0.0.1:4000", "tcp://127.0.0.1:4000"),
    "PROFILE_EVERY": ("200", 200),
    "SECURITY": ("curve", "curve"),
    "SECRET_FILE": ("/home/me/secret", "/home/me/secret"),
    "INTERFACE": ("ib0", "ib0"),
    "PORTS": ("29700-29799", "29700-29799"),
    "STALL_SECONDS": ("120", 120.0),
}
BAD = {
    "COLLECTION_INTERVAL": ["0", "-1", "0.009", "3601", "nan", "inf", "fast"],
    "HISTORY_SIZE": ["15", "1000001", "1e3", "16.0"],
    "LOG_INTERVAL": ["0", "-10", "ten", "1.5"],
    "RUN_FOLDER_MB": ["-1", "0.5", "much"],
    "RUN_NAME": ["../other", ".hidden", "a/b", "a b", "x" * 101],
    "TAGS": ["team=", "=vision", "a=b=c", "a,,b", "a,a", "a=1,a=2", "<b>", "a\nb", "a\x1b[2J", "x" * 65, "é"],
    "SINKS": ["console;csv", "../evil", "Console", "a.b", "console,console", "console:full", "console:=x", "console:"],
    "DEVICE": ["../evil", "GPU", "nvml,host"],
    "ROLE": ["a b", "/"],
    "WARMUP": ["-1", "1.5", "s", "-0.1s", "infs", "nans", "1m", "1 0"],
    "MIN_COVERAGE": ["-0.1", "1.1", "nan"],
    "PARAMETERS": ["Total", "trainable,total"],
    "PEAK_TFLOPS": ["0", "-1", "inf"],
    "NODE_POWER": ["yes", "ftp://bmc", "https://user:secret@bmc/"],
    "METRICS_ENABLED": ["flase", "2", "none"],
    "BASELINE_SECONDS": ["-1", "601"],
    "CARBON_INTENSITY": ["-1", "nan"],
    "PUE": ["0.9", "inf"],
    "PRICE_PER_KWH": ["-0.1"],
    "PRICE_PER_GPU_HOUR": ["free"],
    "ENDPOINT": ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "udp://127.0.0.1:1", "host:port", "a b:1"],
    "PROFILE_EVERY": ["-1", "0.5", "often"],
    "SECURITY": ["None", "tls", "0"],
    "INTERFACE": ["eth0 eth1", "a/b", "x" * 65],
    "PORTS": ["29700", "29799-29700", "0-10", "60000-70000", "a-b"],
    "STALL_SECONDS": ["0", "0.9", "-30", "inf", "soon"],
}


def test_empty_environment_gives_the_defaults():
    assert read_config({}) == Config(min_window_s=MIN_WINDOW_S)
    assert read_config({PREFIX + variable.name: " " for variable in VARIABLES}) == Config(min_window_s=MIN_WINDOW_S)


@cases("variable", VARIABLES)
def test_default_as_text_is_read_as_the_default_value(variable):
    assert getattr(read_config({PREFIX + variable.name: variable.default}), variable.field) == getattr(
        Config(), variable.field
    )


def test_defaults_equal_the_original_defaults():
    config = Config()

    assert (config.metrics_enabled, config.collection_interval_s, config.history_size, config.log_interval) == (
        True,
        1.0,
        1000,
        10,
    )


@cases("name", GOOD)
def test_valid_value_is_accepted(name):
    text, expected = GOOD[name]
    field = next(variable.field for variable in VARIABLES if variable.name == name)

    assert getattr(read_config({PREFIX + name: f" {text} "}), field) == expected


@cases(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_invalid_value_error_names_variable_and_allowed_values(name, text):
    allowed = next(variable.value_type.allowed for variable in VARIABLES if variable.name == name)

    with pytest.raises(ConfigError) as error:
        read_config({PREFIX + name: text})

    assert str(error.value) == f"EFFICIENTLLM_{name}={text!r} is not usable: must be {allowed}"


@cases("word", ["true", "1", "yes", "on", "TRUE", "Yes", " on ", "", "false", "0", "no", "off", "FALSE", " Off "])
def test_every_spelling_of_on_and_off_is_read(word):
    is_on = word.strip().lower() not in ("false", "0", "no", "off")
    assert is_enabled({"EFFICIENTLLM_METRICS_ENABLED": word}) is is_on
    assert read_config({"EFFICIENTLLM_METRICS_ENABLED": word}).metrics_enabled is is_on
    assert is_enabled({})


def test_endpoint_may_be_a_name_or_an_ipv6_address():
    assert read_config({"EFFICIENTLLM_ENDPOINT": "tcp://node-1.cluster:99"}).endpoint == "tcp://node-1.cluster:99"
    assert read_config({"EFFICIENTLLM_ENDPOINT": "[::1]:99"}).endpoint == "tcp://[::1]:99"


def test_unknown_variable_is_reported_with_a_similar_name():
    lines = unknown_variables({"EFFICIENTLLM_LOG_INTERVALL": "1", "EFFICIENTLLM_X": "1", "PATH": "/bin"})

    assert lines == [
        "EFFICIENTLLM_LOG_INTERVALL is not read by this version; did you mean EFFICIENTLLM_LOG_INTERVAL?",
        "EFFICIENTLLM_X is not read by this version",
    ]


def test_warm_up_may_be_given_in_iterations_or_in_seconds():
    iterations, seconds = (read_config({f"{PREFIX}WARMUP": text}) for text in ("20", "1.5s"))

    assert (iterations.warmup_iterations, iterations.warmup_seconds) == (20, 0.0)
    assert (seconds.warmup_iterations, seconds.warmup_seconds) == (0, 1.5)


def test_values_of_sink_options_may_have_colons():
    config = read_config({f"{PREFIX}SINKS": "tensorboard:dir=/tb/10:30=x,prometheus:port=0:a_b=1,console"})

    assert config.sink_options() == {
        "tensorboard": {"dir": "/tb/10:30=x"},
        "prometheus": {"port": "0", "a_b": "1"},
        "console": {},
    }


def test_settings_are_grouped_and_described_in_sentences():
    fields = {field.name for field in dataclasses.fields(Config)}

    assert fields - {variable.field for variable in VARIABLES} == {"min_window_s"}
    assert [variable.group for variable in ALL_VARIABLES[:9]].count(COMMON) == 8
    assert all(variable.meaning.endswith(".") for variable in ALL_VARIABLES)
    groups = [group for group, _ in itertools.groupby(ALL_VARIABLES, key=lambda variable: variable.group)]
    assert len(groups) == len(set(groups)), "each group is in one piece"


def test_known_variables_are_not_reported_as_unknown():
    known = {PREFIX + variable.name: "x" for variable in VARIABLES}

    assert unknown_variables({**known, "EFFICIENTLLM_ATTACH": "1"}) == []


def test_settings_are_unchanged_after_the_transfer_to_the_aggregator():
    orders = Orders(Config(sinks=("csv",), peak_tflops=1.5, run_name="x"), "job", "tcp://127.0.0.1:1", "")

    assert msgspec.json.decode(msgspec.json.encode(orders), type=Orders) == orders


def test_secret_is_in_the_users_config_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert secret_path(Config()) == tmp_path / "efficientllm" / "secret"

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert secret_path(Config()) == Path("/home/me/.config/efficientllm/secret")
    assert secret_path(Config(secret_file="~/shared/secret")) == Path("/home/me/shared/secret")


def test_number_that_a_call_gives_as_text_is_used_as_a_number():
    assert _config_with({"collection_interval_s": "2", "log_interval": None}).collection_interval_s == 2.0
