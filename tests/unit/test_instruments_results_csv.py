"""The CSV file of finished runs, and the values of a run folder."""

from __future__ import annotations

import csv
import fcntl
import json

import pytest

from effllm.instruments.results_csv import COLUMNS, OtherColumns, append_row
from effllm.instruments.run_results import read_results
from effllm.store import csv_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outputs" / "energy.csv"


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_first_row_creates_the_folder_and_the_header(path):
    append_row(path, {"model": "a", "seed": 1})
    append_row(path, {"model": "b", "seed": 2})

    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [(row["model"], row["seed"]) for row in rows(path)] == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        *((value, "") for value in (None, float("nan"), float("inf"), float("-inf"))),
        (0.0, "0"),
        (0, "0"),
        (-1.5, "-1.5"),
        ('r=32, "alpha"\n=32', 'r=32, "alpha" =32'),
        ("a\x1b[2J\x07b\x00", "a [2J b"),
        # text is never a formula of a spreadsheet
        *((text, f"'{text.strip()}") for text in ("=1+1", "+1", "-x", "@sum", "\t=1+1", "\r\n=1+1")),
    ],
)
def test_cell_of_a_value(path, value, cell):
    append_row(path, {"notes": value})

    assert len(path.read_text().splitlines()) == 2
    assert {name: text for name, text in rows(path)[0].items() if text} == ({"notes": cell} if cell else {})


@pytest.mark.parametrize("first", ["a,b", ",".join(reversed(COLUMNS)), ",".join([*COLUMNS, "more"]), "\x00", "\n"])
def test_file_with_other_columns_is_not_changed(path, first):
    path.parent.mkdir()
    path.write_text(f"{first}\n1,2\n")

    with pytest.raises(OtherColumns, match="has other columns"):
        append_row(path, {"model": "a"})

    assert path.read_text() == f"{first}\n1,2\n"


@pytest.mark.parametrize("start", ["\ufeff", ""])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_header_that_a_spreadsheet_saved_is_accepted(path, start, end):
    path.parent.mkdir()
    path.write_bytes(f"{start}{','.join(COLUMNS)}{end}".encode())

    append_row(path, {"model": "a"})

    assert path.read_text().splitlines()[-1].split(",")[11] == "a"


def test_unknown_key_of_a_row_is_rejected(path):
    with pytest.raises(OtherColumns, match="no column joules"):
        append_row(path, {"joules": 1.0})

    assert not path.exists()


def test_row_after_half_a_line_begins_a_new_line(path):
    append_row(path, {"model": "a"})
    with path.open("a") as file:
        file.write("1,2,3")  # the writer was killed

    append_row(path, {"model": "b"})

    assert path.read_text().splitlines()[2] == "1,2,3"
    assert rows(path)[2]["model"] == "b"


def test_failed_write_leaves_the_old_file(path, monkeypatch):
    append_row(path, {"model": "a"})
    before = path.read_bytes()
    write = csv_file.os.write

    def half(file, data):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(csv_file.os, "write", half)
    with pytest.raises(OSError, match="No space"):
        append_row(path, {"model": "b"})

    assert path.read_bytes() == before


def test_file_that_stays_locked_raises_an_error(path, monkeypatch):
    append_row(path, {"model": "a"})
    monkeypatch.setattr(csv_file, "LOCK_TIMEOUT_S", 0.05)

    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process has locked"):
            append_row(path, {"model": "b"})

    assert len(rows(path)) == 1


def test_folder_in_place_of_the_file_raises_an_error(path):
    path.mkdir(parents=True)

    with pytest.raises(IsADirectoryError):
        append_row(path, {"model": "a"})


# --- the values of a run folder ---


def run_folder(folder, *, run, job=None, gpus=1, not_measured=(), warming=(), is_over=True, events=(), torn=""):
    """Write the parts of a run folder that are read."""
    summary = {"status": "completed", "simulated": False, "elapsed_s": 30.0, "iterations": 20, "is_over": is_over}
    summary |= {"not_measured": list(not_measured), "coverage": {"gpus_expected": gpus}}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"attempt": 1, "window": i + 1, "warming_up": True, "last": {"time_s": time_s}}
        for i, time_s in enumerate(warming)
    ]
    lines.append({"attempt": 1, "window": len(lines) + 1, "last": {"time_s": 1.0}, "run": run, "job": job or run})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / "windows-0001.jsonl").write_text(text)
    events = [json.dumps({"kind": "agent", "text": text}) + "\n" for text in events]
    if torn:
        events.append(json.dumps({"kind": "agent", "text": torn})[:-9])
    (folder / "events.jsonl").write_text("".join(events))
    return folder


MEASURED = {"iterations": 10, "tokens": 2000, "time_s": 8.0, "energy_j": 400.0, "energy_time_s": 8.0}
MEASURED |= {"energy_tokens": 2000, "energy_complete": True, "power_peak_w": 60.0, "memory_mean_bytes": 3.0 * 2**30}


def changed(without="", **changes):
    """Return the sums of a run, without the values whose names contain a word."""
    return {name: value for name, value in {**MEASURED, **changes}.items() if not without or without not in name}


def test_values_of_a_run_are_computed_from_its_sums(tmp_path):
    job = {**MEASURED, "memory_peak_bytes": 4.0 * 2**30}

    results = read_results(run_folder(tmp_path, run=MEASURED, job=job, warming=(2.0, 0.5)))

    assert results.not_measured == []
    assert results.values == {
        "tokens_processed": 2000,
        "wall_s": 30.0,
        "warmup_s": 2.5,
        "energy_J": 400.0,
        "avg_power_W": 50.0,
        "peak_power_W": 60.0,
        "tok_per_s": 250.0,
        "J_per_token": 0.2,
        "E10k_J": 2000.0,
        "vram_peak_MB": 4096.0,
        "vram_avg_MB": 3072.0,
    }


NO_ENERGY = "energy: a part of the iterations has no measured energy"
NO_GPU = "rank 0: no device is sampled: there is no driver"
OF_DEVICES = ["rank 0 joined from a", NO_GPU, "rank 1: no device is sampled"]
GAPS = ["GPU: the driver is not loaded", "energy: no RAPL power sensor"]
#: Parts of a run folder, texts of its events, some of its values, and the reasons of missing values.
INCOMPLETE = {
    "energy gap": (
        {"run": changed("complete", energy_j=200.0, energy_time_s=4.0, energy_tokens=800)},
        {"energy_J": None, "avg_power_W": 50.0, "J_per_token": 0.25},
        [NO_ENERGY],
    ),
    "no tokens": (
        {"run": changed("tokens")},
        {"tokens_processed": None, "J_per_token": None, "E10k_J": None, "energy_J": 400.0, "tok_per_s": None},
        ["tokens: the training counted no tokens"],
    ),
    "no GPU": ({"run": changed(memory_peak_bytes=2.0**30), "gpus": 0}, {"vram_peak_MB": None, "vram_avg_MB": None}, []),
    "end in the warm-up": (
        {"run": {"power_histogram_s": {}}, "not_measured": ["energy: no sensor"]},
        {"tokens_processed": None},
        ["the run ended during its warm-up (20 iterations)"],
    ),
    "no device": ({"run": changed("energy"), "events": OF_DEVICES}, {"energy_J": None}, [f"energy: {NO_GPU}"]),
    "torn event": ({"run": changed("energy"), "torn": NO_GPU}, {"energy_J": None}, [NO_ENERGY]),
    "unreadable GPU": ({"run": changed("energy"), "not_measured": GAPS}, {"energy_J": None}, GAPS),
}


@pytest.mark.parametrize(("parts", "values", "reasons"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_missing_values_have_a_reason(tmp_path, parts, values, reasons):
    results = read_results(run_folder(tmp_path, **parts))

    assert {name: results.values.get(name) for name in values} == values
    assert results.not_measured == reasons


def test_torn_last_line_is_skipped(tmp_path):
    folder = run_folder(tmp_path, run=MEASURED)
    with (folder / "windows-0001.jsonl").open("a") as file:
        file.write('{"attempt":1,"window":9,"run":{"tokens":1},"job":{"tok')

    assert read_results(folder).values["tokens_processed"] == 2000


@pytest.mark.parametrize("name", ["summary.json", "windows-0001.jsonl"])
def test_unreadable_run_folder_gives_a_reason_and_no_values(tmp_path, name):
    (run_folder(tmp_path, run=MEASURED) / name).unlink()

    results = read_results(tmp_path)

    assert results.values == {}
    assert results.not_measured[0].startswith("the run folder cannot be read")


def test_run_that_has_not_ended_has_no_values(tmp_path):
    results = read_results(run_folder(tmp_path, run=MEASURED, is_over=False), within_s=0.05)

    assert results.values == {}
    assert results.not_measured == ["the summary of the run is not complete yet"]
