"""The command ``fit`` with its options and examples."""

from __future__ import annotations

from typing import Annotated

import typer

_MODELS = typer.Argument(metavar="MODEL...", help="config.json, folder, name of the table, Megatron script, or YAML.")
_GPU = typer.Option(metavar="NAME", help="GPU, such as h100-80gb. [default: the GPUs of this machine]")
_GPUS = typer.Option(metavar="N", help="Number of GPUs. [default: those of the layout]")
_MODE = typer.Option(metavar="MODE", help="training or inference. [default: both]")
_PRECISION = typer.Option(metavar="P", help="fp32, bf16, fp16, bf16-mixed, fp16-mixed, bf16-master or bf16-zero.")
_OPTIMIZER = typer.Option(metavar="O", help="adamw, adamw-8bit, adafactor, lion, muon, sgd or sgd-momentum.")
_CHECKPOINTING = typer.Option(metavar="C", help="Activation checkpointing: none, selective or full.")
_ATTENTION = typer.Option(metavar="A", help="sdpa, flash or eager.")
_KERNELS = typer.Option(metavar="K", help="transformers or megatron (fused kernels).")
_LENGTH = typer.Option(metavar="N", help="Tokens of a sequence; for inference with its answer. [default: 2048]")
_BATCH = typer.Option(metavar="N", help="Sequences of a micro-batch, or served at a time. [default: 1]")
_ACCUMULATION = typer.Option(metavar="N", help="Micro-batches of a step. [default: 1]")
_LORA = typer.Option("--lora", metavar="RANK", help="Rank of LoRA adapters. [default: all weights are trained]")
_TARGETS = typer.Option(metavar="T", help="Adapted matrices: qv, attention or all. [default: all]")
_BITS = typer.Option(metavar="B", help="Bits of quantized weights, 4 or 8 (QLoRA).")
_VOCABULARY = typer.Option(metavar="N", help="Vocabulary of a Megatron script that does not state it.")
_KEEPS = typer.Option("--base-keeps-inputs", help="Base of 4 bits with bitsandbytes before 0.43.2.")
_FUSED = typer.Option("--fused-loss", help="Loss without whole logits, in tiles, as TRL computes it.")
_ZERO = typer.Option(metavar="STAGE", help="Stage of ZeRO, 0 to 3.")
_FSDP = typer.Option("--fsdp", help="FSDP with full sharding: the same as --zero 3.")
_MEASURE = typer.Option(
    "--measure", help="Also measure a step of one rank with fake tensors; needs transformers, and PEFT for --lora."
)
_SEQUENCE = typer.Option("--sequence-parallel", help="Sequence parallelism beside tensor parallelism.")


def fit(
    models: Annotated[list[str], _MODELS],
    gpu: Annotated[str, _GPU] = "",
    gpus: Annotated[int | None, _GPUS] = None,
    mode: Annotated[str, _MODE] = "",
    precision: Annotated[str | None, _PRECISION] = None,
    optimizer: Annotated[str | None, _OPTIMIZER] = None,
    checkpointing: Annotated[str | None, _CHECKPOINTING] = None,
    attention: Annotated[str | None, _ATTENTION] = None,
    implementation: Annotated[str | None, _KERNELS] = None,
    vocab_size: Annotated[int | None, _VOCABULARY] = None,
    seq_length: Annotated[int | None, _LENGTH] = None,
    micro_batch: Annotated[int | None, _BATCH] = None,
    accumulation: Annotated[int | None, _ACCUMULATION] = None,
    lora_rank: Annotated[int | None, _LORA] = None,
    lora_targets: Annotated[str | None, _TARGETS] = None,
    base_bits: Annotated[int | None, _BITS] = None,
    base_keeps_inputs: Annotated[bool, _KEEPS] = False,
    fused_loss: Annotated[bool, _FUSED] = False,
    tp: Annotated[int | None, typer.Option(metavar="N", help="Tensor parallelism.")] = None,
    pp: Annotated[int | None, typer.Option(metavar="N", help="Pipeline parallelism.")] = None,
    cp: Annotated[int | None, typer.Option(metavar="N", help="Context parallelism.")] = None,
    ep: Annotated[int | None, typer.Option(metavar="N", help="Expert parallelism.")] = None,
    dp: Annotated[int | None, typer.Option(metavar="N", help="Data parallelism. [default: from --gpus]")] = None,
    zero: Annotated[int | None, _ZERO] = None,
    fsdp: Annotated[bool, _FSDP] = False,
    sequence_parallel: Annotated[bool, _SEQUENCE] = False,
    measured: Annotated[bool, _MEASURE] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with bytes.")] = False,
) -> None:
    """Estimate the memory of models before a run: does it fit, and what would make it fit.

    Each part of the memory is an interval with its basis. Weights, gradients and optimizer states are exact. The
    interval of activations has the errors on configurations whose tensors were counted. Nothing is downloaded, and
    neither torch nor a GPU is needed. docs/fit.md has the formulas, their sources and their errors.

    \b
    Examples:
      effllm fit llama-3.1-8b --gpu h100-80gb
      effllm fit path/to/config.json --gpu a100-80gb --gpus 8 --zero 3
      effllm fit pretrain_llama.sh --gpu h100-80gb           # Megatron
      effllm fit qwen3-8b fsdp.yaml --gpu a100-80gb          # accelerate
      effllm fit deepseek-v3 --mode inference --gpu h200 --gpus 16 --tp 16
      effllm fit gemma-2-9b mistral-7b --gpu rtx4090 --json | jq .models

    Exit status: 0 estimated, and fits if a GPU is known; 1 does not fit, or unclear; 2 wrong use, or no such model.
    """
    from effllm.commands import fit as command

    _check(mode, fsdp, zero, measured)
    settings = {
        "precision": precision, "optimizer": optimizer, "checkpointing": checkpointing, "attention": attention,
        "implementation": implementation, "seq_length": seq_length, "micro_batch": micro_batch,
        "accumulation": accumulation, "lora_rank": lora_rank, "lora_targets": lora_targets, "base_bits": base_bits,
        "base_keeps_inputs": base_keeps_inputs or None, "fused_loss": fused_loss or None, "tp": tp, "pp": pp, "cp": cp,
        "ep": ep, "dp": dp, "zero": 3 if fsdp else zero, "sequence_parallel": sequence_parallel or None,
    }  # fmt: skip
    request = command.FitRequest(models, mode, gpu, gpus, settings, as_json, measured, vocab_size)
    raise typer.Exit(command.main(request))


def _check(mode: str, fsdp: bool, zero: int | None, measured: bool) -> None:
    """Raise an error of wrong use if options contradict each other."""
    if mode not in ("", "training", "inference"):
        raise typer.BadParameter(f"{mode} is not training or inference", param_hint="--mode")
    if measured and mode == "inference":
        raise typer.BadParameter("a training step is measured: not with --mode inference", param_hint="--measure")
    if fsdp and zero not in (None, 3):
        raise typer.BadParameter(f"--fsdp is --zero 3, and --zero is {zero}", param_hint="--fsdp")
