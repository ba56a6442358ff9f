"""Broken: ``quantise_kv`` is no hook."""

from __future__ import annotations

import kvcache_plugin as kv


@kv.hookimpl
def supports_kv() -> bool:
    return True


@kv.hookimpl
def quantise_kv() -> kv.QuantizedKV:
    raise AssertionError("a plugin with a misspelt hook is never called")
