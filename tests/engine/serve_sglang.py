"""Runs inside SGLang's environment: serves one checkpoint and prints ``TOKENS [...]``.

``python serve_sglang.py CHECKPOINT [--kv-cache-dtype fp8_e4m3|bf16|auto]``

SGLang ends its whole process tree when a worker dies, so run it in a session of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

PROMPT = (11, 42, 7, 99, 256, 512, 3, 1000)
NUM_TOKENS = 8


def main() -> int:
    """Generates greedily from a fixed prompt of token ids."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--kv-cache-dtype", default="fp8_e4m3")
    arguments = parser.parse_args()

    # SGLang's own log format leaves out the level and the logger's name, which the tests need.
    logging_config = Path(__file__).with_name("logging_sglang.json")
    os.environ.setdefault("SGLANG_LOGGING_CONFIG_PATH", str(logging_config))
    import sglang

    engine = sglang.Engine(
        model_path=arguments.checkpoint,
        device="cpu",
        attention_backend="torch_native",
        kv_cache_dtype=arguments.kv_cache_dtype,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=512,
        context_length=128,
        dtype="bfloat16",
        log_level="info",
    )
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    result = engine.generate(input_ids=list(PROMPT), sampling_params=sampling)
    print(f"TOKENS {list(result['output_ids'])}", flush=True)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
