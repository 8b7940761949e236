"""TRL's trainers: packing, pairs, adapters and generation."""

from __future__ import annotations

import json
import statistics

import pytest
from systems import RAN

pytest.importorskip("trl", reason="needs TRL")
pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("datasets", reason="needs datasets")

pytestmark = pytest.mark.system("trl", how=RAN)


def counts(job):
    """Return three sums over all ranks: tokens, positions with padding, positions with a label."""
    rows = job.ledger.ranks
    return tuple(sum(getattr(row, name) for row in rows) for name in ("tokens", "tokens_processed", "tokens_loss"))


USUAL = """max_steps=4, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", bf16=False,
    disable_tqdm=True, seed=1, output_dir="out" """

BEGIN = """
import trl
import os, tiny
from datasets import Dataset

words = tiny.tokenizer()
def model():
    # It is in a folder too, from which the reference model is loaded.
    made = tiny.llama(vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=None)
    folder = "model" + os.environ.get("RANK", "0")
    made.save_pretrained(folder)
    made.config._name_or_path = folder
    return made
"""

SFT = (
    BEGIN
    + """
rows = Dataset.from_dict({{"input_ids": [[5] * (5 if i % 2 else 8) for i in range(32)]}})
arguments = trl.SFTConfig(per_device_train_batch_size=2, {usual}{more})
trainer = trl.SFTTrainer(model=model(), args=arguments, train_dataset=rows, processing_class=words{given})
trainer._get_train_sampler = lambda *_: range(len(trainer.train_dataset))
trainer.train()
tiny.losses(trainer)
"""
)

GRPO = (
    BEGIN
    + """
import time
rows = Dataset.from_dict({{"prompt": ["one two", "three four five"] * 8}})
arguments = trl.GRPOConfig(per_device_train_batch_size=4, num_generations=4, max_completion_length=8, {usual}{more})
def reward(completions, **_):
    return [float(one.count("a")) for one in completions]
trainer = trl.GRPOTrainer(model=model(), reward_funcs=reward, args=arguments, train_dataset=rows,
                          processing_class=words)
{before}
trainer.train()
tiny.losses(trainer)
"""
)

DPO = (
    BEGIN
    + """
rows = Dataset.from_dict({{"prompt": ["ab"] * 16, "chosen": ["cde"] * 16, "rejected": ["f"] * 16}})
arguments = trl.DPOConfig(per_device_train_batch_size=2, {usual})
trainer = trl.DPOTrainer(model=model(), args=arguments, train_dataset=rows, processing_class=words)
trainer.train()
tiny.losses(trainer)
"""
)


def sft(more="", given=""):
    return SFT.format(usual=USUAL, more=f", {more}" if more else "", given=f", {given}" if given else "")


def grpo(more="", before=""):
    return GRPO.format(usual=USUAL, more=f", {more}" if more else "", before=before)


def test_effllm_attaches_to_a_script_that_imports_trl_first(frameworks):
    job = frameworks.run(sft())

    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.samples) == ("completed", 4, 8)
    # 4 steps of two rows: 8 tokens, and 5 tokens padded to 8 positions; in TRL every token of a row has a label
    assert counts(job) == (4 * 13, 4 * 16, 4 * 13)
    facts = job.ledger.facts
    assert (facts["trainer"], facts["precision"], facts["parallel_layout"]) == ("SFTTrainer", "fp32", "single")
    assert not job.our_errors


def test_no_padding_is_counted_for_packed_sequences(frameworks):
    """A packed row has at most 16 positions; TRL packs sequences of 8 and 5 tokens with the best-fit method."""
    job = frameworks.run(sft("packing=True, max_length=16"))

    tokens, processed, _ = counts(job)
    assert tokens == processed > 0
    assert job.ledger.facts["token_source"] == "packed, without padding"
    # 8 packed rows were trained, each with two sequences of 8 tokens or three sequences of 5 tokens
    assert 16 <= job.ledger.summary.samples <= 24


@pytest.mark.parametrize("code", [sft(), grpo()], ids=["SFT", "GRPO"])
def test_losses_are_unchanged_to_the_last_digit(frameworks, code):
    without = frameworks.run(code, attach="0", metrics_enabled="false").output()["losses"]
    with_it = frameworks.run(code).output()["losses"]

    assert len(without) == 4
    assert with_it == without


def test_tokens_of_the_prompt_are_counted_with_each_answer_of_a_pair(frameworks):
    job = frameworks.run(DPO.format(usual=USUAL))
    without = frameworks.run(DPO.format(usual=USUAL), attach="0", metrics_enabled="false")

    # 4 steps of 2 pairs: the prompt "ab" with the answers "cde" and "f" and an end token; only answers have labels
    assert job.ledger.summary.samples == 4 * 2 * 2
    assert counts(job) == (4 * 2 * (2 + 4 + 2 + 2), 4 * 2 * 2 * 6, 4 * 2 * (4 + 2))
    assert job.output()["losses"] == without.output()["losses"]


@pytest.mark.parametrize(("counted", "parameters"), [("total", 4656 - 480 + 256), ("trainable", 256)])
def test_only_parameters_of_adapters_are_counted_as_trainable(frameworks, counted, parameters):
    """LoRA of rank 4 on q and v of one layer of width 16: 2 x (4 x 16 + 16 x 4) = 256 parameters.

    The tokenizer has 49 tokens, so the model has 2 x 15 x 16 parameters less than `tiny.llama` with its 64 tokens.
    """
    given = 'peft_config=__import__("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"])'

    assert frameworks.run(sft(given=given), parameters=counted).ledger.summary.parameters == parameters


def test_generated_tokens_are_counted_and_latency_excludes_generation(frameworks):
    """Each generation sleeps for an extra 0.2 s."""
    slow = """
inner = trainer.model.generate
trainer.model.generate = lambda *a, **k: (time.sleep(0.2), inner(*a, **k))[1]
"""
    job = frameworks.run(grpo(before=slow))

    summary, rows = job.ledger.summary, job.ledger.ranks
    assert (summary.iterations, summary.samples) == (4, 16)
    assert summary.time_by_class["generation"] >= 4 * 0.2
    assert summary.time_by_class["iterations"] < 0.8
    generated = sum(row.generated_tokens for row in rows)
    seconds = sum(row.generation_s for row in rows)
    assert 0.8 <= seconds < 2.0
    # tokens with a label are the generated tokens; TRL's count includes the prompts
    assert generated == counts(job)[2]
    assert summary.tokens == job.output()["history"][3]["num_tokens"]
    assert summary.metrics["job/it_tokens_per_sec"].value == pytest.approx(generated / seconds, rel=0.01)


def test_generated_tokens_are_counted_once_if_completions_are_reused(frameworks):
    job = frameworks.run(grpo("num_iterations=2"))

    generated = sum(row.generated_tokens for row in job.ledger.ranks)
    assert counts(job)[2] == 2 * generated
    assert job.ledger.summary.tokens == 2 * job.output()["history"][2]["num_tokens"]


def test_tokens_that_rloo_generates_are_counted(frameworks):
    code = grpo().replace("GRPO", "RLOO")

    job = frameworks.run(code)

    assert sum(row.generated_tokens for row in job.ledger.ranks) == counts(job)[2] > 0
    assert job.ledger.facts["trainer"] == "RLOOTrainer"


def test_counts_of_two_grpo_processes_are_added(frameworks):
    job = frameworks.run(grpo(), ranks=2)

    assert job.ledger.summary.samples == 2 * 16
    assert job.ledger.summary.tokens == job.output()["history"][3]["num_tokens"]
    assert not job.our_errors


# The evaluation has other rewards, which must not be tracked. An operation of torch in the hook would end the script.
TRACKED = """
import json
from pathlib import Path
from torch.overrides import TorchFunctionMode
from effllm.hooks._wrap import Guard
from effllm.instruments.metrics import grpo_tracker

class NoTensors(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"the hook calls {function}")

def guarded(self, *args, called=Guard.__call__, **named):
    if self.name != "the reward of groups in TRL":
        return called(self, *args, **named)
    with NoTensors():
        return called(self, *args, **named)

Guard.__call__ = guarded
early, seen = grpo_tracker(), []
def letters(completions, **_):
    found = [float(one.count("a")) for one in completions]
    if trainer.model.training:
        seen.append(found)
    return found if trainer.model.training else [-100.0 for _ in completions]
def sometimes(completions, **_):
    return [None if i % 4 == 0 else 0.5 for i, _ in enumerate(completions)]
trainer = trl.GRPOTrainer(model=model(), reward_funcs=[letters, sometimes], args=arguments, train_dataset=rows,
                          eval_dataset=rows.select(range(2)), processing_class=words)
trainer.train()
tracker = grpo_tracker()
body = {"is_early": tracker is early, "seen": seen, "history": trainer.state.log_history,
        "distribution": tracker.get_reward_distribution(), "last_step": tracker.last_step,
        "recent": {name: tracker.get_recent(name) for name in tracker.names}}
Path(f"tracked{os.environ.get('RANK', '0')}.json").write_text(json.dumps(body))
tiny.end()
"""


def tracked(frameworks, ranks=1, beta=0.0):
    """Run GRPO with two reward functions; return the contents of each rank's tracker."""
    options = f'reward_weights=[1.0, 2.0], beta={beta}, eval_strategy="steps", eval_steps=2'
    code = grpo(options).split("def reward(")[0] + TRACKED
    job = frameworks.run(code, ranks=ranks)
    assert not job.our_errors
    (folder,) = job.runs()
    more = {"instruments": json.loads((folder / "summary.json").read_text())["instruments"]}
    return [json.loads((job.folder / f"tracked{rank}.json").read_text()) | more for rank in range(ranks)]


def test_tracker_receives_the_rewards_of_a_grpo_run(frameworks):
    (found,) = tracked(frameworks, beta=0.1)

    # Each group has 4 completions. The second reward function has weight 2 and returns None for the first completion.
    groups = [[one + 2.0 * 0.5 * (i > 0) for i, one in enumerate(group)] for group in found["seen"]]
    rewards = [one for group in groups for one in group]
    distribution, logged = found["distribution"], [one for one in found["history"] if "loss" in one]
    assert (found["is_early"], len(groups), found["last_step"]) == (True, 4, 4)
    assert (distribution["groups"], distribution["empty_groups"]) == (4, 0)
    assert distribution["equal_groups"] == sum(len(set(group)) == 1 for group in groups)
    assert distribution["reward_mean"] == pytest.approx(statistics.fmean(rewards))
    assert distribution["reward_std"] == pytest.approx(statistics.stdev(rewards))
    best = statistics.fmean(max(group) for group in groups)
    assert distribution["rank_distribution"]["1"] == pytest.approx(best)
    assert list(distribution["rank_distribution"]) == ["1", "2", "3", "4"]
    # TRL logs the same values for these steps
    recent = found["recent"]
    assert recent["mean_reward"] == pytest.approx([one["reward"] for one in logged])
    assert recent["reward/letters"] == pytest.approx([one["rewards/letters/mean"] for one in logged])
    assert recent["reward/sometimes"] == [0.5] * 4
    assert recent["kl_divergence"] == pytest.approx([one["kl"] for one in logged])
    assert recent["policy_loss"] == [one["loss"] for one in logged]


def test_groups_of_both_ranks_are_tracked_on_the_first_rank(frameworks):
    first, second = tracked(frameworks, ranks=2)

    seen = [one for rank in (first, second) for group in rank["seen"] for one in group]
    assert first["distribution"]["groups"] == 2 * 4
    assert first["distribution"]["reward_mean"] == pytest.approx(statistics.fmean(seen) + 2.0 * 0.5 * 3 / 4)
    assert second["distribution"]["groups"] == 0
    # each reward counts once in the run folder
    assert (first["instruments"]["group/reward"]["count"], len(seen)) == (32, 32)


TWO_TRAINERS = """
from effllm.instruments.metrics import grpo_tracker
trainer.train()
first = grpo_tracker()
second = trl.GRPOTrainer(model=model(), reward_funcs=reward, args=arguments, train_dataset=rows,
                         processing_class=words)
second.train()
assert grpo_tracker() is not first
assert [one.get_reward_distribution()["groups"] for one in (first, grpo_tracker())] == [4, 4]
open("passed", "w").close()
raise SystemExit
"""


@pytest.mark.parametrize("kind", ["trl.GRPO", "trl.RLOO"])
def test_each_trainer_of_a_process_has_its_own_tracker(frameworks, kind):
    code = grpo(before=TWO_TRAINERS).replace("trl.GRPO", kind)

    assert (frameworks.run(code).folder / "passed").exists()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_tokens_of_trl_are_compared_with_the_counts(frameworks, is_wrong):
    """TRL logs the sum of the attention masks, 13 tokens a step of 16 positions; a wrong trainer adds batches twice."""
    code = sft().replace("max_steps=4", "max_steps=36").replace("range(32)", "range(80)")
    if is_wrong:
        code = code.replace("trainer.train()", "trainer._tp_size = 0.5\ntrainer.train()")
    summary = frameworks.run(code, log_interval=2).ledger.summary

    name = "framework/tokens_per_iteration"
    assert [(one.name, one.framework, one.own) for one in summary.audit.figures] == [(name, 26.0, 13.0)] * is_wrong
    assert summary.instruments[name].mean == (26.0 if is_wrong else 13.0)


def test_tokens_of_kto_are_not_compared(frameworks):
    """TRL leaves out the second completion of each row, which the model also reads."""
    code = DPO.replace(
        '"chosen": ["cde"] * 16, "rejected": ["f"] * 16', '"completion": ["cde"] * 16, "label": [True, False] * 8'
    )
    code = code.replace("trl.DPO", "trl.KTO").format(usual=USUAL.replace("max_steps=4", "max_steps=36"))
    job = frameworks.run(code, log_interval=2)

    assert job.ledger.summary.iterations == 36
    assert "framework/tokens_per_iteration" not in job.ledger.summary.instruments
