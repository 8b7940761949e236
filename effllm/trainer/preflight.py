"""Errors in the settings, found before a job starts, while a user still reads the output."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from effllm.config.place import read_place
from effllm.config.settings import VARIABLES, Config, ConfigError, read_config, secret_path, unknown_variables
from effllm.config.switches import ATTACH, PREFIX, invalid_switch_error
from effllm.devices import device_names
from effllm.devices.node import missing_package
from effllm.sinks import SinkUnavailable, no_such_sink, read_options, sink_names


def problems(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that is invalid, unknown or impossible on this host."""
    lines = [str(error) for _, error in _wrong_values(environ)]
    lines += [line] if (line := invalid_switch_error(environ, ATTACH)) else []
    config = read_config(without_wrong_values(environ))
    lines += map(str, [*_wrong_names(config), *_wrong_folders(config)])
    try:
        read_place(environ)
    except ConfigError as error:
        lines.append(str(error))
    return lines + unknown_variables(environ)


def doubts(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each setting that is wrong if the job runs on this host; the job may run on another host."""
    config = read_config(without_wrong_values(environ))
    lines = []
    if config.interface:
        from effllm.network import interface  # imported only if needed: this import takes as long as all other checks

        if not interface.is_on_this_host(config.interface):
            names = ", ".join(interface.interface_names())
            lines.append(
                f"{PREFIX}INTERFACE={config.interface!r}: this host has no such interface or address, and rank 0's "
                f"host needs it; interfaces of this host: {names}"
            )
    if not Path(config.run_dir).is_absolute() and (reason := why_unwritable(Path(config.run_dir))):
        lines.append(
            f"{PREFIX}RUN_DIR={config.run_dir!r} is relative: if the job starts in the current folder, {reason}"
        )
    return lines


def why_unwritable(folder: Path) -> str:
    """Return the reason why a folder cannot be written, else an empty string; a missing folder is allowed."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"


def without_wrong_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without invalid settings."""
    wrong = {name for name, _ in _wrong_values(environ)}
    return {name: value for name, value in environ.items() if name not in wrong}


def _wrong_values(environ: Mapping[str, str]) -> Iterator[tuple[str, ConfigError]]:
    for name in (PREFIX + variable.name for variable in VARIABLES):
        try:
            read_config({name: environ.get(name, "")})
        except ConfigError as error:
            yield name, error


def _wrong_folders(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each absolute folder that cannot be written; a relative folder depends on the job's folder."""
    charts = config.sink_options().get("tensorboard", {}).get("dir", "")
    for variable, folder in (("RUN_DIR", config.run_dir), ("SINKS", charts)):
        if Path(folder).is_absolute() and (reason := why_unwritable(Path(folder))):
            yield ConfigError(f"{PREFIX}{variable}", folder, reason)


def _wrong_names(config: Config) -> Iterator[ConfigError]:
    devices, sinks = device_names(), sink_names()
    if config.device not in ("auto", *devices):
        allowed = f"there is no such device; available devices: auto, {', '.join(devices)}"
        yield ConfigError(f"{PREFIX}DEVICE", config.device, allowed)
    for name, options in config.sink_options().items():
        if name not in sinks:
            yield ConfigError(f"{PREFIX}SINKS", ",".join(config.sinks), no_such_sink(name))
        elif options or name not in Config().sinks:  # packages of default sinks are installed, but slow to import
            try:
                read_options(name, options)
            except SinkUnavailable as error:
                yield ConfigError(f"{PREFIX}SINKS", ",".join(config.sinks), str(error))
    if reason := missing_package(config.node_power):
        yield ConfigError(f"{PREFIX}NODE_POWER", config.node_power, reason)
    if config.endpoint:
        from effllm.network import discovery, secret  # imported only if needed, as above

        if discovery.is_secured(config):
            try:
                secret.read(secret_path(config))
            except secret.SecretError as error:
                yield ConfigError(f"{PREFIX}ENDPOINT", config.endpoint, str(error))
