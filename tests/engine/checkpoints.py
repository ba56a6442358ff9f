"""Small random Llama checkpoints with K/V scales, for the engines to load.

Both engines serve them on a CPU in seconds. Only torch and safetensors are needed to write one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Checkpoint", "Scale", "Strategy", "write_checkpoint"]

Scale = float | torch.Tensor | None
"""One side of one layer: its value, a tensor of any shape, or ``None`` for "not in the file"."""

Strategy = Literal["tensor", "attn_head"]

SCALE_NAME = "model.layers.{layer}.self_attn.{side}_scale"
"""Both engines find it."""

_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_HEAD_DIM = 64
_VOCABULARY = 1024
_SEED = 20240


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint by name, not yet on disk: the arguments of :func:`write_checkpoint`."""

    name: str
    scales: Mapping[int, tuple[Scale, Scale]] = field(default_factory=dict)
    num_hidden_layers: int = 2
    hidden_size: int = 256
    quantized: bool = True
    strategy: Strategy = "tensor"
    scale_name: str = SCALE_NAME
    declared: Mapping[str, object] | None = None
    linked: bool = False
    """Whether its file is a link out of its folder: engines follow it, and scans do not."""

    def write(self, parent: Path) -> Path:
        """Writes it into ``parent / name`` and returns that folder."""
        folder = write_checkpoint(
            parent / self.name,
            self.scales,
            num_hidden_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            quantized=self.quantized,
            strategy=self.strategy,
            scale_name=self.scale_name,
            declared=self.declared,
        )
        if self.linked:
            file = folder / "model.safetensors"
            file.symlink_to(file.rename(parent / f"{self.name}.safetensors"))
        return folder


def write_checkpoint(
    folder: Path,
    scales: Mapping[int, tuple[Scale, Scale]] | None = None,
    *,
    num_hidden_layers: int = 2,
    hidden_size: int = 256,
    quantized: bool = True,
    strategy: Strategy = "tensor",
    scale_name: str = SCALE_NAME,
    declared: Mapping[str, object] | None = None,
) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` into ``folder`` and returns it.

    The weights depend on nothing but the two sizes, so two checkpoints that differ only in their
    scales differ only in what the engines make of those scales. They are drawn wide enough for
    the scales to matter: K and V are about 1, and where a scale cuts them off, 0.003 for instance,
    the greedy tokens change. Another rounding alone changes them on some CPUs and not on others.

    :param folder: made if missing.
    :param scales: layer number -> (k, v). A number is stored as float32 of shape ``(1,)``, a
        tensor as it is. Layers that are not named have no scales.
    :param quantized: whether ``config.json`` says that the KV cache is FP8 (compressed-tensors).
        The scales are written in either case.
    :param strategy: the granularity that ``config.json`` names.
    :param scale_name: the name of a scale, with ``{layer}`` and ``{side}``.
    :param declared: the ``quantization_config``, in place of the usual one.
    :raises ValueError: ``scales`` names a layer that the model does not have.
    """
    scales = scales or {}
    strangers = sorted(layer for layer in scales if not 0 <= layer < num_hidden_layers)
    if strangers:
        raise ValueError(f"no such layers: {strangers}; the model has {num_hidden_layers}")

    tensors = _weights(num_hidden_layers, hidden_size)
    for layer, sides in scales.items():
        for side, scale in zip("kv", sides, strict=True):
            if scale is not None:
                name = scale_name.format(layer=layer, side=side)
                tensors[name] = _scale_tensor(scale)

    config = _config(num_hidden_layers, hidden_size)
    if quantized:
        config["quantization_config"] = declared or _quantization_config(strategy)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _scale_tensor(scale: float | torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.detach().clone().contiguous()
    return torch.tensor([scale], dtype=torch.float32)


def _weights(num_hidden_layers: int, hidden_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    intermediate_size = 2 * hidden_size
    q_size, kv_size = _NUM_HEADS * _HEAD_DIM, _NUM_KV_HEADS * _HEAD_DIM

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator) * deviation
        return drawn.to(torch.bfloat16)

    def linear(outputs: int, inputs: int) -> torch.Tensor:
        return normal(outputs, inputs, 1 / math.sqrt(inputs))

    def norm() -> torch.Tensor:
        return torch.ones(hidden_size, dtype=torch.bfloat16)

    tensors = {
        # Small, so that what attention adds to it decides the next token.
        "model.embed_tokens.weight": normal(_VOCABULARY, hidden_size, 0.25),
        "model.norm.weight": norm(),
        "lm_head.weight": linear(_VOCABULARY, hidden_size),
    }
    for layer in range(num_hidden_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": linear(q_size, hidden_size),
            f"{prefix}.self_attn.k_proj.weight": linear(kv_size, hidden_size),
            f"{prefix}.self_attn.v_proj.weight": linear(kv_size, hidden_size),
            f"{prefix}.self_attn.o_proj.weight": linear(hidden_size, q_size),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.mlp.gate_proj.weight": linear(intermediate_size, hidden_size),
            f"{prefix}.mlp.up_proj.weight": linear(intermediate_size, hidden_size),
            f"{prefix}.mlp.down_proj.weight": linear(hidden_size, intermediate_size),
        }
    return tensors


def _config(num_hidden_layers: int, hidden_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden_size,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_attention_heads": _NUM_HEADS,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": _NUM_KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": _VOCABULARY,
    }


def _quantization_config(strategy: Strategy) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "quantization_status": "compressed",
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": strategy,
            "symmetric": True,
            "dynamic": False,
            "observer": "minmax",
        },
    }
