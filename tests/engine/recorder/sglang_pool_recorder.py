"""A plugin of SGLang's: records K and V on their way into the pool, and the pool's bytes after it.

It stands around ``torch_native`` attention, so nothing that writes the pool knows of it. After each
forward pass of a layer the file that ``RECORD_POOL`` names is written anew, for each layer with:

* ``N.k``, ``N.v``: K and V as attention got them, ``[tokens, heads, head_dim]``;
* ``N.k_bytes``, ``N.v_bytes``: what stands in their slots, uint8, of the same shape for FP8;
* ``N.k_read``, ``N.v_read``: what the pool gives attention of them, float32 of that shape;
* ``N.scales``: the parameter and the host's float of K, then of V, float64.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
#: layer -> slot -> K and V
_written: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
_scales: dict[int, torch.Tensor] = {}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{_BACKEND}.{name}", _record, HookType.AROUND)


def _record(
    original: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    slots = forward_batch.out_cache_loc.tolist()
    rows = zip(k.clone(), v.clone(), strict=True)  # the write may change them in place
    result = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    _written.setdefault(layer.layer_id, {}).update(zip(slots, rows, strict=True))
    scales = [(getattr(layer, f"{side}_scale"), side) for side in "kv"]
    numbers = [(scale.item(), getattr(layer, f"{side}_scale_float")) for scale, side in scales]
    _scales[layer.layer_id] = torch.tensor(numbers, dtype=torch.float64).flatten()
    _save(backend.token_to_kv_pool)
    return result


def _save(pool: Any) -> None:
    tensors = {}
    for layer, by_slot in _written.items():
        slots = torch.tensor(list(by_slot))
        keys, values = (torch.stack(rows) for rows in zip(*by_slot.values(), strict=True))
        tensors |= {f"{layer}.k": keys, f"{layer}.v": values, f"{layer}.scales": _scales[layer]}
        for side, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
            tensors[f"{layer}.{side}_bytes"] = buffers[layer].view(torch.uint8)[slots]
        for side, read in zip("kv", pool.get_kv_buffer(layer), strict=True):
            tensors[f"{layer}.{side}_read"] = read.float()[slots]
    file = Path(os.environ["RECORD_POOL"])
    part = file.with_suffix(".part")
    save_file(tensors, part)
    part.replace(file)
