"""From what users say to the final configuration, and in words why each choice was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .config import EngineConfig, ModelFacts, ResolvedConfig
from .errors import ConfigError

if TYPE_CHECKING:
    import torch

    from .utils.hardware import Hardware

__all__ = ["resolve"]


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
    triton = _triton(config, hardware, cpu, choices)
    _check_length(config, model)
    _check_ranks(config, hardware, model, cpu)
    running, budget = _batch_limits(config, device, choices)
    attn = _attn(config, hardware, model, dtype, triton, choices)
    return ResolvedConfig(
        device=torch.device(device),
        dtype=dtype,
        native=native.on,
        triton=triton.on,
        quantization=_quantization(config, model, cpu, native, choices),
        kv_dtype=_kv_dtype(config, dtype, native, choices),
        deterministic=_deterministic(config, model, native, triton, attn),
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
        attn=attn,
        kernels=config.kernels,
        cuda_graph_max_bs=_graphs(config, model, cpu, attn, running, choices),
        load_format=config.load_format,
        logprobs_mode=config.logprobs_mode,
        threads=choose(
            "threads",
            config.threads,
            max(1, hardware.num_cpus // config.ranks_per_node),
            "CPUs this process may use" if config.ranks_per_node == 1 else "CPUs for each rank",
        ),
        tp=config.tp,
        ep=config.ep,
        nnodes=config.nnodes,
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


class _Kernels(NamedTuple):
    """Whether some kernels run, and in words why."""

    on: bool
    why: str


def _native(
    config: EngineConfig, hardware: Hardware, model: ModelFacts, cpu: bool, choices: _Choices
) -> _Kernels:
    if not cpu:
        found = _Kernels(False, "they are for CPUs, and the model runs on CUDA")
    elif config.kernels == "reference":
        found = _Kernels(False, "--kernels reference")
    elif not hardware.has_native:
        found = _Kernels(False, "the native CPU kernels are not there")
    elif config.tp > 1:
        found = _Kernels(False, "they compute whole steps, and --tp ranks sum within one")
    else:
        found = _Kernels(True, "the native CPU kernels compute whole steps")
    choices.choose("native", None, found.on, found.why)
    return found


def _triton(config: EngineConfig, hardware: Hardware, cpu: bool, choices: _Choices) -> _Kernels:
    if cpu:
        return _Kernels(False, "they are for CUDA, and the model runs on the CPU")
    if config.kernels == "reference":
        found = _Kernels(False, "--kernels reference")
    elif not hardware.has_triton:
        found = _Kernels(False, f"{hardware.why_no_triton}; plain PyTorch ops are slower")
    else:
        found = _Kernels(True, "fused kernels for CUDA")
    choices.choose("triton", None, found.on, found.why)
    return found


def _attn(
    config: EngineConfig,
    hardware: Hardware,
    model: ModelFacts,
    dtype: torch.dtype,
    triton: _Kernels,
    choices: _Choices,
) -> str:
    """The attention backend. FlashInfer's is not the default where it is installed: it plans on
    the host and runs without CUDA graphs, and ours decodes near the speed of a copy (docs/log.md).
    The two were not timed side by side."""
    asked = None if config.attn == "auto" else config.attn
    if asked in ("triton", "flashinfer") and not triton.on:
        raise ConfigError(
            f"--attn {asked} needs the Triton kernels, which don't run: {triton.why}; "
            "use --attn auto"
        )
    if asked == "flashinfer":
        if not hardware.has_flashinfer:
            raise ConfigError(
                "--attn flashinfer: the package flashinfer-python is not installed; install it "
                "or use --attn auto"
            )
        if dtype.itemsize != 2:
            raise ConfigError(
                f"--attn flashinfer has no kernels for {str(dtype).removeprefix('torch.')}: use "
                "--dtype bfloat16 or float16, or --attn auto"
            )
    default, why = "torch", "the Triton kernels don't run"
    takes_heads = model.head_dim <= 256 and model.head_dim % 2 == 0
    if not takes_heads:
        why = f"heads of {model.head_dim} are odd or above 256, which other backends don't take"
        if asked not in (None, "torch"):
            raise ConfigError(f"--attn {asked}: {why}; use --attn auto")
    elif triton.on:
        default, why = "triton", "it runs in CUDA graphs, and decodes near the speed of a copy"
    attn: str = choices.choose("attn", asked, default, why)
    return attn


def _graphs(
    config: EngineConfig, model: ModelFacts, cpu: bool, attn: str, running: int, choices: _Choices
) -> int:
    asked = config.cuda_graph_max_bs
    if cpu:
        why = "there are none on a CPU"
    elif attn != "triton":
        why = f"attention by {attn} plans each step on the host"
    else:
        default = "as many as max_running_requests"
        most = None if asked is None else min(asked, running)
        size: int = choices.choose("cuda_graph_max_bs", most, running, default)
        return size
    if asked:
        raise ConfigError(f"--cuda-graph-max-bs {asked} needs CUDA graphs, and {why}; leave it out")
    choices.choose("cuda_graph_max_bs", None, 0, why)
    return 0


def _quantization(
    config: EngineConfig, model: ModelFacts, cpu: bool, native: _Kernels, choices: _Choices
) -> str:
    asked = config.quantization
    if asked in ("int8", "int4"):
        if not cpu:
            raise ConfigError(
                f"--quantization {asked} is for CPUs: use --device cpu or --quantization none"
            )
        if config.tp > 1:
            raise ConfigError(
                f"--quantization {asked} runs on one rank only, not with --tp {config.tp}: use "
                "--quantization none"
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
    config: EngineConfig, dtype: torch.dtype, native: _Kernels, choices: _Choices
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


def _deterministic(
    config: EngineConfig, model: ModelFacts, native: _Kernels, triton: _Kernels, attn: str
) -> bool:
    if not config.deterministic or native.on:
        return config.deterministic
    if not triton.on:
        raise ConfigError(
            "--deterministic needs the native CPU kernels or the Triton kernels, and neither run: "
            f"{native.why}; {triton.why}; leave it out"
        )
    if attn != "triton":
        raise ConfigError(f"--deterministic on CUDA needs --attn triton, not {attn}")
    if config.tp > 2:
        raise ConfigError(
            f"--deterministic with --tp {config.tp} on CUDA: the order in which more than two "
            "ranks are summed depends on the size of the batch; use --tp 2 at most, or leave it out"
        )
    return True


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


def _check_ranks(config: EngineConfig, hardware: Hardware, model: ModelFacts, cpu: bool) -> None:
    """Whether heads can be cut over the ranks, and whether each has a device."""
    ranks, heads, kv_heads = config.tp, model.num_qo_heads, model.num_kv_heads
    if config.ep:
        _check_experts(ranks, model.num_experts)
    if ranks == 1:
        return
    possible = [
        n for n in range(1, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)
    ]
    if ranks not in possible:
        raise ConfigError(
            f"--tp {ranks}: the model has {heads} query heads, which must divide by it, and "
            f"{kv_heads} KV heads, which must divide by it or it by them; choose from "
            f"{', '.join(map(str, possible))}"
        )
    if not cpu and hardware.num_gpus < config.ranks_per_node:
        nodes = config.nnodes
        asked = f"--tp {ranks}" if nodes == 1 else f"--tp {ranks} with --nnodes {nodes}"
        raise ConfigError(
            f"{asked} needs a GPU for each of a node's {config.ranks_per_node} ranks, and torch "
            f"sees {hardware.num_gpus} here: lower --tp, or use --device cpu"
        )


def _check_experts(ranks: int, experts: int) -> None:
    """Whether each rank can hold whole experts."""
    if not experts:
        raise ConfigError("--ep shares out experts, and the model has none: leave it out")
    if ranks == 1:
        raise ConfigError("--ep shares experts out to --tp ranks, and there is one: raise --tp")
    if ranks > experts:
        raise ConfigError(
            f"--ep with --tp {ranks}: the model has {experts} experts, not one for each rank; "
            "lower --tp or leave --ep out"
        )


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
