"""Which backend reads a group. The backends are imported when they are needed, so that nothing is compiled or imported
for a device that is not there.
"""

from __future__ import annotations

from kv_canary.fingerprint.table import FingerprintTable
from kv_canary.geometry import CanaryGroup


def open_table(group: CanaryGroup, *, threads: int = 1) -> FingerprintTable:
    """The table for the group's device. All compilation happens here, so call it before traffic."""
    if group.device.type == "cpu":
        from kv_canary.fingerprint.cpu import CpuTable

        return CpuTable(group, threads=threads)
    from kv_canary.fingerprint.tensor import TensorTable

    return TensorTable(group)
