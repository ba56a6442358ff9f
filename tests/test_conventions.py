"""The table of names, and what becomes of each in each engine."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_plugin.checkpoint.conventions import CONVENTIONS, looks_like_kv_scale, match
from kvcache_plugin.checkpoint.declaration import Declaration, KVScheme
from kvcache_plugin.checkpoint.engine_rules import not_served, verdicts
from kvcache_plugin.checkpoint.model_shape import ModelShape

L = "model.layers.3"
FP8 = KVScheme("fp8_e4m3", strategy="tensor", symmetric=True)
DECLARED = Declaration("compressed-tensors", scheme=FP8)

# Names that producers are known to write: side, role, attention module.
KNOWN = [
    (f"{L}.self_attn.k_scale", "k", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.v_scale", "v", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.q_scale", "q", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.k_zero_point", "k", "zero point", f"{L}.self_attn"),
    (f"{L}.self_attn.k_proj.k_scale", "k", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.v_proj.v_scale", "v", "scale", f"{L}.self_attn"),
    (
        "language_model.model.layers.3.self_attn.k_proj.k_scale",
        "k",
        "scale",
        "language_model.model.layers.3.self_attn",
    ),
    (f"{L}.self_attn.kv_scale", "kv", "scale", f"{L}.self_attn"),
    ("transformer.h.3.attn.kv_scale", "kv", "scale", "transformer.h.3.attn"),
    (f"{L}.self_attn.k_proj.output_scale", "k", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.prob_output_scale", "prob", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.attn.k_scale", "k", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.qkv_proj.k_scale", "k", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.qkqkv_proj.k_scale", "k", "scale", f"{L}.self_attn"),
    ("backbone.layers.3.mixer.k_proj.k_scale", "k", "scale", "backbone.layers.3.mixer"),
    (f"{L}.self_attn.mla_attn.mla_attn.k_scale", "k", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.k_global_scale", "k", "global scale", f"{L}.self_attn"),
    (
        "layers.3.attention.k_fake_quantizer.qscale_act",
        "k",
        "scale",
        "layers.3.attention",
    ),
    (
        "layers.3.attention.kv_fake_quantizer.qscale_act",
        "kv",
        "scale",
        "layers.3.attention",
    ),
    (f"{L}.self_attn.v_cache.scale", "v", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.q.scale", "q", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.attn_mqa.v_scale", "v", "scale", f"{L}.self_attn"),
    (f"{L}.self_attn.v_proj.v_bias", "v", "bias", f"{L}.self_attn"),
    (
        "transformer.layers.3.attention.kv_cache_scaling_factor",
        "kv",
        "scale",
        "transformer.layers.3.attention",
    ),
    ("mtp.layers.0.self_attn.k_scale", "k", "scale", "mtp.layers.0.self_attn"),
    ("self_attn.k_scale", "k", "scale", "self_attn"),
]

# Other tensors of quantized checkpoints.
OTHERS = [
    f"{L}.self_attn.k_proj.weight",
    f"{L}.self_attn.k_proj.bias",
    f"{L}.self_attn.k_proj.weight_scale",
    f"{L}.self_attn.k_proj.weight_scale_2",
    f"{L}.self_attn.k_proj.weight_scale_inv",
    f"{L}.self_attn.v_proj.input_scale",
    f"{L}.self_attn.v_proj.input_global_scale",
    f"{L}.self_attn.v_proj.weight_global_scale",
    f"{L}.self_attn.k_proj.weight_packed",
    f"{L}.self_attn.k_proj.weight_zero_point",
    f"{L}.self_attn.k_proj.qweight",
    f"{L}.self_attn.k_proj.qzeros",
    f"{L}.self_attn.k_proj.scales",
    f"{L}.self_attn.k_norm.weight",
    f"{L}.self_attn.kv_a_proj_with_mqa.weight_scale",
    f"{L}.self_attn.kv_b_proj.input_scale",
    f"{L}.self_attn.o_proj.pre_quant_scale",
    f"{L}.mlp.experts.7.up_proj.weight_scale",
    f"{L}.mlp.experts.7.up_proj.input_scale",
    "layers.3.attention.wk.qscale_act",
    "layers.3.attention.wk.qscale_weight",
    "model.visual.blocks.3.attn.logit_scale",
    "model.embed_tokens.weight",
]

# Names of no convention that a person would take for those of K/V scales.
STRANGE = [
    f"{L}.self_attn.key_scale",
    f"{L}.self_attn.k_scales",
    f"{L}.self_attn.k_cache_scale",
    f"{L}.self_attn.kv_cache_scaling_factor",
    f"{L}.self_attn.k_scale_inv",
    f"{L}.self_attn.k_bmm_quantizer._amax",
    f"{L}.self_attn.kscale",
    f"{L}.self_attn.qkv_proj.k_scale_2",
    f"{L}.self_attn.k_proj.v_scale",
    f"{L}.foo.k_scale",
    f"{L}.self_attn.v.scale",
]


@pytest.mark.parametrize(("name", "side", "role", "module"), KNOWN, ids=lambda value: str(value))
def test_a_known_name_is_understood(name: str, side: str, role: str, module: str) -> None:
    found = match(name)
    assert found is not None
    assert (found.side, found.convention.role, found.module) == (side, role, module)


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_no_kv_scales(name: str) -> None:
    assert match(name) is None
    assert not looks_like_kv_scale(name)


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_is_noticed(name: str) -> None:
    assert match(name) is None
    assert looks_like_kv_scale(name)


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.key)
def test_an_example_is_of_its_own_convention(convention: Any) -> None:
    for side in convention.sides:
        found = match(convention.example.format(i=3, side=side))
        assert found is not None
        assert (found.convention.key, found.side) == (convention.key, side)
    assert convention.stored
    assert convention.producer


def test_keys_are_unique() -> None:
    keys = [convention.key for convention in CONVENTIONS]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("producer", "meaning"),
    [
        ("compressed-tensors", "reciprocal"),
        ("auto-round", "multiplier"),
        ("", "unknown"),
        ("modelopt", "unknown"),
    ],
)
def test_the_producer_says_what_a_global_scale_means(producer: str, meaning: str) -> None:
    found = match(f"{L}.self_attn.k_global_scale")
    assert found is not None
    assert found.convention.meaning_from(producer) == meaning


def test_other_scales_are_multipliers_whoever_wrote_them() -> None:
    for producer in ("compressed-tensors", "auto-round", "modelopt", "quark", ""):
        found = match(f"{L}.self_attn.k_scale")
        assert found is not None
        assert found.convention.meaning_from(producer) == "multiplier"


def test_a_name_that_an_engine_does_not_find_has_a_reason() -> None:
    for convention in CONVENTIONS:
        for rename in (convention.vllm, convention.sglang):
            assert rename.found or rename.reason, convention.key


def outcomes(
    name: str, declaration: Declaration = DECLARED, shape: ModelShape | None = None
) -> tuple[str, str]:
    found = match(name)
    assert found is not None
    vllm, sglang = verdicts(found.convention, declaration, shape or ModelShape())
    assert (vllm.engine, sglang.engine) == ("vLLM", "SGLang")
    assert all(verdict.finds or verdict.reason for verdict in (vllm, sglang))
    return vllm.outcome, sglang.outcome


@pytest.mark.parametrize(
    ("name", "vllm", "sglang"),
    [
        (f"{L}.self_attn.k_scale", "found", "found"),
        (f"{L}.self_attn.k_proj.k_scale", "found", "found"),
        (f"{L}.self_attn.kv_scale", "found", "found"),
        ("backbone.layers.3.mixer.k_proj.k_scale", "found", "found"),
        (f"{L}.self_attn.attn.k_scale", "found", "dropped"),
        (f"{L}.self_attn.qkv_proj.k_scale", "found", "dropped"),
        (f"{L}.self_attn.qkqkv_proj.k_scale", "found", "dropped"),
        (f"{L}.self_attn.k_cache.scale", "found", "dropped"),
        ("layers.3.attention.k_fake_quantizer.qscale_act", "found", "dropped"),
        (f"{L}.self_attn.k_proj.output_scale", "load fails", "found"),
        (f"{L}.self_attn.k_global_scale", "load fails", "dropped"),
    ],
)
def test_each_engine_finds_some_names(name: str, vllm: str, sglang: str) -> None:
    assert outcomes(name) == (vllm, sglang)


@pytest.mark.parametrize(
    ("declaration", "vllm", "sglang"),
    [
        (Declaration(), "load fails", "dropped"),
        (Declaration("awq"), "load fails", "dropped"),
        (Declaration("fp8"), "found", "found"),
        (Declaration("compressed-tensors"), "found", "dropped"),
        (Declaration("modelopt", "FP8"), "found", "dropped"),
        (Declaration("modelopt", "FP8", FP8), "found", "found"),
        (Declaration("modelopt", "NVFP4"), "found", "found"),
        (Declaration("quark"), "found", "found"),
        (
            Declaration("compressed-tensors", scheme=KVScheme("fp8_e4m3", "attn_head", True)),
            "found",
            "dropped",
        ),
        (Declaration("quark", scheme=KVScheme("int8", "tensor")), "load fails", "load fails"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.quant_method or "none",
)
def test_an_engine_needs_a_place_for_a_scale(
    declaration: Declaration, vllm: str, sglang: str
) -> None:
    assert outcomes(f"{L}.self_attn.k_scale", declaration) == (vllm, sglang)


def test_quark_names_are_found_where_the_method_says_quark() -> None:
    name = f"{L}.self_attn.k_proj.output_scale"
    assert outcomes(name, Declaration("quark")) == ("found", "found")
    assert outcomes(name, Declaration("fp8")) == ("found", "found")


def test_models_with_latent_attention_lose_almost_all() -> None:
    mla = ModelShape(is_mla=True)
    assert outcomes(f"{L}.self_attn.k_scale", DECLARED, mla) == ("dropped", "dropped")
    assert outcomes(f"{L}.self_attn.k_proj.k_scale", DECLARED, mla) == ("dropped", "found")
    assert outcomes(f"{L}.self_attn.attn_mqa.k_scale", DECLARED, mla) == ("dropped", "found")
    name = f"{L}.self_attn.mla_attn.mla_attn.k_scale"
    assert outcomes(name, DECLARED, mla) == ("dropped", "dropped")


@pytest.mark.parametrize("model", ["MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_some_sglang_models_rename_nothing(model: str) -> None:
    shape = ModelShape(architectures=(model,))
    assert outcomes(f"{L}.self_attn.k_scale", DECLARED, shape) == ("found", "dropped")
    assert outcomes(f"{L}.self_attn.attn.k_scale", DECLARED, shape) == ("found", "found")


@pytest.mark.parametrize(
    ("method", "scheme", "vllm", "sglang"),
    [
        ("compressed-tensors", FP8, True, True),
        ("compressed-tensors", KVScheme("fp8_e4m3", "attn_head", True), True, False),
        ("compressed-tensors", KVScheme("fp8_e4m3", "channel", True), False, False),
        ("compressed-tensors", KVScheme("fp8_e4m3", "", True), False, False),
        ("compressed-tensors", KVScheme("fp8_e4m3", "tensor"), False, True),
        ("compressed-tensors", KVScheme("fp8_e4m3", "tensor", False), False, False),
        ("compressed-tensors", KVScheme("fp8_e4m3", "tensor", True, dynamic=True), True, False),
        ("compressed-tensors", KVScheme("nvfp4", "tensor", True), False, False),
        ("compressed-tensors", KVScheme("int8", "tensor", True), False, False),
        ("compressed-tensors", KVScheme("fp8_e4m3", is_text=True), False, False),
        ("modelopt", KVScheme("fp8_e4m3"), True, True),
        ("modelopt", KVScheme("nvfp4", is_text=True), True, False),
        ("modelopt_fp4", KVScheme("nvfp4_affine", is_text=True), False, False),
        ("quark", KVScheme("fp8_e4m3", "tensor"), True, True),
        ("quark", KVScheme("fp8_e4m3", "per_channel"), False, False),
        ("fp8", KVScheme("fp8_e4m3", is_text=True), True, True),
        ("awq", FP8, True, True),
    ],
)
def test_a_scheme_is_served_or_a_reason_is_given(
    method: str, scheme: KVScheme, vllm: bool, sglang: bool
) -> None:
    declaration = Declaration(method, scheme=scheme)
    assert (not_served("vLLM", declaration) == "") is vllm
    assert (not_served("SGLang", declaration) == "") is sglang
