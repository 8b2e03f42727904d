#!/usr/bin/env python3
"""Step time and peak memory of train_low_mem beside PyTorch + transformers, interleaved, one process a run.

    python scripts/compare_pytorch.py --binary target/release/train_low_mem --model t5-small \
        --batch 8 --source-tokens 256 --target-tokens 256 --rounds 3 --steps 3 [--modes f32 bf16-autocast ...]
    python scripts/compare_pytorch.py --model tiny --batch 4 ...        # PyTorch alone
    python scripts/compare_pytorch.py --binary target/release/train_low_mem --model t5gemma-2-270m --batch 4

A step is forward, backward, clipping to norm 1 and transformers' Adafactor over full-length random samples with
dropout 0.1; train_low_mem runs `bench`, which does the same. With --lora RANK both train a LoRA adapter on every linear
layer of the blocks with AdamW, PyTorch with PEFT's. In each round every contender runs once, in a process
of its own, so that a slow minute of the machine affects all of them. The table holds the median of all timed steps, the
largest peak RSS, and the ratio of PyTorch's time and memory to train_low_mem's in the same precision.
Prints Markdown; --json FILE also keeps every single number.
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

PRESETS = {
    "tiny": {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "num_layers": 4, "vocab_size": 8192},
    "t5-small": {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6, "vocab_size": 32128},
    "t5-base": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12, "vocab_size": 32128},
    "chatlm-0.2b": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 10, "vocab_size": 29298},
}

# T5Gemma 2, text only, as the presets of train_low_mem: width, inner width, heads, heads of keys, head size, layers of each stack, window,
# vocabulary.
GEMMAS = {
    "tiny-gemma": (128, 512, 4, 1, 32, 3, 64, 4096),
    "t5gemma-2-270m": (640, 2048, 4, 1, 256, 18, 512, 262_144),
    "t5gemma-2-1b": (1152, 6912, 4, 1, 256, 26, 512, 262_144),
}

# mode -> (weights, autocast, compile, gradient checkpointing)
PYTORCH_MODES = {
    "f32": ("float32", False, False, False),
    "f32-checkpointing": ("float32", False, False, True),
    "f32-compile": ("float32", False, True, False),
    "bf16-autocast": ("float32", True, False, False),
    "bf16-autocast-checkpointing": ("float32", True, False, True),
    "bf16-autocast-compile": ("float32", True, True, False),
    "bf16-pure": ("bfloat16", False, False, False),
    "bf16-pure-checkpointing": ("bfloat16", False, False, True),
}
DEFAULT_MODES = ["f32", "bf16-autocast", "bf16-pure"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, help="train_low_mem; without it PyTorch is measured alone")
    parser.add_argument("--model", default="t5-small", help=f"a config.json or one of: {', '.join([*PRESETS, *GEMMAS])}")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--source-tokens", type=int, default=256)
    parser.add_argument("--target-tokens", type=int, default=256)
    parser.add_argument("--modes", nargs="+", default=DEFAULT_MODES, choices=list(PYTORCH_MODES))
    parser.add_argument("--precisions", nargs="+", choices=["f32", "bf16"], help="of train_low_mem; default: by mode")
    parser.add_argument("--micro-batch", nargs="+", default=["auto"], help="of train_low_mem: auto or samples")
    parser.add_argument(
        "--variant",
        nargs="+",
        default=[],
        metavar="PRECISION:FLAGS",
        help="more contenders: `bench` with these flags, as in 'bf16:--micro-batch 4 --recompute full'",
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter; needs peft besides")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a run, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--isa", choices=["avx2", "avx512"], help="holds both sides to an instruction set")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--worker", choices=list(PYTORCH_MODES), help=argparse.SUPPRESS)
    return parser.parse_args()


def model_config(name):
    if name in PRESETS:
        return PRESETS[name] | {"decoder_start_token_id": 0}
    return json.loads(pathlib.Path(name).read_text())


def make_model(name):
    """The model in f32, with random weights, and the number of its entries that are words."""
    from transformers import SiglipVisionConfig, T5Config, T5ForConditionalGeneration, T5Gemma2Config, T5Gemma2ForConditionalGeneration

    if name not in GEMMAS:
        config = T5Config(**model_config(name) | {"dropout_rate": 0.1})
        return T5ForConditionalGeneration(config), config.vocab_size
    width, inner, heads, key_heads, head_size, layers, window, entries = GEMMAS[name]
    stack = {
        "vocab_size": entries, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_size,
        "query_pre_attn_scalar": head_size, "sliding_window": window, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
        "layer_types": [f"{'sliding' if layer % 6 else 'full'}_attention" for layer in range(1, layers + 1)],
    }  # fmt: skip
    # transformers builds a vision tower in any case: the smallest. Texts do not use it, so it is never trained.
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4}
    images = {"image_token_index": entries - 1, "eoi_token_index": entries - 2}
    encoder = {"text_config": stack, "vision_config": SiglipVisionConfig(**tower).to_dict(), "mm_tokens_per_image": 4} | images
    config = T5Gemma2Config(encoder=encoder, decoder=stack, image_token_index=entries - 1, dropout_rate=0.1)
    return T5Gemma2ForConditionalGeneration._from_config(config, attn_implementation="sdpa"), entries - 2


def work(options):
    """One PyTorch run: prints its step times and peaks as JSON. This is the whole life of a child process."""
    import torch
    from transformers.optimization import Adafactor

    base = measured_machine.rss_bytes()
    weights, autocast, compiled, checkpointing = PYTORCH_MODES[options.worker]
    torch.manual_seed(0)
    model, words = make_model(options.model)
    model = model.to(device=options.device, dtype=getattr(torch, weights)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if options.lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, lora_dropout=0.0, target_modules="all-linear")
        model = get_peft_model(model, adapter)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    else:
        optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)

    def random_ids(tokens):
        return torch.randint(3, words, (options.batch, tokens), device=options.device)

    inputs = {"input_ids": random_ids(options.source_tokens), "labels": random_ids(options.target_tokens)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    forward = torch.compile(model) if compiled else model

    def step():
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=autocast):
            loss = forward(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device

    times = []
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        loss = step()
        times.append(1000 * (time.perf_counter() - start))
    result = {
        "step_ms": times[1:],
        "peak_rss_bytes": measured_machine.peak_rss_bytes(),
        "base_rss_bytes": base,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "threads": torch.get_num_threads(),
        "loss": loss,
    }
    if options.device == "cuda":
        result["peak_device_bytes"] = torch.cuda.max_memory_reserved()
    print(json.dumps(result))


def shape_flags(options):
    names = ("model", "batch", "source_tokens", "target_tokens", "steps", "device")
    names += ("lora",) if options.lora else ()
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def environment(isa):
    """Variables that limit PyTorch (its own kernels, oneDNN, MKL) and train_low_mem to an instruction set."""
    if isa is None:
        return None
    onednn = {"avx2": "AVX2", "avx512": "AVX512_CORE"}[isa]
    forced = {"LOW_MEM_T5_ISA": isa, "ATEN_CPU_CAPABILITY": isa, "ONEDNN_MAX_CPU_ISA": onednn}
    return os.environ | forced | {"MKL_ENABLE_INSTRUCTIONS": isa.upper()}


def run_child(command, isa):
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment(isa))
    if done.returncode != 0:
        sys.stderr.write(f"error: exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-3000:]}")
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def contenders(options):
    """(name, precision, command) of every contender in a round."""
    rows = []
    for mode in options.modes:
        command = [sys.executable, __file__, "--worker", mode, *shape_flags(options)]
        rows.append((f"PyTorch {mode}", mode.split("-")[0], command))
    if options.binary:
        precisions = options.precisions or sorted({mode.split("-")[0] for mode in options.modes}, reverse=True)
        variants = [
            (precision, "" if samples == "auto" else f"--micro-batch {samples}")
            for precision in precisions
            for samples in options.micro_batch
        ]
        variants += [tuple(variant.split(":", 1)) for variant in options.variant]
        for precision, flags in variants:
            command = [str(options.binary.resolve()), "bench", "--json", "--precision", precision]
            name = f"train_low_mem {precision}" + (f", {flags.replace('--', '')}" if flags else "")
            rows.append((name, precision, command + flags.split() + shape_flags(options)))
    return rows


def as_list(value):
    return value if isinstance(value, list) else [value]


def summarize(options, rows, results):
    tokens = options.batch * (options.source_tokens + options.target_tokens)
    summary = {}
    for name, precision, _ in rows:
        runs = [result for result in results[name] if result]
        if not runs:
            continue
        step_ms = statistics.median(value for run in runs for value in as_list(run["step_ms"]))
        summary[name] = {
            "precision": precision,
            "step_ms": step_ms,
            "tokens_per_second": 1000 * tokens / step_ms,
            "peak_rss_mib": max(run["peak_rss_bytes"] for run in runs) / 2**20,
            "base_rss_mib": max(run.get("base_rss_bytes", 0) for run in runs) / 2**20,
            "predicted_peak_mib": max(run.get("predicted_peak_bytes") or 0 for run in runs) / 2**20,
            "device_mib": max(run.get("peak_device_bytes") or 0 for run in runs) / 2**20,
        }
    return summary


def table(summary):
    """Markdown; ratios of each PyTorch row to train_low_mem's first row of the same precision."""
    ours = {}
    for name, row in summary.items():
        if name.startswith("train_low_mem"):
            ours.setdefault(row["precision"], row)
    lines = [
        "| contender | step ms | tokens/s | peak MiB | before the model | predicted | time / ours | memory / ours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in summary.items():
        base = ours.get(row["precision"]) if name.startswith("PyTorch") else None
        ratios = ["", ""]
        if base:
            ratios = [f"{row[key] / base[key]:.2f}" for key in ("step_ms", "peak_rss_mib")]
        optional = [f"{row[key]:.0f}" if row[key] else "" for key in ("base_rss_mib", "predicted_peak_mib")]
        cells = [name] + [f"{row[key]:.0f}" for key in ("step_ms", "tokens_per_second", "peak_rss_mib")]
        lines.append("| " + " | ".join(cells + optional + ratios) + " |")
    return "\n".join(lines + ["", *verdicts(summary)])


def verdicts(summary):
    """Each row of train_low_mem beside the fastest of PyTorch's modes of its precision."""
    for mine, row in summary.items():
        precision = row["precision"]
        rivals = [(name, r) for name, r in summary.items() if name.startswith("PyTorch") and r["precision"] == precision]
        if mine.startswith("train_low_mem") and rivals:
            name, best = min(rivals, key=lambda item: item[1]["step_ms"])
            speed, memory = best["step_ms"] / row["step_ms"], best["peak_rss_mib"] / row["peak_rss_mib"]
            yield f"{mine}: {speed:.2f} times as fast as {name}, PyTorch's fastest, in 1/{memory:.1f} of its peak  "


def main():
    options = arguments()
    if options.worker:
        return work(options)
    measured_machine.warn_if_busy()
    machine = measured_machine.describe(REPOSITORY, ["torch", "transformers"] + (["peft"] if options.lora else []))
    rows = contenders(options)
    results = {name: [] for name, _, _ in rows}
    for number in range(options.rounds):
        # Every second round runs backwards, so that no contender always follows the same neighbour.
        for name, _, command in rows if number % 2 == 0 else rows[::-1]:
            result = run_child(command, options.isa)
            results[name].append(result)
            told = "failed" if result is None else f"{statistics.median(as_list(result['step_ms'])):.0f} ms"
            print(f"round {number + 1}: {name}: {told}", file=sys.stderr, flush=True)
    summary = summarize(options, rows, results)
    tokens = f"{options.source_tokens}+{options.target_tokens} tokens"
    shape = f"{pathlib.Path(options.model).name}, batch {options.batch}, {tokens}"
    shape += f", LoRA of rank {options.lora}" if options.lora else ""
    shape += f", {options.isa} at most" if options.isa else ""
    threads = {run["threads"] for runs in results.values() for run in runs if run and "threads" in run}
    rounds = f"{options.rounds} rounds of {options.steps} timed steps"
    print(f"{shape}; {rounds}, {options.device}, threads {sorted(threads)}\n{machine}\n\n{table(summary)}")
    if options.json:
        kept = {"command": sys.argv[1:], "machine": machine, "shape": shape, "summary": summary, "runs": results}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(result for runs in results.values() for result in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
