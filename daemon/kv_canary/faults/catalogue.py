"""The catalogue: faults of real servers, boiled down to what they do to pages, injected into the reference engine.

Each says which checks may catch it, and what its cause must say. An injection returns the pages that it spoils: alarms
about other pages are false ones. The sources are public reports, named by project.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_canary.faults import injections
from kv_canary.faults.injections import Inject
from kv_canary.snapshot import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`name` begins with the catalogue's number. `cause` is what the incident's guess must contain, if anything."""

    name: str
    title: str
    source: str
    checks: tuple[Check, ...]
    inject: Inject
    cause: str = ""
    previous_owner: str | None = None


_LATE = ("content", "free_page")

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="F1",
        title="a kernel of a freed page's old owner lands after the next owner completed it",
        source="vllm-project/vllm pull 45357",
        checks=("content",),
        inject=injections.late_after_reallocation,
        previous_owner="request-a",
    ),
    Fault(
        name="F2 free",
        title="a remote writer of an aborted request lands in a page that is free",
        source="sgl-project/sglang issue 24527",
        checks=("free_page",),
        inject=injections.remote_write_into_a_free_page,
        cause="written after it was freed",
        previous_owner="remote",
    ),
    Fault(
        name="F2 reused",
        title="the same, when the page has its next owner",
        source="sgl-project/sglang issue 24527",
        checks=("content",),
        inject=injections.remote_write_into_the_next_owner,
        previous_owner="remote",
    ),
    Fault(
        name="F3 early",
        title="a load is not ordered behind the old owner's queued write, which lands before the page is looked at",
        source="sgl-project/sglang pull 36738",
        checks=("transfer",),
        inject=lambda stage: injections.load_before_a_queued_write(stage, verified=False),
    ),
    Fault(
        name="F3 late",
        title="the same, and the write lands after the page was found right",
        source="sgl-project/sglang pull 36738",
        checks=("content",),
        inject=lambda stage: injections.load_before_a_queued_write(stage, verified=True),
        previous_owner="old-owner",
    ),
    Fault(
        name="F4",
        title="a page is copied to the host before the kernel that writes it has run; the stale copy comes back",
        source="vllm-project/vllm pull 46278",
        checks=("transfer",),
        inject=injections.copied_too_early,
    ),
    Fault(
        name="F5 table",
        title="a step writes through another batch's block table, and the adapter reads the same table",
        source="NVIDIA/TensorRT-LLM pull 15546",
        checks=("ownership",),
        inject=injections.stale_block_table_seen,
        cause="write to sealed",
    ),
    Fault(
        name="F5 device",
        title="the same, and only the device sees that table",
        source="NVIDIA/TensorRT-LLM pull 15546",
        checks=("content",),
        inject=injections.stale_block_table_unseen,
    ),
    Fault(
        name="F6",
        title="padding slot -1 is an index from the end: padded rows overwrite the pool's last page",
        source="vllm-project/vllm issue 43810",
        checks=_LATE,  # type: ignore[arg-type]
        inject=injections.padding_slot,
    ),
    Fault(
        name="F7",
        title="double free: one page twice in the free list, so it gets two owners",
        source="FlashML-org/FreeToken issue 204, sgl-project/sglang pull 27731",
        checks=("ownership",),
        inject=injections.double_free,
        cause="two owners",
    ),
    Fault(
        name="F8",
        title="the tier stored KV and index, and brings back only KV",
        source="kvcache-ai/Mooncake issue 2236",
        checks=("transfer",),
        inject=injections.only_kv_comes_back,
        cause="missing tensor: layer.0.index, layer.1.index",
    ),
    Fault(
        name="F9 load",
        title="a tier read fails and is counted as loaded: the page keeps its old bytes",
        source="ai-dynamo/dynamo issue 15079",
        checks=("transfer",),
        inject=injections.nothing_comes_back,
        cause="nothing arrived",
    ),
    Fault(
        name="F9 claim",
        title="the same, and the page is used as if it were a prefix hit",
        source="ai-dynamo/dynamo issue 15079",
        checks=("identity",),
        inject=injections.nothing_comes_back_and_nobody_is_told,
        cause="claim identity",
    ),
    Fault(
        name="F10",
        title="stored as [.., 2, HS], restored as [.., 2*HS]: as many bytes in another order",
        source="LMCache/LMCache issue 4463",
        checks=("transfer",),
        inject=injections.another_packing,
    ),
    Fault(
        name="F11",
        title="phantom prefix hit: the hash map still points at recycled pages",
        source="local-inference-lab/vllm issue 480",
        checks=("identity",),
        inject=injections.phantom_hit,
    ),
    Fault(
        name="F12",
        title="the same placeholder tokens, different images, one key of 16 bits",
        source="LMCache/LMCache pull 4783",
        checks=("identity",),
        inject=injections.keys_of_sixteen_bits,
        cause="claim identity",
    ),
    *(
        Fault(
            name=f"F13 {short}",
            title=title,
            source="arXiv 2604.17249, 2605.04213",
            checks=("content",),
            inject=inject,
            cause=cause,
        )
        for short, title, inject, cause in (
            ("bit", "one bit flips", injections.spoil(injections.one_bit), "bit flip: one bit"),
            ("two bits", "the top bits of two words flip", injections.spoil(injections.two_top_bits), "unknown"),
            ("burst", "a burst of 32 bytes", injections.spoil(injections.burst), "unknown"),
            ("zero row", "a token's row is zeroed", injections.spoil(injections.row_zeroed), "zeros in row"),
            ("rows", "two rows trade places", injections.spoil(injections.rows_traded), "unknown"),
            (
                "NaN",
                "four numbers become NaN",
                injections.spoil(injections.not_a_number),
                "holds NaN or Inf now: row 5 of layer.0.kv",
            ),
            ("copy", "a page is copied over another", injections.page_copied_over, "misdirected copy"),
        )
    ),
)
