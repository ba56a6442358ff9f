"""What ``config.json`` says of the layers that have a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.json_fields import a_count, a_text, an_object, counts, nested, texts
from kvcache_plugin.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_plugin.checkpoint.json_fields import Json

# The names of the same thing in the configurations of different models, the usual ones first.
_LAYERS: Final = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_HEADS: Final = (
    "num_key_value_heads",
    "num_global_key_value_heads",
    "num_key_value_heads_per_layer",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)
_DRAFT_LAYERS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
MOST_LAYERS: Final = 10_000


@dataclass(frozen=True)
class ModelShape:
    """The layers of a model, as far as its configuration tells.

    :param num_layers: layers of the model itself, without draft layers.
    :param kv_heads: each number of KV heads that a layer may have; empty when it is not said.
    :param attention_layers: the layers that have a KV cache of their own, ``None`` when all have.
    :param draft_layers: further layers that predict more tokens and need no scales.
    :param is_mla: whether K and V are one latent vector (DeepSeek).
    """

    architectures: tuple[str, ...] = ()
    num_layers: int | None = None
    kv_heads: tuple[int, ...] = ()
    attention_layers: tuple[int, ...] | None = None
    draft_layers: int = 0
    is_mla: bool = False

    def has_kv_cache(self, layer: int) -> bool:
        """Whether a layer of the model itself has a KV cache of its own."""
        if self.num_layers is not None and layer >= self.num_layers:
            return False
        return self.attention_layers is None or layer in self.attention_layers


def read_shape(config: Json) -> ModelShape:
    """Read the layers and KV heads.

    :param config: ``config.json`` or Mistral's ``params.json``, empty where there is none.
    """
    text = next((part for part in nested(config) if a_count(part, *_LAYERS)), config)
    layers = a_count(text, *_LAYERS)
    heads = {count for key in _HEADS for count in counts(text.get(key))}
    return ModelShape(
        architectures=tuple(shown(name, most=80) for name in texts(config, "architectures")[:10]),
        num_layers=layers,
        kv_heads=tuple(sorted(heads or set(counts(text.get("num_attention_heads"))))),
        attention_layers=None if layers is None else _attention_layers(text, layers),
        draft_layers=a_count(text, *_DRAFT_LAYERS) or a_count(config, *_DRAFT_LAYERS) or 0,
        is_mla=a_count(text, "kv_lora_rank") is not None,
    )


def _attention_layers(text: Json, layers: int) -> tuple[int, ...] | None:
    """The layers with a KV cache of their own, where the configuration tells; else ``None``."""
    if layers > MOST_LAYERS:
        return None
    found = _with_attention(text, layers)
    # The last of Gemma 3n's layers use the K and V of earlier ones.
    own = layers - (a_count(text, "num_kv_shared_layers") or 0)
    if found is None and own == layers:
        return None
    return tuple(sorted({i for i in (range(layers) if found is None else found) if 0 <= i < own}))


def _with_attention(text: Json, layers: int) -> Iterable[int] | None:
    """The layers that store K and V, in each of the ways that hybrid models say it."""
    kinds = texts(text, "layer_types") or texts(text, "layers_block_type")
    if len(kinds) == layers:
        return (i for i, kind in enumerate(kinds) if _has_kv_cache(kind))
    pattern = a_text(text, "hybrid_override_pattern")
    if len(pattern) == layers:  # Nemotron-H
        return (i for i, kind in enumerate(pattern) if kind == "*")
    flags = text.get("attn_type_list")
    if isinstance(flags, list) and len(flags) == layers:  # MiniMax
        return (i for i, flag in enumerate(flags) if flag == 1)
    linear = an_object(text, "linear_attn_config").get("full_attn_layers")
    if isinstance(linear, list):  # Kimi-Linear, which counts from 1
        return (i - 1 for i in counts(linear))
    for key in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        indices = text.get(key)
        if isinstance(indices, list):
            return (i for i in indices if isinstance(i, int))
    if interval := a_count(text, "full_attention_interval"):  # Qwen3-Next
        return range(interval - 1, layers, interval)
    if period := a_count(text, "attn_layer_period"):  # Jamba
        return range(a_count(text, "attn_layer_offset") or 0, layers, period)
    return None


def _has_kv_cache(kind: str) -> bool:
    """Whether a layer of this kind in ``layer_types`` stores K and V."""
    name = kind.lower()
    return name == "hybrid" or ("attention" in name and "linear" not in name)
