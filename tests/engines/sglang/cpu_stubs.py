"""Lets SGLang be imported on a machine without a GPU: empty modules in place of those that only exist for one.

Installed into the site-packages of the test environment together with a .pth file, so that every process of that
environment has it before SGLang is imported. A module that is really installed always wins, because the finder stands
last. What a stub offers does nothing at all: a copy that SGLang makes through sgl_kernel does not happen here. Tests
must not rest on anything behind a stub.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# No more than is imported: transformers, for one, takes what can be found for installed and asks for its version.
STUBBED = frozenset(
    {
        *("cutlass", "sgl_kernel", "soundfile", "torchaudio", "torchvision"),
        *("anthropic", "llguidance", "mistral_common", "openai_harmony", "outlines", "outlines_core"),
        *("tiktoken", "watchfiles"),
    }
)


class Nothing:
    """Stands for any class, function, decorator or value of a stubbed module."""

    def __init__(self, *names: Any, **_: Any) -> None:
        self.__name__ = self.__qualname__ = names[0] if names and isinstance(names[0], str) else "nothing"

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # `@stub` and `@stub(...)` both leave the decorated function as it is.
        is_decorated = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if is_decorated else self

    def __getattr__(self, name: str) -> Any:
        if name[:2] == name[-2:] == "__":
            raise AttributeError(name)
        return Nothing(name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return other  # in an annotation such as `stub.Type | None`

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class StubModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name[:2] == name[-2:] == "__":
            raise AttributeError(name)
        self.__dict__[name] = value = Nothing(name)
        return value


class StubFinder:
    """Finder and loader in one; packages all the way down, so that `import stub.a.b` works."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    if not any(type(finder).__name__ == StubFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(StubFinder())  # type: ignore[arg-type]
