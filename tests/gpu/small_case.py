"""One read and one verification in every mode of the kernel, of pages listed and of a range, and every event of a
ledger on the device: small enough for a memory checker.
"""

from __future__ import annotations

import numpy as np
import torch

from builders.pools import Layout, Part, make_pool
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.gpu import GpuTable
from kv_canary.ledger import TensorLedger

LAYOUTS = {
    "contiguous": Layout(parts=(Part(tokens=16, heads=4, piece=128),) * 2, pages=5),
    "by word": Layout(parts=(Part(tokens=16, heads=4, piece=128, heads_first=True),), pages=5),
    "by byte": Layout(parts=(Part(tokens=7, heads=3, piece=13, spacing=3),), pages=5, lead=5),
}

for name, layout in LAYOUTS.items():
    pool = make_pool(layout, seed=1, device="cuda")
    table, pages = GpuTable(pool.group), np.arange(layout.pages)
    found = table.read(pages)
    assert found.tolist() == [
        [spec.fingerprint_bytes(s) for s in pool.logical(page)] for page in range(layout.pages)
    ], name
    table.store(pages, found ^ np.uint64(1))
    assert len(table.verify(pages).rows) == found.size, name
    ledger = TensorLedger("full", layout.pages, torch.device("cuda"))
    ledger.free(torch.from_numpy(pages).cuda())
    ranges = table.ranges(ledger.columns)
    ranges.keep(pages, np.zeros(layout.pages, np.int64))
    torch.cuda.synchronize()
    outcome = ranges.verify(1, layout.pages)
    assert outcome.stands.all(), name
    assert len(outcome.differences.rows) == found.size - found.shape[1], name
    print(name, "ok")

ledger = TensorLedger("full", 5, torch.device("cuda"), block=4)
pages = torch.tensor([0, 1, 2, 1, 4, 4], device="cuda")
for event in ("allocate", "write", "claim", "seal", "reopen", "release", "free", "adopt", "forget"):
    getattr(ledger, event)(pages)
ledger.move(pages, pages.flip(0))
torch.cuda.synchronize()
assert ledger.generations(np.arange(5)).tolist() == [3, 3, 3, 0, 3]
print("ledger ok")
