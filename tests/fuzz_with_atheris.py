"""Search with atheris, a coverage-guided fuzzer, for bytes that cause failures; they go into the corpus.

python tests/fuzz_with_atheris.py frames build/fuzz tests/corpus/frames -max_total_time=60
"""

import sys

import atheris

with atheris.instrument_imports(include=["effllm"]):
    import fuzz


def main(arguments: list[str]) -> None:
    """Fuzz a target of ``fuzz.py``, whose name comes first; the rest is libFuzzer's."""
    target = fuzz.TARGETS[arguments.pop(1)]
    atheris.Setup(arguments, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
