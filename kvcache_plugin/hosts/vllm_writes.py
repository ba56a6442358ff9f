"""vLLM: K and V are written to FP8 caches as the hook rounds them.

Nothing is wrapped for everybody. Once a model is loaded each of its attention layers is looked at,
and where the hook is to write, that layer's backend is given a write of its own. In it K and V are
rounded to codes, and the codes go on as numbers, with 1.0 for a scale, to the write of vLLM. Every
code is a number in bfloat16, float16 and float32, so whatever vLLM's kernel does with what lies
between two codes, it stores these.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch

from kvcache_plugin import __version__
from kvcache_plugin.api import quantize_kv_pair
from kvcache_plugin.device import Device
from kvcache_plugin.errors import anchored, counted
from kvcache_plugin.hosts import fitting, seams
from kvcache_plugin.hosts.writes import FP8_BY_DTYPE, quantizer, third_party_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_plugin.hosts.engine_log import EngineLog
    from kvcache_plugin.hosts.seams import Seam

_UNQUANTIZED: Final = ("auto", "float32", "float16", "bfloat16")


class HookWrites:
    """Lets the hook write the caches of the models that one vLLM process loads.

    :param which: ``"auto"`` or ``"hook"``, see ``settings.VLLM_WRITES``.
    :param formats: vLLM's names for the KV caches that the hook knows -> ours.
    """

    def __init__(self, log: EngineLog, which: str, formats: Mapping[str, str]) -> None:
        self._log = log
        self._which = which
        self._formats = formats
        self._fp8 = {name: f for name, f in formats.items() if f in FP8_BY_DTYPE.values()}
        self._seen: WeakSet[torch.nn.Module] = WeakSet()

    def fit(self, model: torch.nn.Module) -> None:
        """Look at the layers of a model that has been loaded, at each of them once."""
        taken: Counter[tuple[str, ...]] = Counter()
        left: Counter[tuple[str, ...]] = Counter()
        for layer in model.modules():
            if layer not in self._seen and _writes_cache(layer):
                self._seen.add(layer)
                self._log.guarded("letting the hook write a cache", self._look, layer, taken, left)
        self._tell(taken, left)

    def _look(
        self, layer: Any, taken: Counter[tuple[str, ...]], left: Counter[tuple[str, ...]]
    ) -> None:
        """Take one layer over where that is wanted, and count what came of it."""
        name, device = layer.kv_cache_dtype, layer._k_scale.device
        writer = self._writer(device, name)
        if writer is None:
            return
        problem = self._take_over(layer, writer)
        if problem:
            left[name, type(layer.impl).__name__, problem] += 1
        else:
            taken[self._fp8[name], str(device), writer] += 1

    def _writer(self, device: torch.device, name: str) -> str | None:
        """Whose codes a cache is to hold, ``None`` where vLLM's own write is what is wanted.

        :returns: empty where the hook is to write, and nobody serves.
        """
        kv_format = self._formats.get(name)
        third_party = third_party_writer(device, kv_format) if kv_format else ""
        if third_party or self._which != "hook":
            return third_party or None
        return quantizer(device, kv_format) if kv_format else ""

    def _take_over(self, layer: Any, writer: str) -> str:
        """Give a layer's backend a write of its own.

        :returns: why that cannot be, empty where it is done.
        """
        kv_format = self._fp8.get(layer.kv_cache_dtype)
        if kv_format is None:
            return f"its kernels keep no codes as they are but those of {', '.join(self._fp8)}"
        if not writer:
            return f"no implementation quantizes {kv_format} on {layer._k_scale.device}"
        # Where a backend is made of two, one of them writes for both.
        impl = getattr(layer.impl, "general_impl", layer.impl)
        write = getattr(type(impl), "do_kv_cache_update", None)
        problem = self._moved or fitting.check_function(seams.vllm_backend_write(type(impl)), write)
        if problem:
            return problem
        if getattr(layer.attn_backend, "forward_includes_kv_cache_update", True):
            return "it writes the cache while it computes attention"
        if getattr(type(layer).forward, "__module__", "") != seams.VLLM_WRITE.module:
            return f"{type(layer).__name__} has a forward of its own, which may write by itself too"
        if getattr(layer, "use_direct_call", False):
            return "on this platform torch.compile looks into attention, and would into the hook"
        if layer._k_scale.numel() > 1:
            problem = _why_not_per_head(layer.attn_backend)
            if problem:
                return problem
        if Device.of(layer._k_scale.device).kind == "rocm" and self._shuffled:
            return self._shuffled
        if not getattr(impl.do_kv_cache_update, "is_ours", False):
            for question in self._questions:
                setattr(impl, question, _no)
            impl.do_kv_cache_update = _rounded(impl.do_kv_cache_update, kv_format)
        return ""

    @functools.cached_property
    def _moved(self) -> str:
        """Why a backend's write may not be called any more as it was; empty where it is."""
        return _problem_of(seams.VLLM_WRITE)

    @functools.cached_property
    def _shuffled(self) -> str:
        """Why AITER's caches may have no scale; empty where they have those of the layer."""
        problem = _problem_of(seams.VLLM_SHUFFLED)
        if problem:
            return problem
        ops = sys.modules[seams.VLLM_SHUFFLED.module].rocm_aiter_ops
        if ops.is_shuffle_kv_cache_enabled():
            return "in AITER's shuffled layout K and V are written and read without their scales"
        return ""

    @functools.cached_property
    def _questions(self) -> list[str]:
        """What is asked of a backend before its write is fused with what comes before it."""
        questions = []
        for seam in seams.VLLM_FUSED_WRITES:
            problem = _problem_of(seam)
            if problem:
                self._log.leave_out(seam, problem)
            else:
                questions.append(seam.qualname.rpartition(".")[2])
        return questions

    def _tell(self, taken: Counter[tuple[str, ...]], left: Counter[tuple[str, ...]]) -> None:
        for (kv_format, device, writer), count in taken.items():
            self._log.say(
                logging.INFO,
                anchored(
                    "kvcache_plugin %s writes the KV caches of %s in %s by its hook (%s on %s, %s)",
                    "hook-writes",
                ),
                __version__,
                counted(count, "layer"),
                self._log.engine,
                kv_format,
                device,
                writer,
            )
        for (name, backend, problem), count in left.items():
            self._log.say(
                logging.WARNING,
                anchored(
                    "kvcache_plugin leaves the KV caches of %s (%s, %s) to %s's own write: %s",
                    "writes-left-to-vllm",
                ),
                counted(count, "layer"),
                name,
                backend,
                self._log.engine,
                problem,
            )


class _Unscaled:
    """An attention layer as vLLM's write gets to see it: its scales are 1.0, the rest is its own.

    It is made for one write: a tensor of ones that is kept would lie among the weights, which
    vLLM's sleep mode throws away.
    """

    _k_scale_float = _v_scale_float = 1.0
    _k_scale_cpu = _v_scale_cpu = torch.ones((), dtype=torch.float32, device="cpu")

    def __init__(self, layer: Any) -> None:
        ones = torch.ones_like(layer._k_scale)
        vars(self).update(_layer=layer, _k_scale=ones, _v_scale=ones)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._layer, name, value)


def _rounded(write: Callable[..., Any], kv_format: str) -> Callable[..., Any]:
    """A backend's write, with K and V rounded to codes before it.

    :param write: takes a layer, K and V of shape ``[tokens, heads, head_dim]``, the layer's cache,
        and a slot for each token.
    """

    @functools.wraps(write)
    def do_kv_cache_update(
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        k, v = quantize_kv_pair(key, value, layer._k_scale, layer._v_scale, kv_format)
        codes = _numbers(k.data, key.dtype), _numbers(v.data, value.dtype)
        return write(_Unscaled(layer), *codes, kv_cache, slot_mapping, *args, **kwargs)

    do_kv_cache_update.is_ours = True  # type: ignore[attr-defined]
    return do_kv_cache_update


def _numbers(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes as numbers of which vLLM's kernels make the same codes again."""
    numbers = codes.to(dtype)
    if numbers.device.type == "cpu":
        # The kernel for CPUs makes 0 of -0, and -0 of what is too small for any code.
        numbers.masked_fill_(numbers.signbit() & (numbers == 0), -(2.0**-24))
    return numbers


def _writes_cache(module: Any) -> bool:
    """Whether a module is attention that writes a quantized KV cache."""
    name = getattr(module, "kv_cache_dtype", None)
    return (
        isinstance(name, str)
        and name not in _UNQUANTIZED
        and hasattr(module, "impl")
        and hasattr(module, "_k_scale")
        # It reads what another layer has written, or there is nothing to read later.
        and getattr(module, "kv_sharing_target_layer_name", None) is None
        and getattr(module, "attn_type", "decoder") not in ("encoder", "encoder_only")
    )


def _why_not_per_head(backend: Any) -> str:
    """Why codes with a scale for each head may not be written; empty where they are read so."""
    seam = seams.vllm_backend_per_head(backend)
    question: Any = getattr(backend, seams.PER_HEAD_QUESTION, None)
    problem = fitting.check_function(seam, getattr(question, "__func__", question))
    if problem:
        return problem
    return "" if question() else "it reads the cache with one scale, and the layer has one per head"


def _problem_of(seam: Seam) -> str:
    module = sys.modules.get(seam.module)
    if module is None:
        return f"{seam.path} is missing: {seam.module} is not imported"
    return fitting.check_module(seam, module)


def _no() -> bool:
    return False
