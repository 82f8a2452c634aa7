"""vLLM on the operations of `bookkeeping.py`; prints one line of JSON. Runs under an interpreter that has vLLM."""

import json
import os
import random
import statistics
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCKS, SIZE, TOKENS, ROUNDS = 20_000, 16, 4_096, 60


def timed(function):
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def kv_config():
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def manager_times():
    manager = KVCacheManager(kv_config(), max_model_len=8192, scheduler_block_size=SIZE, hash_block_size=SIZE)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)
    rng = random.Random(0)
    names = ("create and hash", "full-hit match", "take the hit", "cold allocate", "free", "decode append")
    times = {name: [] for name in names}

    def request(name, tokens):
        params = SamplingParams(max_tokens=100)
        return Request(name, tokens, params, None, block_hasher=hasher)

    for number in range(ROUNDS):
        tokens = [rng.randrange(100_000) for _ in range(TOKENS)]
        seconds, cold = timed(lambda: request(f"cold{number}", list(tokens)))
        times["create and hash"].append(seconds)
        blocks, hit, *_ = manager.get_computed_blocks(cold)
        times["cold allocate"].append(timed(lambda: manager.allocate_slots(cold, TOKENS, hit, blocks))[0])
        cold.num_computed_tokens = TOKENS
        appends = []
        for _ in range(4 * SIZE):

            def append():
                cold.append_output_token_ids(7)
                manager.allocate_slots(cold, 1)
                cold.num_computed_tokens += 1

            appends.append(timed(append)[0])
        times["decode append"].append(statistics.fmean(appends))
        times["free"].append(timed(lambda: manager.free(cold))[0])
        again = request(f"again{number}", list(tokens))
        seconds, (blocks, hit, *_) = timed(lambda: manager.get_computed_blocks(again))
        times["full-hit match"].append(seconds)
        assert hit == TOKENS - SIZE, hit
        times["take the hit"].append(timed(lambda: manager.allocate_slots(again, TOKENS - hit, hit, blocks))[0])
        manager.free(again)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def scheduler_times(num_sequences, steps=200):
    """Microseconds of schedule + update_from_output when every request decodes one token."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager

    folder = "/tmp/segue-bench-vllm-model"
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/config.json", "w") as out:
        json.dump(
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100_000, "hidden_size": 192,
             "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
             "max_position_embeddings": 8192, "torch_dtype": "float32"}, out)  # fmt: skip
    model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=8192)
    cache = CacheConfig(block_size=SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = BLOCKS
    sched = SchedulerConfig(
        max_num_seqs=num_sequences, max_num_batched_tokens=16_384, max_model_len=8192, is_encoder_decoder=False
    )
    config = VllmConfig(
        scheduler_config=sched, model_config=model, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config(),
        structured_output_manager=StructuredOutputManager(config),
        block_size=SIZE,
        hash_block_size=SIZE,
        log_stats=False,
    )
    hasher = get_request_block_hasher(SIZE, sha256)
    rng = random.Random(1)
    for number in range(num_sequences):
        params = SamplingParams(max_tokens=steps + 50, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        tokens = [rng.randrange(100_000) for _ in range(rng.randrange(40, 64))]
        scheduler.add_request(Request(f"r{number}", tokens, params, None, block_hasher=hasher))
    taken = []
    for step in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        names = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[9]] * len(names),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        again = time.perf_counter()
        scheduler.update_from_output(plan, output)
        if step > 2:
            taken.append(middle - start + time.perf_counter() - again)
    return statistics.median(taken) * 1e6


if __name__ == "__main__":
    found = manager_times()
    for count in (1, 8, 64, 256):
        found[f"plan + apply, {count} decoding"] = scheduler_times(count)
    print(json.dumps(found))
