"""The process-wide configuration that SGLang's classes read, and models for servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server's configuration, published in this process, and SGLang's pools in the registry."""
    from engines.sglang.pool_cases import publish_server_args
    from kv_canary_sglang import pools

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        publish_server_args(tmp_path_factory.mktemp("model"))
        pools.register()
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engines.sglang.models import build_llama

    return build_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engines.sglang.models import build_hybrid

    return build_hybrid(tmp_path_factory.mktemp("hybrid"))
