"""The settings: each is a field of `Config`, and `read_config` reads all settings from the environment.

Standard library only, because the training process imports this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from effllm.config import setting_values as values
from effllm.config.setting_values import ValueType, matching, number, one_of, parse_sinks, whole
from effllm.config.switches import ATTACH, PREFIX, process_environ


class ConfigError(ValueError):
    """An invalid setting. The message has the variable, its value and the reason, such as "must be a whole number"."""

    def __init__(self, variable: str, value: object, reason: str) -> None:
        super().__init__(f"{variable}={value!r} is not usable: {reason}")


#: Minimum duration of a window if LOG_INTERVAL is not set.
MIN_WINDOW_S = 1.0

# Groups of settings in `effllm env` and docs/configuration.md, the most common first.
COMMON = "Common settings"
COST = "Cost and CO2"
MEASURED = "Measurement"
POWER = "Power sensors"
CLUSTER = "Jobs on a cluster"


class Variable(NamedTuple):
    """One environment variable: its name without the prefix, its type, its group, and its help text."""

    name: str
    value_type: ValueType
    meaning: str
    group: str
    field: str = ""  #: name of the field of `Config`; empty for a variable that is not a setting of a run
    default_word: str = ""  #: text of the default, if it differs from the field's value

    def parse(self, given: object, name: str = "") -> Any:
        """Parse the text ``given``; ``name`` replaces the variable's name in an error message.

        Raises:
            ConfigError: the value is not allowed.
        """
        try:
            return self.value_type.read(str(given))
        except ValueError:
            raise ConfigError(name or PREFIX + self.name, given, f"must be {self.value_type.allowed}") from None

    @property
    def default(self) -> str:
        """The default as text for a shell; empty without a default."""
        return self.default_word or _shell_text(getattr(Config(), self.field))

    def text_in(self, config: Config) -> str:  # the text of the field's value, for a shell
        has_default_word = self.default_word and config.min_window_s  # above 0 only if LOG_INTERVAL has its word
        return self.default_word if has_default_word else _shell_text(getattr(config, self.field))


def _setting(default: Any, group: str, value_type: ValueType, meaning: str, name: str = "", word: str = "") -> Any:
    """Return a field of `Config` with its variable; the default of ``name`` is the field's name in capitals."""
    return field(default=default, metadata={"variable": Variable(name, value_type, meaning, group, default_word=word)})


@dataclass(frozen=True)
class Config:
    """All settings, in the order of docs/configuration.md and `effllm env`, which are generated from this class."""

    metrics_enabled: bool = _setting(
        True,
        COMMON,
        values.SWITCH,
        "Whether jobs are measured. If off, no process is started and no file is written.",
    )
    log_interval: int = _setting(
        10,
        COMMON,
        whole(1)._replace(allowed="a whole number of at least 1, or auto"),
        "Number of iterations per window. With auto: ten, or more if ten iterations take less than a second.",
        word="auto",
    )
    sinks: tuple[str, ...] = _setting(
        ("console", "tensorboard"),
        COMMON,
        values.SINKS,
        "Outputs of the reports. The run folder is always written.",
    )
    run_dir: str = _setting("efficientllm_runs", COMMON, values.FOLDER, "Parent folder of the run folders.")
    run_name: str = _setting(
        "",
        COMMON,
        values.FOLDER_NAME,
        "Name of the run folder. The default is the id of the job, or the start time and eight hexadecimal digits.",
    )
    tags: str = _setting(
        "",
        COMMON,
        values.TAGS,
        "Tags of the run, in run.json, summary.json and the sink prometheus, such as team=vision,ablation=3.",
    )
    peak_tflops: float | None = _setting(
        None,
        COMMON,
        values.TFLOPS,
        "Peak FLOP/s of one device, for MFU. The default is the peak of the GPU in docs/hardware.md.",
    )

    price_per_gpu_hour: float | None = _setting(
        None,
        COST,
        number(0, unit="money per GPU and hour"),
        "Price of a rented GPU, electricity included. Without a price, no cost of GPUs is reported.",
    )
    price_per_kwh: float | None = _setting(
        None,
        COST,
        number(0, unit="money per kWh"),
        "Price of electricity. Without a price, no cost of energy is reported.",
    )
    currency: str = _setting(
        "",
        COST,
        matching(r"\S{1,8}", "at most 8 letters without spaces, such as EUR"),
        "Currency of the prices, which is shown with the costs.",
    )
    carbon_intensity: float | None = _setting(
        None,
        COST,
        number(0, 5000, unit="g CO2e per kWh"),
        "CO2 emissions of electricity. Without a value, no CO2 is reported.",
    )
    pue: float = _setting(
        1.0,
        COST,
        number(1, 10, "a ratio"),
        "Power of the site divided by the power of its machines. CO2 and energy cost are multiplied by this ratio.",
    )

    device: str = _setting(
        "auto",
        MEASURED,
        values.DEVICE,
        "Device of each rank. With auto: the rank's NVIDIA or AMD GPU, or the host if there is no GPU.",
    )
    collection_interval_s: float = _setting(
        1.0,
        MEASURED,
        number(0.01, 3600, "a number of seconds"),
        "Time between two samples of a device.",
        name="COLLECTION_INTERVAL",
    )
    history_size: int = _setting(
        1000,
        MEASURED,
        whole(16, 1_000_000),
        "Maximum number of iterations in the memory shared with the agent. It also limits the unsent reports.",
    )
    parameters: str = _setting(
        "total",
        MEASURED,
        one_of("total", "trainable", "active"),
        "The count of parameters by which TT and ST are divided.",
    )
    warmup: str = _setting(
        "0",
        MEASURED,
        values.WARMUP,
        "Warm-up of a job, rounded up to whole windows. Run-to-date values exclude the warm-up.",
    )
    min_coverage: float = _setting(
        1.0,
        MEASURED,
        number(0, 1, "a ratio"),
        "Minimum coverage. A window with a lower coverage has no sum over the cluster.",
    )
    profile_every: int = _setting(
        0,
        MEASURED,
        whole(0),
        "Every Nth iteration is profiled, to separate communication from computation. With 0, there are no profiles.",
    )
    stacks: str = _setting(
        "auto",
        MEASURED,
        one_of("off", "auto", "always"),
        "Whether py-spy records for 5 s, from outside, in which lines of code the host is: with auto after the start "
        "and every 10 minutes, with always every minute.",
    )
    role: str = _setting("trainer", MEASURED, values.ROLE, "Role of this process in the job.")

    node_power: str = _setting(
        "auto",
        POWER,
        values.NODE_POWER,
        "Sensor of the node's power. Local rank 0 reads this sensor in addition to the GPUs.",
    )
    node_power_credentials: str = _setting(
        "", POWER, values.SECRET_FILE, "File with the user and the password of the Redfish service in NODE_POWER."
    )
    baseline_seconds: float = _setting(
        0.0,
        POWER,
        number(0, 600, "a number of seconds"),
        "Duration of the measurement of idle power. The measurement delays the first iteration. "
        "With 0: no measurement.",
    )

    ledger: str = _setting(
        "",
        CLUSTER,
        values.FOLDER,
        "Folder of the ledger, for many users: each attempt of a run appends a line to a file of its user.",
    )
    run_folder_mb: int = _setting(
        10_000,
        CLUSTER,
        whole(0),
        "Maximum size of a run folder in MB. Above it, the oldest windows and reports are removed. With 0: no limit.",
    )
    stall_seconds: float = _setting(
        30.0,
        CLUSTER,
        number(1, 86400, "a number of seconds"),
        "A stall is reported when no rank makes progress for this time and for three median iterations.",
    )
    interface: str = _setting(
        "",
        CLUSTER,
        values.INTERFACE,
        "Interface on which rank 0 listens. The default is the interface of the route to MASTER_ADDR.",
    )
    ports: str = _setting(
        "",
        CLUSTER,
        values.PORTS,
        "Rank 0 listens on the first free port of this range. Without a range, any port is used.",
    )
    endpoint: str = _setting(
        "", CLUSTER, values.ENDPOINT, "Address of a separate aggregator, to which all ranks send their reports."
    )
    security: str = _setting(
        "auto",
        CLUSTER,
        one_of("auto", "curve", "none"),
        "curve: reports are encrypted, and peers without the key are rejected. auto: curve if a secret can be saved.",
    )
    secret_file: str = _setting(
        "",
        CLUSTER,
        values.SECRET_FILE,
        "File with the secret from which keys are derived. The default is efficientllm/secret in the config folder.",
    )
    runbook_url: str = _setting(
        "",
        CLUSTER,
        matching(r"https?://[^\s@]+", "an address that begins with https:// or http://"),
        "Address of the page with your steps for alerts, for the sink prometheus. The links of the alerts lead there.",
    )

    min_window_s: float = 0.0  # not a setting: shorter windows are joined; see `read_config`

    @property
    def warmup_iterations(self) -> int:
        """Iterations of the warm-up; 0 if the warm-up is given in seconds."""
        return 0 if self.warmup.endswith("s") else int(self.warmup)

    @property
    def warmup_seconds(self) -> float:
        """Seconds of the warm-up; 0 if the warm-up is given in iterations."""
        return float(self.warmup[:-1]) if self.warmup.endswith("s") else 0.0

    def sink_options(self) -> dict[str, dict[str, str]]:
        return parse_sinks(self.sinks)


def _shell_text(value: Any) -> str:
    """Return a value as text for a shell; empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


#: The variables of the settings.
VARIABLES: tuple[Variable, ...] = tuple(
    variable._replace(name=variable.name or setting.name.upper(), field=setting.name)
    for setting in fields(Config)
    if (variable := setting.metadata.get("variable")) is not None
)
#: A switch that is read at the import of torch; not a setting of a run.
ATTACH_SWITCH = Variable(
    ATTACH.removeprefix(PREFIX),
    values.SWITCH,
    "Whether known training loops are hooked when torch is imported.",
    COMMON,
)
#: All known variables, in display order.
ALL_VARIABLES = (VARIABLES[0], ATTACH_SWITCH, *VARIABLES[1:])

#: Common misspellings of `PREFIX`.
_WRONG_PREFIXES = ("EFFLLM_", "EFFICIENT_LLM_", "EFFICENTLLM_")


def read_config(environ: Mapping[str, str]) -> Config:
    """Return the settings of ``environ``; an empty value means the default.

    Raises:
        ConfigError: a value is not allowed.
    """
    given: dict[str, Any] = {}  # field -> value
    for variable in VARIABLES:
        text = environ.get(PREFIX + variable.name, "").strip()
        if text and text != variable.default_word:
            given[variable.field] = variable.parse(text)
    # Windows are joined only if LOG_INTERVAL is not set; then there is at most one window per second.
    return Config(**given, min_window_s=0.0 if "log_interval" in given else MIN_WINDOW_S)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each unknown variable with `PREFIX` or a misspelt prefix, with the nearest known name."""
    names = [variable.name for variable in ALL_VARIABLES]
    lines = []
    for name in sorted(environ):
        prefix = next((prefix for prefix in (PREFIX, *_WRONG_PREFIXES) if name.startswith(prefix)), None)
        bare_name = name.removeprefix(prefix or "")
        if prefix is not None and bare_name not in (names if prefix == PREFIX else ()):
            near = difflib.get_close_matches(bare_name, names, n=1)
            lines.append(f"{name} is not read by this version" + (f"; did you mean {PREFIX}{near[0]}?" if near else ""))
    return lines


def secret_path(config: Config) -> Path:
    if config.secret_file:
        return Path(config.secret_file).expanduser().absolute()
    base = process_environ().get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else _home() / ".config") / "efficientllm" / "secret"


def cache_folder() -> Path:
    base = process_environ().get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else _home() / ".cache") / "efficientllm"


def state_folder() -> Path:
    """Return the user's state folder, for logs of agents without a run folder."""
    base = process_environ().get("XDG_STATE_HOME", "").strip()
    return (Path(base) if base else _home() / ".local" / "state") / "efficientllm"


def _home() -> Path:
    """Return the user's home folder; without a home folder, a path that cannot contain files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/dev/null")
