"""Engines have environments of their own: what is not installed in this one is left to the others."""

from __future__ import annotations

from importlib.util import find_spec

_SERVERS = ("vllm", "sglang")
_TRANSFORMERS = [
    "test_transformers.py",
    "test_transformers_pressure.py",
    "test_transformers_faults.py",
    "test_attack_transformers.py",
]

# An environment with a server brings the transformers that the server wants, which is not what those tests are for.
collect_ignore = [
    *(server for server in _SERVERS if not find_spec(server)),
    *(_TRANSFORMERS if any(map(find_spec, _SERVERS)) else []),
]
