"""Measure the behaviour of the sensors of one GPU.

The GPU is first idle. Then torch loads the GPU with matrix products that are switched on and off. The results are
the period and the lag of the energy counter and of the power reading, the share of each period that the sensor
measures, and the duration of a read. Later runs on this model and driver use these results. The report has no host,
user or serial number and can be published.

No other program should use the GPU during the measurement. Without torch and CUDA, only the idle GPU is measured.

\b
Examples:
  effllm profile
  effllm profile --device 3 --seconds 120
  effllm profile --save h100.json               # a file to send to us

Exit status: 0 profile complete, 1 report not written, 2 no readable GPU or wrong use, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import asdict
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table

from effllm import sensor_profile as profiling
from effllm.commands.output import complain
from effllm.config.settings import Config, cache_folder, read_config
from effllm.config.switches import process_environ
from effllm.devices import DeviceUnavailable, Reader, Site, open_named_or_any_gpu
from effllm.energy import calibration
from effllm.sensor_profile.load import TorchLoad
from effllm.sensor_profile.nvml_facts import Facts
from effllm.sensor_profile.record import DriverCall, Response, Rhythm, SensorProfile
from effllm.trainer.preflight import without_wrong_values

_STAGES = {
    "idle": "the idle GPU",
    "calls": "the duration of driver calls",
    "load": "the GPU under load",
    "estimates": "the estimates",
}
_ADVICE = "install torch with CUDA in this environment and profile again"


def main(
    device: Annotated[
        str, typer.Option(metavar="GPU", help="UUID or PCI-order index of the GPU. [default: first visible GPU]")
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=10.0, max=600.0, metavar="S", help="Duration of the measurement in seconds.")
    ] = 60.0,
    save: Annotated[str, typer.Option(metavar="FILE", help="Write the report to this file, as JSON.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Profile one GPU and print the report; return the exit status."""
    if save and (not Path(save).absolute().parent.is_dir() or Path(save).is_dir()):
        return complain("profile", f"--save {save}: not a file in an existing folder", 2)
    try:
        reader = _open_gpu(read_config(without_wrong_values(process_environ())), device)
    except DeviceUnavailable as error:
        return complain("profile", f"no GPU can be read: {error}", 2)
    try:
        profile = _profile_with_progress(reader, seconds)
    except KeyboardInterrupt:
        return complain("profile", "stopped; no results are stored", 130)
    finally:
        reader.close()
    stored = profiling.to_calibration(profile)
    if stored is not None:
        calibration.store(cache_folder() / "calibration", stored)
    # Here the sensor is an object with named fields, but in messages it is an array.
    plain = msgspec.to_builtins(profile) | {"sensor": asdict(profile.sensor)}
    text = msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"
    if save:
        try:
            Path(save).write_text(text)
        except OSError as error:
            return complain("profile", f"--save {save}: {error.strerror}", 1)
    if as_json:
        print(text, end="")
    else:
        console = Console(highlight=False)
        for part in _report_parts(profile, save):
            console.print(part)
    return 0


def _open_gpu(config: Config, device: str) -> Reader:
    """Open a GPU; `DeviceUnavailable` without one, or if the configured device is not a GPU."""
    visible = device or process_environ().get("CUDA_VISIBLE_DEVICES")
    reader = open_named_or_any_gpu(config.device, Site(visible_devices=visible))
    if reader.device.is_gpu and not reader.device.simulated:
        return reader
    kind = reader.device.kind
    reader.close()
    raise DeviceUnavailable(f"device {kind!r} is no GPU; unset EFFICIENTLLM_DEVICE, or set it to nvml or amd")


def _profile_with_progress(reader: Reader, seconds: float) -> SensorProfile:
    columns = (SpinnerColumn(), TextColumn("{task.description:<20}"), BarColumn())
    is_nvidia = reader.device.kind == "nvml"
    facts = Facts(reader.device.key) if is_nvidia else None
    load = TorchLoad(reader.device.key if is_nvidia else None)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
            tasks = {stage: progress.add_task(words, total=1.0) for stage, words in _STAGES.items()}

            def show(stage: str, share: float) -> None:
                progress.update(tasks[stage], completed=share)

            return profiling.profile(reader, load.opened, seconds, facts=facts, progress=show)
    finally:
        load.close()
        if facts is not None:
            facts.close()


def _report_parts(profile: SensorProfile, save: str) -> Iterator[Table | str]:
    board = profile.board
    limit = "" if board.power_limit_w is None else f", limit {board.power_limit_w:.0f} W"
    yield f"[bold]{escape(board.name)}[/], driver {escape(board.driver)}{limit} [dim](GPU {board.uuid})[/]"
    yield ""
    yield facts_table(_sensor_rows(profile))
    yield ""
    yield _calls_table(profile.calls)
    yield ""
    if profile.load:
        yield f"[dim]{escape(f'Load: {profile.load}, {profile.edges} edges.')}[/]"
    for line in profile.unmeasured:
        yield f"[yellow]Not measured:[/] {escape(line)}"
    if not profile.load:
        yield f"To measure more, {_ADVICE}."
    for line in profile.warnings:
        yield f"[bold red]Warning:[/] {escape(line)}"
    if profiling.to_calibration(profile) is not None:
        yield "Stored: later runs on this model and driver use this result."
    yield f"The report is in {escape(save)}." if save else "To send us the report: effllm profile --save FILE"


def facts_table(rows: list[tuple[str, list[str]]]) -> Table:
    """Return names with their lines as a table."""
    table = Table.grid(Column(no_wrap=True, style="cyan"), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, lines in rows:
        table.add_row(name, escape("\n".join(lines)))
    return table


def _sensor_rows(facts: SensorProfile) -> list[tuple[str, list[str]]]:
    sensor = facts.sensor
    held = ""
    if facts.power_is_held is not None:
        held = "not held: readings are independent of the counter's ticks"
    if facts.power_is_held:
        held = "held: a reading is the power of the counter's last tick"
    gain = f"± {100 * sensor.gain_error:.1f} % of each reading; only a comparison with a second meter shows this error"
    average = [_rhythm_text(facts.average, "changes"), _averaging_text(facts.average_response)] if facts.average else []
    rows = [
        ("energy counter", [_rhythm_text(facts.counter, "moves"), _lag_text(facts), _measured_share_text(facts)]),
        ("power", [_rhythm_text(facts.power, "changes"), _averaging_text(facts.power_response), held]),
        ("averaged power", average),
        ("gain", [gain]),
    ]
    return [(name, [line for line in lines if line]) for name, lines in rows if any(lines)]


def _rhythm_text(rhythm: Rhythm | None, verb: str) -> str:
    if rhythm is None:
        return "no period was found"
    if not rhythm.period_s:
        return f"{verb} continuously"
    jitter = f", jitter {1e3 * rhythm.jitter_s:.1f} ms" if rhythm.jitter_s > 5e-4 else ""
    return f"{verb} every {1e3 * rhythm.period_s:.2f} ms{jitter}"


def _lag_text(profile: SensorProfile) -> str:
    sensor = profile.sensor
    if not profile.measured_lag:
        return f"lag unknown: {1e3 * sensor.lag_s:.0f} ± {1e3 * sensor.lag_error_s:.0f} ms is assumed"
    return f"lag {1e3 * sensor.lag_s:.1f} ± {1e3 * sensor.lag_error_s:.1f} ms"


def _measured_share_text(profile: SensorProfile) -> str:
    response, rhythm, duty = profile.counter_response, profile.counter, profile.sensor.duty
    if rhythm is None or not rhythm.period_s:
        return ""
    if response is None:
        return "the measured share of each tick is unknown" + (f": {100 * duty:.0f} % is assumed" if duty < 1 else "")
    if duty == 1.0:
        return "measures during the whole tick"
    window_ms, error_ms = 1e3 * response.window_s, 1e3 * response.window_error_s
    return f"measures {window_ms:.1f} ± {error_ms:.1f} ms of each tick, until {_end_text(response)}"


def _averaging_text(response: Response | None) -> str:
    if response is None:
        return ""
    window_ms, error_ms = 1e3 * response.window_s, 1e3 * response.window_error_s
    return f"mean over {window_ms:.1f} ± {error_ms:.1f} ms, until {_end_text(response)}"


def _end_text(response: Response) -> str:
    """Return the end of the period that a value measures, relative to the update of the sensor's value."""
    if abs(response.ends_s) <= response.middle_error_s + response.window_error_s / 2:
        return "the sensor updates its value"
    return f"{1e3 * response.ends_s:.1f} ms before the sensor updates its value"


def _calls_table(calls: list[DriverCall]) -> Table:
    table = Table.grid("", Column(justify="right"), Column(justify="right"), padding=(0, 3, 0, 0))
    table.add_row("[cyan]call[/]", "[cyan]median[/]", "[cyan]worst[/]")
    for call in calls:
        table.add_row(escape(call.name), f"{1e3 * call.median_s:.3f} ms", f"{1e3 * call.worst_s:.3f} ms")
    return table
