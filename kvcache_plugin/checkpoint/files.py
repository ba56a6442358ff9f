"""Which files make up a checkpoint: nothing outside it is read, and nothing is downloaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.hub_cache import WHAT_IT_TAKES, blobs_of, find_snapshot
from kvcache_plugin.checkpoint.opening import behind_links, check_ordinary, read_json, unreadable
from kvcache_plugin.errors import CheckpointError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvcache_plugin.checkpoint.json_fields import Json

#: What to do about a checkpoint of which something is not there.
COPY_AGAIN: Final = "Download or copy the checkpoint again, all of it"
_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")

_MOST_CONFIG_BYTES: Final = 16 * 2**20
#: As much as safetensors allows for a header, which has the same names.
_MOST_INDEX_BYTES: Final = 100_000_000


@dataclass(frozen=True)
class CheckpointFiles:
    """Where a checkpoint lies, and which of its files the engines load.

    :param path: what was asked for.
    :param folder: the folder that it is in, without links.
    :param named: what messages call that folder: as it was asked for, where it was.
    :param links: where links may lead besides: the blobs of a Hugging Face cache, the very file
        that was asked for.
    :param shards: names of the ``.safetensors`` files that are loaded, in the folder.
    :param skipped: names of those that are not.
    :param index: the name of the index, empty without one.
    :param placed: tensor -> shard, as the index says.
    :param is_whole: whether this is all of a checkpoint, as far as names tell.
    """

    path: str
    folder: Path
    named: str
    links: tuple[Path, ...] = ()
    shards: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    index: str = ""
    placed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    is_whole: bool = True

    def where(self, name: str) -> str:
        """What messages call a file of the checkpoint."""
        return os.path.join(self.named, name)

    def locate(self, name: str) -> Path:
        """A file of the checkpoint, behind all links.

        :raises CheckpointError: for a name or a link that leads out of the checkpoint, and for
            what is missing or no ordinary file.
        """
        where = self.where(name)
        if _leads_out(name):
            raise CheckpointError(
                "it is outside the checkpoint, and is not read", file=where, name="file-outside"
            )
        path = behind_links(os.path.join(self.folder, name), where)
        if not any(path.is_relative_to(place) for place in (self.folder, *self.links)):
            raise CheckpointError(
                f"it is a link that leads out of the checkpoint, to {shown(str(path))}, and is "
                "not read",
                file=where,
                remedy="Copy the file into the folder, or name the folder that it lies in",
                name="file-outside",
            )
        check_ordinary(path, where)
        return path

    def read_config(self, name: str) -> Json:
        """A JSON object from a file of the checkpoint, empty where there is no such file.

        :raises CheckpointError: for a file that holds no JSON object, or is too large.
        """
        if not os.path.lexists(self.folder / name):
            return {}
        return read_json(self.locate(name), self.where(name), _MOST_CONFIG_BYTES)


def find_checkpoint(
    path: str | os.PathLike[str],
    *,
    revision: str = "main",
    environ: Mapping[str, str] = os.environ,
) -> CheckpointFiles:
    """Find the files of a checkpoint, and which of them the engines load.

    :param path: a folder, a ``.safetensors`` file, or a name in the local Hugging Face cache.
    :param revision: the branch, tag or commit, for a name in the cache.
    :raises CheckpointError: when there is none, or none that can be read.
    """
    given = os.fspath(path)
    if not isinstance(given, str) or not given or "\0" in given:
        raise CheckpointError(
            f"a checkpoint is a path or a name, got {shown(repr(given))}", name="checkpoint-missing"
        )
    if not os.path.lexists(given):
        snapshot = find_snapshot(given, revision, environ)
        return _of_folder(given, snapshot, str(snapshot))
    real = behind_links(given)
    if os.path.isdir(real):
        return _of_folder(given, real, given)
    check_ordinary(real, given)
    if given.endswith(_PICKLES):
        raise _pickled(given)
    if not given.endswith(_SUFFIX):
        raise CheckpointError(
            f"it is no {_SUFFIX} file",
            file=given,
            remedy=WHAT_IT_TAKES,
            name="safetensors-missing",
        )
    parent, name = os.path.split(given)
    folder = behind_links(parent or ".")
    is_shard = re.search(r"-\d+-of-\d+\.safetensors$", name) is not None
    links = (real, *blobs_of(folder))
    return CheckpointFiles(given, folder, parent, links, (name,), is_whole=not is_shard)


def _of_folder(path: str, folder: Path, named: str) -> CheckpointFiles:
    links = blobs_of(folder)
    bare = CheckpointFiles(path, folder, named, links)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(error, named) from error
    found = [name for name in names if name.endswith(_SUFFIX)]
    index = _index_of(names)
    placed = _read_index(bare, index) if index else {}
    # Engines leave Mistral's own format aside where there is another.
    others = [name for name in found if not _is_mistral(name)] or found
    shards = sorted(set(placed.values())) if index else others
    if not shards:
        raise _no_safetensors(named, names)
    for shard in shards:
        if index:
            _check_named(bare, index, shard)
        bare.locate(shard)
    # Mistral's own format is another copy of the same model, and no file that was forgotten.
    skipped = [name for name in found if name not in shards and not _is_mistral(name)]
    return CheckpointFiles(path, folder, named, links, tuple(shards), tuple(skipped), index, placed)


def _index_of(names: Iterable[str]) -> str:
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    return _INDEX if _INDEX in indices else next(iter(indices), "")


def _is_mistral(name: str) -> bool:
    return name.startswith("consolidated")


def _read_index(files: CheckpointFiles, name: str) -> dict[str, str]:
    """The index's ``weight_map``: tensor -> shard."""
    where = files.where(name)
    found = read_json(files.locate(name), where, _MOST_INDEX_BYTES, unique=True)
    weight_map = found.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "it has no weight_map from tensors to files", file=where, name="index-wrong"
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"its weight_map has no file name for {shown(tensor)}: {shown(repr(shard))}",
                file=where,
                name="index-wrong",
            )
    return weight_map


def _check_named(files: CheckpointFiles, index: str, shard: str) -> None:
    """See that a shard that the index names is one, and is there."""
    where = files.where(index)
    if _leads_out(shard):
        raise CheckpointError(
            f"it names a file outside the checkpoint, {shown(repr(shard))}, which is not read",
            file=where,
            name="file-outside",
        )
    if shard.endswith(_PICKLES):
        raise _pickled(files.where(shard))
    if not shard.endswith(_SUFFIX):
        raise CheckpointError(
            f"it names a file that is no {_SUFFIX} file, {shown(repr(shard))}",
            file=where,
            name="index-wrong",
        )
    if not os.path.lexists(files.folder / shard):
        raise CheckpointError(
            f"it names {shown(shard)}, which is not there",
            file=where,
            remedy=COPY_AGAIN,
            name="index-wrong",
        )


def _leads_out(name: str) -> bool:
    return not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts


def _no_safetensors(folder: str, names: Iterable[str]) -> CheckpointError:
    pickle = next((name for name in names if name.endswith(_PICKLES)), None)
    if pickle is not None:
        return _pickled(os.path.join(folder, pickle))
    if any(name.endswith(".gguf") for name in names):
        return CheckpointError(
            "it holds GGUF files, which have no K/V scales", file=folder, name="safetensors-missing"
        )
    return CheckpointError(
        f"there is no {_SUFFIX} file in it",
        file=folder,
        remedy=WHAT_IT_TAKES,
        name="safetensors-missing",
    )


def _pickled(file: str) -> CheckpointError:
    return CheckpointError(
        "it is a pickle, which can run any program when it is read, so it is not",
        file=file,
        remedy="Save the model as safetensors: save_pretrained(folder, safe_serialization=True)",
        name="pickle-refused",
    )
