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


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_unmeasured_value_is_written_as_an_empty_cell(path, value):
    append_row(path, {"energy_J": value})

    assert set(rows(path)[0].values()) == {""}


def test_measured_zero_is_written_as_zero(path):
    append_row(path, {"energy_J": 0.0, "warmup_s": 0})

    assert (rows(path)[0]["energy_J"], rows(path)[0]["warmup_s"]) == ("0", "0")


def test_text_with_commas_quotes_and_newlines_is_written_as_one_line(path):
    append_row(path, {"notes": 'r=32, "alpha"\n=32'})

    assert len(path.read_text().splitlines()) == 2
    assert rows(path)[0]["notes"] == 'r=32, "alpha" =32'


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


@pytest.mark.parametrize("text", ["=1+1", "+1", "-x", "@sum", "\t=1+1", "\r\n=1+1"])
def test_text_is_never_a_formula_of_a_spreadsheet(path, text):
    append_row(path, {"model": text, "energy_J": -1.5})

    assert rows(path)[0]["model"] == "'" + text.strip()
    assert rows(path)[0]["energy_J"] == "-1.5"


def test_control_characters_are_not_written(path):
    append_row(path, {"model": "a\x1b[2J\x07b\x00"})

    assert rows(path)[0]["model"] == "a [2J b"


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
    monkeypatch.setattr(csv_file, "LOCK_WITHIN_S", 0.05)

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


def run_folder(folder, *, run, job=None, gpus=1, not_measured=(), warming=(), is_over=True):
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
    return folder


MEASURED = {"iterations": 10, "tokens": 2000, "time_s": 8.0, "energy_j": 400.0, "energy_time_s": 8.0}
MEASURED |= {"energy_tokens": 2000, "energy_complete": True, "power_peak_w": 60.0, "memory_mean_bytes": 3.0 * 2**30}


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


def test_run_with_an_energy_gap_has_mean_power_and_no_total_energy(tmp_path):
    run = {**MEASURED, "energy_j": 200.0, "energy_time_s": 4.0, "energy_tokens": 800}
    del run["energy_complete"]

    results = read_results(run_folder(tmp_path, run=run))

    values = results.values
    assert (values["energy_J"], values["avg_power_W"], values["J_per_token"]) == (None, 50.0, 0.25)
    assert results.not_measured == ["energy: a part of the iterations has no measured energy"]


def test_run_without_tokens_has_energy_and_no_energy_per_token(tmp_path):
    run = {name: value for name, value in MEASURED.items() if "tokens" not in name}

    results = read_results(run_folder(tmp_path, run=run))

    values = results.values
    assert (values["tokens_processed"], values["J_per_token"], values["E10k_J"]) == (None, None, None)
    assert (values["energy_J"], values.get("tok_per_s")) == (400.0, None)
    assert results.not_measured == ["tokens: the training counted no tokens"]


def test_memory_of_a_process_is_not_reported_as_vram(tmp_path):
    results = read_results(run_folder(tmp_path, run={**MEASURED, "memory_peak_bytes": 2.0**30}, gpus=0))

    assert not {"vram_peak_MB", "vram_avg_MB"} & set(results.values)


def test_run_that_ends_in_its_warm_up_has_no_values_and_one_reason(tmp_path):
    results = read_results(run_folder(tmp_path, run={"power_histogram_s": {}}, not_measured=["energy: no sensor"]))

    assert results.not_measured == ["the run ended during its warm-up (20 iterations)"]
    assert results.values["tokens_processed"] is None


WITHOUT_ENERGY = {name: value for name, value in MEASURED.items() if "energy" not in name}


def test_reason_of_a_missing_device_is_the_text_of_its_event(tmp_path):
    texts = ["rank 0 joined from a", "rank 0: no device is sampled: there is no driver", "rank 1: no device is sampled"]
    lines = [json.dumps({"kind": "agent", "text": text}) + "\n" for text in texts]
    (tmp_path / "events.jsonl").write_text("".join(lines))

    results = read_results(run_folder(tmp_path, run=WITHOUT_ENERGY))

    assert results.not_measured == ["energy: rank 0: no device is sampled: there is no driver"]


def test_general_reason_is_given_if_the_event_is_torn(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "agent", "text": "rank 0: no device is sampled: there')

    results = read_results(run_folder(tmp_path, run=WITHOUT_ENERGY))

    assert results.not_measured == ["energy: a part of the iterations has no measured energy"]


def test_unreadable_gpu_is_listed_as_the_first_reason(tmp_path):
    gaps = ["GPU: the driver is not loaded", "energy: no RAPL power sensor"]

    results = read_results(run_folder(tmp_path, run=WITHOUT_ENERGY, not_measured=gaps))

    assert results.not_measured == gaps


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
