"""What a scan of a large checkpoint costs: ``python -m tests.benchmarks.checkpoint``.

Writes 100 sparse shards with 100,000 tensors and 500 GB in all, which take some 20 MB of disk, and
prints the time of ``scan_checkpoint`` and the memory that it takes beyond the import of torch, each
in a fresh process.
"""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 3
SHARDS = 100
TENSORS = 100_000
BYTES = 500 * 10**9
LAYERS = 60
_ROOT = Path(__file__).resolve().parents[2]
_SCAN = """
import resource, sys, time
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
from kvcache_plugin import scan_checkpoint
imported = time.perf_counter()
report = scan_checkpoint(sys.argv[1])
ended = time.perf_counter()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert (report.num_tensors, len(report.layers), report.findings) == (TENSORS, LAYERS, ())
print("MEASURED", ended - imported, ended - started, (after - before) / 1024)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        runs = [_run(folder) for _ in range(RUNS)]
    print(f"{SHARDS} shards, {TENSORS:,} tensors, {BYTES / 1e9:.0f} GB; median of {RUNS} processes")
    scan, with_imports, memory = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"{scan:8.2f} s   scan_checkpoint")
    print(f"{with_imports:8.2f} s   with the import of the package, after torch")
    print(f"{memory:8.0f} MiB beyond the import of torch")


def write_checkpoint(folder: Path) -> None:
    """Mixture-of-experts names, as the largest checkpoints have them, and sound scales."""
    names = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(LAYERS)
        for name in ("k_scale", "v_scale", "q_proj.weight", "k_proj.weight", "v_proj.weight")
    ]
    experts = (
        f"model.layers.{number % LAYERS}.mlp.experts.{number // LAYERS}.{name}"
        for number in range(TENSORS)
        for name in ("up_proj.weight", "up_proj.weight_scale")
    )
    names += [next(experts) for _ in range(TENSORS - len(names))]
    size = BYTES // TENSORS // 4 * 4
    placed = {name: _shard(number % SHARDS) for number, name in enumerate(names)}
    for number in range(SHARDS):
        _write_shard(folder / _shard(number), names[number::SHARDS], size)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 8,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "symmetric": True,
                "dynamic": False,
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": BYTES}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard(number: int) -> str:
    return f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"


def _write_shard(path: Path, names: list[str], size: int) -> None:
    """A file whose weights are holes; only headers and scales take space on the disk."""
    header, scales, end = {}, [], 0
    for name in names:
        is_scale = name.endswith(("k_scale", "v_scale"))
        begin, end = end, end + (4 if is_scale else size)
        header[name] = {
            "dtype": "F32" if is_scale else "U8",
            "shape": [1] if is_scale else [size],
            "data_offsets": [begin, end],
        }
        if is_scale:
            scales.append((begin, 0.05 if name.endswith("k_scale") else 0.04))
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        start = file.tell()
        for begin, scale in scales:
            file.seek(start + begin)
            file.write(struct.pack("<f", scale))
        file.truncate(start + end)


def _run(folder: str) -> tuple[float, float, float]:
    code = _SCAN.replace("TENSORS", str(TENSORS)).replace("LAYERS", str(LAYERS))
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, cwd=_ROOT
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("MEASURED "))
    scan, with_imports, memory = map(float, line.split()[1:])
    return scan, with_imports, memory


if __name__ == "__main__":
    main()
