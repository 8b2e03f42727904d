#!/usr/bin/env python3
"""Show that transformers' Trainer scales T5's gradient by the accumulation steps, beside train_low_mem's exact sum.

    python scripts/trainer_gradient_scale.py --binary target/release/train_low_mem

`T5ForConditionalGeneration.forward` takes `**kwargs`, so Trainer believes that the model divides its loss by
`num_items_in_batch`, and does not divide it by the accumulation steps. T5's loss is the mean over the tokens of the
micro-batch. The sum of N such means is about N times the mean of the batch, and weighs the token of a short
target more than the token of a long one.

A tiny T5 with random weights takes one optimizer step on the same 8 rows, cut into 1, 2, 4 and 8 micro-batches. The
targets of the rows have 7 to 49 tokens. Dropout is 0, gradients are not clipped, weights and activations are f32.
The reference of every number is one pass of torch over the whole batch.

Three subjects are cut in turn: Trainer as it is; Trainer with `accepts_loss_kwargs = False` set on the model, which
shows the cause; and the command train_low_mem with `memory.micro_batch_samples` pinned. Each seed is a model and rows
of its own. The tables have the mean, and for the norm also the least and the greatest of all seeds:

    loss      the logged training loss, divided by the reference's
    norm      the gradient's norm, divided by the reference's. Trainer's gradient is its update by SGD at a learning
              rate of 1; train_low_mem's norm is `grad_norm` of metrics.jsonl
    cosine    of the angle between Trainer's gradient and the reference's; train_low_mem does not write its gradient
    weights   |change - reference change| / |reference change| of all weights. A change is one step of Adafactor at a
              learning rate of 1e-3 without parameter scaling; transformers' own makes the reference's and Trainer's

Exits 1 if train_low_mem is off by more than --tolerance, or if Trainer's norm at 8 steps is within 10 % of the
reference's. Then transformers has changed, and the documents that quote this script have to change too.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

import measured_machine
import pyarrow as pa
import pyarrow.parquet as parquet
import tokenizers
import torch
import transformers
from compare_training import ADAFACTOR_DEFAULTS, make_optimizer, read_run
from t5_data import Encoder
from transformers import Seq2SeqTrainer, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

ROWS = 8
CUTS = [1, 2, 4, 8]
TARGET_WORDS = [6, 12, 18, 24, 30, 36, 42, 48]  # one more token each: EOS
VOCABULARY = ["<pad>", "</s>", "<unk>", *(f"w{word}" for word in range(125))]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, help="train_low_mem; without it only Trainer is measured")
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="of the weights and the rows")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of train_low_mem, relative")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser.parse_args()


def make_case(folder, seed):
    """A model directory with a tokenizer of whole words, and a parquet file of 8 rows of uneven length."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(VOCABULARY), d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2, num_decoder_layers=2,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder / "model")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id for id, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(VOCABULARY[:3])
    tokenizer.save(str(folder / "model" / "tokenizer.json"))

    def text(words):
        return " ".join(rng.choices(VOCABULARY[3:], k=words))

    lengths = rng.sample(TARGET_WORDS, ROWS)
    rows = [(text(rng.randint(3, 40)), text(words)) for words in lengths]
    table = pa.table({"prompt": [row[0] for row in rows], "response": [row[1] for row in rows]})
    parquet.write_table(table, folder / "train.parquet")
    return rows


def load(folder):
    return T5ForConditionalGeneration.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    ).train()


def flat(model):
    """All parameters as one f64 vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def whole_batch(folder, batch):
    """Loss, gradient and Adafactor's update of one pass over all rows: the reference."""
    model = load(folder)
    before = flat(model)
    optimizer = make_optimizer(model.parameters(), ADAFACTOR_DEFAULTS)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    optimizer.step()
    return {"loss": loss.item(), "gradient": gradient, "change": flat(model) - before}


def trainer_step(folder, encoder, rows, cuts, optimizer_of, loss_kwargs):
    """One optimizer step of Trainer: the logged loss and the change of the parameters."""
    model = load(folder)
    if loss_kwargs is not None:
        model.accepts_loss_kwargs = loss_kwargs
    before = flat(model)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=ROWS // cuts,
                gradient_accumulation_steps=cuts,
                max_steps=1,
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
                train_sampling_strategy="sequential",
                remove_unused_columns=False,
                dataloader_pin_memory=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=rows,
            data_collator=lambda pairs: encoder.batch(pairs, 64, 64),
            optimizers=(optimizer_of(model.parameters()), None),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, flat(model) - before


def measure_trainer(folder, encoder, rows, cuts, loss_kwargs):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1.0)

    def adafactor(parameters):
        return make_optimizer(parameters, ADAFACTOR_DEFAULTS)

    loss, moved = trainer_step(folder, encoder, rows, cuts, sgd, loss_kwargs)
    _, change = trainer_step(folder, encoder, rows, cuts, adafactor, loss_kwargs)
    return {"loss": loss, "gradient": -moved, "norm": moved.norm().item(), "change": change}


def measure_ours(folder, binary, cuts):
    output = folder / f"run-{cuts}"
    settings = {
        "data.shuffle": "false",
        "data.max_source_tokens": "64",
        "data.max_target_tokens": "64",
        "train.batch_size": str(ROWS),
        "train.dropout": "0",
        "train.grad_clip_norm": "0",
        "train.epochs": "1",
        "optimizer.learning_rate": str(ADAFACTOR_DEFAULTS["learning_rate"]),
        "memory.micro_batch_samples": str(ROWS // cuts),
        "memory.prices": '"built-in"',
    }
    command = [binary.resolve(), "--set", f"model.init_from={folder / 'model'}"]
    command += ["--set", f"data.train={folder / 'train.parquet'}", "--output", output]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-4000:]}error: exit code {done.returncode}")
    # The log says how the step was cut: a ratio of 1 at an unknown cut would show nothing.
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["event"] == "step")
    if step["micro_batches"] != cuts:
        raise SystemExit(f"error: {cuts} micro-batches were asked for, the step had {step['micro_batches']}")
    run = read_run(output, 1)
    model = load(folder)
    before = flat(model)
    model.load_state_dict(run["final"], strict=False)
    return {"loss": run["losses"][0], "norm": run["grad_norms"][0], "change": flat(model) - before}


def ratios(found, reference):
    """One subject at one cut, relative to the reference."""
    gradient, change = reference["gradient"], reference["change"]
    row = {
        "loss": found["loss"] / reference["loss"],
        "norm": found["norm"] / gradient.norm().item(),
        "weights": ((found["change"] - change).norm() / change.norm()).item(),
    }
    if "gradient" in found:
        row["cosine"] = torch.nn.functional.cosine_similarity(found["gradient"], gradient, dim=0).item()
    return row


def measure(seed, binary):
    """Every subject at every cut, on the model and the rows of one seed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        rows = make_case(folder, seed)
        encoder = Encoder(folder / "model")
        reference = whole_batch(folder, encoder.batch(rows, 64, 64))
        subjects = {
            "Trainer": lambda cuts: measure_trainer(folder, encoder, rows, cuts, None),
            "Trainer, accepts_loss_kwargs = False": lambda cuts: measure_trainer(folder, encoder, rows, cuts, False),
        }
        if binary:
            subjects["train_low_mem"] = lambda cuts: measure_ours(folder, binary, cuts)
        return {name: {cuts: ratios(take(cuts), reference) for cuts in CUTS} for name, take in subjects.items()}


def table(name, seeds):
    digits = 6 if name == "train_low_mem" else 2
    lines = ["", f"## {name}", ""]
    lines.append("| micro-batches | loss | norm | least norm | greatest norm | cosine | weights |")
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for cuts in CUTS:
        rows = [seed[name][cuts] for seed in seeds]
        mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        norms = [row["norm"] for row in rows]
        numbers = [mean["loss"], mean["norm"], min(norms), max(norms)]
        cosine = f"{mean['cosine']:.3f}" if "cosine" in mean else ""
        weights = f"{mean['weights']:.1e}" if mean["weights"] < 1e-3 else f"{mean['weights']:.3f}"
        lines.append(f"| {cuts} | {' | '.join(f'{number:.{digits}f}' for number in numbers)} | {cosine} | {weights} |")
    return lines


def failures(seeds, tolerance):
    for report in seeds:
        if report["Trainer"][CUTS[-1]]["norm"] < 1.1:
            yield "Trainer does not scale the gradient"
        for cuts, row in report.get("train_low_mem", {}).items():
            distances = {"loss": abs(row["loss"] - 1), "norm": abs(row["norm"] - 1), "weights": row["weights"]}
            for name, distance in distances.items():
                if distance > tolerance:
                    yield f"train_low_mem, {cuts} micro-batches: {name} off by {distance:.1e}"


def main():
    options = arguments()
    assert Seq2SeqTrainer.training_step is Trainer.training_step, "Seq2SeqTrainer has a step of its own"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    seeds = [measure(seed, options.binary) for seed in options.seed]
    failed = list(failures(seeds, options.tolerance))
    if options.json:
        print(json.dumps({"seeds": dict(zip(options.seed, seeds)), "failed": failed}, indent=2))
    else:
        repository = pathlib.Path(__file__).resolve().parent.parent
        print(measured_machine.describe(repository, ["torch", "transformers", "accelerate"]))
        for name in seeds[0]:
            print("\n".join(table(name, seeds)))
        print("\n" + ("\n".join(f"FAILED: {line}" for line in failed) or "as described"))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
