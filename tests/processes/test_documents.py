"""Documents agree with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import code_blocks
import code_report
import pytest
import run_folder_page
import systems
import yaml
from cases import cases
from run_folder_page import COLUMNS, GOLDEN, PAGE

import effllm
from effllm import instruments
from effllm.config.settings import ALL_VARIABLES
from effllm.instruments import metrics, profiling
from effllm.metrics import METRICS
from effllm.records.events import KINDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("integration/**/*.md")])


def name(document):
    return str(document.relative_to(ROOT))


def test_configuration_page_contains_the_tables_of_effllm_env(cli):
    """After a change, copy the output of ``effllm env --markdown``."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    tables = cli.run("env", "--markdown").stdout.strip().split("\n\n## ")

    assert [table for table in tables if f"\n\n## {table.removeprefix('## ').strip()}\n\n" not in page] == []
    assert [one.name for one in ALL_VARIABLES if f"| `{one.name}` | " not in "".join(tables)] == []


def test_metrics_page_lists_every_metric_of_a_group():
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name, entry in METRICS.items() if entry.group and f"`{name}`" not in page] == []


def test_events_page_ends_with_the_table_of_its_kinds(cli):
    """After a change, copy the output of ``effllm explain --markdown``."""
    page = (ROOT / "docs" / "events.md").read_text()
    table = cli.run("explain", "--markdown").stdout

    assert page.endswith(f"\n\n{table}")
    assert [name for name in KINDS if f"| `{name}` |" not in table] == []


def test_links_to_headings_are_valid():
    for document in DOCUMENTS:
        for page, heading in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text()):
            target = document.parent / page if page else document
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings], document


def test_links_to_files_are_valid():
    links = [
        (document, link)
        for document in DOCUMENTS
        for link in re.findall(r"\]\(([^)#\s]+)", document.read_text())
        if "://" not in link
    ]
    assert [(name(document), link) for document, link in links if not (document.parent / link).exists()] == []


#: Documents whose ``python`` blocks are examples with expected values, in the tests below.
RUN_BELOW = {"docs/instruments.md", "docs/run-folder.md"}
#: Documents with ``py`` blocks, which are compiled, and the reason why these blocks cannot run.
NOT_RUN = {
    "docs/instruments.md": "the blocks belong into a training with GRPO, and into a script with its own loop",
    "docs/stragglers.md": "the call belongs into the loop of a job with several ranks",
    "integration/energy_callback/README.md": "the Trainer of the user; train.py beside it runs in tests/frameworks",
    "integration/generate/README.md": "the model of the user; generate.py beside it runs in tests/frameworks",
    "integration/megatron_core/README.md": "the loop of the user; train.py beside it runs in test_megatron_core.py",
    "integration/sft_play/README.md": "the rows of the user; test_token_counter.py runs the collator",
}
BLOCKS = [block for document in DOCUMENTS for block in code_blocks.blocks(document)]


def blocks(*languages):
    return [block for block in BLOCKS if block.language in languages]


def test_fences_have_a_language_and_lists_have_four_spaces():
    """Markdown of the repository's host and of the site differ: nested lists and fences need four spaces."""
    assert [str(block) for block in BLOCKS if block.language not in code_blocks.LANGUAGES] == []
    texts = {name(one): re.sub(r"^```.*?^```", "", one.read_text(), flags=re.M | re.S) for one in DOCUMENTS}
    assert [(one, line) for one in texts for line in re.findall(r"^ {2,3}(?:[-*] |```).*$", texts[one], re.M)] == []


def test_commands_options_and_files_of_a_shell_block_exist():
    shell = blocks(*code_blocks.SHELL)
    assert [(str(block), text) for block in shell for text in code_blocks.problems_of_shell(block.code)] == []
    for block in shell:
        assert subprocess.run(["bash", "-n"], input=block.code, text=True, check=False).returncode == 0, str(block)


def test_settings_and_commands_in_the_text_exist():
    """Dated decisions may name settings and commands of their time."""
    current = [document for document in DOCUMENTS if document.parent.name != "decisions"]
    assert [(name(one), text) for one in current for text in code_blocks.problems_of_prose(one.read_text())] == []


def test_names_of_effllm_in_a_python_block_exist():
    python = blocks("py", "python")
    assert [(str(block), text) for block in python for text in code_blocks.problems_of_python(block.code)] == []


def test_data_block_can_be_read():
    for block in blocks("json", "yaml"):
        assert (json.loads if block.language == "json" else yaml.safe_load)(block.code), str(block)


def test_python_block_runs_or_has_a_reason(tmp_path):
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "EFFICIENTLLM_DEVICE": "simulated"}
    for block in blocks("py", "python"):
        page = name(block.document)
        if block.language == "py":
            assert NOT_RUN[page]
        elif page not in RUN_BELOW:
            command = [sys.executable, "-c", block.code]
            done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stderr) == (0, ""), str(block)


def test_every_page_is_in_the_navigation_of_the_site():
    """Add a new page to ``nav`` of mkdocs.yml; ``make docs`` checks that the pages of ``nav`` exist."""
    navigation = set(re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {page for page in pages if not page.startswith("docs/decisions/")} - navigation == set()


def test_api_page_describes_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    names = [f"effllm.{name}" for name in dir(effllm) if name != "__version__"]
    names += [f"effllm.instruments.{name}" for name in instruments._HOMES]
    names += [
        f"effllm.instruments.{one.__name__.rpartition('.')[2]}.{name}"
        for one in (profiling, metrics)
        for name in one.__all__
    ]
    assert [name for name in names if f"heading: {name}\n" not in page and f"### {name}\n" not in page] == []


def test_systems_page_is_generated_from_test_results():
    assert (ROOT / "docs" / "systems.md").read_text() == systems.page()


def test_code_and_documents_contain_no_old_word():
    """docs/words.md has the words."""
    assert [name for name in code_report.PROSE if code_report.old_words(ROOT / name)] == []


INSTRUMENTS = (ROOT / "docs" / "instruments.md").read_text()
SECTIONS = {section.split("\n")[0]: section for section in INSTRUMENTS.split("\n## ")[1:]}
EXAMPLES = {
    title: example for title, section in SECTIONS.items() for example in re.findall(r"```python\n([^`]*)```", section)
}


def test_every_python_block_of_the_page_is_run_as_an_example():
    assert len(EXAMPLES) == INSTRUMENTS.count("```python\n") == 8


@pytest.mark.parametrize("title", EXAMPLES)
def test_example_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[title], title, "exec"), {"__name__": "example"})


@cases("name", sorted({*profiling.__all__, *metrics.__all__} - {"MemoryTrend"}))
def test_page_describes_every_instrument(name):
    assert f"`{name}`" in INSTRUMENTS or f"`{name}()`" in INSTRUMENTS


def test_each_fault_of_the_page_has_a_test_and_each_mark_a_row():
    page = (ROOT / "docs" / "reliability.md").read_text()
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marks = [names for source in sources for names in re.findall(r"mark\.fault\(([^)]*)\)", source)]

    assert set(re.findall(r"\| `([\w-]+)` \|$", page, re.MULTILINE)) == set(re.findall(r'"([\w-]+)"', " ".join(marks)))


def code_of_run_folder(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_tables_of_the_page_are_the_columns_of_the_relations():
    assert PAGE.read_text() == run_folder_page.page(), "run: python tests/run_folder_page.py"
    run = effllm.load(GOLDEN)
    for table in COLUMNS:
        section = PAGE.read_text().partition(f"### {table}\n")[2].partition("\n### ")[0]
        columns = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        columns += re.findall(r"`(\w+)`", section.partition("\nColumns of metrics: ")[2])
        assert sorted(columns) == sorted(getattr(run, table).columns)


def test_examples_of_the_page_run_on_a_real_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    demo = [sys.executable, "-m", "effllm", "demo", "--ranks", "2", "--iterations", "40"]
    subprocess.run([*demo, "--run-dir", "efficientllm_runs"], check=True, stdout=subprocess.DEVNULL)
    names = {}
    for code in code_of_run_folder("python"):
        exec(code, names)

    out = capsys.readouterr().out
    assert out.count("completed") == 2
    assert "rank 1 joined" in out
    assert [status for (status,) in names["runs"].runs.select("status").fetchall()] == ["completed"]
    commands = [line for block in code_of_run_folder("sh") for line in block.splitlines()]
    assert len(commands) == 7
    for line in commands:
        name, *arguments = shlex.split(line)
        assert name == "effllm"
        done = subprocess.run([sys.executable, "-m", "effllm", *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
