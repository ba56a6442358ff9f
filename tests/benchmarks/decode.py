"""Runs inside an engine's environment: serves one checkpoint, and times what it is told to decode.

``python decode.py vllm|sglang CHECKPOINT``. It prints ``READY``, then for each line
``BATCH TOKENS`` of its standard input ``SECONDS n``: how long so many requests of so many tokens
took. It ends with its input.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PROMPT = [11, 42, 7, 99, 256, 512, 3, 1000]


def main() -> None:
    engine, checkpoint = sys.argv[1:]
    generate = {"vllm": _vllm, "sglang": _sglang}[engine](checkpoint)
    generate(1, 4)
    print("READY", flush=True)
    for line in sys.stdin:
        batch, tokens = map(int, line.split())
        started = time.perf_counter()
        generate(batch, tokens)
        print("SECONDS", time.perf_counter() - started, flush=True)


def _prompts(batch: int) -> list[list[int]]:
    return [[(token + i) % 1024 for token in _PROMPT] for i in range(batch)]


def _vllm(checkpoint: str) -> Callable[[int, int], None]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        kv_cache_dtype="fp8",
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        enable_prefix_caching=False,
    )

    def generate(batch: int, tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in _prompts(batch)]
        engine.generate(prompts, sampling, use_tqdm=False)

    return generate


def _sglang(checkpoint: str) -> Callable[[int, int], None]:
    import sglang

    engine = sglang.Engine(
        model_path=checkpoint,
        device="cpu",
        attention_backend="torch_native",
        kv_cache_dtype="fp8_e4m3",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        # The pool is small: SGLang's attention here converts the whole of it for each token.
        max_total_tokens=2048,
        context_length=256,
        dtype="bfloat16",
        log_level="info",
    )

    def generate(batch: int, tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        engine.generate(input_ids=_prompts(batch), sampling_params=sampling)

    return generate


if __name__ == "__main__":
    main()
