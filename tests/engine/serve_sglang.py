"""Runs inside SGLang's environment: serves one checkpoint and prints ``TOKENS [...]``.

``python serve_sglang.py CHECKPOINT [--kv-cache-dtype fp8_e4m3|bf16|auto] [--tp-size N]``

SGLang ends its whole process tree when a worker dies, so run it in a session of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

PROMPT = (11, 42, 7, 99, 256, 512, 3, 1000)
NUM_TOKENS = 8


def start(checkpoint: str, *, kv_cache_dtype: str = "fp8_e4m3", **arguments: Any) -> Any:
    """SGLang's engine on a CPU, in the one way that needs nothing but Python.

    :param arguments: further arguments of ``sglang.Engine``.
    """
    # SGLang's own log format leaves out the level and the logger's name, which the tests need.
    logging_config = Path(__file__).with_name("logging_sglang.json")
    os.environ.setdefault("SGLANG_LOGGING_CONFIG_PATH", str(logging_config))
    import sglang

    return sglang.Engine(
        model_path=checkpoint,
        device="cpu",
        attention_backend="torch_native",
        kv_cache_dtype=kv_cache_dtype,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        context_length=128,
        dtype="bfloat16",
        log_level="info",
        **{"max_total_tokens": 512, **arguments},
    )


def generate(engine: Any) -> list[int]:
    """Greedy tokens after a fixed prompt of token ids."""
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return list(engine.generate(input_ids=list(PROMPT), sampling_params=sampling)["output_ids"])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--kv-cache-dtype", default="fp8_e4m3")
    parser.add_argument("--tp-size", type=int, default=1)
    arguments = parser.parse_args()

    engine = start(
        arguments.checkpoint, kv_cache_dtype=arguments.kv_cache_dtype, tp_size=arguments.tp_size
    )
    print(f"TOKENS {generate(engine)}", flush=True)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
