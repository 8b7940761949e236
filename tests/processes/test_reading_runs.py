"""Reading of run folders in processes of their own."""

import subprocess
import sys
from pathlib import Path

OLDER = Path(__file__).parents[1] / "golden" / "run_folder_1"


def test_package_loads_without_duckdb_and_names_the_missing_extra():
    code = (
        "import sys; sys.modules['duckdb'] = None; import effllm; from effllm import *\n"
        f"try: effllm.load({str(OLDER)!r})\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "effllm.load needs DuckDB: pip install 'effllm[analysis]'\n"
