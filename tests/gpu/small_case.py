"""One read and one verification in every mode of the kernel: small enough for a memory checker."""

from __future__ import annotations

import numpy as np

from builders.pools import Layout, Part, make_pool
from kv_canary.fingerprint import spec
from kv_canary.fingerprint.gpu import GpuTable

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
    print(name, "ok")
