"""Where there is no GPU, Triton's kernels run under its interpreter; it decides that when it is imported, so before any
test.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
