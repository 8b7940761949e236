"""A run as a text for its user, in the form that operators know from seff and jobstats."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from effllm.records.job import Summary
from effllm.records.plain_text import one_line
from effllm.records.verdict import OF_GPUS
from effllm.store.summary_text import J_PER_KWH, duration, outcome, readable, value_of

MAX_LINES, WIDTH, BAR = 15, 78, 40
_NAMED = 4  # hosts


def mail_text(summary: Summary) -> str:
    """Return a text of at most `MAX_LINES` lines; the explanation of the verdict is cut if it is too long."""
    lines = [text[:WIDTH] for text in _lines(summary)]
    if (verdict := summary.verdict) is not None:
        following = _wrapped("Next", verdict.next, 2)
        lines += _wrapped("Verdict", verdict.text, 1)
        lines += [*_wrapped("Why", verdict.why, MAX_LINES - len(lines) - len(following)), *following]
    return "".join(f"{line}\n" for line in lines)


def _wrapped(name: str, text: str, count: int) -> list[str]:
    whole = f"{name}: {one_line(text)}" if text else ""
    return textwrap.wrap(whole, WIDTH, subsequent_indent="  ", max_lines=count, placeholder=" …") if count > 0 else []


def _lines(summary: Summary) -> Iterator[str]:
    job = [one_line(part) for part in (summary.job_id or summary.run_id, summary.job_name) if part]
    yield f"Job ID: {', '.join(job)}"
    users = {"User": summary.user, "account": summary.account, "partition": summary.partition}
    if text := ", ".join(f"{name}: {one_line(part)}" for name, part in users.items() if part):
        yield text
    simulated = " (SIMULATED: no hardware was measured)" * summary.simulated
    yield f"State: {outcome(one_line(summary.status))} after {duration(summary.elapsed_s)}{simulated}"
    hosts = [one_line(host) for host in summary.hosts]
    count = summary.host_count or len(hosts)
    names = ", ".join(hosts[:_NAMED]) + ", …" * (count > _NAMED)
    gpus = f"{summary.coverage.gpus_expected:,} GPUs" if summary.coverage.gpus_expected else "no GPUs"
    models = ", ".join(map(one_line, summary.gpu_models))
    if count:
        yield f"Nodes: {count:,} ({names}), {gpus}" + (f" ({models})" if models else "")
    for name, metric in (("GPUs busy", "pcu_ratio"), ("MFU", "mfu_ratio")):
        if summary.coverage.gpus_expected and (value := value_of(summary, metric)) is not None:
            yield _bar(name, value.value)
    if (memory := value_of(summary, "peak_gb")) is not None:
        yield f"Memory: at most {readable(memory.value)} GB on a device"
    found, energy = summary.waterfall, summary.energy.measured_joules
    if found is not None and found.unit == OF_GPUS:
        hours, wasted = (readable(seconds / 3600) for seconds in (found.device_seconds, found.avoidable_seconds))
        yield f"GPU-hours: {hours}, of which {wasted} were avoidable losses (parts: effllm inspect)"
    if energy is not None:
        watts = value_of(summary, "watts_per_gpu")
        mean = f", {readable(watts.value)} W per GPU" if watts is not None else ""
        yield f"Energy: {readable(energy / J_PER_KWH)} kWh{mean}"


def _bar(name: str, ratio: float) -> str:
    """Return a share as a bar.

    >>> _bar("MFU", 0.25)
    'MFU         [||||||||||                            25%]'
    """
    percent = f"{100 * ratio:.0f}%"
    filled = "|" * round(min(max(ratio, 0.0), 1.0) * BAR)
    return f"{name:<12}[{filled[: BAR - len(percent)]:<{BAR - len(percent)}}{percent}]"
