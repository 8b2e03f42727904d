#!/usr/bin/env python3
"""Two processes on one machine: train_low_mem over MPI beside accelerate with DDP, FSDP and DeepSpeed over gloo, in turn.

    python scripts/compare_processes.py --init HF_DIR --data train.parquet --binary train_low_mem --record OUT.md

The same rows in the same order, the same weights, AdamW, no dropout, one thread a process. Prints losses, the median step time
without the first two steps, and the largest resident set of any process. `HF_DIR` has weights and a tokenizer.json; the binary is
built with the feature `mpi`. Also needs `accelerate`, `deepspeed` and `ninja`.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", type=pathlib.Path, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--binary", type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="the most of a source, and of a target")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=1, help="how often all take their turn")
    parser.add_argument("--record", type=pathlib.Path, help="a page with the results")
    parser.add_argument("--worker", choices=["ddp", "fsdp", "zero1", "zero2", "zero3"], help="used by this script itself")
    parser.add_argument("--result", type=pathlib.Path, help="used by this script itself")
    return parser.parse_args()


def worker(args):
    """One process of PyTorch."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from t5_data import Encoder, read_pairs
    from transformers import T5ForConditionalGeneration

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    model = T5ForConditionalGeneration.from_pretrained(args.init, dtype=torch.float32, dropout_rate=0.0)
    model.train()
    if args.worker == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (processes,))
        for block in [*model.encoder.block, *model.decoder.block]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif args.worker == "ddp":
        model = accelerator.prepare_model(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    engine = of_deepspeed(args, model, optimizer, processes) if args.worker.startswith("zero") else None
    encoder = Encoder(args.init)
    pairs = read_pairs([args.data], "prompt", "response")
    share = args.batch_size // processes
    losses, times = [], []
    for step in range(args.steps):
        began = time.perf_counter()
        batch = pairs[step * args.batch_size : (step + 1) * args.batch_size]
        tokens = sum(len(encoder.ids(response, args.tokens)) for _, response in batch)
        mine = encoder.batch(batch[rank * share : (rank + 1) * share], args.tokens, args.tokens)
        own = (mine["labels"] != -100).sum()
        # Both average the gradients of processes; the loss is per target token of the whole batch.
        loss = (engine or model)(**mine).loss * own * processes / tokens
        if engine:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach() / processes
        dist.all_reduce(total)
        losses.append(float(total))
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = [None] * processes
    dist.all_gather_object(peaks, peak)
    if rank == 0:
        args.result.write_text(json.dumps({"losses": losses, "times": times, "peak_mib": max(peaks) / 1024}))
    dist.barrier()
    dist.destroy_process_group()


def of_deepspeed(args, model, optimizer, processes):
    """DeepSpeed's engine for a stage of ZeRO."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_batch_size": args.batch_size,
        "train_micro_batch_size_per_gpu": args.batch_size // processes,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(args.worker[-1])},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def of_torch(args, kind, scratch):
    result = scratch / f"{kind}.json"
    own = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.processes}", __file__]
    own += ["--init", args.init, "--data", args.data, "--worker", kind, "--result", result]
    own += ["--steps", args.steps, "--batch-size", args.batch_size, "--tokens", args.tokens]
    own += ["--learning-rate", args.learning_rate]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    subprocess.run([str(word) for word in own], check=True, env=environment, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())


def of_ours(args, shard, scratch):
    output = scratch / f"ours-{shard}"
    settings = {
        "model.init_from": args.init.resolve(),
        "data.train": args.data.resolve(),
        "data.shuffle": "false",
        "data.max_source_tokens": args.tokens,
        "data.max_target_tokens": args.tokens,
        "train.batch_size": args.batch_size,
        "train.dropout": 0.0,
        "train.eval_samples": 1,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": args.learning_rate,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "parallel.shard": shard,
    }
    # Stages hold less layer by layer; without a stage the fastest plan is used.
    if shard in ("gradients", "weights"):
        settings |= {"memory.accumulation": "layer-major", "memory.disk_writes": 0}
    program = [args.binary.resolve(), "--output", output, "--max-steps", args.steps]
    for key, value in settings.items():
        program += ["--set", f"{key}={value}"]
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", args.processes]
    peaks = scratch / "peak"
    code = (
        "import os,resource,subprocess,sys;code=subprocess.run(sys.argv[2:],stdout=subprocess.DEVNULL).returncode;"
        "open(sys.argv[1]+os.environ['OMPI_COMM_WORLD_RANK'],'w')"
        ".write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss));sys.exit(code)"
    )
    command = [*launcher, sys.executable, "-c", code, peaks, *program]
    subprocess.run([str(word) for word in command], check=True)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    peak = max(int((scratch / f"peak{rank}").read_text()) for rank in range(args.processes)) / 1024
    plan = next(line for line in lines if line["event"] == "plan")
    sent = [b["sent_bytes"] - a["sent_bytes"] for a, b in zip(steps, steps[1:])]
    return {
        "losses": [step["loss"] for step in steps],
        "times": [(step["step_ms"] + step["data_wait_ms"]) / 1e3 for step in steps],
        "peak_mib": peak,
        "predicted_mib": plan["predicted_peak_bytes"] / 2**20,
        "sent_mib": statistics.median(sent) / 2**20,
    }


def main():
    args = arguments()
    if args.worker:
        return worker(args)
    others = {"accelerate, DDP": "ddp", "FSDP": "fsdp", **{f"DeepSpeed, stage {stage}": f"zero{stage}" for stage in (1, 2, 3)}}
    cases = {name: lambda s, kind=kind: of_torch(args, kind, s) for name, kind in others.items()}
    for shard in ["none", "optimizer", "gradients", "weights"]:
        cases[f"train_low_mem, {shard}"] = lambda s, shard=shard: of_ours(args, shard, s)
    results = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, run in cases.items():
            with tempfile.TemporaryDirectory() as scratch:
                results[name].append(run(pathlib.Path(scratch)))
                print(name, json.dumps(results[name][-1]), flush=True)
    reference = results["accelerate, DDP"][0]["losses"]
    lines = ["| | step, s | largest resident set, MiB | predicted | sent a step, MiB | largest difference of a loss |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, runs in results.items():
        step = statistics.median(time for run in runs for time in run["times"][2:])
        peak = max(run["peak_mib"] for run in runs)
        off = max(abs(a - b) for a, b in zip(runs[0]["losses"], reference))
        predicted, sent = (runs[0].get(key) for key in ["predicted_mib", "sent_mib"])
        shown = ["" if value is None else f"{value:.0f}" for value in [predicted, sent]]
        lines.append(f"| {name} | {step:.2f} | {peak:.0f} | {shown[0]} | {shown[1]} | {off:.1e} |")
    page = "\n".join(lines)
    print(page)
    if args.record:
        args.record.write_text(page + "\n")


if __name__ == "__main__":
    main()
