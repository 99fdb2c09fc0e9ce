"""The memory that is measured: how much there is, which device, and one piece of it filled with random bytes.

Random, never zeros: fresh zero pages of the system all lie in one place, and reading them is no reading at all.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from kv_canary.errors import KVCanaryError

_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SHARE = 0.9  # of the free memory that a pool may take
_FILL_WORDS = 1 << 17


def parse_size(text: str) -> int:
    """Bytes of `'1GB'` (decimal) or `'512MiB'` (binary); raises `KVCanaryError`."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _SCALE[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise KVCanaryError(f"--size: {text!r} is not allowed; give a size such as 1GB or 512MiB")
    return size


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU if there is one; raises `KVCanaryError` for `cuda` without one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise KVCanaryError("--device: cuda is not available here; use --device cpu (or auto)")
    return torch.device(wanted, 0) if wanted == "cuda" else torch.device(wanted)


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken on `device` without anybody else having to give up something."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), _left_of_container())


def check_fits(size_bytes: int, device: torch.device) -> None:
    """Raises `KVCanaryError` when a pool of this size is too large for the device."""
    limit = int(free_bytes(device) * _SHARE)
    if size_bytes > limit:
        where = "on the GPU" if device.type == "cuda" else "here"
        raise KVCanaryError(
            f"--size: a pool of {size_bytes / 1e9:,.1f} GB is larger than the memory that is free {where} "
            f"({limit / 1e9:,.1f} GB can be used)\ngive a smaller --size"
        )


def random_memory(size_bytes: int, device: torch.device, *, seed: int = 0) -> torch.Tensor:
    """uint8 [size_bytes] of random bytes, every page of it touched. Raises `KVCanaryError` when it is too large."""
    check_fits(size_bytes, device)
    words = -(-size_bytes // 8)
    memory = torch.empty(words, dtype=torch.int64, device=device)
    if device.type == "cpu":
        source, target = np.random.Generator(np.random.SFC64(seed)), memory.numpy().view(np.uint64)
        for start in range(0, words, _FILL_WORDS):
            part = target[start : start + _FILL_WORDS]
            part[:] = source.integers(0, (1 << 64) - 1, len(part), dtype=np.uint64, endpoint=True)
    else:
        torch.manual_seed(seed)
        memory.random_()
    return memory.view(torch.uint8)[:size_bytes]


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    import os

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_of_container() -> int:
    """What a control group (version 2) leaves; a pool above that ends the process instead of failing."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 62
