"""What both engines' adapters ask before they let the hook write a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache_plugin import formats
from kvcache_plugin.api import explain
from kvcache_plugin.manager import OWN_DISTRIBUTION

if TYPE_CHECKING:
    from kvcache_plugin.device import Device

#: The FP8 formats by what their codes are stored in.
FP8_BY_DTYPE = {getattr(torch, f.data_dtype): f.name for f in formats.BUILT_IN if f.family == "fp8"}


def third_party_writer(device: Device | torch.device, kv_cache_dtype: str) -> str:
    """Who quantizes for this device and format, if that is not built in; empty if it is."""
    for row in explain(device, kv_cache_dtype):
        if row.chosen and row.distribution != OWN_DISTRIBUTION:
            return f"{row.name!r} ({row.distribution})"
    return ""
