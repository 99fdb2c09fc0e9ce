"""What of vLLM is modelled, and what is switched off with its reason. Values only: nothing here touches an engine.

The names of spec classes are compared, not the classes: this module is used in both halves and imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_canary.snapshot import GroupKind

_FULL = {"FullAttentionSpec": "full", "MLAAttentionSpec": "mla"}
_WINDOW = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}

STATE_REASON = (
    "states are rewritten in place while a request runs: they are checked for ownership, and for their bytes only "
    "while they are free"
)
DRAFT_REASON = "layers of a draft model: when their pages are complete is not modelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMode:
    """How one KV cache group is guarded. `sealed`: its pages are complete at some point and then never change.

    `unguarded` is why it is left alone.
    """

    kind: GroupKind
    sealed: bool
    unguarded: str | None = None


def engine_refusal(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine as a whole is not guarded, or None."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and getattr(transfer, "kv_connector", None):
        return (
            f"the KV connector {transfer.kv_connector} moves pages on its own schedule, which is not modelled; "
            "start the server without it to have the cache guarded"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}: pages that are shared out over ranks are not modelled"
    if parallel.distributed_executor_backend == "ray":
        return "workers run under Ray, whose compiled graph bypasses the hooks; use the mp executor"
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        return "HiSparse keeps pages in a host pool of its own, which is not modelled"
    return None


def layer_specs(group: Any) -> Mapping[str, Any]:
    """The spec of each layer of a `KVCacheGroupSpec`."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return inner if inner is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def group_mode(group: Any) -> GroupMode:
    """How a `KVCacheGroupSpec` is guarded."""
    specs = list(layer_specs(group).values())
    names = {type(spec).__name__ for spec in specs}
    first = specs[0] if specs else group.kv_cache_spec
    if group.host_resident or str(getattr(group.role, "value", group.role)) != "default":
        return GroupMode(kind="host", sealed=False, unguarded="HiSparse groups are not modelled")
    if names <= _FULL.keys() | _WINDOW and len(names & _WINDOW) in (0, len(names)):
        odd = {str(spec.tokens_per_state) for spec in specs if not isinstance(spec.tokens_per_state, int)}
        kind: GroupKind = "swa" if names & _WINDOW else "mla" if names == {"MLAAttentionSpec"} else "full"
        if odd:
            return GroupMode(kind=kind, sealed=False, unguarded=f"{', '.join(sorted(odd))} tokens a state")
        return GroupMode(kind=kind, sealed=True)
    if names == {"MambaSpec"}:
        if first.mamba_cache_mode == "none":
            return GroupMode(kind="state", sealed=False)
        reason = f"mamba_cache_mode is {first.mamba_cache_mode!r}: how states move between blocks is not modelled"
        return GroupMode(kind="state", sealed=False, unguarded=reason)
    return GroupMode(kind="full", sealed=False, unguarded=f"groups of {', '.join(sorted(names))} are not modelled")


def group_names(modes: list[GroupMode]) -> list[str]:
    """`full`, `swa`, ...; numbered from the second of a kind on: `swa.2`."""
    seen: dict[str, int] = {}
    names = []
    for mode in modes:
        seen[mode.kind] = seen.get(mode.kind, 0) + 1
        names.append(mode.kind if seen[mode.kind] == 1 else f"{mode.kind}.{seen[mode.kind]}")
    return names
