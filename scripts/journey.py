#!/usr/bin/env python3
"""The first hour of a newcomer, command by command: the command line, its duration, and its output.

    python scripts/journey.py --binary target/release/train_low_mem --output journey.md
    python scripts/journey.py --binary ... --output ... --models DIR      # also every Hugging Face directory in DIR

Needs only Python. The rows are made up: additions and reversals, 1,800 to train and 200 to validate, as JSONL, CSV, a JSON
array, chats and parquet. A command whose result would surprise a newcomer is counted, and the script fails.
"""

import argparse
import csv
import json
import pathlib
import random
import shlex
import subprocess
import sys
import tempfile
import time

SHOWN_LINES = 14


def rows(count, seed):
    words = "red green blue fox wolf tree river stone cloud seven apple north".split()
    draw = random.Random(seed)
    for _ in range(count):
        if draw.random() < 0.5:
            a, b = draw.randint(0, 99), draw.randint(0, 99)
            yield f"add {a} and {b}", str(a + b)
        else:
            chosen = draw.sample(words, 3)
            yield "reverse: " + " ".join(chosen), " ".join(reversed(chosen))


def write_material(folder):
    for name, count, seed in [("train", 1800, 1), ("valid", 200, 2)]:
        pairs = list(rows(count, seed))
        lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["question", "answer"])
            writer.writerows(pairs)
        alpaca = [{"instruction": prompt, "input": "", "output": response} for prompt, response in pairs]
        (folder / f"{name}.json").write_text(json.dumps(alpaca))
        chats = [
            json.dumps({"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": r}]})
            for p, r in pairs
        ]
        (folder / f"{name}-chat.jsonl").write_text("\n".join(chats) + "\n")


def commands(models):
    """(the purpose, the command, the expected exit code, words that the output must have)."""
    small = "--preset tiny --tokenizer tok.json --max-steps 20"
    yield "Is it there?", "train_low_mem --version", 0, []
    yield "What can it do?", "train_low_mem --help", 0, ["Examples:"]
    yield "The demo, shortened", "train_low_mem --max-steps 60", 0, ["Memory plan", "next:"]
    yield "My rows: what is in them?", "train_low_mem inspect train.jsonl", 0, ["1800"]
    yield "A tokenizer", "train_low_mem train-tokenizer --input train.jsonl --vocab-size 500 --output tok.json", 0, []
    for name in ["train.jsonl", "train.csv", "train.json", "train-chat.jsonl"]:
        yield f"Train on {name}", f"train_low_mem --data {name} {small} --output runs/{name}", 0, ["model: saved"]
    yield "As parquet", "train_low_mem convert train.csv --output train.parquet", 0, []
    yield "Which columns?", "train_low_mem inspect train.parquet", 0, ["1800"]
    yield (
        "Train longer, with validation",
        "train_low_mem --data train.parquet --validation-file valid.jsonl --preset tiny --tokenizer tok.json "
        "--max-steps 60 --batch-size 32 --lr 3e-3 --output runs/first",
        0,
        ["on validation rows", "60 steps"],
    )
    yield "Resume: nothing left", "train_low_mem --output runs/first --keep-training", 0, ["this run is finished"]
    yield "Train more", "train_low_mem --output runs/first --keep-training --max-steps 80", 0, ["steps 61 to 80"]
    yield (
        "Fine-tune my model",
        "train_low_mem --finetune --model runs/first/model --data train.jsonl --max-steps 10 --output runs/tuned",
        0,
        ["frozen", "learning rate 1.00e-3, constant"],
    )
    yield "Score it", "train_low_mem eval --model runs/tuned/model --data valid.jsonl --samples 40", 0, ["BLEU"]
    yield "Ask it", "train_low_mem generate --model runs/tuned/model --prompt 'add 2 and 3'", 0, []
    yield "A run for a model", "train_low_mem generate --model runs/tuned --prompt 'add 2 and 3'", 0, []
    yield "Does t5-base fit?", "train_low_mem plan --preset t5-base --memory-budget 2GiB", 0, ["Memory plan"]
    yield "In 300 MiB?", "train_low_mem plan --preset t5-base --memory-budget 300MiB", 3, ["hint:", "known length"]
    yield "So with a length", "train_low_mem plan --preset t5-base --memory-budget 400MiB --max-steps 20", 0, ["disk"]
    yield "A slip", "train_low_mem --data train.jsonl --modle tiny", 2, ["--model"]
    yield "Another slip", "train_low_mem --resume --output runs/first", 2, ["--keep-training"]
    yield "A file that is not there", "train_low_mem --data rows.jsonl --preset tiny --tokenizer tok.json", 4, ["rows.jsonl"]
    yield "A budget that is too small", f"train_low_mem --data train.jsonl {small} --memory-budget 10MiB --output x", 3, ["smallest"]
    yield "The same output again", f"train_low_mem --data train.jsonl {small} --output runs/first", 2, ["never overwritten"]
    yield "A log", f"train_low_mem --data train.jsonl {small} --output runs/log | tee train.log", 0, ["step 20/20"]
    for model in models:
        name = model.name
        tune = f"train_low_mem --finetune --model {shlex.quote(str(model))} --data train.jsonl --max-steps 2 --batch-size 4"
        yield f"Fine-tune {name}", f"{tune} --output runs/{shlex.quote(name)}", 0, ["model: saved"]
        yield f"Ask {name}", f"train_low_mem generate --model runs/{shlex.quote(name)} --prompt 'add 2 and 3'", 0, []


def shortened(text):
    lines = text.rstrip().splitlines()
    if len(lines) <= SHOWN_LINES:
        return lines
    half = SHOWN_LINES // 2
    return lines[:half] + [f"... {len(lines) - 2 * half} lines ..."] + lines[-half:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the transcript, Markdown")
    parser.add_argument("--models", type=pathlib.Path, help="a directory of Hugging Face directories")
    options = parser.parse_args()
    models = sorted(path.resolve() for path in options.models.iterdir() if path.is_dir()) if options.models else []
    directory = options.binary.resolve().parent
    transcript, wrong, started = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        write_material(folder)
        for why, command, expected, words in commands(models):
            began = time.monotonic()
            line = f"PATH={shlex.quote(str(directory))}:\"$PATH\"; {command}"
            ran = subprocess.run(["sh", "-c", line], cwd=folder, text=True, capture_output=True, check=False)
            took, minute = time.monotonic() - began, (began - started) / 60
            said = ran.stdout + ran.stderr
            missing = [word for word in words if word not in said]
            as_expected = ran.returncode == expected and not missing
            wrong += not as_expected
            print(f"{'ok   ' if as_expected else 'WRONG'} {minute:5.1f} min  {took:6.1f} s  {ran.returncode:3}  {command}")
            note = "" if as_expected else f" **Expected exit code {expected}, and the words {missing}.**"
            transcript += [f"**{minute:.1f} min. {why}** ({took:.1f} s, exit code {ran.returncode}).{note}", "", "```text"]
            transcript += ["$ " + command] + [text.replace(scratch, ".") for text in shortened(said)] + ["```", ""]
    count = sum(text.startswith("$ ") for text in transcript)
    head = ["# The first hour of a newcomer", "", f"{count} commands, {wrong} of them with an end that was not expected.", ""]
    options.output.write_text("\n".join(head + transcript))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
