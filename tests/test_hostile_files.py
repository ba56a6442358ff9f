"""Checkpoints that are damaged or made to harm: one line names the file, and no other is read.

``make fuzz`` tries many more of the random ones than a plain run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache_plugin import CheckpointError, scan_checkpoint
from kvcache_plugin.errors import shown
from tests.checkpoints_on_disk import (
    attention_weights,
    config,
    encode,
    encode_tensors,
    scales,
    write,
    write_shards,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FUZZ = settings(
    max_examples=int(os.environ.get("KVCACHE_FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SCALE = "model.layers.0.self_attn.k_scale"
ONE: dict[str, Any] = {SCALE: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
SECRET = "the contents of another file"


def refused(path: Path | str, **options: Any) -> CheckpointError:
    """The one line that a checkpoint is refused with."""
    with pytest.raises(CheckpointError) as found:
        scan_checkpoint(path, **options)
    message = str(found.value)
    assert message.isprintable()
    assert len(message) < 2000
    assert message.endswith(f" [errors#{found.value.name}]")
    assert found.value.problem in message
    return found.value


# Headers


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\0",
        encode(ONE, b"\0" * 4, length=10**6),
        encode(ONE, b"\0" * 4, length=2**63),
        encode(ONE, b"\0" * 4, length=2**64 - 1),
        encode(ONE, b"\0" * 4, length=10),
        encode(ONE, b"\0" * 4, length=0),
        encode(ONE, b"\0" * 2),
        encode(ONE, b"\0" * 9),
        encode(ONE, b"\0" * 4)[:-20],
        encode({**ONE, "b": {**ONE[SCALE], "data_offsets": [2, 6]}}, b"\0" * 6),
        encode({**ONE, "b": ONE[SCALE]}, b"\0" * 4),
        encode({SCALE: {**ONE[SCALE], "data_offsets": [4, 0]}}),
        encode({SCALE: {**ONE[SCALE], "data_offsets": [0]}}, b"\0" * 4),
        encode({SCALE: {**ONE[SCALE], "shape": [2]}}, b"\0" * 4),
        encode({SCALE: {**ONE[SCALE], "shape": [-1]}}, b"\0" * 4),
        encode({SCALE: {**ONE[SCALE], "shape": [2**62, 2**62]}}, b"\0" * 4),
        encode({SCALE: {**ONE[SCALE], "dtype": "F99"}}, b"\0" * 4),
        encode({SCALE: {"dtype": "F32", "shape": [1]}}, b"\0" * 4),
        encode({SCALE: None}),
        encode(b'{"a": NaN}'),
        encode(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', b"\0" * 4),
        encode(b"[]"),
        encode(b"null"),
        encode(b'{"\xff": {}}'),
        encode(b'{"\\ud800": {}}'),
        encode(b'{"a":' + b"[" * 100_000),
        encode(b'{"a":' * 100_000),
        encode({"__metadata__": {"format": 1}}),
    ],
    ids=range(29),
)
def test_a_header_that_is_not_sound(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    error = refused(tmp_path)
    assert error.file == str(file)
    assert error.problem.startswith("it is no sound safetensors file: ")
    assert error.remedy == "Download or copy it again"


def test_a_name_twice_in_one_file(tmp_path: Path) -> None:
    entry = b'"a.k_scale": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    escaped = entry.replace(b"data_offsets", rb"data\u005foffsets")
    more = b'"__metadata__": {"x": "\\"data_offsets\\""}'
    for header in (b"{%s, %s}" % (entry, entry), b"{%s, %s, %s}" % (more, escaped, entry)):
        (tmp_path / "model.safetensors").write_bytes(encode(header, b"\0" * 4))
        assert "a.k_scale is in it twice" in refused(tmp_path).problem


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(encode_tensors({SCALE: 0.5}))
    error = refused(tmp_path)
    assert error.file == str(tmp_path / "b.safetensors")
    assert f"it holds {SCALE}, and so does a.safetensors" in error.problem


def test_no_more_than_a_few_megabytes_of_scales_are_read(tmp_path: Path) -> None:
    header, end = {}, 0
    for layer in range(3000):
        header[f"model.layers.{layer}.self_attn.k_scale"] = {
            "dtype": "F64",
            "shape": [4096],
            "data_offsets": [end, end + 8 * 4096],
        }
        end += 8 * 4096
    encoded = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    assert "which no checkpoint's have" in refused(tmp_path).problem


def test_a_terabyte_under_a_scales_name_is_not_read(tmp_path: Path) -> None:
    size = 2**40
    encoded = json.dumps(
        {SCALE: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + size)
    (found,) = (f for f in scan_checkpoint(tmp_path).findings if f.kind == "wrong-shape")
    assert str(size) in found.message


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.\x1b[31mself_attn.k_scale", "a\nb.self_attn.k_scale", "x" * 5000 + ".k_scale"],
)
def test_names_cannot_write_on_the_terminal(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: float("nan"), f"{name}s": 1.0}, config(1))
    report = scan_checkpoint(tmp_path)
    assert report.findings
    for finding in report.findings:
        for text in (finding.message, str(finding)):
            assert text.isprintable()
            assert len(text) < 2000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é", "plain é"),
        ("a\nb\x1b[0m", r"a\nb\x1b[0m"),
        ("\ud800", r"\ud800"),
        ("‮rtl", r"\u202ertl"),
        ("x" * 300, "x" * 197 + "..."),
    ],
)
def test_texts_are_shown_in_one_line(text: str, expected: str) -> None:
    assert shown(text) == expected


# JSON files


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no UTF-8"),
        (b"[1]", "no object, but a list"),
        (b"null", "no object"),
        (b'"text"', "no object, but a str"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"num_hidden_layers": %s}' % (b"9" * 100_000), "a number of 100000 digits"),
        (b" " * (16 * 2**20 + 1), "more than 16,777,216 bytes"),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    write(tmp_path, {SCALE: 0.5})
    (tmp_path / name).write_bytes(content)
    error = refused(tmp_path)
    assert error.file == str(tmp_path / name)
    assert says in error.problem


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "no JSON"),
        (b"[]", "no object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": {"a": 7}}', "no file name for a: 7"),
        (b'{"weight_map": {"a": null}}', "no file name for a"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a is in it twice"),
        (
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "names gone.safetensors, which is not there",
        ),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "outside the checkpoint"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "outside the checkpoint"),
        (b'{"weight_map": {"a": "sub/../../x.safetensors"}}', "outside the checkpoint"),
        (b'{"weight_map": {"a": ""}}', "outside the checkpoint"),
        (b'{"weight_map": {"a": "x\\u0000.safetensors"}}', "outside the checkpoint"),
        (b'{"weight_map": {"a": "config.json"}}', "no .safetensors file"),
        (b'{"weight_map": {"a": "."}}', "no .safetensors file"),
        (b'{"weight_map": {"a": "%s.safetensors"}}' % (b"x" * 5000), "which is not there"),
        (b'{"weight_map":' * 200_000, "nested too deeply"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, content: bytes, says: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    error = refused(tmp_path)
    assert error.file == str(index)
    assert says in error.problem


def test_a_tensor_that_the_index_places_elsewhere(tmp_path: Path) -> None:
    shards = {"a.safetensors": {SCALE: 0.5}, "b.safetensors": {"x.weight": 1.0}}
    write_shards(tmp_path, shards, None, {SCALE: "b.safetensors", "x.weight": "a.safetensors"})
    error = refused(tmp_path)
    assert error.file == str(tmp_path / "a.safetensors")
    assert "model.safetensors.index.json places in b.safetensors" in error.problem


def test_an_index_with_pickles(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "pickle" in refused(tmp_path).problem


# What is no checkpoint


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth"]
)
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        error = refused(path)
        assert "it is a pickle, which can run any program" in error.problem
        assert "safe_serialization=True" in error.remedy


def test_other_folders_and_files(tmp_path: Path) -> None:
    assert "there is no .safetensors file in it" in refused(tmp_path).problem
    (tmp_path / "model.gguf").touch()
    assert "GGUF" in refused(tmp_path).problem
    assert "no .safetensors file" in refused(tmp_path / "model.gguf").problem


@pytest.mark.parametrize(
    "path",
    [
        "no/such",
        "no/such/thing",
        "./nothing",
        "../..",
        "s3://bucket/model",
        "~",
        "a\nb",
        "x" * 5000,
    ],
)
def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    error = refused(path)
    assert error.problem


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes"])
def test_what_is_no_path(path: Any) -> None:
    refused(path)


# Links and special files


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A sound safetensors file, and a secret, that belong to nobody's checkpoint."""
    folder = tmp_path / "outside"
    write(folder, {SCALE: 0.5})
    (folder / "secret.json").write_text(json.dumps({"quantization_config": {"secret": SECRET}}))
    return folder


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    folder = tmp_path / "inside"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("absolute", [True, False])
def test_a_shard_that_leads_out(inside: Path, outside: Path, absolute: bool) -> None:
    target = outside / "model.safetensors"
    (inside / "model.safetensors").symlink_to(
        target if absolute else os.path.relpath(target, inside)
    )
    error = refused(inside)
    assert "a link that leads out of the checkpoint" in error.problem
    assert "name the folder that it lies in" in error.remedy
    # Named by itself it was asked for.
    assert scan_checkpoint(inside / "model.safetensors").num_tensors == 1


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
)
def test_a_json_file_that_leads_out(inside: Path, outside: Path, name: str) -> None:
    write(inside, {SCALE: 0.5})
    (inside / name).symlink_to(outside / "secret.json")
    error = refused(inside)
    assert "leads out of the checkpoint" in error.problem
    assert SECRET not in str(error)


def test_a_folder_in_it_that_leads_out(inside: Path, outside: Path) -> None:
    (inside / "sub").symlink_to(outside)
    index = {"weight_map": {SCALE: "sub/model.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "leads out of the checkpoint" in refused(inside).problem


def test_a_folder_that_only_looks_like_a_cache(tmp_path: Path, outside: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(outside / "model.safetensors")
    assert "leads out of the checkpoint" in refused(snapshot).problem
    (tmp_path / "models--org--model" / "blobs").symlink_to(outside)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/model.safetensors")
    assert "leads out of the checkpoint" in refused(snapshot).problem


@pytest.mark.parametrize("reference", ["../../../outside", "/etc", "", "a b", "x" * 5000])
def test_a_reference_that_leads_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: Path, reference: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(reference)
    refused("org/model")
    refused("org/model", revision="../../../outside")
    (refs / "main").unlink()
    (refs / "main").symlink_to(outside / "secret.json")
    assert "leads out" in refused("org/model").problem


def test_a_snapshot_that_leads_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshots = tmp_path / "models--org--model" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "main").symlink_to(outside)
    assert "leads out" in refused("org/model").problem


def test_links_in_a_circle(inside: Path) -> None:
    (inside / "a").symlink_to("b")
    (inside / "b").symlink_to("a")
    (inside / "model.safetensors").symlink_to("a")
    assert "leads back to itself" in refused(inside).problem
    assert "leads back to itself" in refused(inside / "a").problem
    (inside / "model.safetensors").unlink()
    write(inside, {SCALE: 0.5})
    (inside / "config.json").symlink_to("config.json")
    assert "leads back to itself" in refused(inside).problem


def test_a_link_to_nothing(inside: Path) -> None:
    (inside / "model.safetensors").symlink_to("gone")
    assert "leads nowhere" in refused(inside).problem
    assert "leads nowhere" in refused(inside / "model.safetensors").problem


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    # The path of a socket has to be short.
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{short}/s")
        shutil.move(f"{short}/s", path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("make", [a_folder, a_pipe, a_device, a_socket])
def test_what_is_no_ordinary_file(inside: Path, make: Callable[[Path], None], name: str) -> None:
    if name == "config.json":
        write(inside, {SCALE: 0.5})
    make(inside / name)
    error = refused(inside)
    assert "no ordinary file" in error.problem or "leads out" in error.problem
    assert error.file == str(inside / name)


@pytest.mark.parametrize("make", [a_pipe, a_device])
def test_what_is_asked_for_and_is_no_ordinary_file(
    inside: Path, make: Callable[[Path], None]
) -> None:
    path = inside / "model.safetensors"
    make(path)
    assert "no ordinary file" in refused(path).problem


@contextmanager
def not_as_root() -> Iterator[None]:
    """As a user who may not read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_what_may_not_be_read(name: str) -> None:
    # Not in pytest's own folder, which only its user may look into.
    with tempfile.TemporaryDirectory() as created:
        folder = Path(created)
        folder.chmod(0o755)
        write(folder, {SCALE: 0.5}, config(1))
        scan_checkpoint(folder)  # imports what it needs
        (folder / name).chmod(0)
        try:
            with not_as_root():
                assert "ermission denied" in refused(folder).problem
        finally:
            folder.chmod(0o700)


def test_a_file_that_fails_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {SCALE: 0.5}, config(1))

    def fail(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    assert "it cannot be read: Permission denied" in refused(tmp_path).problem


def test_a_damaged_file_beside_the_checkpoint_concerns_nobody(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-00001-of-00001.safetensors": {SCALE: 0.5}})
    (tmp_path / "other.safetensors").write_bytes(b"damaged")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "link.safetensors").symlink_to("/dev/zero")
    assert scan_checkpoint(tmp_path).num_tensors == 1


@pytest.mark.skipif(sys.platform != "linux", reason="follows system calls")
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_file_outside_is_opened(inside: Path, outside: Path) -> None:
    write(inside, {**attention_weights(1), **scales({0: (0.05, 0.04)})}, config(1))
    (inside / "hf_quant_config.json").symlink_to(outside / "secret.json")
    code = (
        "import sys, kvcache_plugin\n"
        "try: kvcache_plugin.scan_checkpoint(sys.argv[1])\n"
        "except kvcache_plugin.CheckpointError: pass"
    )
    command = ["strace", "-f", "-e", "trace=openat,open", sys.executable, "-c", code, str(inside)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(inside / "config.json") in done.stderr
    assert str(outside) not in done.stderr


# Random damage

NAMES = st.sampled_from(
    [
        SCALE,
        "model.layers.0.self_attn.v_scale",
        "model.layers.1.self_attn.k_proj.k_scale",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.kv_scale",
        "layers.0.attention.k_fake_quantizer.qscale_act",
        "model.layers.0.self_attn.k_zero_point",
        "model.layers.99999999999999999999.self_attn.k_scale",
        "self_attn.k_scale",
        ".k_scale",
        "__metadata__",
    ]
) | st.text(max_size=40)
SMALL = st.integers(-1, 40) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30])
DTYPES = st.sampled_from(
    ["F32", "BF16", "F64", "F16", "I64", "BOOL", "U8", "F8_E4M3", "F8_E8M0", "F4", "C64", "F6_E2M3"]
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": DTYPES,
        "shape": st.lists(SMALL, max_size=3),
        "data_offsets": st.lists(SMALL, min_size=2, max_size=2),
    }
)
SOUND_FILE = encode_tensors({**attention_weights(2), **scales({0: (0.05, 0.04), 1: (0.06, 0.03)})})
VALUES = st.recursive(
    st.none() | st.booleans() | SMALL | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def survives(folder: Path) -> None:
    """A scan gives a report or one line, whatever there is."""
    lines = []
    try:
        report = scan_checkpoint(folder)
        lines = [report.summary, *map(str, report.findings)]
    except CheckpointError as error:
        lines = [str(error)]
    assert all(line.isprintable() for line in lines)


@given(header=st.dictionaries(NAMES, ENTRIES | VALUES, max_size=4), data=st.binary(max_size=40))
@FUZZ
def test_fuzz_headers(header: Any, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(encode(header, data))
        survives(Path(folder))


@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(SOUND_FILE)), st.binary(max_size=8), st.integers(0, 8)),
        min_size=1,
        max_size=4,
    )
)
@FUZZ
def test_fuzz_bytes_of_a_sound_file(cuts: Any) -> None:
    content = SOUND_FILE
    for place, put, taken in cuts:
        content = content[:place] + put + content[place + taken :]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {}, config(2))
        (Path(folder) / "model.safetensors").write_bytes(content)
        survives(Path(folder))


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=6), dtype=DTYPES)
@FUZZ
def test_fuzz_values(values: list[float], dtype: str) -> None:
    data = struct.pack(f"<{len(values)}f", *values)
    with tempfile.TemporaryDirectory() as folder:
        header = {
            SCALE: {"dtype": dtype, "shape": [len(data)], "data_offsets": [0, len(data)]},
            **{
                f"model.layers.{i}.self_attn.v_scale": {
                    "dtype": "F32",
                    "shape": [],
                    "data_offsets": [len(data) + 4 * i, len(data) + 4 * i + 4],
                }
                for i in range(len(values))
            },
        }
        (Path(folder) / "model.safetensors").write_bytes(encode(header, data + data))
        survives(Path(folder))


@given(settings_=st.dictionaries(NAMES, VALUES, max_size=3), index=st.none() | VALUES)
@FUZZ
def test_fuzz_json(settings_: Any, index: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), scales({0: (0.05, 0.04)}), {**config(1), **settings_})
        if index is not None:
            content = json.dumps({"weight_map": index})
            (folder / "model.safetensors.index.json").write_text(content)
        survives(folder)


@given(content=st.binary(max_size=200))
@FUZZ
def test_fuzz_any_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), {SCALE: 0.5})
        for file in ("config.json", "hf_quant_config.json", "params.json"):
            (folder / file).write_bytes(content)
        survives(folder)
        (folder / "model.safetensors").write_bytes(content)
        survives(folder)
