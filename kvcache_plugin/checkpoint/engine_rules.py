"""Which scales of a checkpoint reach the layers of each engine, and why others do not.

Data about two releases, read off their sources and compared with their own functions in
``tests/engine/inside_renames.py``. No engine is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from kvcache_plugin.checkpoint.conventions import Convention
    from kvcache_plugin.checkpoint.declaration import Declaration
    from kvcache_plugin.checkpoint.model_shape import ModelShape

VLLM: Final = "vLLM"
SGLANG: Final = "SGLang"
#: The releases that the rules describe.
RELEASES: Final = {VLLM: "0.32.0", SGLANG: "0.5.23"}

Outcome: TypeAlias = Literal["found", "dropped", "load fails"]

#: Models whose SGLang loader takes names as they stand: the engine's own name alone is found
#: (sglang#39942).
SGLANG_WITHOUT_RENAME: Final = (
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
)


@dataclass(frozen=True)
class EngineVerdict:
    """What becomes of a scale when an engine loads the checkpoint.

    :param engine: ``"vLLM"`` or ``"SGLang"``.
    :param outcome: ``"found"``: it reaches its layer; ``"dropped"``: the layer is served with 1.0;
        ``"load fails"``: the engine ends with an error that does not speak of scales.
    :param reason: why it is not found, or on what condition it is.
    """

    engine: str
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        word = "yes" if self.finds else self.outcome
        return f"{self.engine}: {word}{f' ({self.reason})' if self.reason else ''}"

    @property
    def finds(self) -> bool:
        """Whether the scale reaches its layer."""
        return self.outcome == "found"


def verdicts(
    convention: Convention, declaration: Declaration, shape: ModelShape
) -> tuple[EngineVerdict, ...]:
    """What each engine does with a tensor of this name in this checkpoint."""
    return (
        _vllm(convention, declaration, shape),
        _sglang(convention, declaration, shape),
    )


def not_served(engine: str, declaration: Declaration) -> str:
    """Why an engine does not serve the declared scheme; empty when it does, or none is declared."""
    scheme, method = declaration.scheme, declaration.quant_method
    if scheme is None:
        return ""
    dtype = scheme.kv_cache_dtype
    if method == "compressed-tensors":
        if scheme.is_text:
            return "it takes kv_cache_scheme as an object"
        if dtype != "fp8_e4m3":
            return f"it takes 8-bit floats alone, not {dtype}"
        if scheme.strategy not in _STRATEGIES[engine]:
            known = " or ".join(_STRATEGIES[engine])
            return f"it takes strategy {known}, not {scheme.strategy or 'none'}"
        if scheme.symmetric is False or (scheme.symmetric is None and engine == VLLM):
            return "it takes scales that are declared symmetric alone"
        if scheme.dynamic and engine == SGLANG:
            return "it takes static scales alone"
    elif method.startswith("modelopt"):
        if engine == SGLANG and dtype == "nvfp4" and "FP4" in declaration.quant_algo:
            return (
                "it loads the scales, and serves an unquantized KV cache unless it is started with "
                "--kv-cache-dtype nvfp4"
            )
        if dtype not in _MODELOPT_DTYPES[engine]:
            return f"its modelopt loader does not take {dtype}"
    elif method == "quark":
        if dtype != "fp8_e4m3":
            return f"it takes fp8_e4m3 alone, not {dtype}"
        if scheme.strategy != "tensor":
            return f"it takes per_tensor alone, not {scheme.strategy or 'none'}"
    return ""


def refuses_format(
    engine: str, kv_cache_dtype: str, declaration: Declaration, shape: ModelShape
) -> str:
    """Why an engine does not start with a format and such a checkpoint; empty when it does."""
    if engine != VLLM or kv_cache_dtype != "fp8_e5m2":
        return ""
    method = declaration.quant_method
    if shape.is_mla and not method.startswith("modelopt"):
        return ""
    # compressed-tensors for weights alone has no place for scales, and is let through.
    with_scales = method in ("fp8", "quark") or method.startswith("modelopt")
    if method == "compressed-tensors":
        with_scales = declaration.scheme is not None
    return "fp8_e5m2 kv-cache is not supported with fp8 checkpoints" if with_scales else ""


_STRATEGIES: Final = {VLLM: ("tensor", "attn_head"), SGLANG: ("tensor",)}
_MODELOPT_DTYPES: Final = {VLLM: ("fp8_e4m3", "nvfp4"), SGLANG: ("fp8_e4m3",)}
#: Besides the modelopt ones.
_METHODS: Final = ("compressed-tensors", "fp8", "quark")


def _vllm(convention: Convention, declaration: Declaration, shape: ModelShape) -> EngineVerdict:
    # Its loader takes a tensor without a parameter for an error; that of MLA models does not.
    otherwise: Outcome = "dropped" if shape.is_mla else "load fails"
    rename, method = convention.vllm, declaration.quant_method
    reason = _no_parameter(VLLM, declaration)
    if reason:
        return EngineVerdict(VLLM, otherwise, reason)
    if shape.is_mla and not rename.found_mla:
        reason = "in MLA models it renames twice, to a parameter that does not exist"
        return EngineVerdict(VLLM, otherwise, reason)
    if not shape.is_mla and (not rename.found or (rename.methods and method not in rename.methods)):
        return EngineVerdict(VLLM, otherwise, rename.reason)
    return EngineVerdict(VLLM, "found", "" if rename.methods else rename.reason)


def _sglang(convention: Convention, declaration: Declaration, shape: ModelShape) -> EngineVerdict:
    rename = convention.sglang
    reason = _no_parameter(SGLANG, declaration)
    if reason:
        quark = declaration.quant_method == "quark"
        return EngineVerdict(SGLANG, "load fails" if quark else "dropped", reason)
    without = next((name for name in shape.architectures if name in SGLANG_WITHOUT_RENAME), "")
    if without:
        if convention.key == "engine":
            return EngineVerdict(SGLANG, "found")
        return EngineVerdict(SGLANG, "dropped", f"its loader of {without} renames no K/V scale")
    if shape.is_mla and not rename.found_mla:
        reason = "in MLA models it knows k_proj.k_scale and attn_mqa.k_scale alone"
        return EngineVerdict(SGLANG, "dropped", reason)
    if not shape.is_mla and not rename.found:
        return EngineVerdict(SGLANG, "dropped", rename.reason)
    return EngineVerdict(SGLANG, "found")


def _no_parameter(engine: str, declaration: Declaration) -> str:
    """Why an engine makes no parameter that a scale could be loaded into."""
    method, scheme = declaration.quant_method, declaration.scheme
    if not method and scheme is not None:
        return "the quantization_config has no quant_method, without which it has no place for it"
    if not method:
        return "without a quantization_config it has no place for it"
    if method.startswith("modelopt"):
        # For weights in FP4 SGLang makes the parameters whatever is declared.
        if engine == VLLM or "FP4" in declaration.quant_algo:
            return ""
        return (
            "no quantized KV cache is declared"
            if scheme is None
            else not_served(SGLANG, declaration)
        )
    if method not in _METHODS:
        return f"for quant_method {method} it has no place for it"
    if method == "compressed-tensors" and scheme is None and engine == SGLANG:
        return "there is no kv_cache_scheme"
    return "" if method == "fp8" else not_served(engine, declaration)
