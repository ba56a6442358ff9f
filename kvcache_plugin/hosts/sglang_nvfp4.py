"""SGLang: NVFP4 caches for attention backends that read plain K and V.

SGLang's own NVFP4 caches need a GPU and a backend that reads FP4, and it refuses the backends
that read plain K and V. Those are served here: its gates let them pass, and the cache of
``packed_nvfp4.py`` is put in the place of its own. Its own backends keep its own cache.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_plugin.api import explain
from kvcache_plugin.errors import anchored
from kvcache_plugin.formats import NVFP4
from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.packed_nvfp4 import PackedNVFP4
from kvcache_plugin.hosts.writes import quantizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.hosts.engine_log import EngineLog
    from kvcache_plugin.hosts.seams import Seam

#: Backends that read plain K and V, and whether they multiply them by the scales of the layer.
_BACKENDS: Final = {"triton": True, "torch_native": False, "flex_attention": False}

#: Its layers run several times, and the later ones attend to K and V of the first.
_LOOPED: Final = "IQuestLoopCoderForCausalLM"

#: Arguments that make another pool, or move K and V in ways that only know SGLang's own layout,
#: each with its value that does not, beside none at all.
_NOT_SERVED: Final = {
    "speculative_algorithm": "",
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "radix_cache_backend": "",
    "enable_unified_cache_external_linker": False,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "enable_page_major_kv_layout": False,
    "enable_kv_cache_sharding": False,
    "prefill_only_disable_kv_cache": False,
    "disaggregation_mode": "null",
    "dcp_size": 1,
    "dllm_algorithm": "",
}


def wrappers(
    log: EngineLog, problem_of: Callable[[Seam], str]
) -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    """What is put around SGLang's functions: all of it, or nothing.

    With some of its gates open SGLang would serve what it cannot.

    :param problem_of: why a seam cannot be used, empty where it can.
    """
    plain = _PlainReads(log)
    around: list[tuple[Seam, Callable[..., Any]]] = [
        (seams.SGLANG_NVFP4_PREFILL, plain.handle_prefill),
        (seams.SGLANG_NVFP4_BACKENDS, plain.handle_backends),
        (seams.SGLANG_FP4_DTYPE, plain.is_fp4),
        (seams.SGLANG_KV_METHOD, plain.make_method),
    ]
    if torch.version.hip is not None:  # elsewhere it is only asked of bfloat16 caches
        around.append((seams.SGLANG_FUSED_WRITE, plain.writes_past_pool))
    needed = (*(seam for seam, _ in around), *seams.SGLANG_NVFP4_NEEDS)
    problem = "; ".join(filter(None, map(problem_of, needed))) or _method_problem()
    if problem:
        log.say(
            logging.WARNING,
            anchored("kvcache_plugin serves no NVFP4 cache on %s of %s: %s", "nvfp4-not-offered"),
            _listed(_BACKENDS),
            log.engine,
            problem,
        )
        return ()
    return tuple(around)


@dataclass(frozen=True)
class _Asked:
    """What a server's arguments ask for: an NVFP4 cache on backends that read plain K and V.

    :param backends: those of prefill and decode, as far as they are named.
    """

    backends: tuple[str | None, str | None]

    @property
    def is_plain(self) -> bool:
        """Whether both are named, and read plain K and V."""
        return all(backend in _BACKENDS for backend in self.backends)

    @property
    def scales_later(self) -> bool:
        """Whether the backends, which are plain, multiply what they read by the layer's scales."""
        return all(_BACKENDS[backend] for backend in self.backends if backend is not None)


def _asked(server_args: Any) -> _Asked | None:
    """``None`` where the arguments are SGLang's own business."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    cfg = resolving_view(server_args)
    if cfg.kv_cache_dtype != NVFP4.name or cfg.prefill_kv_cache_dequant_dtype != "auto":
        return None
    prefill = cfg.prefill_attention_backend or cfg.attention_backend
    decode = cfg.decode_attention_backend or cfg.attention_backend
    return _Asked((prefill, decode)) if {prefill, decode} & _BACKENDS.keys() else None


class _PlainReads:
    """The functions that are put around SGLang's own."""

    def __init__(self, log: EngineLog) -> None:
        self._log = log
        self._refuse_prefill: Callable[[Any], None] | None = None
        self._has_made_one = False

    def handle_prefill(self, original: Callable[[Any], None], server_args: Any) -> None:
        """Let backends pass that are served here; SGLang refuses all but its own."""
        self._refuse_prefill = original
        if not self._serves(server_args):
            original(server_args)

    def handle_backends(self, original: Callable[[Any], None], server_args: Any) -> None:
        """Let the same pass where SGLang looks at the backends that it has settled on."""
        if self._serves(server_args):
            return
        # What the first gate let pass may have changed since. It is refused there as ever.
        asked = self._log.guarded("looking at the arguments", _asked, server_args)
        if self._refuse_prefill is not None and asked is not None:
            self._refuse_prefill(server_args)
        original(server_args)

    def is_fp4(self, original: Callable[[Any], bool], dtype: Any) -> bool:
        """Know FP4 caches where there is no CUDA too: SGLang asks for the dtype, and for CUDA."""
        is_dtype = dtype is not None and dtype == getattr(torch, "float4_e2m1fn_x2", None)
        return original(dtype) or (is_dtype and self._in_use() is not None)

    def make_method(self, original: Callable[..., Any], name: str, **kwargs: Any) -> Any:
        """Make the KV-cache method, SGLang's own where its own backends read the cache."""
        asked = self._in_use() if name == NVFP4.name else None
        if asked is None:
            return original(name, **kwargs)
        from sglang.srt.arg_groups.model_override_base import model_config_of
        from sglang.srt.runtime_context import get_server_args

        self._has_made_one = True
        return _method_class()(
            device=kwargs["device"],
            dtype=model_config_of(get_server_args()).dtype,
            scales_later=asked.scales_later,
            loaded=functools.partial(self._say_in_use, asked, kwargs["device"]),
        )

    def writes_past_pool(self, original: Callable[[Any], bool], forward_batch: Any) -> bool:
        """Keep kernels from writing K and V into what a plain read gave them."""
        return not self._has_made_one and original(forward_batch)

    def _serves(self, server_args: Any) -> bool:
        asked = self._log.guarded("looking at the arguments", _asked, server_args)
        if asked is None:
            return False
        find = functools.partial(_why_not, asked, server_args)
        problem = self._log.guarded("looking whether an NVFP4 cache can be served", find)
        if problem:
            self._log.say_once(
                problem,
                logging.WARNING,
                anchored(
                    "kvcache_plugin leaves --kv-cache-dtype=nvfp4 on %s to %s, which refuses it: "
                    "%s",
                    "nvfp4-left-to-sglang",
                ),
                _listed(asked.backends),
                self._log.engine,
                problem,
            )
        return problem == ""

    def _in_use(self) -> _Asked | None:
        """What this process serves, where it is ours: SGLang alone would have refused it before."""
        from sglang.srt.runtime_context import get_server_args

        asked = self._log.guarded("looking at the arguments", lambda: _asked(get_server_args()))
        return asked if asked is not None and asked.is_plain else None

    def _say_in_use(self, asked: _Asked, device: str) -> None:
        writer = self._log.guarded("asking who quantizes", quantizer, device, NVFP4.name)
        self._log.say(
            logging.INFO,
            anchored(
                "kvcache_plugin serves --kv-cache-dtype=nvfp4 on %s: %s quantizes what is written, "
                "and each step dequantizes the whole cache of a layer",
                "nvfp4-served",
            ),
            _listed(asked.backends),
            writer or "the hook",
        )


def _why_not(asked: _Asked, server_args: Any) -> str:
    """What is in the way of an NVFP4 cache for plain reads; empty where nothing is."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    for phase, backend in zip(("prefill", "decode"), asked.backends, strict=True):
        if backend not in _BACKENDS:
            named = f"the {phase} attention backend is {backend or 'not named'}"
            return f"{named}; name one of {_listed(_BACKENDS)} for both"
    if len({_BACKENDS[backend] for backend in asked.backends if backend is not None}) > 1:
        return "triton multiplies what it reads by the scales of a layer, and the other does not"
    cfg = resolving_view(server_args)
    for name, off in _NOT_SERVED.items():
        value = getattr(cfg, name, off)
        if value and value != off:
            return f"{name}={value!r}, which is not served with it"
    return (
        _environment_problem()
        or _model_problem(model_config_of(server_args), scales_later=asked.scales_later)
        or _hardware_problem(cfg.device)
    )


def _environment_problem() -> str:
    if _is_on("SGLANG_USE_HND_KVCACHE"):
        return "SGLANG_USE_HND_KVCACHE asks for another layout"
    if torch.version.hip is not None and _is_on("SGLANG_USE_AITER"):
        return "with SGLANG_USE_AITER kernels write K and V into what they read; set it to 0"
    return ""


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _model_problem(model: Any, *, scales_later: bool) -> str:
    """What in a model asks for a pool of another kind, or does not fit into blocks."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_minimax_sparse

    if model.attention_arch.name != "MHA":
        return f"the model's attention is {model.attention_arch.name}, and not MHA"
    kinds = {
        "some layers attend to a window, and have a cache of their own": model.is_hybrid_swa,
        "some layers have a state in place of a cache": mambaish_config(model) is not None,
        "its attention is sparse": is_minimax_sparse(model.hf_config)
        or getattr(model.hf_text_config, "indexer_n_heads", None) is not None,
        "some layers read K and V back, and triton leaves out their scales": scales_later
        and (
            bool(getattr(model.hf_text_config, "num_kv_shared_layers", None))
            or model.is_encoder_decoder
            or _LOOPED in (model.hf_config.architectures or ())
        ),
    }
    for kind, is_so in kinds.items():
        if is_so:
            return f"the model is of another kind: {kind}"
    if model.head_dim != model.v_head_dim or model.head_dim % NVFP4.head_dim_multiple:
        return (
            f"head_dim is {model.head_dim} for K and {model.v_head_dim} for V, and must be the "
            f"same multiple of {NVFP4.head_dim_multiple} for both"
        )
    return ""


def _hardware_problem(device: str) -> str:
    if quantizer(device, NVFP4.name):
        return ""
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in explain(device, NVFP4.name))
    return f"no implementation quantizes nvfp4 on {device} ({reasons or 'there is none'})"


@functools.cache
def _method_class() -> type:
    """The cache as one of SGLang's KV-cache methods."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
        KVCacheAttentionAccess,
        KVCacheAttentionAccessKind,
        KVCacheAttentionPhase,
        KVCacheBackendMatcher,
        KVCacheQuantMethodBase,
    )

    class PlainReadNVFP4(PackedNVFP4, KVCacheQuantMethodBase):  # type: ignore[misc]
        """An NVFP4 cache that SGLang's backends read as plain K and V."""

        name = NVFP4.name
        SCALE_BLOCK_SIZE = NVFP4.block_size

        def __init__(self, *, loaded: Callable[[], None], **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._loaded = loaded

        def attention_accesses(self) -> tuple[Any, ...]:
            return tuple(
                KVCacheAttentionAccess(
                    phase,
                    KVCacheAttentionAccessKind.PLAIN,
                    KVCacheBackendMatcher(exact=frozenset(_BACKENDS)),
                    storage_dtype=torch.uint8,
                    attention_kv_dtype=self.dtype,
                    scale_recipe=NVFP4.name,
                )
                for phase in KVCacheAttentionPhase
            )

        def load_scales_from_model(self, model_runner: Any) -> None:
            """Find the attention layers, to read their scales off them from now on.

            :param model_runner: the model, or what has it as ``model``.
            """
            is_model = isinstance(model_runner, torch.nn.Module)
            model = model_runner if is_model else model_runner.model
            self.read_scales_from(
                module
                for module in model.modules()
                if hasattr(module, "layer_id") and hasattr(module, "k_scale")
            )
            self._loaded()

    return PlainReadNVFP4


def _method_problem() -> str:
    """Why no KV-cache method can be made, empty where it can: one is, and thrown away."""
    try:
        method = _method_class()(
            device="cpu", dtype=torch.bfloat16, scales_later=False, loaded=lambda: None
        )
        method.configure_attention_backends("torch_native", "torch_native")
    except Exception as error:
        return f"its KV-cache methods are made in another way: {type(error).__name__}: {error}"
    return "" if method.needs_plain_kv_dequant_read() else "it has no plain reads"


def _listed(names: Any) -> str:
    return " and ".join(str(name) for name in dict.fromkeys(names))
