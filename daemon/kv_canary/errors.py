"""Every error that KV Canary raises, in one tree.

KVCanaryError                     catch this to catch all of them
├── SettingsError                 a setting is unknown or its value is not allowed (also a ValueError)
├── GeometryError                 a page buffer does not describe memory that exists (also a ValueError)
├── ManifestError                 a manifest is not filled yet, or a document is none (also a ValueError)
├── UnsupportedPoolError          no attacher is registered for a pool's class (also a NotImplementedError)
├── UnsupportedEngineError        the engine's version or its hook targets are not what the adapter expects
├── CanaryMismatchError           raised into the engine's next step when `on_mismatch = raise`
├── CommandError                  a command was understood and refused; carries the HTTP status of that refusal
│   ├── NotFoundError             404: no group, incident, sweep or drill of that name
│   ├── ConflictError             409: the state does not allow it now
│   └── ForbiddenError            403: the settings do not allow it
└── UnreachableError              the command line found nobody at the address
"""


class KVCanaryError(Exception):
    """Base of all errors raised by KV Canary."""


class SettingsError(KVCanaryError, ValueError):
    """A setting is unknown, or its value is not allowed. The message names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"{key}: {value!r} is not allowed; allowed: {allowed}")


class GeometryError(KVCanaryError, ValueError):
    """A page buffer reaches outside its tensor, or buffers of one group disagree on the number of pages."""


class ManifestError(KVCanaryError, ValueError):
    """A manifest of exported pages is asked for what it does not know yet, or a document is no manifest."""


class UnsupportedPoolError(KVCanaryError, NotImplementedError):
    """No attacher is registered for the class of this pool."""

    def __init__(self, pool_class: str, supported: tuple[str, ...]) -> None:
        self.pool_class, self.supported = pool_class, supported
        names = ", ".join(supported) or "none"
        super().__init__(
            f"no attacher is registered for pool class {pool_class}; supported: {names}. "
            "Add one with kv_canary.register_pool_attacher(pool_class, attacher)."
        )


class UnsupportedEngineError(KVCanaryError):
    """The engine is of a version, or has hook targets of a shape, that the adapter was not written for."""


class CanaryMismatchError(KVCanaryError):
    """The KV cache of this engine holds a confirmed mismatch and `on_mismatch` is `raise`."""


class CommandError(KVCanaryError):
    """A command was refused. `status` is the HTTP status that says so."""

    status = 400
    title = "Command refused"


class NotFoundError(CommandError):
    """There is nothing of that name."""

    status = 404
    title = "Not found"


class ConflictError(CommandError):
    """The present state does not allow the command."""

    status = 409
    title = "Not possible now"


class ForbiddenError(CommandError):
    """The settings do not allow the command."""

    status = 403
    title = "Not allowed by the settings"


class UnreachableError(KVCanaryError):
    """No KV Canary answers at the address."""
