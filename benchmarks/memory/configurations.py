"""The configurations of the benchmark: combinations drawn with a seed, so that every value is with every other."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

ARCHITECTURES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 48},
    "phi3": {},
    "gpt2": {"layer_norm": True},
    "gpt_neox": {"layer_norm": True},
    "opt": {"layer_norm": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "mistral-window": {"model_type": "mistral", "sliding_window": 48},
    "gemma2": {"head_dim": 48, "query_pre_attn_scalar": 48, "sliding_window": 48},
    "gemma3_text": {"head_dim": 48, "query_pre_attn_scalar": 48, "sliding_window": 48, "sliding_window_pattern": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "first_k_dense_replace": 1,
    },
}
ADAPTED = ("llama", "mistral", "qwen2", "qwen3")
SIZES = (  # layers, hidden, heads, key-value heads, width of the MLP, vocabulary
    (2, 64, 4, 2, 176, 512),
    (4, 96, 6, 2, 256, 1024),
    (3, 128, 8, 8, 344, 2048),
    (6, 128, 4, 1, 512, 768),
    (8, 64, 4, 4, 256, 4096),
)
TOKENS = ((1, 128), (2, 64), (4, 96), (1, 256), (3, 160))
PRECISIONS = ("fp32", "bf16", "bf16-mixed")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "adafactor", "lion", "muon", "adamw-8bit")


@dataclass(frozen=True)
class Configuration:
    """A tiny model with its training."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    micro_batch: int
    seq_length: int
    precision: str
    optimizer: str
    checkpointing: str
    lora_rank: int
    accumulation: int
    attention: str
    lora_targets: str = "all"
    base_bits: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config.json."""
        extra = {key: value for key, value in ARCHITECTURES[self.architecture].items() if key != "layer_norm"}
        sizes: dict[str, Any] = {"model_type": self.architecture, "vocab_size": self.vocab, "hidden_size": self.hidden}
        sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.heads, "pad_token_id": 0}
        sizes |= {"max_position_embeddings": 512, "use_cache": False}
        if self.architecture == "opt":
            return {**sizes, "ffn_dim": self.intermediate, "word_embed_proj_dim": self.hidden, "dropout": 0.0}
        if self.architecture == "gpt2":
            dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return {**sizes, "n_inner": self.intermediate, "n_positions": 512, **dropouts}
        sizes |= {"num_key_value_heads": self.kv_heads, "intermediate_size": self.intermediate}
        if self.architecture in ("qwen3_moe", "deepseek_v3"):
            sizes["moe_intermediate_size"] = self.intermediate // 16 * 8  # grouped products need rows of 16 bytes
        if self.architecture == "deepseek_v3":
            sizes["num_key_value_heads"] = self.heads
        return {**sizes, **extra}

    @property
    def name(self) -> str:
        return " ".join(map(str, asdict(self).values()))


def configurations(count: int, seed: int = 15) -> list[Configuration]:
    """Return different configurations; architectures, precisions and optimizers take turns."""
    draw = random.Random(seed)
    found: dict[Configuration, None] = {}
    architectures = list(ARCHITECTURES)
    while len(found) < count:
        at = len(found)
        architecture = architectures[at % len(architectures)]
        lora = draw.choice((0, 4, 8)) if architecture in ADAPTED else 0
        found[
            Configuration(
                architecture,
                *draw.choice(SIZES),
                *draw.choice(TOKENS),
                precision=PRECISIONS[(at // len(architectures)) % 3],
                optimizer=draw.choice(OPTIMIZERS),
                checkpointing=draw.choice(("none", "none", "full")),
                lora_rank=lora,
                accumulation=draw.choice((1, 1, 2)),
                attention="eager" if architecture == "gemma2" else draw.choice(("sdpa", "eager")),
                lora_targets=draw.choice(("all", "all", "attention", "qv")) if lora else "all",
                base_bits=draw.choice((0, 4)) if lora else 0,
            )
        ] = None
    return list(found)
