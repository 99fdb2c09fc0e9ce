"""Compiles every variant of the GPU kernel for real targets, without a GPU, and prints what came out as JSON lines.

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

from kv_canary.fingerprint.gpu import BLOCK_WORDS, TILE_PAGES, WARPS
from kv_canary.fingerprint.gpu_kernels import BYTES, CONTIGUOUS, WORDS, fingerprint_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    "pages": "*i64",
    "buffers": "*i64",
    "offsets": "*i64",
    "starts": "*i32",
    "lengths": "*i64",
    "keys": "*i64",
    "table": "*i64",
    "result": "*i64",
    "difference_count": "*i32",
    "difference_rows": "*i32",
    "difference_stripes": "*i32",
}
NUMBERS = {"page_count": "i32", "stripe_count": "i32", "capacity": "i32"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_variant(target: GPUTarget, *, verify: bool, mode: int, alignment: int):
    constants = {
        "VERIFY": verify,
        "MODE": mode,
        "ALIGNMENT": alignment,
        "KEY_ALIGNMENT": 16,
        "TILE": TILE_PAGES,
        "BLOCK": BLOCK_WORDS,
    }
    types = {**POINTERS, **NUMBERS, **dict.fromkeys(constants, "constexpr")}
    names = fingerprint_kernel.arg_names
    source = ASTSource(
        fn=fingerprint_kernel,
        signature={name: types[name] for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS},
    )
    return triton.compile(source, target=target, options={"num_warps": WARPS})


def machine_code(cubin: bytes) -> dict[str, object]:
    """Registers, spills, and the inner loop: instructions a 64-bit word, widths of its loads."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
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
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "instructions_per_word": length / (TILE_PAGES * BLOCK_WORDS / (32 * WARPS)),
        "loads": loads,
    }


def main(name: str) -> None:
    for mode in (CONTIGUOUS, WORDS, BYTES):
        for verify in (False, True):
            for alignment in (8, 16) if mode == CONTIGUOUS else (8,):
                compiled = compile_variant(TARGETS[name], verify=verify, mode=mode, alignment=alignment)
                row: dict[str, object] = {"target": name, "mode": mode, "verify": verify, "alignment": alignment}
                binary = compiled.asm.get("cubin") or compiled.asm.get("hsaco")
                row["bytes"] = len(binary)
                if "cubin" in compiled.asm:
                    row |= machine_code(compiled.asm["cubin"])
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
