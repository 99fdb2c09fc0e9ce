"""Which backend reads a group. The backends are imported when they are needed, so that nothing is compiled or imported
for a device that is not there.
"""

from __future__ import annotations

import logging

from kv_canary.fingerprint.table import FingerprintTable
from kv_canary.geometry import CanaryGroup, cut_by_buffer

logger = logging.getLogger("kv_canary")


def open_table(group: CanaryGroup, *, threads: int = 1) -> FingerprintTable:
    """The table for the group's device. All compilation happens here, so call it before traffic."""
    if group.device.type == "cpu":
        from kv_canary.fingerprint.cpu import CpuTable

        return CpuTable(group, threads=threads)
    try:
        from kv_canary.fingerprint.gpu import GpuTable

        return GpuTable(group)
    except Exception as error:  # noqa: BLE001 - no triton, or one that cannot compile for this device
        logger.warning("group %s is read with plain torch operations, several times slower: %s", group.name, error)
    from kv_canary.fingerprint.tensor import TensorTable

    return TensorTable(group)


def open_buffer_table(group: CanaryGroup, *, threads: int = 1) -> FingerprintTable | None:
    """A second table with a fingerprint for each buffer, for a group whose pages travel; None where the first one has
    them anyhow. Compiles like `open_table`.
    """
    if not group.travels or all(len(stripe.buffers) == 1 for stripe in group.stripes):
        return None
    return open_table(cut_by_buffer(group), threads=threads)
