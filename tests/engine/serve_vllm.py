"""Runs inside vLLM's environment: serves one checkpoint and prints ``TOKENS [...]``.

``python serve_vllm.py CHECKPOINT [--kv-cache-dtype fp8|bfloat16|auto]``
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

PROMPT = (11, 42, 7, 99, 256, 512, 3, 1000)
NUM_TOKENS = 8


def start(checkpoint: str, **arguments: Any) -> Any:
    """Loads a checkpoint.

    :param arguments: further arguments of ``vllm.LLM``.
    """
    # Read when vllm is imported: 1 GiB of KV cache is ample, and nothing is reported anywhere.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # As vLLM's own (only its loggers are shown), with the logger's name, which the tests need.
    logging_config = Path(__file__).with_name("logging_vllm.json")
    os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(logging_config))
    from vllm import LLM

    return LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        **arguments,
    )


def generate(engine: Any) -> list[int]:
    """Generates greedily from a fixed prompt of token ids."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    (result,) = engine.generate([{"prompt_token_ids": list(PROMPT)}], sampling, use_tqdm=False)
    return list(result.outputs[0].token_ids)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    arguments = parser.parse_args()
    engine = start(arguments.checkpoint, kv_cache_dtype=arguments.kv_cache_dtype)
    print(f"TOKENS {generate(engine)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
