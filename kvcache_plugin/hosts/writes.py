"""What both engines' adapters ask before they let the hook write a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_plugin import formats
from kvcache_plugin.api import explain
from kvcache_plugin.manager import OWN_DISTRIBUTION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_plugin.api import DeviceLike
    from kvcache_plugin.explaining import Explanation

#: The FP8 formats by what their codes are stored in.
FP8_BY_DTYPE: Final = {f.torch_dtype: f.name for f in formats.BUILT_IN if f.family == "fp8"}


def quantizer(device: DeviceLike, kv_cache_dtype: str) -> str:
    """The name of the implementation that quantizes, empty for none.

    :raises KVCacheError: for a device or format that is unknown.
    """
    return next((row.name for row in explain(device, kv_cache_dtype) if row.chosen), "")


def third_party_writer(device: DeviceLike, kv_cache_dtype: str) -> str:
    """Who quantizes for this device and format, if that is not built in; empty if it is.

    :raises KVCacheError: for a device or format that is unknown.
    """
    return third_party_among(explain(device, kv_cache_dtype))


def third_party_among(rows: Iterable[Explanation]) -> str:
    """Who of those that ``explain`` lists quantizes, if that is not built in; empty if it is."""
    found = (row for row in rows if row.chosen and row.distribution != OWN_DISTRIBUTION)
    return next((f"{row.name!r} ({row.distribution})" for row in found), "")
