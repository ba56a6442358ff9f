"""Every engine symbol that we touch, with the signature that we rely on, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Seam:
    """A function of an engine.

    :param engine: the engine's top-level package.
    :param module: the module that defines the function.
    :param qualname: its name there, ``Class.method`` for a method.
    :param parameters: the parameters that we rely on, in order; ``"*"`` stands before those that
        are given by keyword. Further ones must have defaults.
    :param purpose: what we do there, in a few words.
    """

    engine: str
    module: str
    qualname: str
    parameters: tuple[str, ...]
    purpose: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.qualname}"


_SEAMS: list[Seam] = []


def _touched(module: str, qualname: str, parameters: tuple[str, ...], purpose: str) -> Seam:
    """A seam in the table of all, in which they stand in this order."""
    seam = Seam(module.partition(".")[0], module, qualname, parameters, purpose)
    _SEAMS.append(seam)
    return seam


VLLM_LAYER: Final = _touched(
    "vllm.model_executor.layers.quantization.kv_cache",
    "BaseKVCacheMethod.process_weights_after_loading",
    ("self", "layer"),
    "checks and writes the scales of one layer; without it none is checked",
)
VLLM_MODEL: Final = _touched(
    "vllm.model_executor.model_loader.utils",
    "process_weights_after_loading",
    ("model", "model_config", "target_device"),
    "checks all layers before the first is processed, and lets the hook write their caches",
)
VLLM_MARKER: Final = _touched(
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "CompressedTensorsKVCacheMethod.create_weights",
    ("self", "layer"),
    "marks scales that no checkpoint has set yet",
)
VLLM_CONFIG: Final = _touched(
    "vllm.config.vllm",
    "get_current_vllm_config_or_none",
    (),
    "tells a dummy load's random weights from a checkpoint's; without it no scale is checked",
)
VLLM_LOAD: Final = _touched(
    "vllm.model_executor.model_loader.default_loader",
    "DefaultModelLoader.load_weights",
    ("self", "model", "model_config"),
    "knows which model is loaded from which files",
)
VLLM_FILES: Final = _touched(
    "vllm.model_executor.model_loader.default_loader",
    "DefaultModelLoader._prepare_weights",
    (
        "self",
        "model_name_or_path",
        "subfolder",
        "revision",
        "fall_back_to_pt",
        "allow_patterns_overrides",
    ),
    "checks the scales in the files before the weights are read",
)
VLLM_RELOAD: Final = _touched(
    "vllm.model_executor.model_loader.reload.layerwise",
    "finalize_layerwise_processing",
    ("model", "model_config"),
    "lets vLLM end a reload that is refused; without it a sound one cannot follow",
)
VLLM_RANK: Final = _touched(
    "vllm.distributed.parallel_state",
    "get_tensor_model_parallel_rank",
    (),
    "lets one process speak for all that hold parts of the same layers",
)
VLLM_WRITE: Final = _touched(
    "vllm.model_executor.layers.attention.attention",
    "unified_kv_cache_update",
    ("key", "value", "layer_name"),
    "calls the write of the attention backend, which the hook takes over where it is to write",
)
#: Compilation asks these of a backend before it fuses the write with what comes before it.
VLLM_FUSED_WRITES: Final = tuple(
    _touched(
        "vllm.v1.attention.backend",
        f"AttentionImpl.{question}",
        ("self",),
        "keeps a write that is fused with RoPE from passing the hook by",
    )
    for question in (
        "fused_rope_kvcache_supported",
        "fused_qk_norm_rope_kvcache_supported",
        "fused_qk_norm_mrope_kvcache_supported",
    )
)
VLLM_SHUFFLED: Final = _touched(
    "vllm._aiter_ops",
    "rocm_aiter_ops.is_shuffle_kv_cache_enabled",
    ("cls",),
    "tells on ROCm whether caches have a layout whose write leaves out the scales of the layer",
)


def vllm_backend_write(backend: type) -> Seam:
    """The write of an attention backend. There are many, so the one in use is looked at."""
    return Seam(
        "vllm",
        backend.__module__,
        f"{backend.__qualname__}.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
        "writes K and V to the cache",
    )


PER_HEAD_QUESTION: Final = "supports_per_head_quant_scales"


def vllm_backend_per_head(backend: type) -> Seam:
    """What an attention backend is asked before codes with a scale for each head are written."""
    return Seam(
        "vllm",
        backend.__module__,
        f"{backend.__qualname__}.{PER_HEAD_QUESTION}",
        ("cls",),
        "tells whether attention reads the cache with a scale for each head",
    )


SGLANG_HOOKS: Final = _touched(
    "sglang.srt.plugins.hook_registry",
    "HookRegistry.register",
    ("cls", "target", "hook", "hook_type"),
    "puts our functions around the others of SGLang; without it no scale is checked",
)
SGLANG_LAYER: Final = _touched(
    "sglang.srt.layers.quantization.kv_cache",
    "BaseKVCacheMethod.process_weights_after_loading",
    ("self", "layer"),
    "checks and writes the scales of one layer; without it none is checked",
)
SGLANG_MODEL: Final = _touched(
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader.postprocess_weights",
    ("model", "target_device"),
    "checks all layers before the first is processed",
)
SGLANG_RESTORE: Final = _touched(
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader.restore_weights_before_loading",
    ("model", "target_device"),
    "puts raw scales back before a reload",
)
SGLANG_FILE: Final = _touched(
    "sglang.srt.model_executor.model_runner_components.load_model_utils",
    "load_kv_cache_scales",
    ("*", "model", "kv_cache_dtype"),
    "checks and writes the scales of --quantization-param-path",
)
SGLANG_CONFIG: Final = _touched(
    "sglang.srt.runtime_context",
    "get_model",
    (),
    "tells the KV cache dtype and a dummy load; without it no scale is checked",
)

SGLANG_LOADER: Final = _touched(
    "sglang.srt.model_loader.loader",
    "get_model_loader",
    ("load_config", "model_config"),
    "says which loaders are left alone",
)
SGLANG_LOAD: Final = _touched(
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader._get_all_weights",
    ("self", "model_config", "model"),
    "knows which model is loaded from which files",
)
SGLANG_FILES: Final = _touched(
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader._prepare_weights",
    (
        "self",
        "model_name_or_path",
        "revision",
        "fall_back_to_pt",
        "allow_patterns_overrides",
    ),
    "checks the scales in the files before the weights are read",
)
SGLANG_RANK: Final = _touched(
    "sglang.srt.runtime_context",
    "get_parallel",
    (),
    "lets one process speak for all that hold parts of the same layers",
)
SGLANG_DISK_UPDATE: Final = _touched(
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "WeightUpdater.update_weights_from_disk",
    ("self", "model_path", "load_format"),
    "checks the files of an update before they are read, and lets SGLang go back to the old ones",
)
SGLANG_IPC_UPDATE: Final = _touched(
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "WeightUpdater.update_weights_from_ipc",
    ("self", "recv_req"),
    "answers an update with corrupt scales with an error",
)
SGLANG_END_UPDATE: Final = _touched(
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "WeightUpdater.end_weight_update",
    ("self", "*", "run_post_load"),
    "keeps the scales from before an update whose own are corrupt",
)
SGLANG_END_ANSWER: Final = _touched(
    "sglang.srt.managers.scheduler_components.weight_updater",
    "SchedulerWeightUpdaterManager.end_weight_update",
    ("self", "recv_req"),
    "answers an update with corrupt scales with an error; without it the server dies of them",
)
SGLANG_RESUME: Final = _touched(
    "sglang.srt.managers.scheduler_components.weight_updater",
    "_import_static_state",
    ("model", "static_params"),
    "brings scales back whose memory was released",
)
SGLANG_POOL_WRITE: Final = _touched(
    "sglang.srt.mem_cache.memory_pool",
    "MHATokenToKVPool.set_kv_buffer",
    ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    "rounds K and V for FP8 pools",
)
SGLANG_PREFIX_WRITE: Final = _touched(
    "sglang.srt.mem_cache.memory_pool",
    "MHATokenToKVPool.set_kv_buffer_prefix_valid",
    ("self", "layer", "loc_2d", "commit_lens", "cache_k", "cache_v", "k_scale", "v_scale"),
    "rounds K and V of accepted draft tokens where no fused kernel does",
)
SGLANG_CPU_WRITE: Final = _touched(
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method",
    "CPUFP8KVCacheMethod.quantize_and_store",
    (
        "self",
        "k_buffer",
        "v_buffer",
        "k_scale_buffer",
        "v_scale_buffer",
        "loc",
        "cache_k",
        "cache_v",
        "k_scale",
        "v_scale",
    ),
    "writes caches of cpu_fp8_e4m3",
)
SGLANG_NVFP4_QUANTIZE: Final = _touched(
    "sglang.srt.layers.quantization.kvfp4_tensor",
    "NVFP4KVQuantizeUtil.quantize",
    ("tensor", "global_scale"),
    "quantizes K and V to NVFP4",
)
SGLANG_NVFP4_DEQUANTIZE: Final = _touched(
    "sglang.srt.layers.quantization.kvfp4_tensor",
    "NVFP4KVQuantizeUtil.dequantize",
    ("quant_tensor", "block_scales", "global_scale", "dtype"),
    "reads K and V from NVFP4",
)

SGLANG_NVFP4_PREFILL: Final = _touched(
    "sglang.srt.arg_groups.kv_cache_hook",
    "handle_nvfp4_prefill_kv_dequant_dtype",
    ("server_args",),
    "lets NVFP4 caches that are read as plain K and V pass on backends that read no FP4",
)
SGLANG_NVFP4_BACKENDS: Final = _touched(
    "sglang.srt.arg_groups.kv_cache_hook",
    "handle_kv4_compatibility",
    ("server_args",),
    "lets NVFP4 caches that are read as plain K and V pass on other hardware than Blackwell",
)
SGLANG_FP4_DTYPE: Final = _touched(
    "sglang.srt.utils.common",
    "is_float4_e2m1fn_x2",
    ("dtype",),
    "knows NVFP4 caches where there is no CUDA",
)
SGLANG_KV_METHOD: Final = _touched(
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method",
    "get_kv_cache_quant_method",
    ("name",),
    "makes the NVFP4 caches that are read as plain K and V",
)
SGLANG_FUSED_WRITE: Final = _touched(
    "sglang.srt.models.utils",
    "enable_fused_set_kv_buffer",
    ("forward_batch",),
    "keeps ROCm's fused writes from NVFP4 caches that are read as plain K and V",
)
#: What such a cache is made of, and what is asked before one is made.
SGLANG_NVFP4_NEEDS: Final = (
    *(
        _touched(
            "sglang.srt.layers.quantization.fp4_kv_cache_quant_method",
            f"KVCacheQuantMethodBase.{method}",
            ("self", *parameters),
            "is a part of NVFP4 caches that are read as plain K and V",
        )
        for method, parameters in (
            ("attention_accesses", ()),
            ("load_scales_from_model", ("model_runner",)),
            ("create_buffers", ("size", "head_num", "head_dim", "layer_num", "device")),
            (
                "quantize_and_store",
                (
                    "k_buffer",
                    "v_buffer",
                    "k_scale_buffer",
                    "v_scale_buffer",
                    "loc",
                    "cache_k",
                    "cache_v",
                    "k_scale",
                    "v_scale",
                ),
            ),
            ("dequantize_kv_tensor", ("fp4_tensor", "scales", "layer_id", "dtype")),
            ("compute_cell_size", ("head_num", "head_dim", "num_layers", "kv_size")),
        )
    ),
    *(
        _touched(
            f"sglang.srt.{module}",
            function,
            parameters,
            "tells whether an NVFP4 cache can be read as plain K and V",
        )
        for module, function, parameters in (
            ("arg_groups.model_override_base", "resolving_view", ("server_args",)),
            ("arg_groups.model_override_base", "model_config_of", ("server_args",)),
            ("runtime_context", "get_server_args", ()),
            ("configs.hybrid_arch", "mambaish_config", ("model_config",)),
            ("configs.model_config", "is_minimax_sparse", ("config",)),
        )
    ),
)

#: All of the above, but for those of the backends in use.
SEAMS: Final = tuple(_SEAMS)

# What only `kvcache-plugin bench --peers` calls. Nothing is changed there, and no engine needs
# them, so they are no part of SEAMS.
VLLM_PEER_CPU_WRITE: Final = Seam(
    "vllm",
    "vllm._custom_ops",
    "cpu_attn_reshape_and_cache",
    (
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "isa",
        "k_scale",
        "v_scale",
        "kv_cache_dtype",
    ),
    "times vLLM's write of FP8 caches on the CPU",
)
VLLM_PEER_CPU_ISA: Final = Seam(
    "vllm",
    "vllm.v1.attention.backends.cpu_attn",
    "_get_attn_isa",
    ("dtype", "block_size", "head_size", "kv_cache_dtype"),
    "tells which of vLLM's kernels for the CPU writes",
)
VLLM_PEER_CUDA_WRITE: Final = Seam(
    "vllm",
    "vllm._custom_ops",
    "reshape_and_cache_flash",
    (
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "kv_cache_dtype",
        "k_scale",
        "v_scale",
    ),
    "times vLLM's write of FP8 caches on CUDA",
)
SGLANG_PEER_FP4_QUANTIZE: Final = Seam(
    "sglang",
    "sglang.srt.layers.quantization.kvfp4_tensor",
    "FP4MXBlock16KVQuantizeUtil.batched_quantize",
    ("tensor",),
    "times SGLang's FP4 quantizer that is no NVFP4",
)
SGLANG_PEER_FP4_DEQUANTIZE: Final = Seam(
    "sglang",
    "sglang.srt.layers.quantization.kvfp4_tensor",
    "FP4MXBlock16KVQuantizeUtil.batched_dequantize",
    ("quant_tensor", "scale_factors", "dtype"),
    "times SGLang's FP4 dequantizer that is no NVFP4",
)
#: Together with ``SGLANG_CPU_WRITE``.
PEERS: Final = (
    VLLM_PEER_CPU_WRITE,
    VLLM_PEER_CPU_ISA,
    VLLM_PEER_CUDA_WRITE,
    SGLANG_PEER_FP4_QUANTIZE,
    SGLANG_PEER_FP4_DEQUANTIZE,
)
