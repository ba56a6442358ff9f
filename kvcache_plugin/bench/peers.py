"""Quantizers of other projects, which are put beside ours where they are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvcache_plugin.hosts.peers import AbsentPeerError, Peer, engine_peers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch

    from kvcache_plugin.hosts.peers import Call


def all_peers() -> tuple[Peer, ...]:
    """Those that we know, whether or not they are installed."""
    return (
        Peer(
            "torchao",
            "torchao's nvfp4_quantize, and its NVFP4Tensor back: plain torch",
            "torchao",
            _version("torchao"),
            ("cpu", "cuda"),
            ("nvfp4",),
            quantize=_torchao_quantize,
            dequantize=_torchao_dequantize,
        ),
        *engine_peers(),
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _torchao() -> Any:
    try:
        from torchao.prototype.mx_formats import nvfp4_tensor
    except Exception as error:
        raise AbsentPeerError(
            f"torchao cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for name in ("nvfp4_quantize", "NVFP4Tensor"):
        if not hasattr(nvfp4_tensor, name):
            raise AbsentPeerError(f"torchao has no {name}")
    return nvfp4_tensor


def _torchao_quantize(keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str) -> Call:
    quantize = _torchao().nvfp4_quantize
    rows, one = [key.flatten(0, 1) for key in keys], scale.reshape(())
    return lambda i: quantize(rows[i], per_tensor_scale=one)


def _torchao_dequantize(keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str) -> Call:
    to_nvfp4 = _torchao().NVFP4Tensor.to_nvfp4
    quantized = to_nvfp4(keys[0].flatten(0, 1), per_tensor_scale=scale.reshape(()))
    codes = [quantized.clone() for _ in keys]
    return lambda i: codes[i].dequantize(keys[0].dtype)
