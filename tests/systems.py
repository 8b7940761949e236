"""The table of training systems in docs/systems.md: the results of the tests with the mark ``system``.

    python -m pytest -m "" --systems tests tests/frameworks   # writes the page with the passed tests
    python -m tests.systems                                   # writes the page from the kept results

A test has ``pytestmark = pytest.mark.system("trl", how=RAN)``; a pass is recorded with the versions of the packages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KNOWN = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "systems.md"

RAN, STAND_IN = "ran", "stand-in"


@dataclass(frozen=True)
class System:
    """A training system, with facts that tests do not record."""

    title: str
    packages: tuple[str, ...]  # names of the distributions; the first is the system
    attached_by: str
    tokens_from: str
    not_tested: str = ""
    by_hand: str = ""  # manual runs, outside of the tests


SYSTEMS = {
    "megatron-lm": System(
        "Megatron-LM",
        ("megatron-core",),
        "import hook on `megatron.training.training`",
        "micro-batch calculator × sequence length; from 0.18 the real tokens of packed sequences",
        "a GPU, context parallelism",
        "by hand: `pretrain_gpt.py` of 0.8.0, 0.12.0rc3, 0.14.0rc7, 0.16.1 and 0.19.0 on CPUs, CUDA calls shimmed",
    ),
    "pai-megatron": System(
        "Pai-Megatron-Patch",
        (),
        "import hooks on `megatron.training.training` and `megatron_patch.training`",
        "the source of Megatron-LM",
        "the patch itself",
    ),
    "megatron-core": System(
        "megatron-core alone",
        ("megatron-core",),
        "import hooks on its schedules and optimizers",
        "micro-batches × sequence length given to the schedule",
        "NeMo, Megatron-Bridge, verl",
    ),
    "transformers": System(
        "Hugging Face Trainer",
        ("transformers", "accelerate"),
        "a callback in `DEFAULT_CALLBACKS`, or `report_to: efficientllm`",
        "`attention_mask`, packing, labels of every micro-batch",
        "FSDP, ZeRO-3 and quantised weights on a GPU",
    ),
    "trl": System(
        "TRL",
        ("trl", "transformers"),
        "the Trainer's callback",
        "the source of the Trainer; for GRPO its completions",
        "vLLM inside GRPO",
        "by hand: GRPO and RLOO of 0.24",
    ),
    "llama-factory": System(
        "LLaMA-Factory", ("llamafactory",), "the Trainer's callback", "the source of the Trainer", "any GPU"
    ),
    "lightning": System(
        "Lightning",
        ("lightning",),
        "its entry point `callbacks_factory`",
        "`input_ids` of the batch, else none",
        "FSDP, DeepSpeed",
    ),
    "deepspeed": System(
        "DeepSpeed's engine",
        ("deepspeed",),
        "import hook on the engine's `forward`, `step` and `save_checkpoint`",
        "`input_ids` of the batch, else `effllm.count`",
        "a GPU, its pipeline, tensor parallelism, experts",
    ),
    "fabric": System(
        "Lightning Fabric",
        ("lightning",),
        "import hook on the model that `Fabric.setup` returns, on `Fabric.save`",
        "the model's argument `input_ids`, `idx` or `tokens`, else `effllm.count`",
        "FSDP, DeepSpeed, a GPU",
        "by hand: the model of litgpt 0.5.13 in such a loop",
    ),
    "torchtune": System(
        "torchtune",
        ("torchtune",),
        "import hook on `FTRecipeInterface`, the base class of all recipes",
        "positions of a batch without the tokenizer's padding",
        "LoRA, QAT, knowledge distillation, tensor parallelism, a GPU",
    ),
    "torchtitan": System(
        "torchtitan", ("torchtitan",), "import hook on its metrics and trainer", "its own count", "a GPU"
    ),
    "accelerate": System(
        "accelerate",
        ("accelerate",),
        "import hook on its optimizer",
        "`input_ids` of the batches of the DataLoader, else `effllm.count`",
        "DeepSpeed",
    ),
    "torchrun": System(
        "any loop of torch",
        ("torch",),
        "the global hook of optimizers",
        "`input_ids` of the batches of the DataLoader, else `effllm.count`",
        "",
    ),
    "generate": System(
        "`model.generate`", ("transformers",), "import hook on `GenerationMixin`", "positions after the prompt", ""
    ),
    "vllm": System(
        "vLLM",
        ("vllm",),
        "import hook on `LLM`; `effllm watch --vllm` for servers",
        "its outputs; its Prometheus page",
        "vLLM itself",
    ),
}


def versions(system: System) -> dict[str, str]:
    """Return the installed versions of a system's packages."""
    found = {}
    for package in system.packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def known() -> dict[str, Any]:
    """Return the results of earlier runs."""
    return json.loads(KNOWN.read_text()) if KNOWN.exists() else {}


def record(passed: dict[str, dict[str, int]]) -> None:
    """Record the number of passed tests, by system and kind of test."""
    kept = known()
    for name, counts in passed.items():
        entry = kept.setdefault(name, {})
        for how, count in counts.items():
            entry[how] = {"tests": count, "versions": versions(SYSTEMS[name]) if how == RAN else {}}
    KNOWN.write_text(json.dumps({name: kept[name] for name in SYSTEMS if name in kept}, indent=2) + "\n")
    PAGE.write_text(page())


def page() -> str:
    """Return the page."""
    results = known()
    lines = [
        "# Training systems",
        "",
        "The hook of each training system, and its tests. *Ran*: the test ran the system itself, on CPUs. *Stand-in*:",
        "a small module with the same functions and signatures. The tests write this table:",
        '`python -m pytest -m "" --systems tests tests/frameworks`.',
        "",
        "| system | attached by | tokens from | tested | not tested |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(system, results.get(name, {})) for name, system in SYSTEMS.items()]
    return "\n".join(lines) + "\n"


def _row(system: System, results: dict[str, Any]) -> str:
    shown = []
    if RAN in results:
        packages = ", ".join(f"{name} {version}" for name, version in results[RAN]["versions"].items())
        shown.append(f"ran: {packages} ({results[RAN]['tests']} tests)")
    if STAND_IN in results:
        shown.append(f"stand-in ({results[STAND_IN]['tests']} tests)")
    shown += [system.by_hand] if system.by_hand else []
    tested = "; ".join(shown) or "not tested"
    return f"| {system.title} | {system.attached_by} | {system.tokens_from} | {tested} | {system.not_tested} |"


# --- the plugin of pytest, which conftest.py names ---


def pytest_addoption(parser: Any) -> None:
    """Declare the switch."""
    parser.addoption("--systems", action="store_true", help="write docs/systems.md with the results")


def pytest_configure(config: Any) -> None:
    """Declare the mark; with --systems, register the counter."""
    config.addinivalue_line(
        "markers", "system(name, how): shows that a training system is attached; see tests/systems.py"
    )
    if config.getoption("--systems"):
        config.pluginmanager.register(_Counter(), "systems-counter")


class _Counter:
    def __init__(self) -> None:
        self._marks: dict[str, tuple[str, str]] = {}
        self._passed: dict[str, dict[str, int]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            mark = item.get_closest_marker("system")
            if mark is not None:
                self._marks[item.nodeid] = (mark.args[0], mark.kwargs["how"])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed and report.nodeid in self._marks:
            name, how = self._marks[report.nodeid]
            counts = self._passed.setdefault(name, {})
            counts[how] = counts.get(how, 0) + 1

    def pytest_sessionfinish(self) -> None:
        record(self._passed)


if __name__ == "__main__":
    PAGE.write_text(page())
