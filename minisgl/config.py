"""The engine's configuration: what users say, what it becomes on a machine, and why.

    EngineConfig (flags, keyword arguments) --resolve(config, hardware, model)--> ResolvedConfig

Command-line flags are made from `EngineConfig`'s fields: their names, types, defaults and the
`metadata` here. Both classes are frozen; nothing changes after `resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ConfigError
from .utils.flags import option

if TYPE_CHECKING:  # commands that load no model start without it
    import torch

    from .utils.hardware import Hardware

__all__ = ["EngineConfig", "ModelFacts", "ResolvedConfig", "resolve"]


DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("float32", "bfloat16", "int8")
_MAX_THREADS = 1024
"""Far more crash the OpenMP runtime instead of raising."""


@dataclass(frozen=True)
class EngineConfig:
    """How to run a model. None means: chosen by `resolve` from the machine and the model."""

    dtype: str = option("auto", "type of weights and KV cache", choices=("auto", *DTYPES))
    quantization: str = option(
        "auto",
        "weights: auto keeps those of a quantized GGUF file as they are where native CPU kernels "
        "run and no --dtype is given; none dequantizes them; int8 or int4 quantizes any "
        "checkpoint while it is read",
        choices=("auto", "none", "int8", "int4"),
    )
    kv_dtype: str = option(
        "auto",
        "type of the KV cache; others than auto, which is that of the computation, need the "
        "native CPU kernels",
        choices=("auto", *KV_DTYPES),
    )
    deterministic: bool = option(
        False,
        "promise results that depend on nothing else in the batch, bit for bit: what the native "
        "CPU kernels always give, and an error where they don't run",
    )
    device: str = option("auto", "cpu or cuda", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens", aliases=("--context-length",)
    )
    page_size: int = option(16, "tokens in a page of the KV cache", aliases=("--block-size",))
    num_pages: int | None = option(None, "pages of the KV cache instead of what fits in memory")
    memory_ratio: float | None = option(
        None,
        "share of the available memory that the engine may use (default: 0.9 on CUDA; on CPU, "
        "0.3 for the KV cache)",
        aliases=("--gpu-memory-utilization", "--mem-fraction-static"),
    )
    max_running_requests: int | None = option(
        None,
        "most requests in one batch (default: 64 on CPU, 256 on CUDA)",
        aliases=("--max-num-seqs",),
    )
    max_prefill_length: int | None = option(
        None,
        "tokens computed in one step, decoding included (default: 256 on CPU, 8192 on CUDA)",
        aliases=("--max-num-batched-tokens", "--chunked-prefill-size"),
    )
    cache: str = option(
        "radix",
        "radix shares the pages of equal prefixes between requests, naive shares nothing",
        choices=("radix", "naive"),
    )
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests of equal priority: fcfs by arrival, lpm the longest cached "
        "prefix first",
        aliases=("--scheduling-policy",),
        choices=("fcfs", "lpm"),
    )
    overlap: str = option(
        "auto",
        "prepare and launch a step while the last one computes; auto: on CUDA only",
        choices=("auto", "on", "off"),
    )
    attn: str = option("auto", "attention backend", choices=("auto", "torch"))
    kernels: str = option(
        "auto",
        "auto takes the fastest implementation of each op, reference the plain one",
        choices=("auto", "reference"),
    )
    logprobs_mode: str = option(
        "raw",
        "log-probabilities of the model's logits or of the distribution sampled from",
        choices=("raw", "processed"),
    )
    threads: int | None = option(
        None, "CPU threads (default: OMP_NUM_THREADS, or the CPUs this process may use)"
    )
    tp: int = option(
        1,
        "tensor-parallel ranks; this version runs 1",
        aliases=("--tensor-parallel-size", "--tp-size"),
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(
                    f"{_name(item.name)} = {value!r}: choose from {', '.join(choices)}"
                )
        for name in (
            "max_model_len",
            "page_size",
            "num_pages",
            "max_running_requests",
            "max_prefill_length",
            "threads",
            "tp",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{_name(name)} = {value!r} must be an integer of at least 1")
        ratio = self.memory_ratio
        if ratio is not None and not (isinstance(ratio, (int, float)) and 0 < ratio <= 1):
            raise ConfigError(f"{_name('memory_ratio')} = {ratio!r} must be above 0, at most 1")
        if type(self.deterministic) is not bool:
            raise ConfigError(f"--deterministic = {self.deterministic!r} must be True or False")
        if self.threads is not None and self.threads > _MAX_THREADS:
            raise ConfigError(f"--threads = {self.threads} must be at most {_MAX_THREADS}")
        if self.schedule_policy == "lpm" and self.cache == "naive":
            raise ConfigError(
                "--schedule-policy lpm orders requests by their cached prefixes, and --cache naive "
                "has none: use --cache radix or --schedule-policy fcfs"
            )
        if self.tp != 1:
            raise ConfigError(f"{_name('tp')} = {self.tp}: this version runs on one rank only")


@dataclass(frozen=True)
class ModelFacts:
    """What `resolve` needs to know of the model."""

    dtype: torch.dtype
    max_context: int
    rope_type: str = "default"
    is_dense: bool = True
    """No layer is a mixture of experts."""
    quantized: bool = False
    """Some matrix is stored in blocks that can be computed with as they are."""


@dataclass(frozen=True)
class ResolvedConfig:
    """The final configuration, and in words why each choice was made."""

    device: torch.device
    dtype: torch.dtype
    native: bool
    """Whether the native CPU kernels compute the forward."""
    quantization: str
    """none, keep (a GGUF file's blocks as they are), int8 or int4."""
    kv_dtype: torch.dtype
    deterministic: bool
    max_model_len: int
    max_model_len_asked: bool
    """Whether the user named the length, so that a pool too small for it is an error."""
    page_size: int
    num_pages: int | None
    memory_ratio: float
    max_running_requests: int
    max_prefill_length: int
    cache: str
    schedule_policy: str
    overlap: bool
    attn: str
    kernels: str
    logprobs_mode: str
    threads: int
    reasons: tuple[str, ...] = ()


class _Choices:
    """What the user left open, and in words why it became what it is."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def choose(self, name: str, given: Any, default: Any, why: str) -> Any:
        """The user's value, else the default, whose reason is noted."""
        if given is not None:
            return given
        self.reasons.append(f"{name} = {default}: {why}")
        return default


def resolve(config: EngineConfig, hardware: Hardware, model: ModelFacts) -> ResolvedConfig:
    """Fill in what `config` leaves open; raises `ConfigError` for what can't be.

    Pure: the same arguments give the same result, on every rank.
    """
    import torch

    choices = _Choices()
    choose = choices.choose
    device = _device(config, hardware, choices)
    cpu = device == "cpu"
    dtype = _dtype(config, model, cpu, choices)
    native = _native(config, hardware, model, cpu, choices)
    _check_length(config, model)
    running, budget = _batch_limits(config, device, choices)
    return ResolvedConfig(
        device=torch.device(device),
        dtype=dtype,
        native=native.on,
        quantization=_quantization(config, model, cpu, native, choices),
        kv_dtype=_kv_dtype(config, dtype, native, choices),
        deterministic=_deterministic(config, native),
        max_model_len=choose(
            "max_model_len", config.max_model_len, model.max_context, "the model's context"
        ),
        max_model_len_asked=config.max_model_len is not None,
        page_size=config.page_size,
        num_pages=config.num_pages,
        memory_ratio=choose(
            "memory_ratio", config.memory_ratio, 0.3 if cpu else 0.9, f"default on {device}"
        ),
        max_running_requests=running,
        max_prefill_length=budget,
        cache=config.cache,
        schedule_policy=config.schedule_policy,
        overlap=_overlap(config, cpu, choices),
        attn=choose(
            "attn",
            None if config.attn == "auto" else config.attn,
            "torch",
            "the only backend of this version",
        ),
        kernels=config.kernels,
        logprobs_mode=config.logprobs_mode,
        threads=choose("threads", config.threads, hardware.num_cpus, "CPUs this process may use"),
        reasons=tuple(choices.reasons),
    )


def _device(config: EngineConfig, hardware: Hardware, choices: _Choices) -> str:
    asked = None if config.device == "auto" else config.device
    if asked == "cuda" and not hardware.has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    found = "cuda" if hardware.has_cuda else "cpu"
    why = f"torch sees {'a' if hardware.has_cuda else 'no'} GPU"
    device: str = choices.choose("device", asked, found, why)
    return device


def _dtype(config: EngineConfig, model: ModelFacts, cpu: bool, choices: _Choices) -> torch.dtype:
    import torch

    from .utils.torch_utils import parse_dtype

    asked = None if config.dtype == "auto" else parse_dtype(config.dtype)
    if cpu and asked == torch.float16:
        raise ConfigError("float16 is unusably slow on CPU: use --dtype bfloat16 or float32")
    default, why = model.dtype, "the checkpoint's type"
    if cpu and model.dtype == torch.float16:
        default, why = torch.bfloat16, "the checkpoint's float16 is slow on CPU"
    dtype: torch.dtype = choices.choose("dtype", asked, default, why)
    return dtype


class _Native(NamedTuple):
    """Whether native kernels run, and in words why."""

    on: bool
    why: str


def _native(
    config: EngineConfig, hardware: Hardware, model: ModelFacts, cpu: bool, choices: _Choices
) -> _Native:
    if not cpu:
        found = _Native(False, "they are for CPUs, and the model runs on CUDA")
    elif config.kernels == "reference":
        found = _Native(False, "--kernels reference")
    elif not hardware.has_native:
        found = _Native(False, "the native CPU kernels are not there")
    elif not model.is_dense:
        found = _Native(False, "the model has experts, which the native CPU kernels don't compute")
    else:
        found = _Native(True, "the native CPU kernels compute dense models")
    choices.choose("native", None, found.on, found.why)
    return found


def _quantization(
    config: EngineConfig, model: ModelFacts, cpu: bool, native: _Native, choices: _Choices
) -> str:
    asked = config.quantization
    if asked in ("int8", "int4"):
        if not cpu:
            raise ConfigError(
                f"--quantization {asked} is for CPUs: use --device cpu or --quantization none"
            )
        if not native.on:
            choices.reasons.append(
                f"quantization = {asked} as asked, but each use dequantizes the weights, which is "
                f"slow: native kernels don't run ({native.why})"
            )
        return asked
    if not model.quantized:
        default, why = "none", "the checkpoint has no blocks that could be kept"
    elif not native.on:
        default, why = "none", f"quantized weights are kept for native kernels only ({native.why})"
    elif config.dtype != "auto":
        default, why = "none", f"--dtype {config.dtype} asks for weights of that type"
    else:
        default, why = "keep", "the checkpoint is quantized, and native kernels use its blocks"
    quantization: str = choices.choose(
        "quantization", None if asked == "auto" else asked, default, why
    )
    return quantization


def _kv_dtype(
    config: EngineConfig, dtype: torch.dtype, native: _Native, choices: _Choices
) -> torch.dtype:
    import torch

    asked = None if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    kv_dtype: torch.dtype = choices.choose("kv_dtype", asked, dtype, "the type of computation")
    if kv_dtype != dtype and not native.on:
        raise ConfigError(
            f"--kv-dtype {config.kv_dtype} beside --dtype {str(dtype).removeprefix('torch.')} "
            f"needs the native CPU kernels, which don't run: {native.why}; use --kv-dtype auto"
        )
    return kv_dtype


def _deterministic(config: EngineConfig, native: _Native) -> bool:
    if config.deterministic and not native.on:
        raise ConfigError(
            "--deterministic needs the native CPU kernels, which don't run: "
            f"{native.why}; leave it out"
        )
    return config.deterministic


def _overlap(config: EngineConfig, cpu: bool, choices: _Choices) -> bool:
    overlap: bool = choices.choose(
        "overlap",
        None if config.overlap == "auto" else config.overlap == "on",
        not cpu,
        "a CPU computes in the thread that would prepare the next step"
        if cpu
        else "the GPU computes while the host prepares the next step",
    )
    return overlap


def _check_length(config: EngineConfig, model: ModelFacts) -> None:
    if config.max_model_len is None or config.max_model_len <= model.max_context:
        return
    why = f"the model's context is {model.max_context}"
    if model.rope_type == "dynamic":
        why += ", and beyond it dynamic NTK angles depend on what else is in the batch"
    raise ConfigError(f"--max-model-len = {config.max_model_len}: {why}")


def _batch_limits(config: EngineConfig, device: str, choices: _Choices) -> tuple[int, int]:
    """Most running requests, and the token budget of a step, which has room for one of each.

    A CPU's budget is small: whoever decodes waits for the prefill beside it, and larger chunks
    are not faster there.
    """
    running_default, budget_default = (64, 256) if device == "cpu" else (256, 8192)
    budget = choices.choose(
        "max_prefill_length",
        config.max_prefill_length,
        max(budget_default, config.max_running_requests or 0),
        f"default on {device}",
    )
    running = choices.choose(
        "max_running_requests",
        config.max_running_requests,
        min(running_default, budget),
        f"default on {device}, at most max_prefill_length",
    )
    if running > budget:
        raise ConfigError(
            f"--max-running-requests {running} is above --max-prefill-length {budget}: a step "
            "must have room for one token of each running request"
        )
    return running, budget


def _name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
