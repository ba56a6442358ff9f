"""Writes small checkpoints for the scanner's tests, the format spelled out byte by byte."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FP8_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
COMPRESSED_TENSORS = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    "producer": {"name": "modelopt", "version": "0.43.0"},
}

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file: the header's length, the header, the data. ``length`` can lie."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def encode_tensors(tensors: Mapping[str, torch.Tensor | float]) -> bytes:
    """A sound file. A number is stored as float32 of shape ``(1,)``."""
    header: dict[str, Any] = {}
    data = b""
    for name, value in tensors.items():
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor([value])
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return encode(header, data)


def config(layers: int = 2, **more: Any) -> dict[str, Any]:
    """A Llama's ``config.json``, declared as compressed-tensors with an FP8 KV cache."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "quantization_config": COMPRESSED_TENSORS,
        **more,
    }


def attention_weights(
    layers: int, prefix: str = "model.layers", attention: str = "self_attn"
) -> dict[str, torch.Tensor | float]:
    """Weights that say which layers have K and V, one number each."""
    return {
        f"{prefix}.{layer}.{attention}.{side}_proj.weight": 1.0
        for layer in range(layers)
        for side in "qkvo"
    }


def scales(
    pairs: Mapping[int, tuple[Any, Any]], name: str = "model.layers.{i}.self_attn.{side}_scale"
) -> dict[str, torch.Tensor | float]:
    """Scales of layers under a name; a side that is ``None`` is left out."""
    return {
        name.format(i=layer, side=side): value
        for layer, pair in pairs.items()
        for side, value in zip("kv", pair, strict=True)
        if value is not None
    }


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor | float],
    settings: Mapping[str, Any] | None = None,
    **files: Any,
) -> Path:
    """``model.safetensors``, ``config.json`` where ``settings`` are given, and other JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(encode_tensors(tensors))
    if settings is not None:
        files["config"] = settings
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_shards(
    folder: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor | float]],
    settings: Mapping[str, Any] | None = None,
    weight_map: Mapping[str, Any] | None = None,
) -> Path:
    """Several files with the index that belongs to them, or another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, tensors in shards.items():
        (folder / shard).write_bytes(encode_tensors(tensors))
    placed = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"weight_map": placed if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder
