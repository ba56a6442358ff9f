"""What a checkpoint says of its own KV cache: that it is quantized, how, and who did it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.conventions import AUTO_ROUND, COMPRESSED_TENSORS, MODELOPT, QUARK
from kvcache_plugin.checkpoint.json_fields import a_text, an_object, nested, texts
from kvcache_plugin.checkpoint.name_list import NameList
from kvcache_plugin.errors import shown
from kvcache_plugin.formats import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvcache_plugin.checkpoint.json_fields import Json

CONFIG: Final = "config.json"
MODELOPT_CONFIG: Final = "hf_quant_config.json"
MISTRAL_CONFIG: Final = "params.json"


@dataclass(frozen=True)
class Producer:
    """Who wrote the scales, as far as the checkpoint says. Empty where it does not.

    :param name: one of the producers of ``conventions``, or what the checkpoint says.
    :param version: of the format's library for compressed-tensors, else of the producer.
    """

    name: str = ""
    version: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.version)))

    def is_older(self, *release: int) -> bool | None:
        """Whether the version is older than a release, ``None`` when the checkpoint has none."""
        found = re.match(r"(\d{1,6})(?:\.(\d{1,6}))?(?:\.(\d{1,6}))?", self.version)
        if found is None:
            return None
        return tuple(int(part or 0) for part in found.groups()) < release


@dataclass(frozen=True)
class KVScheme:
    """A declaration that the KV cache is quantized.

    :param kv_cache_dtype: the format by the engines' name where there is one (``"fp8_e4m3"``,
        ``"nvfp4"``), else the declared one (``"int8"``).
    :param strategy: ``"tensor"``, ``"attn_head"``, or what is declared instead; empty when
        nothing is.
    :param symmetric: ``None`` when it is not said.
    :param is_text: whether it is written as one word and not as an object.
    :param written: the declaration as it stands, shortened.
    :param where: the file and the field.
    """

    kv_cache_dtype: str
    strategy: str = ""
    symmetric: bool | None = None
    dynamic: bool = False
    is_text: bool = False
    written: str = ""
    where: str = ""

    @property
    def per_head(self) -> bool:
        """Whether there is one scale for each KV head."""
        return self.strategy == "attn_head"


@dataclass(frozen=True)
class Declaration:
    """All that the checkpoint says of how it was quantized, in what concerns the KV cache.

    :param quant_method: what the engines choose their loader by, ``"compressed-tensors"``,
        ``"modelopt"``, ``"quark"``, ``"fp8"``; empty when the checkpoint is not quantized.
    :param quant_algo: ModelOpt's name for how weights are quantized, ``"FP8"``, ``"NVFP4"``.
    :param scheme: how the KV cache is declared, ``None`` when it is not.
    :param rival: another declaration in another file that says something else.
    :param ignore: names and patterns of modules that are left unquantized.
    """

    quant_method: str = ""
    quant_algo: str = ""
    scheme: KVScheme | None = None
    rival: KVScheme | None = None
    producer: Producer = field(default_factory=Producer)
    ignore: tuple[str, ...] = ()

    def ignored(self, modules: Iterable[str]) -> frozenset[str]:
        """Those of these attention modules that ``ignore`` names, or their K and V projections."""
        ignores = NameList(self.ignore)
        return frozenset(
            module
            for module in modules
            if module in ignores or all(f"{module}.{side}_proj" in ignores for side in "kv")
        )


def read_declaration(config: Json, modelopt_config: Json) -> Declaration:
    """Read what is declared.

    :param config: ``config.json``, empty where there is none.
    :param modelopt_config: ``hf_quant_config.json``, likewise.
    """
    quantization = next(
        (
            found
            for part in (config, *nested(config))
            for key in ("quantization_config", "compression_config")
            if (found := an_object(part, key))
        ),
        {},
    )
    legacy = an_object(modelopt_config, "quantization") or modelopt_config
    method = a_text(quantization, "quant_method").lower()
    if not method and (a_text(quantization, "quant_algo") or legacy):
        method = MODELOPT
    schemes = [
        scheme
        for source, where in (
            (quantization, CONFIG),
            (an_object(quantization, "quantization"), CONFIG),
            (legacy, MODELOPT_CONFIG),
        )
        for scheme in _schemes(source, where)
    ]
    scheme = schemes[0] if schemes else None
    return Declaration(
        quant_method=_short(method),
        quant_algo=_short(
            (a_text(quantization, "quant_algo") or a_text(legacy, "quant_algo")).upper()
        ),
        scheme=scheme,
        rival=next((other for other in schemes if scheme and _differ(scheme, other)), None),
        producer=_producer(method, quantization, modelopt_config),
        ignore=tuple(
            pattern
            for source in (quantization, legacy)
            for key in ("ignore", "exclude_modules", "exclude", "ignored_layers")
            for pattern in texts(source, key)
        ),
    )


#: What is written as one word and is no name of the engines. AutoFP8 writes ``static``.
_WORDS: Final = {
    "float8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "static": "fp8_e4m3",
    "fp4": "nvfp4",
    "float4": "nvfp4",
}
_TYPES: Final = {("float", 8): "fp8_e4m3", ("float", 4): "nvfp4"}
_QUARK_STRATEGIES: Final = {"per_tensor": "tensor", "per_head": "attn_head"}


def _schemes(source: Json, where: str) -> Iterator[KVScheme]:
    """Each way in which one object can declare a quantized KV cache."""
    for key in ("kv_cache_scheme", "kv_cache_quant_algo", "static_kv_dtype"):
        value = source.get(key)
        if isinstance(value, dict) and value:
            yield _from_object(value, f"{where}: {key}")
        elif isinstance(value, str) and value.strip().lower() not in ("", "none", "auto"):
            yield _from_text(value, f"{where}: {key}")
        elif value and not isinstance(value, (dict, str)):
            yield KVScheme("unknown", written=_written(value), where=f"{where}: {key}")
    yield from _quark_schemes(source, where)


def _from_object(value: Json, where: str) -> KVScheme:
    kind, bits = a_text(value, "type").lower(), value.get("num_bits")
    bits = bits if isinstance(bits, int) and not isinstance(bits, bool) else None
    named = "".join(map(str, filter(None, (kind, bits)))) or "unknown"
    return KVScheme(
        kv_cache_dtype=_TYPES.get((kind, bits or 0), _short(named)),
        strategy=_short(a_text(value, "strategy").lower()),
        symmetric=None if value.get("symmetric") is None else value.get("symmetric") is True,
        dynamic=value.get("dynamic", False) not in (False, None),
        written=_written(value),
        where=where,
    )


def _from_text(value: str, where: str) -> KVScheme:
    name = value.strip().lower()
    return KVScheme(
        _short(_WORDS.get(name, canonical(name))),
        is_text=True,
        written=_written(value),
        where=where,
    )


def _quark_schemes(source: Json, where: str) -> Iterator[KVScheme]:
    """Quark names layers whose outputs are K and V, and says elsewhere how these are quantized."""
    for holder, prefix in ((an_object(source, "export"), "export."), (source, "")):
        group = texts(holder, "kv_cache_group")
        if not group:
            continue
        layers = an_object(source, "kv_cache_quant_config") or an_object(
            source, "layer_quant_config"
        )
        in_group = NameList(group)
        output = next(
            (
                output
                for name, layer in layers.items()
                if isinstance(layer, dict)
                and name in in_group
                and (output := an_object(layer, "output_tensors"))
            ),
            {},
        )
        scheme = a_text(output, "qscheme").lower()
        yield KVScheme(
            kv_cache_dtype=_short(canonical(a_text(output, "dtype")) or "unknown"),
            strategy=_short(_QUARK_STRATEGIES.get(scheme, scheme)),
            dynamic=output.get("is_dynamic") is True,
            written=_written(output or list(group)),
            where=f"{where}: {prefix}kv_cache_group",
        )
        return


def _differ(one: KVScheme, other: KVScheme) -> bool:
    return one.kv_cache_dtype != other.kv_cache_dtype or one.per_head != other.per_head


def _producer(method: str, quantization: Json, modelopt_config: Json) -> Producer:
    named = an_object(quantization, "producer") or an_object(modelopt_config, "producer")
    if named:
        return Producer(_short(a_text(named, "name").lower()), _short(a_text(named, "version")))
    provider, version = a_text(quantization, "provider"), a_text(quantization, "autoround_version")
    if version or provider.lower() == AUTO_ROUND or method in (AUTO_ROUND, "intel/auto-round"):
        return Producer(AUTO_ROUND, _short(version))
    if provider:
        return Producer(_short(provider.lower()))
    if method in (COMPRESSED_TENSORS, QUARK):
        return Producer(method, _short(a_text(quantization, "version")))
    return Producer(MODELOPT) if method.startswith(MODELOPT) else Producer()


def _short(text: str) -> str:
    """A word of the checkpoint's, as reports and messages have it."""
    return shown(text, most=40)


def _written(value: object) -> str:
    try:
        return shown(json.dumps(value))
    except (ValueError, RecursionError):
        return type(value).__name__
