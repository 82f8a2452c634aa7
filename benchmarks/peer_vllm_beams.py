"""vLLM's beam search on the CPU, after a prompt of which its prefix cache has all but the last five tokens: prints one line of
JSON, seconds by width.

VLLM_CPU_KVCACHE_SPACE=2 python -P peer_vllm_beams.py FOLDER BLOCK_SIZE WIDTH…
"""

import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams


def main(folder, block_size, widths):
    llm = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=block_size,
        enable_prefix_caching=True, max_logprobs=256,
    )  # fmt: skip
    rng = random.Random(1)

    def measured(width):
        """A new prompt each time: else the cache has the search's own lines too."""
        ids = [rng.randrange(1000, 40_000) for _ in range(705)]
        one = SamplingParams(max_tokens=1, temperature=0)
        llm.generate([{"prompt_token_ids": ids[:700]}], one, use_tqdm=False)
        began = time.perf_counter()
        llm.beam_search([{"prompt_token_ids": ids}], BeamSearchParams(beam_width=width, max_tokens=3, ignore_eos=True))
        return time.perf_counter() - began

    measured(widths[0])  # the first call compiles
    print(json.dumps({width: statistics.median(measured(width) for _ in range(3)) for width in widths}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(width) for width in sys.argv[3:]])
