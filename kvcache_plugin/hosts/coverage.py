"""The scales in a checkpoint's files, beside what the layers of an engine's model hold."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_plugin.errors import shown
from kvcache_plugin.hosts.loaded import UNSET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvcache_plugin.checkpoint.report import StoredScale
    from kvcache_plugin.hosts.loaded import LoadedScales


@dataclass(frozen=True)
class StoredLayer:
    """The K and V scales of one attention module in the files, each side perhaps twice.

    :param module: the attention module's name in the files.
    """

    module: str
    is_draft: bool
    k: tuple[StoredScale, ...]
    v: tuple[StoredScale, ...]

    def side(self, side: str) -> tuple[StoredScale, ...]:
        """The scales of one side; one scale for both is K's, as the engines have it."""
        return self.k if side == "k" else self.v


@dataclass(frozen=True)
class StoredScales:
    """What the files of one checkpoint hold.

    :param unknown: names that look like those of K/V scales and fit no convention.
    :param unread: files that the engine loads and the scan does not.
    """

    layers: tuple[StoredLayer, ...] = ()
    unknown: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostScale:
    """Scales in the files that did not arrive on their layer.

    :param names: their names in the files.
    :param reason: why, empty where it is not known.
    """

    layer: str
    names: tuple[str, ...]
    reason: str


def files_of(prepared: Sequence[Any]) -> tuple[str, tuple[str, ...] | None]:
    """The folder and the safetensors files in what both engines' loaders prepare.

    :param prepared: a folder, its files, whether they are safetensors, and perhaps more.
    :returns: ``None`` for the files where they are others.
    """
    folder, files, are_safetensors, *_ = prepared
    return str(folder), tuple(map(str, files)) if are_safetensors else None


def read_stored(
    folder: str, files: Iterable[str], *, kv_cache_dtype: str, device: torch.device
) -> StoredScales:
    """Scan the files that an engine is about to load.

    :param folder: where the engine found the checkpoint.
    :param files: the files that it loads.
    :raises KVCacheError: for a checkpoint that cannot be read.
    """
    # Most processes of an engine load no model, and need none of the scanner.
    from kvcache_plugin.checkpoint.scan import scan_checkpoint

    report = scan_checkpoint(folder, kv_cache_dtype=kv_cache_dtype, device=device)
    loaded = {os.path.basename(file) for file in files}
    drafts = {layer.layer for layer in report.layers if layer.is_draft}
    by_module: dict[str, list[StoredScale]] = {}
    for scale in report.scales:
        is_scale = scale.role in ("scale", "global scale") and scale.side in ("k", "v", "kv")
        if is_scale and scale.file in loaded:
            by_module.setdefault(scale.module, []).append(scale)
    return StoredScales(
        tuple(
            StoredLayer(
                module,
                module in drafts,
                tuple(scale for scale in scales if scale.side in ("k", "kv")),
                tuple(scale for scale in scales if scale.side == "v"),
            )
            for module, scales in by_module.items()
        ),
        report.unknown,
        tuple(sorted(loaded - set(report.files))),
    )


def assign(
    stored: Sequence[StoredLayer], layers: Sequence[LoadedScales], *, is_draft: bool
) -> dict[StoredLayer, list[LoadedScales]]:
    """Which layers of the model the modules in the files are: module -> layers, in their order.

    Models have names of their own for the same module, so what stands in front of
    ``layers.3.self_attn`` may differ. What fits more than one module is nobody's. A module may be
    several layers, of which the engine fills one (DeepSeek in SGLang).

    :param is_draft: whether the model predicts further tokens and is not the model itself.
    """
    drafts = [layer for layer in stored if layer.is_draft]
    own = drafts or list(stored) if is_draft else [one for one in stored if not one.is_draft]
    by_name = {layer.module: layer for layer in own}
    by_tail = _unique((_tail(layer.module), layer) for layer in own)
    by_place = _unique((_place(layer.module), layer) for layer in own)
    assigned: dict[StoredLayer, list[LoadedScales]] = {}
    for layer in layers:
        module = (
            _longest(by_name, layer.layer)
            or _longest(by_tail, _tail(layer.layer))
            or by_place.get(_place(layer.layer))
        )
        if module is not None:
            assigned.setdefault(module, []).append(layer)
    return assigned


def as_loaded(stored: StoredLayer, layer: LoadedScales, engine: str) -> LoadedScales | None:
    """The layer with the scales of the files on it, as the engine would leave them there.

    ``None`` where that is not certain: the check after loading will see.
    """
    used = (*stored.k, *stored.v)
    certain = (
        len(stored.k) <= 1
        and len(stored.v) <= 1
        and all(scale.meaning == "multiplier" and _is_found(scale, engine) for scale in used)
        and all(scale.dtype in _FLOATS for scale in used)
    )
    if not certain or not layer.has_place:
        return None
    k, v = (_raw(next(iter(side), None), layer.dtype) for side in (stored.k, stored.v))
    if layer.granularity == "tensor":
        return replace(layer, k=k, v=v)
    # The layer has the heads of one rank, the files have all of them.
    sides = [side.flatten() for side in (k, v) if side is not None]
    heads = {len(side) for side in sides}
    own = layer.num_kv_heads or 1
    if len(heads) != 1 or any(count < own or count % own for count in heads):
        return None
    k, v = (side if side is None else side.flatten() for side in (k, v))
    return replace(layer, k=k, v=v, num_kv_heads=heads.pop())


def lost_scales(
    assigned: Mapping[StoredLayer, Sequence[LoadedScales]], engine: str
) -> tuple[LostScale, ...]:
    """The scales in the files of which the layers that they belong to hold nothing."""
    lost = []
    for module, layers in assigned.items():
        scales = [
            scale
            for side in ("k", "v")
            if all(getattr(layer, side) is None for layer in layers)
            for scale in module.side(side)
            if not scale.values or any(value != UNSET for value in scale.values)
        ]
        if scales:
            reasons = dict.fromkeys(filter(None, (_why(scale, engine) for scale in scales)))
            names = tuple(shown(scale.name) for scale in scales)
            lost.append(LostScale(layers[0].layer, names, "; ".join(reasons)))
    return tuple(lost)


_FLOATS: Final = ("F64", "F32", "F16", "BF16")


def _is_found(scale: StoredScale, engine: str) -> bool:
    return any(verdict.engine == engine and verdict.finds for verdict in scale.engines)


def _why(scale: StoredScale, engine: str) -> str:
    verdict = next((verdict for verdict in scale.engines if verdict.engine == engine), None)
    if verdict is None or verdict.finds or not verdict.reason:
        return ""
    from kvcache_plugin.checkpoint.engine_rules import RELEASES  # there by now, with the scanner

    return f"{engine} {RELEASES[engine]}: {verdict.reason}"


def _raw(scale: StoredScale | None, dtype: torch.dtype) -> torch.Tensor | None:
    if scale is None:
        return None
    if math.prod(scale.shape) != len(scale.values):  # too large for a scale, and not read
        return torch.ones((), dtype=dtype).expand(scale.shape)
    raw = torch.tensor(scale.values, dtype=torch.float64).reshape(scale.shape).to(dtype)
    return None if raw.numel() == 1 and raw.item() == UNSET else raw


def _tail(name: str) -> str:
    """``layers.3.self_attn``, without what a model puts in front; empty without a number."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if i and part.isdecimal()), 0)
    return ".".join(parts[number - 1 :]) if number else ""


def _place(name: str) -> str:
    """``layers.3``"""
    return ".".join(_tail(name).split(".")[:2])


def _longest(modules: Mapping[str, StoredLayer], layer: str) -> StoredLayer | None:
    """The module that a layer is, or is in."""
    name = layer
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return modules.get(name)


def _unique(pairs: Iterable[tuple[str, StoredLayer]]) -> dict[str, StoredLayer]:
    """The pairs whose first part is there once, and is not empty."""
    found: dict[str, StoredLayer | None] = {}
    for key, layer in pairs:
        found[key] = None if key in found else layer
    return {key: layer for key, layer in found.items() if key and layer is not None}
