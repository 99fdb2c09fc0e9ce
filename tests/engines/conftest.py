"""Engines have environments of their own: what is not installed in this one is left to the others."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [
    *([] if find_spec("vllm") else ["vllm"]),
    *(["test_transformers.py", "test_transformers_pressure.py"] if find_spec("vllm") else []),
]
