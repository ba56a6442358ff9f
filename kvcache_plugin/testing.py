"""The conformance kit: proves an implementation against the definition, in three lines of pytest.

```python
from kvcache_plugin.testing import ConformanceSuite


class TestMine(ConformanceSuite):
    implementation = my_module
```

The same checks run without pytest: ``cases(Candidate.of(my_module))`` gives them, and ``Case.run``
a ``Verdict``. ``docs/hooks.md`` tells what is checked, and how far a declared tolerance goes.
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache_plugin.conformance.candidate import Candidate
from kvcache_plugin.conformance.cases import Case, Verdict, cases
from kvcache_plugin.conformance.comparing import Difference, Problem
from kvcache_plugin.errors import KVCacheError, anchored

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

    import torch

    from kvcache_plugin.device import Device

__all__ = ["Candidate", "Case", "ConformanceSuite", "Difference", "Problem", "Verdict", "cases"]


class ConformanceSuite:
    """Every check as a test of its own, ``test_conforms[strides-fp8_e4m3-bfloat16]`` for instance.

    A test is skipped where the implementation leaves each of its inputs to the next one. It never
    may leave what is plain: packed bfloat16 with a scale tensor.

    :cvar implementation: a module, or an instance of a class, with hook functions.
    :cvar torch_device: where tensors live.
    :cvar device: what the implementation is told; by default what ``torch_device`` is. With
        ``Device.parse("sm_90")``, or its name, code for a GPU is tried on the CPU.
    :cvar formats: names of formats; by default all that it says it serves on the device.
    """

    implementation: ClassVar[object] = None
    torch_device: ClassVar[torch.device | str] = "cpu"
    device: ClassVar[Device | str | None] = None
    formats: ClassVar[Sequence[str] | None] = None

    def test_conforms(self, case: Case | None) -> None:
        __tracebackhide__ = True
        if case is None:
            self._cases()  # raises again what stood in the way
            raise AssertionError(
                anchored(
                    "the implementation serves something now, and did not at first",
                    "conformance-unsteady",
                )
            )
        try:
            verdict = case.run(self._candidate())
        except Exception as error:
            # The same one, so that it is no exception "during handling of" another.
            raise error.with_traceback(_from_outside(error))  # noqa: B904
        if verdict.problems:
            found = "\n".join(map(str, verdict.problems))
            what = f"{case}: {case.check.summary}\n{found}"
            raise AssertionError(anchored(what, "conformance-differs"))
        if verdict.skipped:
            raise unittest.SkipTest(anchored(verdict.skipped, "conformance-skipped"))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest, which so need not be imported here."""
        if "case" not in metafunc.fixturenames:
            return
        try:
            found: Sequence[Case | None] = self._cases()
        except KVCacheError:
            # One test that fails with it, and not the collection: the test may be skipped here.
            found = [None]
        ids = ["serves" if case is None else str(case) for case in found]
        metafunc.parametrize("case", found, ids=ids)

    def _cases(self) -> tuple[Case, ...]:
        return cases(self._candidate(), self.formats)

    def _candidate(self) -> Candidate:
        """Made anew for each test, so that each begins alike."""
        if self.implementation is None:
            raise KVCacheError(
                f"{type(self).__name__} has no implementation to test; set `implementation` to a "
                "module, or to an instance of a class, with hook functions",
                name="conformance-nothing-checked",
            )
        return Candidate.of(self.implementation, torch_device=self.torch_device, device=self.device)


def _from_outside(error: Exception) -> TracebackType | None:
    """Its traceback from the frame on that the suite has called, whole where there is none.

    An error of ours tells what the implementation has answered: where we saw that says no more.
    """
    there = error.__traceback__
    while there is not None and _is_between(there.tb_frame):
        there = there.tb_next
    return there if there or isinstance(error, KVCacheError) else error.__traceback__


def _is_between(frame: FrameType) -> bool:
    """Whether code is ours, or of what an implementation is called or decorated by."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("kvcache_plugin", "pluggy", "torch")
