"""What a run's figures belong to: processor, memory, versions. Nothing that names the machine itself."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kv_canary.bench.memory import free_bytes

_PACKAGES = ("kv-canary", "torch", "triton", "numba", "numpy", "transformers", "xxhash")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """A document of neutral facts; `load` is the average number of runnable tasks over the last minute."""
    facts: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_bytes": free_bytes(torch.device("cpu")),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return facts


def _cpu() -> str:
    names = {"model name": "", "cpu family": "", "model": ""}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in names and not names[key.strip()]:
                names[key.strip()] = value.strip()
    except OSError:
        pass
    if not names["model name"]:
        return platform.machine()
    return f"{names['model name']} (family {names['cpu family']}, model {names['model']})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
