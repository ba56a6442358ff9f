"""Broken: it needs a package that is not installed."""

from __future__ import annotations

import kvcache_plugin_missing_kernels as kernels  # type: ignore[import-not-found]

import kvcache_plugin as kv


@kv.hookimpl
def supports_kv() -> bool:
    return bool(kernels.available())
