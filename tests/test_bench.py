"""``kvcache-plugin bench``: who is timed, how, and what is said of it. No time is asserted that is
not a fake clock's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import cli, formats, manager
from kvcache_plugin.bench import contestants, inputs, run, text
from kvcache_plugin.bench.as_json import as_json
from kvcache_plugin.bench.inputs import Inputs
from kvcache_plugin.bench.peers import all_peers
from kvcache_plugin.bench.timing import Spread, Stopwatch
from kvcache_plugin.hardware import cpu_reference
from kvcache_plugin.hosts import peers
from kvcache_plugin.hosts.peers import AbsentPeerError, Peer
from kvcache_plugin.hosts.seams import Seam
from tests.json_page import is_of, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")
HARDWARE = kv.Device("cpu")
PAGE = (Path(__file__).resolve().parents[1] / "docs" / "performance.md").read_text("utf-8")


class FakeClock:
    """Stands still, until somebody says how long something took."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few inputs and implementations, short rounds, and no switch of the caller."""
    for name in [name for name in os.environ if name.startswith("KVCACHE_PLUGIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(manager, "BUILT_IN", ("cpu_reference", "cuda_sm90"))
    monkeypatch.setattr(manager, "_manager", None)
    monkeypatch.setattr(manager, "_begun", None)
    monkeypatch.setattr(inputs, "_MOST_BYTES", 64 << 10)
    monkeypatch.setattr(run, "_ROUND_SECONDS", 1e-5)
    monkeypatch.setattr(run, "_MOST_CALLS", 3)


class Theirs:
    """Theirs: as the reference, and as long as it is told.

    :param seconds: of each call; given the number of tokens and that of the call.
    """

    def __init__(
        self,
        clock: FakeClock | None = None,
        seconds: Callable[[int, int], float] = lambda tokens, call: 0.01,
    ) -> None:
        self.clock = clock
        self.seconds = seconds
        self.calls = 0
        self.seen: list[torch.Tensor] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    @kv.hookimpl
    def supports_kv(self, device: kv.Device, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype == "fp8_e4m3" or f"does not serve {kv_cache_dtype}"

    @kv.hookimpl
    def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
        if self.clock is not None:
            self.clock.now += self.seconds(len(tensor), self.calls)
        self.calls += 1
        self.seen.append(tensor)
        return cpu_reference.quantize_kv(tensor, scale, kv_cache_dtype, HARDWARE, out)


class Raises(Theirs):
    error: BaseException = OSError("the driver\ndoes not answer")
    least_tokens = 0

    @kv.hookimpl
    def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
        if len(tensor) >= self.least_tokens:
            raise self.error
        return super().quantize_kv(tensor, scale, kv_cache_dtype, out)


class Exits(Raises):
    error = SystemExit(3)


class RaisesOnMany(Raises):
    least_tokens = 4


class Passes(Theirs):
    @kv.hookimpl
    def quantize_kv(self) -> Any:
        return None


def results(bench: run.Bench, direction: str = "quantize") -> dict[str, run.Row]:
    (found,) = (each for each in bench.contests if each.contest.direction == direction)
    return {row.contestant.name: row for row in found.rows}


def timed(**options: Any) -> run.Bench:
    return run.run(CPU, **{"kv_cache_dtypes": ("fp8",), "tokens": (1, 4), **options})


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    status = cli.main(["bench", "--device", "cpu", "--json", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, json.loads(captured.out, parse_constant=refuse)


# Who is timed


def test_implementations_that_are_not_chosen_are_timed_too(install: Any) -> None:
    theirs = Theirs()
    install(theirs=theirs)
    rows = results(timed())
    assert list(rows) == ["copy", "plain_torch", "theirs", "cpu_reference"]
    assert theirs.calls > 10
    for row in rows.values():
        assert [one.outcome for one in row.timings] == ["timed", "timed"], row
    # It has no dequantize_kv of its own.
    assert list(results(timed(), "dequantize")) == ["copy", "plain_torch", "cpu_reference"]


@pytest.mark.usefixtures("install")
def test_plain_torch_of_nvfp4_is_the_reference() -> None:
    bench = timed(kv_cache_dtypes=("nvfp4",))
    for direction in ("quantize", "dequantize"):
        assert list(results(bench, direction)) == ["copy", "cpu_reference"]


@pytest.mark.usefixtures("install")
def test_each_format_is_timed_once_whatever_it_is_called() -> None:
    bench = timed(kv_cache_dtypes=("fp8", "fp8_e4m3", "fp8_e5m2"), tokens=(1,))
    names = [(each.contest.kv_cache_dtype, each.contest.direction) for each in bench.contests]
    directions = ("quantize", "dequantize")
    assert names == [(f, d) for f in ("fp8_e4m3", "fp8_e5m2") for d in directions]


def test_a_format_of_another_package_is_timed(install: Any) -> None:
    class Wide(Theirs):
        @kv.hookimpl
        def kv_formats(self) -> Any:
            return [kv.KVFormat("wide", "wide", "float16", 65504.0)]

        @kv.hookimpl
        def supports_kv(self, kv_cache_dtype: str) -> bool | str:
            return kv_cache_dtype == "wide" or "serves wide"

        @kv.hookimpl
        def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
            data = (tensor.float() / scale).half()
            data = data if out is None else out.data.copy_(data)
            return kv.QuantizedKV(data, None, scale, kv_cache_dtype)

    install(wide=Wide())
    bench = timed(kv_cache_dtypes=("wide",))
    assert list(results(bench)) == ["copy", "wide"]
    assert bench.contests[0].contest.bytes_written == 2 * 8 * 128
    absent = {absent.name: absent for absent in bench.contests[0].contest.absent}
    assert absent["cpu_reference"].reason == "does not know wide, which another one brings"
    assert bench.succeeded


@pytest.mark.usefixtures("install")
def test_the_same_memory_is_moved_as_the_copy_moves() -> None:
    bench = timed(kv_cache_dtypes=("fp8", "nvfp4"), tokens=(1,))
    moved = [(each.contest.bytes_read, each.contest.bytes_written) for each in bench.contests]
    values = 8 * 128
    fp4 = values // 2 + values // 16
    assert moved == [(2048, values), (values, 2048), (2048, fp4), (fp4, 2048)]
    copy = contestants._copy(2048 + fp4).prepare(Inputs.of(4, CPU))
    copied: Any = copy(0)
    assert copied.nbytes == 4 * (2048 + fp4) // 2


# How it is timed


def test_a_call_takes_what_the_clock_says(install: Any, clock: FakeClock) -> None:
    install(theirs=Theirs(clock, lambda tokens, call: 0.001 * tokens))
    one, four = results(timed(clock=clock))["theirs"].timings
    assert one.us == one.wall_us == Spread(*(3 * [pytest.approx(1000)]))
    assert four.us is not None
    assert four.us.median == pytest.approx(4000)
    assert four.gb_per_s == pytest.approx(4 * 8 * 128 * 2 / 0.004 / 1e9)
    assert four.first_us == pytest.approx(4000)
    assert (four.calls, four.rounds) == (1, run._ROUNDS)


def test_quartiles_are_those_of_the_rounds(install: Any, clock: FakeClock) -> None:
    # After two calls that warm up, rounds of 0, 10, … 100 ms.
    install(theirs=Theirs(clock, lambda tokens, call: 0.01 * (call - 2) if call > 1 else 0.05))
    (one,) = results(timed(clock=clock, tokens=(1,)))["theirs"].timings
    assert (one.calls, one.rounds) == (1, 11)
    assert one.us is not None
    quartiles = (one.us.low_quartile, one.us.median, one.us.high_quartile)
    assert quartiles == pytest.approx((25_000, 50_000, 75_000))


def test_the_copy_is_what_the_others_are_measured_by(
    install: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(bytes_moved: int) -> contestants.Contestant:
        def prepare(_: Inputs) -> Any:
            return lambda i: setattr(clock, "now", clock.now + 0.002)

        return contestants.Contestant("copy", "copy", "", "", prepare)

    monkeypatch.setattr(contestants, "_copy", copy)
    install(theirs=Theirs(clock, lambda tokens, call: 0.008))
    rows = results(timed(clock=clock))
    assert [one.of_copy for one in rows["theirs"].timings] == pytest.approx([0.25, 0.25])
    assert [one.of_copy for one in rows["copy"].timings] == pytest.approx([1, 1])
    # No time at all is no ratio.
    assert rows["cpu_reference"].timings[0].of_copy is None


def test_contestants_take_turns_and_so_does_the_first(install: Any, clock: FakeClock) -> None:
    order: list[str] = []

    class Tells(Theirs):
        def __init__(self, name: str) -> None:
            super().__init__(clock)
            self.name = name

        @kv.hookimpl
        def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
            order.append(self.name)
            return super().quantize_kv(tensor, scale, kv_cache_dtype, out)

    install(a=Tells("a"), b=Tells("b"))
    timed(clock=clock, tokens=(1,))
    rounds = order[4:]  # each is called twice before
    assert len(rounds) == 2 * run._ROUNDS
    turns = {tuple(rounds[i : i + 2]) for i in range(0, len(rounds), 2)}
    assert turns == {("a", "b"), ("b", "a")}


def test_inputs_are_taken_in_turns(install: Any) -> None:
    theirs = Theirs()
    install(theirs=theirs)
    row = results(timed(tokens=(4,)))["theirs"]
    (one,) = row.timings
    assert one.inputs == (64 << 10) // (4 * 8 * 128 * 2) == 8
    places = [tensor.data_ptr() for tensor in theirs.seen[2:]]
    assert len(set(places[:8])) == one.inputs
    assert places[8:] == places[:-8] != []


def test_inputs_fill_the_cache_twice_as_far_as_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = 16 * 8 * 128 * 2
    monkeypatch.setattr(inputs, "_MOST_BYTES", 512 << 20)
    monkeypatch.setattr(inputs, "last_cache_bytes", lambda device: 5 * one)
    assert Inputs.of(16, CPU).count == 10
    assert Inputs.of(1024, CPU).count == 2
    assert Inputs.of(1, CPU).count == 160
    monkeypatch.setattr(inputs, "last_cache_bytes", lambda device: 1 << 40)
    assert Inputs.of(1, CPU).count == inputs._MOST_INPUTS
    assert Inputs.of(65_536, CPU).count == 4


def test_keys_have_values_and_codes_are_those_of_the_keys() -> None:
    few = Inputs.of(4, CPU)
    key = few.keys[1]
    assert key.shape == (4, 8, 128)
    assert key.dtype is torch.bfloat16
    assert 0.9 < key.float().std() < 1.1
    for kv_format in formats.BUILT_IN:
        scale = few.scale(kv_format)
        whole = kv.quantize_kv(few.first_tokens, scale, kv_format.name)
        expected = kv.quantize_kv(key, scale, kv_format.name)
        found, buffers = few.codes(whole)[1], few.empty(kv_format)[1]
        for part in ("data", "block_scales"):
            ours, theirs = getattr(found, part), getattr(expected, part)
            if theirs is None:
                assert ours is getattr(buffers, part) is None
                continue
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            assert getattr(buffers, part).shape == theirs.shape
        # The largest magnitude has the largest code, or nearly: the scale uses the format.
        largest = whole.data.float().abs().max() if kv_format.family == "fp8" else kv_format.largest
        assert largest == kv_format.largest


def test_events_time_a_gpu(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    did: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            did.append("record")

        def elapsed_time(self, end: Event) -> float:
            return 6.0

    class Module:
        @staticmethod
        def synchronize(device: object) -> None:
            did.append("wait")

    def call(number: int) -> None:
        did.append(f"call {number}")
        clock.now += 0.005

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    sample = Stopwatch(torch.device("cuda:0"), clock).time(call, [3, 0])
    assert did == ["wait", "record", "call 3", "call 0", "record", "wait"]
    assert sample == pytest.approx((0.003, 0.005))


def test_spread_of_one_sample_is_that_sample() -> None:
    assert Spread.of([2e-6]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([1e-6, 2e-6, 3e-6, 4e-6, 5e-6]) == Spread(2.0, 3.0, 4.0)


# When the time is used up


def test_what_is_slow_is_given_up_and_the_others_go_on(install: Any, clock: FakeClock) -> None:
    install(theirs=Theirs(clock, lambda tokens, call: 0.1 * tokens))
    bench = timed(clock=clock, tokens=(1, 2, 64, 1024))
    theirs, reference = (results(bench)[name].timings for name in ("theirs", "cpu_reference"))
    assert [one.outcome for one in theirs] == ["timed", "timed", "given up", "given up"]
    assert theirs[2].reason.startswith("a call takes 6.4 s, 3 rounds are needed, and ")
    assert theirs[2].us is theirs[2].gb_per_s is theirs[2].of_copy is None
    assert {one.outcome for one in reference} == {"timed"}
    # Of 40 s each direction has a half; at 64 tokens nothing was called.
    assert clock.now < run._MOST_FOR_ONE * 40 / 2
    assert bench.succeeded


def test_fewer_rounds_do_when_time_runs_out(install: Any, clock: FakeClock) -> None:
    install(theirs=Theirs(clock, lambda tokens, call: 2.0))
    (one,) = results(timed(clock=clock, tokens=(1,)))["theirs"].timings
    assert one.outcome == "timed"
    assert run._FEWEST_ROUNDS <= one.rounds < run._ROUNDS


def test_one_call_tells_that_there_is_no_time_for_more(install: Any, clock: FakeClock) -> None:
    theirs = Theirs(clock, lambda tokens, call: 30.0)
    install(theirs=theirs)
    (one,) = results(timed(clock=clock, tokens=(1,)))["theirs"].timings
    assert one.outcome == "given up"
    assert theirs.calls == 2


def test_what_a_first_call_takes_longer_is_on_no_account(install: Any, clock: FakeClock) -> None:
    install(theirs=Theirs(clock, lambda tokens, call: 0.001 if call else 100.0))
    one, four = results(timed(clock=clock))["theirs"].timings
    assert (one.outcome, four.outcome) == ("timed", "timed")
    assert one.first_us == pytest.approx(1e8)
    assert one.us == Spread(*(3 * [pytest.approx(1000)]))


# What goes wrong


@pytest.mark.parametrize(
    ("implementation", "said"),
    [
        (Raises(), "OSError: the driver does not answer"),
        (Exits(), "SystemExit: 3"),
        (Passes(), "PassedError: it passes on K and V that it says it serves"),
    ],
)
def test_one_that_raises_is_told_and_the_others_go_on(
    install: Any, capsys: pytest.CaptureFixture[str], implementation: Any, said: str
) -> None:
    install(theirs=implementation)
    status, found = run_json(capsys, "--kv-cache-dtype", "fp8", "--tokens", "1,4")
    assert status == cli.WRONG
    rows = {row["name"]: row["timings"] for row in found["contests"][0]["contestants"]}
    assert [(one["outcome"], one["reason"]) for one in rows["theirs"]] == 2 * [("raised", said)]
    assert {one["outcome"] for one in rows["cpu_reference"]} == {"timed"}
    assert cli.main(["bench", "--kv-cache-dtype", "fp8", "--tokens", "1,4"]) == cli.WRONG
    printed = capsys.readouterr().out
    assert f"\ntheirs: raised at 1, 4 tokens: {said}\n" in printed


def test_one_that_raises_on_many_has_the_times_of_few(install: Any) -> None:
    install(theirs=RaisesOnMany())
    bench = timed(tokens=(1, 2, 4, 8))
    outcomes = [one.outcome for one in results(bench)["theirs"].timings]
    assert outcomes == ["timed", "timed", "raised", "raised"]
    assert not bench.succeeded


def test_a_broken_one_is_told_and_the_others_go_on(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class SupportsRaises(Theirs):
        @kv.hookimpl
        def supports_kv(self) -> bool | str:
            raise OSError("no driver")

    install(theirs=SupportsRaises(), others=ImportError("no kernels"))
    assert cli.main(["bench", "--tokens", "1", "--kv-cache-dtype", "fp8"]) == cli.WRONG
    printed = capsys.readouterr().out
    assert "\ntheirs: its supports_kv raised OSError: no driver\n" in printed
    assert "\nothers: it cannot be imported: ImportError: no kernels\n" in printed
    assert "cpu_reference" in printed
    assert re.search(r"; load average \d+\.\d, this command included$", printed, re.MULTILINE)


@pytest.mark.usefixtures("install")
def test_with_nothing_to_time_it_does_not_succeed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cpu_reference")
    status, found = run_json(capsys, "--tokens", "1", "--kv-cache-dtype", "nvfp4")
    assert status == cli.WRONG
    absent = {absent["name"]: absent for absent in found["contests"][0]["absent"]}
    assert absent["cpu_reference"]["reason"].startswith("blocked by")
    assert not absent["cpu_reference"]["is_broken"]
    assert absent["cuda_sm90"]["reason"] == "serves CUDA from sm_80 to sm_90, and this is cpu"


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "toaster"], "unknown device 'toaster'"),
        (["--device", "sm_90"], "there is no sm_90 on this machine"),
        (["--device", "cpu", "--kv-cache-dtype", "fp9"], "unknown kv_cache_dtype 'fp9'; known"),
        (["--device", "cpu", "--kv-cache-dtype", "fp8,auto"], "'auto' (a cache that is not"),
    ],
)
def test_what_is_unknown_is_2(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *arguments]) == cli.MISUSED
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--tokens", text] for text in ("", "0", "1,", "-1", "1.5", "many")]
    + [["--kv-cache-dtype", text] for text in ("", "fp8,")],
)
def test_wrong_use_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", *arguments])
    assert exit_.value.code == cli.MISUSED
    assert arguments[0] in capsys.readouterr().err


# Peers


def peer(name: str, quantize: Any, **more: Any) -> Peer:
    known = {"kinds": ("cpu",), "formats": ("fp8_e4m3",), "version": "1.0", **more}
    return Peer(name, f"how {name} does it", "Somebody", quantize=quantize, **known)


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch, install: Any) -> Callable[..., None]:
    def meet(*found: Peer) -> None:
        monkeypatch.setattr(contestants, "all_peers", lambda: found)

    return meet


def test_peers_are_asked_for(meet: Any) -> None:
    meet(peer("them", lambda keys, scale, kv_format: lambda i: keys[i]))
    assert "them" not in results(timed())
    rows = results(timed(with_peers=True))
    assert [one.outcome for one in rows["them"].timings] == ["timed", "timed"]
    assert rows["them"].contestant.distribution == "Somebody 1.0"
    assert "them" not in results(timed(with_peers=True), "dequantize")


def test_a_call_for_k_and_v_counts_half(meet: Any, clock: FakeClock) -> None:
    def quantize(keys: Any, scale: torch.Tensor, kv_format: str) -> Any:
        assert (len(keys), keys[0].shape, keys[0].dtype) == (8, (4, 8, 128), torch.bfloat16)
        assert (scale.shape, scale.dtype, kv_format) == ((1,), torch.float32, "fp8_e4m3")
        return lambda i: setattr(clock, "now", clock.now + 0.004)

    meet(peer("both", quantize, sides=2))
    (one,) = results(timed(clock=clock, tokens=(4,), with_peers=True))["both"].timings
    assert one.us == Spread(*(3 * [pytest.approx(2000)]))
    assert one.gb_per_s == pytest.approx(4 * 2048 / 0.002 / 1e9)


def test_a_peer_never_breaks_the_run(meet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(*_: Any) -> Any:
        raise AbsentPeerError("its op is not built")

    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    meet(
        peer("gone", absent),
        peer("failing", fails),
        peer("late", lambda *_: fails),
        peer("missing", absent, version=None),
        peer("elsewhere", absent, kinds=("cuda",)),
    )
    arguments = ["bench", "--device", "cpu", "--tokens", "1", "--kv-cache-dtype", "fp8", "--peers"]
    assert cli.main(arguments) == cli.FINE
    printed = capsys.readouterr().out
    assert "\ngone: not here: its op is not built\n" in printed
    assert "\nfailing: raised at 1 tokens: RuntimeError: no kernel\n" in printed
    assert "\nlate: raised at 1 tokens: RuntimeError: no kernel\n" in printed
    assert "\nmissing: not installed\n" in printed
    assert "elsewhere" not in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["1", "cpu_reference"] in [row[:2] for row in rows]


def test_the_peers_that_we_know_are_told_where_they_are_not_installed(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    known = all_peers()
    assert {each.name for each in known} == {
        *("torchao", "vllm_cpu", "vllm_cuda", "sglang_cpu_fp8", "sglang_fp4"),
    }
    status, found = run_json(capsys, "--tokens", "1", "--peers")
    assert status == cli.FINE
    absent = [
        (contest["kv_cache_dtype"], contest["direction"], one["name"], one["reason"])
        for contest in found["contests"]
        for one in contest["absent"]
        if one["kind"] == "peer"
    ]
    expected = [
        ("fp8_e4m3", "quantize", "vllm_cpu"),
        ("fp8_e4m3", "quantize", "sglang_cpu_fp8"),
        ("nvfp4", "quantize", "torchao"),
        ("nvfp4", "quantize", "sglang_fp4"),
        ("nvfp4", "dequantize", "torchao"),
        ("nvfp4", "dequantize", "sglang_fp4"),
    ]
    installed = {each.name for each in known if each.version is not None}
    left = [one for one in expected if one[2] not in installed]
    assert absent == [(*one, "not installed") for one in left]


@pytest.mark.parametrize(
    ("module", "qualname", "said"),
    [
        ("no_such_engine.ops", "write", "no_such_engine.ops cannot be imported: ModuleNotFound"),
        ("json", "write", "json.write is missing"),
        ("json", "dumps", "json.dumps has another signature"),
    ],
)
def test_a_peer_whose_function_is_another_one_is_absent(
    module: str, qualname: str, said: str
) -> None:
    with pytest.raises(AbsentPeerError, match=said):
        peers._found(Seam("json", module, qualname, ("key",), ""))


# What is said


@pytest.mark.usefixtures("install")
def test_a_line_for_each_number_of_tokens_and_contestant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--device", "cpu", "--kv-cache-dtype", "fp8", "--tokens", "4,1,1"]
    assert cli.main(["bench", *arguments]) == cli.FINE
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    title = "quantize fp8_e4m3: for a token 2048 bytes are read and 1024 written"
    start = lines.index(title) + 1
    assert lines[start].split() == [
        *("tokens", "name", "µs", "a", "call", "quartiles", "GB/s", "of", "the", "copy"),
    ]
    names = ("copy", "plain_torch", "cpu_reference")
    cells = [line.split()[:2] for line in lines[start + 1 : start + 7]]
    assert cells == [[tokens, name] for tokens in "14" for name in names]
    assert lines[start + 7] == ""
    assert any(line.startswith("cpu_reference  kvcache-plugin ") for line in lines)
    assert lines[-1].startswith("timed in ")


@pytest.mark.usefixtures("install")
def test_a_gpu_has_the_clock_beside_its_own_time() -> None:
    bench = timed(tokens=(1,))
    assert "µs by the clock" not in text.columns(bench)
    bench = replace(bench, machine=replace(bench.machine, arch="sm_90"))
    assert text.columns(bench)[-1] == "µs by the clock"
    assert {len(line) for line in text.lines(bench.contests[0], bench)} == {7}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123, "0.012"), (0.5, "0.50"), (9.876, "9.88"), (98.76, "98.8"), (1234567.0, "1,234,567")],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert text.number(value) == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_is_shown_how_far_it_is(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    arguments = ["bench", "--device", "cpu", "--kv-cache-dtype", "fp8", "--tokens", "1"]
    assert cli.main(arguments) == cli.FINE
    assert "timing" in terminal.getvalue()
    assert ("timing: 22 of 22" in terminal.getvalue()) is not has_rich
    assert "cpu_reference" in capsys.readouterr().out


@pytest.mark.usefixtures("install")
def test_with_json_nothing_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    arguments = ["bench", "--device", "cpu", "--kv-cache-dtype", "fp8", "--tokens", "1", "--json"]
    assert cli.main(arguments) == cli.FINE
    assert terminal.getvalue() == ""
    assert json.loads(capsys.readouterr().out)["succeeded"]


def objects(found: Any) -> Iterator[tuple[str, Any]]:
    yield "Run", found
    yield "Machine", found["machine"]
    for contest in found["contests"]:
        yield "Contest", contest
        for absent in contest["absent"]:
            yield "Absent", absent
        for contestant in contest["contestants"]:
            yield "Contestant", contestant
            for timing_ in contestant["timings"]:
                yield "Timing", timing_
                for spread in ("us", "wall_us"):
                    if timing_[spread] is not None:
                        yield "Spread", timing_[spread]


def test_json_is_what_the_page_says(install: Any, clock: FakeClock) -> None:
    install(theirs=RaisesOnMany(), others=ImportError("no kernels"))
    fields = schema(PAGE, "`bench --json`")
    bench = timed(clock=clock, tokens=(1, 4), with_peers=True)
    timed_ = json.loads(json.dumps(as_json(bench), allow_nan=False))
    seen = set()
    for name, found in objects(timed_):
        seen.add(name)
        assert set(found) == set(fields[name]), name
        for field, value in found.items():
            assert is_of(fields[name][field], value), (name, field, value)
    assert seen == set(fields)
    assert timed_["schema"] == 1
    assert timed_["tokens"] == [1, 4]


def test_the_clock_is_that_of_the_process_by_default() -> None:
    sample = Stopwatch(CPU).time(lambda i: None, [0, 1])
    assert sample.wall == sample.device >= 0
