"""The settings: `Config` holds each of them, as `read_config` reads them from the environment.

Standard library alone, because the training process imports it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from effllm.switches import ALLOWED, ATTACH, PREFIX, is_on, is_unclear, this_process

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PLUGIN = re.compile(r"[a-z][a-z0-9_]*")


class ConfigError(ValueError):
    """A wrong setting: names the variable, its value and what is wrong with it, as in "must be a whole number"."""

    def __init__(self, variable: str, value: object, reason: str) -> None:
        super().__init__(f"{variable}={value!r} is not usable: {reason}")


#: Seconds that a window lasts at least where LOG_INTERVAL is not set.
MIN_WINDOW_S = 1.0


@dataclass(frozen=True)
class Config:
    """Every setting, each from the variable ``EFFICIENTLLM_<NAME>``; see docs/configuration.md."""

    metrics_enabled: bool = True
    collection_interval_s: float = 1.0
    history_size: int = 1000
    log_interval: int = 10
    min_window_s: float = 0.0  # windows are joined until they last so long; see `read_config`
    run_dir: str = "efficientllm_runs"
    run_name: str = ""
    run_folder_mb: int = 10_000
    tensorboard_dir: str = ""
    sinks: tuple[str, ...] = ("console", "tensorboard")
    console: str = "auto"
    device: str = "auto"
    power_scope: str = "auto"
    node_power: str = "auto"
    node_power_credentials: str = ""
    role: str = "trainer"
    warmup_iterations: int = 0
    warmup_seconds: float = 0.0
    min_coverage: float = 1.0
    parameters: str = "total"
    peak_tflops: float | None = None
    baseline_seconds: float = 0.0
    carbon_intensity: float | None = None
    pue: float = 1.0
    price_per_kwh: float | None = None
    price_per_gpu_hour: float | None = None
    endpoint: str = ""
    profile_every: int = 0
    prometheus_port: int = 9788
    security: str = "auto"
    secret_file: str = ""
    interface: str = ""
    ports: str = ""
    stall_seconds: float = 30.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as the agent and the run folder keep them."""
        return {**asdict(self), "sinks": list(self.sinks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Undo `to_dict`."""
        return cls(**{**values, "sinks": tuple(values["sinks"])})


def _switch(text: str) -> bool:
    if is_unclear(text):
        raise ValueError
    return is_on(text)


def _number(least: float, most: float = math.inf) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not least <= value <= most or math.isinf(value):
            raise ValueError
        return value

    return read


def _positive(text: str) -> float:
    value = _number(0.0)(text)
    if value == 0.0:
        raise ValueError
    return value


def _whole(least: int, most: int = 2**40) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return read


def _names(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not all(_PLUGIN.fullmatch(name) for name in names):
        raise ValueError
    return names


def _plugin(text: str) -> str:
    if not _PLUGIN.fullmatch(text):
        raise ValueError
    return text


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError
        return text

    return read


def _safe_name(text: str) -> str:
    if not _SAFE_NAME.fullmatch(text):
        raise ValueError
    return text


def _endpoint(text: str) -> str:
    match = re.fullmatch(r"(?:tcp://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})", text)
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError
    return f"tcp://{match[1]}:{match[2]}"


def _ports(text: str) -> str:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not match or not 0 < int(match[1]) <= int(match[2]) < 65536:
        raise ValueError
    return text


def _interface(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:@%-]{1,64}", text):
        raise ValueError
    return text


def _node_power(text: str) -> str:
    if text not in ("auto", "none", "ipmi") and not re.fullmatch(r"https?://[^\s@]+", text):
        raise ValueError  # credentials belong into a file, never into an address
    return text


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the field it sets, how it is read and what is allowed."""

    name: str
    field: str
    read: Callable[[str], Any]
    allowed: str
    meaning: str
    word: str = ""  # for a default that is more than the field's value

    @property
    def default(self) -> str:
        """The default as one would write it in a shell; empty where there is none."""
        return self.word or self.text(getattr(Config(), self.field))

    def value(self, config: Config) -> str:
        """Return the setting in ``config`` as one would write it in a shell."""
        return self.word if self.word and config.min_window_s else self.text(getattr(config, self.field))

    @staticmethod
    def text(value: Any) -> str:
        """Return a value as one would write it in a shell; empty for ``None``."""
        if value is None:
            return ""
        if isinstance(value, tuple):
            return ",".join(value) or "none"
        return str(value).lower() if isinstance(value, bool) else str(value)


VARIABLES: tuple[Variable, ...] = (
    Variable("METRICS_ENABLED", "metrics_enabled", _switch, ALLOWED, "the switch; off means off"),
    Variable("COLLECTION_INTERVAL", "collection_interval_s", _number(0.01, 3600.0), "a number of seconds from 0.01 to 3600", "seconds between device samples"),
    Variable("HISTORY_SIZE", "history_size", _whole(16, 1_000_000), "a whole number from 16 to 1000000", "slots of the ring and of the buffer of unsent reports"),
    Variable("LOG_INTERVAL", "log_interval", _whole(1, 1_000_000_000), "a whole number of at least 1, or auto", "iterations per window; auto is 10, and windows are joined until they last a second", "auto"),
    Variable("RUN_DIR", "run_dir", str, "a folder", "where run folders are made"),
    Variable("RUN_NAME", "run_name", _safe_name, "at most 100 letters, digits, '.', '_' and '-', the first a letter or digit", "name of the run folder"),
    Variable("RUN_FOLDER_MB", "run_folder_mb", _whole(0, 1_000_000_000), "a whole number of at least 0; 0 is no limit", "MB that a run folder may become; the oldest windows and rows of ranks are removed first, totals never"),
    Variable("TENSORBOARD_DIR", "tensorboard_dir", str, "a folder", "where the event file goes"),
    Variable("SINKS", "sinks", _names, "names of files in effllm/sinks/, separated by commas, or none", "where reports go beside the run folder"),
    Variable("CONSOLE", "console", _one_of("auto", "short", "full"), "auto, short or full", "what is printed of a window: two lines, or the block that scripts parse; auto is short on a terminal, full elsewhere"),
    Variable("DEVICE", "device", _plugin, "auto, or the name of a file in effllm/devices/", "what each rank samples; auto is its NVIDIA or AMD GPU, else the host"),
    Variable("POWER_SCOPE", "power_scope", _one_of("auto", "gpu", "module", "gpu+cpu", "node-psu"), "auto, gpu, module, gpu+cpu or node-psu", "whose power makes AEC and energy; auto is the widest that every node has"),
    Variable("NODE_POWER", "node_power", _node_power, "auto, none, ipmi, or the https:// address of a Redfish service", "by what local rank 0 reads its node's power beside the GPUs"),
    Variable("NODE_POWER_CREDENTIALS", "node_power_credentials", str, "a file of mode 0600", "user and password of the Redfish service"),
    Variable("ROLE", "role", _safe_name, "a word, such as trainer or rollout", "what this process does in the job"),
    Variable("WARMUP_ITERATIONS", "warmup_iterations", _whole(0), "a whole number of at least 0", "left out of run-to-date values, rounded up to whole windows"),
    Variable("WARMUP_SECONDS", "warmup_seconds", _number(0.0), "a number of seconds of at least 0", "left out of run-to-date values, rounded up to whole windows"),
    Variable("MIN_COVERAGE", "min_coverage", _number(0.0, 1.0), "a ratio from 0 to 1", "a window measured less than this has no cluster sum"),
    Variable("PARAMETERS", "parameters", _one_of("total", "trainable", "active"), "total, trainable or active", "which parameter count divides TT and ST"),
    Variable("PEAK_TFLOPS", "peak_tflops", _positive, "a number above 0, in TFLOP/s of one device", "peak that MFU is measured against"),
    Variable("BASELINE_SECONDS", "baseline_seconds", _number(0.0, 600.0), "a number of seconds from 0 to 600", "idle power is measured so long before the first iteration; 0 is not at all"),
    Variable("CARBON_INTENSITY", "carbon_intensity", _number(0.0, 5000.0), "a number from 0 to 5000, in g CO2e per kWh", "of the electricity; without it no CO2 is reported"),
    Variable("PUE", "pue", _number(1.0, 10.0), "a ratio from 1 to 10", "what the site draws over what its machines draw; multiplies CO2 and cost"),
    Variable("PRICE_PER_KWH", "price_per_kwh", _number(0.0), "a number of at least 0, in money per kWh", "of the electricity"),
    Variable("PRICE_PER_GPU_HOUR", "price_per_gpu_hour", _number(0.0), "a number of at least 0, in money per GPU and hour", "of rented GPUs, electricity included"),
    Variable("ENDPOINT", "endpoint", _endpoint, "host:port or tcp://host:port", "an aggregator that is already running"),
    Variable("PROMETHEUS_PORT", "prometheus_port", _whole(0, 65535), "a port from 0 to 65535", "where the sink prometheus serves, on loopback alone; 0 is any free port"),
    Variable("PROFILE_EVERY", "profile_every", _whole(0, 1_000_000_000), "a whole number of at least 0", "one iteration in so many is profiled, to tell communication from computation; 0 is none"),
    Variable("SECURITY", "security", _one_of("auto", "curve", "none"), "auto, curve or none", "whether reports are encrypted and peers without the key rejected; auto is curve wherever there can be a secret"),
    Variable("SECRET_FILE", "secret_file", str, "a file of mode 0600", "the user's secret, from which the keys are made; else efficientllm/secret in the user's config folder"),
    Variable("INTERFACE", "interface", _interface, "the name of an interface, such as ib0, or an address of rank 0's host", "where rank 0 listens; else on the interface that reaches MASTER_ADDR"),
    Variable("PORTS", "ports", _ports, "two ports, such as 29700-29799", "rank 0 listens on the first of them that is free; else on any free port"),
    Variable("STALL_SECONDS", "stall_seconds", _number(1.0, 86400.0), "a number of seconds from 1 to 86400", "a stall is reported when no rank makes progress for this many seconds and three median iterations, with each rank's position"),
)  # fmt: skip

#: What is written for `PREFIX` by mistake.
_WRONG_PREFIXES = ("EFFLLM_", "EFFICIENT_LLM_", "EFFICENTLLM_")

#: Read by the launch scripts and by the entry point, not settings of a run.
SWITCHES = (ATTACH,)


def read_config(environ: Mapping[str, str]) -> Config:
    """Return the settings of ``environ``; an empty value means the default.

    Raises:
        ConfigError: a value is not allowed.
    """
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(PREFIX + variable.name, "").strip()
        if not text or text == variable.word:
            continue
        try:
            values[variable.field] = variable.read(text)
        except ValueError:
            raise ConfigError(PREFIX + variable.name, text, f"must be {variable.allowed}") from None
    # What is asked for is obeyed, and what is not takes no more than a window a second.
    return Config(**values, min_window_s=0.0 if "log_interval" in values else MIN_WINDOW_S)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each variable that looks like ours and that nothing reads, with the likely meant name."""
    known = [variable.name for variable in VARIABLES] + [name.removeprefix(PREFIX) for name in SWITCHES]
    lines = []
    for name in sorted(environ):
        prefix = next((prefix for prefix in (PREFIX, *_WRONG_PREFIXES) if name.startswith(prefix)), None)
        if prefix is not None and (short := name.removeprefix(prefix)) not in (known if prefix == PREFIX else ()):
            near = difflib.get_close_matches(short, known, n=1)
            lines.append(f"{name} is not read by this version" + (f"; did you mean {PREFIX}{near[0]}?" if near else ""))
    return lines


def secret_path(config: Config) -> Path:
    """Return where the user's secret is."""
    if config.secret_file:
        return Path(config.secret_file).expanduser().absolute()
    base = this_process().get("XDG_CONFIG_HOME", "").strip()
    return (Path(base) if base else _home() / ".config") / "efficientllm" / "secret"


def cache_folder() -> Path:
    """Return the user's own folder for what can be measured anew: how sensors behave."""
    base = this_process().get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else _home() / ".cache") / "efficientllm"


def state_folder() -> Path:
    """Return the user's own folder for logs of agents that never learned their run folder."""
    base = this_process().get("XDG_STATE_HOME", "").strip()
    return (Path(base) if base else _home() / ".local" / "state") / "efficientllm"


def _home() -> Path:
    """Return the user's home; where nothing says which it is, what can hold no file."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/dev/null")
