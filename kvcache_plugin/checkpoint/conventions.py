"""How producers name K/V scales in a checkpoint, and what each engine does with such a name.

One table, of data alone. The engines' side of it is judged by the engines' own functions, in
``tests/engine/inside_renames.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

Side: TypeAlias = Literal["k", "v", "kv", "q", "prob"]
Role: TypeAlias = Literal["scale", "global scale", "zero point", "bias"]
Meaning: TypeAlias = Literal["multiplier", "reciprocal", "unknown"]

#: Producers that a checkpoint's metadata can name. compressed-tensors is the format that
#: llm-compressor writes; others that write it say who they are.
COMPRESSED_TENSORS: Final = "compressed-tensors"
AUTO_ROUND: Final = "auto-round"
MODELOPT: Final = "modelopt"
QUARK: Final = "quark"


@dataclass(frozen=True)
class Rename:
    """Whether an engine's own loading brings a K or V scale of some name to its layer.

    :param found: whether it does in a model with ordinary attention.
    :param found_mla: whether it does in a model with multi-head latent attention (DeepSeek, Kimi).
    :param methods: it does only for these values of ``quant_method``; empty for any.
    :param reason: why it does not, or on what condition it does, for people.
    """

    found: bool
    found_mla: bool = False
    methods: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Convention:
    """One way to name a K/V scale, or a tensor that belongs to one.

    :param key: a short name that stays.
    :param producer: who writes it, for people.
    :param example: a whole name; ``{i}`` is the layer, ``{side}`` one of ``sides``.
    :param sides: the sides that the name can tell. ``kv`` is one scale for both, ``prob`` the
        output of the softmax.
    :param pattern: a regular expression for the whole name, with the groups ``module``, the
        attention module that the tensor belongs to, and ``side`` unless there is only one.
    :param stored: shape and dtype, as its producers store it.
    :param vllm: what vLLM does with the name.
    :param sglang: what SGLang does with the name.
    :param meaning: what a stored number ``s`` is: ``x ≈ code · s`` (multiplier), ``x ≈ code / s``
        (reciprocal), or not known from the name.
    :param by_producer: what it is where that depends on who wrote it.
    """

    key: str
    producer: str
    example: str
    sides: tuple[Side, ...]
    pattern: str
    stored: str
    vllm: Rename
    sglang: Rename
    role: Role = "scale"
    meaning: Meaning = "multiplier"
    by_producer: tuple[tuple[str, Meaning], ...] = ()

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def meaning_from(self, producer: str) -> Meaning:
        """What a stored number is, from this producer; ``""`` when the checkpoint names none."""
        return dict(self.by_producer).get(producer, self.meaning)

    def match(self, name: str) -> Match | None:
        """The parts of a tensor's name, ``None`` when it is no name of this convention."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        parts = found.groupdict()
        side = next(side for side in self.sides if side == parts.get("side", self.sides[0]))
        return Match(self, parts["module"], side)


@dataclass(frozen=True)
class Match:
    """A tensor's name, understood.

    :param module: the attention module, ``"model.layers.3.self_attn"``.
    """

    convention: Convention
    module: str
    side: Side


def match(name: str) -> Match | None:
    """The first convention that a tensor's name fits, ``None`` when it fits none."""
    if not _is_candidate(name):
        return None
    return next(filter(None, (convention.match(name) for convention in CONVENTIONS)), None)


def looks_like_kv_scale(name: str) -> bool:
    """Whether a name that fits no convention is, by the look of it, that of a K/V scale.

    The scales of weights and of a linear layer's input (``k_proj.weight_scale``) are not.
    """
    if not _is_candidate(name):
        return False
    *_, parent, last = ["", *name.lower().split(".")]
    words, parent_words = set(_WORD.findall(last)), set(_WORD.findall(parent))
    if not words & _SCALE_WORDS or words & _OTHER_WORDS:
        return False
    of_parent = parent_words & _KV_WORDS and (
        len(parent_words) == 1 or parent_words & {"cache", "quantizer", "observer"}
    )
    return bool(words & _KV_WORDS or of_parent)


def _is_candidate(name: str) -> bool:
    """Whether it is worth to look closer: cheap, since a checkpoint has 100,000 names."""
    return not name.endswith(_NEVER) and _SCALE_LIKE.search(name) is not None


_NEVER: Final = (
    ".weight",
    ".bias",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "input_scale",
    "input_global_scale",
    "proj.scales",
)
_SCALE_LIKE: Final = re.compile(r"(?i)scal|amax|zero|_zp|[kv]_bias")
_WORD: Final = re.compile(r"[a-z]+")
_SCALE_WORDS: Final = frozenset(
    ("scale", "scales", "scaling", "qscale", "descale", "kscale", "vscale", "amax", "zero", "zp")
)
_KV_WORDS: Final = frozenset(
    ("k", "v", "kv", "key", "keys", "value", "values", "kcache", "vcache", "kscale", "vscale")
)
_OTHER_WORDS: Final = frozenset(("weight", "input", "proj", "norm", "logit", "logits"))

_ATTENTION: Final = r"(?:self_attn|self_attention|attention|attn|mixer)"
_MODULE: Final = rf"(?P<module>(?:.+\.)?{_ATTENTION})"
_SELF_ATTN: Final = r"(?P<module>(?:.+\.)?self_attn)"

_FOUND: Final = Rename(True)
_NO_RENAME: Final = Rename(False, reason="it has no rename for this name")
_WRONG_RENAME: Final = Rename(
    False, reason="its rename puts attn. before the last part, which no model has"
)

CONVENTIONS: Final[tuple[Convention, ...]] = (
    # The first that fits is taken: names with more parts come first.
    Convention(
        key="engine",
        producer="any, in the engines' own name",
        example="model.layers.{i}.self_attn.attn.{side}_scale",
        sides=("k", "v", "q", "prob"),
        pattern=rf"{_MODULE}\.attn\.(?P<side>[kvq]|prob)_scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=_WRONG_RENAME,
    ),
    Convention(
        key="vllm-mla",
        producer="any, in vLLM's own name for DeepSeek",
        example="model.layers.{i}.self_attn.mla_attn.mla_attn.{side}_scale",
        sides=("k", "v", "q"),
        pattern=r"(?P<module>.+)\.mla_attn\.mla_attn\.(?P<side>[kvq])_scale",
        stored="float32 scalar",
        vllm=Rename(False, reason="only MLA models have it"),
        sglang=_WRONG_RENAME,
    ),
    Convention(
        key="sglang-mla",
        producer="any, in SGLang's own name for DeepSeek",
        example="model.layers.{i}.self_attn.attn_mqa.{side}_scale",
        sides=("k", "v"),
        pattern=r"(?P<module>.+)\.attn_mqa\.(?P<side>[kv])_scale",
        stored="float32 scalar",
        vllm=_WRONG_RENAME,
        sglang=Rename(False, found_mla=True, reason="only MLA models have it"),
    ),
    Convention(
        key="modelopt",
        producer="ModelOpt",
        example="model.layers.{i}.self_attn.{side}_proj.{side}_scale",
        sides=("k", "v"),
        pattern=rf"{_SELF_ATTN}\.(?P<side>[kv])_proj\.(?P=side)_scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=Rename(True, found_mla=True),
    ),
    Convention(
        key="nemotron-h",
        producer="ModelOpt, for Nemotron-H",
        example="backbone.layers.{i}.mixer.{side}_proj.{side}_scale",
        sides=("k", "v"),
        pattern=r"(?P<module>(?:.+\.)?mixer)\.(?P<side>[kv])_proj\.(?P=side)_scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=_FOUND,
    ),
    Convention(
        key="projection",
        producer="ModelOpt, for attention of another name",
        example="transformer.h.{i}.attn.{side}_proj.{side}_scale",
        sides=("k", "v"),
        pattern=r"(?P<module>.+)\.(?P<side>[kv])_proj\.(?P=side)_scale",
        stored="float32 scalar",
        vllm=_WRONG_RENAME,
        sglang=_WRONG_RENAME,
    ),
    Convention(
        key="qkv",
        producer="exports of models with fused projections",
        example="model.layers.{i}.self_attn.qkv_proj.{side}_scale",
        sides=("k", "v"),
        pattern=rf"{_SELF_ATTN}\.qkv_proj\.(?P<side>[kv])_scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=_WRONG_RENAME,
    ),
    Convention(
        key="qkqkv",
        producer="exports of Qwen3-MoE with fused projections",
        example="model.layers.{i}.self_attn.qkqkv_proj.{side}_scale",
        sides=("k", "v"),
        pattern=rf"{_SELF_ATTN}\.qkqkv_proj\.(?P<side>[kv])_scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=_WRONG_RENAME,
    ),
    Convention(
        key="output-scale",
        producer="Quark, compressed-tensors before August 2024",
        example="model.layers.{i}.self_attn.{side}_proj.output_scale",
        sides=("k", "v", "q"),
        pattern=r"(?P<module>.+)\.(?P<side>[kvq])_proj\.output_scale",
        stored="float32 scalar",
        vllm=Rename(
            True,
            methods=("quark", "fp8"),
            reason="it renames this name for quant_method quark and fp8 alone",
        ),
        sglang=_FOUND,
    ),
    Convention(
        key="prob-output-scale",
        producer="Quark",
        example="model.layers.{i}.self_attn.prob_output_scale",
        sides=("prob",),
        pattern=rf"{_SELF_ATTN}\.prob_output_scale",
        stored="float32 scalar",
        vllm=Rename(
            True,
            methods=("quark", "fp8"),
            reason="it renames this name for quant_method quark and fp8 alone",
        ),
        sglang=Rename(False, reason="its rename doubles a dot"),
    ),
    Convention(
        key="kv-scale",
        producer="AutoFP8, old GPT-J exports",
        example="model.layers.{i}.self_attn.kv_scale",
        sides=("kv",),
        pattern=rf"{_MODULE}\.kv_scale",
        stored="float32 scalar, one for both sides",
        vllm=_FOUND,
        sglang=_FOUND,
    ),
    Convention(
        key="global-scale",
        producer="compressed-tensors for NVFP4, auto-round",
        example="model.layers.{i}.self_attn.{side}_global_scale",
        sides=("k", "v", "q"),
        pattern=rf"{_MODULE}\.(?P<side>[kvq])_global_scale",
        stored="float32 (1,): 2688/amax from compressed-tensors, amax/2688 from auto-round",
        vllm=_NO_RENAME,
        sglang=_NO_RENAME,
        role="global scale",
        meaning="unknown",
        by_producer=((COMPRESSED_TENSORS, "reciprocal"), (AUTO_ROUND, "multiplier")),
    ),
    Convention(
        key="zero-point",
        producer="compressed-tensors",
        example="model.layers.{i}.self_attn.{side}_zero_point",
        sides=("k", "v", "q"),
        pattern=rf"{_MODULE}\.(?P<side>[kvq])_zero_point",
        stored="zeros when symmetric; anything else cannot be served",
        vllm=Rename(
            True,
            methods=("compressed-tensors",),
            reason="it loads them for quant_method compressed-tensors alone, and ignores them",
        ),
        sglang=_NO_RENAME,
        role="zero point",
    ),
    Convention(
        key="bias",
        producer="ModelOpt, for an affine KV cache",
        example="model.layers.{i}.self_attn.{side}_proj.{side}_bias",
        sides=("k", "v"),
        pattern=r"(?P<module>.+)\.(?P<side>[kv])_proj\.(?P=side)_bias",
        stored="float32, what K or V is shifted by before it is quantized",
        vllm=_NO_RENAME,
        sglang=_NO_RENAME,
        role="bias",
    ),
    Convention(
        key="mistral",
        producer="Mistral's own format (consolidated.safetensors)",
        example="layers.{i}.attention.{side}_fake_quantizer.qscale_act",
        sides=("k", "v", "kv", "q"),
        pattern=r"(?P<module>(?:.+\.)?attention)\.(?P<side>kv|[kvq])_fake_quantizer\.qscale_act",
        stored="float32 scalar",
        vllm=Rename(True, reason="in models of Mistral's own format"),
        sglang=Rename(False, reason="its loaders of Mistral's own format do not bring it on"),
    ),
    Convention(
        key="hunyuan",
        producer="Hunyuan",
        example="model.layers.{i}.self_attn.{side}_cache.scale",
        sides=("k", "v"),
        pattern=rf"{_SELF_ATTN}\.(?P<side>[kv])_cache\.scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=_NO_RENAME,
    ),
    Convention(
        key="hunyuan-q",
        producer="Hunyuan",
        example="model.layers.{i}.self_attn.q.scale",
        sides=("q",),
        pattern=rf"{_SELF_ATTN}\.q\.scale",
        stored="float32 scalar",
        vllm=_FOUND,
        sglang=_NO_RENAME,
    ),
    Convention(
        key="tensorrt-llm",
        producer="ModelOpt, in TensorRT-LLM's format",
        example="transformer.layers.{i}.attention.{side}_cache_scaling_factor",
        sides=("kv", "k", "v"),
        pattern=r"(?P<module>(?:.+\.)?attention)\.(?P<side>kv|[kv])_cache_scaling_factor",
        stored="float32 (1,)",
        vllm=_NO_RENAME,
        sglang=_NO_RENAME,
    ),
    Convention(
        key="attention",
        producer="llm-compressor (compressed-tensors), auto-round",
        example="model.layers.{i}.self_attn.{side}_scale",
        sides=("k", "v", "q"),
        pattern=rf"{_MODULE}\.(?P<side>[kvq])_scale",
        stored="(1,) in the model's dtype, often bfloat16; (H, 1, 1) per head",
        vllm=_FOUND,
        sglang=_FOUND,
    ),
)
