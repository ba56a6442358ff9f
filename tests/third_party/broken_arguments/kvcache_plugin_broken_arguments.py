"""Broken: ``quantize_kv`` has no argument ``stream``."""

from __future__ import annotations

import kvcache_plugin as kv


@kv.hookimpl
def quantize_kv(stream: int) -> kv.QuantizedKV:
    raise AssertionError("a plugin with wrong arguments is never called")
