"""Many similar cases in one test: ``@cases("name, value", [...])`` instead of ``@pytest.mark.parametrize``.

pytest needs some 10 ms for each test beside the test itself. A test with cases runs all its cases, also after a
failure, and fails with the failed ones. All cases share the fixtures of the test.

`repeats` is the number of seeds of a test with random numbers: few in ``make test``, many in ``make test-all``.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

#: Examples of each property-based test, by profile; `make test-all` has the option --hypothesis-profile=large.
NUM_EXAMPLES = {"small": 25, "large": 250}


def repeats(few: int, many: int) -> int:
    """Return ``many`` with the profile large, else ``few``."""
    return many if settings().max_examples >= NUM_EXAMPLES["large"] else few


def cases(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that calls a test with each of ``values``; names and values are as in ``parametrize``."""
    named = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    chosen = [value if len(named) > 1 else (value,) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for number, case in enumerate(chosen):
                try:
                    test(**dict(zip(named, case, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - all cases run
                    failed.append((f"case {number}, {', '.join(named)} = {', '.join(map(reprlib.repr, case))}", error))
            if failed:
                texts = [f"{case}: {type(error).__name__}: {error}" for case, error in failed]
                raise AssertionError("\n".join([f"{len(failed)} of {len(chosen)} cases failed", *texts])) from failed[
                    0
                ][1]

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name not in named]
        all_cases.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return all_cases

    return decorate
