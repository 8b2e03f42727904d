#!/usr/bin/env python3
"""Tokens a second and peak memory of `train_low_mem bench serve` beside transformers and CTranslate2, in turn.

    python scripts/compare_generation_speed.py --binary target/release/train_low_mem --tokenizer data/sample-tokenizer.json

The model has the shape of T5 v1.0 small, or of base, and random weights. Every source has 64 tokens and every answer 64: no answer
ends earlier. Each round runs one system after the other, each in a process of its own, whose first answers are not counted.
Prints the medians as a table. CTranslate2 runs in f32 only. Also needs `ctranslate2`.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import measured_machine

SHAPES = {
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
}
TOKENS = 64
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent



def make(arguments, directory):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SHAPES[arguments.shape])
    model = T5ForConditionalGeneration(config).to(torch.bfloat16 if arguments.dtype == "bf16" else torch.float32)
    model.save_pretrained(directory / "model")
    shutil.copy(arguments.tokenizer, directory / "model" / "tokenizer.json")
    export = [arguments.binary, "export", "--model", directory / "model", "--format", "ctranslate2", "--output", directory / "ct2"]
    if arguments.dtype == "f32":
        subprocess.run(export, check=True, capture_output=True)


def ours(arguments, directory, batch, beams):
    command = [arguments.binary, "bench", "serve", directory / "model", "--batch", str(batch), "--num-beams", str(beams)]
    command += ["--source-tokens", str(TOKENS), "--new-tokens", str(TOKENS), "--rounds", "1", "--precision", arguments.dtype, "--json"]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(arguments.threads)}
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    return out["batches"][0]["tokens_per_second"], out["peak_rss_bytes"]


def of_transformers(arguments, directory, batch, beams):
    import torch
    from transformers import T5ForConditionalGeneration

    torch.set_num_threads(arguments.threads)
    model = T5ForConditionalGeneration.from_pretrained(directory / "model", dtype="auto").eval()
    ids = torch.randint(3, 4000, (batch, TOKENS))
    return lambda: model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, num_beams=beams, do_sample=False
    )


def of_ctranslate2(arguments, directory, batch, beams):
    import ctranslate2

    translator = ctranslate2.Translator(
        str(directory / "ct2"), device="cpu", compute_type="float32", inter_threads=1, intra_threads=arguments.threads
    )
    vocabulary = json.loads((directory / "ct2" / "shared_vocabulary.json").read_text())
    sources = [[vocabulary[100 + (7 * row + 13 * at) % 500] for at in range(TOKENS)] for row in range(batch)]
    return lambda: translator.translate_batch(sources, beam_size=beams, max_decoding_length=TOKENS, min_decoding_length=TOKENS)


IN_PYTHON = {"transformers": of_transformers, "CTranslate2": of_ctranslate2}


def in_this_process(arguments):
    """Prints the rate of one system and the peak of this process."""
    system, directory, batch, beams = arguments.system
    answer = IN_PYTHON[system](arguments, pathlib.Path(directory), int(batch), int(beams))
    answer()
    began = time.perf_counter()
    answer()
    rate = int(batch) * TOKENS / (time.perf_counter() - began)
    print(json.dumps([rate, measured_machine.peak_rss_bytes()]))


def in_a_process(system, directory, batch, beams):
    command = [sys.executable, *sys.argv, "--system", system, str(directory), str(batch), str(beams)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--system", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        return in_this_process(arguments)
    measured_machine.warn_if_busy()
    print(measured_machine.describe(REPOSITORY, ["torch", "transformers", "ctranslate2"]) + f", {arguments.rounds} rounds")
    others = ["transformers", "CTranslate2"] if arguments.dtype == "f32" else ["transformers"]
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        make(arguments, directory)
        columns = ["beams", "sources", *[f"{system} tokens/s" for system in others], "ours tokens/s"]
        columns += [f"ours / {system}" for system in others] + [f"{system} MiB" for system in [*others, "ours"]]
        print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
        for beams in arguments.beams:
            for batch in arguments.batches:
                rounds = []
                for _ in range(arguments.rounds):
                    theirs = [in_a_process(system, directory, batch, beams) for system in others]
                    rounds.append([*theirs, ours(arguments, directory, batch, beams)])
                rates, peaks = ([statistics.median(row[part] for row in column) for column in zip(*rounds)] for part in (0, 1))
                cells = [str(beams), str(batch), *[f"{rate:.1f}" for rate in rates]]
                cells += [f"{rates[-1] / rate:.2f}" for rate in rates[:-1]] + [f"{peak / 2**20:,.0f}" for peak in peaks]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
