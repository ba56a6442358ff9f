"""Who writes K and V in each engine, in one table: the hook, or the engine by itself, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvcache_plugin.formats import BUILT_IN, canonical
from kvcache_plugin.settings import VLLM_WRITES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A third party is one that quantizes for the device and format: then the hook writes its codes.
Writer: TypeAlias = Literal["the hook", "the engine, or a third party", "the engine"]


@dataclass(frozen=True)
class WritePath:
    """One way in which K and V get into a quantized cache.

    :param engine: the engine's title.
    :param family: the formats that it is for, see ``KVFormat.family``.
    :param what: which write it is.
    :param writer: whose codes it stores.
    :param why: why that is so, or what changes it.
    """

    engine: str
    family: str
    what: str
    writer: Writer
    why: str


_OTHER_ROUNDING: Final = "SGLang's own changes K and V, rounds twice, and overflows to NaN or inf"
_IN_ONE_KERNEL: Final = "one kernel computes, rounds and writes"

WRITE_PATHS: Final = (
    WritePath(
        "vLLM",
        "fp8",
        "do_kv_cache_update of the attention backend",
        "the engine, or a third party",
        f"a fused kernel; {VLLM_WRITES.name}=hook lets the hook write",
    ),
    WritePath("vLLM", "fp8", "backends that write in their forward", "the engine", _IN_ONE_KERNEL),
    WritePath(
        "vLLM", "fp8", "caches of MLA", "the engine", "they hold one latent tensor, not K and V"
    ),
    WritePath(
        "vLLM",
        "nvfp4",
        "every write",
        "the engine",
        "its kernels keep no codes that they are given",
    ),
    WritePath("SGLang", "fp8", "set_kv_buffer of the pool", "the hook", _OTHER_ROUNDING),
    WritePath("SGLang", "fp8", "cpu_fp8_e4m3", "the hook", "SGLang's own rounds twice"),
    WritePath(
        "SGLang",
        "fp8",
        "set_kv_buffer_prefix_valid with scales known to the host",
        "the engine, or a third party",
        "a fused CUDA kernel, which saturates and rounds once",
    ),
    WritePath(
        "SGLang", "fp8", "fused CUDA writes (trtllm_mha, rotary)", "the engine", _IN_ONE_KERNEL
    ),
    WritePath(
        "SGLang",
        "fp8",
        "pools with a write of their own (MLA, MXFP8, page-interleaved, NPU)",
        "the engine",
        "they have other layouts, or scales of their own",
    ),
    WritePath(
        "SGLang",
        "nvfp4",
        "NVFP4KVQuantizeUtil, of the backends that read FP4",
        "the hook",
        "SGLang's own has no kernel below SM100",
    ),
    WritePath(
        "SGLang",
        "nvfp4",
        "triton, torch_native and flex_attention",
        "the hook",
        "SGLang has no NVFP4 cache for them",
    ),
)

_WRITERS: Final[tuple[Writer, ...]] = ("the hook", "the engine, or a third party", "the engine")


def write_paths(engine: str) -> tuple[WritePath, ...]:
    """The write paths of an engine, by its title."""
    return tuple(path for path in WRITE_PATHS if path.engine == engine)


def summaries(kv_cache_dtype: str) -> Iterator[str]:
    """One line for each engine: who writes what in a format. None for one that a plugin adds."""
    name = canonical(kv_cache_dtype)
    family = next((known.family for known in BUILT_IN if known.name == name), "")
    for engine in dict.fromkeys(path.engine for path in WRITE_PATHS):
        paths = [path for path in write_paths(engine) if path.family == family]
        told = [
            f"by {writer.replace('the engine', engine)}: {', '.join(what)}"
            for writer in _WRITERS
            if (what := [path.what for path in paths if path.writer == writer])
        ]
        if told:
            yield f"{engine}'s caches are written {'; '.join(told)}"
