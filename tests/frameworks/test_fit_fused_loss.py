"""The estimate of a fused loss against TRL's own head, whose tensors are counted on the CPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks.memory.built import Built, build
from benchmarks.memory.configurations import Configuration
from benchmarks.memory.counted import count_step
from benchmarks.memory.judged import shape_and_plan
from effllm.memory.estimate import estimate
from effllm.memory.training import TensorSizes, torch_tiles

tiles = pytest.importorskip("trl.kernels.chunked_logprob")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def counted(one: Configuration):
    """Return the bytes of a step whose loss is that of TRL's head."""
    from trl.trainer.utils import add_fused_lm_head

    built = build(one)
    base = built.model.get_base_model() if one.lora_rank else built.model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))  # as the SFTTrainer does

    def loss_of(ids):
        return lambda: -built.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum() / ids.numel()

    fused = Built(built.model, built.optimizer, [loss_of(ids) for ids in built.texts], built.texts, [])
    fused.step()
    return count_step(fused.model, fused.optimizer, fused.losses, fused.texts)


def estimated(one: Configuration):
    shape, plan = shape_and_plan(one)
    return estimate(shape, replace(plan, fused_loss=True))


def fold_like_triton(_tile, _stride, _targets, largest, sums, *more, **_):
    """Replace the statistics without a temporary tile, as the kernel of Triton."""
    for one in (largest, sums, *more[:5]):
        one.fill_(1.0)


CONFIGURATIONS = [
    Configuration("llama", 2, hidden, 4, 2, 176, vocab, *tokens, "fp32", "sgd", "none", lora, accumulation, "sdpa")
    for hidden, vocab, tokens in ((64, 40000, (2, 128)), (128, 70000, (1, 200)))
    for lora in (0, 4)
    for accumulation in (1, 2)
]


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=lambda one: f"{one.vocab}-{one.lora_rank}-{one.accumulation}")
def test_peak_with_kernels_without_temporary_tiles_is_the_estimate(one, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(tiles, "_forward_tile", fold_like_triton)
    monkeypatch.setattr(tiles, "_backward_tile", lambda tile, *_, **__: tile.zero_())

    found = estimated(one)
    parts = ("weights", "optimizer states", "gradients", "activations", "logits")
    expected = sum(found.part(name).bytes.expected for name in parts)

    assert counted(one).peak == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_without_triton_are_below_the_high_limit(precision):
    torch.set_num_threads(1)
    one = replace(CONFIGURATIONS[0], precision=precision, lora_rank=4)

    found = estimated(one)
    logits, other = found.part("logits").bytes, found.part("activations").bytes.expected
    activations = counted(one).activations

    assert other + logits.expected < activations <= 1.15 * (other + logits.high)
    assert logits.high - logits.expected == torch_tiles(TensorSizes(found.shape, found.plan))
