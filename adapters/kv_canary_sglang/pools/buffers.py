"""A tensor of an SGLang pool as a page buffer, whatever its strides.

Values only; used on the thread that attaches.
"""

from __future__ import annotations

import torch

from kv_canary.errors import GeometryError
from kv_canary.geometry import Axis, PageBuffer

NO_LAYER = -1  # of a buffer that all layers share


def buffer_name(layer: int, part: str) -> str:
    return f"layers.{layer}.{part}" if layer != NO_LAYER else part


def paged_buffer(
    part: str, layer: int, tensor: torch.Tensor, *, pages: int, rows: int = 1, row_bytes: int | None = None
) -> PageBuffer:
    """Page p is `tensor[p * rows : (p + 1) * rows]`, its bytes in the order of memory.

    `rows` is the number of slots in a page where the tensor is indexed by slots, 1 where it is indexed by pages.
    `row_bytes` is what coverage `partial` takes the first bytes of; by default one row of the tensor.
    """
    name = buffer_name(layer, part)
    if tensor.shape[0] < pages * rows:
        raise GeometryError(
            f"{name}: {pages} pages of {rows} rows do not fit into a tensor of shape {tuple(tensor.shape)}"
        )
    item = tensor.element_size()
    dimensions = [(rows, tensor.stride(0) * item)]
    dimensions += [(count, stride * item) for count, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)]
    run = filled = extent = item
    axes: list[Axis] = []
    for count, stride in sorted((one for one in dimensions if one[0] > 1), key=lambda one: one[1]):
        if stride < extent:
            raise GeometryError(f"{name}: its elements overlap in memory: strides {tensor.stride()}")
        if stride == run and not axes:
            run *= count
        else:
            axes.append(Axis(count=count, memory_stride=stride, logical_stride=filled))
        filled *= count
        extent += (count - 1) * stride
    return PageBuffer(
        name=name,
        layer=layer,
        tensor=tensor,
        pages=pages,
        page_stride=tensor.stride(0) * item * rows,
        run_bytes=run,
        offset=int(tensor.storage_offset()) * item,
        axes=tuple(reversed(axes)),
        row_bytes=row_bytes or tensor.shape[1:].numel() * item,
    )
