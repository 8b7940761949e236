"""The YAML sections of the energy log of fine-tuning, which the tests of docs/porting.md read."""

SECTION_METRICS = """
metrics:
  enable_energy_logging: true
  sample_interval_s: 0.05
  warmup_s: 60.0
  log_vram_every_s: 1.0
  results_csv: "outputs/energy_results.csv"
"""
SECTIONS_BNB = """
tuning:
  backend: bnb
  lora:
    r: 32
    alpha: 32
    dropout: 0.05

train:
  bf16: false
  fp16: true
  optim: paged_adamw_8bit
"""
SECTIONS_UNSLOTH = """
tuning:
  backend: unsloth
  lora:
    r: 32
    alpha: 32
    dropout: 0.05

train:
  bf16: true
  fp16: false
  optim: adamw_torch
"""
