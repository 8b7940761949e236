"""``effllm inspect RUN --stacks FILE``: the recorded stacks as lines for flamegraph.pl and speedscope."""

import msgspec
import pytest
import typer

from effllm.commands import inspect
from effllm.records.host_lines import RecordedStacks
from effllm.records.job import SCHEMA_VERSION
from effllm.store.run_folder import RunFolder


def recorded(rank, version=SCHEMA_VERSION, **stacks):
    found = {name.replace("_", ";"): count for name, count in stacks.items()}
    line = RecordedStacks(version, 1.0e9, rank, 1, sum(found.values()), 0, found)
    return msgspec.json.encode(line).decode() + "\n"


def test_samples_of_all_recordings_are_added_by_rank(tmp_path, capsys):
    (tmp_path / "stacks.jsonl.1").write_text(recorded(0, data_load=5))
    (tmp_path / "stacks.jsonl").write_text(recorded(0, data_load=3, other_step=2) + recorded(3, data_load=1))

    assert inspect.main(tmp_path, as_json=False, mail=False, stacks=tmp_path / "job.folded") == 0
    assert (tmp_path / "job.folded").read_text() == "rank 0;data;load 8\nrank 0;other;step 2\nrank 3;data;load 1\n"
    assert capsys.readouterr().out == f"{tmp_path}/job.folded: 11 samples of 2 ranks\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "stacks.jsonl: No such file or directory; docs/lines-of-code.md has what is needed"),
        ("{\n", "stacks.jsonl has no stacks"),
        (recorded(0, version=1, data_load=5), "stacks.jsonl cannot be read: "),
    ],
)
def test_file_that_cannot_be_read_is_refused_with_one_line(tmp_path, capsys, content, problem):
    if content is not None:
        (tmp_path / "stacks.jsonl").write_text(content)

    assert inspect.main(tmp_path, as_json=False, mail=False, stacks=tmp_path / "job.folded") == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "job.folded").exists()


def test_lines_that_cannot_be_read_are_counted_and_the_others_are_written(tmp_path, capsys):
    (tmp_path / "stacks.jsonl").write_text(recorded(0, data_load=3)[:20] + "\n" + recorded(1, data_load=1))

    assert inspect.main(tmp_path / "summary.json", as_json=False, mail=False, stacks=tmp_path / "job.folded") == 0
    assert (tmp_path / "job.folded").read_text() == "rank 1;data;load 1\n"
    assert "stacks.jsonl: 1 line cannot be read" in capsys.readouterr().err


def test_json_and_stacks_are_two_forms(tmp_path):
    with pytest.raises(typer.BadParameter, match="--json and --stacks are two forms"):
        inspect.main(tmp_path, as_json=True, mail=False, stacks=tmp_path / "job.folded")


def test_recordings_have_at_most_a_megabyte_and_the_newest_are_kept(tmp_path):
    folder = RunFolder(tmp_path / "run", {}, warn=pytest.fail)
    for rank in range(100):
        folder.write_recorded_stacks([RecordedStacks(SCHEMA_VERSION, 1.0e9, rank, 1, 1, 0, {"x" * 30_000: 1})])
    folder.close()

    files = [tmp_path / "run" / name for name in ("stacks.jsonl.1", "stacks.jsonl")]
    ranks = [msgspec.json.decode(line)["rank"] for one in files for line in one.read_bytes().splitlines()]
    assert sum(one.stat().st_size for one in files) <= 2**20
    assert ranks == list(range(ranks[0], 100)) and len(ranks) > 15
    assert all(one.stat().st_mode & 0o777 == 0o600 for one in files)
