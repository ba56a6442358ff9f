"""What a newcomer runs: one corrupt scale is refused, then K/V go to every format and back."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcache_plugin import formats
from kvcache_plugin.api import (
    dequantize_kv,
    explain,
    quantize_kv,
    validate_kv_scales,
)
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVScaleError
from kvcache_plugin.machine import find_device

if TYPE_CHECKING:
    from kvcache_plugin.formats import KVFormat

_LAYERS: Final = 4
_CORRUPT_LAYER: Final = 2
_TOKENS, _HEADS, _HEAD_DIM = 256, 8, 128
_SEED: Final = 0


@dataclass(frozen=True)
class LayerCheck:
    """One layer of the checkpoint: its scales, and the refusal, empty when they are sound."""

    layer: str
    k_scale: float
    v_scale: float
    refusal: str


@dataclass(frozen=True)
class RoundTrip:
    """K quantized and dequantized in one format.

    :param bits_per_value: all of it, block scales too.
    :param relative_error: root mean square of the error over that of the values.
    :param largest_error: of one value, over the largest magnitude.
    """

    kv_cache_dtype: str
    implementation: str
    bits_per_value: float
    relative_error: float
    largest_error: float


@dataclass(frozen=True)
class Demo:
    """What a run gave.

    :param device: where K was quantized, ``cpu`` or an architecture.
    :param layers: of the checkpoint, one of them corrupt.
    :param round_trips: one for each built-in format.
    """

    device: str
    layers: tuple[LayerCheck, ...]
    round_trips: tuple[RoundTrip, ...]

    @property
    def succeeded(self) -> bool:
        """Whether the corrupt layer was refused, and no other."""
        refused = [i for i, layer in enumerate(self.layers) if layer.refusal]
        return refused == [_CORRUPT_LAYER]


def run() -> Demo:
    """On the GPU of this machine, else the CPU; nothing is left on the disk.

    :raises KVCacheError: when nothing serves a format there.
    """
    device = find_device(None)
    with tempfile.TemporaryDirectory() as folder:
        _write_checkpoint(Path(folder))
        layers = _check(Path(folder), device)
    return Demo(
        str(Device.of(device)),
        layers,
        tuple(_round_trip(kv_format, device) for kv_format in formats.BUILT_IN),
    )


def _write_checkpoint(folder: Path) -> None:
    """The scales of a small checkpoint as llm-compressor writes them, one of them NaN."""
    tensors = {}
    for layer in range(_LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        k_scale = float("nan") if layer == _CORRUPT_LAYER else 0.05 + 0.01 * layer
        tensors[f"{attention}.k_scale"] = torch.tensor([k_scale])
        tensors[f"{attention}.v_scale"] = torch.tensor([0.04])
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": _LAYERS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _check(folder: Path, device: torch.device) -> tuple[LayerCheck, ...]:
    checks = []
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for i in range(_LAYERS):
            layer = f"model.layers.{i}.self_attn"
            k, v = (tensors.get_tensor(f"{layer}.{side}_scale") for side in ("k", "v"))
            refusal = ""
            try:
                validate_kv_scales(k, v, kv_cache_dtype="fp8", device=device, layer=layer)
            except KVScaleError as error:
                refusal = str(error)
            checks.append(LayerCheck(layer, k.item(), v.item(), refusal))
    return tuple(checks)


def _round_trip(kv_format: KVFormat, device: torch.device) -> RoundTrip:
    generator = torch.Generator().manual_seed(_SEED)
    key = torch.randn(_TOKENS, _HEADS, _HEAD_DIM, generator=generator).to(device, torch.bfloat16)
    largest = key.abs().max().item()
    reach = kv_format.largest
    if kv_format.torch_block_scale_dtype is not None:
        reach *= torch.finfo(kv_format.torch_block_scale_dtype).max
    quantized = quantize_kv(key, largest / reach, kv_format.name)
    error = dequantize_kv(quantized, dtype=torch.float32) - key.float()
    stored = [quantized.data, quantized.block_scales]
    bits = sum(8 * part.nbytes for part in stored if part is not None)
    chosen = next(row for row in explain(device, kv_format.name) if row.chosen)
    return RoundTrip(
        kv_format.name,
        chosen.name,
        bits / key.numel(),
        (error.square().mean() / key.float().square().mean()).sqrt().item(),
        error.abs().max().item() / largest,
    )
