#!/usr/bin/env python3
"""Trains by `train_low_mem` and by torch, step beside step, and prints the largest difference for each recipe.

    python scripts/check_recipes.py --binary target/release/train_low_mem
    python scripts/check_recipes.py --binary target/release/train_low_mem --only dpo orpo --json

Each recipe is a command: `train_low_mem --set ...` on a tiny Hugging Face directory and rows in JSONL, for 50 steps.
The reference is torch in f64 with torch.optim.AdamW, transformers' schedules and PEFT's adapters; losses of
preferences are the formulas of TRL's DPOTrainer, ORPOTrainer, CPOTrainer (SimPO) and KTOTrainer, whose
log-probabilities are sums over all target tokens, EOS included. `loss`, `objective`, `grad_norm` and `lr` of
`metrics.jsonl` are compared, and TRL's metrics where there are preferences. A difference is relative to the largest
value of its number in the run; in brackets is that of torch itself in f32. Exits 1 above the tolerance and ten times
that.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import tokenizers
import torch
import transformers
from golden_cases import recipes
from golden_cases.t5_models import perturb
from peft import LoraConfig, get_peft_model
from t5_data import Encoder
from transformers import T5Config, T5ForConditionalGeneration

BATCH = 6
ROWS = 60
LENGTH = 24
WORDS = "red blue green stone river tree cloud bird seven nine over under join split find keep".split()

CONFIG = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True, help="train_low_mem")
    parser.add_argument("--only", nargs="+", metavar="RECIPE", choices=list(recipes.RECIPES), help=f"of: {', '.join(recipes.RECIPES)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the binary")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--keep", type=pathlib.Path, help="keep the runs here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        make_model(folder)
        found = {}
        for name in options.only or recipes.RECIPES:
            found[name] = compare(folder, name, recipes.RECIPES[name], options)
            if not options.json:
                numbers = ", ".join(f"{key} {far:.1e} ({noise:.1e})" for key, (far, noise) in found[name].items())
                print(f"{name}: {numbers}", flush=True)
    if options.json:
        print(json.dumps(found, indent=1))
    within = [far <= max(options.tolerance, 10 * noise) for numbers in found.values() for far, noise in numbers.values()]
    sys.exit(0 if all(within) else 1)


def make_model(folder):
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    text = lambda least, most: " ".join(rng.choices(WORDS, k=rng.randint(least, most)))
    rows = []
    for _ in range(ROWS):
        prompt, chosen, rejected = text(2, 12), text(1, 6), text(1, 9)
        row = {"prompt": prompt, "response": chosen, "chosen": chosen, "rejected": rejected}
        rows.append(row | {"completion": chosen, "label": rng.random() < 0.5})
    write = lambda name, keys: (folder / f"{name}.jsonl").write_text(
        "".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows)
    )
    write("pairs", ["prompt", "response"])
    write("preferences", ["prompt", "chosen", "rejected"])
    write("labels", ["prompt", "completion", "label"])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([row[key] for row in rows for key in ("prompt", "chosen", "rejected")], trainer)
    torch.manual_seed(5)
    model = T5ForConditionalGeneration(T5Config(vocab_size=tokenizer.get_vocab_size(), **CONFIG))
    perturb(model, generator)
    model.save_pretrained(folder / "model")
    teacher = T5Config(vocab_size=tokenizer.get_vocab_size(), **CONFIG | {"d_model": 24, "num_decoder_layers": 2})
    T5ForConditionalGeneration(teacher).save_pretrained(folder / "teacher")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q", "v", "wo"], r=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # PEFT begins with zeros, beside which the reference is the model itself
            parameter.data.normal_(std=0.05, generator=generator)
    adapted.save_pretrained(folder / "adapter")


def compare(folder, name, recipe, options):
    theirs = reference(folder, recipe, torch.float64)
    noise = differences(reference(folder, recipe, torch.float32), theirs)
    return {key: (far, noise[key]) for key, far in differences(run(folder, name, recipe, options), theirs).items()}


def differences(ours, theirs):
    """By number: the largest difference, relative to the number's largest value."""
    assert len(ours) == len(theirs) == recipes.STEPS, (len(ours), len(theirs))
    found = {}
    for key in theirs[0]:
        pairs = [(mine[key], its[key]) for mine, its in zip(ours, theirs) if its.get(key) is not None]
        largest = max(abs(its) for _, its in pairs) or 1.0
        found[key] = max(abs(mine - its) for mine, its in pairs) / largest
    return found


def run(folder, name, recipe, options):
    keys = {key: value for key, value in recipe.items() if "." in key}
    loss = recipe.get("preference.loss")
    rows = rows_of(loss)
    usual = {
        "model.init_from": folder / "model",
        "data.train": folder / f"{rows}.jsonl",
        "data.shuffle": "false",
        "data.max_source_tokens": LENGTH,
        "data.max_target_tokens": LENGTH,
        "train.batch_size": BATCH,
        "train.max_steps": recipes.STEPS,
        "train.epochs": "none",
        "train.dropout": 0,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": recipes.RATE,
        "run.device": "cpu",
        "run.output_dir": folder / "runs" / name,
    }
    if recipe.get("adapter"):
        usual["lora.init_from"] = folder / "adapter"
    if recipe.get("groups"):
        usual["optimizer.groups"] = "[" + ", ".join(group_of(*group) for group in recipes.GROUPS) + "]"
    settings = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in (usual | keys).items()]
    arguments = [word for setting in settings + options.set for word in ("--set", setting)]
    ran = subprocess.run([options.binary.absolute(), *arguments], cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{name}: exit code {ran.returncode}\n{ran.stderr}")
    events = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "step"]


def group_of(items, factor, decay):
    fields = [f"parameters = {json.dumps(sorted(items))}", f"learning_rate_factor = {factor}"]
    return "{ " + ", ".join(fields + ([] if decay is None else [f"weight_decay = {decay}"])) + " }"


def reference(folder, recipe, dtype):
    encoder, loss = Encoder(folder / "model"), recipe.get("preference.loss")
    rows = [json.loads(line) for line in (folder / f"{rows_of(loss)}.jsonl").read_text().splitlines()]
    names = {"prompt": "sources", "response": "targets", "chosen": "targets", "completion": "targets", "rejected": "rejected"}
    batches = []
    for first in range(0, ROWS, BATCH):
        batch = {"labels": []}
        for row in rows[first : first + BATCH]:
            for key, text in row.items():
                batch.setdefault(names.get(key, "labels"), []).append(text if key == "label" else encoder.ids(text, LENGTH))
        batches.append(batch)
    adapter = folder / "adapter" if recipe.get("adapter") else None
    named = recipe.get("preference.reference") or recipe.get("distill.teacher")
    frozen = recipes.load(folder / named, None, dtype) if named else None
    return recipes.steps(recipes.load(folder / "model", adapter, dtype), batches, recipe, frozen)


def rows_of(loss):
    return "labels" if loss == "kto" else "preferences" if loss else "pairs"


if __name__ == "__main__":
    main()
