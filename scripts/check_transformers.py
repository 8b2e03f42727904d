#!/usr/bin/env python3
"""Loads a model that train_low_mem wrote with transformers and computes the validation loss there.

    python scripts/check_transformers.py --model RUN/model --data valid.parquet \
        --max-source-tokens 256 --max-target-tokens 256
    python scripts/check_transformers.py ... --binary target/release/train_low_mem   # also runs its `eval`
    python scripts/check_transformers.py ... --eval-json eval.json                   # or reads the output of an `eval`

With one of the last two, exits 1 if the losses differ by more than 1e-4.

The loss is the sum of the token losses over all rows divided by the number of target tokens, EOS included.
Prints one JSON object: loss, perplexity, samples, source_tokens, target_tokens, parameters, and the keys that
`from_pretrained` reported as missing or unexpected. With --generate it also answers the first N rows greedily
and adds exact_match and bleu (sacreBLEU, tokenizer --bleu-tokenizer).
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys

import torch
import transformers
from t5_data import Encoder, read_pairs
from transformers import T5ForConditionalGeneration


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model directory or a checkpoint of train_low_mem")
    parser.add_argument("--data", required=True, nargs="+", help="parquet files")
    parser.add_argument("--tokenizer", help="default: tokenizer.json in the model directory")
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--response-column", default="response")
    parser.add_argument("--max-source-tokens", type=int, default=256)
    parser.add_argument("--max-target-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="only the first N rows")
    parser.add_argument("--bad-rows", choices=["error", "skip"], default="error")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="answer the first N rows too")
    parser.add_argument("--bleu-tokenizer", default="13a", choices=["13a", "zh", "char", "none"])
    ours = parser.add_mutually_exclusive_group()
    ours.add_argument("--binary", help="train_low_mem, whose `eval` is run on the same rows")
    ours.add_argument("--eval-json", help="output of `train_low_mem eval --json` to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest absolute difference of the losses")
    return parser.parse_args()


def load(directory):
    """The model in f32, and the complaints of `from_pretrained`; any complaint is a fault of the directory."""
    model, report = T5ForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    complaints = {key: sorted(map(str, value)) for key, value in report.items() if value}
    return model.eval(), complaints


@torch.no_grad()
def validation_loss(model, encoder, pairs, options):
    loss_sum, target_tokens, source_tokens = 0.0, 0, 0
    # Samples of like lengths together: the same sum with less padding.
    pairs = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    for start in range(0, len(pairs), options.batch_size):
        chunk = pairs[start : start + options.batch_size]
        batch = encoder.batch(chunk, options.max_source_tokens, options.max_target_tokens)
        logits = model(**batch, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        loss_sum += losses.item()
        target_tokens += int((batch["labels"] != -100).sum())
        source_tokens += int(batch["attention_mask"].sum())
    return loss_sum / target_tokens, source_tokens, target_tokens


@torch.no_grad()
def answers(model, encoder, pairs, options):
    texts = []
    for start in range(0, len(pairs), options.batch_size):
        batch = encoder.batch(pairs[start : start + options.batch_size], options.max_source_tokens, 2)
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=options.max_target_tokens,
            do_sample=False,
            num_beams=1,
            # transformers 5.23 sizes its cache by num_layers, too small for a deeper decoder.
            use_cache=model.config.num_decoder_layers <= model.config.num_layers,
        )
        texts += encoder.tokenizer.batch_decode(output[:, 1:], skip_special_tokens=True)
    return texts


def our_evaluation(options):
    """The JSON of `train_low_mem eval` for the same rows, or None without the options for it."""
    if options.eval_json:
        return json.loads(pathlib.Path(options.eval_json).read_text())
    if not options.binary:
        return None
    settings = {
        "data.prompt_column": options.prompt_column,
        "data.response_column": options.response_column,
        "data.max_source_tokens": options.max_source_tokens,
        "data.max_target_tokens": options.max_target_tokens,
        "data.bad_rows": options.bad_rows,
    }
    if options.tokenizer:
        settings["data.tokenizer"] = options.tokenizer
    command = [options.binary, "eval", "--json", "--model", options.model, "--data", *options.data]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command += ["--samples", str(options.limit or 0), "--generate-samples", str(options.generate or 1)]
    command += ["--bleu-tokenizer", options.bleu_tokenizer]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"error: `eval` left with exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    options = arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, complaints = load(options.model)
    encoder = Encoder(options.model, options.tokenizer)
    rows = read_pairs(options.data, options.prompt_column, options.response_column, options.bad_rows)
    pairs = [pair for pair in rows[: options.limit] if pair is not None]
    loss, source_tokens, target_tokens = validation_loss(model, encoder, pairs, options)
    report = {
        "model": pathlib.Path(options.model).name,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "samples": len(pairs),
        "source_tokens": source_tokens,
        "target_tokens": target_tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "complaints_of_from_pretrained": complaints,
        "transformers": transformers.__version__,
    }
    if options.generate:
        import sacrebleu

        asked = pairs[: options.generate]
        found = answers(model, encoder, asked, options)
        wanted = [response for _, response in asked]
        bleu = sacrebleu.BLEU(tokenize=options.bleu_tokenizer)
        report["exact_match"] = sum(a == b for a, b in zip(found, wanted)) / len(wanted)
        report["bleu"] = bleu.corpus_score(found, [wanted]).score
        report["bleu_signature"] = str(bleu.get_signature())
    failed = bool(complaints)
    ours = our_evaluation(options)
    if ours:
        for key in ("bleu", "exact_match"):
            if key in report:
                report[f"{key}_difference"] = abs(ours[key] - report[key])
        report["train_low_mem"] = ours
        report["loss_difference"] = abs(ours["loss"] - loss)
        failed |= not report["loss_difference"] <= options.tolerance
    print(json.dumps(report, indent=1, ensure_ascii=False))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
