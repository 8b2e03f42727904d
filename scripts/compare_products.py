#!/usr/bin/env python3
"""The products of a linear layer beside PyTorch's and beside this machine's own limit, interleaved.

    cargo bench -p t5-ops --bench products --no-run     # prints where the binary is
    python scripts/compare_products.py --binary target/release/deps/products-0123456789abcdef [--rounds 3]

Per shape (rows x K x N) and product (y = x W', dx = dy W, dW = dy' x) the median over the rounds, in GFLOP/s of all
threads. PyTorch's bf16 weights are bf16 already; ours are f32 and are rounded within the time measured.
`peak` is the kernel alone, on all threads, from the first-level cache: the limit of loads and arithmetic units.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import measured_machine

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PRODUCTS = ("forward", "dx", "dw")


def pytorch(dtype, rows, k, n):
    import torch

    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, w, dy = (torch.randn(*shape).to(kind) for shape in ((rows, k), (n, k), (rows, n)))

    def rate(product):
        times = []
        for _ in range(15):
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
        return 2e-9 * rows * k * n / statistics.median(times[3:])

    products = (lambda: torch.nn.functional.linear(x, w), lambda: dy @ w, lambda: dy.t() @ x)
    return {name: rate(product) for name, product in zip(PRODUCTS, products)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True, help="the compiled bench `products`")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import torch

    threads = torch.get_num_threads()
    ours, theirs, peaks = {}, {}, {}
    measured_machine.warn_if_busy()
    for _ in range(options.rounds):
        environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
        lines = subprocess.run([options.binary.resolve()], env=environment, capture_output=True, text=True, check=True)
        for row in map(json.loads, lines.stdout.splitlines()):
            if "peak" in row:
                peaks.setdefault(row["dtype"], []).append(row["peak"])
                continue
            key = (row["dtype"], row["rows"], row["k"], row["n"])
            ours.setdefault(key, []).append(row)
            theirs.setdefault(key, []).append(pytorch(*key))
    print(measured_machine.describe(REPOSITORY, ["torch"]) + f", {threads} threads, {options.rounds} rounds\n")
    for dtype, values in peaks.items():
        print(f"peak {dtype}: {statistics.median(values):.0f} GFLOP/s")
    print("\n| rows x K x N | " + " | ".join(f"{p}, ours | PyTorch | ratio" for p in PRODUCTS) + " |")
    print("| --- " * (1 + 3 * len(PRODUCTS)) + "|")
    for key in ours:
        cells = []
        for product in PRODUCTS:
            mine, other = (statistics.median(run[product] for run in runs[key]) for runs in (ours, theirs))
            cells += [f"{mine:.0f}", f"{other:.0f}", f"{mine / other:.2f}"]
        print(f"| {key[0]} {key[1]} x {key[2]} x {key[3]} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
