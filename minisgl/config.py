"""The engine's configuration: what users say, and what it becomes on a machine.

    EngineConfig (flags, keyword arguments) --resolve(config, hardware, model)--> ResolvedConfig

Command-line flags are made from `EngineConfig`'s fields: their names, types, defaults and the
`metadata` here. Both classes are frozen; nothing changes after `resolve` (`resolve.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .errors import ConfigError
from .utils.flags import option

if TYPE_CHECKING:  # commands that load no model start without it
    import torch

__all__ = ["EngineConfig", "ModelFacts", "ResolvedConfig", "flag_name", "split_address"]


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
        "results depend on nothing else in the batch, bit for bit: what the native CPU kernels "
        "always give; on CUDA batch-invariant Triton kernels, which are slower",
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
    attn: str = option(
        "auto", "attention backend", choices=("auto", "torch", "triton", "flashinfer")
    )
    kernels: str = option(
        "auto",
        "auto takes the fastest implementation of each op, reference the plain one",
        choices=("auto", "reference"),
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest batch whose decode step is captured as a CUDA graph, beside mixed steps of up to "
        "2,048 tokens; 0 captures none (default, and at most: max_running_requests)",
    )
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy makes random weights for its config, for benchmarks",
        choices=("auto", "dummy"),
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
        "tensor-parallel ranks, a process each: query heads must divide by it, and KV heads by it "
        "or it by them",
        aliases=("--tensor-parallel-size", "--tp-size"),
    )
    ep: bool = option(
        False,
        "expert parallelism: each of the --tp ranks holds whole experts, not a part of each",
        aliases=("--enable-expert-parallel",),
    )
    nnodes: int = option(1, "hosts that the --tp ranks run on, equally many on each")
    node_rank: int = option(
        0,
        "which of the --nnodes hosts this is; 0 answers requests, and on the others `minisgl "
        "serve` starts their ranks and no server",
    )
    dist_init_addr: str | None = option(
        None, "HOST:PORT of node 0, where it listens for the other nodes; the same on all of them"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if choices and value not in choices:
                raise ConfigError(
                    f"{flag_name(item.name)} = {value!r}: choose from {', '.join(choices)}"
                )
        for name in (
            "max_model_len",
            "page_size",
            "num_pages",
            "max_running_requests",
            "max_prefill_length",
            "threads",
            "tp",
            "nnodes",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{flag_name(name)} = {value!r} must be an integer of at least 1")
        graphs = self.cuda_graph_max_bs
        if graphs is not None and (type(graphs) is not int or graphs < 0):
            raise ConfigError(
                f"--cuda-graph-max-bs = {graphs!r} must be an integer of at least 1, or 0 for none"
            )
        ratio = self.memory_ratio
        if ratio is not None and not (isinstance(ratio, (int, float)) and 0 < ratio <= 1):
            raise ConfigError(f"{flag_name('memory_ratio')} = {ratio!r} must be above 0, at most 1")
        for name in ("deterministic", "ep"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ConfigError(f"{flag_name(name)} = {value!r} must be True or False")
        if self.threads is not None and self.threads > _MAX_THREADS:
            raise ConfigError(f"--threads = {self.threads} must be at most {_MAX_THREADS}")
        if self.schedule_policy == "lpm" and self.cache == "naive":
            raise ConfigError(
                "--schedule-policy lpm orders requests by their cached prefixes, and --cache naive "
                "has none: use --cache radix or --schedule-policy fcfs"
            )
        _check_nodes(self)

    @property
    def ranks_per_node(self) -> int:
        """How many of the `tp` ranks each node has."""
        return self.tp // self.nnodes


@dataclass(frozen=True)
class ModelFacts:
    """What `resolve` needs to know of the model."""

    dtype: torch.dtype
    max_context: int
    rope_type: str = "default"
    head_dim: int = 128
    num_qo_heads: int = 0
    num_kv_heads: int = 0
    num_experts: int = 0
    """Of each layer that is a mixture of experts; 0 where none is."""
    quantized: bool = False
    """Some matrix is stored in blocks that can be computed with as they are."""


@dataclass(frozen=True)
class ResolvedConfig:
    """The final configuration, and in words why each choice was made."""

    device: torch.device
    dtype: torch.dtype
    native: bool
    """Whether the native CPU kernels compute the forward."""
    triton: bool
    """Whether the Triton kernels compute the ops, on CUDA."""
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
    cuda_graph_max_bs: int
    """0: no step is captured."""
    load_format: str
    logprobs_mode: str
    threads: int
    tp: int
    ep: bool
    """Whether ranks hold whole experts."""
    nnodes: int
    """Hosts that the ranks run on."""
    reasons: tuple[str, ...] = ()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 host stands in brackets. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
    if not host or not 0 < number < 1 << 16:
        raise ConfigError(
            f"--dist-init-addr = {address!r} must be HOST:PORT with a port of 1 to 65535, for "
            "example 10.0.0.1:29500 or [fd00::1]:29500"
        )
    return host, number


def _check_nodes(config: EngineConfig) -> None:
    """Whether the flags about nodes fit each other."""
    nodes, node, address = config.nnodes, config.node_rank, config.dist_init_addr
    if type(node) is not int or not 0 <= node < nodes:
        raise ConfigError(
            f"--node-rank = {node!r} must be an integer of at least 0 and less than --nnodes "
            f"{nodes}"
        )
    if config.tp % nodes:
        raise ConfigError(
            f"--tp {config.tp} must divide by --nnodes {nodes}, for each node has equally many "
            "ranks: change one of them"
        )
    if address is not None and not isinstance(address, str):
        raise ConfigError(f"--dist-init-addr = {address!r} must be a text, HOST:PORT")
    if nodes > 1 and address is None:
        raise ConfigError(
            f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, an address of node 0 that the "
            "other nodes reach"
        )
    if nodes == 1 and address is not None:
        raise ConfigError(
            f"--dist-init-addr {address} is where several nodes meet, and --nnodes is 1: raise "
            "--nnodes or leave the address out"
        )
    if address is not None:
        split_address(address)


def flag_name(field_name: str) -> str:
    """The command-line flag of a field."""
    return "--" + field_name.replace("_", "-")
