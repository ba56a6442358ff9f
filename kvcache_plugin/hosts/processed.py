"""What SGLang's processing made of one layer's scales, kept on the layer itself.

SGLang writes its result over the raw scales and processes them again after a capture or a reload.
What we wrote ourselves is no new raw value, and a copy of the layer has to know that, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvcache_plugin.hosts.loaded import UNSET, unless_marked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

Raw: TypeAlias = "torch.Tensor | float | None"

_ATTRIBUTE: Final = "_kvcache_plugin_processed"


@dataclass(frozen=True)
class Processed:
    """The two scales of a layer, K's first.

    :param layer: the layer's name in the model.
    :param raw: what the checkpoint brought, ``None`` where it brought nothing.
    :param stands: what we left in the parameters: the served scales, or the raw ones while new
        ones are being loaded.
    """

    layer: str
    raw: tuple[float | None, ...]
    stands: tuple[float, ...]


def remember(layer: Any, name: str, k: Raw = None, v: Raw = None) -> None:
    """Remember what a checkpoint brought to a layer, now that the result stands there."""
    raw = tuple(None if raw is None else float(raw) for raw in (k, v))
    setattr(layer, _ATTRIBUTE, Processed(name, raw, _standing(layer)))


def name_of(layer: Any) -> str:
    """The name that the layer had when it was processed, empty where it was not."""
    processed: Processed | None = getattr(layer, _ATTRIBUTE, None)
    return processed.layer if processed is not None else ""


def raw_scales(layer: Any) -> tuple[Raw, Raw]:
    """What the checkpoint brought for K and V, also where our own result stands by now."""
    processed: Processed | None = getattr(layer, _ATTRIBUTE, None)
    raws: list[Raw] = []
    for i, parameter in enumerate(_parameters(layer)):
        raw: Raw = unless_marked(parameter.detach().cpu().clone())
        if processed is not None and parameter.numel() == 1:
            raw = processed.raw[i] if parameter.item() == processed.stands[i] else raw
        raws.append(raw)
    return raws[0], raws[1]


def restore_raw(layers: Iterable[Any]) -> None:
    """Let the raw scales stand where new ones are about to be loaded."""
    for layer, processed in _processed(layers):
        for parameter, raw in zip(_parameters(layer), processed.raw, strict=True):
            parameter.data.fill_(UNSET if raw is None else raw)
        setattr(layer, _ATTRIBUTE, replace(processed, stands=_standing(layer)))


def restore_ours(layers: Iterable[Any]) -> None:
    """Let stand what we left there, where something else was loaded or memory was lost."""
    for layer, processed in _processed(layers):
        for parameter, stood in zip(_parameters(layer), processed.stands, strict=True):
            parameter.data.fill_(stood)


def _processed(layers: Iterable[Any]) -> Iterator[tuple[Any, Processed]]:
    for layer in layers:
        processed: Processed | None = getattr(layer, _ATTRIBUTE, None)
        if processed is not None:
            yield layer, processed


def _parameters(layer: Any) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    return layer.k_scale, layer.v_scale


def _standing(layer: Any) -> tuple[float, ...]:
    return tuple(parameter.item() for parameter in _parameters(layer))
