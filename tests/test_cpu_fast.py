"""The C kernels of the CPU: the reference's bits everywhere, and a reason where they cannot be."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import kvcache_plugin as kv
from kvcache_plugin.conformance import inputs
from kvcache_plugin.hardware import cpu_check, cpu_fast, cpu_launch, cpu_library, cpu_reference
from kvcache_plugin.testing import ConformanceSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CPU = kv.Device("cpu")
NVFP4 = "nvfp4"
FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz")
FORMATS = (*FP8, NVFP4)
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT32_MAX = torch.finfo(torch.float32).max
KERNELS_END = "/* A piece of one row. Each dtype gets code of its own. */"
IS_GCC = "Free Software Foundation" in cpu_library._output_of(["cc", "--version"])


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


def reference(x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
    return cpu_reference.quantize_kv(x, scale, name, CPU, None)


def fast(
    x: torch.Tensor, scale: torch.Tensor, name: str, out: kv.OutBuffers | None = None
) -> kv.QuantizedKV:
    made = cpu_fast.quantize_kv(x, scale, name, out)
    assert made is not None
    return made


def assert_same(ours: kv.QuantizedKV, right: kv.QuantizedKV) -> None:
    assert torch.equal(ours.data.view(torch.uint8), right.data.view(torch.uint8))
    if right.block_scales is not None:
        assert ours.block_scales is not None
        assert torch.equal(
            ours.block_scales.view(torch.uint8), right.block_scales.view(torch.uint8)
        )


def assert_same_values(ours: torch.Tensor | None, right: torch.Tensor) -> None:
    assert ours is not None
    assert ours.dtype == right.dtype
    integer = torch.int32 if right.dtype == torch.float32 else torch.int16
    is_nan = right.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(
        ours.view(integer).masked_fill(is_nan, 0), right.view(integer).masked_fill(is_nan, 0)
    )


class TestCpuFast(ConformanceSuite):
    implementation = cpu_fast


# Values


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_16_bit_value_has_the_references_code(dtype: torch.dtype, name: str) -> None:
    x = inputs.every_pattern(dtype).view(-1, 128)
    for value in (1.0, 0.0123, 0.7, 3e-5, 117.0, 1e-30, 1e36, 2.0**-149, FLOAT32_MAX):
        assert_same(fast(x, number(value), name), reference(x, number(value), name))


@pytest.mark.parametrize("seed", range(4))
def test_random_blocks_from_subnormal_to_overflow(seed: int) -> None:
    """More than half a million blocks each, of one magnitude and of all."""
    g = 10.0 ** float(inputs.uniform(-44, 38, 1, seed=seed)) if seed else 0.0123
    low, high = inputs.uniform(-46, 38, 2, seed=seed + 100).sort().values.tolist()
    x = inputs.log_uniform(low, high, 1 << 18, 16, seed=seed)
    x[: 1 << 16] *= 10.0 ** inputs.uniform(-45, 10, 1 << 16, 1, seed=seed)
    blocks = torch.cat([x, inputs.random_patterns(1 << 20, torch.float32, seed).view(-1, 16)])
    for values in (blocks, blocks.to(torch.bfloat16), blocks[: 1 << 16].to(torch.float16)):
        quantized = reference(values, number(g), NVFP4)
        assert_same(fast(values, number(g), NVFP4), quantized)
        right = cpu_reference.dequantize_kv(quantized, values.dtype, CPU)
        assert_same_values(cpu_fast.dequantize_kv(quantized, values.dtype), right)


@pytest.mark.parametrize("name", FP8)
def test_random_float32(name: str) -> None:
    x = inputs.random_patterns(1 << 21, torch.float32).view(-1, 128)
    near = inputs.log_uniform(-6, 6, 1 << 14, 128)
    for value in (1.0, 0.0123, 3e-39, 1e30):
        assert_same(fast(x, number(value), name), reference(x, number(value), name))
        assert_same(fast(near, number(value), name), reference(near, number(value), name))


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("exponent", [-62, -60, -7, 0, 9, 59, 60, 61])
def test_next_to_the_halfway_points_of_scales_of_any_mantissa(exponent: int, name: str) -> None:
    """There a quotient that is not the rounded one would have another code."""
    patterns = inputs.random_patterns(1 << 12, torch.float32, seed=abs(exponent))
    mantissas = patterns.view(torch.int32) & 0x7FFFFF
    scales = (mantissas | 127 << 23).view(torch.float32) * 2.0**exponent
    halfway = torch.cat([torch.arange(16, 32) * 2.0**power for power in (-22, -14, -3, 3)])
    nearest = (halfway * scales.unsqueeze(1)).view(torch.int32).unsqueeze(-1)
    x = (nearest + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32).flatten(1)
    x = x * torch.tensor([1.0, -1.0]).repeat(x.shape[1] // 2)
    assert_same(fast(x.unsqueeze(0), scales, name), reference(x.unsqueeze(0), scales, name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, -0.5, float("inf"), float("nan"), -float("nan"), -1e37]
)
def test_scales_that_no_check_saw(value: float, name: str) -> None:
    """A scale tensor's value is nobody's to check: what comes of it is the reference's."""
    values = [values for _, values in sorted(inputs.hard(8, 64).items())]
    for x in (*values, inputs.normal(8, 64)):
        ours, right = fast(x, number(value), name), reference(x, number(value), name)
        for one, other in ((ours.data, right.data), (ours.block_scales, right.block_scales)):
            if one is None or other is None:
                continue
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        dequantized = cpu_reference.dequantize_kv(right, torch.bfloat16, CPU)
        assert_same_values(cpu_fast.dequantize_kv(right, torch.bfloat16), dequantized)


def test_arithmetic_is_ieee_where_the_caller_flushes_subnormals() -> None:
    x, scale = torch.full((2, 64), 2.0**-140), number(2.0**-145)
    expected = {name: reference(x, scale, name) for name in FORMATS}
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        for name in FORMATS:
            assert_same(fast(x, scale, name), expected[name])
        assert float(torch.tensor(2.0**-140) * 1.0) == 0.0  # and the caller still does
    finally:
        torch.set_flush_denormal(False)


# Threads


@cache
def many(dtype: torch.dtype) -> torch.Tensor:
    """More than four threads' worth, of every pattern in an order of its own."""
    pattern = inputs.every_pattern(torch.bfloat16).float().to(dtype)
    return torch.cat([inputs.shuffled(pattern, seed) for seed in range(17)]).view(-1, 4, 128)


@cache
def expected_of_many(dtype: torch.dtype, name: str, heads: int) -> kv.QuantizedKV:
    return reference(many(dtype), per_head(heads), name)


def per_head(heads: int) -> torch.Tensor:
    return torch.linspace(0.01, 0.4, heads, dtype=torch.float32)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "heads"), [(NVFP4, 1), ("fp8_e4m3", 1), ("fp8_e4m3fnuz", 4)])
def test_any_number_of_threads(name: str, heads: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x = many(torch.bfloat16)
    assert cpu_launch._threads(x.numel()) == threads
    expected = expected_of_many(torch.bfloat16, name, heads)
    made = fast(x, per_head(heads), name)
    assert_same(made, expected)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(fast(strided, per_head(heads), name), expected)
    right = cpu_reference.dequantize_kv(expected, torch.float16, CPU)
    assert_same_values(cpu_fast.dequantize_kv(expected, torch.float16), right)


def test_torchs_number_of_threads_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cpu_launch._threads(1 << 24) == 3
    assert cpu_launch._threads(1 << 17) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert cpu_launch._threads(1 << 24) == 1


FORKED = """
import os, torch
import kvcache_plugin as kv
os.sched_getaffinity = lambda _: {0, 1}
torch.set_num_threads(2)
x, scale = torch.randn(1 << 13, 128).to(torch.bfloat16), torch.tensor([0.01])
# No operation of torch's in the child: its own threads do not live there.
codes = lambda: kv.quantize_kv(x, scale, "nvfp4").data.numpy().tobytes()
threads = lambda: len(os.listdir("/proc/self/task"))
expected, before = codes(), threads()
assert codes() == expected and threads() == before, "a thread is left"
child = os.fork()
if child == 0:
    os._exit(0 if codes() == expected and threads() == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child"
print([row.name for row in kv.explain("cpu", "nvfp4") if row.chosen])
"""


def test_a_process_that_used_it_can_fork() -> None:
    assert run_python(FORKED) == "['cpu_fast']\n"


# Tensors


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_that_torch_keeps_more_about(name: str) -> None:
    x, scale = inputs.normal(4, 2, 64), number(0.02)
    expected = reference(x, scale, name)
    assert_same(fast(torch.nn.Parameter(x), scale, name), expected)
    assert_same(fast(x.clone().requires_grad_() * 1.0, scale, name), expected)
    assert not fast(x.clone().requires_grad_(), scale, name).data.requires_grad
    with torch.inference_mode():
        inside = x.clone()
        assert_same(fast(inside, scale, name), expected)
    assert_same(fast(inside, scale, name), expected)
    negative = torch.complex(torch.zeros_like(x), x).conj().imag
    assert negative.is_neg()
    assert_same(fast(negative, scale, name), reference(-x, scale, name))
    deep = x.view(2, 2, 1, 1, 1, 1, 1, 1, 2, 64).transpose(0, 8)
    assert_same(fast(deep, scale, name), reference(deep, scale, name))


@pytest.mark.parametrize("name", FORMATS)
def test_buffers_of_more_dimensions_than_a_job_has(name: str) -> None:
    x, scale = inputs.normal(2, 2, 1, 1, 1, 1, 1, 1, 2, 64), number(0.02)
    made = reference(x, scale, name)
    room = [
        None if part is None else torch.zeros_like(part).transpose(0, 8).contiguous()
        for part in (made.data, made.block_scales)
    ]
    data, block_scales = (None if part is None else part.transpose(0, 8) for part in room)
    assert data is not None
    ours = fast(x, scale, name, kv.OutBuffers(data, block_scales))
    assert ours.data is data
    assert ours.block_scales is block_scales
    assert_same(ours, made)


class Tagged(torch.Tensor):
    """A tensor type of somebody else's."""


def test_what_has_no_address_is_passed_on() -> None:
    x, scale = inputs.normal(4, 64), number(0.02)
    assert cpu_fast.quantize_kv(x.as_subclass(Tagged), scale, NVFP4, None) is None
    assert cpu_fast.quantize_kv(x, scale.as_subclass(Tagged), NVFP4, None) is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert cpu_fast.quantize_kv(x, scale, NVFP4, None) is None
        assert cpu_fast.quantize_kv(torch.empty(4, 64), scale, "fp8_e4m3", None) is None
    passed = []

    def quantized(row: torch.Tensor) -> torch.Tensor:
        passed.append(cpu_fast.quantize_kv(row, scale, "fp8_e4m3", None))
        return kv.quantize_kv(row, scale, "fp8_e4m3").data.float()

    whole = reference(x, scale, "fp8_e4m3").data.float()
    assert torch.equal(torch.func.vmap(quantized)(x), whole)
    assert passed == [None]


class Watching(TorchDispatchMode):
    """Sees each operation, as tracers and debuggers do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def traced(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return torch.jit.trace(function, (x,), check_trace=False)


def watched(function: Callable[..., Any], x: torch.Tensor) -> Any:
    def call(y: torch.Tensor) -> Any:
        with Watching():
            return function(y)

    return call


TRANSFORMS = {
    "jit.trace": traced,
    "make_fx": lambda function, x: make_fx(function)(x),
    "functionalize": lambda function, x: torch.func.functionalize(function),
    "a dispatch mode": watched,
}


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*jit.trace:DeprecationWarning"
)
@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("name", FORMATS)
def test_where_torch_records_what_is_done_it_is_done_by_torch(name: str, how: str) -> None:
    x, y, scale = inputs.normal(4, 64), inputs.normal(4, 64, seed=1), number(0.02)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return kv.dequantize_kv(kv.quantize_kv(x, scale, name), dtype=torch.float32)

    transformed = TRANSFORMS[how](there_and_back, x)
    right = cpu_reference.dequantize_kv(reference(y, scale, name), torch.float32, CPU)
    assert_same_values(transformed(y), right)


def test_tensors_of_zeros_that_have_no_memory() -> None:
    nothing, x = torch._efficientzerotensor(4, 64), inputs.normal(4, 64)
    assert cpu_fast.quantize_kv(nothing, number(0.02), NVFP4, None) is None
    assert cpu_fast.quantize_kv(x, torch._efficientzerotensor(1), "fp8_e4m3", None) is None
    assert_same(
        kv.quantize_kv(nothing, number(0.02), NVFP4),
        reference(torch.zeros(4, 64), number(0.02), NVFP4),
    )


def test_buffers_that_may_not_be_written_to_are_left_as_they_are() -> None:
    x, scale = inputs.normal(4, 64), number(0.02)
    data = torch.zeros(4, 64).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        kv.quantize_kv(x, scale, "fp8_e4m3", out=kv.QuantizedKV(data, None, scale, "fp8_e4m3"))
    assert not data.float().any()


@pytest.mark.parametrize("name", FORMATS)
def test_a_pair_is_two_calls(name: str) -> None:
    key, value = inputs.normal(4, 2, 64), inputs.normal(3, 5, 128, seed=1)
    scales = number(0.02), number(0.7)
    pair = cpu_fast.quantize_kv_pair(key, value, *scales, name, None)
    assert pair is not None
    assert_same(pair[0], reference(key, scales[0], name))
    assert_same(pair[1], reference(value, scales[1], name))
    assert cpu_fast.quantize_kv_pair(key, value.as_subclass(Tagged), *scales, name, None) is None


# The library


WRAPPER = """#!{python}
import pathlib, subprocess, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("a compiler for a test, {old!r} to {new!r}")
    raise SystemExit
source = next(argument for argument in arguments if argument.endswith(".c"))
text = pathlib.Path(source).read_text()
assert {old!r} in text
changed = pathlib.Path(__file__).with_suffix(".c")
changed.write_text(text.replace({old!r}, {new!r}))
raise SystemExit(subprocess.call(["cc", *(str(changed) if a == source else a for a in arguments)]))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def load() -> cpu_library.Library:
    return cpu_library.load(cpu_check.what_is_wrong)


def libraries(home: Path) -> list[Path]:
    return list(home.rglob("*.so"))


def script(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def why_not() -> str:
    with pytest.raises(cpu_library.UnavailableError) as error:
        load()
    return str(error.value)


def run_python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_compiled_once_and_kept_where_nobody_else_writes(home: Path) -> None:
    load()
    (library,) = libraries(home)
    written = library.stat().st_mtime_ns
    load()
    assert libraries(home) == [library]
    assert library.stat().st_mtime_ns == written
    for folder in (home / "kvcache-plugin", library.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path for path in library.parent.iterdir() if path != library] == []


@pytest.mark.skipif(not IS_GCC, reason="GCC alone says it in this way")
def test_every_loop_over_values_is_vectorised_for_each_dtype(tmp_path: Path) -> None:
    """One that is not runs at a tenth of the speed, and no other test would see it."""
    lines = cpu_library.SOURCE.read_text(encoding="utf-8").splitlines()
    begin, end = (lines.index(line) for line in ("/* FP8 */", KERNELS_END))
    times = {
        number: 4 * len(HALF_DTYPES) if "uint16_t" in line else 4 if "MAXIMA" in line else 3
        for number, line in enumerate(lines[begin:end], begin + 1)
        # The inner one of two loops; and the four of a macro, which are told where it is used.
        if re.search(r"for \(int.*[^\\]$|MAXIMA\(uint", line) and not line.endswith("< CHUNK; b++)")
    }
    assert len(times) == 13
    flags = [*cpu_library._FLAGS, *cpu_library._TUNING, "-fopt-info-vec-optimized"]
    target = str(tmp_path / "kernels.so")
    done = subprocess.run(
        ["cc", *flags, "-o", target, str(cpu_library.SOURCE), *cpu_library._LIBRARIES],
        capture_output=True,
        text=True,
        check=True,
    )
    told = Counter(map(int, re.findall(r"\.c:(\d+):\d+: optimized: loop vectori", done.stderr)))
    scalar = [lines[number - 1] for number, wanted in times.items() if told[number] < wanted]
    assert scalar == []


def test_a_damaged_library_is_compiled_anew(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    load()
    (library,) = libraries(home)
    damaged = library.read_bytes()[:-1] + b"?"
    library.unlink()  # this process has it in its memory as it was
    library.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        load()
    assert "is damaged, and is compiled anew" in caplog.text
    assert caplog.text.rstrip().endswith("[errors#cpu-kernels-damaged]")
    (whole,) = libraries(home)
    assert whole.stem == cpu_library._hash(whole)


def test_what_another_process_removes_meanwhile_is_not_missed(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    (library,) = libraries(home)

    def remove(path: Path) -> str:
        path.unlink()
        return "damaged"

    with monkeypatch.context() as patched:
        patched.setattr(cpu_library, "_hash", remove)
        assert cpu_library._kept(library.parent) is None
    assert not caplog.records


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*jit.trace:DeprecationWarning"
)
@pytest.mark.parametrize("how", [*TRANSFORMS, "func.grad", "fake tensors"])
def test_it_is_compiled_whatever_torch_does_meanwhile(how: str, home: Path) -> None:
    """The comparison with the reference is not what is traced, or faked."""

    def first(x: torch.Tensor) -> torch.Tensor:
        load()
        return x.sum()

    x = inputs.normal(4, 64)
    if how == "func.grad":
        torch.func.grad(first)(x)
    elif how == "fake tensors":
        with FakeTensorMode(allow_non_fake_inputs=True):
            first(x)
    else:
        TRANSFORMS[how](first, x)(x)
    assert len(libraries(home)) == 1


def test_it_is_compiled_where_the_process_rounds_otherwise(home: Path) -> None:
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]
    code = f"import ctypes; ctypes.CDLL('libm.so.6').fesetround({upward})\n"
    run_python(f"import torch\nfrom kvcache_plugin.hardware import cpu_check\n{code}{LOADS}")
    assert len(libraries(home)) == 1


def test_what_is_in_the_folder_and_is_no_library(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    (library,) = libraries(home)
    library.unlink()
    nonsense = b"no library"
    library.with_name(f"{hashlib.sha256(nonsense).hexdigest()}.so").write_bytes(nonsense)
    library.with_name("a.so").mkdir()
    load()
    (record,) = caplog.records
    assert "cannot be loaded (file too short), and is compiled anew" in record.getMessage()
    assert sorted(path.name for path in libraries(home)) == sorted(["a.so", library.name])


LOADS = """
from kvcache_plugin.hardware import cpu_check, cpu_library
cpu_library.load(cpu_check.what_is_wrong)
"""


def test_two_processes_at_once(home: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", LOADS]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    for library in libraries(home):
        assert library.stem == cpu_library._hash(library)
    assert libraries(home)


LOOKS = """
import kvcache_plugin as kv
kv.validate_kv_scales(0.1, 0.1, kv_cache_dtype="fp8", device="sm_90")
reasons = {row.name: row.reason for row in kv.explain("gfx942", "fp8")}
print(reasons["cpu_fast"])
"""


def test_nothing_is_compiled_for_other_devices(home: Path) -> None:
    assert run_python(LOOKS) == "serves the CPU, and this is gfx942\n"
    assert not home.exists()


QUANTIZES = """
import torch
import kvcache_plugin as kv
print(kv.quantize_kv(torch.ones(2, 64), 0.5, "fp8").data[0, 0].item())
rows = {row.name: row for row in kv.explain("cpu", "fp8")}
print(rows["cpu_reference"].chosen, rows["cpu_fast"].reason)
"""


def test_without_a_compiler_the_reference_serves(home: Path, tmp_path: Path) -> None:
    value, row = run_python(QUANTIZES, PATH=str(tmp_path)).splitlines()
    assert float(value) == 2.0
    assert row == "True needs a C compiler, and there is no cc, gcc or clang: install gcc or clang"


def test_compilers_that_fail(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert why_not() == "CC='no-such-compiler' is not there: unset it, or name a C compiler"
    monkeypatch.setenv("CC", "cc 'unclosed")
    assert "is no command" in why_not()
    fails = script(tmp_path / "fails", "#!/bin/sh\necho 'x.c:1: error: no licence' >&2; exit 1\n")
    monkeypatch.setenv("CC", fails)
    assert "failed to compile it (x.c:1: error: no licence)" in why_not()
    monkeypatch.setenv("CC", script(tmp_path / "makes_nothing", "#!/bin/sh\nexit 0\n"))
    assert "failed to compile it" in why_not()
    monkeypatch.setattr(cpu_library, "_PATIENCE", 0.3)
    for first in ("sleep", "setsid sleep"):
        hangs = script(tmp_path / "hangs", f"#!/bin/sh\n{first} 60 & sleep 60\n")
        monkeypatch.setenv("CC", hangs)
        began = time.monotonic()
        assert "did not end within 0.3 s, and was stopped" in why_not()
        assert time.monotonic() - began < 30
    assert libraries(home) == []


def test_a_compiler_that_leaves_something_running(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    monkeypatch.setenv(
        "CC", script(tmp_path / "cc", '#!/bin/sh\nsetsid sleep 60 &\nexec cc "$@"\n')
    )
    load()
    assert time.monotonic() - began < 30


def test_a_compiler_that_says_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "#!/bin/sh\nseq 200000; echo 'no space left'; exit 1\n"
    monkeypatch.setenv("CC", script(tmp_path / "much", lines))
    assert len(why_not()) < 1000


def test_arithmetic_of_the_process_stays_as_it_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some options link a file that flushes subnormals wherever it is loaded."""
    monkeypatch.setenv("CC", "cc -funsafe-math-optimizations -ffast-math -Ofast")
    load()
    assert float(torch.tensor(2.0**-140) * 1.0) == 2.0**-140


@pytest.mark.parametrize("program", ["/bin/echo", "/bin/cat", "/bin/false"])
def test_it_is_not_loaded_where_it_could_not_be_tried(
    program: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    assert "does not run here" in why_not()
    assert libraries(home) == []


def test_a_compiler_that_knows_no_tuning(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = '#!/bin/sh\ncase "$*" in *native*) exit 1;; esac\nexec cc "$@"\n'
    monkeypatch.setenv("CC", script(tmp_path / "old", refuses))
    load()
    assert len(libraries(home)) == 1


def test_a_compiler_that_knows_the_machine_and_no_other_tuning(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the machine's instructions the kernels take several times as long."""
    called = tmp_path / "called"
    refuses = (
        f'#!/bin/sh\ncase "$*" in *vect-cost*) exit 1;; esac\necho "$*" >>{called}\nexec cc "$@"\n'
    )
    monkeypatch.setenv("CC", script(tmp_path / "old", refuses))
    load()
    version, compiled = called.read_text(encoding="utf-8").splitlines()
    assert version == "--version"
    assert "-march=native" in compiled.split()


def test_no_room_for_what_the_compiler_says(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert why_not().startswith("no temporary file can be made (No such file or directory): ")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("448.0f, 3", "400.0f, 3", "is wrong (codes of fp8_e4m3 from torch.bfloat16)"),
        ("0xC8643210u", "0xC8643211u", "is wrong (torch.bfloat16 from codes of nvfp4)"),
        ("int kvcache_probe(void) {", "int kvcache_probe(void) { __builtin_trap();", "not run"),
        (
            "#include <fenv.h>",
            "#include <fenv.h>\n__attribute__((constructor)) static void at_once(void)"
            " { __builtin_ia32_ldmxcsr(0x9fc0); }",
            "does not run here (when it is loaded, subnormal numbers become 0",
        ),
    ],
    ids=["codes", "values", "a trap", "arithmetic"],
)
def test_a_library_that_is_wrong_is_not_kept(
    old: str, new: str, problem: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = WRAPPER.format(python=sys.executable, old=old, new=new)
    monkeypatch.setenv("CC", script(tmp_path / "compiler", text))
    assert problem in why_not()
    assert libraries(home) == []


def test_caches_that_cannot_be_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = home / "kvcache-plugin"
    ours.mkdir(parents=True)
    ours.chmod(0o777)
    assert why_not().endswith(f"so nothing is loaded from it: chmod go-w {ours}")
    ours.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: ours.stat().st_uid + 1)
        assert f"belongs to user {ours.stat().st_uid}" in why_not()
    ours.rmdir()
    ours.symlink_to(tmp_path)
    assert "is no folder" in why_not()
    ours.unlink()
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", "/proc/1/kvcache-plugin-test"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        assert "set XDG_CACHE_HOME to a folder that can be written" in why_not()


def test_folders_that_others_could_replace(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        load()
    finally:
        os.umask(before)
    for folder in (home, home / "kvcache-plugin"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    home.chmod(0o777)
    assert f"{home} can be written by anybody, so nothing is loaded from it" in why_not()
    home.chmod(0o700)
    tmp_path.chmod(0o777)
    assert f"{tmp_path} can be written by anybody" in why_not()
    tmp_path.chmod(0o1777)
    load()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert why_not() == "HOME='relative' is no absolute path: set XDG_CACHE_HOME"


def test_the_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(check: Any) -> Any:
        raise cpu_library.UnavailableError("cc failed")

    monkeypatch.setattr(cpu_fast, "load", fail)
    monkeypatch.setattr(cpu_fast, "_library", cache(cpu_fast._library.__wrapped__))
    for name in FORMATS:
        assert cpu_fast.supports_kv(CPU, name) == "cc failed"
    assert caplog.text.count("left to the reference, which is slow: cc failed") == 1
