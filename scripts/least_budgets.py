#!/usr/bin/env python3
"""Runs random commands at the least budget that a refusal names, in control groups with that limit: none may be killed, none may hold more.

    python3 scripts/least_budgets.py --program target/release/train_low_mem [--seed 1] [--cases 200] [--only 7,12] [--work DIR] [--resume FILE]

The seed and the number decide a case: `train`, `eval`, `generate` or `chat`; a tokenizer of up to 250,000 pieces (unigram, byte pairs, added tokens, a
long template); rows of up to 15 MiB as parquet, JSONL, chats, CSV or JSON, plain or compressed, split or not, in up to 100,000 files; a small
model, an adapter, the precision of the base and of activations, beams. Each case is first refused with a budget of 1 MiB. Then it runs with the budget that
the refusal names. A fifth of the unigram and byte-pair tokenizers have 250,000 pieces. With `--resume` each case is a JSON line of FILE, and those of
this seed that are there are not run again: the whole can be run in parts. Needs the memory controller of version 1, root, GNU time and pyarrow (for
cases of parquet alone). Prints a line for each case and exits 1 if one failed.
"""

import argparse
import gzip
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from memory_group import Group

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20
LONGEST_SECONDS = 300
SPECIAL = ["<pad>", "</s>", "<unk>"]
SPACE = "\u2581"


def words(rng, count, longest, alphabet):
    """Different pieces; the first ones are single letters."""
    found = dict.fromkeys(letter for letter in dict.fromkeys(alphabet + SPACE))
    while len(found) < count:
        found.setdefault((SPACE if rng.random() < 0.4 else "") + "".join(rng.choices(alphabet, k=rng.randint(1, longest))))
    return list(found)[:count]


def tokenizer_json(kind, pieces, seed):
    """A `tokenizer.json`."""
    rng = random.Random(seed)
    latin = "abcdefghijklmnopqrstuvwxyz"
    mixed = latin + "".join(map(chr, itertools.chain(range(0x430, 0x450), range(0x4E00, 0x5200))))
    added, template = list(SPECIAL), None
    if kind == "unigram":
        vocab = [[piece, -rng.uniform(3, 15)] for piece in SPECIAL + words(rng, pieces - 3, 7, mixed)]
        model = {"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": False}
    else:
        ids = {piece: i for i, piece in enumerate(SPECIAL + list(latin) + [SPACE])}
        # Merges of short pieces, so that there are enough of them.
        merges, short = [], list(latin) + [SPACE]
        while len(ids) < pieces:
            a, b = short[rng.randrange(len(short))], short[rng.randrange(len(short))]
            if a + b not in ids:
                ids[a + b] = len(ids)
                merges.append([a, b])
                if len(a + b) <= 7:
                    short.append(a + b)
        if kind == "many added":
            added += [f"<name_{i}>" for i in range(100_000)]
        if kind == "long template":
            template = ["</s>"] * 100_000
        model = {"type": "BPE", "unk_token": "<unk>", "vocab": ids, "merges": merges}
    start = len(model["vocab"]) - len(SPECIAL)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i if i < 3 else start + i, "content": name, **flags} for i, name in enumerate(added)]
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    text = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    mark = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    processor = template and {
        "type": "TemplateProcessing", "single": [text("A")] + [mark] * len(template), "pair": [text("A"), text("B")],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFKC"} if kind == "unigram" else None, "pre_tokenizer": space, "post_processor": processor or None,
        "decoder": space, "model": model,
    }


class Inputs:
    """Files that several cases use, made when they are first needed."""

    def __init__(self, work, binary, environment):
        self.work, self.binary, self.environment = work, binary, environment

    def tokenizer(self, kind, pieces):
        if kind == "sample":
            return ROOT / "data" / "sample-tokenizer.json"
        path = self.work / f"{kind.replace(' ', '-')}-{pieces}" / "tokenizer.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(tokenizer_json(kind, pieces, pieces), ensure_ascii=False))
        return path

    def model(self, tokenizer, width, layers):
        """A trained model with this tokenizer."""
        directory = self.work / "models" / f"{tokenizer.parent.name}-{width}-{layers}"
        if (directory / "model").exists():
            return directory / "model"
        config = self.config(tokenizer, width, layers)
        rows = self.rows("jsonl", 1 << 10, 1)
        command = [self.binary, *settings({
            "model.config": config, "data.tokenizer": tokenizer, "data.train": rows, "data.max_source_tokens": 8,
            "data.max_target_tokens": 4, "train.batch_size": 1}), "--max-steps", "1", "--output", directory]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=self.environment)
        if done.returncode != 0:
            raise RuntimeError(f"a model could not be made: {done.stderr[-400:]}")
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        return directory / "model"

    def config(self, tokenizer, width, layers):
        path = self.work / "models" / f"{tokenizer.parent.name}-{width}-{layers}.json"
        path.parent.mkdir(exist_ok=True)
        read = json.loads(tokenizer.read_text())
        vocabulary = read["model"]["vocab"]
        most = max([len(vocabulary)] + [token["id"] + 1 for token in read["added_tokens"]])
        path.write_text(json.dumps({
            "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": width, "d_ff": 2 * width, "d_kv": 8,
            "num_heads": 2, "num_layers": layers, "num_decoder_layers": layers, "vocab_size": most, "pad_token_id": 0,
            "eos_token_id": 1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}))
        return path

    def rows(self, form, longest, files):
        """A file or a directory: a thousand short rows and a long one, or one row a file."""
        if files > 1:
            directory = self.work / "rows" / f"many-{form}-{files}"
            if not directory.exists():
                directory.mkdir(parents=True)
                for i in range(files):
                    (directory / f"{i:06}.jsonl").write_text('{"prompt": "hello world", "response": "ok"}\n')
            return directory
        ending = {"parquet": "parquet", "jsonl": "jsonl", "chat": "jsonl", "csv": "csv", "json": "json", "jsonl.gz": "jsonl.gz", "escaped": "jsonl"}[form]
        path = self.work / "rows" / f"{form.split('.')[0]}-{longest}.{ending}"
        if path.exists():
            return path
        path.parent.mkdir(exist_ok=True)
        prompts = ["x y"] * 500 + ["a b " * (longest // 4)] + ["x y"] * 500
        pairs = [{"prompt": prompt, "response": "r"} for prompt in prompts]
        if form == "parquet":
            import pyarrow.parquet
            pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "response": ["r"] * len(prompts)}), path)
        elif form == "csv":
            path.write_text("prompt,response\n" + "".join(f'"{prompt}","r"\n' for prompt in prompts))
        elif form == "json":
            path.write_text(json.dumps(pairs))
        elif form == "chat":
            turns = lambda text: [{"role": "user", "content": text}, {"role": "assistant", "content": "r"}]
            path.write_text("".join(json.dumps({"messages": turns(prompt)}) + "\n" for prompt in prompts))
        elif form == "escaped":
            text = lambda prompt: "\\u0061" * (len(prompt) // 6) if len(prompt) > 3 else prompt
            path.write_text("".join(f'{{"prompt": "{text(prompt)}", "response": "r"}}\n' for prompt in prompts))
        else:
            text = "".join(json.dumps(pair) + "\n" for pair in pairs)
            with (gzip.open(path, "wt") if ending.endswith("gz") else open(path, "w")) as file:
                file.write(text)
        return path


def settings(values):
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def case(rng, inputs):
    """The words of a case, its command, its output directory and its standard input."""
    kind = rng.choice(["unigram", "unigram", "bpe", "bpe", "many added", "long template", "sample"])
    pieces = rng.choice([32_000, 32_000, 50_000, 100_000, 250_000]) if kind in ("unigram", "bpe") else 32_000
    tokenizer = inputs.tokenizer(kind, pieces)
    width, layers = rng.choice([8, 16, 32]), rng.choice([1, 2, 3])
    form = rng.choice(["parquet", "parquet", "jsonl", "chat", "csv", "json", "jsonl.gz", "escaped"])
    longest = rng.choice([1 << 10, 64 << 10, 1 << 20, 4 << 20, 8 << 20, 15 << 20])
    files = rng.choice([1] * 8 + [1000, 100_000])
    rows = inputs.rows(form, longest, files)
    bf16 = rng.random() < 0.4
    what = rng.choice(["train", "train", "eval", "generate", "chat"])
    said = f"{what}, {kind} of {pieces}, width {width}, {layers} layers"
    tokens = {"data.max_source_tokens": rng.choice([8, 32, 256]), "data.max_target_tokens": rng.choice([4, 16])}
    if what == "train":
        values = {**tokens, "data.train": rows, "train.batch_size": rng.choice([1, 2, 8]), "train.precision": "bf16" if bf16 else "f32"}
        said += f", {form} with a row of {longest >> 10} KiB, {files} files"
        if rng.random() < 0.4:
            values |= {"data.validation_split": 20, "train.eval_samples": 4, "train.eval_generate_samples": 2,
                "train.eval_max_new_tokens": 4, "generation.num_beams": rng.choice([1, 4])}
            said += ", split"
        if rng.random() < 0.5:
            adapter = {"lora.rank": 4, "lora.targets": "all-linear", "lora.dora": str(rng.random() < 0.3).lower(),
                "model.base_precision": rng.choice(["none", "int8", "nf4"])}
            values |= {"model.init_from": inputs.model(tokenizer, width, layers), **adapter}
            said += f", adapter {adapter['model.base_precision']}" + (" dora" if adapter["lora.dora"] == "true" else "")
        else:
            values |= {"model.config": inputs.config(tokenizer, width, layers), "data.tokenizer": tokenizer,
                "optimizer.name": rng.choice(["adafactor", "adamw"])}
        output = inputs.work / "run"
        return said, [inputs.binary, *settings(values), "--max-steps", "3", "--output", output], None
    model = inputs.model(tokenizer, width, layers)
    beams, precision = rng.choice([1, 1, 4]), "bf16" if bf16 else "f32"
    if what == "eval":
        command = [inputs.binary, "eval", "--model", model, "--data", rows, "--samples", "20", "--generate-samples", "2",
            "--max-new-tokens", "4", "--precision", precision, *settings({"data.max_source_tokens": tokens["data.max_source_tokens"]})]
        return said + f", {form} with a row of {longest >> 10} KiB, {files} files", command, None
    line = "a b " * (rng.choice([1 << 10, 64 << 10, 1 << 20]) // 4)
    if what == "generate":
        lines = inputs.work / f"lines-{len(line)}.txt"
        lines.write_text(f"hello\n{line}\nworld\n")
        source = [rows if rng.random() < 0.5 and form != "chat" and files == 1 else lines]
        command = [inputs.binary, "generate", "--model", model, "--input", *source, "--max-new-tokens", "2", "--num-beams", str(beams),
            "--precision", precision]
        return said + f", {beams} beams, {source[0].name}", command, None
    command = [inputs.binary, "chat", model, "--max-new-tokens", "4", "--max-beams", str(beams), "--precision", precision]
    return said + f", a line of {len(line) >> 10} KiB", command, f"hello\n{line}\n/quit\n"


def run(command, budget_mib, group, environment, typed):
    """The exit code, the peak of the process in bytes, the output."""
    with tempfile.NamedTemporaryFile("r") as peak:
        command = [*map(str, command), "--memory-budget", f"{budget_mib}MiB"]
        command = group.command(command) if group else command
        command = ["/usr/bin/time", "-q", "-f", "%M", "-o", peak.name, *command]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **pipes, text=True, env=environment, errors="replace", start_new_session=True)
        try:
            text, _ = process.communicate(typed or "", LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        kib = re.findall(r"^(\d+)$", peak.read(), re.M)
        return process.returncode, int(kib[-1]) << 10 if kib else 0, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", "--binary", type=pathlib.Path, default=ROOT / "target" / "release" / "train_low_mem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=lambda text: {int(number) for number in text.split(",")})
    parser.add_argument("--work", type=pathlib.Path, help="keeps the inputs there [default: a temporary directory]")
    parser.add_argument("--resume", "--output", type=pathlib.Path, help="appends a JSON line for each case, and leaves out those that have one")
    flags = parser.parse_args()
    done = {}
    if flags.resume and flags.resume.exists():
        lines = map(json.loads, flags.resume.read_text().splitlines())
        done = {line["case"]: line["result"] for line in lines if line["seed"] == flags.seed}
    with tempfile.TemporaryDirectory(prefix="least-budgets-") as temporary:
        work = (flags.work or pathlib.Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache"), "LOW_MEM_T5_PRICES": "built-in", "TMPDIR": str(work)}
        inputs = Inputs(work, flags.program.resolve(), environment)
        counts = {"kept": 0, "killed": 0, "above": 0, "failed": 0}
        for number in range(flags.cases):
            if flags.only and number not in flags.only:
                continue
            if number in done:
                counts[done[number]] += 1
                continue
            said, command, typed = case(random.Random(f"{flags.seed}-{number}"), inputs)
            result = one(said, command, typed, environment, work)
            counts[result["result"]] += 1
            print(f"{number:3} {result['result']:6} {result.get('budget_mib', 0):5} MiB, peak {result.get('peak_mib', 0):7.1f}, predicted {result.get('predicted', '')}: {said}"
                + ("" if result["result"] == "kept" else f"\n    {result.get('text', '')}"), flush=True)
            if flags.resume:
                with flags.resume.open("a") as file:
                    file.write(json.dumps({"case": number, "seed": flags.seed, "said": said, **result}) + "\n")
        print(", ".join(f"{count} {name}" for name, count in counts.items()))
        sys.exit(counts["killed"] + counts["above"] + counts["failed"] > 0)


def one(said, command, typed, environment, work):
    """A case at its least budget."""
    shutil.rmtree(work / "run", ignore_errors=True)
    code, _, text = run(command, 1, None, environment, typed)
    named = re.search(r"--memory-budget (\d+)MiB", text)
    if code != 3 or not named:
        return {"result": "failed", "text": f"not refused, exit code {code}: {text[-300:]!r}"}
    # Rows are read last, and one that does not fit is refused with a budget for rows, or before the plan, which may need more. The plan's
    # own refusal names the smallest budget that works.
    is_above = False
    for _ in range(3):
        budget, is_of_plan = int(named[1]), "the smallest budget that works" in text
        shutil.rmtree(work / "run", ignore_errors=True)
        with Group(budget * MIB) as group:
            code, peak, text = run(command, budget, group, environment, typed)
            kills = group.counters()["kills"]
        is_above |= peak > budget * MIB
        named = re.search(r"--memory-budget (\d+)MiB", text)
        if code != 3 or kills or not named or (is_of_plan and "is enough for every row" not in text):
            break
    predicted = re.search(r"peak memory [\d.]+ \w+, ([\d.]+ \w+) predicted", text) or re.search(r"peak \d+ bytes, (\d+) predicted", text)
    result = {"budget_mib": budget, "peak_mib": peak / MIB, "code": code, "predicted": predicted[1] if predicted else "", "text": repr(text[-300:])}
    # A prompt may be longer than any that is read.
    is_done = code == 0 or (code == 4 and "expected at most" in text and "a prompt" in text)
    result["result"] = "killed" if kills else "above" if is_above else "kept" if is_done else "failed"
    return result


if __name__ == "__main__":
    main()
