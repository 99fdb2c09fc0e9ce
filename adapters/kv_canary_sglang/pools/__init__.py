"""Where the bytes of SGLang's KV pools lie: one attacher for each family of pools.

A page is a page of the allocator: `page_size` slots in a row, one slot at page size 1. The page of slot 0 takes the
writes of padded tokens and is never guarded. The kind of a group says whose page numbers index it: `full`, `mla` and
`indexer` those of the full allocator, `swa` those of the sliding-window allocator, `state` the Mamba slots; in unified
memory they are the *physical* pages of the sub-pool. Nothing here imports SGLang: classes are registered by name.
"""

from kv_canary_sglang.pools.catalog import register
from kv_canary_sglang.pools.spaces import shares_bytes

__all__ = ["register", "shares_bytes"]
