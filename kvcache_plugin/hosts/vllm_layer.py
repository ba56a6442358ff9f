"""What stands on one of vLLM's attention layers: raw scales, and the copies that are served.

Raw scales are ``k_scale`` and ``v_scale``; served are ``_k_scale`` and what vLLM keeps on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_plugin.device import Device
from kvcache_plugin.hosts.loaded import UNSET, present, unless_marked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_plugin.hosts.loaded import LoadedScales
    from kvcache_plugin.scales import KVScales

_SIDES: Final = ("k", "v")
#: Those that vLLM's compressed-tensors method has.
_STARTING_FROM_ONE: Final = (*_SIDES, "q")
#: Those of a query and of probabilities too.
_BUFFERS: Final = (*_SIDES, "q", "prob")


def prepare(layer: Any, found: LoadedScales | None, scales: KVScales | None) -> None:
    """Leave raw scales on the layer that vLLM's own processing understands.

    A marker of ours that no checkpoint has overwritten becomes vLLM's own default again.
    """
    if found is not None and scales is not None:
        present(layer, found, scales)
    if _starts_from_one(layer):
        if found is not None and found.q is not None and scales is not None:
            _present_query(layer.q_scale.data, found)
        for parameter in _raw_parameters(layer, _STARTING_FROM_ONE):
            parameter.data[parameter.data == UNSET] = 1.0


def _present_query(q_scale: torch.Tensor, found: LoadedScales) -> None:
    """Make of a query's raw scale what vLLM's other methods make of it, where it is served raw."""
    if not (q_scale > 0).all():
        q_scale.fill_(1.0)
    elif Device.of(found.device).is_fnuz:
        q_scale.mul_(2.0)


def raw(layer: Any, name: str) -> torch.Tensor | None:
    """A raw scale, ``None`` where the layer has no place for it, or none was loaded."""
    parameter = getattr(layer, name, None)
    return None if parameter is None else unless_marked(parameter.detach())


def _starts_from_one(layer: Any) -> bool:
    """Whether vLLM's default for this layer's raw scales is 1.0 and not a marker."""
    return hasattr(layer, "k_scale") and hasattr(layer, "k_zero_point")


def write(layer: Any, scales: KVScales) -> None:
    """Every copy that vLLM keeps: the buffer, the host's float and the host's tensor."""
    if scales.k_source == "default":
        return  # vLLM has written 1.0 itself
    for side in _SIDES:
        # vLLM loads under a default device and dtype of its own: name both.
        scale = torch.as_tensor(getattr(scales, side), dtype=torch.float64, device="cpu")
        _write_side(layer, side, scale)


def _write_side(layer: Any, side: str, scale: torch.Tensor) -> None:
    # A buffer, or the parameter itself (vLLM 0.31), which tracks what is written to it.
    getattr(layer, f"_{side}_scale").detach().copy_(scale)
    # Of per-head scales vLLM keeps the largest on the host.
    number = float(scale.max())
    setattr(layer, f"_{side}_scale_float", number)
    on_host = getattr(layer, f"_{side}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(number)


def mark(layer: Any) -> None:
    for parameter in _raw_parameters(layer, _STARTING_FROM_ONE):
        parameter.data.fill_(UNSET)


def take_away(layer: Any) -> dict[str, torch.Tensor]:
    """The scales that a layer serves, by side; those that were loaded count as not loaded then."""
    names = {side: f"_{side}_scale" for side in _BUFFERS if hasattr(layer, f"_{side}_scale")}
    served = {side: getattr(layer, name).detach().clone() for side, name in names.items()}
    for parameter in _raw_parameters(layer, _BUFFERS):
        parameter.data.fill_(UNSET)
    prepare(layer, None, None)
    return served


def bring_back(layer: Any, served: Mapping[str, torch.Tensor]) -> None:
    for side, scale in served.items():
        _write_side(layer, side, scale)


def _raw_parameters(layer: Any, sides: tuple[str, ...]) -> list[torch.nn.Parameter]:
    """The raw scales for which this release has a place on this layer."""
    found = (getattr(layer, f"{side}_scale", None) for side in sides)
    return [parameter for parameter in found if parameter is not None]
