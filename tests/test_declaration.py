"""What a checkpoint's JSON files say: every form that producers write, and any nonsense."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugin.checkpoint.declaration import Producer, read_declaration
from kvcache_plugin.checkpoint.model_shape import read_shape
from kvcache_plugin.checkpoint.name_list import NameList
from tests.checkpoints_on_disk import COMPRESSED_TENSORS, FP8_SCHEME, MODELOPT

QUARK_LAYERS = {
    side: {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
    for side in ("*k_proj", "*v_proj")
}


@pytest.mark.parametrize(
    ("config", "modelopt_config", "method", "dtype", "strategy"),
    [
        (
            {"quantization_config": COMPRESSED_TENSORS},
            {},
            "compressed-tensors",
            "fp8_e4m3",
            "tensor",
        ),
        (
            {"compression_config": COMPRESSED_TENSORS},
            {},
            "compressed-tensors",
            "fp8_e4m3",
            "tensor",
        ),
        (
            {"text_config": {"quantization_config": COMPRESSED_TENSORS}},
            {},
            "compressed-tensors",
            "fp8_e4m3",
            "tensor",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "kv_cache_scheme": {**FP8_SCHEME, "strategy": "attn_head"},
                }
            },
            {},
            "compressed-tensors",
            "fp8_e4m3",
            "attn_head",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "kv_cache_scheme": {**FP8_SCHEME, "num_bits": 4},
                }
            },
            {},
            "compressed-tensors",
            "nvfp4",
            "tensor",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "kv_cache_scheme": {**FP8_SCHEME, "type": "int"},
                }
            },
            {},
            "compressed-tensors",
            "int8",
            "tensor",
        ),
        ({"quantization_config": MODELOPT}, {}, "modelopt", "fp8_e4m3", ""),
        (
            {"quantization_config": {**MODELOPT, "kv_cache_scheme": "NVFP4"}},
            {},
            "modelopt",
            "nvfp4",
            "",
        ),
        (
            {},
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            "modelopt",
            "fp8_e4m3",
            "",
        ),
        (
            {},
            {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4_AFFINE"}},
            "modelopt",
            "nvfp4_affine",
            "",
        ),
        ({}, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "modelopt", "fp8_e4m3", ""),
        (
            {
                "quantization_config": {
                    "quant_method": "quark",
                    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
                    "layer_quant_config": QUARK_LAYERS,
                }
            },
            {},
            "quark",
            "fp8_e4m3",
            "tensor",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "quark",
                    "kv_cache_group": ["*k_proj"],
                    "layer_quant_config": {"model.layers.0.self_attn.k_proj": {}, **QUARK_LAYERS},
                }
            },
            {},
            "quark",
            "fp8_e4m3",
            "tensor",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
            {},
            "fp8",
            "fp8_e4m3",
            "",
        ),
        (
            {"quantization_config": {"quant_method": "auto-round", "static_kv_dtype": "fp8"}},
            {},
            "auto-round",
            "fp8_e4m3",
            "",
        ),
    ],
)
def test_a_declaration_is_read(
    config: Any, modelopt_config: Any, method: str, dtype: str, strategy: str
) -> None:
    declaration = read_declaration(config, modelopt_config)
    assert declaration.quant_method == method
    assert declaration.scheme is not None
    assert declaration.scheme.kv_cache_dtype == dtype
    assert declaration.scheme.strategy == strategy
    assert declaration.scheme.where.endswith(
        ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_group", "static_kv_dtype")
    )
    assert declaration.rival is None


@pytest.mark.parametrize(
    ("config", "modelopt_config"),
    [
        ({}, {}),
        ({"quantization_config": None}, {}),
        ({"quantization_config": {"quant_method": "fp8"}}, {}),
        ({"quantization_config": {**COMPRESSED_TENSORS, "kv_cache_scheme": None}}, {}),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}),
        (
            {
                "quantization_config": {
                    "quant_method": "quark",
                    "export": {"kv_cache_group": []},
                    "layer_quant_config": QUARK_LAYERS,
                }
            },
            {},
        ),
    ],
)
def test_nothing_is_declared(config: Any, modelopt_config: Any) -> None:
    assert read_declaration(config, modelopt_config).scheme is None


def test_two_files_can_say_different_things() -> None:
    legacy = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}
    declaration = read_declaration({"quantization_config": MODELOPT}, legacy)
    assert declaration.scheme is not None
    assert declaration.rival is not None
    assert declaration.scheme.where == "config.json: kv_cache_scheme"
    assert declaration.rival.where == "hf_quant_config.json: kv_cache_quant_algo"
    assert (declaration.scheme.kv_cache_dtype, declaration.rival.kv_cache_dtype) == (
        "fp8_e4m3",
        "nvfp4",
    )


@pytest.mark.parametrize(
    ("config", "modelopt_config", "name", "version"),
    [
        (
            {"quantization_config": {**COMPRESSED_TENSORS, "version": "0.12.2"}},
            {},
            "compressed-tensors",
            "0.12.2",
        ),
        (
            {"quantization_config": {**COMPRESSED_TENSORS, "provider": "auto-round"}},
            {},
            "auto-round",
            "",
        ),
        (
            {"quantization_config": {"quant_method": "auto-round", "autoround_version": "0.9.1"}},
            {},
            "auto-round",
            "0.9.1",
        ),
        ({"quantization_config": MODELOPT}, {}, "modelopt", "0.43.0"),
        (
            {},
            {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {}},
            "modelopt",
            "0.29.0",
        ),
        ({"quantization_config": {"quant_method": "quark", "version": "0.8"}}, {}, "quark", "0.8"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "", ""),
        ({}, {}, "", ""),
    ],
)
def test_the_producer_is_named(config: Any, modelopt_config: Any, name: str, version: str) -> None:
    assert read_declaration(config, modelopt_config).producer == Producer(name, version)


@pytest.mark.parametrize(
    ("version", "is_older"),
    [
        ("0.42.9", True),
        ("0.9", True),
        ("0.43", False),
        ("0.43.0", False),
        ("0.43.0.dev7+gabc", False),
        ("1.0", False),
        ("", None),
        ("unknown", None),
    ],
)
def test_versions_are_compared_as_numbers(version: str, is_older: bool | None) -> None:
    assert Producer("modelopt", version).is_older(0, 43) is is_older


@pytest.mark.parametrize(
    ("config", "layers", "heads"),
    [
        ({"num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32}, 32, (8,)),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, 2, (4,)),
        ({"n_layer": 28, "n_head": 16}, 28, ()),
        ({"n_layers": 40, "n_kv_heads": 8}, 40, (8,)),
        ({"text_config": {"num_hidden_layers": 26, "num_key_value_heads": 4}}, 26, (4,)),
        (
            {"num_hidden_layers": 99, "text_config": {"num_hidden_layers": 26}},
            26,
            (),
        ),
        (
            {"thinker_config": {"text_config": {"num_hidden_layers": 48, "num_kv_heads": 2}}},
            48,
            (2,),
        ),
        ({"llm_config": {"num_hidden_layers": 7, "num_key_value_heads": [2, 4, 2]}}, 7, (2, 4)),
        ({"num_hidden_layers": "32", "num_key_value_heads": True}, None, ()),
        ({"num_hidden_layers": -1, "num_key_value_heads": 0}, None, ()),
        ({}, None, ()),
    ],
)
def test_layers_and_heads_are_read(config: Any, layers: int | None, heads: Any) -> None:
    shape = read_shape(config)
    assert (shape.num_layers, shape.kv_heads) == (layers, heads)


@pytest.mark.parametrize(
    ("config", "with_kv_cache"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"layer_types": ["full_attention", "linear_attention"] * 4}, [0, 2, 4, 6]),
        ({"layer_types": ["sliding_attention", "mamba"] * 4}, [0, 2, 4, 6]),
        ({"layer_types": ["attention"]}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"layers_block_type": ["mamba"] * 7 + ["attention"]}, [7]),
        ({"hybrid_override_pattern": "M-M*M-M*"}, [3, 7]),
        ({"attn_type_list": [0, 0, 0, 1, 0, 0, 0, 1]}, [3, 7]),
        ({"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1]}}, [3, 7]),
        ({"attn_layer_indices": [1, 5]}, [1, 5]),
        ({"full_attn_idxs": [2, 99, -1]}, [2]),
        ({"full_attention_interval": 4}, [3, 7]),
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, [2, 6]),
        ({"num_kv_shared_layers": 3}, [0, 1, 2, 3, 4]),
        (
            {"num_kv_shared_layers": 4, "layer_types": ["full_attention", "mamba"] * 4},
            [0, 2],
        ),
    ],
)
def test_layers_with_a_kv_cache_of_their_own(config: Any, with_kv_cache: list[int]) -> None:
    shape = read_shape({"num_hidden_layers": 8, **config})
    assert [layer for layer in range(12) if shape.has_kv_cache(layer)] == with_kv_cache


def test_draft_layers_and_latent_attention() -> None:
    shape = read_shape(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "kv_lora_rank": 512,
        }
    )
    assert shape.draft_layers == 1
    assert shape.is_mla
    assert shape.architectures == ("DeepseekV3ForCausalLM",)


@pytest.mark.parametrize(
    ("pattern", "is_named"),
    [
        ("model.layers.3.self_attn", True),
        ("model.layers.3", True),
        ("model.layers.*", True),
        ("*self_attn", True),
        ("re:.*self_attn$", True),
        (r"re:model\.layers\.\d+\.self_attn.*", True),
        (r"re:model\.layers\.(?:3|4).*", True),
        (r"re:model\.layers\.(1|2).*", False),
        ("model.layers.30", False),
        ("lm_head", False),
        ("re:.*lm_head", False),
        ("re:(", False),
    ],
)
def test_an_ignore_list_names_modules(pattern: str, is_named: bool) -> None:
    assert ("model.layers.3.self_attn" in NameList([pattern])) is is_named


def test_a_layer_is_ignored_by_its_projections() -> None:
    one = {"quantization_config": {"ignore": ["model.layers.0.self_attn.k_proj"]}}
    both = {"quantization_config": {"ignore": ["re:.*layers.0.self_attn.[kv]_proj"]}}
    module = "model.layers.0.self_attn"
    assert read_declaration(one, {}).ignored([module]) == frozenset()
    assert read_declaration(both, {}).ignored([module]) == {module}


@pytest.mark.parametrize(
    "pattern",
    ["re:(a+)+$", "re:(.*)*x", "re:.*.*.*.*.*x", "re:(?=.*a)+b", r"re:(.*)\1\1x", "re:a{1,9}{1,9}"],
)
def test_a_pattern_that_takes_forever_is_not_tried(pattern: str) -> None:
    started = time.monotonic()
    assert "a" * 40 not in NameList([pattern])
    assert time.monotonic() - started < 1


def test_many_slow_patterns_end() -> None:
    patterns = [f"re:.*{'a' * (number % 7)}.*.*x{number}" for number in range(3000)]
    names = NameList(patterns)
    started = time.monotonic()
    for number in range(50):
        assert f"{'a' * 190}{number}" not in names
    assert time.monotonic() - started < 10


NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "quantization_config",
                    "quantization",
                    "kv_cache_scheme",
                    "kv_cache_quant_algo",
                    "kv_cache_group",
                    "export",
                    "layer_quant_config",
                    "output_tensors",
                    "producer",
                    "ignore",
                    "text_config",
                    "num_hidden_layers",
                    "layer_types",
                    "linear_attn_config",
                    "full_attn_layers",
                    "attn_type_list",
                    "num_key_value_heads",
                    "full_attention_interval",
                    "type",
                    "num_bits",
                    "name",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(config=NONSENSE, modelopt_config=NONSENSE)
@settings(max_examples=300, deadline=None)
def test_nonsense_is_read_without_an_exception(config: Any, modelopt_config: Any) -> None:
    config = config if isinstance(config, dict) else {"quantization_config": config}
    modelopt_config = modelopt_config if isinstance(modelopt_config, dict) else {}
    declaration = read_declaration(config, modelopt_config)
    declaration.ignored(["model.layers.0.self_attn"])
    shape = read_shape(config)
    shape.has_kv_cache(0)
