"""Broken: its entry point has the name of a built-in implementation, ``cpu_reference``."""

from __future__ import annotations

import kvcache_plugin as kv


@kv.hookimpl
def quantize_kv() -> kv.QuantizedKV:
    raise AssertionError("a plugin whose name is taken is never called")
