"""Which implementation is called, and why; what is left out, and how that is said."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import calls
from kvcache_plugin.manager import BUILT_IN, OWN_DISTRIBUTION, Manager, get_manager
from kvcache_plugin.settings import SWITCHES, Settings, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tests.conftest import Register

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("reference_serves")

CPU = kv.Device("cpu")
DEVICES = (CPU, kv.Device.parse("sm_90"), kv.Device.parse("gfx942"), kv.Device("npu", "npu_v2"))
FORMATS = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
HOOKS = ("quantize_kv", "dequantize_kv", "validate_kv_scales")
INT8 = kv.KVFormat("int8_test", "int8", "int8", 127.0)


class Quantizer:
    """Quantizes on the CPU: its codes are always the same.

    :param supports: what ``supports_kv`` answers; an exception is raised.
    :param answer: what ``quantize_kv`` answers instead; an exception is raised.
    """

    def __init__(self, supports: object = True, answer: object = ...) -> None:
        codes = torch.zeros(2, 32).to(torch.float8_e4m3fn)
        self.result = kv.QuantizedKV(codes, None, torch.ones(1), "fp8_e4m3")
        self.supports = supports
        self.answer = answer
        self.asked: list[tuple[kv.Device, str]] = []
        self.calls = 0

    @kv.hookimpl
    def supports_kv(self, device: kv.Device, kv_cache_dtype: str) -> object:
        self.asked.append((device, kv_cache_dtype))
        return _raise_or_return(self.supports)

    @kv.hookimpl
    def quantize_kv(self, scale: torch.Tensor) -> object:
        self.calls += 1
        self.result = dataclasses.replace(self.result, scale=scale)
        return self.result if self.answer is ... else _raise_or_return(self.answer)


class Everywhere:
    """Has no ``supports_kv``."""

    def __init__(self) -> None:
        self.calls = 0

    @kv.hookimpl
    def quantize_kv(self) -> None:
        self.calls += 1


class Plain:
    """A plugin of plain functions, as a module is one."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class Around:
    """A wrapper, which notes what it sees and hands on what ``change`` makes of it."""

    def __init__(self, change: Callable[[Any], Any] = lambda result: result) -> None:
        self.change = change
        self.seen: list[Any] = []

    @kv.hookimpl(wrapper=True)
    def quantize_kv(self, kv_cache_dtype: str) -> Generator[None, Any, Any]:
        self.seen.append(kv_cache_dtype)
        result = yield
        self.seen.append(result)
        return self.change(result)


class Int8:
    """Adds a format, and quantizes to it."""

    def __init__(self, *formats: object) -> None:
        self.formats = formats or (INT8,)
        self.names: list[str] = []

    @kv.hookimpl
    def kv_formats(self) -> list[object]:
        return list(self.formats)

    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype == INT8.name or "serves int8_test alone"

    @kv.hookimpl
    def quantize_kv(
        self, tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str
    ) -> kv.QuantizedKV:
        self.names.append(kv_cache_dtype)
        return kv.QuantizedKV((tensor / scale).to(torch.int8), None, scale, kv_cache_dtype)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = get_manager().implementations, get_manager().format_names
    yield
    assert (get_manager().implementations, get_manager().format_names) == before


# Who is called


def test_the_last_one_registered_is_called(register: Register) -> None:
    first = register(Quantizer(), "first")
    assert _quantize() is first.result
    second = register(Quantizer(), "second")
    assert _quantize() is second.result
    kv.unregister(second)
    assert _quantize() is first.result
    kv.unregister(first)
    assert _quantize().data.dtype == torch.float8_e4m3fn


def test_explain_lists_them_in_call_order_with_the_reference_last(register: Register) -> None:
    register(Quantizer(), "first")
    register(Quantizer(), "second")
    quantizers = [row for row in kv.explain("cpu", "fp8") if "quantize_kv" in _hooks(row.name)]
    names = [row.name for row in quantizers]
    assert (names[0], names[1], names[-1]) == ("second", "first", "cpu_reference")
    assert [row.name for row in quantizers if row.chosen] == ["second"]


def test_explain_says_what_each_is_chosen_for_and_why(register: Register) -> None:
    plugin = register(Quantizer(), "vendor")
    vendor, reference = _row("vendor"), _row("cpu_reference")
    assert vendor == kv.Explanation(
        "vendor",
        "registered at run time",
        ("quantize_kv",),
        "Quantizes on the CPU: its codes are always the same",
    )
    assert reference.distribution == OWN_DISTRIBUTION
    assert reference.chosen_for == ("dequantize_kv", "validate_kv_scales")
    assert not reference.chosen
    assert reference.reason.endswith("; vendor comes before it for quantize_kv")
    kv.unregister(plugin)
    assert _row("cpu_reference").chosen_for == HOOKS
    assert "comes before" not in _row("cpu_reference").reason


def test_a_policy_is_chosen_for_its_hook_alone(register: Register) -> None:
    doubled = kv.hookimpl(_named("validate_kv_scales", lambda scales: scales.converted(2.0)))
    register(Plain(validate_kv_scales=doubled), "policy")
    scales = kv.validate_kv_scales(0.5, 0.25, kv_cache_dtype="fp8")
    assert (scales.k, scales.v) == (1.0, 0.5)
    assert _row("policy").chosen_for == ("validate_kv_scales",)
    assert _row("cpu_reference").chosen_for == ("quantize_kv", "dequantize_kv")


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_without_supports_kv_a_plugin_takes_part_everywhere(
    register: Register, device: kv.Device, kv_cache_dtype: str
) -> None:
    register(Everywhere(), "everywhere")
    assert _row("everywhere", device, kv_cache_dtype).chosen


def test_a_plugin_without_supports_kv_is_called(register: Register) -> None:
    plugin = register(Everywhere())
    assert _quantize().data.dtype == torch.float8_e4m3fn
    assert plugin.calls == 1


def test_without_a_name_a_module_goes_by_its_own(register: Register) -> None:
    def quantize_kv() -> None: ...

    register(Plain(__name__="vendor.fp8", quantize_kv=kv.hookimpl(quantize_kv)))
    assert _row("vendor.fp8").chosen


# Who is left out, and why


def test_a_reason_leaves_it_out_and_is_shown(register: Register) -> None:
    plugin = register(Quantizer(supports="needs firmware 7"), "vendor")
    assert _quantize().data.dtype == torch.float8_e4m3fn
    assert plugin.calls == 0
    assert _row("vendor").reason == "needs firmware 7"
    assert _row("vendor").chosen_for == ()
    assert _row("cpu_reference").chosen
    assert "vendor" not in _row("cpu_reference").reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "its supports_kv answered None instead of True or the reason why not"),
        (False, "its supports_kv answered False instead of True or the reason why not"),
        ("", "its supports_kv answered '' instead of True or the reason why not"),
        (1, "its supports_kv answered 1 instead of True or the reason why not"),
        (OSError("no\n driver"), "its supports_kv raised OSError: no driver"),
        (KeyError(), "its supports_kv raised KeyError"),
    ],
    ids=repr,
)
def test_an_answer_that_is_none_leaves_it_out(
    register: Register, answer: object, reason: str
) -> None:
    plugin = register(Quantizer(supports=answer), "vendor")
    assert _quantize().data.dtype == torch.float8_e4m3fn
    assert plugin.calls == 0
    row = _row("vendor")
    assert (row.reason, row.chosen_for, row.is_broken) == (reason, (), True)


@pytest.mark.parametrize("supports", [True, "its supports_kv needs firmware 7"])
def test_one_that_says_whether_it_serves_is_not_broken(
    register: Register, supports: object
) -> None:
    register(Quantizer(supports=supports), "vendor")
    assert not _row("vendor").is_broken


def test_supports_kv_that_raises_is_logged_once_for_each_device_and_format(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    register(Quantizer(supports=OSError("no driver")), "vendor")
    for _ in range(3):
        _quantize()
        kv.explain("sm_90", "nvfp4")
    assert [record.getMessage() for record in caplog.records] == [
        f"implementation 'vendor' (registered at run time) is left out for {where}: its "
        "supports_kv raised OSError: no driver [errors#supports-kv-failed]"
        for where in ("fp8_e4m3 on cpu", "nvfp4 on sm_90")
    ]


def test_one_that_is_left_out_does_not_wrap_either(register: Register) -> None:
    wrapper = Around()
    no = kv.hookimpl(_named("supports_kv", lambda: "not here"))
    register(Plain(supports_kv=no, quantize_kv=wrapper.quantize_kv))
    _quantize()
    assert wrapper.seen == []


def test_a_reason_holds_for_hooks_of_any_function_name(register: Register) -> None:
    class Renamed:
        @kv.hookimpl(specname="supports_kv")
        def serves(self) -> str:
            return "not here"

        @kv.hookimpl(specname="quantize_kv")
        def write(self) -> None:
            raise AssertionError("called although it said no")

    register(Renamed(), "renamed")
    assert _row("renamed").reason == "not here"
    _quantize()


# Wrappers


def test_wrappers_run_around_the_chosen_one(register: Register) -> None:
    others = []

    def change(result: kv.QuantizedKV) -> kv.QuantizedKV:
        others.append(dataclasses.replace(result))
        return others[-1]

    wrapper = register(Around(change), "around")
    plugin = register(Quantizer(), "vendor")
    assert _quantize() is others[0]
    assert wrapper.seen == ["fp8_e4m3", plugin.result]
    assert _row("vendor").chosen


def test_a_wrapper_is_not_an_implementation(register: Register) -> None:
    manager = Manager()
    manager.register(Around(), "around")
    with pytest.raises(kv.NoImplementationError, match="no implementation serves this"):
        _call(manager)
    register(Around(), "around")
    assert _row("around").chosen_for == ()


def test_explain_does_not_say_that_anyone_comes_before_a_wrapper(register: Register) -> None:
    register(Around(), "around")
    assert "comes before" not in _row("around").reason


# Arguments


@pytest.mark.parametrize(
    "function",
    [
        lambda: locals(),
        lambda tensor: locals(),
        lambda scale: locals(),
        lambda out, tensor: locals(),
        lambda device, kv_cache_dtype: locals(),
        lambda tensor, scale, kv_cache_dtype, device, out: locals(),
    ],
    ids=["none", "first", "second", "turned", "some", "all"],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_function_gets_the_arguments_that_it_names(
    function: Callable[..., dict[str, Any]], wrapped: bool
) -> None:
    """Whether pluggy calls it, or we do in its place."""
    manager = Manager()
    seen: list[dict[str, Any]] = []

    @functools.wraps(function)
    def quantize_kv(*arguments: Any) -> None:
        seen.append(function(*arguments))

    manager.register(Plain(quantize_kv=kv.hookimpl(_named("quantize_kv", quantize_kv))), "plain")
    if wrapped:
        manager.register(Around(), "around")
    tensor, scale = torch.ones(2, 32), torch.ones(1)
    with pytest.raises(kv.NoImplementationError, match="each implementation passed"):
        calls.quantize(manager, CPU, tensor, scale, "fp8")
    (arguments,) = seen
    assert list(arguments) == list(inspect.signature(function).parameters)
    given = {"tensor": tensor, "scale": scale, "out": None}
    for name, argument in arguments.items():
        assert argument is given[name] if name in given else argument in (CPU, "fp8_e4m3")


def test_a_default_means_what_it_means_to_pluggy() -> None:
    """Which of its releases give the argument by keyword and which leave it out."""
    seen = []

    def quantize_kv(tensor: torch.Tensor, kv_cache_dtype: str = "default") -> None:
        seen.append(kv_cache_dtype)

    manager = Manager()
    manager.register(Plain(quantize_kv=kv.hookimpl(quantize_kv)), "plain")
    for _ in range(2):
        with pytest.raises(kv.NoImplementationError):
            _call(manager)
        manager.register(Around())
    assert seen[0] == seen[1]


# Answers


def test_none_passes_to_the_next(register: Register) -> None:
    second = register(Quantizer(), "second")
    first = register(Quantizer(answer=None), "first")
    assert _quantize() is second.result
    assert (first.calls, second.calls) == (1, 1)


def test_when_every_implementation_passes_the_error_lists_them(register: Register) -> None:
    manager = Manager()
    manager.register(Everywhere(), "first")
    manager.register(Quantizer(answer=None), "second")
    with pytest.raises(kv.NoImplementationError) as caught:
        _call(manager)
    message = str(caught.value)
    assert message.startswith(
        "quantize_kv of fp8_e4m3 on cpu: each implementation passed, or a wrapper kept its result. "
    )
    assert "first (registered at run time): second comes before it" in message
    assert "second (registered at run time): Quantizes on the CPU" in message


def test_with_no_implementation_the_error_lists_each_with_its_reason() -> None:
    manager = Manager()
    with pytest.raises(
        kv.NoImplementationError, match=r"What there is: nothing \[errors#no-implementation\]$"
    ):
        _call(manager)
    manager.register(Quantizer(supports="needs firmware 7"), "vendor")
    with pytest.raises(kv.NoImplementationError) as caught:
        _call(manager)
    assert str(caught.value) == (
        "quantize_kv of fp8_e4m3 on cpu: no implementation serves this. Install or unblock an "
        "implementation for it. What there is: vendor (registered at run time): needs firmware 7 "
        "[errors#no-implementation]"
    )


@pytest.mark.parametrize("error", [ValueError("bad"), kv.KVQuantizeError("bad")], ids=repr)
def test_one_that_raises_is_not_replaced_and_is_named(
    register: Register, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    other = register(Quantizer(), "other")
    register(Quantizer(answer=error), "vendor")
    with pytest.raises(type(error)) as caught:
        _quantize()
    assert caught.value is error
    assert str(error) == "bad"
    assert other.calls == 0
    note = (
        "quantize_kv for fp8_e4m3 on cpu was called in implementation 'vendor' (registered at "
        "run time)"
    )
    if sys.version_info >= (3, 11):
        assert error.__notes__ == [note]
    else:
        assert note in caplog.text


def test_the_one_that_raises_is_named_when_others_stand_around_it(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    register(Quantizer(answer=ValueError("bad")), "vendor")
    register(Around(), "around")
    register(Everywhere(), "passes")
    assert "'vendor'" in _notes_of_failure(caplog)


def test_a_wrapper_that_raises_is_named(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(result: object) -> None:
        raise ValueError(f"cannot use {result}")

    register(Around(fail), "around")
    assert "'around'" in _notes_of_failure(caplog)


def test_a_decorated_function_that_raises_is_named(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    @torch.no_grad()
    def fails() -> None:
        raise ValueError("bad")

    @torch.no_grad()
    def passes() -> None: ...

    # Both are the same function of torch on the outside.
    register(Plain(quantize_kv=kv.hookimpl(fails)), "vendor")
    register(Plain(quantize_kv=kv.hookimpl(passes)), "passes")
    assert "'vendor'" in _notes_of_failure(caplog)


@pytest.mark.parametrize("raises", ["first", "second"])
def test_of_two_instances_of_a_class_the_one_that_raises_is_named(
    register: Register,
    caplog: pytest.LogCaptureFixture,
    raises: str,
) -> None:
    for name in ("first", "second"):
        register(Quantizer(answer=ValueError("bad") if name == raises else None), name)
    assert f"'{raises}'" in _notes_of_failure(caplog)


def test_a_result_that_is_no_quantized_kv_is_refused(register: Register) -> None:
    register(Quantizer(answer=torch.ones(1)), "vendor")
    with pytest.raises(kv.KVCacheError) as caught:
        _quantize()
    # Any that is called may have passed, so the message names each that can have answered.
    assert str(caught.value).startswith(
        "quantize_kv of fp8_e4m3 on cpu answered with torch.float32 of shape (1,) instead of "
        "QuantizedKV; mend "
        "implementation 'vendor' (registered at run time), or if that passed "
        "'cpu_reference' (kvcache-plugin "
    )


def test_a_wrong_result_names_the_implementation_that_gave_it(register: Register) -> None:
    register(Quantizer(answer=3), "second")
    register(Quantizer(answer=None), "first")
    with pytest.raises(kv.KVCacheError, match="'second'"):
        _quantize()


def test_values_that_are_no_tensor_are_refused(register: Register) -> None:
    quantized = _quantize()
    wrong = kv.hookimpl(_named("dequantize_kv", lambda: [1.0]))
    register(Plain(dequantize_kv=wrong), "vendor")
    with pytest.raises(
        kv.KVCacheError, match=r"dequantize_kv of fp8_e4m3 on cpu answered with list .* 'vendor'"
    ):
        kv.dequantize_kv(quantized)


@pytest.mark.parametrize(
    "answer",
    [
        (0.5, 0.5),
        kv.KVScales(torch.ones(2), torch.ones(2), "checkpoint", "checkpoint"),
    ],
    ids=["tuple", "other granularity"],
)
def test_scales_of_another_kind_are_refused(register: Register, answer: object) -> None:
    wrong = kv.hookimpl(_named("validate_kv_scales", lambda: answer))
    register(Plain(validate_kv_scales=wrong), "vendor")
    with pytest.raises(kv.KVCacheError, match=r"answered with .* instead of KVScales .* 'vendor'"):
        kv.validate_kv_scales(0.5, 0.5, kv_cache_dtype="fp8")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, 1e39])
def test_scales_that_a_plugin_spoils_are_refused(register: Register, scale: float) -> None:
    spoilt = kv.KVScales(scale, 0.5, "checkpoint", "checkpoint")
    wrong = kv.hookimpl(_named("validate_kv_scales", lambda: spoilt))
    register(Plain(validate_kv_scales=wrong), "vendor")
    with pytest.raises(kv.KVScaleError, match=r"must be finite and fit in torch\.float32"):
        kv.validate_kv_scales(0.5, 0.5, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    "wrong",
    [
        kv.QuantizedKV(torch.zeros(3), None, torch.ones(1), "fp8_e4m3"),
        kv.QuantizedKV(torch.zeros(2, 32), None, torch.ones(1), "fp8_e4m3"),
        dataclasses.replace(Quantizer().result, kv_cache_dtype="fp8_e5m2"),
        dataclasses.replace(Quantizer().result, block_scales=torch.zeros(2, 2)),
    ],
    ids=["shape", "dtype", "format", "block scales"],
)
def test_a_result_with_another_layout_is_refused(register: Register, wrong: kv.QuantizedKV) -> None:
    """It would be read as garbage later."""
    register(Quantizer(answer=wrong), "vendor")
    with pytest.raises(kv.KVCacheError, match=r"quantize_kv of fp8_e4m3 on cpu .*'vendor'"):
        _quantize()


def test_a_result_beside_the_callers_buffers_is_refused(register: Register) -> None:
    """The buffers would keep their old bytes, without a word."""
    register(Quantizer(), "vendor")
    buffer = torch.zeros(2, 32).to(torch.float8_e4m3fn)
    with pytest.raises(kv.KVCacheError, match=r"buffers of its own .*'vendor'"):
        kv.quantize_kv(torch.ones(2, 32), 1.0, "fp8", out=buffer)


def test_a_scale_of_its_own_is_refused(register: Register) -> None:
    """The caller reads the codes with the scale that it gave."""
    plugin = register(Quantizer(), "vendor")
    plugin.answer = dataclasses.replace(plugin.result, scale=torch.ones(1))
    with pytest.raises(kv.KVCacheError, match=r"a scale of its own .*'vendor'"):
        _quantize()


def test_a_view_of_the_scale_is_the_scale(register: Register) -> None:
    class Views(Quantizer):
        @kv.hookimpl
        def quantize_kv(self, scale: torch.Tensor) -> object:
            return dataclasses.replace(self.result, scale=scale.view(-1))

    register(Views())
    assert _quantize().scale == 1.0


def test_a_refusal_without_a_layer_gets_it(register: Register) -> None:
    def refuse() -> None:
        raise kv.KVScaleError("no scale is good enough", remedy="Give up")

    register(Plain(validate_kv_scales=kv.hookimpl(_named("validate_kv_scales", refuse))), "policy")
    with pytest.raises(kv.KVScaleError) as caught:
        kv.validate_kv_scales(0.5, 0.5, kv_cache_dtype="fp8", layer="layer 3")
    assert str(caught.value) == "layer 3: no scale is good enough. Give up"


class Undocumented:
    @kv.hookimpl
    def quantize_kv(self) -> None:
        return None


class Panic(BaseException):
    """What a binding of another language raises, for one."""


@pytest.mark.parametrize("error", [SystemExit("no driver"), Panic("no driver")], ids=repr)
def test_exits_and_panics_of_supports_kv_are_reasons(
    register: Register, error: BaseException
) -> None:
    register(Quantizer(supports=error), "vendor")
    assert _row("vendor").reason == f"its supports_kv raised {type(error).__name__}: no driver"
    assert _row("cpu_reference").chosen


def test_an_interrupt_of_supports_kv_goes_up(register: Register) -> None:
    register(Quantizer(supports=KeyboardInterrupt()), "vendor")
    with pytest.raises(KeyboardInterrupt):
        _quantize()


def test_a_wrapper_of_supports_kv_that_raises_is_named(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    class Policy:
        @kv.hookimpl(wrapper=True)
        def supports_kv(self) -> Iterator[None]:
            yield
            raise OSError("no licence")

        @kv.hookimpl(wrapper=True)
        def describe_kv(self) -> Iterator[None]:
            yield
            raise OSError("no words")

    register(Quantizer(), "vendor")
    register(Policy(), "policy")
    whose = "of 'policy' (registered at run time), which wraps its own, raised OSError: no"
    for name in ("vendor", "cpu_reference"):
        assert _row(name).reason == f"the supports_kv {whose} licence"
        problem = get_manager().description_problem(name, CPU, "fp8_e4m3")
        assert problem == f"the describe_kv {whose} words"
    left_out = "implementation 'vendor' (registered at run time) is left out for fp8_e4m3 on cpu"
    assert f"{left_out}: the supports_kv {whose} licence" in caplog.text


def test_one_that_raises_through_a_wrapper_of_supports_kv_is_blamed_itself(
    register: Register,
) -> None:
    class Policy:
        @kv.hookimpl(wrapper=True)
        def supports_kv(self) -> Generator[None, Any, Any]:
            return (yield)

    register(Policy(), "policy")
    register(Quantizer(supports=OSError("no driver")), "vendor")
    assert _row("vendor").reason == "its supports_kv raised OSError: no driver"
    assert _row("cpu_reference").chosen


def test_a_wrapper_that_makes_something_else_of_the_answers_is_a_reason(
    register: Register,
) -> None:
    class Agreeable:
        @kv.hookimpl(wrapper=True)
        def supports_kv(self) -> Generator[None, Any, str]:
            yield
            return "never"

    register(Agreeable(), "agreeable")
    assert _row("cpu_reference").reason == "never"


def test_one_without_a_docstring_that_is_chosen_says_so(register: Register) -> None:
    register(Undocumented(), "undocumented")
    assert _row("undocumented").chosen
    assert _row("undocumented").reason == "says that it serves this"


# What is remembered


def test_supports_kv_is_asked_once_for_each_device_and_format(register: Register) -> None:
    plugin = register(Quantizer(), "vendor")
    for _ in range(3):
        _quantize()
        kv.explain("cpu", "fp8")
        kv.validate_kv_scales(0.5, 0.5, kv_cache_dtype="fp8_e4m3", layer="a layer")
    assert plugin.asked == [(CPU, "fp8_e4m3")]
    for _ in range(2):
        kv.explain("cpu", "nvfp4")
        kv.explain("sm_90", "fp8")
        kv.explain(kv.Device("cuda", "sm_90", (9, 0)), "fp8")
    sm_90 = kv.Device.parse("sm_90")
    assert plugin.asked == [(CPU, "fp8_e4m3"), (CPU, "nvfp4"), (sm_90, "fp8_e4m3")]


def test_a_selection_is_forgotten_when_plugins_come_and_go(register: Register) -> None:
    plugin = register(Quantizer(), "vendor")
    _quantize()
    plugin.supports = "unplugged"
    _quantize()
    assert plugin.calls == 2
    other = register(Everywhere())
    _quantize()
    assert plugin.calls == 2
    plugin.supports = True
    _quantize()
    assert plugin.calls == 2
    kv.unregister(other)
    assert _quantize() is plugin.result
    assert len(plugin.asked) == 3


def test_a_plugin_that_is_refused_does_not_disturb_the_selection(register: Register) -> None:
    plugin = register(Quantizer(), "vendor")
    _quantize()
    with pytest.raises(kv.KVCacheError):
        kv.register(object())
    _quantize()
    assert len(plugin.asked) == 1


# Plugins that are broken


class _Unhashable(Everywhere):
    __hash__ = None  # type: ignore[assignment]


class _Misspelt:
    @kv.hookimpl
    def quantise_kv(self) -> None: ...


class _UnknownArgument:
    @kv.hookimpl
    def quantize_kv(self, stream: int) -> None: ...


class _Keyword:
    @kv.hookimpl
    def quantize_kv(self, tensor: torch.Tensor, *, scale: torch.Tensor) -> None: ...


class _KeywordOfAWrapper:
    @kv.hookimpl(wrapper=True)
    def supports_kv(self, *, device: kv.Device, kv_cache_dtype: str) -> Iterator[None]:
        yield


class _Unmarked:
    def quantize_kv(self) -> None: ...


class _RaisingFormats:
    @kv.hookimpl
    def kv_formats(self) -> None:
        raise OSError("no driver")


class _Exiting:
    @kv.hookimpl
    def kv_formats(self) -> list[kv.KVFormat]:
        raise SystemExit("no licence")


class _RaisingDocstring(Everywhere):
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        raise ZeroDivisionError


class Same(Everywhere):
    """Equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def test_a_plugin_that_equals_others_is_not_taken_for_them() -> None:
    plugin = Same()
    with pytest.raises(kv.KVCacheError, match="plugin 'same' cannot be registered"):
        kv.register(plugin, "same")
    with pytest.raises(kv.KVCacheError, match="is not registered"):
        kv.unregister(plugin)
    assert _row("cpu_reference").chosen


@pytest.mark.parametrize("name", [5, ["a"], b"name"])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(kv.KVCacheError, match="its name must be a string"):
        kv.register(Everywhere(), name)


def test_an_empty_name_is_refused() -> None:
    plugin = Everywhere()
    with pytest.raises(kv.KVCacheError, match="cannot be registered: its name is empty"):
        kv.register(plugin, "")
    with pytest.raises(kv.KVCacheError, match="is not registered"):
        kv.unregister(plugin)


def test_keywords_that_need_not_be_given_are_no_problem(register: Register) -> None:
    @kv.hookimpl
    def quantize_kv(tensor: object, *, verbose: bool = False, **others: object) -> None:
        seen.append((verbose, others))

    def given(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(tensor: torch.Tensor) -> None:
            function(tensor, stream=5)

        return call

    @kv.hookimpl
    @given
    def around(tensor: torch.Tensor, *, stream: int) -> None:
        seen.append(stream)

    seen: list[object] = []
    register(Plain(quantize_kv=quantize_kv), "vendor")
    register(Plain(quantize_kv=around), "decorated")
    _quantize()
    assert seen == [5, (False, {})]


def _broken() -> Iterator[Any]:
    yield pytest.param(Everywhere, "Everywhere is a class; give a module or an instance", id="cls")
    yield pytest.param(_Unhashable(), "TypeError: unhashable type", id="unhashable")
    yield pytest.param(object(), "it implements no hook; mark its functions", id="object")
    yield pytest.param(_Unmarked(), "it implements no hook; mark its functions", id="unmarked")
    yield pytest.param(_Misspelt(), "unknown hook 'quantise_kv'", id="misspelt")
    yield pytest.param(_UnknownArgument(), "stream", id="argument")
    said = "its quantize_kv takes scale by keyword alone, and arguments are given by position; take"
    yield pytest.param(_Keyword(), said, id="keyword")
    said = "its supports_kv takes device, kv_cache_dtype by keyword alone"
    yield pytest.param(_KeywordOfAWrapper(), said, id="keyword of a wrapper")
    yield pytest.param(_RaisingFormats(), "OSError: no driver", id="formats raise")
    yield pytest.param(
        Int8("int8"), "its kv_formats gave 'int8' instead of a KVFormat", id="no format"
    )
    float9 = kv.KVFormat("float9_test", "float9", "float9", 1.0)
    yield pytest.param(Int8(float9), "torch has no dtype 'float9'", id="dtype")
    yield pytest.param(_Exiting(), "SystemExit: no licence", id="exit")
    yield pytest.param(_RaisingDocstring(), "ZeroDivisionError", id="docstring")
    taken = "its format 'fp8_e5m2' has a name that is taken"
    yield pytest.param(Int8(INT8, kv.KVFormat("fp8_e5m2", "x", "int8", 1.0)), taken, id="format")
    alias = "its format 'fp8' has a name that is taken"
    yield pytest.param(Int8(kv.KVFormat("fp8", "x", "int8", 1.0)), alias, id="alias")
    yield pytest.param(
        Int8(INT8, INT8),
        "its format 'int8_test' has a name that is taken",
        id="format twice",
    )


@pytest.mark.parametrize(("plugin", "reason"), [*_broken()])
def test_a_broken_plugin_is_refused_and_leaves_no_trace(plugin: object, reason: str) -> None:
    manager = Manager()
    good = Quantizer()
    manager.register(good, "good")
    before = manager.implementations, manager.format_names, manager.explain(CPU, "fp8_e4m3")
    with pytest.raises(kv.KVCacheError, match="plugin 'vendor' cannot be registered: ") as caught:
        manager.register(plugin, "vendor")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    after = manager.implementations, manager.format_names, manager.explain(CPU, "fp8_e4m3")
    assert after == before
    with pytest.raises(kv.KVCacheError, match="is not registered"):
        manager.unregister(plugin)
    manager.register(Everywhere(), "vendor")


@pytest.mark.parametrize("name", ["vendor", "cpu_reference"])
def test_a_name_that_is_taken_is_refused(register: Register, name: str) -> None:
    plugin = register(Quantizer(), "vendor")
    with pytest.raises(kv.KVCacheError, match=rf"'{name}' cannot .* the name is taken by .*choose"):
        kv.register(Quantizer(), name)
    assert _quantize() is plugin.result


def test_a_plugin_is_registered_once(register: Register) -> None:
    plugin = register(Quantizer(), "vendor")
    with pytest.raises(kv.KVCacheError, match="it is registered already, as 'vendor'"):
        kv.register(plugin, "again")
    kv.unregister(plugin)
    register(plugin, "again")
    assert _row("again").chosen


def test_unregister_lists_what_there_is(register: Register) -> None:
    register(Quantizer(), "vendor")
    with pytest.raises(kv.KVCacheError, match=r"is not registered; .*cpu_reference.*vendor"):
        kv.unregister(Quantizer())


# Formats that plugins add


def test_an_added_format_is_listed_and_reaches_its_plugin(register: Register) -> None:
    plugin = register(Int8(), "int8")
    x = torch.tensor([[-2.0, 0.0, 4.0]])
    quantized = kv.quantize_kv(x, 0.5, " INT8_test ")
    assert plugin.names == ["int8_test"]
    assert quantized.data.tolist() == [[-4, 0, 8]]
    assert _row("int8", CPU, "int8_test").chosen
    assert _row("cpu_reference", CPU, "int8_test").chosen_for == ()
    known = r"known names are fp8, fp8_e4m3, .*, int8_test \[errors#format-unknown\]$"
    with pytest.raises(kv.KVQuantizeError, match=known):
        kv.quantize_kv(x, 0.5, "int4")
    with pytest.raises(kv.NoImplementationError, match="dequantize_kv of int8_test on cpu"):
        kv.dequantize_kv(quantized)


def test_an_added_format_checks_what_it_is_given(register: Register) -> None:
    register(Int8(kv.KVFormat("int8_test", "int8", "uint8", 7.0, values_per_element=2)), "int8")
    with pytest.raises(kv.KVQuantizeError, match="int8_test needs a head_dim that is a multiple"):
        kv.quantize_kv(torch.ones(1, 3), 0.5, "int8_test")


def test_the_reason_of_a_plugin_does_not_bring_a_second_place(register: Register) -> None:
    class Bad:
        @kv.hookimpl
        def kv_formats(self) -> list[kv.KVFormat]:
            return [kv.KVFormat("bad", "int8", "int8", -1.0)]

    with pytest.raises(kv.KVCacheError) as caught:
        register(Bad(), "bad")
    assert str(caught.value) == (
        "plugin 'bad' cannot be registered: ValueError: bad: largest must be positive and finite, "
        "got -1.0 [errors#plugin-left-out]"
    )


def test_an_added_format_goes_with_its_plugin(register: Register) -> None:
    plugin = register(Int8())
    kv.explain("cpu", "int8_test")
    kv.unregister(plugin)
    for call in (
        lambda: kv.quantize_kv(torch.ones(1, 2), 0.5, "int8_test"),
        lambda: kv.explain("cpu", "int8_test"),
        lambda: kv.validate_kv_scales(1.0, 1.0, kv_cache_dtype="int8_test"),
    ):
        with pytest.raises(kv.KVCacheError, match="unknown kv_cache_dtype 'int8_test'") as caught:
            call()
        assert not caught.value.problem.endswith("int8_test")
    register(plugin)
    kv.explain("cpu", "int8_test")


class _Interrupted(Manager):
    """Takes a plugin out in another thread, as soon as its format is looked up."""

    def __init__(self, plugin: object) -> None:
        super().__init__()
        self.register(plugin, "vendor")
        self.other = threading.Thread(target=self.unregister, args=[plugin])

    def kv_format(self, kv_cache_dtype: object, device: kv.Device | None = None) -> Any:
        found = super().kv_format(kv_cache_dtype, device)
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.3)
        return found


def test_a_format_that_goes_while_it_is_selected_is_served_or_unknown() -> None:
    x = torch.ones(2, 32)
    manager = _Interrupted(Int8())
    quantized = calls.quantize(manager, CPU, x, 1.0, "int8_test")
    assert quantized.data.dtype == torch.int8
    manager.other.join()
    with pytest.raises(kv.KVQuantizeError, match="unknown kv_cache_dtype 'int8_test'"):
        calls.quantize(manager, CPU, x, 1.0, "int8_test")

    manager = _Interrupted(Int8())
    with pytest.raises(kv.NoImplementationError, match="dequantize_kv of int8_test on cpu"):
        calls.dequantize(manager, CPU, quantized, torch.float32)
    manager.other.join()
    with pytest.raises(kv.KVQuantizeError, match="unknown kv_cache_dtype 'int8_test'"):
        calls.dequantize(manager, CPU, quantized, torch.float32)
    with pytest.raises(kv.KVCacheError, match="no implementation brings 'int8_test' any more"):
        manager.explain(CPU, "int8_test")


def test_an_error_explains_a_format_that_is_gone() -> None:
    manager, plugin = Manager(), Int8()
    manager.register(plugin, "vendor")
    serving = manager.for_dequantizing(CPU, "int8_test")
    assert serving is not None
    manager.unregister(plugin)
    error = manager.no_implementation("dequantize_kv", serving)
    assert "dequantize_kv of int8_test on cpu" in str(error)


def test_a_format_belongs_to_one_plugin(register: Register) -> None:
    first = register(Int8(), "first")
    with pytest.raises(kv.KVCacheError, match="its format 'int8_test' has a name that is taken"):
        kv.register(Int8(), "second")
    kv.quantize_kv(torch.ones(1, 2), 0.5, "int8_test")
    assert first.names == ["int8_test"]


def test_formats_are_added_by_the_hook_and_not_by_the_name_of_a_function(
    register: Register,
) -> None:
    class Renamed:
        @kv.hookimpl(specname="kv_formats")
        def formats(self) -> list[kv.KVFormat]:
            return [INT8]

    class Unmarked(Everywhere):
        def kv_formats(self) -> list[kv.KVFormat]:
            raise AssertionError("called without being marked")

    register(Renamed())
    kv.explain("cpu", "int8_test")
    register(Unmarked())


# Entry points. These are packages as pip leaves them behind: a module, and metadata beside it.


def test_packages_come_after_the_built_in_ones_and_so_are_called_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("alpha", "beta"):
        _package(tmp_path / name, name, _GOOD)
    orders = []
    for first, second in (("alpha", "beta"), ("beta", "alpha")):
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / second)
            patch.syspath_prepend(tmp_path / first)
            manager = Manager()
            manager.discover()
        found = {f.name: f.distribution for f in manager.implementations}
        assert (found["alpha"], found["beta"]) == ("kv-test-alpha 1.0", "kv-test-beta 1.0")
        orders.append([name for name in found if name in ("alpha", "beta", "cpu_reference")])
    # The same order, whatever the order of sys.path.
    assert orders == [["beta", "alpha", "cpu_reference"]] * 2


class _HalfMarked:
    @kv.hookimpl
    def dequantize_kv(self) -> None: ...

    def quantize_kv(self) -> None: ...

    def supports_kv(self) -> bool:
        return True


def test_a_function_like_a_hook_that_is_not_marked_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Manager().register(_HalfMarked(), "half")
    said = (
        "implementation 'half' (registered at run time) has a function {} that is never called, "
        "since it is not marked; put kvcache_plugin.hookimpl above it, or give it another name "
        "[errors#hook-not-marked]"
    )
    assert [record.getMessage() for record in caplog.records] == [
        said.format("supports_kv"),
        said.format("quantize_kv"),
    ]


def test_an_installed_module_is_warned_of_functions_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that it imports are none, nor one that stands beside the hook under another name."""
    source = """
        import torch

        import kvcache_plugin as kv
        from kvcache_plugin import dequantize_kv, validate_kv_scales

        @torch.no_grad()
        def quantize_kv(): ...

        def supports_kv(): ...

        @kv.hookimpl(specname="supports_kv")
        def serves(): return True
    """
    _package(tmp_path, "marked", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    Manager().discover()
    (warning,) = (r.getMessage() for r in caplog.records if "never called" in r.getMessage())
    assert warning.startswith("implementation 'marked' (kv-test-marked 1.0) has a function quan")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import kv_test_nowhere", "it cannot be imported: ModuleNotFoundError: No module"),
        ("raise SystemExit(3)", "it cannot be imported: SystemExit: 3"),
        ("1 +", "it cannot be imported: SyntaxError: invalid syntax"),
        ("", "it implements no hook; mark its functions with kvcache_plugin.hookimpl"),
        ("def __getattr__(name): raise OSError(name)", "it implements no hook"),
    ],
    ids=["dependency", "exit", "syntax", "empty", "getattr"],
)
def test_a_broken_package_is_left_out_with_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: str,
    reason: str,
) -> None:
    _package(tmp_path, "broken", source)
    _package(tmp_path, "healthy", _GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    manager = Manager()
    manager.discover()
    sentence = "implementation 'broken' (kv-test-broken 1.0) is left out: "
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert warning.startswith(sentence + reason)
    (broken,) = (f for f in manager.implementations if f.name == "broken")
    assert f"{broken.left_out} [errors#plugin-left-out]" == warning.removeprefix(sentence)
    assert broken.hooks == ()
    assert manager.implementations[-1] == broken
    chosen = [row.name for row in manager.explain(CPU, "fp8_e4m3") if row.chosen]
    assert chosen == ["healthy"]


def test_a_blocked_package_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _package(tmp_path, "blocked", "raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    manager = Manager(frozenset({"blocked", "rocm_fnuz"}))
    manager.discover()
    left_out = {f.name: f.left_out for f in manager.implementations if f.left_out}
    reason = "blocked by KVCACHE_PLUGIN_BLOCK"
    assert left_out == {"blocked": reason, "rocm_fnuz": reason}
    assert "kv_test_blocked" not in sys.modules
    assert not caplog.records


def test_a_blocked_name_that_nobody_has_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    Manager(frozenset({"cpu_refrence", "rocm_fnuz"})).discover()
    (record,) = caplog.records
    known = ", ".join(BUILT_IN)
    assert record.getMessage() == (
        "KVCACHE_PLUGIN_BLOCK names no implementation: cpu_refrence. The implementations are "
        f"{known} [errors#blocked-name-unknown]"
    )


def test_a_namesake_of_a_broken_package_comes_and_goes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, "vendor", "import kv_test_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    manager = Manager()
    manager.discover()
    before = manager.implementations
    plugin = Everywhere()
    manager.register(plugin, "vendor")
    manager.unregister(plugin)
    assert manager.implementations == before


def test_a_namesake_of_a_broken_package_is_named_when_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _package(tmp_path, "vendor", "import kv_test_nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    manager = Manager()
    manager.discover()
    manager.register(Quantizer(answer=ValueError("bad")), "vendor")
    with pytest.raises(ValueError, match="bad") as caught:
        _call(manager)
    assert "'vendor' (registered at run time)" in _notes(caught.value, caplog)


@pytest.mark.parametrize(
    ("file", "content"),
    [("METADATA", b"Metadata-Version: 2.1\nName: bad\nAuthor: \xff\n"), ("METADATA", None)],
    ids=["not utf-8", "missing"],
)
def test_metadata_that_cannot_be_read_disables_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: bytes | None
) -> None:
    _package(tmp_path, "alpha", _GOOD)
    _package(tmp_path, "zeta", _GOOD)
    metadata = tmp_path / "kv_test_alpha-1.0.dist-info" / file
    metadata.unlink()
    if content is not None:
        metadata.write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    manager = Manager()
    manager.discover()
    found = {f.name: f for f in manager.implementations if not f.left_out}
    assert {"alpha", "zeta", "cpu_reference"} <= set(found)
    assert found["alpha"].distribution == "the module kv_test_alpha"
    assert found["zeta"].distribution == "kv-test-zeta 1.0"


def test_entry_points_that_cannot_be_read_are_left_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _package(tmp_path, "alpha", _GOOD)
    _package(tmp_path, "zeta", _GOOD)
    entry_points = tmp_path / "kv_test_alpha-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[kvcache_plugin]\nthis is no entry point\n")
    monkeypatch.syspath_prepend(tmp_path)
    manager = Manager()
    manager.discover()
    assert {"zeta", "cpu_reference"} <= {f.name for f in manager.implementations}
    if sys.version_info < (3, 12):  # since then importlib.metadata passes over such lines
        assert "cannot be read" in caplog.text


# Threads, imports and interrupts: each in a process that has not used the package yet


def test_threads_that_come_first_get_one_manager(tmp_path: Path) -> None:
    # The package takes its time, so that every thread arrives while it is being imported.
    _package(
        tmp_path,
        "slow",
        """
        import time
        import kvcache_plugin as kv

        time.sleep(0.3)
        asked = []

        @kv.hookimpl
        def supports_kv(kv_cache_dtype):
            asked.append(kv_cache_dtype)
            time.sleep(0.05)
            return True

        @kv.hookimpl
        def quantize_kv(tensor, scale, kv_cache_dtype):
            return kv.QuantizedKV((tensor / scale).char(), None, scale, kv_cache_dtype)

        @kv.hookimpl
        def kv_formats():
            return [kv.KVFormat("int8_test", "int8", "int8", 127.0)]
        """,
    )
    shown = _fresh_process(
        tmp_path,
        """
        import threading
        import torch
        import kvcache_plugin as kv
        from kvcache_plugin import manager

        barrier = threading.Barrier(16, timeout=30)
        x = torch.arange(64.0).reshape(2, 32)
        managers, results, names, errors = set(), set(), set(), []

        def use():
            try:
                barrier.wait()
                quantized = kv.quantize_kv(x, 1.0, "int8_test")
                results.add((*quantized.data.flatten().tolist(), quantized.kv_cache_dtype))
                managers.add(id(manager.get_manager()))
                names.add(tuple(row.name for row in kv.explain("cpu", "nvfp4")))
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=use) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        show = {"managers": len(managers), "results": len(results), "errors": errors}
        show["names"] = [list(found) for found in names]
        import kv_test_slow

        show["asked"] = kv_test_slow.asked
        """,
    )
    assert (shown["managers"], shown["results"], shown["errors"]) == (1, 1, [])
    (names,) = shown["names"]
    assert names[0] == "slow"
    assert sorted(shown["asked"]) == ["int8_test", "nvfp4"]


def test_a_plugin_that_calls_us_while_it_is_imported_sees_what_is_there(tmp_path: Path) -> None:
    _package(
        tmp_path,
        "eager",
        """
        import torch
        import kvcache_plugin as kv

        seen = [row.name for row in kv.explain("cpu", "fp8") if row.chosen]
        codes = kv.quantize_kv(torch.ones(1, 2), 1.0, "fp8").data.tolist()

        @kv.hookimpl
        def quantize_kv(): ...
        """,
    )
    shown = _fresh_process(
        tmp_path,
        """
        import kvcache_plugin as kv

        chosen = [row.name for row in kv.explain("cpu", "fp8") if row.chosen]
        import kv_test_eager

        show = {"seen": kv_test_eager.seen, "codes": kv_test_eager.codes, "chosen": chosen}
        """,
    )
    assert shown == {"seen": ["cpu_fast"], "codes": [[1.0, 1.0]], "chosen": ["eager"]}


def test_a_search_that_was_interrupted_is_made_again(tmp_path: Path) -> None:
    _package(tmp_path, "alpha", "import sys; sys.modules.get('interrupt')()\n" + _GOOD)
    _package(tmp_path, "beta", _GOOD)
    shown = _fresh_process(
        tmp_path,
        """
        import sys
        from kvcache_plugin.manager import get_manager

        def interrupt():
            raise KeyboardInterrupt

        sys.modules["interrupt"] = interrupt
        try:
            get_manager()
        except KeyboardInterrupt:
            sys.modules["interrupt"] = lambda: None
        show = {"names": [found.name for found in get_manager().implementations]}
        """,
    )
    assert shown["names"][:2] == ["beta", "alpha"]


# Switches


def test_without_switches_the_defaults_hold() -> None:
    assert read_settings({"HOME": "/"}) == Settings("strict", frozenset())


def test_the_switches_are_read() -> None:
    found = read_settings(
        {"KVCACHE_PLUGIN_MODE": " Warn", "KVCACHE_PLUGIN_BLOCK": "one, two,,three ,"}
    )
    assert found == Settings("warn", frozenset({"one", "two", "three"}))
    assert read_settings({"KVCACHE_PLUGIN_MODE": "", "KVCACHE_PLUGIN_BLOCK": " "}) == Settings(
        "strict", frozenset()
    )


def test_an_unknown_switch_is_a_problem_that_lists_the_known_ones() -> None:
    found = read_settings({"KVCACHE_PLUGIN_MODES": "off", "KVCACHE_PLUGIN_ZZZ": "1"})
    assert (found.mode, found.block) == ("strict", frozenset())
    known = ", ".join(switch.name for switch in SWITCHES)
    close, far = found.problems
    assert close == (
        "KVCACHE_PLUGIN_MODES is no switch of kvcache_plugin (is KVCACHE_PLUGIN_MODE meant?); the "
        f"switches are {known} [errors#switch-unknown]"
    )
    assert far.startswith("KVCACHE_PLUGIN_ZZZ is no switch of kvcache_plugin")
    assert far.endswith(f"{known} [errors#switch-unknown]")


def test_a_bad_value_is_a_problem_that_lists_the_known_ones() -> None:
    found = read_settings({"KVCACHE_PLUGIN_MODE": "Loud"})
    assert found.mode == "strict"
    assert found.problems == (
        "KVCACHE_PLUGIN_MODE='Loud' is not one of strict, warn, off; strict holds "
        "[errors#switch-value-unknown]",
    )


def test_every_switch_says_what_it_means_and_its_default_is_a_value() -> None:
    for switch in SWITCHES:
        assert switch.name.startswith("KVCACHE_PLUGIN_")
        assert switch.meaning.endswith(".")
        assert switch.values is None or switch.default in switch.values


# Helpers

_GOOD = """
import kvcache_plugin as kv

@kv.hookimpl
def quantize_kv(): ...
"""


def _raise_or_return(answer: object) -> object:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def _quantize() -> kv.QuantizedKV:
    return kv.quantize_kv(torch.ones(2, 32), 1.0, "fp8")


def _call(manager: Manager) -> object:
    """What ``kv.quantize_kv`` does, with a manager of the test's own."""
    return calls.quantize(manager, CPU, torch.ones(2, 32), 1.0, "fp8")


def _row(name: str, device: kv.Device = CPU, kv_cache_dtype: str = "fp8") -> kv.Explanation:
    (row,) = (row for row in kv.explain(device, kv_cache_dtype) if row.name == name)
    return row


def _hooks(name: str) -> tuple[str, ...]:
    return next(found.hooks for found in get_manager().implementations if found.name == name)


def _notes(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    """What was said about an exception: in its notes, or before Python 3.11 in the log."""
    return "\n".join([*getattr(error, "__notes__", ()), caplog.text])


def _notes_of_failure(caplog: pytest.LogCaptureFixture) -> str:
    with pytest.raises(ValueError, match=r"bad|cannot use") as caught:
        _quantize()
    return _notes(caught.value, caplog)


def _package(folder: Path, name: str, source: str) -> None:
    """Leave an installed package ``kv-test-<name>`` in a folder, entry point ``<name>``."""
    metadata = folder / f"kv_test_{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"kv_test_{name}.py").write_text(textwrap.dedent(source))
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv-test-{name}\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[kvcache_plugin]\n{name} = kv_test_{name}\n")


def _fresh_process(site: Path, script: str) -> dict[str, Any]:
    """Run a script where the packages in ``site`` are installed; it leaves its findings in show."""
    switches = {name for name in os.environ if name.startswith("KVCACHE_PLUGIN_")}
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    done = subprocess.run(
        [sys.executable, "-c", f"{textwrap.dedent(script)}\nimport json\nprint(json.dumps(show))"],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
