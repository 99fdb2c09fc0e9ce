"""KV Canary for transformers' continuous batching.

from kv_canary_transformers import attach

canary = attach(manager)  # or attach(model): every manager that the model makes is guarded
"""

from kv_canary_transformers.attach import attach

__all__ = ["attach"]
