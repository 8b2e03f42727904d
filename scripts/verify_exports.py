#!/usr/bin/env python3
"""Exports models with `train_low_mem export` and answers prompts with each file in the program that reads it.

    python scripts/verify_exports.py --binary target/release/train_low_mem --data rows.parquet \\
        [--llama-completion PATH] [--converter] MODEL...

For each MODEL (a run or a model directory) the first 100 prompts of `--data` are answered greedily by `train_low_mem generate`, and
then from the exported files:

* CTranslate2 (f32, int8), from the ids of the model's own tokenizer
* llama.cpp's `llama-completion` (f32, f16, bf16, q8_0), from the text: it reads the tokenizer from the file. Its cache is kept in f32
* transformers with `gguf_file=` (f32, q8_0) and the model's own config: by itself 5.23 reads every T5 in GGUF as a gated ReLU

Answers that differ are counted. In f32 no answer may differ, or the script exits 1. With `--converter` CTranslate2's own converter makes the
same model, and the variables of `model.bin` are compared. If GGUF cannot hold a model, its row says so.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import pyarrow.parquet
from measured_machine import describe

ANSWER_TOKENS = 48
PROMPTS = 100
ATTEMPTS = 50
LAST_LINE = "graphs reused"
END_OF_TEXT = re.compile(r"\s*\[end of text\]\s*$")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", type=pathlib.Path)
    parser.add_argument("--binary", required=True, type=pathlib.Path)
    parser.add_argument("--data", required=True, type=pathlib.Path, help="parquet with a column `prompt`")
    parser.add_argument("--llama-completion", type=pathlib.Path, help="llama.cpp's program; left out without it")
    parser.add_argument("--converter", action="store_true", help="compare with CTranslate2's own converter, too")
    arguments = parser.parse_args()
    column = pyarrow.parquet.read_table(arguments.data, columns=["prompt"])["prompt"].to_pylist()
    prompts = list(dict.fromkeys(column))[:PROMPTS]
    repository = pathlib.Path(__file__).resolve().parent.parent
    print(f"{describe(repository, ['ctranslate2', 'transformers', 'torch', 'gguf'])}\n")
    print(f"| model | format | dtype | MB | read by | of {len(prompts)} answers differ |")
    print("| --- | --- | --- | --- | --- | --- |")
    failed = False
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            failed |= check(model, prompts, arguments, pathlib.Path(scratch))
    sys.exit(1 if failed else 0)


def check(model, prompts, arguments, scratch):
    """Prints the rows of a model. Returns whether an answer in f32 differs."""
    binary = arguments.binary.resolve()
    ours = generate(binary, model, prompts, scratch)
    directory = model / "model" if (model / "model" / "config.json").exists() else model
    failed = False

    def row(kind, dtype, path, reader, answers):
        nonlocal failed
        differing = [(a, b) for a, b in zip(ours, answers, strict=True) if a != b]
        failed |= dtype == "f32" and bool(differing)
        print(f"| {model.name} | {kind} | {dtype} | {size(path):.1f} | {reader} | {len(differing)} |", flush=True)
        for a, b in differing[:2]:
            print(f"  {reader} {dtype}: {a!r} / {b!r}", file=sys.stderr)

    for dtype in ["f32", "int8"]:
        path = scratch / f"ct2-{dtype}"
        export(binary, model, "ctranslate2", dtype, path)
        row("CTranslate2", dtype, path / "model.bin", "CTranslate2", with_ctranslate2(path, directory, prompts))
        if arguments.converter:
            others = differing_variables(directory, dtype, path, scratch / "converted")
            shown = ", ".join(f"`{name}`" for name in others) or "the same bytes"
            print(f"| {model.name} | CTranslate2 | {dtype} | | its converter: {shown} | |", flush=True)
            # transformers 5 says of every T5 that its head is tied, and the converter derives the scale from that.
            failed |= bool(set(others) - {"decoder/scale_outputs"})
    for dtype in ["f32", "f16", "bf16", "q8_0"]:
        path = scratch / f"{dtype}.gguf"
        problem = export(binary, model, "gguf", dtype, path)
        if problem:
            print(f"| {model.name} | GGUF | | | refused: {problem} | |", flush=True)
            break
        if arguments.llama_completion:
            row("GGUF", dtype, path, "llama-completion", with_llama(arguments.llama_completion, path, prompts))
        if dtype in ("f32", "q8_0"):
            row("GGUF", dtype, path, "transformers", with_transformers(path, directory, prompts))
    return failed


def size(path):
    return path.stat().st_size / 1e6


def generate(binary, model, prompts, scratch):
    rows = scratch / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    command = [binary, "generate", "--model", model, "--input", rows, "--json", "--max-new-tokens", str(ANSWER_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [plain(json.loads(line)["response"]) for line in done.stdout.splitlines()]


def export(binary, model, kind, dtype, path):
    """Returns the reason of a refusal, or nothing if the file was written."""
    command = [binary, "export", "--model", model, "--format", kind, "--dtype", dtype, "--output", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    if done.returncode == 4 and "cannot hold this model" in done.stderr:
        return done.stderr.splitlines()[0].split("cannot hold this model: ")[1]
    sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")


def plain(text):
    return text.strip()


def tokenizer_of(directory):
    import transformers

    # Run directories have a tokenizer.json, which the command uses.
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))


def with_ctranslate2(path, directory, prompts):
    import ctranslate2

    tokenizer = tokenizer_of(directory)
    translator = ctranslate2.Translator(str(path), device="cpu", compute_type="default")
    sources = [tokenizer.convert_ids_to_tokens(ids_with_end(tokenizer, prompt)) for prompt in prompts]
    results = translator.translate_batch(sources, beam_size=1, max_decoding_length=ANSWER_TOKENS, max_batch_size=8)
    answers = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    return [plain(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]


def ids_with_end(tokenizer, prompt):
    end = tokenizer.convert_tokens_to_ids("</s>")
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return [*ids, end]


def differing_variables(directory, dtype, path, target):
    """Names of the variables that CTranslate2's own converter writes differently, or that only one of the two files has."""
    import ctranslate2

    converter = ctranslate2.converters.TransformersConverter(str(directory))
    converter.convert(str(target), quantization=None if dtype == "f32" else dtype, force=True)
    if (target / "model.bin").read_bytes() == (path / "model.bin").read_bytes():
        return []
    one, other = (variables((place / "model.bin").read_bytes()) for place in (path, target))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def variables(data):
    """Every variable of a `model.bin` with its shape, dtype and bytes, and every alias."""
    at = 0

    def number(form):
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text():
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at - 1].decode()

    found = {}
    number("I"), text(), number("I")
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, length = number("B"), number("I")
        at += length
        found[name] = (shape, dtype, data[at - length : at])
    for _ in range(number("I")):
        name = text()
        found[name] = text()
    return found


def with_llama(program, path, prompts):
    def ask(prompt):
        command = [program, "-m", path, "-p", prompt, "-n", str(ANSWER_TOKENS), "--temp", "0", "--top-k", "1"]
        command += ["--no-conversation", "--no-display-prompt", "--no-escape", "--no-warmup", "-t", "1"]
        command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
        for _ in range(ATTEMPTS):
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
            # llama-completion's log thread prints the answer, and on a busy machine may end before it has printed everything. This line comes last.
            if LAST_LINE in done.stderr:
                return plain(END_OF_TEXT.sub("", done.stdout))
        sys.exit(f"{' '.join(map(str, command))}\nnever printed all of its answer")

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(ask, prompts))


def with_transformers(path, directory, prompts):
    import torch
    import transformers

    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(str(directory))
    # The head in the file has the scale in it.
    config.scale_decoder_outputs = False
    load = transformers.AutoModelForSeq2SeqLM.from_pretrained
    model = load(str(path.parent), gguf_file=path.name, config=config, dtype=torch.float32)
    tokenizer = tokenizer_of(directory)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([ids_with_end(tokenizer, prompt)])
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False, num_beams=1, eos_token_id=1, pad_token_id=0)
        answers.append(plain(tokenizer.decode(out[0], skip_special_tokens=True)))
    return answers


if __name__ == "__main__":
    main()
