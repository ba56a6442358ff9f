"""A small Llama that has learnt something, so that its greedy tokens have a margin.

It goes on with what repeats itself: it looks up what stood there a period before, for which both K
and V must be right. Trained in seconds, with a fixed seed. Only torch and safetensors are needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Scales", "Trained", "sequences", "train"]

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
HIDDEN, INTERMEDIATE, VOCABULARY = 128, 256, 64
EPSILON, THETA = 1e-5, 10000.0
PERIOD = 6

Scales = list[tuple[float, float]]
"""The K and V scale of each layer."""


def sequences(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens ``[count, length]``; each row repeats tokens of its own."""
    once = torch.randint(VOCABULARY, (count, PERIOD), generator=generator)
    return once.repeat(1, length // PERIOD + 1)[:, :length]


@dataclass(frozen=True)
class Trained:
    """The weights, under the names of a checkpoint."""

    weights: dict[str, torch.Tensor]

    def logits(
        self,
        tokens: torch.Tensor,
        stored: Callable[[int, str, torch.Tensor], torch.Tensor] = lambda layer, side, x: x,
    ) -> torch.Tensor:
        """Logits ``[count, length, VOCABULARY]`` after each token.

        :param tokens: ``[count, length]``.
        :param stored: what becomes of K and V in a cache: it gets the layer, ``"k"`` or ``"v"``,
            and ``[count, length, KV_HEADS, HEAD_DIM]``.
        """
        w = self.weights
        x = w["model.embed_tokens.weight"][tokens]
        count, length = tokens.shape
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            normed = _norm(x, w[f"{at}input_layernorm.weight"])
            q, k, v = (
                functional.linear(normed, w[f"{at}self_attn.{side}_proj.weight"]).view(
                    count, length, -1, HEAD_DIM
                )
                for side in "qkv"
            )
            q, k = _rotate(q), _rotate(k)
            k, v = stored(layer, "k", k), stored(layer, "v", v)
            attended = functional.scaled_dot_product_attention(
                *(side.transpose(1, 2) for side in (q, k, v)), is_causal=True, enable_gqa=True
            )
            attended = attended.transpose(1, 2).reshape(count, length, -1)
            x = x + functional.linear(attended, w[f"{at}self_attn.o_proj.weight"])
            normed = _norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate, up = (
                functional.linear(normed, w[f"{at}mlp.{name}_proj.weight"])
                for name in ("gate", "up")
            )
            x = x + functional.linear(functional.silu(gate) * up, w[f"{at}mlp.down_proj.weight"])
        return functional.linear(_norm(x, w["model.norm.weight"]), w["lm_head.weight"])

    def largest(self, tokens: torch.Tensor) -> Scales:
        """The largest magnitudes of K and V in each layer."""
        found: dict[tuple[int, str], float] = {}

        def note(layer: int, side: str, x: torch.Tensor) -> torch.Tensor:
            found[layer, side] = float(x.abs().max())
            return x

        self.logits(tokens, note)
        return [(found[layer, "k"], found[layer, "v"]) for layer in range(LAYERS)]

    def write(self, folder: Path, scales: Scales) -> Path:
        """Writes a checkpoint with these K/V scales into ``folder``, and returns it."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 512,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "config_groups": {},
                "ignore": [],
                "quantization_status": "compressed",
                # What both engines need to make a place for scales, whatever they are for.
                "kv_cache_scheme": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "tensor",
                    "symmetric": True,
                    "dynamic": False,
                    "observer": "minmax",
                },
            },
        }
        tensors = {name: x.to(torch.bfloat16) for name, x in self.weights.items()}
        for layer, sides in enumerate(scales):
            for side, scale in zip("kv", sides, strict=True):
                tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor([scale])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def train() -> Trained:
    """A model that has learnt to go on with what repeats itself; its weights are bfloat16's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other longer than they work
    try:
        return Trained(_train(steps=300))
    finally:
        torch.set_num_threads(threads)


def _train(steps: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
    for x in weights.values():
        x.requires_grad_()
    model = Trained(weights)
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        tokens = sequences(16, 4 * PERIOD, generator)
        known = slice(PERIOD - 1, -1)
        logits = model.logits(tokens)[:, known]
        loss = functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, known.start + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {name: x.detach().to(torch.bfloat16).float() for name, x in weights.items()}


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    angles = torch.outer(torch.arange(x.shape[1]), THETA ** (-torch.arange(half) / half))
    cos, sin = (f(angles)[:, None] for f in (torch.cos, torch.sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
