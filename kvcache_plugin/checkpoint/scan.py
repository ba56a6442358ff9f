"""``scan_checkpoint``: a checkpoint's K/V scales, judged before anything is served."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from kvcache_plugin import formats
from kvcache_plugin.api import explain
from kvcache_plugin.checkpoint.collector import Collector, skipped_with_scales
from kvcache_plugin.checkpoint.declaration import (
    CONFIG,
    MISTRAL_CONFIG,
    MODELOPT_CONFIG,
    read_declaration,
)
from kvcache_plugin.checkpoint.evidence import Evidence
from kvcache_plugin.checkpoint.files import find_checkpoint
from kvcache_plugin.checkpoint.findings import examine
from kvcache_plugin.checkpoint.judge import Judge, quiet
from kvcache_plugin.checkpoint.model_shape import read_shape
from kvcache_plugin.checkpoint.report import CheckpointReport
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVCacheError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from kvcache_plugin.api import DeviceLike
    from kvcache_plugin.checkpoint.declaration import Declaration


def scan_checkpoint(
    path: str | os.PathLike[str],
    *,
    kv_cache_dtype: str | None = None,
    device: DeviceLike = "cpu",
    revision: str = "main",
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointReport:
    """Find a checkpoint's K/V scales, and what is wrong with them, before it is served.

    Only headers and the scale tensors are read, never the weights, and nothing is downloaded.
    The pair of each layer goes through ``validate_kv_scales``, as it does in the engines.

    :param path: a folder, a ``.safetensors`` file, or the name of a model in the local Hugging
        Face cache.
    :param kv_cache_dtype: the format to check the scales for; ``None`` or ``"auto"`` is the one
        that the checkpoint declares, else ``fp8_e4m3``.
    :param device: where the cache will be, as in ``validate_kv_scales``; it need not be present.
    :param revision: the branch, tag or commit, for a name in the cache.
    :param progress: called with the number of files read so far, and of all.
    :returns: what is stored, what would be served, and what was found.
    :raises CheckpointError: for a checkpoint that cannot be read, or is not to be trusted, in one
        line that names the file.
    :raises KVCacheError: for a device or format that is unknown.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    hardware = Device.of(device)
    asked = None if kv_cache_dtype in (None, "auto") else kv_cache_dtype
    if asked is not None:
        explain(hardware, asked)  # an unknown format is a fault of the call, not of a scale
    files = find_checkpoint(path, revision=revision)
    config = files.read_config(CONFIG) or files.read_config(MISTRAL_CONFIG)
    declaration = read_declaration(config, files.read_config(MODELOPT_CONFIG))
    shape = read_shape(config)
    declared = _known_format(declaration, hardware)
    kv_format = formats.on_device(asked or declared or formats.FP8_E4M3.name, hardware)

    collector = Collector(files, declaration, shape)
    for number, shard in enumerate(files.shards, start=1):
        collector.read(shard)
        if progress is not None:
            progress(number, len(files.shards))
    judge = Judge(kv_format, hardware, declaration, shape)
    with quiet():
        layers = [judge.layer(*found) for found in collector.by_module.items()]
    evidence = Evidence(
        files=files,
        declaration=declaration,
        shape=shape,
        kv_format=kv_format,
        layers=tuple(sorted(layers, key=attrgetter("place"))),
        scales=tuple(scale.stored for scale in collector.scales),
        unknown=tuple(collector.unknown),
        owners=frozenset(collector.owners),
        attention=frozenset(collector.attention),
        not_in_index=tuple(collector.not_in_index),
        missing=tuple(collector.missing),
        skipped=tuple(skipped_with_scales(files)),
        declared_format=formats.on_device(
            declaration.scheme.kv_cache_dtype if declaration.scheme else "", hardware
        ),
        is_asked=asked is not None,
    )
    return CheckpointReport(
        path=files.path,
        files=files.shards,
        num_tensors=len(collector.shard_of),
        declaration=declaration,
        shape=shape,
        kv_cache_dtype=kv_format,
        kv_cache_dtype_from="asked" if asked else "declared" if declared else "assumed",
        device=str(hardware),
        layers=evidence.layers,
        scales=evidence.scales,
        unknown=evidence.unknown,
        findings=examine(evidence),
    )


def _known_format(declaration: Declaration, device: Device) -> str:
    """The declared format, empty where none is declared or nobody here knows it."""
    name = declaration.scheme.kv_cache_dtype if declaration.scheme else ""
    try:
        explain(device, name)
    except KVCacheError:
        return ""
    return name
