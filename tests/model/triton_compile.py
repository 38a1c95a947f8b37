"""Compile the kernels for GPUs that need not be there: run as a program, without TRITON_INTERPRET. Prints one line a kernel."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from contbatch_cli.model.attention import triton_paged

POINTERS = {"tiles", "query_starts", "context_lens", "table_starts", "block_ids", "slots"}
FLOATS = {"scale", "softcap"}


def compiled(kernel, capability, element, constants):
    names = kernel.arg_names
    types = {name: f"*{element}" for name in ("query", "key", "value", "key_cache", "value_cache", "out", "sinks")}
    types |= {name: "*i32" for name in POINTERS} | {name: "fp32" for name in FLOATS}
    types |= {"partial": "*fp32", "partial_stats": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def main() -> int:
    capability, element = int(sys.argv[1]), sys.argv[2]
    sizes = {"K": 8, "G": 4, "E": 80, "E_PAD": 128}
    attention = sizes | {"D": 80, "D_PAD": 128, "B": 16, "KEYS": 64, "UPCAST": False}
    variants = {"HAS_SOFTCAP": True, "HAS_WINDOW": True, "HAS_SINKS": True}
    jobs = [
        (triton_paged._write_kernel, {"K": 8, "D": 80, "E": 80, "B": 16, "PAD": 1024}),
        (triton_paged._attention_kernel, attention | variants | {"ROWS": 16, "SPLIT": True}),
        (triton_paged._attention_kernel, attention | variants | {"ROWS": 64, "SPLIT": False}),
        (triton_paged._combine_kernel, sizes | {"ROWS": 16, "HAS_SINKS": True}),
    ]
    for kernel, constants in jobs:
        result = compiled(kernel, capability, element, constants)
        print(kernel.__name__, constants.get("ROWS"), result.metadata.shared, "mma" in result.asm["ptx"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
