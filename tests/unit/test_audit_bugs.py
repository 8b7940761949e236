"""Each wrong figure of docs/audit.md, computed with the formula of its bug in a simulated job, is detected.

A job has windows of 10 iterations of one second.  ``tests/unit/test_audit.py`` tests the audit itself.
"""

import re
from pathlib import Path

import pytest
from audited import AuditedJob

from effllm.records.audit import COUNTS, NAMED
from effllm.records.framework_figures import MFU_RATIO, SAMPLES_PER_S, TOKENS_PER_S, TOKENS_PER_S_PER_GPU
from effllm.store.summary_text import audit_texts

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text()
A100, H100, MI355X = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "AMD Instinct MI355X"


def rows_of_page():
    """Return the rows of the page's table of bugs: bug -> (factor, named cause, printed line)."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| [")]
    return {re.match(r"\s*\[([^\]]+)\]", row[0])[1]: [cell.strip() for cell in row[1:]] for row in rows}


def check(job, bug, factor, outcome, reason):
    """Check factor and cause of the job's figure, and that the page quotes the printed line."""
    figure, printed = job.figure, job.printed()
    assert figure.factor == pytest.approx(factor, rel=0.02)
    assert figure.outcome == outcome
    assert reason in figure.reasons
    (line,) = audit_texts(job.summary().audit)
    assert printed == ([] if outcome == COUNTS else [line])  # padding is no problem, so it is only in the summary
    assert rows_of_page()[bug][-1] == f"`{line}`"


# --- A3: MFU -------------------------------------------------------------------------------------


def mfu_job(gpu_name, tflops, ranks=1, facts=None):
    """Return a job whose GPUs do this many model TFLOP/s: 1,000 tokens of a rank in ten seconds."""
    flops = tflops * 1e12 * 10 / 1000
    return AuditedJob(ranks, facts, gpu_name, flops_per_token=flops)


def test_nemo_rl_1015_counts_one_of_eight_workers():
    """1,545.38 TFLOP/s of eight GPUs, divided by the peak of one GPU: 156 %; the truth is 19.5 %."""
    total = 1545.38e12
    wrong = total / (1 * 989.4e12)
    job = mfu_job(H100, 1545.38 / 8, 8, {"context_parallel": 8}).windows(12, {MFU_RATIO: wrong})
    check(job, "NeMo-RL#1015", 8.0, NAMED, "context parallel size")


def test_primus_772_uses_the_peak_of_an_a100():
    """The device is not in the table, which falls back to 312 TFLOP/s: 563 %."""
    wrong = 1757e12 / 312e12
    check(mfu_job(MI355X, 1757.0).windows(12, {MFU_RATIO: wrong}), "Primus#772", 2516.6 / 312, NAMED,
          "peak of an A100 (312 TFLOP/s)")  # fmt: skip


def test_nanogpt_464_uses_the_peak_of_an_a100():
    """104 % on an H100; the truth is 32.8 %."""
    wrong = 324.5e12 / 312e12
    check(mfu_job(H100, 324.5).windows(12, {MFU_RATIO: wrong}), "nanoGPT#464", 989.4 / 312, NAMED,
          "peak of an A100 (312 TFLOP/s)")  # fmt: skip


def test_autoresearch_5_uses_the_peak_of_an_h100():
    """40 % on an A100 are shown as 12.6 %."""
    wrong = 124.8e12 / 989.5e12
    check(mfu_job(A100, 124.8).windows(12, {MFU_RATIO: wrong}), "autoresearch#5", 312 / 989.5, NAMED,
          "peak of an H100 (989 TFLOP/s)")  # fmt: skip


def test_automodel_3569_uses_the_peak_with_sparsity():
    wrong = 395.8e12 / 1979e12
    check(mfu_job(H100, 395.8).windows(12, {MFU_RATIO: wrong}), "Automodel#3569", 0.5, NAMED,
          "peak of this GPU with sparsity")  # fmt: skip


def test_relax_83_uses_the_fp32_row_of_the_table():
    wrong = 17.4e12 / 21.75e12
    job = mfu_job("NVIDIA GeForce RTX 3070 Ti", 17.4).windows(12, {MFU_RATIO: wrong})
    check(job, "Relax#83", 2.0, NAMED, "peak of FP32 of this GPU")


@pytest.mark.parametrize("bug", ["OFU paper, MoE", "OFU paper, Mamba"])
def test_flops_of_layers_need_a_gpu(bug):
    """The framework's and effllm's FLOPs come from one function, so that only the GPU's counters show the error."""
    assert rows_of_page()[bug][-1] == "needs a GPU: not measured"


# --- A4: tokens/s --------------------------------------------------------------------------------


class Loop:
    """The quantities of a training loop, from which each framework computes its figure.

    Args:
        ranks: number of ranks, each with its own data.
        accumulation: micro-batches of an iteration.
    """

    def __init__(self, ranks, accumulation):
        self.ranks, self.accumulation = ranks, accumulation
        self.micro_batch, self.length, self.step_s = 4, 128, 1.0
        self.tokens_per_iteration = self.micro_batch * self.length * accumulation  # of one rank

    def job(self, facts=None, **counts):
        """Return a job with 12 windows; its figure is set with `figures`."""
        known = {"gradient_accumulation_steps": self.accumulation, **(facts or {})}
        self.counts = {
            "tokens": 10 * self.tokens_per_iteration, "tokens_processed": 10 * self.tokens_per_iteration,
            "samples": 10 * self.micro_batch * self.accumulation, **counts,
        }  # fmt: skip
        return AuditedJob(self.ranks, known)


def test_axolotl_3688_counts_the_labels_of_the_last_micro_batch():
    loop = Loop(ranks=4, accumulation=8)
    labels = round(0.6 * loop.tokens_per_iteration)
    wrong = labels / loop.accumulation / loop.step_s  # trainable tokens of the last micro-batch, per rank
    job = loop.job(tokens_loss=10 * labels)
    job.windows(12, {TOKENS_PER_S_PER_GPU: wrong}, **loop.counts)
    check(job, "axolotl#3688", 0.6 / 8, NAMED, "gradient accumulation steps")


def test_nanochat_177_counts_one_micro_batch_of_all_ranks():
    loop = Loop(ranks=8, accumulation=4)
    world_tokens_per_fwdbwd = loop.micro_batch * loop.length * loop.ranks
    job = loop.job()
    job.windows(12, {TOKENS_PER_S: world_tokens_per_fwdbwd / loop.step_s}, **loop.counts)
    check(job, "nanochat#177", 1 / 4, NAMED, "gradient accumulation steps")


def test_nemo_speech_13078_counts_the_global_batch_for_each_micro_batch():
    """2 GPUs, a global batch of 512, 4 micro-batches: 1,557 tokens/s per GPU instead of 389."""
    loop = Loop(ranks=2, accumulation=4)
    global_batch = loop.micro_batch * loop.accumulation * loop.ranks
    timing_of_micro_batch_s = loop.step_s / loop.accumulation
    wrong = global_batch * loop.length / timing_of_micro_batch_s / loop.ranks
    job = loop.job()
    job.windows(12, {TOKENS_PER_S_PER_GPU: wrong}, **loop.counts)
    check(job, "NeMo Speech#13078", 4.0, NAMED, "gradient accumulation steps")


def test_axlearn_782_leaves_out_replicas_and_micro_batches():
    loop = Loop(ranks=16, accumulation=3)
    job = loop.job({"data_parallel": 16})
    job.windows(12, {TOKENS_PER_S: loop.micro_batch * loop.length / loop.step_s}, **loop.counts)
    check(job, "axlearn#782", 1 / 48, NAMED, "gradient accumulation steps (3) x data parallel size (16)")


def test_deepspeed_2505_counts_the_samples_of_one_micro_batch():
    loop = Loop(ranks=8, accumulation=4)
    job = loop.job()
    job.windows(12, {SAMPLES_PER_S: loop.micro_batch * loop.ranks / loop.step_s}, **loop.counts)
    check(job, "DeepSpeed#2505", 1 / 4, NAMED, "gradient accumulation steps")


def test_torchtune_2296_counts_only_labels():
    loop = Loop(ranks=2, accumulation=2)
    labels = round(0.35 * loop.tokens_per_iteration)
    job = loop.job(tokens_loss=10 * labels)
    job.windows(12, {TOKENS_PER_S_PER_GPU: labels / loop.step_s}, **loop.counts)
    check(job, "torchtune#2296", 0.35, COUNTS, "only positions with a label")


@pytest.mark.parametrize(("bug", "share"), [("transformers#28791", 0.5), ("sockeye#1073", 0.65)])
def test_transformers_28791_and_sockeye_1073_count_padding(bug, share):
    """With a share of 0.5 the factor is 2, and so is the number of ranks: the two counts explain it, not the ranks."""
    loop = Loop(ranks=2, accumulation=1)
    positions = loop.tokens_per_iteration
    job = loop.job(tokens=round(10 * share * positions))
    job.windows(12, {TOKENS_PER_S: positions * loop.ranks / loop.step_s}, **loop.counts)
    check(job, bug, 1 / share, COUNTS, "all positions, with padding")


def test_trl_5293_divides_all_tokens_by_the_time_of_one_step():
    """The trainer logs the mean of its figures since the last log: the mean of iterations 1 to 10 is 5.5 times."""
    loop = Loop(ranks=4, accumulation=2)
    per_step = loop.tokens_per_iteration * loop.ranks / loop.step_s

    def figures(window):
        steps = range(10 * window - 9, 10 * window + 1)
        return {TOKENS_PER_S: sum(step * per_step for step in steps) / 10}

    job = loop.job()
    job.windows(5 + 2, figures, **loop.counts)
    found = job.figure
    assert (found.outcome, found.reasons) == (NAMED, ("cumulative count over a short time",))
    assert found.factor == pytest.approx(sum(10 * at + 5.5 for at in range(2, 7)) / 5)
    (line,) = job.printed()
    assert line == found.text
    assert rows_of_page()["trl#5293"][-1] == f"`{line}`"


def test_every_row_of_the_page_has_a_test():
    tested = set(re.findall(r'"([\w -]+(?:#\d+|, \w+))"', Path(__file__).read_text()))
    assert set(rows_of_page()) == tested
