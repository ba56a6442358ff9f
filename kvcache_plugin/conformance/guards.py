"""What must hold around a call: nothing given is changed, nothing waits for the device."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_plugin.plugins import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_plugin.conformance.trial import Trial

_READS: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_COPIES: Final = ("aten::copy_", "aten::_to_copy")
#: Its result has a shape of its own only where it is given a mask.
_INDEX: Final = "aten::index"
#: What torch says of an operation that waits, where it is told to refuse it.
_SYNCHRONIZES: Final = "synchronizing"
#: Makes a tensor of Python numbers.
_LIFT: Final = "aten::lift_fresh"


class _HostError(Exception):
    """An implementation reads on the host, or copies from it."""


@contextmanager
def no_host_sync(trial: Trial, what: str) -> Iterator[None]:
    """See that nothing waits for a GPU, and all could be captured: of torch's own operations."""
    candidate = trial.candidate
    try:
        with _Refusing(candidate.device.kind != "cpu"), _no_synchronization(candidate.torch_device):
            yield
    except _HostError as error:
        trial.wrong(f"{what}: it {error}")
    except RuntimeError as error:
        if _SYNCHRONIZES not in str(error):
            raise
        trial.wrong(f"{what}: it waits for the GPU ({one_line(error)})")


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what reads and copies.

    :param numbers_come_from_host: whether ``torch.tensor([1, 2])`` is a copy from the host too.
    """

    def __init__(self, numbers_come_from_host: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers_come_from_host = numbers_come_from_host

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name().split(".")[0]
        if self._is_read(func, name, args):
            raise _HostError(f"reads a value of a tensor on the host ({name})")
        if name == _LIFT and self._numbers_come_from_host:
            raise _HostError(f"makes a tensor of numbers, which come from the host ({name})")
        result = func(*args, **(kwargs or {}))
        if name in _COPIES:
            moved = [t.device.type for t in (*args, result) if isinstance(t, torch.Tensor)]
            if len(set(moved)) > 1:
                raise _HostError(f"copies between {' and '.join(sorted(set(moved)))} ({name})")
        return result

    @staticmethod
    def _is_read(func: Any, name: str, args: tuple[Any, ...]) -> bool:
        if name == _INDEX:
            return any(t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None)
        return bool(_READS.intersection(func.tags))


@contextmanager
def _no_synchronization(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype of torch's
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def unchanged(trial: Trial, what: str, **given: torch.Tensor | None) -> Iterator[None]:
    """See that all the memory of tensors stays as it is."""
    rooms = {
        name: torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        for name, tensor in given.items()
        if tensor is not None
    }
    before = {name: room.clone() for name, room in rooms.items()}
    yield
    for name, room in rooms.items():
        count = int((room != before[name]).sum())
        if count:
            trial.wrong(f"{what}: it changes {count} bytes of the {name} that it is given")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Engines load and serve under a default dtype of their own."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def captured(device: torch.device, call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call that has been made before in a CUDA graph; what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return replay


def far_apart(
    rows: Sequence[int], dtype: torch.dtype, gap: int, device: torch.device
) -> torch.Tensor | None:
    """Rows with a gap of so many elements; ``None`` where there is not the memory.

    On the CPU only the pages that are touched take any.
    """
    count, length = rows
    try:
        room = torch.empty((count - 1) * gap + length, dtype=dtype, device=device)
    except RuntimeError:  # out of memory, for a GPU too
        return None
    return room.as_strided((count, length), (gap, 1))
