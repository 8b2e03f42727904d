#!/usr/bin/env python3
"""Adapters beside models of 3 and 11 billion parameters in a hard memory group: peaks, seconds, bytes read, a kill and a resume.

    python scripts/verify_large.py --binary target/release/train_low_mem --tokenizer data/sample-tokenizer.json --work DIR
    python scripts/verify_large.py ... --shape xl --budget 400MiB --bases bf16,nf4,int8

Makes a model with the shape of flan-t5-xl or xxl and random weights in bf16 (22.3 GB for xxl), and rows that fill every sample. For
each base a run of three steps is killed with SIGKILL after the second step's checkpoint and resumed. A memory group's limit is the
budget, page cache included (memory controller of version 1, writable). Prints a table. Also needs numpy.
"""

import argparse
import json
import math
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import measured_machine
import memory_group

SHAPES = {
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "xl": {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32},
    "xxl": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
}
VOCABULARY = 32128
BUCKETS = 32
FILE_BYTES = 4 << 30
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def parameters(shape):
    """Name, shape and standard deviation of every tensor, by T5 v1.1's initialisation."""
    model, inner, wide = shape["d_model"], shape["d_kv"] * shape["num_heads"], shape["d_ff"]
    yield "shared.weight", (VOCABULARY, model), 1.0
    yield "lm_head.weight", (VOCABULARY, model), model**-0.5
    for stack, layers in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        for block in range(shape["num_layers"]):
            for at, attention in enumerate(layers):
                layer = f"{stack}.block.{block}.layer.{at}"
                yield f"{layer}.{attention}.q.weight", (inner, model), (model * shape["d_kv"]) ** -0.5
                yield f"{layer}.{attention}.k.weight", (inner, model), model**-0.5
                yield f"{layer}.{attention}.v.weight", (inner, model), model**-0.5
                yield f"{layer}.{attention}.o.weight", (model, inner), inner**-0.5
                yield f"{layer}.layer_norm.weight", (model,), None
                if block == 0 and attention == "SelfAttention":
                    yield f"{layer}.{attention}.relative_attention_bias.weight", (BUCKETS, shape["num_heads"]), model**-0.5
            layer = f"{stack}.block.{block}.layer.{len(layers)}"
            yield f"{layer}.DenseReluDense.wi_0.weight", (wide, model), model**-0.5
            yield f"{layer}.DenseReluDense.wi_1.weight", (wide, model), model**-0.5
            yield f"{layer}.DenseReluDense.wo.weight", (model, wide), wide**-0.5
            yield f"{layer}.layer_norm.weight", (model,), None
        yield f"{stack}.final_layer_norm.weight", (model,), None


def normal_values():
    """Returns a function from a tensor's lengths and standard deviation to its values in bf16, rounded to nearest; a few MiB at a time."""
    import numpy

    random = numpy.random.Generator(numpy.random.SFC64(0))

    def values(lengths, deviation):
        left = math.prod(lengths)
        while left > 0:
            now = min(left, 16 << 20)
            drawn = numpy.ones(now, "f4") if deviation is None else random.standard_normal(now, "f4") * numpy.float32(deviation)
            yield ((drawn.view("u4") + 0x8000) >> 16).astype("<u2").tobytes()
            left -= now

    return values


def make_model(directory, shape, tokenizer, values):
    """Writes the model. `values` gives the bytes of a tensor by its lengths and standard deviation, which is None for a tensor of ones."""
    files, bytes_of_file = [[]], 0
    for parameter in parameters(shape):
        bytes_of_parameter = 2 * math.prod(parameter[1])
        if bytes_of_file and bytes_of_file + bytes_of_parameter > FILE_BYTES:
            files.append([])
            bytes_of_file = 0
        files[-1].append(parameter)
        bytes_of_file += bytes_of_parameter
    directory.mkdir(parents=True)
    index = {}
    for at, tensors in enumerate(files, 1):
        name = f"model-{at:05}-of-{len(files):05}.safetensors"
        header, end = {}, 0
        for tensor, lengths, _ in tensors:
            header[tensor] = {"dtype": "BF16", "shape": lengths, "data_offsets": [end, end + 2 * math.prod(lengths)]}
            end += 2 * math.prod(lengths)
            index[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, lengths, deviation in tensors:
                for part in values(lengths, deviation):
                    file.write(part)
    bytes_of_all = 2 * sum(math.prod(lengths) for _, lengths, _ in parameters(shape))
    written = {"metadata": {"total_size": bytes_of_all}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(written, indent=1))
    config = {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": VOCABULARY, **shape,
        "num_decoder_layers": shape["num_layers"], "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "relative_attention_num_buckets": BUCKETS, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(tokenizer, directory / "tokenizer.json")


def make_rows(file, rows, source_tokens, target_tokens):
    """Each word is at least one token, so that every sample is full."""
    words = ["water", "stone", "river", "winter", "light", "paper", "garden", "silver", "music", "bridge", "letter", "mirror"]
    text = lambda row, count: " ".join(words[(5 * row + 7 * at + at * at % 11) % len(words)] for at in range(count))
    with open(file, "w") as out:
        for row in range(rows):
            out.write(json.dumps({"prompt": text(row, source_tokens), "response": text(row + 3, target_tokens)}) + "\n")


def status(process, key):
    """Bytes from the process's own counters; None if it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
        lines += pathlib.Path(f"/proc/{process}/io").read_text().splitlines()
        line = next(line for line in lines if line.startswith(f"{key}:"))
        return int(line.split()[1]) << (10 if line.endswith("kB") else 0)
    except (OSError, StopIteration):
        return None


def events(output, kind):
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def watch(group, command, log, until=None):
    """Runs a command in the group. Returns its peak and the bytes that it read from disks. Kills it when `until` is true."""
    peak, read = 0, 0
    with open(log, "w") as out:
        process = subprocess.Popen(group.command([str(word) for word in command]), stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak, read = max(peak, status(process.pid, "VmHWM") or 0), status(process.pid, "read_bytes") or read
            if until and until():
                process.send_signal(signal.SIGKILL)
            time.sleep(0.2)
    expected = -signal.SIGKILL if until else 0
    if process.returncode != expected:
        raise SystemExit(f"{log}: exit code {process.returncode}\n{pathlib.Path(log).read_text()}")
    return peak, read


def case(arguments, base, settings, budget):
    output = arguments.work / f"run-{arguments.shape}-{base}"
    shutil.rmtree(output, ignore_errors=True)
    command = [arguments.binary, "--config", settings, "--memory-budget", str(budget), "--output", output]
    if base != "bf16":
        command += ["--set", f"model.init_from={arguments.work / f'{arguments.shape}-{base}'}"]
    with memory_group.Group(budget) as group:
        first = watch(group, command, output.with_suffix(".1.log"), lambda: len(events(output, "checkpoint")) == 2)
        second = watch(group, [*command, "--keep-training"], output.with_suffix(".2.log"))
        counters = group.counters()
    peaks, read = zip(first, second)
    return {"base": base, "peaks": peaks, "read": read, "group": counters, "steps": events(output, "step")}


def bytes_of(text):
    for unit, shift in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * (1 << shift))
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--shape", choices=SHAPES, default="xxl")
    parser.add_argument("--budget", default="1GiB", type=bytes_of)
    parser.add_argument("--bases", default="bf16,nf4", help="of bf16, nf4 and int8")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--source-tokens", type=int, default=256)
    parser.add_argument("--target-tokens", type=int, default=64)
    arguments = parser.parse_args()
    measured_machine.warn_if_busy()
    arguments.work.mkdir(parents=True, exist_ok=True)
    model = arguments.work / arguments.shape
    if not model.exists():
        make_model(model, SHAPES[arguments.shape], arguments.tokenizer, normal_values())
    rows = arguments.work / "rows.jsonl"
    make_rows(rows, 3 * arguments.batch, arguments.source_tokens, arguments.target_tokens)
    settings = arguments.work / "large.toml"
    settings.write_text(
        f'model.init_from = "{model}"\nlora.rank = 16\ndata.train = ["{rows}"]\n'
        f"data.max_source_tokens = {arguments.source_tokens}\ndata.max_target_tokens = {arguments.target_tokens}\n"
        f'train.precision = "bf16"\ntrain.batch_size = {arguments.batch}\ntrain.max_steps = 3\ncheckpoint.every_steps = 1\ncheckpoint.keep_last = 1\n'
    )
    for base in arguments.bases.split(","):
        converted = arguments.work / f"{arguments.shape}-{base}"
        if base != "bf16" and not converted.exists():
            convert = [arguments.binary, "convert-base", "--model", model, "--precision", base, "--output", converted]
            subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
        done = case(arguments, base, settings, arguments.budget)
        print(json.dumps(done), file=open(arguments.work / f"{arguments.shape}-{base}.json", "w"))
        seconds = [f"{step['step_ms'] / 1000:.1f}" for step in done["steps"]]
        losses = [f"{step['loss']:.4f}" for step in done["steps"]]
        predicted = max(step["predicted_peak_bytes"] for step in done["steps"])
        mib = lambda count: f"{count / 2**20:.1f} MiB"
        cells = [base, mib(predicted), " and ".join(map(mib, done["peaks"])), ", ".join(seconds), " and ".join(
            f"{read / 1e9:.1f} GB" for read in done["read"]), ", ".join(losses), done["group"]["kills"]]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(measured_machine.describe(REPOSITORY, ["numpy"]))


if __name__ == "__main__":
    main()
