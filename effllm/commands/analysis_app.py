"""The commands around a run, in the order of the help: its memory before, and what people read of runs.

See `app`: a function declares the options and the help of the command in the module with its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODELS = typer.Argument(metavar="MODEL...", help="config.json, folder, name of the table, Megatron script, or YAML.")
_GPU = typer.Option(metavar="NAME", help="GPU, such as h100-80gb. [default: the GPUs of this machine]")
_GPUS = typer.Option(metavar="N", help="Number of GPUs. [default: those of the layout]")
_PRECISION = typer.Option(
    metavar="P", help="fp32, bf16, fp16, bf16-mixed, fp16-mixed, bf16-master, fp16-master or bf16-zero."
)
_OPTIMIZER = typer.Option(metavar="O", help="adamw, adamw-8bit, adafactor, lion, muon, sgd or sgd-momentum.")
_CHECKPOINTING = typer.Option(metavar="C", help="Activation checkpointing: none, selective or full.")
_KERNELS = typer.Option(metavar="K", help="transformers or megatron (fused kernels).")
_LENGTH = typer.Option(metavar="N", help="Tokens of a sequence; for inference with its answer. [default: 2048]")
_BATCH = typer.Option(metavar="N", help="Sequences of a micro-batch, or served at a time. [default: 1]")
_LORA = typer.Option("--lora", metavar="RANK", help="Rank of LoRA adapters. [default: all weights are trained]")
_TARGETS = typer.Option(metavar="T", help="Adapted matrices: qv, attention or all. [default: all]")
_BITS = typer.Option(metavar="B", help="Bits of quantized weights, 4 or 8 (QLoRA).")
_VOCABULARY = typer.Option(metavar="N", help="Vocabulary of a Megatron script that does not state it.")
_PARAMS = typer.Option(metavar="N", help="Parameters of a model of unknown architecture: 7e9, 671B.")
_ACTIVE = typer.Option(metavar="N", help="Those of them that compute a token. [default: unknown]")
_KEEPS = typer.Option("--base-keeps-inputs", help="Base of 4 bits with bitsandbytes before 0.43.2.")
_FUSED = typer.Option("--fused-loss", help="Loss without whole logits, in tiles, as TRL computes it.")
_MEASURE = typer.Option(
    "--measure", help="Also measure a step of one rank with fake tensors; needs transformers, and PEFT for --lora."
)
_SEQUENCE = typer.Option("--sequence-parallel", help="Sequence parallelism beside tensor parallelism.")


def fit(
    models: Annotated[list[str], _MODELS],
    gpu: Annotated[str, _GPU] = "",
    gpus: Annotated[int | None, _GPUS] = None,
    mode: Annotated[str, typer.Option(metavar="MODE", help="training or inference. [default: both]")] = "",
    precision: Annotated[str | None, _PRECISION] = None,
    optimizer: Annotated[str | None, _OPTIMIZER] = None,
    checkpointing: Annotated[str | None, _CHECKPOINTING] = None,
    attention: Annotated[str | None, typer.Option(metavar="A", help="sdpa, flash or eager.")] = None,
    implementation: Annotated[str | None, _KERNELS] = None,
    vocab_size: Annotated[int | None, _VOCABULARY] = None,
    params: Annotated[str, _PARAMS] = "",
    active_params: Annotated[str, _ACTIVE] = "",
    seq_length: Annotated[int | None, _LENGTH] = None,
    micro_batch: Annotated[int | None, _BATCH] = None,
    accumulation: Annotated[int | None, typer.Option(metavar="N", help="Micro-batches of a step. [default: 1]")] = None,
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
    zero: Annotated[int | None, typer.Option(metavar="STAGE", help="Stage of ZeRO, 0 to 3.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="FSDP with full sharding: the same as --zero 3.")] = False,
    sequence_parallel: Annotated[bool, _SEQUENCE] = False,
    measured: Annotated[bool, _MEASURE] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with bytes.")] = False,
) -> None:
    """Estimate the memory of models before a run, and if it fits.

    Each part of the memory is an interval with its basis. Weights, gradients and optimizer states are exact. The
    interval of activations has the errors on configurations whose tensors were counted. Nothing is downloaded, and
    no GPU is needed. With the extra fit, the parameters of a config.json are those of the model that transformers
    builds, of any architecture. docs/fit.md has the formulas, their sources and their errors.

    \b
    Examples:
      effllm fit llama-3.1-8b --gpu h100-80gb
      effllm fit path/to/config.json --gpu a100-80gb --gpus 8 --zero 3
      effllm fit pretrain_llama.sh --gpu h100-80gb           # Megatron
      effllm fit qwen3-8b fsdp.yaml --gpu a100-80gb          # accelerate
      effllm fit deepseek-v3 --mode inference --gpu h200 --gpus 16 --tp 16
      effllm fit gemma-2-9b mistral-7b --gpu rtx4090 --json | jq .models

    Exit status: 0 estimated, and fits if a GPU is known; 1 does not fit; 2 wrong use, or no such model; 3 unknown: the
    interval contains the memory of the GPU, or the architecture is unknown.
    """


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(metavar="A B...", help="Sides: run folders, folders of runs, globs or tags. A is first."),
    ],
    by: Annotated[
        str, typer.Option(metavar="KEY", help="Make a side of all runs with the same tag, identity or fact KEY.")
    ] = "",
    baseline: Annotated[str, typer.Option(metavar="SIDE", help="Name of side A. [default: the first]")] = "",
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Compare only this metric; can be repeated.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Exit status 1 if true, 3 if unknown; only its metric is compared."),
    ] = None,
    runs: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder in which tags are searched. [default: EFFICIENTLLM_RUN_DIR]")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print the table of configurations for LaTeX.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table of configurations with all digits.")] = False,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Print the table of the EfficientLLM paper, with its score."),
    ] = False,
) -> None:
    """Compare configurations: better, worse, the same, or unknown.

    The unit is the run: windows of one run share its node, board and temperature. The values of the runs are compared
    by Welch's test. With one run a side, the outcome is "unknown". Throughput (tokens/s, or what was measured instead)
    is tested first at 5 %, then the other quantities with Holm's correction. A metric that is named with --metric is
    tested alone. The needed packages are in the extra analysis.

    Differences that make a comparison unfair are listed: hardware, boards, driver, power limit and profile, sequence
    length, batch, precision, kind of parameters, coverage, warm-up, length, clock and temperature.

    \b
    Examples:
      effllm compare runs/base runs/new             # one or several runs a side
      effllm compare 'runs/base-*' 'runs/new-*' --metric joules_per_token
      effllm compare lr=1e-4 lr=3e-4                # tags, EFFICIENTLLM_TAGS
      effllm compare runs --by git_commit --markdown
      effllm compare main new --fail-if 'joules_per_token > +2%'
      effllm compare A B --json | jq '.comparisons[].metrics[].outcome'
      effllm compare runs --by config --latex       # means with 95 % intervals
      effllm compare runs --paper                   # AMU to AEC, and the score

    Exit status: 0 compared, and no condition is true; 1 a condition is true, or no runs; 2 wrong use; 3 no condition is
    true, and one is unknown.
    """


def campaign(
    path: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan, a YAML file.")],
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start failed runs again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the order of the runs, and run nothing.")] = False,
) -> None:
    """Run configurations several times, in a random order.

    Each repeat is a block with every configuration in random order. Each run has its own run folder with the tags
    campaign, config and repeat. Runs that are complete are not repeated after Ctrl-C or a crash: start the command
    again. The reason why a run has failed is in a file NAME.failed, and the campaign continues. The output of each run
    is in the folder logs.

    \b
    Example of a plan:
      name: lr-study
      command: torchrun --nproc_per_node 8 train.py
      repeats: 3            # 3 by default
      warmup_runs: 1        # before the first repeat; not compared
      cooldown_s: 60        # pause between runs
      timeout_s: 7200       # a longer run has failed
      env: {OMP_NUM_THREADS: "1"}
      configurations:
        base: {args: --lr 1e-4}
        new: {args: --lr 3e-4, env: {NCCL_ALGO: Ring}}

    Further keys: seed (of the order), tags, run_dir; and command in a configuration.

    \b
    Examples:
      effllm campaign plan.yaml --dry-run
      effllm campaign plan.yaml
      effllm compare efficientllm_runs/lr-study --by config

    Exit status: 0 all runs completed, 1 a run failed, 2 wrong plan or use, 130 stopped with Ctrl-C.
    """


def runs(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="Run folders, folders of runs, globs, or the folder or a file of "
            "EFFICIENTLLM_LEDGER. [default: RUN_DIR]",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="KEY", help="Sum by outcome, project, user, account, config, node or month.")
    ] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only runs that started since: 36h, 7d, 4w, or a date.")
    ] = "",
    wasted: Annotated[bool, typer.Option("--wasted", help="With --by: order by wasted GPU-hours.")] = False,
    sql: Annotated[str, typer.Option(metavar="QUERY", help="Print the result of a query of DuckDB.")] = "",
    export: Annotated[
        str, typer.Option(metavar="FILE", help="Write the runs: FILE.csv, FILE.jsonl, or a folder of Parquet files.")
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with all columns and digits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all columns and digits.")] = False,
) -> None:
    """List runs, the newest first; or sum, query or export them.

    Failed and killed runs are included. A project is the value of the tag project, else the account of the scheduler. A
    configuration is the value of the tag config, else the model and the devices. With --by node, a run on several hosts
    is divided equally between its hosts.

    The tables of --sql are runs (one row per run), windows, ranks and events; docs/run-folder.md lists all columns. The
    query can only read these tables. --export adds the runs to a CSV file or a Parquet dataset, in which known runs are
    replaced, or writes JSON Lines. Needs: pip install 'effllm[analysis]'

    \b
    Examples:
      effllm runs                                   # of EFFICIENTLLM_RUN_DIR
      effllm runs /project/ledger --by user --since 7d --wasted
      effllm runs efficientllm_runs --by node       # always the same?
      effllm runs RUN --sql "SELECT text FROM events WHERE kind = 'xid'"
      effllm runs 'runs/llama-*' --export llama.csv

    Exit status: 0 success, 1 no runs, a wrong query, or a file that cannot be written, 2 wrong use.
    """


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run folders, folders of runs, or globs.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The file. [default: report-RUN.html]")
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="KEY", help="Compare configurations: a tag or a setting. [default: the tag config]")
    ] = "",
) -> None:
    """Write one HTML file about one or several runs.

    The file begins with the verdict and the parts of the device time. It has the metrics with their errors, curves, the
    ranks, stragglers, stalls with stacks, events, and what was not measured. Several runs are side by side, with the
    outcomes of effllm compare. The file has at most 1.5 MB, needs no network, and shows its numbers without scripts.

    \b
    Examples:
      effllm report efficientllm_runs/20260101-120000-1a2b3c4d
      effllm report RUN -o /tmp/run.html
      effllm report runs/base runs/new -o base-and-new.html
      effllm report efficientllm_runs/my-campaign   # its configurations

    Exit status: 0 written, 1 no run, or the file cannot be written, 2 wrong use.
    """


def top(
    run: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help="Run folder or its name, or a folder of runs. [default: the newest run]"),
    ] = "",
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Metrics page of a running job, instead of a run folder.")
    ] = "",
    token_file: Annotated[
        str, typer.Option(metavar="FILE", help="File with the token of the page, readable only by its user.")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(metavar="FILE", help="Certificate of the page, or of its authority. [default: the system's]")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print one frame as plain text and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Show a job, or all running jobs of a folder, on one screen.

    The screen has the verdict, the values of the job, and the ranks or hosts, the worst first with the reason. The keys
    are in its last line; the key ? lists all of them. A finished run is replayed with the arrow keys, Home, End and
    the space bar. The job needs no change; the command only reads its run folder. Without --once on a terminal that
    cannot move the cursor (TERM=dumb), a frame is printed whenever the values have changed. A folder of runs, or of
    EFFICIENTLLM_LEDGER, shows a line for each running job, the worst first; Enter opens the job.

    \b
    Examples:
      effllm top                                    # the newest run in EFFICIENTLLM_RUN_DIR
      effllm top efficientllm_runs/20260101-120000-1a2b3c4d
      effllm top /project/efficientllm_runs         # all running jobs
      effllm top --endpoint http://127.0.0.1:9788/metrics
      effllm top RUN --once --json | jq -r '.problems[].text'
      effllm top RUN --once > /dev/null || echo "look at RUN"

    Exit status: 0 no problem, or quit by a key, 1 no run, or (with --once) a problem of the job, 2 wrong use, 3 no
    values, 130 stopped with Ctrl-C, 143 ended by SIGTERM.
    """
    from effllm.commands import top as command

    words = ("--endpoint", endpoint), ("--token-file", token_file), ("--ca-file", ca_file)
    options = [part for name, value in words if value for part in (name, value)]
    raise typer.Exit(command.main([run] * bool(run) + options + ["--once"] * once + ["--json"] * as_json))


COMMANDS = (report, runs, compare, campaign)
