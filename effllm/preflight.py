"""What is wrong with the settings, found before a job starts, when it can still be told loudly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from effllm.config import VARIABLES, Config, ConfigError, Place, read_config, read_place, secret_path, unknown_variables
from effllm.devices import device_names
from effllm.sinks import sink_names
from effllm.switches import PREFIX


def problems(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that a run would not take, or would not do what it says."""
    found = [str(error) for _, error in _wrong_values(environ)]
    found += map(str, _wrong_names(read_config(usable(environ))))
    try:
        read_place(environ)
    except ConfigError as error:
        found.append(str(error))
    return found + unknown_variables(environ)


def usable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the settings that no run would take."""
    wrong = {name for name, _ in _wrong_values(environ)}
    return {name: value for name, value in environ.items() if name not in wrong}


def _wrong_values(environ: Mapping[str, str]) -> Iterator[tuple[str, ConfigError]]:
    for name in (PREFIX + variable.name for variable in VARIABLES):
        try:
            read_config({name: environ.get(name, "")})
        except ConfigError as error:
            yield name, error


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
        from effllm.network import discovery, secret  # only here: it would double the time this takes

        if discovery.is_secured(config, Place()):
            try:
                secret.read(secret_path(config))
            except secret.SecretError as error:
                yield ConfigError(f"{PREFIX}ENDPOINT", config.endpoint, str(error))
