"""Speed, measured beside the physical limit.

Owns: workloads (`workloads.py`), the offline benchmark (`offline.py`), the host's work without a
model (`scheduler.py`, `prefix.py`), the machine's measured ceilings (`limits.py`), clocks and
percentiles (`timing.py`), tables (`report.py`). Does not own: anything the engine needs to run.
Invariant: a throughput comes with the share of the machine's limit that it reaches.
Read next: `offline.py`.
"""
