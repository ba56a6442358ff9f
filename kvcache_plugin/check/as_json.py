"""What a check found, for programs. The schema is in docs/check.md."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvcache_plugin import __version__
from kvcache_plugin.checkpoint.engine_rules import RELEASES

if TYPE_CHECKING:
    from kvcache_plugin.check.run import Check

#: Of the schema. A field that is added does not change it; one that is removed or means something
#: else does.
SCHEMA: Final = 1


def as_json(check: Check) -> dict[str, Any]:
    """All of it, fit for JSON: a number that is none is ``"nan"``, ``"inf"`` or ``"-inf"``."""
    report = check.report
    found = {
        "schema": SCHEMA,
        "version": __version__,
        "engines": RELEASES,
        **asdict(report),
        "device_from": check.device_from,
        "is_sound": report.is_sound,
        "summary": report.summary,
        "against": None,
    }
    # The tensors are all in ``scales``.
    for layer, scales in zip(found["layers"], report.layers, strict=True):
        layer["stored_k"] = scales.stored_k.name if scales.stored_k else None
        layer["stored_v"] = scales.stored_v.name if scales.stored_v else None
    if check.comparison is not None:
        found["against"] = {
            **asdict(check.comparison),
            "is_equal": check.comparison.is_equal,
        }
    finite: dict[str, Any] = _finite(found)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
