"""What is wrong with the settings, found before a job starts, when it can still be told loudly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from effllm.config import PREFIX, VARIABLES, Config, ConfigError, read_config, read_place, unknown_variables
from effllm.devices import device_names
from effllm.sinks import sink_names

_HERE = "this version reports over loopback alone: use tcp://127.0.0.1:PORT"


def problems(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that a run would not take, or would not do what it says."""
    found = list(_wrong_values(environ))
    if not found:
        found += map(str, _wrong_names(read_config(environ)))
    try:
        read_place(environ)
    except ConfigError as error:
        found.append(str(error))
    return found + unknown_variables(environ)


def _wrong_values(environ: Mapping[str, str]) -> Iterator[str]:
    for name in (PREFIX + variable.name for variable in VARIABLES):
        try:
            read_config({name: environ.get(name, "")})
        except ConfigError as error:
            yield str(error)


def _wrong_names(config: Config) -> Iterator[ConfigError]:
    devices, sinks = device_names(), sink_names()
    if config.device not in ("auto", *devices):
        allowed = f"there is no such device; there are: auto, {', '.join(devices)}"
        yield ConfigError(f"{PREFIX}DEVICE", config.device, allowed)
    for name in config.sinks:
        if name not in sinks:
            allowed = f"there is no sink {name!r}; there are: {', '.join(sinks)}"
            yield ConfigError(f"{PREFIX}SINKS", ",".join(config.sinks), allowed)
    if config.endpoint:
        from effllm.discovery import is_loopback  # only here: it would double the time this takes

        if not is_loopback(config.endpoint.removeprefix("tcp://").rpartition(":")[0]):
            yield ConfigError(f"{PREFIX}ENDPOINT", config.endpoint, _HERE)
