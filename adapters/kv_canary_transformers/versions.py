"""Which transformers this adapter was written for. The version is refused in one line, before anything is touched."""

from __future__ import annotations

from kv_canary.errors import UnsupportedEngineError

OLDEST = (5, 18)
NEWEST_TESTED = "5.24.0"
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} and later 5.x releases (tested up to {NEWEST_TESTED})"


def check_version() -> str:
    """The installed version of transformers; `UnsupportedEngineError` if it is too old or of another major release."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedEngineError(f"transformers is not installed; kv-canary supports {SUPPORTED}") from error
    version: str = transformers.__version__
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major, minor = 0, 0
    if major != OLDEST[0] or (major, minor) < OLDEST:
        raise UnsupportedEngineError(f"transformers {version} is not supported; kv-canary supports {SUPPORTED}")
    return version
