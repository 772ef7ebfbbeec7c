"""The online front: `AsyncEngine`, and the OpenAI-compatible server on top of it.

HTTP ──> routes ──> AsyncEngine ──> text workers ──> scheduler process
         (FastAPI)  (this process)  (threads, or processes)  (one a rank)
"""

from __future__ import annotations
