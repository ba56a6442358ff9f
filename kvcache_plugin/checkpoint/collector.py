"""Goes through the headers of a checkpoint, and keeps what concerns K/V scales."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.conventions import looks_like_kv_scale, match
from kvcache_plugin.checkpoint.engine_rules import verdicts
from kvcache_plugin.checkpoint.report import StoredScale
from kvcache_plugin.checkpoint.tensors import SafetensorsFile
from kvcache_plugin.errors import CheckpointError, shown
from kvcache_plugin.tensor_kinds import holds_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from kvcache_plugin.checkpoint.conventions import Match
    from kvcache_plugin.checkpoint.declaration import Declaration
    from kvcache_plugin.checkpoint.files import CheckpointFiles
    from kvcache_plugin.checkpoint.model_shape import ModelShape
    from kvcache_plugin.checkpoint.tensors import TensorEntry

#: A tensor with more values than any model has KV heads is no scale, and is not read.
MOST_VALUES: Final = 4096
#: Of all scales together. A model of 1000 layers with 256 heads has 2 MiB.
_MOST_BYTES: Final = 64 * 2**20

#: Projections that tell an attention module with K and V from one without.
_ATTENTION_WEIGHT: Final = re.compile(
    r"(?P<module>.+)\.(?:[kv]_proj|q?kv_proj|kv_[ab]_proj|kv_a_proj_with_mqa|c_attn|query_key_value"
    r"|W_pack|Wqkv|qkv|w[kv]|wqkv|wkv_[ab]\w*)\.q?weight\w*"
)


@dataclass(frozen=True)
class FoundScale:
    """A scale and its tensor, ``None`` when it is none that can be read."""

    stored: StoredScale
    tensor: torch.Tensor | None


class Collector:
    """What the headers hold, one file after the other.

    :param files: the checkpoint.
    :param declaration: decides what stored numbers mean, and what engines do with them.
    """

    def __init__(self, files: CheckpointFiles, declaration: Declaration, shape: ModelShape) -> None:
        self._files = files
        self._declaration = declaration
        self._shape = shape
        self._bytes_read = 0
        self.shard_of: dict[str, str] = {}
        self.scales: list[FoundScale] = []
        self.unknown: list[str] = []
        self.not_in_index: list[str] = []
        #: Modules that weights belong to, and those of them that have K and V.
        self.owners: set[str] = set()
        self.attention: set[str] = set()

    def read(self, shard: str) -> None:
        """Read the header of a file, and its scales.

        :raises CheckpointError: for a file that is not sound, or contradicts another or the index.
        """
        where = self._files.where(shard)
        file = SafetensorsFile(self._files.locate(shard), where)
        self._check_places(file, shard, where)
        self.shard_of.update(dict.fromkeys(file, shard))
        for name in file:
            # Most names are those of experts, and none of them is a K/V scale's.
            if ".experts." in name:
                continue
            if (matched := match(name)) is not None:
                self._add(file, name, shard, matched)
            elif looks_like_kv_scale(name):
                self.unknown.append(name)
            else:
                self._note_module(name)

    @property
    def by_module(self) -> dict[str, list[FoundScale]]:
        """The scales of K and V by attention module; zero points and the like are left out."""
        found: dict[str, list[FoundScale]] = {}
        for scale in self.scales:
            stored = scale.stored
            if stored.role in ("scale", "global scale") and stored.side in ("k", "v", "kv"):
                found.setdefault(stored.module, []).append(scale)
        return found

    @property
    def missing(self) -> Iterator[str]:
        """Scales that the index names and no file holds."""
        return (name for name in self._files.placed if name not in self.shard_of and match(name))

    def _check_places(self, file: SafetensorsFile, shard: str, where: str) -> None:
        """See that no name is in another file too, or is placed there by the index."""
        twice = next((name for name in file if name in self.shard_of), None)
        if twice is not None:
            raise CheckpointError(
                f"it holds {shown(twice)}, and so does {shown(self.shard_of[twice])}",
                file=where,
                name="tensor-twice",
            )
        placed = self._files.placed
        elsewhere = next((name for name in file if placed.get(name, shard) != shard), None)
        if elsewhere is not None:
            raise CheckpointError(
                f"it holds {shown(elsewhere)}, which {self._files.index} places in "
                f"{shown(placed[elsewhere])}",
                file=where,
                name="index-wrong",
            )

    def _add(self, file: SafetensorsFile, name: str, shard: str, matched: Match) -> None:
        if self._files.index and name not in self._files.placed:
            self.not_in_index.append(name)
        entry = file.entry(name)
        tensor = self._tensor(file, entry)
        convention = matched.convention
        stored = StoredScale(
            name=name,
            file=shard,
            module=matched.module,
            convention=convention.key,
            side=matched.side,
            role=convention.role,
            dtype=entry.dtype,
            shape=entry.shape,
            values=_values(tensor),
            meaning=convention.meaning_from(self._declaration.producer.name),
            engines=verdicts(convention, self._declaration, self._shape),
        )
        self.scales.append(FoundScale(stored, tensor))

    def _tensor(self, file: SafetensorsFile, entry: TensorEntry) -> torch.Tensor | None:
        if math.prod(entry.shape) > MOST_VALUES:
            return None
        self._bytes_read += entry.size
        if self._bytes_read > _MOST_BYTES:
            raise CheckpointError(
                f"its scales have more than {_MOST_BYTES:,} bytes, which no checkpoint's have",
                file=self._files.path,
                name="file-too-large",
            )
        return file.read(entry)

    def _note_module(self, name: str) -> None:
        self.owners.add(name.rpartition(".")[0].rpartition(".")[0])
        found = _ATTENTION_WEIGHT.fullmatch(name)
        if found is not None:
            self.attention.add(found["module"])


def skipped_with_scales(files: CheckpointFiles) -> Iterator[str]:
    """Files beside the loaded ones that hold K/V scales; what cannot be read concerns nobody."""
    for name in files.skipped:
        try:
            header = SafetensorsFile(files.locate(name), files.where(name))
        except CheckpointError:
            continue
        if any(match(tensor) for tensor in header):
            yield name


def _values(tensor: torch.Tensor | None) -> tuple[float, ...]:
    if tensor is None or not holds_numbers(tensor.dtype):
        return ()
    return tuple(tensor.double().flatten().tolist())
