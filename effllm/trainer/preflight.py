"""What is wrong with the settings, found before a job starts, when an error is still seen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from effllm.config.place import read_place
from effllm.config.settings import (
    VARIABLES,
    Config,
    ConfigError,
    old_settings,
    read_config,
    secret_path,
    unknown_variables,
)
from effllm.config.switches import ATTACH, PREFIX, unclear
from effllm.devices import device_names
from effllm.devices.node import missing
from effllm.sinks import SinkUnavailable, no_such_sink, read_options, sink_names


def problems(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that a run would not take, or would not do what it says."""
    found = [str(error) for _, error in _wrong_values(environ)]
    found += [line] if (line := unclear(environ, ATTACH)) else []
    config = read_config(usable(environ))
    found += map(str, [*_wrong_names(config), *_wrong_folders(config)])
    try:
        read_place(environ)
    except ConfigError as error:
        found.append(str(error))
    return found + unknown_variables(environ)


def doubts(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that is wrong for a job on this host, which may be another than the job's."""
    config = read_config(usable(environ))
    found = []
    if config.interface:
        from effllm.network import interface  # only here: it would double the time this takes

        if not interface.is_here(config.interface):
            names = ", ".join(interface.names())
            found.append(
                f"{PREFIX}INTERFACE={config.interface!r}: this host has no such interface or address, and rank 0's "
                f"host needs one; here are: {names}"
            )
    if not Path(config.run_dir).is_absolute() and (reason := unwritable(Path(config.run_dir))):
        found.append(f"{PREFIX}RUN_DIR={config.run_dir!r}: {reason}, if the job starts in this folder")
    return found


def unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder, which need not exist yet; empty where one can."""
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"


def usable(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the settings that no run would take."""
    wrong = {name for name, _ in _wrong_values(environ)}
    return {name: value for name, value in environ.items() if name not in wrong}


def _wrong_values(environ: Mapping[str, str]) -> Iterator[tuple[str, ConfigError]]:
    yield from old_settings(environ)
    for name in (PREFIX + variable.name for variable in VARIABLES):
        try:
            read_config({name: environ.get(name, "")})
        except ConfigError as error:
            yield name, error


def _wrong_folders(config: Config) -> Iterator[ConfigError]:
    """Yield the absolute folders that cannot be written; where a relative one will be is not known yet."""
    charts = config.sink_options().get("tensorboard", {}).get("dir", "")
    for variable, folder in (("RUN_DIR", config.run_dir), ("SINKS", charts)):
        if Path(folder).is_absolute() and (reason := unwritable(Path(folder))):
            yield ConfigError(f"{PREFIX}{variable}", folder, reason)


def _wrong_names(config: Config) -> Iterator[ConfigError]:
    devices, sinks = device_names(), sink_names()
    if config.device not in ("auto", *devices):
        allowed = f"there is no such device; there are: auto, {', '.join(devices)}"
        yield ConfigError(f"{PREFIX}DEVICE", config.device, allowed)
    for name, options in config.sink_options().items():
        if name not in sinks:
            yield ConfigError(f"{PREFIX}SINKS", ",".join(config.sinks), no_such_sink(name))
        elif options or name not in Config().sinks:  # what those need is installed with effllm, and slow to import
            try:
                read_options(name, options)
            except SinkUnavailable as error:
                yield ConfigError(f"{PREFIX}SINKS", ",".join(config.sinks), str(error))
    if reason := missing(config.node_power):
        yield ConfigError(f"{PREFIX}NODE_POWER", config.node_power, reason)
    if config.endpoint:
        from effllm.network import discovery, secret  # only here: it would double the time this takes

        if discovery.is_secured(config):
            try:
                secret.read(secret_path(config))
            except secret.SecretError as error:
                yield ConfigError(f"{PREFIX}ENDPOINT", config.endpoint, str(error))
