"""The engines' own quantizers, called beside ours by ``kvcache-plugin bench --peers``.

An engine is imported when a peer of it is made ready, and never by the import of this module. What
is called is in ``seams.PEERS``; one that is not there, or has another signature, is told and not
called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from kvcache_plugin.hosts import fitting, seams
from kvcache_plugin.hosts.engines import ENGINES

if TYPE_CHECKING:
    from kvcache_plugin.hosts.seams import Seam

#: What a peer is called with: the number of the input. It gives what was written.
Call: TypeAlias = Callable[[int], object]
#: From K, each ``[tokens, heads, head_dim]``, the scale and the format, what is called.
Prepare: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, str], Call]

#: Tokens in a block of vLLM's cache. Its fastest kernels for the CPU want a multiple of 32.
_BLOCK_TOKENS: Final = 32


class AbsentPeerError(Exception):
    """A peer that cannot be called here, and why."""


@dataclass(frozen=True)
class Peer:
    """A quantizer of another project.

    :param name: what the table calls it.
    :param how: what is called, and what it does otherwise than ours.
    :param project: whose it is.
    :param version: of that; ``None`` where it is not installed.
    :param kinds: the types of torch devices that it runs on.
    :param formats: the formats that it is put beside.
    :param quantize: makes quantizing ready; ``None`` for a peer that does not quantize.
    :param dequantize: likewise.
    :param sides: how many of K and V a call takes.
    """

    name: str
    how: str
    project: str
    version: str | None
    kinds: tuple[str, ...]
    formats: tuple[str, ...]
    quantize: Prepare | None = None
    dequantize: Prepare | None = None
    sides: int = 1


def engine_peers() -> tuple[Peer, ...]:
    """Those of both engines, whether or not they are installed."""
    versions = {engine.title: engine.version for engine in ENGINES}
    fp8 = ("fp8_e4m3", "fp8_e5m2")
    return (
        Peer(
            "vllm_cpu",
            "vLLM's cpu_attn_reshape_and_cache: truncates, and writes K and V by slot",
            "vLLM",
            versions["vLLM"],
            ("cpu",),
            fp8,
            quantize=_vllm_cpu,
            sides=2,
        ),
        Peer(
            "vllm_cuda",
            "vLLM's reshape_and_cache_flash: writes K and V by slot",
            "vLLM",
            versions["vLLM"],
            ("cuda",),
            fp8,
            quantize=_vllm_cuda,
            sides=2,
        ),
        Peer(
            "sglang_cpu_fp8",
            "SGLang's cpu_fp8_e4m3: writes K and V by slot",
            "SGLang",
            versions["SGLang"],
            ("cpu",),
            ("fp8_e4m3",),
            quantize=_sglang_cpu_fp8,
            sides=2,
        ),
        Peer(
            "sglang_fp4",
            "SGLang's fp4_mx_block16 by torch.compile: scales that are powers of two",
            "SGLang",
            versions["SGLang"],
            ("cpu", "cuda"),
            ("nvfp4",),
            quantize=_sglang_fp4_quantize,
            dequantize=_sglang_fp4_dequantize,
        ),
    )


def _vllm_cpu(keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str) -> Call:
    choose_isa = _found(seams.VLLM_PEER_CPU_ISA)
    write = _found(seams.VLLM_PEER_CPU_WRITE)
    tokens, heads, head_dim = keys[0].shape
    isa = choose_isa(keys[0].dtype, _BLOCK_TOKENS, head_dim, kv_format)
    slots = _slots(keys)
    blocks = -(-len(keys) * tokens // _BLOCK_TOKENS)
    cache = keys[0].new_zeros(blocks, heads, 2 * _BLOCK_TOKENS, head_dim, dtype=torch.uint8)
    k_cache, v_cache = cache.chunk(2, dim=2)
    number = float(scale)

    def call(i: int) -> object:
        where = (k_cache, v_cache, slots[i], isa)
        write(keys[i], keys[i - 1], *where, number, number, kv_format)
        return k_cache, v_cache

    return call


def _vllm_cuda(keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str) -> Call:
    write = _found(seams.VLLM_PEER_CUDA_WRITE)
    tokens, heads, head_dim = keys[0].shape
    slots = _slots(keys)
    shape = (-(-len(keys) * tokens // _BLOCK_TOKENS), _BLOCK_TOKENS, heads, head_dim)
    k_cache, v_cache = (keys[0].new_zeros(shape, dtype=torch.uint8) for _ in range(2))

    def call(i: int) -> object:
        write(keys[i], keys[i - 1], k_cache, v_cache, slots[i], kv_format, scale, scale)
        return k_cache, v_cache

    return call


def _sglang_cpu_fp8(keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str) -> Call:
    write = _found(seams.SGLANG_CPU_WRITE)
    method = _owner(seams.SGLANG_CPU_WRITE)()
    tokens, heads, head_dim = keys[0].shape
    slots = _slots(keys)
    shape = (len(keys) * tokens, heads, head_dim)
    k_pool, v_pool = (keys[0].new_zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2))

    def call(i: int) -> object:
        write(method, k_pool, v_pool, None, None, slots[i], keys[i], keys[i - 1], scale, scale)
        return k_pool, v_pool

    return call


def _sglang_fp4_quantize(keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str) -> Call:
    quantize = _found(seams.SGLANG_PEER_FP4_QUANTIZE)
    return lambda i: quantize(keys[i])


def _sglang_fp4_dequantize(
    keys: Sequence[torch.Tensor], scale: torch.Tensor, kv_format: str
) -> Call:
    quantize = _found(seams.SGLANG_PEER_FP4_QUANTIZE)
    dequantize = _found(seams.SGLANG_PEER_FP4_DEQUANTIZE)
    quantized = quantize(keys[0])
    codes = [tuple(part.clone() for part in quantized) for _ in keys]
    return lambda i: dequantize(*codes[i], keys[0].dtype)


def _slots(keys: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Where in a cache each K is written, so that each has places of its own."""
    tokens = len(keys[0])
    return torch.split(torch.arange(len(keys) * tokens, device=keys[0].device), tokens)


def _found(seam: Seam) -> Callable[..., Any]:
    """The function of a seam."""
    owner, name = _owner(seam), seam.qualname.rpartition(".")[2]
    function: Callable[..., Any] = getattr(owner, name)
    return function


def _owner(seam: Seam) -> Any:
    """What a seam's function is defined in, if it fits."""
    try:
        module = importlib.import_module(seam.module)
    except Exception as error:
        raise AbsentPeerError(
            f"{seam.module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    problem = fitting.check_module(seam, module)
    if problem:
        raise AbsentPeerError(problem)
    owner: Any = module
    for name in seam.qualname.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner
