"""Reads fields of a stranger's JSON: one of an unexpected type counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Json: TypeAlias = Mapping[str, object]

#: Where a model with more than a language model in it keeps the configuration of that.
_TEXT_CONFIGS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model",
    "text_model_config",
)
_LARGEST: Final = 100_000


def an_object(source: Json, key: str) -> Json:
    """The object in a field, empty where there is none."""
    value = source.get(key)
    return value if isinstance(value, dict) else {}


def a_text(source: Json, key: str) -> str:
    """The text in a field, empty where there is none."""
    value = source.get(key)
    return value if isinstance(value, str) else ""


def texts(source: Json, key: str) -> tuple[str, ...]:
    """The texts in a field that holds a list of them, or one."""
    value = source.get(key)
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, str))


def counts(value: object) -> Iterator[int]:
    """The positive whole numbers in a list, or a number by itself."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool) and 0 < item <= _LARGEST:
            yield item


def a_count(source: Json, *keys: str) -> int | None:
    """The first of these fields that is a positive whole number."""
    return next((count for key in keys for count in counts(source.get(key))), None)


def nested(config: Json) -> Iterator[Json]:
    """The parts of a configuration that can be the language model's own, outermost first."""
    parts = [config]
    for _ in range(3):
        parts = [
            inner for part in parts for key in _TEXT_CONFIGS if (inner := an_object(part, key))
        ]
        yield from parts
