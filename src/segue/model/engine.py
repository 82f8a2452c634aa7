"""An engine with a model of its own: `Engine("smollm2")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from segue.base.clock import Clock
from segue.base.config import EngineConfig, Environment
from segue.base.errors import InvalidRequest, RequestTooLong, UnsupportedModel
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.model.backend import Backend
from segue.model.catalog import Progress
from segue.model.decoder import Decoder
from segue.model.loading import LoadedModel, open_model
from segue.model.memory import KVBudget, check_weights_fit, kv_budget
from segue.model.runner import ModelRunner
from segue.model.session import Session
from segue.model.spec import ModelSpec
from segue.policies import Policy

if TYPE_CHECKING:
    from segue.model.cuda.fused import Fused
    from segue.model.cuda.tiles import TileKernel

DType = Literal["auto", "fp32", "bf16", "fp16"]
_COUNTS = ("num_blocks", "block_size", "max_model_len", "max_step_tokens", "max_running", "threads")
_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded and how much it may hold; None means: find out."""

    device: str = "auto"
    dtype: DType = "auto"
    quantize: Literal["int8"] | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"  # fp8: half the memory, CUDA only
    attention: Literal["auto", "triton"] = "auto"  # auto: kernels for Hopper devices where they can be had, on CUDA
    exact: bool = False  # an answer does not depend on what else is computed with it; on a CPU it never does
    num_blocks: int | None = None
    kv_memory: int | str | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_step_tokens: int = 2048
    max_running: int | None = None
    prefix_caching: bool = True
    tiers: Sequence[str] = ()  # where KV goes besides the device: "host=4GiB", "disk=/path,20GiB"
    threads: int | None = None  # of the whole process: torch has one pool
    native: bool = True  # False: plain torch even where our CPU kernels would run
    own_process: bool = False  # a server's: nothing else in this process needs torch's threads

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *_TORCH_DTYPES):
            raise InvalidRequest("dtype", f"{self.dtype!r} is not one of auto, {', '.join(_TORCH_DTYPES)}")
        if self.quantize not in (None, "int8"):
            raise InvalidRequest("quantize", f"{self.quantize!r} is not known: int8 is")
        if self.quantize and self.dtype not in ("auto", "fp32"):
            raise InvalidRequest("dtype", f"quantize={self.quantize} computes in fp32: leave dtype out")
        if self.kv_dtype not in ("auto", "fp8"):
            raise InvalidRequest("kv_dtype", f"{self.kv_dtype!r} is not one of auto, fp8")
        if self.attention not in ("auto", "triton"):
            raise InvalidRequest("attention", f"{self.attention!r} is not one of auto, triton")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidRequest(name, f"must be a whole number of at least 1, got {value!r}")


class Engine(EngineCore):
    """Everything `EngineCore` does, on a built-in model, a Hugging Face folder or a GGUF file.

    `budget` and `backend_note` say what was chosen for KV memory and for computing.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2",
        *,
        policy: Policy | str | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        chosen = _options(options)
        environment = Environment.read()
        loaded = model
        if not isinstance(loaded, LoadedModel):
            loaded = open_model(str(loaded), environment.cache_dir, progress=progress)
        spec = loaded.spec
        if chosen.threads is not None:
            torch.set_num_threads(chosen.threads)
        max_len = _max_len(chosen, spec.max_positions)
        device = _device(chosen.device)
        backend, self.backend_note = _backend(chosen, loaded, device, max_len, environment)
        check_weights_fit(spec, _TORCH_DTYPES[_precision(chosen, device)], device)
        decoder = Decoder(spec, loaded.weights, backend)
        max_running = chosen.max_running if chosen.max_running is not None else min(256, chosen.max_step_tokens)
        self.budget: KVBudget = kv_budget(
            spec,
            chosen.block_size,
            backend.kv_dtype,
            device,
            max_len,
            num_blocks=chosen.num_blocks,
            kv_memory=chosen.kv_memory,
            step_bytes=lambda: _step_bytes(decoder, backend, chosen, max_running, max_len),
        )
        config = EngineConfig(
            self.budget.num_blocks,
            chosen.block_size,
            chosen.max_step_tokens,
            max_running,
            max_len,
            chosen.prefix_caching,
        )
        self.runner = _runner(decoder, backend, config, self.budget)
        if chosen.own_process:
            self.runner.warm_up()
        self.model = loaded
        super().__init__(
            self.runner,
            config,
            tokenizer=loaded.tokenizer,
            vocab_size=spec.vocab_size,
            model_fingerprint=_kv_identity(loaded, backend, chosen, device),
            state_identity=f"{loaded.fingerprint}/{chosen.quantize or _precision(chosen, device)}{_kv_suffix(chosen)}",
            policy=policy,
            clock=clock,
            tiers=chosen.tiers,
        )

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        text = self.model.chat_template.render(messages, **options)
        return self.model.tokenizer.encode(text, add_special=False)

    def session(
        self,
        system: str | None = None,
        *,
        params: SamplingParams | None = None,
        hold: bool | float = True,
        salt: str = "",
        job_id: str | None = None,
        **template_options: Any,
    ) -> Session:
        """A conversation that keeps its state, so that each turn computes only what is new. For `hold` see `Request`."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return Session(self, messages, template_options, params=params, hold=hold, salt=salt, job_id=job_id)

    def load_session(
        self,
        path: str | Path,
        *,
        params: SamplingParams | None = None,
        hold: bool | float = True,
        salt: str = "",
        job_id: str | None = None,
    ) -> Session:
        """A session that `Session.save` wrote, with its KV. A file that is damaged or does not fit changes nothing."""
        return Session.load(self, path, params=params, hold=hold, salt=salt, job_id=job_id)


def _kv_identity(loaded: LoadedModel, backend: Backend, options: ModelOptions, device: torch.device) -> str:
    """Of KV that others may find and take for their own: to the last bit it depends on how it was computed."""
    how = [backend.name, options.quantize or _precision(options, device), str(backend.kv_dtype)]
    if options.exact and device.type == "cuda":
        how.append("exact")
    return "/".join([loaded.fingerprint, *how])


def _kv_suffix(options: ModelOptions) -> str:
    return f"/{options.kv_dtype}" if options.kv_dtype != "auto" else ""


def _step_bytes(
    decoder: Decoder, backend: Backend, options: ModelOptions, max_running: int, max_len: int
) -> int | None:
    """What a step takes besides weights and KV, where it can be measured."""
    if backend.name != "cuda":
        return None
    from segue.model.cuda.backend import CudaBackend
    from segue.model.cuda.capacity import step_bytes

    assert isinstance(backend, CudaBackend)
    try:
        return step_bytes(decoder, backend, options.block_size, options.max_step_tokens, max_running, max_len)
    except torch.OutOfMemoryError as error:
        raise RequestTooLong(
            "max_step_tokens", f"a step of {options.max_step_tokens} tokens does not fit beside the weights: {error}"
        ) from error


def _runner(decoder: Decoder, backend: Backend, config: EngineConfig, budget: KVBudget) -> ModelRunner:
    try:
        if backend.name == "cuda":
            from segue.model.cuda.backend import CudaBackend
            from segue.model.cuda.runner import CudaRunner

            assert isinstance(backend, CudaBackend)
            return CudaRunner(decoder, backend, config)
        return ModelRunner(decoder, backend, config)
    except (RuntimeError, MemoryError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise RequestTooLong("kv_memory", f"{budget} cannot be had: {error}") from error


def _options(given: Mapping[str, Any]) -> ModelOptions:
    known = ModelOptions.__dataclass_fields__
    for name in given:
        if name not in known:
            raise InvalidRequest(name, f"is not an option; these are: {', '.join(known)}")
    return ModelOptions(**given)


def _max_len(options: ModelOptions, most: int) -> int:
    wanted = options.max_model_len
    if wanted is None:
        return most
    if not 1 < wanted <= most:
        raise InvalidRequest("max_model_len", f"must be between 2 and the model's {most}, got {wanted}")
    return wanted


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest("device", f"{name!r} is not a device: cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest("device", f"{name!r} is not supported: cpu and cuda are")
    if device.type == "cuda" and not torch.cuda.device_count():
        raise InvalidRequest("device", f"{name} was asked for, and torch finds no CUDA device")
    if device.index:
        raise InvalidRequest(
            "device", f"{name}: it is always the first one; CUDA_VISIBLE_DEVICES={device.index} makes another the first"
        )
    return device


def _precision(options: ModelOptions, device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    if options.dtype != "auto":
        return options.dtype
    return "bf16" if device.type == "cuda" else "fp32"


def _backend(
    options: ModelOptions, loaded: LoadedModel, device: torch.device, max_len: int, environment: Environment
) -> tuple[Backend, str]:
    """The backend, and a line that says which and why."""
    from segue.model.torch_backend import TorchBackend

    dtype = _precision(options, device)
    reason = "as asked"
    if options.attention == "triton" and (device.type != "cuda" or not options.native):
        raise UnsupportedModel(f"attention=triton needs our kernels on a CUDA device; this is {device}")
    if options.kv_dtype == "fp8" and (device.type != "cuda" or not options.native):
        raise UnsupportedModel(f"kv_dtype=fp8 needs our kernels on a CUDA device; this is {device}")
    if device.type == "cpu" and options.native and dtype != "fp16":
        from segue.model import native
        from segue.model.native_backend import NativeBackend

        try:
            kernels = native.load(environment.cache_dir / "kernels", environment.compiler)
        except native.NativeUnavailable as error:
            reason = str(error)
        else:
            storage, threads = options.quantize or dtype, torch.get_num_threads()
            backend = NativeBackend(kernels, loaded.spec, storage, options.max_step_tokens, max_len)
            if options.own_process:
                # What torch itself still does is small, and its threads would wait for the next of it at full speed.
                kernels.threads = threads
                torch.set_num_threads(1)
            return backend, f"native CPU kernels, {threads} threads, {storage} weights"
    if options.quantize:
        raise UnsupportedModel(f"quantize={options.quantize} needs the native CPU kernels; this is {device}, {reason}")
    if device.type == "cuda" and options.native:
        from segue.model.cuda import why_not

        if (missing := why_not(loaded.spec)) is None:
            from segue.model.cuda.backend import CudaBackend

            if options.kv_dtype == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
                raise UnsupportedModel(
                    f"kv_dtype=fp8 needs a device of compute capability 8.9 or more; {device} has less"
                )
            kv_dtype = torch.float8_e4m3fn if options.kv_dtype == "fp8" else None
            fused, tile_kernel, attention_note = _attention(options, loaded.spec, _TORCH_DTYPES[dtype], device)
            backend_here = CudaBackend(
                loaded.spec,
                _TORCH_DTYPES[dtype],
                device,
                max_len,
                exact=options.exact,
                kv_dtype=kv_dtype,
                fused=fused,
                tile_kernel=tile_kernel,
            )
            how = [dtype, *(["fp8 KV"] if kv_dtype else []), *(["exact"] if options.exact else []), *attention_note]
            how += ["attention for Hopper"] if fused is not None else []
            how += [f"few rows by a library ({backend_here.missing})"] if backend_here.missing else []
            return backend_here, f"our kernels on {device}, {', '.join(how)}"
        reason = missing
    if options.attention == "triton":
        raise UnsupportedModel(f"attention=triton needs our kernels on {device}: {reason}")
    if options.exact:
        raise UnsupportedModel(f"exact=True needs our kernels on {device}: {reason}")
    if options.kv_dtype == "fp8":
        raise UnsupportedModel(f"kv_dtype=fp8 needs our kernels on {device}: {reason}")
    note = f"torch on {device}, {dtype}" + (f" ({reason})" if reason != "as asked" else "")
    return TorchBackend(loaded.spec, _TORCH_DTYPES[dtype], device, max_len), note


def _attention(
    options: ModelOptions, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[Fused | None, TileKernel | None, list[str]]:
    """Of few rows with what lies before it, and of prompts, where there are kernels for that; and a note if there should be."""
    if options.attention == "triton" or options.exact or options.kv_dtype != "auto":
        return None, None, []
    from segue.model.cuda import fused, tiles
    from segue.model.cuda.driver import CompilerMissing

    try:
        of_few = fused.kernels_for(spec, options.block_size, dtype, device)
        return of_few, tiles.kernel_for(spec, options.block_size, dtype, device), []
    except CompilerMissing as error:
        return None, None, [f"attention by Triton ({error})"]
