"""The callback in a real Trainer; skipped where transformers is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("accelerate", reason="needs transformers with accelerate")

TRAINING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from effllm import EfficientLLMCallback

model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=32))
rows = [{"input_ids": torch.arange(16) % 64, "labels": torch.arange(16) % 64} for _ in range(48)]
arguments = TrainingArguments(output_dir=sys.argv[1], per_device_train_batch_size=2, gradient_accumulation_steps=2,
                              max_steps=12, logging_steps=3, eval_strategy="steps", eval_steps=6, save_steps=6,
                              include_num_input_tokens_seen="all", use_cpu=True, report_to="none", disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4],
        callbacks=[EfficientLLMCallback()]).train()
print("parameters", sum(p.numel() for p in model.parameters()))
"""


def test_a_trainer_with_the_callback_reports_its_steps_tokens_and_phases(tmp_path):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("EFFICIENTLLM_")}
    environ |= {"EFFICIENTLLM_RUN_DIR": str(tmp_path), "EFFICIENTLLM_RUN_NAME": "run", "EFFICIENTLLM_LOG_INTERVAL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path / "out")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(Path(tmp_path / "run" / "summary.json").read_text())
    # 12 steps of 2 x 2 samples of 16 tokens
    assert (summary["iterations"], summary["samples"], summary["tokens"]) == (12, 48, 768)
    assert summary["status"] == "completed"
    assert f"parameters {summary['parameters']}" in done.stdout
    assert {"evaluation", "checkpoint"} <= set(summary["time_by_class"])
    assert "[EfficientLLM Metrics] Step 12:" in done.stdout
