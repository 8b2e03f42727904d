#!/usr/bin/env python3
"""Trains T5Gemma and T5Gemma 2 by `train_low_mem` and by torch, answers with both, and loads the results in transformers.

    python scripts/check_gemma.py --binary target/release/train_low_mem [--keep DIRECTORY] [NAME...]

Each case is a directory as it is published, with random weights and a tokenizer with byte fallback. The command trains every parameter for six
steps in f32; the reference is transformers in f64 with torch.optim.AdamW. `loss` and `grad_norm` are compared. The saved directory has to
load with no missing and no unexpected keys, what texts do not use must be unchanged, and greedy answers must be those of
transformers. Prints the largest relative differences; exits 1 above 1e-4.

Then an adapter is trained and merged: the merged model has the logits of PEFT's adapter beside the model. The vocabulary is trimmed and
grown: logits of entries that stay have their bits. Classifiers are trained: their loss is that of transformers, one text at a time.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import peft
import tokenizers
import torch
import transformers
from golden_cases import gemma
from safetensors import safe_open

WORDS = "red blue green stone river tree cloud bird seven nine über 学习 naïve under join split find keep".split()
BATCH, ROWS, STEPS = 4, 12, 6
PROMPTS = ["red stone", "seven 学习 birds", "naïve", "100 % 🎉"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(gemma.CASES)}; default: all")
    parser.add_argument("--binary", required=True, type=pathlib.Path)
    parser.add_argument("--ctranslate2", action="store_true", help="also print how far CTranslate2's conversion is from transformers; needs ctranslate2")
    parser.add_argument("--keep", type=pathlib.Path, help="make everything here and leave it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gemma.exact_in_f64()
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or pathlib.Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        failed = [name for name in options.names or gemma.CASES if not check(name, root, options.binary.resolve())]
        for name in (options.names or gemma.CASES) if options.ctranslate2 else ():
            print(f"{name}: log-probabilities of first tokens by CTranslate2 differ by {by_ctranslate2(root / name):.1e} at most")
    print(f"{len(failed)} failed {failed}")
    sys.exit(1 if failed else 0)


def check(name, root, binary):
    folder, output = root / name, root / f"{name}-run"
    folder.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    generation, of_encoder, of_decoder, layout = gemma.CASES[name]
    model = gemma.make_model(generation, of_encoder, of_decoder, 7, vocab=tokenizer.get_vocab_size())
    gemma.LAYOUTS[layout](model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"}))
    rng = random.Random(5)
    text = lambda least, most: " ".join(rng.choices(WORDS, k=rng.randint(least, most)))
    rows = [{"prompt": text(2, 9), "response": text(1, 6)} for _ in range(ROWS)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model.init_from": folder, "data.train": root / "rows.jsonl", "data.shuffle": "false", "data.max_source_tokens": 60,
        "data.max_target_tokens": 60, "train.batch_size": BATCH, "train.max_steps": STEPS, "train.epochs": "none", "train.dropout": 0,
        "optimizer.name": "adamw", "optimizer.learning_rate": 1e-3, "schedule.name": "constant", "run.device": "cpu",
        "run.output_dir": output,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    ran = subprocess.run([binary, "train", *words], capture_output=True, text=True)
    if ran.returncode:
        print(f"{name}: exit code {ran.returncode}\n{ran.stderr[-3000:]}")
        return False
    events = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    ours = [event for event in events if event["event"] == "step"]
    batches = [batch_of(tokenizer, rows[first : first + BATCH]) for first in range(0, ROWS, BATCH)]
    theirs = gemma.steps(gemma.load(folder, torch.float64), batches)
    far = {key: max(abs(a[key] / b[key] - 1) for a, b in zip(ours, theirs, strict=True)) for key in ("loss", "grad_norm")}
    problems = [f"{key} {value:.1e}" for key, value in far.items() if value > 1e-4]
    problems += saved(folder, output / "model")
    problems += answered(binary, output / "model", tokenizer)
    problems += merged(binary, folder, root, batches, settings)
    problems += trimmed(binary, folder, root, tokenizer, rows)
    problems += classified(binary, folder, root, tokenizer, settings)
    print(f"{name}: {', '.join(f'{key} {value:.1e}' for key, value in far.items())}: {problems or 'ok'}", flush=True)
    return not problems


def command(binary, *words):
    ran = subprocess.run([binary, *words], capture_output=True, text=True)
    return ran.stdout, f"{words[0]}: exit code {ran.returncode}: {ran.stderr[-1500:]}" if ran.returncode else None


def words_of(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def loaded(folder, model_class=transformers.AutoModelForSeq2SeqLM):
    """The model in f32, and what transformers missed or did not expect."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    return model.eval(), [f"{folder.name}: {kind}: {list(info[kind])[:4]}" for kind in kinds if info[kind]]


def logits(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).logits


def merged(binary, folder, root, batches, settings):
    run, output = root / f"{folder.name}-lora", root / f"{folder.name}-merged"
    dora = {"lora.dora": "true", "run.output_dir": run, "optimizer.learning_rate": 0.01}
    _, failed = command(binary, "train", "--lora", *words_of(settings | dora))
    _, failed = (None, failed) if failed else command(binary, "merge", "--model", folder, "--adapter", run, "--dtype", "f32", "-o", output)
    if failed:
        yield failed
        return
    model, problems = loaded(output)
    yield from problems
    beside = peft.PeftModel.from_pretrained(loaded(folder)[0], run / "adapter").eval()
    far = (logits(model, batches[0]) - logits(beside, batches[0])).abs().max().item()
    if far > 1e-5:
        yield f"merged logits differ by {far:.1e} from PEFT's"
    _, failed = command(binary, "average", folder, folder, "-o", root / f"{folder.name}-mean")
    yield from [failed] if failed else loaded(root / f"{folder.name}-mean")[1]


def trimmed(binary, folder, root, tokenizer, rows):
    """The logits of entries that stay, with the sources and targets in the new ids."""
    names = [root / f"{folder.name}-{name}" for name in ("trimmed", "grown")]
    few = root / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    for output, words in zip(names, (("trim-vocab", "--model", folder, "--keep-used", few), ("add-tokens", "--model", folder, "--tokens", "§", "zzz"))):
        _, failed = command(binary, *words, "-o", output)
        if failed:
            yield failed
            return
        model, problems = loaded(output)
        yield from problems
        new = transformers.AutoTokenizer.from_pretrained(output)
        ids = [new.convert_tokens_to_ids(name) for name, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        stays = [old for old, id in enumerate(ids) if id is not None and new.convert_ids_to_tokens(id) == tokenizer.id_to_token(old)]
        old_batch = batch_of(tokenizer, rows[:3])
        to_new = lambda tensor: tensor.clone().apply_(lambda id: id if id < 0 else ids[id])  # noqa: E731
        new_batch = old_batch | {name: to_new(old_batch[name]) for name in ("input_ids", "labels")}
        if [new(row["prompt"]).input_ids + [1] for row in rows[:3]] != [[ids[id] for id in source] for source in old_batch["sources"]]:
            yield f"{output.name}: other tokens"
        before, after = logits(loaded(folder)[0], old_batch)[..., stays], logits(model, new_batch)[..., [ids[old] for old in stays]]
        if len(stays) < 260 or not torch.allclose(before, after, rtol=0, atol=2e-6):
            yield f"{output.name}: logits of {len(stays)} entries differ by {(before - after).abs().max():.1e}"


def classified(binary, folder, root, tokenizer, settings):
    texts = ["red stone", "blue river tree", "green", "cloud bird stone red"]
    labels = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(texts)]
    tags = [{"tokens": text.split(), "ner_tags": ["O" if word == "red" else "B-X" for word in text.split()]} for text in texts]
    for task, rows, model_class in (
        ("classification", labels, transformers.AutoModelForSequenceClassification),
        ("token-classification", tags, transformers.AutoModelForTokenClassification),
    ):
        file, output = root / f"{task}.jsonl", root / f"{folder.name}-{task}"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        _, failed = command(binary, "train", *words_of(settings | {"task.name": task, "data.train": file, "run.output_dir": output}))
        said, failed = (None, failed) if failed else command(binary, "eval", "--model", output, "--data", file, "--json")
        if failed:
            yield failed
            continue
        model, problems = loaded(output / "model", model_class)
        yield from problems
        total, count = 0.0, 0
        for row in rows:
            if task == "classification":
                source, target = tokenizer.encode(row["text"]).ids + [1], [model.config.label2id[row["label"]]]
            else:
                # Words are tokenized alone, and the label of a word is that of its first token.
                source, target = [2], [-100]
                for word, tag in zip(row["tokens"], row["ner_tags"], strict=True):
                    ids = tokenizer.encode(word, add_special_tokens=False).ids
                    source, target = source + ids, target + [model.config.label2id[tag]] + [-100] * (len(ids) - 1)
                source, target = source + [1], [[*target, -100]]
            with torch.no_grad():
                loss = model(input_ids=torch.tensor([source]), labels=torch.tensor(target)).loss.item()
            many = 1 if task == "classification" else sum(tag >= 0 for tag in target[0])
            total, count = total + loss * many, count + many
        ours = json.loads(said)["loss"]
        if abs(ours / (total / count) - 1) > 1e-4:
            yield f"{task}: loss {ours}, transformers {total / count}"


def make_tokenizer():
    """Pairs of bytes and letters with byte fallback, as Gemma's: spaces are `▁`, and `<bos>` begins every text."""
    letters = sorted(set("".join(WORDS[:12]))) + ["▁"]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<eoi>", "<image>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("r", "e"), ("e", "n"), ("▁", "s"), ("e", "e")]
    vocab = {piece: number for number, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    model = tokenizers.models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(pieces[:6])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def batch_of(tokenizer, rows):
    sources = [[*tokenizer.encode(row["prompt"]).ids, 1] for row in rows]
    targets = [[*tokenizer.encode(row["response"], add_special_tokens=False).ids, 1] for row in rows]
    pad = lambda lists, value: torch.tensor([ids + [value] * (max(map(len, lists)) - len(ids)) for ids in lists])
    return {"sources": sources, "input_ids": pad(sources, 0), "attention_mask": pad([[1] * len(ids) for ids in sources], 0), "labels": pad(targets, -100)}


def tensors_of(folder):
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())


def saved(before, after):
    old, new = dict(tensors_of(before)), dict(tensors_of(after))
    if old.keys() != new.keys():
        yield f"names differ: {sorted(old.keys() ^ new.keys())[:4]}"
    for name in old.keys() & new.keys():
        if not gemma.is_text(name) and (old[name].dtype != new[name].dtype or not torch.equal(old[name], new[name])):
            yield f"{name} has changed"
    _, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(after, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            yield f"{kind}: {list(info[kind])[:4]}"


def by_ctranslate2(folder):
    """The largest difference between the log-probability of a first token and transformers', after CTranslate2's own conversion."""
    import ctranslate2

    # Gemma's class would add an entry to the tokenizer.
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    ctranslate2.converters.TransformersConverter(str(folder)).convert(folder / "ctranslate2", force=True)
    translator = ctranslate2.Translator(str(folder / "ctranslate2"), device="cpu", compute_type="float32")
    tokenizer, model, far = make_tokenizer(), gemma.load(folder), []
    settings = {"beam_size": 1, "max_decoding_length": 1, "min_decoding_length": 0, "length_penalty": 0, "return_scores": True}
    for prompt in PROMPTS:
        source = [*tokenizer.encode(prompt).ids, 1]
        said = translator.translate_batch([[tokenizer.id_to_token(id) for id in source]], **settings)[0]
        token = tokenizer.token_to_id(said.hypotheses[0][0]) if said.hypotheses[0] else 1
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[2]]), use_cache=False).logits[0, -1]
        far.append(abs(said.scores[0] - logits.log_softmax(-1)[token].item()))
    return max(far)


def answered(binary, folder, tokenizer):
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    ran = subprocess.run([binary, "generate", "--model", folder, "--json", "--max-new-tokens", "16", *prompts], capture_output=True, text=True)
    if ran.returncode:
        yield f"generate: {ran.stderr[-500:]}"
        return
    ours = [json.loads(line)["response"] for line in ran.stdout.split("\n") if line]
    batch = {"sources": [[*tokenizer.encode(prompt).ids, 1] for prompt in PROMPTS]}
    for prompt, answer, ids in zip(PROMPTS, ours, gemma.generate(gemma.load(folder), batch, 16)[0], strict=True):
        expected = tokenizer.decode(ids)
        if answer != expected:
            yield f"answer to {prompt!r}: {answer!r}, transformers {expected!r}"


if __name__ == "__main__":
    main()
