"""vLLM's scheduler with the plugin, and no model: what is sampled is a function of the tokens before it."""

import functools
import json
import tempfile
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)  # fmt: skip
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from segue.base.clock import VirtualClock
from segue.vllm import Scheduler

BLOCK = 16
EOS = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip


@functools.cache
def model_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="segue-vllm-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def make_config(
    *,
    num_blocks=64,
    is_async=False,
    options=None,
    max_seqs=16,
    budget=512,
    offloads=False,
    has_lora=False,
    order="fcfs",
    **parallel,
):
    """`offloads`: with vLLM's offloading connector, and host memory for 1,000 blocks."""
    offloading = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 1000 * 4096, "block_size": BLOCK},
    )
    config = VllmConfig(
        model_config=ModelConfig(model=model_folder(), skip_tokenizer_init=True, max_model_len=1024, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.5, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_model_len=1024,
            is_encoder_decoder=False,
            async_scheduling=is_async,
            policy=order,
        ),
        parallel_config=ParallelConfig(**parallel),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=offloading if offloads else None,
        lora_config=LoRAConfig(max_loras=2, lora_dtype="auto") if has_lora else None,
        additional_config={"segue": options or {}},
    )
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = is_async  # which is switched off where there is no accelerator
    return config


def make_scheduler(cls=Scheduler, *, num_groups=1, **options):
    config = make_config(**options)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at in range(num_groups)]
    num_blocks = config.cache_config.num_gpu_blocks
    size, page = (
        spec.page_size_bytes * num_blocks,
        spec.page_size_bytes,
    )  # some versions' connector has a block's size from these
    strides = (size, page) if "layers" in KVCacheTensor.__dataclass_fields__ else ()
    tensors = [KVCacheTensor(size, group.layer_names, *strides) for group in groups]
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    if cls is PlainScheduler and config.scheduler_config.async_scheduling:
        cls = AsyncScheduler
    return cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


def next_token(tokens) -> int:
    """Never eos; another for every history."""
    value = 7
    for token in tokens[-8:]:
        value = (value * 31 + token) % 499
    return 10 + (value + len(tokens)) % 490


class World:
    """A scheduler and a model that is none. It keeps what each position of each block was computed from, so that KV that is not
    what it should be is seen."""

    def __init__(self, cls=Scheduler, **options) -> None:
        self.scheduler = make_scheduler(cls, **options)
        self.clock = VirtualClock(1000.0)
        if hasattr(self.scheduler, "jobs"):
            self.scheduler.clock = self.scheduler.jobs._clock = self.clock
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> the tokens up to that position
        self.sequences: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.prefilled: dict[str, int] = {}  # tokens of each request's first run
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, object] = {}
        self.reports: dict[str, dict] = {}
        self.num_preempted = self.num_loaded = 0
        self._under_way: list = []
        self._host: dict[tuple[int, int], tuple[int, ...]] = {}  # as `kv`, of what was offloaded
        self._to_store: dict[int, object] = {}

    def add(self, name, tokens, max_tokens=4, *, salt=None, lora=None, embeds=None, **fields):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=fields or None)
        params.update_from_generation_config({}, EOS) if hasattr(params, "update_from_generation_config") else None
        request = Request(
            request_id=name, prompt_token_ids=list(tokens), prompt_embeds=embeds, sampling_params=params, pooling_params=None,
            cache_salt=salt, block_hasher=HASHER, lora_request=lora,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self):
        """One step; with asynchronous scheduling the next is planned before this one's output is known."""
        planned = self.scheduler.schedule()
        self._under_way.append((planned, self._compute(planned)))
        is_async = self.scheduler.scheduler_config.async_scheduling
        if not is_async or len(self._under_way) > 1 or not planned.total_num_scheduled_tokens:
            self._land()
        return planned

    def run(self, most=2000):
        for _ in range(most):
            if not self.scheduler.has_requests() and not self._under_way:
                return self
            self.step() if self.scheduler.has_requests() else self._land()
        raise AssertionError(f"requests are stuck: {list(self.scheduler.requests)}")

    def _land(self):
        planned, output = self._under_way.pop(0)
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for one in outputs.outputs:
                self.said.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
                    self.reports[one.request_id] = (one.kv_transfer_params or {}).get("segue", {})

    def _compute(self, planned):
        transferred = (
            self._transfer(planned.kv_connector_metadata) if planned.kv_connector_metadata is not None else None
        )
        for copy in planned.kv_cache_block_copies or ():
            source, target = (copy[-2], copy[-1]) if isinstance(copy, tuple) else (copy.src_block_id, copy.dst_block_id)
            for offset in range(BLOCK):
                if (source, offset) in self.kv:
                    self.kv[target, offset] = self.kv[source, offset]
        for new in planned.scheduled_new_reqs:
            self.sequences[new.req_id] = list(new.prompt_token_ids) + self.said.get(new.req_id, [])
            self.tables[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = new.num_computed_tokens
            self.prefilled.setdefault(new.req_id, len(new.prompt_token_ids) - new.num_computed_tokens)
        cached = planned.scheduled_cached_reqs
        self.num_preempted += len(cached.resumed_req_ids)
        # As with vLLM's own runner: what a resumed request sampled in a step that was thrown away is gone.
        self.sequences |= {name: list(cached.all_token_ids[name]) for name in cached.resumed_req_ids}
        for at, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                self.tables[name] = list(blocks[0])
            elif blocks is not None:
                self.tables[name] += blocks[0]
            self.computed[name] = cached.num_computed_tokens[at]
        sampled, names = [], list(planned.num_scheduled_tokens)
        for name in names:
            tokens, table, first = self.sequences[name], self.tables[name], self.computed[name]
            last = first + planned.num_scheduled_tokens[name]
            for position in range(first):
                known = self.kv.get((table[position // BLOCK], position % BLOCK))
                assert known == tuple(tokens[: position + 1]), f"{name}: position {position} has other KV than its own"
            for position in range(first, last):
                self.kv[table[position // BLOCK], position % BLOCK] = tuple(tokens[: position + 1])
            if last == len(tokens):
                tokens.append(next_token(tokens))
                sampled.append([tokens[-1]])
            else:
                sampled.append([])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=transferred,
        )  # fmt: skip

    def _transfer(self, asked):
        """What the offloading connector's worker does: stores wait until the next step begins, loads do not."""
        stores = {
            **self._to_store,
            **{job: asked.store_jobs.pop(job) for job in asked.jobs_to_flush or () if job in asked.store_jobs},
        }
        for job in stores.values():
            self._copy(self.kv, job.src_spec, self._host, job.dst_spec)
        for job in asked.load_jobs.values():
            self.num_loaded += len(job.dst_spec.block_ids)
            self._copy(self._host, job.src_spec, self.kv, job.dst_spec)
        self._to_store = dict(asked.store_jobs)
        done = OffloadingWorkerMetadata(dict.fromkeys([*stores, *asked.load_jobs], 1))
        return KVConnectorOutput(
            finished_recving={job.req_id for job in asked.load_jobs.values()}, kv_connector_worker_meta=done
        )

    def _copy(self, there, sources, here, targets):
        for source, target in zip(sources.block_ids.tolist(), targets.block_ids.tolist(), strict=True):
            for offset in range(BLOCK):
                here[target, offset] = there[source, offset]

    @property
    def num_free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def num_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


def expected(tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:]


def prompt(seed, length):
    return [10 + (seed * 131 + at * 17) % 480 for at in range(length)]
