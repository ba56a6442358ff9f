"""Runs inside vLLM's workers: what was given to be written to the caches, and what lies there.

A kernel may store K and V in any order that it likes. Where a value goes is found out with vLLM's
own write: small integers are codes of FP8, and a few of them tell every place from the others.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_BASE, _DIGITS = 8, 6


def rounded(tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """The codes by their definition, with torch's own cast, as bytes."""
    dtype = _FP8[kv_cache_dtype]
    largest = torch.finfo(dtype).max
    scale = scale.float() if scale.numel() == 1 else scale.float().unsqueeze(-1)
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype).view(torch.uint8)


def stored(
    layer: Any, shape: torch.Size, dtype: torch.dtype, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of K and of V in a layer's cache at these slots.

    :param shape: of K and of V, ``[tokens, heads, head_dim]``.
    :param dtype: what they were given in.
    """
    block_size = layer.kv_cache.shape[2]
    blocks, number_of_block = (slots // block_size).unique(return_inverse=True)
    cache = layer.kv_cache[blocks].contiguous().view(torch.uint8)
    slots = number_of_block * block_size + slots % block_size
    numbers = torch.arange(2 * shape.numel()).reshape(2, *shape)
    assert numbers.numel() <= _BASE**_DIGITS
    unscaled = SimpleNamespace(isa=layer.isa, _k_scale_float=1.0, _v_scale_float=1.0)
    number_at = torch.zeros(cache.numel(), dtype=torch.long)
    for digit in range(_DIGITS):
        k, v = (numbers // _BASE**digit % _BASE + 1).to(dtype)
        probe = torch.zeros_like(cache)
        type(layer.impl).do_kv_cache_update(layer.impl, unscaled, k, v, probe, slots)
        found = probe.flatten().view(_FP8[layer.kv_cache_dtype]).float().long()
        number_at += (found - 1).clamp(min=0) * _BASE**digit
    (places,) = torch.nonzero(found, as_tuple=True)
    assert places.numel() == numbers.numel()
    place_of = torch.empty(numbers.numel(), dtype=torch.long)
    place_of[number_at[places]] = places
    k, v = cache.flatten()[place_of].reshape(2, *shape)
    return k, v


class Watch:
    """What vLLM adds to its worker class, whose methods can be called in all processes."""

    model_runner: Any

    def watch(self) -> None:
        """Record from now on what the layers are given to write."""
        for layer in self._layers():
            impl = layer.impl
            write = getattr(impl, "watched", impl.do_kv_cache_update)
            impl.watched, impl.given = write, []

            def record(layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> Any:
                layer.impl.given.append((key.clone(), value.clone(), slots.clone()))
                return layer.impl.watched(layer, key, value, kv_cache, slots)

            impl.do_kv_cache_update = record

    def compare(self) -> list[dict[str, Any]]:
        """For each layer: how many bytes were written, and how many are others than expected."""
        from kvcache_plugin import Device
        from kvcache_plugin.hardware import cpu_reference

        found = []
        for layer in self._layers():
            keys, values, slots = (torch.cat(each) for each in zip(*layer.impl.given, strict=True))
            k, v = stored(layer, keys.shape, keys.dtype, slots)
            differ = differ_from_reference = 0
            for given, scale, is_there in (
                (keys, layer._k_scale, k),
                (values, layer._v_scale, v),
            ):
                differ += int((rounded(given, scale, layer.kv_cache_dtype) != is_there).sum())
                name = "fp8_e5m2" if layer.kv_cache_dtype == "fp8_e5m2" else "fp8_e4m3"
                cpu, one = Device("cpu"), scale.reshape(1)
                reference = cpu_reference.quantize_kv(given, one, name, cpu, None).data
                differ_from_reference += int((reference.view(torch.uint8) != is_there).sum())
            found.append(
                {
                    "layer": layer.layer_name,
                    "tokens": len(slots),
                    "bytes": k.numel() + v.numel(),
                    "differ": differ,
                    "differ_from_reference": differ_from_reference,
                    "codes": torch.cat([k.flatten(), v.flatten()]).unique().tolist(),
                    "k_scale": layer._k_scale.item(),
                    "k_scale_float": layer._k_scale_float,
                }
            )
        return found

    def _layers(self) -> list[Any]:
        model = self.model_runner.get_model()
        return [layer for layer in model.modules() if hasattr(layer, "impl")]
