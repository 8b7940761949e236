"""``effllm top`` on a terminal: a real process on a pseudo terminal, with the keys and signals of a user."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from cases import cases
from terminal_screen import TerminalScreen

from effllm.commands.top_folder import FolderSource


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the folder of a finished run of four ranks, of which rank 3 is slow."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "effllm", "demo", "--iterations", "120", "--log-interval", "4"]
    subprocess.run([*command, "--run-dir", folder], check=True, capture_output=True, timeout=100)
    [run] = folder.iterdir()
    return run


def worst_of(run):
    """Return the worst rank of a finished run: which rank is named depends on the load of the machine."""
    source = FolderSource(run)
    source.refresh()
    return source.frame(0.0).ranks.lines_with_reason()[0]


@pytest.fixture
def top():
    """Return a function that starts ``effllm top`` on a terminal, and waits until it shows a run."""
    started = []

    def start(*arguments, shows="q quit", **options):
        screen = TerminalScreen("top", *arguments, **options)
        started.append(screen)
        if shows:
            screen.shows(shows)
        return screen

    yield start
    for one in started:
        one.close()


HELP = "5 % of the run back or forward"


def ends(screen):
    screen.press("q")
    assert screen.ended() == 0


def test_screen_of_80_columns_has_verdict_values_and_the_worst_rank_first(top, demo):
    lines = top(demo).lines

    assert lines[0].startswith(f"{demo.name}  completed  SIMULATED  it 120/120  ranks 4")
    assert [line.split()[0] for line in lines[1:4]] == ["Verdict", "Why", "Next"]
    first = lines[next(at for at, line in enumerate(lines) if line.startswith("  rank")) + 1]
    worst = worst_of(demo)
    assert (first.split()[0], worst.text[:20] in first) == (str(worst.rank), True)


def test_resized_terminal_is_filled_again(top, demo):
    screen = top(demo)
    screen.resize(200, 60)
    screen.shows("event, newest first")
    assert "degC" in screen.text and len(screen.lines) == 60
    screen.resize(60, 20)
    jobs.until(lambda: "event, newest first" not in screen.text and "rank" in screen.text)

    assert screen.lines[0].startswith(demo.name)
    ends(screen)


def test_keys_show_panes_hosts_and_a_filter(top, demo):
    screen = top(demo)
    for keys, text in (
        ("w", "gain: maximum gain"),
        ("e", "event, newest first"),
        ("?", HELP),
        ("g", f" of 4: rank {worst_of(demo).rank}"),
        (("g", "/", *"no such rank", "\r"), "filter: no such rank  (Esc clears)"),
        ((), "no rank contains the filter"),
        ("\x1b", worst_of(demo).text[:20]),
    ):
        screen.press(*keys)
        screen.shows(text)
    jobs.until(lambda: "filter" not in screen.text.replace("/ filter", ""))


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signal_restores_the_terminal(top, demo, how, status):
    screen = top(demo, term="xterm", shows="")
    jobs.until(lambda: b"q quit" in screen.sent)
    assert not screen.is_restored
    screen.process.send_signal(how)

    assert screen.ended() == status
    jobs.until(lambda: screen.sent.endswith(b"\x1b[?1l\x1b>"))
    assert {b"\x1b[?1049h", b"\x1b[?1049l"} <= set(re.findall(rb"\x1b\[\?1049[hl]", screen.sent)), "the other screen"
    assert screen.is_restored


def test_ctrl_z_restores_the_terminal_until_the_process_continues(top, demo):
    shell = ("bash", "-c", 'set -m; "$@"; echo stopped; read -r line; fg > /dev/null; echo ended', "bash")
    screen = top(demo, command=(*shell, sys.executable, "-m", "effllm"))
    screen.press("\x1a")
    screen.shows("stopped")
    assert screen.is_restored
    screen.press("\n")
    jobs.until(lambda: "stopped" not in screen.text and "q quit" in screen.text)
    screen.press("?")
    screen.shows(HELP)
    screen.press("q")
    screen.shows("ended")


def test_exception_restores_the_terminal(top, demo, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import effllm.views.top.screen as screen\n"
        "def render(*_, **__): raise ZeroDivisionError('a defect')\n"
        "screen.render = render\n"
    )
    screen = top(demo, shows="ZeroDivisionError: a defect", PYTHONPATH=str(tmp_path))

    assert (screen.ended(), screen.is_restored) == (1, True)


@pytest.mark.parametrize("term", ["dumb", "unknown-terminal"])
def test_terminal_without_cursor_gets_plain_lines(top, demo, term):
    screen = top(demo, term=term, shows="Verdict")

    assert (screen.ended(), b"\x1b" in screen.sent) == (0, False)
    screen.shows("rank host")


def test_locale_without_unicode_gets_ascii(top, demo):
    screen = top(demo, LANG="C", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")

    assert bytes(screen.sent).isascii()


def test_idle_screen_sends_nothing(top, demo):
    screen = top(demo)
    sent = len(screen.sent)
    screen.press("x")  # no command: the screen stays as it is, after at least one further frame
    screen.press("?")
    screen.shows(HELP)
    screen.press("?")
    screen.shows("rank host")

    assert len(screen.sent) - sent < 4000


def test_disk_that_does_not_answer_is_reported_and_keys_still_work(top, demo, tmp_path):
    waits = tmp_path / "waits"
    waits.touch()
    slow = {"PYTHONPATH": str(jobs.SCRIPTS / "slow_disk"), "TESTS_SLOW_WHILE": str(waits)}
    screen = top(demo, shows="no answer for", **slow)
    waits.unlink()
    screen.shows("q quit")
    waits.touch()
    screen.shows("no answer for")
    screen.press("?")
    screen.shows(HELP)
    screen.press("?", "home")
    waits.unlink()
    screen.shows("window 1  0 %")
    assert "no answer" not in screen.text
    waits.touch()
    screen.shows("no answer for")
    ends(screen)


def test_running_job_is_followed_to_its_end(top, cli, tmp_path):
    job = cli.start("demo", "--iterations", "400", "--step-seconds", "0.02", "--run-dir", str(tmp_path / "runs"))
    jobs.until(lambda: list((tmp_path / "runs").glob("*/windows-0001.jsonl")))
    screen = top(*(tmp_path / "runs").iterdir(), shows="running")
    iteration = re.compile(r"  it (\d+)/400")
    first = int(jobs.until(lambda: iteration.search(screen.text))[1])
    jobs.until(lambda: int(iteration.search(screen.text)[1]) > first)
    screen.shows("it 400/400")
    screen.shows("completed")
    jobs.until(lambda: "Verdict" in screen.text and "none yet" not in screen.text)  # a frame is drawn line by line
    assert job.wait(60) == 0
    ends(screen)


def test_folder_of_runs_shows_its_running_jobs_and_enter_opens_one(top, cli, tmp_path):
    job = cli.start("demo", "--iterations", "2000", "--step-seconds", "0.02", "--run-dir", str(tmp_path / "runs"))
    jobs.until(lambda: list((tmp_path / "runs").glob("*/run.json")))
    screen = top(tmp_path / "runs", shows="1 running jobs")
    for _ in range(2):
        screen.press("enter")
        screen.shows("space replay")
        screen.press("q")
        screen.shows("enter opens the job")
    descriptors = Path(f"/proc/{screen.process.pid}/fd").iterdir()
    assert sum(str(one.readlink()).startswith("pipe:") for one in descriptors) == 2  # the ends of one pipe
    job.terminate()
    job.wait(60)
    screen.shows("no job is running")
    ends(screen)


# --- for scripts ---------------------------------------------------------------------------------


def test_json_of_a_completed_run_has_the_values_of_its_summary(cli, demo):
    done = cli.run("top", str(demo), "--once", "--json")

    found = json.loads(done.stdout)
    summary = json.loads((demo / "summary.json").read_text())
    assert done.returncode == 0
    assert found["run"]["run_id"] == summary["run_id"]
    assert found["verdict"]["cause"] == summary["verdict"]["cause"]
    assert found["values"]["energy/total_joules"] == pytest.approx(summary["energy"]["total_joules"], rel=1e-9)
    assert found["ranks"]["worst"][0]["rank"] == worst_of(demo).rank


def test_output_that_is_no_terminal_is_one_frame(cli, demo):
    done = cli.run("top", str(demo))

    assert (done.returncode, "\x1b" in done.stdout, "q quit" in done.stdout) == (0, False, False)
    verdict = json.loads((demo / "summary.json").read_text())["verdict"]["text"]
    assert done.stdout.splitlines()[1].startswith(f"Verdict  {verdict}")


@cases(
    ("arguments", "status"),
    [
        (["--json"], 2),
        (["--colour"], 2),
        (["RUN", "--endpoint", "http://127.0.0.1:1"], 2),
        (["--token-file", "x"], 2),
        (["missing", "--once"], 1),
        (["--endpoint", "http://127.0.0.1:1/metrics", "--once"], 3),
        (["--endpoint", "ftp://127.0.0.1", "--once"], 3),
    ],
)
def test_exit_status_of_wrong_use_and_of_missing_runs(cli, arguments, status):
    done = cli.call("top", *arguments)

    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("effllm top: ")
    assert done.stderr.count("\n") == 1
