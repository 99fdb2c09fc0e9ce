"""The pool registry: which attacher is found for a pool, and what is said about it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from builders.pools import make_buffer, make_group
from kv_canary import registry
from kv_canary.errors import KVCanaryError, UnsupportedPoolError
from kv_canary.geometry import CanaryGroup
from kv_canary.registry import attach_canary_groups, find_attacher, register_pool_attacher, supported_pools
from kv_canary.settings import Settings

CPU = torch.device("cpu")


class Pool: ...


class ChildPool(Pool): ...


class Mixin: ...


class GrandchildPool(Mixin, ChildPool): ...


class OtherPool: ...


class Attacher:
    """Gives the groups it was made with and remembers how it was called."""

    def __init__(self, *groups: CanaryGroup) -> None:
        self.groups = groups
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __call__(self, pool: Any, **arguments: Any) -> tuple[CanaryGroup, ...]:
        self.calls.append((pool, arguments))
        return self.groups


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts with nothing registered and leaves the process's registry alone."""
    monkeypatch.setattr(registry, "_attachers", {})


def dotted(name: str) -> str:
    return f"{__name__}.{name}"


def test_an_attacher_serves_its_class() -> None:
    attacher = Attacher()
    register_pool_attacher(Pool, attacher)
    assert find_attacher(Pool) == (dotted("Pool"), attacher)


def test_an_attacher_serves_subclasses() -> None:
    attacher = Attacher()
    register_pool_attacher(Pool, attacher)
    assert find_attacher(GrandchildPool) == (dotted("Pool"), attacher)


def test_the_nearest_class_of_the_mro_wins_whatever_the_order_of_registration() -> None:
    near, far = Attacher(), Attacher()
    register_pool_attacher(ChildPool, near)
    register_pool_attacher(Pool, far)
    assert find_attacher(GrandchildPool) == (dotted("ChildPool"), near)


def test_a_mixin_that_stands_first_in_the_mro_wins() -> None:
    mixin = Attacher()
    register_pool_attacher(ChildPool, Attacher())
    register_pool_attacher(Mixin, mixin)
    assert find_attacher(GrandchildPool) == (dotted("Mixin"), mixin)


def test_a_class_may_be_named_by_its_dotted_path() -> None:
    attacher = Attacher()
    register_pool_attacher(dotted("Pool"), attacher)
    assert find_attacher(ChildPool)[1] is attacher


def test_registering_again_replaces() -> None:
    first, second = Attacher(), Attacher()
    register_pool_attacher(Pool, first)
    register_pool_attacher(dotted("Pool"), second)
    assert find_attacher(Pool)[1] is second
    assert supported_pools() == (dotted("Pool"),)


def test_an_unknown_pool_is_told_what_is_supported() -> None:
    register_pool_attacher("z.Pool", Attacher())
    register_pool_attacher("a.Pool", Attacher())
    with pytest.raises(UnsupportedPoolError) as caught:
        attach_canary_groups(pool=OtherPool(), settings=Settings(), device=CPU)
    assert str(caught.value) == (
        f"no attacher is registered for pool class {dotted('OtherPool')}; supported: a.Pool, z.Pool. "
        "Add one with kv_canary.register_pool_attacher(pool_class, attacher)."
    )
    assert (caught.value.pool_class, caught.value.supported) == (dotted("OtherPool"), ("a.Pool", "z.Pool"))


def test_an_empty_registry_supports_none() -> None:
    with pytest.raises(UnsupportedPoolError, match="supported: none"):
        find_attacher(OtherPool)


def test_an_unknown_pool_is_a_not_implemented_error_and_one_of_ours() -> None:
    assert issubclass(UnsupportedPoolError, NotImplementedError)
    assert issubclass(UnsupportedPoolError, KVCanaryError)


def test_the_attacher_gets_the_pool_and_what_was_asked_for() -> None:
    attacher, pool, settings = Attacher(), Pool(), Settings()
    register_pool_attacher(Pool, attacher)
    assert attach_canary_groups(pool=pool, settings=settings, device=CPU, kv_token_id_vs_position_offset=1) == ()
    assert attacher.calls == [(pool, {"settings": settings, "device": CPU, "kv_token_id_vs_position_offset": 1})]


@pytest.mark.parametrize("offset", [0, 1])
def test_every_group_carries_the_offset_even_if_its_attacher_forgot_it(offset: int) -> None:
    register_pool_attacher(Pool, Attacher(make_group(name="a"), make_group(name="b", kv_token_id_vs_position_offset=1)))
    groups = attach_canary_groups(pool=Pool(), settings=Settings(), device=CPU, kv_token_id_vs_position_offset=offset)
    assert [(group.name, group.kv_token_id_vs_position_offset) for group in groups] == [("a", offset), ("b", offset)]


def test_the_offset_is_zero_unless_said_otherwise() -> None:
    register_pool_attacher(Pool, Attacher(make_group()))
    (group,) = attach_canary_groups(pool=Pool(), settings=Settings(), device=CPU)
    assert group.kv_token_id_vs_position_offset == 0


def test_attaching_a_pool_writes_one_info_line_that_says_everything(caplog: pytest.LogCaptureFixture) -> None:
    groups = (
        make_group([make_buffer("k"), make_buffer("v", run_bytes=16)], name="full"),
        make_group(name="w", kind="swa"),
    )
    register_pool_attacher(Pool, Attacher(*groups))
    with caplog.at_level(logging.INFO, "kv_canary"):
        attach_canary_groups(pool=ChildPool(), settings=Settings(), device=CPU, kv_token_id_vs_position_offset=1)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kv_canary", "INFO")
    assert record.getMessage() == (
        f"attached pool {dotted('ChildPool')} with {dotted('Pool')}: coverage all, groups full,w, kinds full,swa, "
        "3 buffers, 144 bytes a page, fingerprint memory 96 bytes, offset 1"
    )
