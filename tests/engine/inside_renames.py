"""Runs inside an engine's environment: its own functions judge our table of names and schemes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_plugin.checkpoint.conventions import CONVENTIONS, match
from kvcache_plugin.checkpoint.declaration import Declaration, KVScheme, read_declaration
from kvcache_plugin.checkpoint.engine_rules import (
    RELEASES,
    SGLANG_WITHOUT_RENAME,
    not_served,
    verdicts,
)
from kvcache_plugin.checkpoint.model_shape import ModelShape

# Beside SGLang there is a stand-in for a module of vLLM.
HAS_VLLM = importlib.util.find_spec("sglang") is None
ENGINE = "vLLM" if HAS_VLLM else "SGLang"
only_vllm = pytest.mark.skipif(not HAS_VLLM, reason="about vLLM")
only_sglang = pytest.mark.skipif(HAS_VLLM, reason="about SGLang")

FP8 = KVScheme("fp8_e4m3", "tensor", symmetric=True)
# Declarations under which the engines make parameters for scales.
DECLARATIONS = {
    method: Declaration(method, "FP8", FP8)
    for method in ("compressed-tensors", "modelopt", "fp8", "quark")
}
NAMES = [
    pytest.param(convention, side, id=f"{convention.key}-{side}")
    for convention in CONVENTIONS
    for side in convention.sides
    if side in ("k", "v", "kv")
]
NUMBER = 0.125


def expected(convention: Any, declaration: Declaration, shape: ModelShape) -> str:
    by_engine = {
        verdict.engine: verdict.outcome for verdict in verdicts(convention, declaration, shape)
    }
    return str(by_engine[ENGINE])


def parameter_of(name: str, attention: str) -> str:
    """The parameter that a tensor of this name is meant for, in this attention module."""
    found = match(name)
    assert found is not None
    side = "k" if found.side == "kv" else found.side
    what = "zero_point" if found.convention.role == "zero point" else "scale"
    return f"{found.module}.{attention}.{side}_{what}"


def parameters(module: str, attention: str, *, zero_points: bool = False) -> dict[str, Any]:
    kinds = ("scale", "zero_point") if zero_points else ("scale",)
    return {f"{module}.{attention}.{side}_{kind}": None for side in "kvq" for kind in kinds}


def test_the_release_is_the_one_that_the_rules_describe() -> None:
    version = importlib.import_module(ENGINE.lower()).__version__
    assert version.split("+")[0] == RELEASES[ENGINE]


# vLLM


def vllm_config(method: str) -> Any:
    if method == "fp8":
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config as Config
    elif method == "quark":
        from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig as Config
    elif method == "modelopt":
        from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config as Config
    else:
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsConfig as Config,
        )
    return Config


class Model(torch.nn.Module):
    """The parameters of one layer's attention, where the engine's models have them."""

    def __init__(self, names: dict[str, Any], config: Any) -> None:
        super().__init__()
        self.quant_config = SimpleNamespace(
            get_cache_scale_mapper=config.get_cache_scale_mapper,
            get_checkpoint_weight_mapper=config.get_checkpoint_weight_mapper,
            _ignore_unexpected_suffixes=[],
        )
        for name in names:
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(
                last, torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
            )


def as_loaded_by_vllm(name: str, method: str) -> str:
    """What becomes of a tensor of this name when vLLM's own loader loads an ordinary model."""
    from vllm.model_executor.models.mistral import MistralForCausalLM
    from vllm.model_executor.models.utils import AutoWeightsLoader

    target = parameter_of(name, "attn")
    if "fake_quantizer" in name:
        stand_in = SimpleNamespace(mistral_mapping=MistralForCausalLM.mistral_mapping, config=None)
        name, _ = MistralForCausalLM.maybe_remap_mistral(stand_in, name, torch.tensor(NUMBER))
        target = name.replace("kv_scale", "k_scale")
        target = f"{target.rpartition('.')[0]}.attn.{target.rpartition('.')[2]}"
    module = target.rsplit(".", 2)[0]
    zero_points = method == "compressed-tensors"
    model = Model(parameters(module, "attn", zero_points=zero_points), vllm_config(method))
    try:
        AutoWeightsLoader(model).load_weights([(name, torch.tensor(NUMBER))])
    except ValueError:
        return "load fails"
    return "found" if model.get_parameter(target).item() == NUMBER else "dropped"


@only_vllm
@pytest.mark.parametrize("method", DECLARATIONS)
@pytest.mark.parametrize(("convention", "side"), NAMES)
def test_vllm_loads_what_we_say(convention: Any, side: str, method: str) -> None:
    name = convention.example.format(i=3, side=side)
    outcome = expected(convention, DECLARATIONS[method], ModelShape())
    assert as_loaded_by_vllm(name, method) == outcome


@only_vllm
@pytest.mark.parametrize("method", DECLARATIONS)
@pytest.mark.parametrize(("convention", "side"), NAMES)
def test_vllms_rename_agrees(convention: Any, side: str, method: str) -> None:
    """After the loader's own renaming the older function does not spoil what was found."""
    from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

    name = convention.example.format(i=3, side=side)
    if expected(convention, DECLARATIONS[method], ModelShape()) != "found" or "fake_q" in name:
        pytest.skip("not found at all, or renamed by Mistral's own loader first")
    target = parameter_of(name, "attn")
    module = target.rsplit(".", 2)[0]
    names = parameters(module, "attn", zero_points=True)
    mapped = vllm_config(method).get_cache_scale_mapper().map_name(name)
    assert maybe_remap_kv_scale_name(mapped, names) == target
    if convention.key not in ("output-scale",):
        assert maybe_remap_kv_scale_name(name, names) == target


@only_vllm
@pytest.mark.parametrize("method", DECLARATIONS)
@pytest.mark.parametrize(("convention", "side"), NAMES)
def test_vllm_loses_scales_of_models_with_latent_attention(
    convention: Any, side: str, method: str
) -> None:
    """DeepSeek's loader renames what the loader around it has renamed before."""
    from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

    name = convention.example.format(i=3, side=side)
    names = parameters("model.layers.3.self_attn", "mla_attn.mla_attn")
    mapped = vllm_config(method).get_cache_scale_mapper().map_name(name)
    found = maybe_remap_kv_scale_name(mapped, names) in names
    shape = ModelShape(is_mla=True)
    assert found is (expected(convention, DECLARATIONS[method], shape) == "found")


@only_vllm
def test_vllms_loader_of_latent_attention_does_rename_twice() -> None:
    from vllm.model_executor.models import deepseek_v2

    source = inspect.getsource(deepseek_v2)
    assert "maybe_remap_kv_scale_name(name, params_dict)" in source
    assert "AutoWeightsLoader(self)" in source


# SGLang


@only_sglang
@pytest.mark.parametrize(("convention", "side"), NAMES)
def test_sglang_renames_what_we_say(convention: Any, side: str) -> None:
    from sglang.srt.model_loader.weight_utils import maybe_remap_kv_scale_name

    name = convention.example.format(i=3, side=side)
    target = parameter_of(name, "attn")
    names = parameters(target.rsplit(".", 2)[0], "attn")
    found = maybe_remap_kv_scale_name(name, names) == target and target in names
    for declaration in DECLARATIONS.values():
        assert found is (expected(convention, declaration, ModelShape()) == "found")


@only_sglang
@pytest.mark.parametrize("architecture", SGLANG_WITHOUT_RENAME)
def test_some_of_sglangs_models_rename_nothing(architecture: str) -> None:
    modules = {
        "MixtralForCausalLM": "mixtral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3MoeForCausalLM": "qwen3_moe",
    }
    module = importlib.import_module(f"sglang.srt.models.{modules[architecture]}")
    assert hasattr(module, architecture)
    assert "maybe_remap_kv_scale_name" not in inspect.getsource(module)


@only_sglang
def test_sglangs_loader_of_latent_attention() -> None:
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    source = inspect.getsource(deepseek_weight_loader)
    assert "maybe_remap_kv_scale_name" not in source
    assert '"attn_mqa"' in source


# Schemes

SCHEMES = [
    {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": dynamic,
    }
    for bits, kind, strategy, symmetric, dynamic in product(
        (8, 4), ("float", "int"), ("tensor", "attn_head", "channel"), (True, False), (False, True)
    )
] + [
    {"num_bits": 8, "type": "float", "strategy": "tensor"},
    {"num_bits": 8, "type": "float", "symmetric": True},
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compressed_tensors_schemes(scheme: dict[str, Any]) -> None:
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    declaration = read_declaration({"quantization_config": config}, {})
    assert (not_served(ENGINE, declaration) == "") is takes_compressed_tensors(scheme)


def takes_compressed_tensors(scheme: dict[str, Any]) -> bool:
    package = "vllm.model_executor" if HAS_VLLM else "sglang.srt"
    module = f"{package}.layers.quantization.compressed_tensors.compressed_tensors"
    method = importlib.import_module(module).CompressedTensorsKVCacheMethod
    if not HAS_VLLM:
        return bool(method.is_supported_scheme(scheme))
    try:
        method.validate_kv_cache_scheme(scheme)
    except (NotImplementedError, ValueError):
        return False
    return True


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("qscheme", ["per_tensor", "per_channel"])
def test_quark_schemes(dtype: str, qscheme: str) -> None:
    output = {"dtype": dtype, "qscheme": qscheme}
    config = {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
        "layer_quant_config": {name: {"output_tensors": output} for name in ("*k_proj", "*v_proj")},
    }
    declaration = read_declaration({"quantization_config": config}, {})
    package = "vllm.model_executor" if HAS_VLLM else "sglang.srt"
    module = importlib.import_module(f"{package}.layers.quantization.quark.quark")
    try:
        module.QuarkKVCacheMethod.validate_kv_cache_config(output)
        takes = True
    except NotImplementedError:
        takes = False
    assert (not_served(ENGINE, declaration) == "") is takes


@only_vllm
@pytest.mark.parametrize(
    "scheme",
    [{"num_bits": 8, "type": "float", "dynamic": False}, "NVFP4", "FP8", "INT8", "NVFP4_AFFINE"],
)
def test_modelopt_schemes_of_vllm(scheme: Any) -> None:
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": scheme}
    declaration = read_declaration({"quantization_config": config}, {})
    takes = get_kv_cache_quant_algo_string(config) in ("fp8", "fp8_e4m3", "nvfp4")
    assert (not_served(ENGINE, declaration) == "") is takes
