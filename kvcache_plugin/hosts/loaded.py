"""The raw scales on one layer of an engine's model, between loading and processing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from kvcache_plugin.scales import Granularity, KVScales

#: What both engines put where a scale will be, until one is loaded.
UNSET: Final = -1.0


@dataclass(frozen=True)
class LoadedScales:
    """The raw scales that a checkpoint left on one layer, ``None`` for a side that it has not.

    :param layer: the layer's name in the model.
    :param device: where the layer is served.
    :param dtype: what the engine keeps raw scales in.
    :param q: the scale of the query, which vLLM's attention may quantize too.
    :param prob: that of the probabilities.
    :param has_place: whether the engine made room for scales. Where it did not, the layer has a
        quantized cache, and nothing of a checkpoint can reach it.
    """

    layer: str
    k: torch.Tensor | float | None
    v: torch.Tensor | float | None
    kv_cache_dtype: str
    device: torch.device
    granularity: Granularity = "tensor"
    num_kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    q: torch.Tensor | None = None
    prob: torch.Tensor | None = None
    has_place: bool = True


def unless_marked(scale: torch.Tensor) -> torch.Tensor | None:
    """``None`` for the engines' marker of a scale that was not loaded: -1.0 in every element."""
    return None if scale.numel() and bool((scale == UNSET).all()) else scale


def present(layer: Any, found: LoadedScales, scales: KVScales) -> None:
    """Leave raw scales on a layer that the engine's own processing understands.

    Each engine has ways of its own with a pair of which one side is unset, or both are not
    positive, so it gets to see a whole pair, or none.
    """
    k, v = found.k, found.v
    if scales.k_source == "default":
        k = v = UNSET
    elif scales.k_source == "duplicated":
        k = v
    elif scales.v_source == "duplicated":
        v = k
    for parameter, raw in ((layer.k_scale, k), (layer.v_scale, v)):
        parameter.data.copy_(torch.as_tensor(raw))
