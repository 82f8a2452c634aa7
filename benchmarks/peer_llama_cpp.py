"""llama.cpp on the measures of `cpu.py` that it has; prints one line of JSON.

python -P peer_llama_cpp.py FILE.gguf
"""

import json
import random
import statistics
import sys
import time

from llama_cpp import Llama

CONTEXT, STEPS = 700, 24


def main(path):
    llm = Llama(path, n_ctx=2048, n_threads=2, n_threads_batch=2, logits_all=False, verbose=False)
    rng = random.Random(1)
    prefill, steps = [], []
    for _ in range(3):
        llm.reset()
        start = time.perf_counter()
        llm.eval([rng.randrange(1000, 40_000) for _ in range(CONTEXT)])
        prefill.append((time.perf_counter() - start) * 1e3)
        for _ in range(STEPS):
            start = time.perf_counter()
            llm.eval([rng.randrange(1000, 40_000)])
            steps.append((time.perf_counter() - start) * 1e3)
    print(
        json.dumps(
            {"decode step, batch 1": statistics.median(steps), "cold prefill of 700": statistics.median(prefill)}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
