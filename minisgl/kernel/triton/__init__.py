"""Triton kernels for CUDA devices, with the semantics of the references beside this package.

Owns: one file for each op or family of ops. Does not own: which implementation an op takes
(`kernel/dispatch.py`), or the order of kernels in a step (`attention/`, `engine/`).
Invariant: no kernel needs anything of the host once it is launched: lengths and tables are read
on the device, so that a captured graph stays right when they change.
Read next: `runtime.py`, `norm.py`, then `decode.py`.

Nothing is imported here: Triton is optional, and `resolve.py` decides whether it is used.
"""
