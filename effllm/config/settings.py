"""The settings: `Config` has a field for each, and `read_config` reads them from the environment.

Standard library only, because the training process imports it.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from effllm.config import setting_values as values
from effllm.config.setting_values import ValueType, number, one_of, parse_sinks, whole
from effllm.config.switches import ATTACH, PREFIX, this_process


class ConfigError(ValueError):
    """An invalid setting, with the variable, its value and the reason, such as "must be a whole number"."""

    def __init__(self, variable: str, value: object, reason: str) -> None:
        super().__init__(f"{variable}={value!r} is not usable: {reason}")


#: Minimum duration of a window if LOG_INTERVAL is not set.
MIN_WINDOW_S = 1.0

# Groups of settings in `effllm env` and docs/configuration.md, the most common first.
MOST = "Common settings"
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
    field: str = ""  #: of `Config`; empty for a variable that is not a setting of a run
    word: str = ""  #: text of the default, if it is not the field's value

    def read(self, given: object, name: str = "") -> Any:
        """Parse the value ``given`` for the variable, or for an argument called ``name``.

        Raises:
            ConfigError: the value is not allowed.
        """
        try:
            return self.value_type.read(str(given))
        except ValueError:
            raise ConfigError(name or PREFIX + self.name, given, f"must be {self.value_type.allowed}") from None

    @property
    def default(self) -> str:
        """The default in shell form; empty if there is none."""
        return self.word or _text(getattr(Config(), self.field))

    def value(self, config: Config) -> str:
        """Return the setting of ``config`` in shell form."""
        return self.word if self.word and config.min_window_s else _text(getattr(config, self.field))


def _setting(default: Any, group: str, value_type: ValueType, meaning: str, name: str = "", word: str = "") -> Any:
    """Return a field of `Config` with its variable; by default its name is the field's in capitals."""
    return field(default=default, metadata={"variable": Variable(name, value_type, meaning, group, word=word)})


@dataclass(frozen=True)
class Config:
    """All settings; docs/configuration.md and `effllm env` are generated from this class, in its order."""

    metrics_enabled: bool = _setting(
        True,
        MOST,
        values.SWITCH,
        "Jobs are measured unless this is off. Off means that no process is started and no file written.",
    )
    log_interval: int = _setting(
        10,
        MOST,
        whole(1)._replace(allowed="a whole number of at least 1, or auto"),
        "A window has this many iterations. With auto it has ten, and windows are joined until they last a second.",
        word="auto",
    )
    sinks: tuple[str, ...] = _setting(
        ("console", "tensorboard"),
        MOST,
        values.SINKS,
        "Reports go to these sinks, and always to the run folder.",
    )
    run_dir: str = _setting("efficientllm_runs", MOST, values.FOLDER, "Run folders are made in this folder.")
    run_name: str = _setting(
        "",
        MOST,
        values.FOLDER_NAME,
        "The run folder has this name. Without it the name is the job's id, or a time and eight letters.",
    )
    peak_tflops: float | None = _setting(
        None,
        MOST,
        values.TFLOPS,
        "MFU is measured against this peak. Without it the peak is that of the GPU's row in docs/hardware.md.",
    )

    price_per_gpu_hour: float | None = _setting(
        None,
        COST,
        number(0, unit="money per GPU and hour"),
        "Rented GPUs cost this much, electricity included. Without it no cost of GPUs is reported.",
    )
    price_per_kwh: float | None = _setting(
        None,
        COST,
        number(0, unit="money per kWh"),
        "Electricity costs this much. Without it no cost of energy is reported.",
    )
    carbon_intensity: float | None = _setting(
        None,
        COST,
        number(0, 5000, unit="g CO2e per kWh"),
        "Electricity causes this much CO2. Without it no CO2 is reported.",
    )
    pue: float = _setting(
        1.0,
        COST,
        number(1, 10, "a ratio"),
        "The site draws this many times the power of its machines. It multiplies CO2 and the price of electricity.",
    )

    device: str = _setting(
        "auto",
        MEASURED,
        values.DEVICE,
        "Each rank samples this device. With auto it is the rank's NVIDIA or AMD GPU, else the host.",
    )
    collection_interval_s: float = _setting(
        1.0,
        MEASURED,
        number(0.01, 3600, "a number of seconds"),
        "Two samples of a device are this many seconds apart.",
        name="COLLECTION_INTERVAL",
    )
    history_size: int = _setting(
        1000,
        MEASURED,
        whole(16, 1_000_000),
        "The memory shared with the agent holds this many iterations, and the agent keeps this many unsent reports.",
    )
    parameters: str = _setting(
        "total",
        MEASURED,
        one_of("total", "trainable", "active"),
        "TT and ST are divided by this count of parameters.",
    )
    warmup: str = _setting(
        "0",
        MEASURED,
        values.WARMUP,
        "Run-to-date values leave out the first iterations or seconds of a job, rounded up to whole windows.",
    )
    min_coverage: float = _setting(
        1.0,
        MEASURED,
        number(0, 1, "a ratio"),
        "A window with a lower coverage has no sum over the cluster.",
    )
    profile_every: int = _setting(
        0,
        MEASURED,
        whole(0),
        "Every Nth iteration is profiled, to separate communication from computation. 0 profiles none.",
    )
    role: str = _setting("trainer", MEASURED, values.ROLE, "This process has this role in the job.")

    power_scope: str = _setting(
        "auto",
        POWER,
        one_of("auto", "gpu", "module", "gpu+cpu", "node-psu"),
        "AEC and energy are of the power in this scope. With auto it is the widest scope that every node has.",
    )
    node_power: str = _setting(
        "auto",
        POWER,
        values.NODE_POWER,
        "Local rank 0 reads the power of its node, besides that of the GPUs, from this sensor.",
    )
    node_power_credentials: str = _setting(
        "", POWER, values.SECRET_FILE, "This file has the user and the password of the Redfish service in NODE_POWER."
    )
    baseline_seconds: float = _setting(
        0.0,
        POWER,
        number(0, 600, "a number of seconds"),
        "Idle power is measured for this many seconds before the first iteration, which waits. 0 measures none.",
    )

    run_folder_mb: int = _setting(
        10_000,
        CLUSTER,
        whole(0),
        "A run folder grows to this many MB, and then its oldest windows and rows of ranks are removed. 0 is no limit.",
    )
    stall_seconds: float = _setting(
        30.0,
        CLUSTER,
        number(1, 86400, "a number of seconds"),
        "A stall is reported when no rank makes progress for this many seconds and three median iterations.",
    )
    interface: str = _setting(
        "",
        CLUSTER,
        values.INTERFACE,
        "Rank 0 listens on this interface. Without it that is the one that reaches MASTER_ADDR.",
    )
    ports: str = _setting(
        "", CLUSTER, values.PORTS, "Rank 0 listens on the first free port of this range. Without it any port is used."
    )
    endpoint: str = _setting("", CLUSTER, values.ENDPOINT, "Ranks report to this aggregator, which already runs.")
    security: str = _setting(
        "auto",
        CLUSTER,
        one_of("auto", "curve", "none"),
        "With curve, reports are encrypted and peers without the key rejected. auto is curve where a secret can be.",
    )
    secret_file: str = _setting(
        "",
        CLUSTER,
        values.SECRET_FILE,
        "Keys are made from the secret in this file. The default is efficientllm/secret in the user's config folder.",
    )

    min_window_s: float = 0.0  # not a setting: windows are joined until they last this long; see `read_config`

    @property
    def warmup_iterations(self) -> int:
        """The iterations of the warm-up; 0 if it is given in seconds."""
        return 0 if self.warmup.endswith("s") else int(self.warmup)

    @property
    def warmup_seconds(self) -> float:
        """The seconds of the warm-up; 0 if it is given in iterations."""
        return float(self.warmup[:-1]) if self.warmup.endswith("s") else 0.0

    def sink_options(self) -> dict[str, dict[str, str]]:
        """Return each sink with its given options as texts."""
        return parse_sinks(self.sinks)


def _text(value: Any) -> str:
    """Return a value in shell form; empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _variables() -> Iterator[Variable]:
    for one in fields(Config):
        if (variable := one.metadata.get("variable")) is not None:
            yield variable._replace(name=variable.name or one.name.upper(), field=one.name)


#: The variables of the settings.
VARIABLES = tuple(_variables())
#: Read when torch is imported; not a setting of a run.
ATTACH_SWITCH = Variable(
    ATTACH.removeprefix(PREFIX),
    values.SWITCH,
    "Where this is on, known training loops are hooked when torch is imported.",
    MOST,
)
#: All variables that are read, in display order.
ALL_VARIABLES = (VARIABLES[0], ATTACH_SWITCH, *VARIABLES[1:])

#: Names of earlier versions: the variable that replaces each, and the form of its value.
OLD_NAMES = {
    "WARMUP_ITERATIONS": ("WARMUP", "{}"),
    "WARMUP_SECONDS": ("WARMUP", "{}s"),
    "CONSOLE": ("SINKS", "console:format={}"),
    "TENSORBOARD_DIR": ("SINKS", "tensorboard:dir={}"),
    "PROMETHEUS_PORT": ("SINKS", "prometheus:port={}"),
}

#: Common mistakes for `PREFIX`.
_WRONG_PREFIXES = ("EFFLLM_", "EFFICIENT_LLM_", "EFFICENTLLM_")


def read_config(environ: Mapping[str, str]) -> Config:
    """Return the settings of ``environ``; an empty value means the default.

    Raises:
        ConfigError: a value is not allowed, or a name is one of an earlier version.
    """
    for _, error in old_settings(environ):
        raise error
    found: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(PREFIX + variable.name, "").strip()
        if text and text != variable.word:
            found[variable.field] = variable.read(text)
    # If LOG_INTERVAL is set, windows are not joined; without it there is at most one window a second.
    return Config(**found, min_window_s=0.0 if "log_interval" in found else MIN_WINDOW_S)


def old_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, ConfigError]]:
    """Yield each variable of an earlier version that is set, with an error that names its replacement."""
    for old, (new, form) in OLD_NAMES.items():
        if text := environ.get(PREFIX + old, "").strip():
            value = form.format(text)
            if new == "SINKS":
                value = _with_option(environ.get(f"{PREFIX}SINKS", ""), value)
            yield PREFIX + old, ConfigError(PREFIX + old, text, f"write {PREFIX}{new}={shlex.quote(value)} instead")


def _with_option(sinks: str, entry: str) -> str:
    """Return a value of SINKS in which ``entry``, which has an option, is added or replaces the sink's entry."""
    entries = [one.strip() for one in sinks.split(",") if one.strip() not in ("", "none")] or list(Config().sinks)
    name = entry.partition(":")[0]
    return ",".join([entry if one == name else one for one in entries] + [entry] * (name not in entries))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each unknown variable with our prefix or a similar one, with the nearest known name."""
    known = [variable.name for variable in ALL_VARIABLES]
    lines = []
    for name in sorted(environ):
        prefix = next((prefix for prefix in (PREFIX, *_WRONG_PREFIXES) if name.startswith(prefix)), None)
        short = name.removeprefix(prefix or "")
        if prefix is not None and short not in ((*known, *OLD_NAMES) if prefix == PREFIX else ()):
            near = difflib.get_close_matches(short, known, n=1)
            lines.append(f"{name} is not read by this version" + (f"; did you mean {PREFIX}{near[0]}?" if near else ""))
    return lines


def secret_path(config: Config) -> Path:
    """Return the path of the user's secret."""
    if config.secret_file:
        return Path(config.secret_file).expanduser().absolute()
    base = this_process().get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else _home() / ".config") / "efficientllm" / "secret"


def cache_folder() -> Path:
    """Return the user's cache folder: for calibrations of sensors, which can be measured again."""
    base = this_process().get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else _home() / ".cache") / "efficientllm"


def state_folder() -> Path:
    """Return the user's state folder: for logs of agents that have no run folder yet."""
    base = this_process().get("XDG_STATE_HOME", "").strip()
    return (Path(base) if base else _home() / ".local" / "state") / "efficientllm"


def _home() -> Path:
    """Return the user's home folder; without one, a path that cannot contain a file."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/dev/null")
