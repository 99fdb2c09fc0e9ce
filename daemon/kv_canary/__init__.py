"""KV Canary: knows, in production, that the KV cache of an LLM server is right."""

from kv_canary._version import __version__
from kv_canary.errors import (
    CanaryMismatchError,
    KVCanaryError,
    SettingsError,
    UnsupportedEngineError,
    UnsupportedPoolError,
)
from kv_canary.settings import Budget, Settings

__all__ = [
    "Budget",
    "CanaryMismatchError",
    "KVCanaryError",
    "Settings",
    "SettingsError",
    "UnsupportedEngineError",
    "UnsupportedPoolError",
    "__version__",
]
