"""Fine-tune with the Trainer, and append one row with the energy of the run to a CSV file.

python scripts/train.py --config configs/run_adamw.yaml
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from settings import Settings, WrongSettings, read_settings

from effllm.instruments.results_csv import MEASURED, OtherColumns, append_row
from effllm.instruments.run_results import RunResults, read_results

SUMMARY_WITHIN_S = 30.0  # timeout: on a busy machine, the summary is written after the end of the training
UNITS = {"energy_J": "J", "avg_power_W": "W", "peak_power_W": "W", "wall_s": "s", "warmup_s": "s", "E10k_J": "J"}
UNITS |= {"tokens_processed": "tokens", "tok_per_s": "tokens/s", "J_per_token": "J/token"}
UNITS |= {"vram_peak_MB": "MB", "vram_avg_MB": "MB"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Fine-tune a model and append a row with its energy to a CSV file.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file, such as configs/run_adamw.yaml")
    parser.add_argument("--tensorboard", action="store_true", help="write an event file below output_dir")
    options = parser.parse_args()
    try:
        settings = read_settings(options.config)
        say(f"{options.config.stem}: backend {settings.tuning.backend}, optimizer {settings.train.optim}")
        return train(settings, options.tensorboard)
    except WrongSettings as error:
        say(f"{options.config}: {error}")
        return 2


def train(settings: Settings, tensorboard: bool) -> int:
    configure(settings, tensorboard)  # must be called before the import of transformers
    import models

    if reason := models.missing(settings.tuning.backend):
        say(f"{reason}; on a CPU: make measure-{models.CPU_TWINS[settings.tuning.backend]}")
        return 1
    if settings.tuning.backend == "unsloth":
        import unsloth  # noqa: F401 - replaces parts of transformers, so it is imported first
    trainer = build(settings, tensorboard)
    try:
        trainer.train()
    except BaseException:
        if settings.metrics.enable_energy_logging:
            say(f"no row in {settings.metrics.results_csv}: the training did not complete")
        raise
    if trainer.is_world_process_zero():
        if settings.metrics.enable_energy_logging:
            report(settings, trainer.args)
        if tensorboard:
            say(f"TensorBoard: tensorboard --logdir {settings.train.output_dir}")
    return 0


def configure(settings: Settings, tensorboard: bool) -> None:
    """Set effllm's environment variables from the section ``metrics``; a variable that is set already is kept."""
    metrics, charts = settings.metrics, Path(settings.train.output_dir).absolute() / "efficientllm"
    interval_s = min(metrics.sample_interval_s, metrics.log_vram_every_s)  # each reading has both power and memory
    defaults = {
        "METRICS_ENABLED": str(metrics.enable_energy_logging).lower(),
        "COLLECTION_INTERVAL": f"{interval_s:g}",
        "WARMUP": f"{metrics.warmup_s:g}s",
        "SINKS": f"tensorboard:dir={charts}" if tensorboard else "none",
        "RUN_DIR": "outputs/runs",
    }
    for name, value in defaults.items():
        os.environ.setdefault(f"EFFICIENTLLM_{name}", value)


def build(settings: Settings, tensorboard: bool) -> Any:
    import models
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    train = settings.train
    model, tokens_of, padding = models.load(settings)
    arguments = _arguments(
        TrainingArguments,
        output_dir=train.output_dir,
        max_steps=train.max_steps,
        per_device_train_batch_size=train.batch_size,
        gradient_accumulation_steps=train.grad_accum,
        learning_rate=train.learning_rate,
        optim=train.optim,
        bf16=train.bf16,
        fp16=train.fp16,
        seed=train.seed,
        dataloader_num_workers=train.num_workers,
        logging_steps=train.logging_steps,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="tensorboard" if tensorboard else "none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=models.rows(settings, tokens_of),
        data_collator=models.collator(settings, padding),
    )
    trainer.remove_callback(PrinterCallback)  # the lines of this callback are longer than a terminal
    trainer.add_callback(_progress(TrainerCallback))
    if settings.metrics.enable_energy_logging:
        from effllm import EfficientLLMCallback

        trainer.add_callback(EfficientLLMCallback())
    return trainer


def _arguments(kind: Any, **values: Any) -> Any:
    try:
        return kind(**values)
    except ValueError as error:  # a wrong setting, such as an unknown optimizer
        raise WrongSettings(f"train: {str(error).splitlines()[0].partition(', please')[0]}") from error


def _progress(callback: type) -> Any:
    class Progress(callback):  # type: ignore[misc] # transformers is imported late
        def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
            if state.is_world_process_zero and logs and "loss" in logs:
                say(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.4f}")

    return Progress()


def report(settings: Settings, arguments: Any) -> None:
    """Append the row of the run, and print its measured values and the reasons for empty cells."""
    from effllm import get_metrics_collector

    folder = get_metrics_collector().run_folder
    results = read_results(folder, SUMMARY_WITHIN_S) if folder else RunResults(not_measured=["no run folder"])
    row = {**results.values, **metadata(settings, arguments, results)}
    for reason in results.not_measured:
        say(f"not measured: {reason.partition(';')[0]}")
    show(row, results)
    path = Path(settings.metrics.results_csv)
    try:
        append_row(path, row)
    except OtherColumns as error:
        path = path.with_name(f"{path.stem}.effllm{path.suffix}")
        say(f"{error}; the row goes to {path.name}")
        _append_beside(path, row)
    except OSError as error:
        say(f"no row: {error}")
    else:
        say(f"a row was appended to {path}")


def _append_beside(path: Path, row: dict[str, Any]) -> None:
    try:
        append_row(path, row)
    except (OSError, OtherColumns) as error:
        say(f"no row: {error}")


def metadata(settings: Settings, arguments: Any, results: RunResults) -> dict[str, Any]:
    lora = settings.tuning.lora
    notes = f"LoRA r={lora.r} alpha={lora.alpha} dropout={lora.dropout:g}" if lora.r else "full fine-tuning"
    return {
        "model": settings.model.name,
        "dataset": settings.data.type,
        "backend": settings.tuning.backend,
        "optimizer": getattr(arguments.optim, "value", arguments.optim),
        "batch_size": arguments.per_device_train_batch_size,
        "grad_accum": arguments.gradient_accumulation_steps,
        "seq_len": settings.model.max_seq_len,
        "precision": "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
        "seed": arguments.seed,
        "notes": notes + (", simulated devices" if results.is_simulated else ""),
    }


def show(row: dict[str, Any], results: RunResults) -> None:
    for name in MEASURED:
        value = row.get(name)
        text = "-" if value is None else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
        unit = "" if value is None else UNITS[name]
        if name == "energy_J" and results.energy_error_j is not None and results.energy_gain_error_j is not None:
            unit += f"  ± {results.energy_error_j:.4g} J timing, ± {results.energy_gain_error_j:.4g} J sensor"
        print(f"  {name:<17}{text:>12} {unit}".rstrip())


def say(line: str) -> None:
    print(f"[train] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
