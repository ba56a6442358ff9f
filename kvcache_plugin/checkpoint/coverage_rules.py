"""Rules about names, declarations and completeness: whether a scale reaches its layer at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.conventions import CONVENTIONS
from kvcache_plugin.checkpoint.engine_rules import RELEASES, not_served, refuses_format, verdicts
from kvcache_plugin.checkpoint.evidence import CALIBRATE_MODELOPT, names, stacks
from kvcache_plugin.checkpoint.files import COPY_AGAIN
from kvcache_plugin.checkpoint.model_shape import MOST_LAYERS
from kvcache_plugin.checkpoint.report import Finding, some
from kvcache_plugin.errors import counted, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvcache_plugin.checkpoint.engine_rules import EngineVerdict, Outcome
    from kvcache_plugin.checkpoint.evidence import Evidence
    from kvcache_plugin.checkpoint.report import LayerScales, StoredScale

#: The name that both engines find in most models.
_COMMON: Final = next(row for row in CONVENTIONS if row.key == "attention")


def not_found(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each name and fate: engines that do the same for the same reason go together.

    Scales that lose a layer's choice between two names do not count, nor do zero points and the
    like where an engine only drops them.
    """
    used = {scale.name for scale in evidence.used}
    unserved = _not_served(evidence)
    fates: dict[tuple[str, tuple[EngineVerdict, ...]], list[StoredScale]] = {}
    for scale in evidence.scales:
        lost = tuple(
            verdict
            for verdict in scale.engines
            if not verdict.finds
            and verdict.reason != unserved[verdict.engine]
            and (scale.name in used or verdict.outcome == "load fails")
        )
        if lost:
            fates.setdefault((scale.convention, lost), []).append(scale)
    for (_, lost), scales in fates.items():
        first = scales[0]
        nobody = not any(verdict.finds for verdict in first.engines)
        yield Finding(
            "not-found",
            "problem" if nobody and first.name in used else "remark",
            f"{shown(first.name)}: {_fate(lost)}",
            _remedy_of_names(first, evidence),
            tuple(dict.fromkeys(scale.module for scale in scales)),
        )


def two_names(evidence: Evidence) -> Iterator[Finding]:
    used = {(scale.module, scale.side, scale.role): scale for scale in evidence.used}
    for scale in evidence.scales:
        other = used.get((scale.module, scale.side, scale.role))
        if other is not None and other is not scale:
            differ = other.values != scale.values
            values = "different values" if differ else "the same value"
            yield Finding(
                "two-names",
                "problem" if differ else "remark",
                f"it is stored as {shown(other.name)} and as {shown(scale.name)}, with {values}",
                "Remove one of the two",
                (scale.module,),
                scale.side,
            )


def unknown_names(evidence: Evidence) -> Iterator[Finding]:
    if evidence.unknown:
        tensors = counted(len(evidence.unknown), "tensor")
        yield Finding(
            "unknown-name",
            "remark",
            f"{tensors} that may be K/V scales, by a name that nobody is known to use: "
            f"{some(evidence.unknown)}",
            "If they are, rename them to self_attn.k_scale and self_attn.v_scale",
        )


def declared_absent(evidence: Evidence) -> Iterator[Finding]:
    scheme = evidence.declaration.scheme
    if scheme is None or evidence.layers or not evidence.files.is_whole:
        return
    declared = f"{scheme.where} declares {scheme.written}, and no layer has a K/V scale"
    if scheme.dynamic:
        yield Finding("declared-absent", "remark", f"{declared}: it is dynamic and needs none")
    elif evidence.is_cast_on_purpose:
        yield Finding(
            "declared-absent",
            "remark",
            f"{declared}, as ModelOpt's cast modes mean it: every layer is served with 1.0",
            CALIBRATE_MODELOPT,
        )
    else:
        yield Finding(
            "declared-absent",
            "problem",
            f"{declared}: every layer is served with 1.0",
            evidence.calibrate,
        )


def undeclared(evidence: Evidence) -> Iterator[Finding]:
    if evidence.layers and evidence.declaration.scheme is None:
        yield Finding(
            "undeclared",
            "remark",
            "no quantized KV cache is declared, so engines that load it serve an unquantized one "
            "unless they are told otherwise, and the scales do nothing",
            "Start the engine with --kv-cache-dtype fp8, or declare a kv_cache_scheme"
            if evidence.declaration.quant_method
            else "Declare a quantization_config with a quant_method and a kv_cache_scheme",
        )


def declarations_differ(evidence: Evidence) -> Iterator[Finding]:
    scheme, rival = evidence.declaration.scheme, evidence.declaration.rival
    if scheme is not None and rival is not None:
        yield Finding(
            "declarations-differ",
            "remark",
            f"{scheme.where} declares {scheme.written}, {rival.where} declares {rival.written}",
            "Make them say the same: engines do not agree on which of them they read",
        )


def unserved_scheme(evidence: Evidence) -> Iterator[Finding]:
    scheme = evidence.declaration.scheme
    reasons = _not_served(evidence)
    refusing = [f"{_release(engine)}: {reason}" for engine, reason in reasons.items() if reason]
    if scheme is not None and refusing:
        yield Finding(
            "unserved-scheme",
            "problem" if len(refusing) == len(reasons) else "remark",
            f"{scheme.where} declares {scheme.written}; {'; '.join(refusing)}",
            _remedy_of_scheme([engine for engine, reason in reasons.items() if not reason]),
        )


def asked_format(evidence: Evidence) -> Iterator[Finding]:
    """A format that is asked for, where it is not the declared one or an engine refuses it."""
    if not evidence.is_asked:
        return
    asked, scheme = evidence.kv_format, evidence.declaration.scheme
    differs = scheme is not None and evidence.declared_format != asked
    reasons = {
        engine: refuses_format(engine, asked, evidence.declaration, evidence.shape)
        for engine in RELEASES
    }
    refusing = [
        f"{_release(engine)} ends: {reason}" for engine, reason in reasons.items() if reason
    ]
    if not differs and not refusing:
        return
    if scheme is not None and differs:
        said = f"{scheme.where} declares {scheme.written}, and {asked} is asked for"
        remedy = "Leave --kv-cache-dtype out, or export again for the format that is served"
    else:
        said = f"{asked} is asked for"
        remedy = "Ask for fp8_e4m3"
    if not refusing:
        refusing = [f"engines serve {asked} with the scales that are there"]
    yield Finding(
        "asked-format",
        "problem" if all(reasons.values()) else "remark",
        f"{said}; {'; '.join(refusing)}",
        remedy,
    )


def missing_layers(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.files.is_whole:
        return
    have = set(names(evidence.layers))
    absent = []
    for stack in stacks(evidence.layers):
        if not stack[0].is_draft:
            absent += [name for name in _expected(stack, evidence) if name not in have]
    ignored = evidence.declaration.ignored(absent)
    absent = [name for name in absent if name not in ignored]
    if absent:
        yield Finding(
            "missing-layers",
            "problem",
            f"{counted(len(absent), 'layer')} without K/V scales, which are served with 1.0, among "
            f"{len(have)} with",
            evidence.calibrate,
            tuple(absent),
        )


def no_such_layer(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.files.is_whole or not evidence.owners:
        return
    strangers = [layer.layer for layer in evidence.layers if layer.layer not in evidence.owners]
    if strangers:
        # Attention whose weights lie deeper in it is no stranger.
        inside = {
            ".".join(parts[:length])
            for parts in (owner.split(".") for owner in evidence.owners)
            for length in range(1, len(parts))
        }
        strangers = [name for name in strangers if name not in inside]
    if strangers:
        yield Finding(
            "no-such-layer",
            "problem",
            "there are K/V scales, and no weights, of this attention",
            "Rename the scales after the attention that they belong to",
            tuple(strangers),
        )


def index(evidence: Evidence) -> Iterator[Finding]:
    name = evidence.files.index
    if evidence.missing:
        yield Finding(
            "missing-tensor",
            "problem",
            f"{name} names {counted(len(evidence.missing), 'scale')} that no file holds: "
            f"{some(evidence.missing)}",
            COPY_AGAIN,
        )
    if evidence.not_in_index:
        yield Finding(
            "not-in-index",
            "remark",
            f"{name} does not name {counted(len(evidence.not_in_index), 'scale')} that the files "
            f"hold: {some(evidence.not_in_index)}",
            "vLLM and SGLang load them all the same; for others name them there",
        )
    if evidence.skipped:
        yield Finding(
            "skipped-file",
            "problem",
            f"{some(evidence.skipped)}: it holds K/V scales, and engines do not load it, since "
            f"{name} does not name it",
            f"Name its tensors in {name}",
        )


RULES: Final[tuple[Callable[[Evidence], Iterable[Finding]], ...]] = (
    missing_layers,
    no_such_layer,
    declared_absent,
    unserved_scheme,
    asked_format,
    not_found,
    two_names,
    index,
    undeclared,
    declarations_differ,
    unknown_names,
)


def _expected(stack: Sequence[LayerScales], evidence: Evidence) -> Iterator[str]:
    """The attention modules of a stack that have a KV cache of their own.

    Those that have weights; in a file of scales alone all that the configuration has.
    """
    prefix, shape = stack[0].stack, evidence.shape
    tails = sorted({layer.layer.removeprefix(f"{prefix}.{layer.index}") for layer in stack})
    has_weights = any(name.startswith(f"{prefix}.") for name in evidence.attention)
    last = max(layer.index or 0 for layer in stack)
    for number in range(min(shape.num_layers or last + 1, MOST_LAYERS)):
        for tail in tails if shape.has_kv_cache(number) else ():
            name = f"{prefix}.{number}{tail}"
            if name in evidence.attention or not has_weights:
                yield name


def _fate(lost: tuple[EngineVerdict, ...]) -> str:
    """``"SGLang 0.5.23 drops it: ..."``, engines that do the same for the same reason together."""
    fates: dict[tuple[Outcome, str], list[str]] = {}
    for verdict in lost:
        fates.setdefault((verdict.outcome, verdict.reason), []).append(_release(verdict.engine))
    return "; ".join(
        f"{' and '.join(engines)} {_VERBS[outcome][len(engines) > 1]}: {reason}"
        for (outcome, reason), engines in fates.items()
    )


_VERBS: Final[Mapping[Outcome, tuple[str, str]]] = {
    "dropped": ("drops it", "drop it"),
    "load fails": (
        "fails to load the checkpoint because of it",
        "fail to load the checkpoint because of it",
    ),
}


def _not_served(evidence: Evidence) -> dict[str, str]:
    """Why each engine does not serve the declared scheme, empty where it does."""
    return {engine: not_served(engine, evidence.declaration) for engine in RELEASES}


def _release(engine: str) -> str:
    return f"{engine} {RELEASES[engine]}"


def _remedy_of_scheme(serving: Sequence[str]) -> str:
    export = (
        "xport again with 8-bit float scales, static and symmetric, one for each layer, which "
        "both engines serve"
    )
    return f"Serve it with {' or '.join(serving)}, or e{export}" if serving else f"E{export}"


def _remedy_of_names(scale: StoredScale, evidence: Evidence) -> str:
    declaration, shape = evidence.declaration, evidence.shape
    if not declaration.quant_method and declaration.scheme:
        return "Name the producer in quantization_config: quant_method"
    if not declaration.quant_method:
        return "Declare it: quantization_config with a quant_method and a kv_cache_scheme"
    by_common = verdicts(_COMMON, declaration, shape)
    gains = any(
        now.finds and not before.finds for now, before in zip(by_common, scale.engines, strict=True)
    )
    if scale.role == "scale" and gains:
        return f"Rename the scales to {shown(scale.module)}.k_scale and .v_scale"
    if scale.role in ("zero point", "bias"):
        return "Remove these tensors"
    return "" if declaration.scheme else "Declare it: kv_cache_scheme in quantization_config"
