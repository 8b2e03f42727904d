#!/usr/bin/env python3
"""Several processes of one host over networks of several rates: steps with and without overlap of communication and computation, in pairs.

    python scripts/network_rates.py --binary train_low_mem --record OUT.md

`LOW_MEM_T5_NETWORK_BITS_PER_SECOND` sets a rate: messages take as long as over such a network. The runs of a pair take turns, so
that other load on the machine disturbs both. The binary is built with the feature `mpi`.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = {None: "this host's memory", 1e10: "10 Gbit/s", 1e9: "1 Gbit/s", 1e8: "100 Mbit/s"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", default="t5-small")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="how often the two of a pair take their turns")
    parser.add_argument("--rates", type=float, nargs="*", default=[0, 1e10, 1e9, 1e8], help="bits a second; 0: as it is")
    parser.add_argument("--stages", nargs="*", default=["none", "gradients", "weights"])
    parser.add_argument("--set", nargs="*", default=[], dest="settings", help="more settings of every run")
    parser.add_argument("--record", type=pathlib.Path, help="a page with the table")
    return parser.parse_args()


def run(args, stage, rate, overlap, directory):
    """The steps of a run, without the first: milliseconds in all, of communication and of waiting for it, and bytes sent."""
    output = pathlib.Path(directory) / "run"
    settings = {
        "data.train": f'["{ROOT / "data/sample-train.parquet"}"]', "data.tokenizer": ROOT / "data/sample-tokenizer.json",
        "data.validation": "[]", "data.max_source_tokens": 64, "data.max_target_tokens": 64, "model.config": args.model,
        "model.vocab_size": 32128, "train.batch_size": args.batch_size, "train.max_steps": args.steps,
        "optimizer.name": "adamw", "optimizer.learning_rate": 1e-4, "memory.accumulation": "layer-major",
        "memory.kept_gradient_blocks": 99, "memory.micro_batch_samples": 16, "memory.loss_chunk_rows": 256, "memory.prices": "built-in",
        "memory.communication_overlap": overlap, "parallel.shard": stage, "checkpoint.keep_last": 1,
    }
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(args.processes), args.binary,
               "--output", output]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    for setting in args.settings:
        command += ["--set", setting]
    environment = dict(os.environ)
    if rate:
        environment["LOW_MEM_T5_NETWORK_BITS_PER_SECOND"] = str(rate)
    subprocess.run(list(map(str, command)), check=True, env=environment, stdout=subprocess.DEVNULL)
    events = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [event for event in events if event["event"] == "step"]
    sent = [later["sent_bytes"] - earlier["sent_bytes"] for earlier, later in zip(steps, steps[1:])]
    keys = ["step_ms", "communication_ms", "communication_wait_ms"]
    losses = [step["loss"] for step in steps]
    return [[step[key] for key in keys] + [bytes] for step, bytes in zip(steps[1:], sent)], losses


def row(args, stage, rate):
    of = {"block": [], "none": []}
    losses = set()
    for _ in range(args.rounds):
        for overlap, steps in of.items():
            with tempfile.TemporaryDirectory() as directory:
                made, said = run(args, stage, rate, overlap, directory)
                steps += made
                losses.add(tuple(said))
    assert len(losses) == 1, f"other losses: {losses}"
    median = lambda overlap, column: statistics.median(step[column] for step in of[overlap])
    with_, without = median("block", 0), median("none", 0)
    communication, waited = median("block", 1), median("block", 2)
    return [
        f"`{stage}`", NAMES.get(rate or None, f"{rate:g} bit/s"), f"{median('block', 3) / 1e6:.0f}",
        f"{without / 1e3:.2f}", f"{median('none', 1) / 1e3:.2f}", f"{with_ / 1e3:.2f}", f"{communication / 1e3:.2f}",
        f"{100 * max(0, 1 - waited / communication):.0f}", f"{without / with_:.2f}",
    ]


def main():
    args = arguments()
    lines = [
        "| `parallel.shard` | network | sent, MB | step without overlap, s | communication, s | step with overlap, s "
        "| communication, s | hidden, % | ratio of steps |", "| --- " * 9 + "|",
    ]
    print("\n".join(lines), flush=True)
    for stage in args.stages:
        for rate in args.rates:
            lines.append("| " + " | ".join(row(args, stage, rate)) + " |")
            print(lines[-1], flush=True)
    if args.record:
        args.record.write_text("\n".join(lines) + "\n")


main()
