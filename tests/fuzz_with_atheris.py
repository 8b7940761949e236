"""Search for bytes that cause failures, with the coverage-guided fuzzer atheris; add these bytes to the corpus.

python tests/fuzz_with_atheris.py frames build/fuzz tests/corpus/frames -max_total_time=60
"""

import sys

import atheris

with atheris.instrument_imports(include=["effllm"]):
    import fuzz


def main(arguments: list[str]) -> None:
    """Run a target of ``fuzz.py``; the first argument is its name, the other arguments are options of libFuzzer."""
    target = fuzz.TARGETS[arguments.pop(1)]
    atheris.Setup(arguments, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
