"""Speed, measured beside the physical limit.

Owns: workloads (`workloads.py`), the offline benchmark (`offline.py`) and its suite (`suite.py`),
the workload that engines are compared on (`reference.py`) with published shapes (`shapes.py`), each
GPU kernel by itself (`kernels.py`, `kernel_cases.py`), a client that measures servers over HTTP
(`serve.py`, and what it sends, when and how: `load.py`, `arrivals.py`, `client.py`, `figures.py`,
`plot.py`), the host's work without a model (`scheduler.py`, `prefix.py`), the machine's measured
ceilings (`limits.py`), clocks and percentiles (`timing.py`), tables (`report.py`). Does not own:
anything the engine needs to run.
Invariant: an offline throughput comes with the share of the machine's limit that it reaches; a
client says what share of the machine it used itself.
Read next: `offline.py`, `serve.py`.
"""
