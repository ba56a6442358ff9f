"""Broken: it loads, and fails whenever it is asked what it serves."""

from __future__ import annotations

import kvcache_plugin as kv


@kv.hookimpl
def supports_kv() -> bool:
    raise OSError("the driver does not answer")


@kv.hookimpl
def quantize_kv() -> kv.QuantizedKV:
    raise AssertionError("a plugin that does not say what it serves is never called")
