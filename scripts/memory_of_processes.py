#!/usr/bin/env python3
"""Memory of each of several processes that train together, each in a hard control group, by number of processes and `parallel.shard`.

    python scripts/memory_of_processes.py --binary train_low_mem --model chatlm-0.2b --record OUT.md

Each process is in a group of version 1 of its own, with its `--memory-budget` as the hard limit. The binary is built with the feature
`mpi`. Prints the predicted peak and the largest resident set of each process.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from memory_group import Group

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = ["none", "optimizer", "gradients", "weights"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="chatlm-0.2b")
    parser.add_argument("--vocab-size", type=int, default=29298)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--overlaps", nargs="*", default=["none", "block"])
    parser.add_argument("--headroom", type=float, default=1.06, help="the budget over the predicted peak of a plan without one")
    parser.add_argument("--record", type=pathlib.Path, help="a page with the table")
    parser.add_argument("--limit", type=int, help="used by this script itself")
    parser.add_argument("--results", type=pathlib.Path, help="used by this script itself")
    parser.add_argument("command", nargs="*", help="used by this script itself")
    return parser.parse_args()


def in_a_group(args):
    """One process of a run: the command in a group, and its memory."""
    with Group(args.limit) as group:
        child = subprocess.Popen(group.command(args.command))
        _, status, used = os.wait4(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        found = {"code": code, "resident_bytes": used.ru_maxrss * 1024, **group.counters()}
        (args.results / f"{rank}.json").write_text(json.dumps(found))
    sys.exit(code)


def settings(args, stage, overlap, output):
    return {
        "data.train": f'["{ROOT / "data/sample-train.parquet"}"]', "data.tokenizer": ROOT / "data/sample-tokenizer.json",
        "data.validation": f'["{ROOT / "data/sample-validation.parquet"}"]', "data.max_source_tokens": 64,
        "data.max_target_tokens": 64, "model.config": args.model, "model.vocab_size": args.vocab_size,
        "train.batch_size": 4, "train.max_steps": 2, "train.eval_samples": 4, "train.eval_max_new_tokens": 8,
        "optimizer.name": "adamw", "optimizer.learning_rate": 1e-4, "memory.accumulation": "layer-major",
        "memory.kept_gradient_blocks": 99, "memory.disk_writes": 0, "memory.prices": "built-in",
        "memory.communication_overlap": overlap, "parallel.shard": stage, "checkpoint.keep_last": 1,
        "run.output_dir": output,
    }


def row(args, processes, stage, overlap):
    with tempfile.TemporaryDirectory() as directory:
        results, output = pathlib.Path(directory), pathlib.Path(directory) / "run"
        flags = []
        for key, value in settings(args, stage, overlap, output).items():
            flags += ["--set", f"{key}={value}"]
        plan = [args.binary, "plan", "--json", "--processes", processes, *flags, "--memory-budget", "64GiB"]
        planned = json.loads(subprocess.run(list(map(str, plan)), check=True, capture_output=True).stdout)
        limit = int(planned["predicted_peak_bytes"] * args.headroom) + (48 << 20)
        train = [args.binary, *flags, "--memory-budget", limit]
        own = [sys.executable, __file__, "--binary", args.binary, "--limit", limit, "--results", results, "--"]
        launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", processes] if processes > 1 else []
        ran = subprocess.run(list(map(str, launcher + own + train)), capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{processes} {stage} {overlap}: {ran.returncode}\n{ran.stderr[-2000:]}{ran.stdout[-1000:]}")
        found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(processes)]
        events = list(map(json.loads, (output / "metrics.jsonl").read_text().splitlines()))
        predicted = next(event for event in events if event["event"] == "plan")["predicted_peak_bytes"]
        losses = [event["loss"] for event in events if event["event"] == "step"]
        mib = lambda bytes: f"{bytes / (1 << 20):,.1f}"
        held = [mib(one["resident_bytes"]) for one in found]
        cells = [str(processes), f"`{stage}`", overlap, mib(limit), mib(predicted), *held]
        cells += [""] * (max(args.processes) - processes) + [str(sum(one["kills"] for one in found)), f"{losses[-1]:.6f}"]
        return "| " + " | ".join(cells) + " |"


def main():
    args = arguments()
    if args.limit:
        in_a_group(args)
    most = max(args.processes)
    names = ["processes", "`parallel.shard`", "overlap", "limit", "predicted", *[f"process {rank}" for rank in range(most)]]
    names += ["kills", "last loss"]
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    print("\n".join(lines), flush=True)
    for processes in args.processes:
        cases = [("none", "none")] if processes == 1 else [(s, o) for s in STAGES for o in args.overlaps]
        for stage, overlap in cases:
            lines.append(row(args, processes, stage, overlap))
            print(lines[-1], flush=True)
    if args.record:
        args.record.write_text("\n".join(lines) + "\n")


main()
