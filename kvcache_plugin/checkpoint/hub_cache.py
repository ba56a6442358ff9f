"""Finds a model in the local Hugging Face cache; nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.opening import behind_links, check_ordinary, read_bytes
from kvcache_plugin.errors import CheckpointError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What a checkpoint can be, for errors about a path that is none.
WHAT_IT_TAKES: Final = (
    "A checkpoint is a folder with .safetensors files, one such file, or the name of a model in "
    "the local Hugging Face cache"
)
_NAME: Final = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
_REVISION: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
_COMMIT: Final = re.compile(r"[\w-]+")


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The local cache, where ``huggingface_hub`` has it."""
    for variable, inner in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := environ.get(variable):
            return Path(os.path.expandvars(os.path.expanduser(value)), inner)
    return Path(os.path.expanduser("~"), ".cache", "huggingface", "hub")


def find_snapshot(name: str, revision: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of one revision of a model, without links.

    :param name: ``"organisation/model"``.
    :param revision: a branch, a tag or a commit.
    :raises CheckpointError: when the cache does not have it.
    """
    cache = cache_folder(environ)
    repository = cache / f"models--{name.replace('/', '--')}"
    if not _is_safe(_NAME, name):
        raise CheckpointError(
            "there is no such file or folder", file=name, name="checkpoint-missing"
        )
    if not os.path.isdir(repository):
        raise CheckpointError(
            "there is no such file or folder, nor such a model in the local Hugging Face cache",
            file=name,
            name="checkpoint-missing",
        )
    if not _is_safe(_REVISION, revision):
        raise CheckpointError(
            f"{shown(revision)!r} is no name of a revision", file=name, name="revision-missing"
        )
    repository = behind_links(str(repository))
    commit = _commit_of(repository, revision)
    snapshot = repository / "snapshots" / commit
    if not _is_safe(_COMMIT, commit) or not os.path.isdir(snapshot):
        found = sorted(entry.name for entry in repository.glob("snapshots/*"))[:5]
        has = f"it has {', '.join(map(shown, found))}" if found else "it has none"
        raise CheckpointError(
            f"the local Hugging Face cache has no revision {shown(revision)} of it, {has}; nothing "
            "is downloaded",
            file=name,
            name="revision-missing",
        )
    folder = behind_links(str(snapshot))
    if not folder.is_relative_to(repository):
        raise _leads_out_of_the_cache(snapshot)
    return folder


def blobs_of(folder: Path) -> tuple[Path, ...]:
    """Where the links in a snapshot's folder lead; nowhere for any other folder."""
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        return (repository / "blobs",)
    return ()


def _commit_of(repository: Path, revision: str) -> str:
    reference = repository / "refs" / revision
    if not os.path.lexists(reference):
        return revision
    path = behind_links(str(reference))
    check_ordinary(path, str(reference))
    if not path.is_relative_to(repository):
        raise _leads_out_of_the_cache(reference)
    return read_bytes(path, str(reference), 1000).decode("ascii", "replace").strip()


def _leads_out_of_the_cache(link: Path) -> CheckpointError:
    return CheckpointError(
        "it is a link that leads out of the cache", file=str(link), name="file-outside"
    )


def _is_safe(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None and ".." not in text
