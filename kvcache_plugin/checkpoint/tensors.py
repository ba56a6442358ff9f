"""One safetensors file: its header, and single small tensors. Weights are never read.

The ``safetensors`` package judges the header, and decodes what is read.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from kvcache_plugin.checkpoint.opening import unique_keys, unreadable
from kvcache_plugin.errors import CheckpointError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header has it.

    :param dtype: safetensors' name, ``"BF16"``.
    :param begin: where its bytes begin in the file.
    :param size: how many bytes it has.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


class SafetensorsFile:
    """The header of one file.

    :param path: an ordinary file.
    :param where: what messages call it.
    :raises CheckpointError: for a file that is no sound safetensors file.
    """

    def __init__(self, path: Path, where: str) -> None:
        self._path = path
        self._where = where
        try:
            # Opened here first: safetensors calls a file that may not be read missing. Asked for
            # torch it would map the file writable, which a shard larger than memory does not allow.
            with path.open("rb") as file, safe_open(path, framework="np"):
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                header = file.read(length)
        except (SafetensorError, struct.error) as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise unreadable(error, where) from error
        self._data = _LENGTH.size + length
        self._entries = self._parse(header)

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return (name for name in self._entries if name != _METADATA)

    def entry(self, name: str) -> TensorEntry:
        found = self._entries[name]
        begin, end = found["data_offsets"]
        return TensorEntry(
            name, found["dtype"], tuple(found["shape"]), self._data + begin, end - begin
        )

    def read(self, entry: TensorEntry) -> torch.Tensor | None:
        """One tensor, ``None`` when this torch or safetensors has no such dtype."""
        from safetensors.torch import load

        try:
            with self._path.open("rb") as file:
                file.seek(entry.begin)
                data = file.read(entry.size)
        except OSError as error:
            raise unreadable(error, self._where) from error
        header = {"": {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [0, len(data)]}}
        encoded = json.dumps(header).encode()
        try:
            return load(_LENGTH.pack(len(encoded)) + encoded + data)[""]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError):
            return None

    def _parse(self, header: bytes) -> Mapping[str, Any]:
        """What safetensors has judged to be sound, but for a name that is there twice."""
        try:
            entries: dict[str, Any] = json.loads(header)
            # Every tensor has its offsets, so as many of these as of names says that none is
            # there twice, unless something is spelled with an escape. This is the fast way.
            tensors = len(entries) - (_METADATA in entries)
            if b"\\" in header or header.count(b'"data_offsets"') != tensors:
                entries = json.loads(header, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._damaged(error) from error
        return entries

    def _damaged(self, error: Exception) -> CheckpointError:
        reason = str(error).removeprefix("Error while deserializing header: ")
        return CheckpointError(
            f"it is no sound safetensors file: {shown(reason)}",
            file=self._where,
            remedy="Download or copy it again",
            name="file-damaged",
        )
