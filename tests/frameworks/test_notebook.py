"""A training loop in the cells of a notebook, which a real kernel runs."""

from __future__ import annotations

import pytest

pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("torch", reason="needs PyTorch")

# The cells, of which the second has the planted delay.
NOTEBOOK = '''
import json, os
from pathlib import Path
import nbformat
from nbclient import NotebookClient

CELLS = ["""
import time, torch
from torch.utils.data import DataLoader, Dataset
""", """
class Rows(Dataset):
    def __len__(self):
        return 2000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(8)
""", """
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for x in DataLoader(Rows(), batch_size=4):
    model(x).sum().backward()
    optimizer.step()
""", "import effllm; effllm.finalize_efficientllm_metrics()"]
os.environ.pop("PYTEST_CURRENT_TEST", None)  # with this variable, a kernel does not capture other processes
book = nbformat.v4.new_notebook()
book.cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
NotebookClient(book, timeout=90, kernel_name="python3").execute()
shown = ["".join(out.get("text", "") for out in cell.outputs) for cell in book.cells]
Path("truth.json").write_text(json.dumps(shown))
'''


def test_each_line_is_in_the_cell_once_and_the_slow_function_of_a_cell_is_named(frameworks):
    job = frameworks.run(NOTEBOOK, sinks="console", log_interval=20, stacks="always")

    cells = job.output()
    iterations = [int(line.split()[-1].rstrip(":")) for line in "".join(cells).splitlines() if "Iteration" in line]
    assert iterations and iterations == sorted(set(iterations))
    assert "Iteration" in cells[2] and "Run completed" in cells[3]
    assert "Rows.__getitem__ (notebook cell:" in job.ledger.summary.verdict.why
