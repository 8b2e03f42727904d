#!/usr/bin/env python3
"""Tokens a second of `train_low_mem bench serve` beside transformers and CTranslate2, in turn.

    python scripts/compare_generation_speed.py --binary target/release/train_low_mem --tokenizer data/sample-tokenizer.json

The model has the shape of T5 v1.0 small, or of base, and random weights. Every source has 64 tokens and every answer 64: no end of the
sequence comes before. Each round asks one system after the other. Prints the median of each as a table. Needs `ctranslate2` besides.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import ctranslate2
import measured_machine
import torch
from transformers import T5Config, T5ForConditionalGeneration

SHAPES = {
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
}
TOKENS = 64
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def make(arguments, directory):
    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SHAPES[arguments.shape])
    T5ForConditionalGeneration(config).save_pretrained(directory / "model")
    shutil.copy(arguments.tokenizer, directory / "model" / "tokenizer.json")
    export = [arguments.binary, "export", "--model", directory / "model", "--format", "ctranslate2", "--output", directory / "ct2"]
    subprocess.run(export, check=True, capture_output=True)


def ours(arguments, directory, batch, beams):
    command = [arguments.binary, "bench", "serve", directory / "model", "--batch", str(batch), "--num-beams", str(beams)]
    command += ["--source-tokens", str(TOKENS), "--new-tokens", str(TOKENS), "--rounds", "1", "--json"]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(arguments.threads)}
    out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    return out["batches"][0]["tokens_per_second"]


def of_transformers(model, batch, beams):
    ids = torch.randint(3, 4000, (batch, TOKENS))
    began = time.perf_counter()
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, num_beams=beams, do_sample=False
    )
    return batch * TOKENS / (time.perf_counter() - began)


def of_ctranslate2(translator, vocabulary, batch, beams):
    sources = [[vocabulary[100 + (7 * row + 13 * at) % 500] for at in range(TOKENS)] for row in range(batch)]
    began = time.perf_counter()
    translator.translate_batch(sources, beam_size=beams, max_decoding_length=TOKENS, min_decoding_length=TOKENS)
    return batch * TOKENS / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured_machine.warn_if_busy()
    print(measured_machine.describe(REPOSITORY, ["torch", "transformers", "ctranslate2"]) + f", {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        make(arguments, directory)
        model = T5ForConditionalGeneration.from_pretrained(directory / "model", dtype=torch.float32).eval()
        translator = ctranslate2.Translator(
            str(directory / "ct2"), device="cpu", compute_type="float32", inter_threads=1, intra_threads=arguments.threads
        )
        vocabulary = json.loads((directory / "ct2" / "shared_vocabulary.json").read_text())
        print("\n| beams | sources | transformers | CTranslate2 | ours | of transformers | of CTranslate2 |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for beams in arguments.beams:
            for batch in arguments.batches:
                systems = [
                    lambda: of_transformers(model, batch, beams),
                    lambda: of_ctranslate2(translator, vocabulary, batch, beams),
                    lambda: ours(arguments, directory, batch, beams),
                ]
                # The first round is not counted.
                rounds = [[system() for system in systems] for _ in range(arguments.rounds + 1)][1:]
                theirs, third, own = (statistics.median(rates) for rates in zip(*rounds))
                rates = f"{theirs:.1f} | {third:.1f} | {own:.1f}"
                print(f"| {beams} | {batch} | {rates} | {own / theirs:.2f} | {own / third:.2f} |", flush=True)


if __name__ == "__main__":
    main()
