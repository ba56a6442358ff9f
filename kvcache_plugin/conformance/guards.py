"""What must hold around a call: nothing given is changed, nothing waits for the device."""

from __future__ import annotations

import os
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
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
#: What torch calls the reading of one value, which nobody writes by that name.
_READ_ONE: Final = "aten::_local_scalar_dense"
#: They read on the host, and on the CPU, where the tests' tensors may be, do so unseen.
_TO_HOST: Final = {
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.__array__: "numpy",
}
#: Makes a tensor of Python numbers.
_LIFT: Final = "aten::lift_fresh"


class _HostError(Exception):
    """An implementation reads on the host, or copies from it."""


@contextmanager
def no_host_sync(trial: Trial, what: str) -> Iterator[None]:
    """See that nothing waits for a GPU, and all could be captured: of torch's own operations."""
    candidate = trial.candidate
    is_elsewhere = candidate.device.kind != "cpu"
    try:
        with (
            _RefusingMoves() if is_elsewhere else nullcontext(),
            _Refusing(is_elsewhere),
            _no_synchronization(candidate.torch_device),
        ):
            yield
    except _HostError as error:
        trial.wrong(f"{what}: it {error}{_place_of(error)}")
    except RuntimeError as error:
        if _SYNCHRONIZES not in str(error):
            raise
        trial.wrong(f"{what}: it waits for the GPU ({one_line(error)})")


def _place_of(error: Exception) -> str:
    """The line of the implementation that an error comes from, as far as it is Python."""
    inside = (__file__, os.path.dirname(torch.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(inside)]
    return f", in {os.path.basename(theirs[-1].filename)}:{theirs[-1].lineno}" if theirs else ""


class _RefusingMoves(TorchFunctionMode):
    """Refuses what takes a tensor to the host, also where it lies there already."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        how = _TO_HOST.get(func, "")
        if func is torch.Tensor.to and _names_the_cpu(*args[1:], *(kwargs or {}).values()):
            how = ".to('cpu')"
        if how:
            raise _HostError(f"takes a tensor to the host ({how})")
        return func(*args, **(kwargs or {}))


def _names_the_cpu(*arguments: object) -> bool:
    return any(
        str(argument) == "cpu"
        for argument in arguments
        if isinstance(argument, (str, torch.device))
    )


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
            how = ".item(), float(), or an if" if name == _READ_ONE else name
            raise _HostError(f"reads a value of a tensor on the host ({how})")
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
