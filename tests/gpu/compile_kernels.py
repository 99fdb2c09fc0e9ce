"""Compiles every variant of the GPU kernels for real targets, without a GPU, and prints what came out as JSON lines.

A script of its own because a process that runs Triton's interpreter cannot compile. Usage: compile_kernels.py TARGET,
where TARGET is sm_80, sm_90, sm_100 or gfx942.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_canary.fingerprint.gpu import BLOCK_WORDS, SETTLE_BLOCK, TILE_PAGES, WARPS
from kv_canary.fingerprint.gpu_kernels import BYTES, CONTIGUOUS, WORDS, fingerprint_kernel, settle_kernel
from kv_canary.ledger import device
from kv_canary.ledger.device_kernels import EVENTS, transition_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# parameters that a launch gives a pointer to something narrower than 8 bytes, or a number; the rest are *i64
TYPES = {
    "starts": "*i32",
    "state": "*u8",
    "stands": "*u8",
    "difference_count": "*i32",
    "difference_rows": "*i32",
    "difference_stripes": "*i32",
    "owners": "*i32",
    "written_step": "*i32",
    "changed_step": "*i32",
    "marks": "*i32",
    "violations": "*i32",
    **dict.fromkeys(("given_owner", "given_identity"), "i64"),
    **dict.fromkeys(("page_count", "first_page", "stripe_count", "capacity", "count", "page_total", "step"), "i32"),
    **dict.fromkeys(("owner_stride", "identity_stride", "given_holders", "holders_stride"), "i32"),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_kernel(kernel, target: GPUTarget, warps: int, options: dict[str, int] | None = None, **constants):
    """As a launch would: pointers are aligned unless the kernel says that it is not to rely on that."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else TYPES.get(name, "*i64") for name in names}
    relied = [name for name in names if types[name][0] == "*" and name not in kernel.do_not_specialize]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in relied},
    )
    return triton.compile(source, target=target, options={"num_warps": warps, **(options or {})})


def compile_fingerprint(target: GPUTarget, *, by_range: bool, verify: bool, mode: int, alignment: int):
    absent = {} if by_range else dict.fromkeys(("state", "generation", "baseline"))
    return compile_kernel(
        fingerprint_kernel,
        target,
        WARPS,
        VERIFY=verify,
        RANGE=by_range,
        MODE=mode,
        ALIGNMENT=alignment,
        KEY_ALIGNMENT=16,
        TILE=TILE_PAGES,
        BLOCK=BLOCK_WORDS,
        **absent,
    )


def machine_code(cubin: bytes, *, loop: bool) -> dict[str, object]:
    """Registers, spills, and, of a fingerprint, the inner loop: instructions a 64-bit word, widths of its loads."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    row: dict[str, object] = {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
    }
    if not loop:
        return row
    lines = code.splitlines()
    labels = {match[1]: index for index, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line))}
    loops = []
    for index, line in enumerate(lines):
        branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if branch and labels.get(branch[1], index) < index:
            body = [text for text in lines[labels[branch[1]] : index + 1] if re.search(r"/\*[0-9a-f]{4}\*/", text)]
            loads = [match[0] for text in body if (match := re.search(r"LDG\S*", text))]
            if loads:
                loops.append((len(body), loads))
    length, loads = min(loops)
    row["instructions_per_word"] = length / (TILE_PAGES * BLOCK_WORDS / (32 * WARPS))
    row["loads"] = loads
    return row


def show(target: str, compiled, *, loop: bool = False, **variant: object) -> None:
    binary = compiled.asm.get("cubin") or compiled.asm.get("hsaco")
    row = {"target": target, **variant, "bytes": len(binary)}
    if "cubin" in compiled.asm:
        row |= machine_code(compiled.asm["cubin"], loop=loop)
    print(json.dumps(row), flush=True)


def main(name: str) -> None:
    target = TARGETS[name]
    for mode in (CONTIGUOUS, WORDS, BYTES):
        for verify, by_range in ((False, False), (True, False), (True, True)):
            for alignment in (8, 16) if mode == CONTIGUOUS else (8,):
                variant = {"verify": verify, "by_range": by_range, "mode": mode, "alignment": alignment}
                show(name, compile_fingerprint(target, **variant), kernel="fingerprint", loop=True, **variant)
    show(name, compile_kernel(settle_kernel, target, WARPS, BLOCK=SETTLE_BLOCK), kernel="settle")
    for event in EVENTS:
        compiled = compile_kernel(
            transition_kernel, target, device.WARPS, {"num_stages": 1}, EVENT=event, BLOCK=device.BLOCK
        )
        show(name, compiled, kernel="ledger", event=event)


if __name__ == "__main__":
    main(sys.argv[1])
