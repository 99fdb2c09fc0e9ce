"""What the audit of SGLang's radix tree does not do, it says. No engine is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_canary.ledger.base import OwnerNames
from kv_canary_sglang.allocators import AllocatorSpace
from kv_canary_sglang.audit import LARGEST_TREE, TreeAudit
from kv_canary_sglang.order import EventOrder

CPU = torch.device("cpu")


def audit_of(tree: Any) -> TreeAudit:
    order = EventOrder(CPU, None)
    space = AllocatorSpace("slots", SimpleNamespace(page_size=1, size=8), order, OwnerNames())
    space.ledger.allocate(torch.tensor([3]))
    return TreeAudit(tree, space, None, order, monotonic=lambda: 0.0)


def tree_of(slots: int) -> Any:
    found = SimpleNamespace(slot_indices=torch.tensor([3]))
    core = SimpleNamespace(walk_for_kv_canary=lambda **options: found)
    return SimpleNamespace(tree_core=core, full_evictable_size=lambda: slots)


@pytest.mark.parametrize(
    ("tree", "said"),
    [(tree_of(LARGEST_TREE + 1), "is not audited"), (SimpleNamespace(), "cannot be walked")],
    ids=["too large", "another cache"],
)
def test_a_tree_that_is_not_audited_is_said_once(tree: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    audit = audit_of(tree)
    audit.run()
    audit.run()
    assert audit.walks == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kv_canary"]
    assert said in line


def test_a_page_that_the_tree_holds_and_nobody_completed_is_found(caplog: pytest.LogCaptureFixture) -> None:
    audit = audit_of(tree_of(LARGEST_TREE))
    audit.run()
    assert audit.walks == 1
    assert [one.page for one in audit._full.ledger.take_violations()] == [3]
    assert caplog.records == []
