"""K and V in one launch: when that hook is called, and that nobody's quantize_kv is passed by."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import calls
from kvcache_plugin.manager import Manager

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tests.conftest import Register

CPU = kv.Device("cpu")
KEY = torch.linspace(-2, 2, 64).reshape(2, 32)
VALUE = torch.linspace(-3, 3, 96).reshape(3, 2, 16)
NAMES = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4")

every_format = pytest.mark.parametrize("name", NAMES)


class One:
    """Quantizes one tensor, and notes that."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @kv.hookimpl
    def quantize_kv(
        self, tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str
    ) -> kv.QuantizedKV:
        self.seen.append("quantize_kv")
        return _fp8(tensor, scale, kv_cache_dtype)


class Both(One):
    """Quantizes one tensor, or K and V together.

    :param answer: is given the right answer, and returns or raises what the plugin does.
    """

    def __init__(self, answer: Callable[[Any], Any] = lambda right: right) -> None:
        super().__init__()
        self.answer = answer
        self.arguments: dict[str, Any] = {}

    @kv.hookimpl
    def quantize_kv_pair(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        kv_cache_dtype: str,
        device: kv.Device,
        out: Any,
    ) -> Any:
        self.seen.append("quantize_kv_pair")
        self.arguments = {"k_scale": k_scale, "v_scale": v_scale, "device": device, "out": out}
        right = (_fp8(key, k_scale, kv_cache_dtype), _fp8(value, v_scale, kv_cache_dtype))
        return self.answer(right)


class Around:
    """Wraps both hooks, or one of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []


class AroundOne(Around):
    @kv.hookimpl(wrapper=True)
    def quantize_kv(self) -> Generator[None, Any, Any]:
        self.seen.append("quantize_kv")
        return (yield)


class AroundPair(Around):
    @kv.hookimpl(wrapper=True)
    def quantize_kv_pair(self) -> Generator[None, Any, Any]:
        self.seen.append("quantize_kv_pair")
        return (yield)


# What is given back


@every_format
def test_a_pair_is_what_quantize_kv_gives_for_each(name: str) -> None:
    k, v = kv.quantize_kv_pair(KEY, VALUE, 0.01, torch.tensor(0.02), name)
    _same(k, kv.quantize_kv(KEY, 0.01, name))
    _same(v, kv.quantize_kv(VALUE, 0.02, name))


def test_scales_per_head() -> None:
    scale = torch.tensor([0.01, 0.02])
    k, v = kv.quantize_kv_pair(VALUE, VALUE, scale, 0.01, "fp8")
    _same(k, kv.quantize_kv(VALUE, scale, "fp8"))
    _same(v, kv.quantize_kv(VALUE, 0.01, "fp8"))


@every_format
def test_buffers_are_filled(name: str) -> None:
    earlier = kv.quantize_kv_pair(KEY * 0, VALUE * 0, 1.0, 1.0, name)
    k, v = kv.quantize_kv_pair(KEY, VALUE, 0.01, 0.02, name, out=earlier)
    assert (k.data, v.data) == (earlier[0].data, earlier[1].data)
    _same(k, kv.quantize_kv(KEY, 0.01, name))
    _same(v, kv.quantize_kv(VALUE, 0.02, name))


# Who is called


def test_the_pair_of_the_first_one_is_called_with_all_that_it_takes(register: Register) -> None:
    plugin = register(Both(), "both")
    k_out, v_out = (torch.zeros(t.shape).to(torch.float8_e4m3fn) for t in (KEY, VALUE))
    plugin.answer = lambda right: tuple(
        kv.QuantizedKV(buffers.data.copy_(q.data), None, q.scale, q.kv_cache_dtype)
        for q, buffers in zip(right, plugin.arguments["out"], strict=True)
    )
    k, v = kv.quantize_kv_pair(KEY, VALUE, 0.5, torch.tensor(0.25), "fp8", out=(k_out, (v_out,)))
    assert plugin.seen == ["quantize_kv_pair"]
    assert plugin.arguments["k_scale"].tolist() == [0.5]
    assert plugin.arguments["v_scale"].tolist() == [0.25]
    assert plugin.arguments["device"] == CPU
    assert plugin.arguments["out"] == (kv.OutBuffers(k_out), kv.OutBuffers(v_out))
    assert (k.data, v.data) == (k_out, v_out)
    _pair(plugin)
    assert plugin.arguments["out"] is None


def test_a_quantize_kv_that_comes_before_it_is_not_passed_by(register: Register) -> None:
    built_in = register(Both(), "built_in")
    third_party = register(One(), "third_party")
    _pair()
    assert (built_in.seen, third_party.seen) == ([], ["quantize_kv"] * 2)
    assert "quantize_kv_pair" not in _row("built_in").chosen_for
    assert _row("built_in").reason == "third_party comes before it"


def test_of_two_pairs_the_one_of_the_first_is_called(register: Register) -> None:
    second, first = register(Both(), "second"), register(Both(), "first")
    _pair()
    assert (first.seen, second.seen) == (["quantize_kv_pair"], [])
    assert _row("first").chosen_for == ("quantize_kv", "quantize_kv_pair")


def test_a_pair_that_passes_is_not_given_to_another(register: Register) -> None:
    second, first = register(Both(), "second"), register(Both(lambda right: None), "first")
    _pair()
    assert first.seen == ["quantize_kv_pair", "quantize_kv", "quantize_kv"]
    assert second.seen == []


def test_a_pair_without_quantize_kv_beside_it_is_not_called(register: Register) -> None:
    class Lonely:
        @kv.hookimpl
        def quantize_kv_pair(self) -> None:
            raise AssertionError("called")

    register(Lonely(), "lonely")
    _pair()
    assert _row("lonely").chosen_for == ()
    assert _row("lonely").reason == (
        "its quantize_kv_pair would be called where it comes first for quantize_kv, which it lacks"
    )


def test_a_pair_that_does_not_support_the_format_is_not_called(register: Register) -> None:
    class Choosy(Both):
        @kv.hookimpl
        def supports_kv(self) -> str:
            return "not today"

    plugin = register(Choosy(), "choosy")
    _pair()
    assert plugin.seen == []


def test_a_wrapper_of_quantize_kv_is_not_passed_by(register: Register) -> None:
    plugin, around = register(Both(), "both"), register(AroundOne(), "around")
    _pair()
    assert around.seen == plugin.seen == ["quantize_kv"] * 2
    assert _row("both").chosen_for == ("quantize_kv",)
    assert _row("both").reason == (
        "Quantizes one tensor, or K and V together; its quantize_kv_pair is not called, since "
        "around wraps quantize_kv"
    )
    kv.unregister(around)
    _pair()
    assert plugin.seen[2:] == ["quantize_kv_pair"]


def test_a_wrapper_of_the_pair_runs_around_it(register: Register) -> None:
    plugin, around = register(Both(), "both"), register(AroundPair(), "around")
    _pair()
    assert around.seen == plugin.seen == ["quantize_kv_pair"]
    assert _row("around").reason == "wraps quantize_kv_pair"
    kv.unregister(plugin)
    _pair()
    assert around.seen == ["quantize_kv_pair"] * 2  # that of the CPU's own implementation


def test_one_plugin_may_wrap_the_pair_and_have_one_that_is_not_called(register: Register) -> None:
    class Odd(AroundPair):
        @kv.hookimpl(specname="quantize_kv_pair")
        def own(self) -> None:
            raise AssertionError("called")

    around = register(Odd(), "odd")
    plugin = register(Both(), "both")
    _pair()
    assert around.seen == plugin.seen == ["quantize_kv_pair"]


def test_the_choice_is_made_again_when_plugins_come_and_go(register: Register) -> None:
    plugin = register(Both(), "both")
    _pair()
    other = register(One(), "other")
    _pair()
    kv.unregister(other)
    _pair()
    assert plugin.seen == ["quantize_kv_pair"] * 2
    assert other.seen == ["quantize_kv"] * 2


# What is refused


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda right: [*right], " with list instead of a tuple of two QuantizedKV"),
        (lambda right: right[0], " with QuantizedKV instead of a tuple of two QuantizedKV"),
        (lambda right: (*right, None), " with tuple instead of a tuple of two QuantizedKV"),
        (lambda right: (None, right[1]), ", for K, with NoneType instead of QuantizedKV"),
        (lambda right: (right[0], 3), ", for V, with int instead of QuantizedKV"),
        (
            lambda right: right[::-1],
            ", for K, with a result that does not fit: QuantizedKV",
        ),
        (
            lambda right: (right[0], right[0]),
            ", for V, with a result that does not fit: QuantizedKV",
        ),
    ],
    ids=["list", "one", "three", "K none", "V number", "swapped", "K twice"],
)
def test_a_wrong_result_names_the_implementation(
    register: Register, change: Callable[[Any], Any], problem: str
) -> None:
    register(Both(), "other")
    register(Both(change), "both")
    with pytest.raises(kv.KVCacheError) as caught:
        _pair()
    message = str(caught.value)
    assert message.startswith(f"quantize_kv_pair of fp8_e4m3 on cpu answered{problem}")
    mend = "; mend implementation 'both' (registered at run time)"
    assert message.endswith(f"{mend} [errors#wrong-answer]")


def test_buffers_of_its_own_are_refused(register: Register) -> None:
    earlier = _pair()
    register(Both(), "both")
    with pytest.raises(kv.KVCacheError, match=r", for K, with buffers of its own .* 'both'"):
        kv.quantize_kv_pair(KEY, VALUE, 0.5, 0.5, "fp8", out=earlier)


def test_a_pair_that_raises_is_named_and_not_replaced(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    error = ValueError("bad")

    def fail(right: object) -> None:
        raise error

    plugin = register(Both(fail), "both")
    with pytest.raises(ValueError, match="bad") as caught:
        _pair()
    assert caught.value is error
    assert plugin.seen == ["quantize_kv_pair"]
    note = "quantize_kv_pair for fp8_e4m3 on cpu was called in implementation 'both'"
    assert note in "".join(getattr(error, "__notes__", ())) + caplog.text


@pytest.mark.parametrize(("key", "value", "side"), [(None, VALUE, "K"), (KEY, [1.0], "V")])
def test_k_and_v_are_tensors(key: Any, value: Any, side: str) -> None:
    with pytest.raises(kv.KVQuantizeError, match=f"^{side} must be a tensor, got "):
        kv.quantize_kv_pair(key, value, 1.0, 1.0, "fp8")


def test_k_and_v_are_on_one_device() -> None:
    with pytest.raises(
        kv.KVQuantizeError, match=r"on one device .*K is on cpu, V is on meta; call quantize_kv"
    ):
        kv.quantize_kv_pair(KEY, VALUE.to("meta"), 1.0, 1.0, "fp8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((KEY.long(), VALUE, 1.0, 1.0), "K: K or V must be float32"),
        ((KEY, VALUE.long(), 1.0, 1.0), "V: K or V must be float32"),
        ((KEY, VALUE, 0.0, 1.0), "K: the scale must be finite and > 0"),
        ((KEY, VALUE, 1.0, None), "V: the scale must be a number"),
        ((KEY, VALUE, 1.0, torch.ones(1, device="meta")), "V: FP8 scale tensor must already be on"),
    ],
)
def test_a_refusal_says_which_side_it_is(arguments: Any, sentence: str) -> None:
    with pytest.raises(kv.KVQuantizeError, match=f"^{sentence}"):
        kv.quantize_kv_pair(*arguments, "fp8")


def test_nothing_is_written_when_v_is_refused() -> None:
    earlier = _pair()
    before = earlier[0].data.view(torch.uint8).clone()
    with pytest.raises(kv.KVQuantizeError, match=r"^V: "):
        kv.quantize_kv_pair(KEY * 2, VALUE, 0.5, -1.0, "fp8", out=earlier)
    with pytest.raises(kv.KVQuantizeError, match=r"^V: out: data"):
        kv.quantize_kv_pair(KEY * 2, VALUE, 0.5, 0.5, "fp8", out=(earlier[0], KEY))
    assert torch.equal(earlier[0].data.view(torch.uint8), before)


@pytest.mark.parametrize(
    ("out", "kind"),
    [
        (KEY, "Tensor"),
        ([KEY, VALUE], "list"),
        ((KEY,), "tuple of Tensor"),
        ((), "tuple of nothing"),
        ((KEY, None), "tuple of Tensor, NoneType"),
        (kv.OutBuffers(KEY), "OutBuffers of Tensor, NoneType"),
    ],
    ids=["tensor", "list", "one", "none", "half", "buffers of one"],
)
def test_out_is_a_pair(out: Any, kind: str) -> None:
    with pytest.raises(
        kv.KVQuantizeError, match=f"one for K and one for V, got {kind} \\[errors#out-unusable]$"
    ):
        kv.quantize_kv_pair(KEY, VALUE, 1.0, 1.0, "fp8", out=out)


# A manager and a device of the caller's


def test_a_call_takes_a_manager_and_a_device() -> None:
    """So that one implementation can be tried, for hardware that is not there."""
    manager, plugin = Manager(), Both()
    manager.register(plugin, "both")
    gpu = kv.Device.parse("gfx942")
    fnuz = calls.quantize(manager, gpu, KEY, 0.5, "fp8")
    assert fnuz.kv_cache_dtype == "fp8_e4m3fnuz"
    k, v = calls.quantize_pair(manager, gpu, KEY, VALUE, 0.5, 0.5, "fp8")
    assert plugin.seen == ["quantize_kv", "quantize_kv_pair"]
    assert plugin.arguments["device"] == gpu
    _same(k, fnuz)
    assert v.data.dtype == torch.float8_e4m3fnuz
    with pytest.raises(kv.NoImplementationError, match="dequantize_kv of fp8_e4m3fnuz on gfx942"):
        calls.dequantize(manager, gpu, fnuz, torch.float32)
    with pytest.raises(kv.NoImplementationError, match="validate_kv_scales of fp8_e4m3fnuz"):
        calls.convert_scales(
            manager,
            gpu,
            0.5,
            0.5,
            kv_cache_dtype="fp8",
            layer="",
            granularity="tensor",
            num_kv_heads=None,
        )


# What an implementation says of itself


class Described(Both):
    """Quantizes by hand."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.description = answer

    @kv.hookimpl
    def describe_kv(self, device: kv.Device, kv_cache_dtype: str) -> object:
        self.seen.append(f"describe_kv of {kv_cache_dtype} on {device}")
        if isinstance(self.description, BaseException):
            raise self.description
        return self.description


def test_explain_says_how_the_chosen_one_works(register: Register) -> None:
    plugin = register(Described(kv.KVDescription("by a kernel of its own.")), "described")
    assert _row("described").reason == "by a kernel of its own"
    assert plugin.seen == ["describe_kv of fp8_e4m3 on cpu"]
    _pair(plugin)
    assert plugin.seen == ["describe_kv of fp8_e4m3 on cpu", "quantize_kv_pair"]
    register(One(), "other")
    assert _row("described").reason == "other comes before it"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, ""),
        (kv.KVDescription(), ""),
        ("by hand", "; its describe_kv answered 'by hand' instead of a KVDescription"),
        (OSError("no\ndriver"), "; its describe_kv raised OSError: no driver"),
        (SystemExit(3), "; its describe_kv raised SystemExit: 3"),
    ],
    ids=repr,
)
def test_the_docstring_stands_in_for_a_description(
    register: Register, answer: object, problem: str
) -> None:
    register(Described(answer), "described")
    assert _row("described").reason == f"Quantizes by hand{problem}"
    manager = Manager()
    manager.register(Described(answer), "described")
    found = manager.description_problem("described", CPU, "fp8_e4m3")
    assert found == problem.removeprefix("; ")


def test_an_interrupt_of_describe_kv_goes_up(register: Register) -> None:
    register(Described(KeyboardInterrupt()), "described")
    with pytest.raises(KeyboardInterrupt):
        kv.explain("cpu", "fp8")


def test_a_manager_tells_the_description_of_each() -> None:
    manager = Manager()
    described = kv.KVDescription("quickly", kv.KVTolerance(codes=0.25, nan=True))
    manager.register(Described(described), "described")
    manager.register(Described(kv.KVDescription("slowly")), "other")
    manager.register(One(), "silent")
    assert manager.describe("described", CPU, "fp8_e4m3") == described
    assert manager.describe("other", CPU, "fp8_e4m3") == kv.KVDescription("slowly")
    assert manager.describe("silent", CPU, "fp8_e4m3") == kv.KVDescription(
        "Quantizes one tensor, and notes that"
    )
    assert manager.describe("nobody", CPU, "fp8_e4m3") == kv.KVDescription()


def test_by_default_nothing_may_differ() -> None:
    assert kv.KVDescription().tolerance == kv.KVTolerance(0.0, 0.0, False)


@pytest.mark.parametrize("name", ["codes", "block_scales"])
@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_a_tolerance_is_a_fraction(name: str, fraction: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} of a KVTolerance is a fraction from 0 to 1, got"):
        kv.KVTolerance(**{name: fraction})


def test_the_fields_of_a_description_are_checked() -> None:
    with pytest.raises(TypeError, match="nan of a KVTolerance is True or False, got 1"):
        kv.KVTolerance(nan=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="how of a KVDescription is a sentence, got None"):
        kv.KVDescription(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tolerance .* is a KVTolerance, got 0\.1"):
        kv.KVDescription("", 0.1)  # type: ignore[arg-type]


# A function that several plugins share


@kv.hookimpl
def shared(kv_cache_dtype: str) -> None:
    raise ValueError("bad")


class Sharing:
    def __init__(self, supports: object) -> None:
        self.quantize_kv = shared
        self.supports_kv = kv.hookimpl(lambda: supports)


@pytest.mark.parametrize("called", ["first", "second"])
def test_of_plugins_that_share_a_function_the_one_that_was_called_is_named(
    caplog: pytest.LogCaptureFixture, called: str
) -> None:
    manager = Manager()
    for name in ("second", "first"):
        manager.register(Sharing(True if name == called else "not here"), name)
    with pytest.raises(ValueError, match="bad") as caught:
        calls.quantize(manager, CPU, KEY, 1.0, "fp8")
    assert f"in implementation {called!r}" in _notes(caught.value, caplog)


def test_of_plugins_that_share_a_function_the_first_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = Manager()
    for name in ("second", "first"):
        manager.register(Sharing(True), name)
    with pytest.raises(ValueError, match="bad") as caught:
        calls.quantize(manager, CPU, KEY, 1.0, "fp8")
    assert "in implementation 'first'" in _notes(caught.value, caplog)


def test_of_plugins_that_share_a_function_one_may_pass_and_the_other_be_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([None, ValueError("bad")])

    @kv.hookimpl
    def quantize_kv() -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    manager = Manager()
    for name in ("second", "first"):
        plugin = Sharing(True)
        plugin.quantize_kv = quantize_kv
        manager.register(plugin, name)
    with pytest.raises(ValueError, match="bad") as caught:
        calls.quantize(manager, CPU, KEY, 1.0, "fp8")
    assert "in implementation 'second'" in _notes(caught.value, caplog)


# Helpers


def _fp8(tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> kv.QuantizedKV:
    dtype = torch.float8_e4m3fnuz if kv_cache_dtype.endswith("fnuz") else torch.float8_e4m3fn
    return kv.QuantizedKV((tensor / scale).to(dtype), None, scale, kv_cache_dtype)


def _pair(plugin: object = None) -> tuple[kv.QuantizedKV, kv.QuantizedKV]:
    if isinstance(plugin, Both):
        plugin.answer = lambda right: right
    return kv.quantize_kv_pair(KEY, VALUE, 0.5, 0.5, "fp8")


def _row(name: str) -> kv.Explanation:
    return next(row for row in kv.explain("cpu", "fp8") if row.name == name)


def _same(one: kv.QuantizedKV, other: kv.QuantizedKV) -> None:
    assert one.kv_cache_dtype == other.kv_cache_dtype
    for name in ("data", "block_scales", "scale"):
        left, right = getattr(one, name), getattr(other, name)
        if left is None:
            assert right is None
        else:
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _notes(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    """What was said about an exception: in its notes, or before Python 3.11 in the log."""
    if sys.version_info >= (3, 11):
        return "\n".join(getattr(error, "__notes__", ()))
    return caplog.text
