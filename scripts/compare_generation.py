#!/usr/bin/env python3
"""Compares answers of `train_low_mem generate` with those of transformers, and times both in turn.

    python scripts/compare_generation.py --model RUN/model --prompts prompts.txt --binary target/release/train_low_mem
    python scripts/compare_generation.py ... --settings num_beams=4 length_penalty=2.0 --rounds 3

Settings have transformers' names. Each round runs both programs on all prompts, one after the other. Prints one JSON object: the answers
that differ, with both texts, and the seconds of each round. Exits 1 if answers differ; beams that are equal up to rounding may.
The time of `train_low_mem` without prompts is subtracted from its seconds.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

FLAGS = {
    "num_beams": "--num-beams", "length_penalty": "--length-penalty", "early_stopping": "--early-stopping",
    "repetition_penalty": "--repetition-penalty", "no_repeat_ngram_size": "--no-repeat-ngram",
    "min_new_tokens": "--min-new-tokens", "num_return_sequences": "--num-return-sequences",
}


def value(text):
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text


def ours(arguments, prompts, settings):
    flags = [word for name, setting in settings.items() for word in (FLAGS[name], str(setting).lower())]
    command = [
        arguments.binary, "generate", "--model", arguments.model, "--input", "-", "--json",
        "--max-new-tokens", str(arguments.max_new_tokens), "--batch-samples", str(arguments.batch), *flags,
    ]
    began = time.perf_counter()
    out = subprocess.run(command, input="".join(f"{prompt}\n" for prompt in prompts), capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if out.returncode:
        sys.exit(out.stderr)
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    return [[one["response"] for one in line.get("sequences", [line])] for line in lines], seconds


def theirs(arguments, model, tokenizer, prompts, settings):
    answers, count = [], settings.get("num_return_sequences", 1)
    began = time.perf_counter()
    for first in range(0, len(prompts), arguments.batch):
        batch = tokenizer(prompts[first : first + arguments.batch], return_tensors="pt", padding=True, truncation=True, max_length=512)
        ids = model.generate(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=arguments.max_new_tokens, **settings
        )
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        answers += [texts[i : i + count] for i in range(0, len(texts), count)]
    return answers, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="a text file, one per line")
    parser.add_argument("--binary", required=True)
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    settings = {name: value(text) for name, text in (setting.split("=", 1) for setting in arguments.settings)}
    prompts = pathlib.Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = T5ForConditionalGeneration.from_pretrained(arguments.model, dtype=torch.float32).eval()
    _, start = ours(arguments, [], settings)
    rounds, differing = [], []
    for _ in range(arguments.rounds):
        (got, our_time), (expected, their_time) = ours(arguments, prompts, settings), theirs(arguments, model, tokenizer, prompts, settings)
        rounds.append({"train_low_mem": round(our_time - start, 3), "transformers": round(their_time, 3)})
        differing = [
            {"prompt": prompt, "train_low_mem": a, "transformers": b}
            for prompt, a, b in zip(prompts, got, expected)
            if [text.strip() for text in a] != [text.strip() for text in b]
        ]
    print(json.dumps({"prompts": len(prompts), "settings": settings, "differing": differing, "seconds": rounds}, ensure_ascii=False, indent=1))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
