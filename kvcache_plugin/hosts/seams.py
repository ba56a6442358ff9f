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


VLLM_LAYER: Final = Seam(
    "vllm",
    "vllm.model_executor.layers.quantization.kv_cache",
    "BaseKVCacheMethod.process_weights_after_loading",
    ("self", "layer"),
    "checks and writes the scales of one layer; without it none is checked",
)
VLLM_MODEL: Final = Seam(
    "vllm",
    "vllm.model_executor.model_loader.utils",
    "process_weights_after_loading",
    ("model", "model_config", "target_device"),
    "checks all layers before the first is processed",
)
VLLM_MARKER: Final = Seam(
    "vllm",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "CompressedTensorsKVCacheMethod.create_weights",
    ("self", "layer"),
    "marks scales that no checkpoint has set yet",
)
VLLM_CONFIG: Final = Seam(
    "vllm",
    "vllm.config.vllm",
    "get_current_vllm_config_or_none",
    (),
    "tells a dummy load's random weights from a checkpoint's; without it no scale is checked",
)
VLLM_LOAD: Final = Seam(
    "vllm",
    "vllm.model_executor.model_loader.default_loader",
    "DefaultModelLoader.load_weights",
    ("self", "model", "model_config"),
    "knows which model is loaded from which files",
)
VLLM_FILES: Final = Seam(
    "vllm",
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
VLLM_RANK: Final = Seam(
    "vllm",
    "vllm.distributed.parallel_state",
    "get_tensor_model_parallel_rank",
    (),
    "lets one process speak for all that hold parts of the same layers",
)
SGLANG_HOOKS: Final = Seam(
    "sglang",
    "sglang.srt.plugins.hook_registry",
    "HookRegistry.register",
    ("cls", "target", "hook", "hook_type"),
    "wraps the other seams; without it no scale is checked",
)
SGLANG_LAYER: Final = Seam(
    "sglang",
    "sglang.srt.layers.quantization.kv_cache",
    "BaseKVCacheMethod.process_weights_after_loading",
    ("self", "layer"),
    "checks and writes the scales of one layer; without it none is checked",
)
SGLANG_MODEL: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader.postprocess_weights",
    ("model", "target_device"),
    "checks all layers before the first is processed",
)
SGLANG_RESTORE: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader.restore_weights_before_loading",
    ("model", "target_device"),
    "puts raw scales back before a reload",
)
SGLANG_FILE: Final = Seam(
    "sglang",
    "sglang.srt.model_executor.model_runner_components.load_model_utils",
    "load_kv_cache_scales",
    ("*", "model", "kv_cache_dtype"),
    "checks and writes the scales of --quantization-param-path",
)
SGLANG_CONFIG: Final = Seam(
    "sglang",
    "sglang.srt.runtime_context",
    "get_model",
    (),
    "tells the KV cache dtype and a dummy load; without it no scale is checked",
)

SGLANG_LOADER: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "get_model_loader",
    ("load_config", "model_config"),
    "says which loaders are left alone",
)
SGLANG_LOAD: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader._get_all_weights",
    ("self", "model_config", "model"),
    "knows which model is loaded from which files",
)
SGLANG_FILES: Final = Seam(
    "sglang",
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
SGLANG_RANK: Final = Seam(
    "sglang",
    "sglang.srt.runtime_context",
    "get_parallel",
    (),
    "lets one process speak for all that hold parts of the same layers",
)

SEAMS: Final = (
    VLLM_LAYER,
    VLLM_MODEL,
    VLLM_MARKER,
    VLLM_CONFIG,
    VLLM_LOAD,
    VLLM_FILES,
    VLLM_RANK,
    SGLANG_HOOKS,
    SGLANG_LAYER,
    SGLANG_MODEL,
    SGLANG_RESTORE,
    SGLANG_FILE,
    SGLANG_CONFIG,
    SGLANG_LOADER,
    SGLANG_LOAD,
    SGLANG_FILES,
    SGLANG_RANK,
)
