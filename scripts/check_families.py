#!/usr/bin/env python3
"""Fine-tunes each family of T5, as its publisher ships it and as transformers saves it, answers with it, and loads it again.

    python scripts/check_families.py --binary target/release/train_low_mem [--keep DIRECTORY] [NAME...]

For each case the script makes a directory with random weights and a small tokenizer of its own, and runs the command as a user would:
two steps of fine-tuning from it, then `generate` with the result. The output directory has to load with `AutoModelForSeq2SeqLM`
(no missing and no unexpected keys) and `AutoTokenizer`, and their greedy answers have to equal the texts that `generate` printed.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pyarrow
import pyarrow.parquet
import torch
from golden_cases import tokenizers as made
from safetensors.torch import save_file

ANSWER_TOKENS = 24
SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 3}
PROMPTS = ["the quick brown fox", "Das Haus ist wunderbar", "我们 今天 学习", "foo_bar() {x: 1}", "100 % <extra_id_0> naïve"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(CASES)}; default: all")
    parser.add_argument("--binary", required=True, type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="make everything here and leave it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or pathlib.Path(scratch)
        root.mkdir(exist_ok=True)
        rows = root / "rows.parquet"
        texts = PROMPTS * 4
        pyarrow.parquet.write_table(pyarrow.table({"prompt": texts, "response": texts[::-1]}), rows)
        failures = [name for name in arguments.names or CASES if not check(name, root, rows, arguments.binary.resolve())]
    print(f"{len(arguments.names or CASES) - len(failures)} passed, {len(failures)} failed {failures}")
    sys.exit(1 if failures else 0)


def check(name, root, rows, binary):
    directory, output = root / f"{name} – 模型", root / f"{name}-run"
    for path in (directory, output):
        shutil.rmtree(path, ignore_errors=True)
    directory.mkdir()
    environment = os.environ | {"HF_HOME": str(root / "hub-home"), "LOW_MEM_T5_PRICES": "built-in"}
    source = CASES[name](directory, environment)
    settings = [f"model.init_from={json.dumps(str(source))}", f"data.train=[{json.dumps(str(rows))}]"]
    settings += ["train.batch_size=4", "train.freeze=[]", "optimizer.relative_step=false", "optimizer.learning_rate=0.01"]
    command = [binary, "--finetune", "--max-steps", "2", "--output", output]
    command += [part for setting in settings for part in ("--set", setting)]
    trained = subprocess.run(command, capture_output=True, text=True, env=environment)
    if trained.returncode != 0:
        return fail(name, "training", trained)
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [binary, "generate", "--json", "--max-new-tokens", str(ANSWER_TOKENS), *prompts]
    answers = {}
    for model in (source, output):
        run = subprocess.run([*command, "--model", model], capture_output=True, text=True, env=environment)
        if run.returncode != 0:
            return fail(name, f"generate --model {model}", run)
        answers[model] = [json.loads(line)["response"] for line in run.stdout.split("\n") if line]
    warnings = [line for line in trained.stderr.splitlines() if line.startswith("warning")]
    problems = [*warnings, *by_transformers(output / "model", answers[output])]
    missing = {path.name for path in directory.iterdir() if path.name in COMPANIONS} - set(os.listdir(output / "model"))
    problems += [f"{missing} was not copied"] if missing else []
    print(f"{name}: {'ok' if not problems else problems}")
    return not problems


COMPANIONS = {"spiece.model", "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json", "vocab.json", "merges.txt"}


def by_transformers(directory, answers):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            yield f"{kind}: {info[kind]}"
    if model.config.architectures != [type(model).__name__]:
        yield f"architectures: {model.config.architectures}, loaded as {type(model).__name__}"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        if ids[-1:] != [model.config.eos_token_id]:  # ChatLM's tokenizer leaves the end to its caller
            ids.append(model.config.eos_token_id)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        # transformers 5.23 sizes its cache by num_layers, too small for a deeper decoder.
        ids = model.generate(**inputs, do_sample=False, num_beams=1, use_cache=False, max_new_tokens=ANSWER_TOKENS)
        expected = tokenizer.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if answer != expected:
            yield f"answer to {prompt!r}: {answer!r}, transformers {expected!r}"


def fail(name, what, run):
    print(f"{name}: {what}: exit code {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    return False


def model_of(directory, kind="t5", tied=False, **changes):
    """A random model for the tokenizer in a directory, whose `config.json` gives the rows of its table."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    written = json.loads((directory / "config.json").read_text())
    keys = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "tokenizer_class")
    config = {"decoder_start_token_id": 0} | {key: written[key] for key in keys if key in written} | SHAPE | changes
    torch.manual_seed(5)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3 * (parameter.std() if parameter.dim() > 1 else 1))
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight) * 0.5)
    return model


def hub_config(model, directory, **changes):
    """A config.json as version 4 wrote it."""
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    later = ("scale_decoder_outputs", "tie_word_embeddings", "dtype", "is_decoder", "dense_act_fn", "is_gated_act")
    config = {key: value for key, value in config.items() if key not in later} | {"torch_dtype": "float32"} | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}, indent=2) + "\n")


def as_saved(tokenizer, kind="t5", **changes):
    """A directory as transformers 5 saves it: safetensors, `tokenizer.json`."""

    def make(directory, _):
        made.MAKERS[tokenizer](directory)
        model = model_of(directory, kind, **changes)
        saved = made.reference(directory)
        for path in directory.iterdir():
            path.unlink()
        saved.save_pretrained(directory)
        model.save_pretrained(directory)
        return directory

    return make


def published(tokenizer, weights, kind="t5", config=None, tied=False, **changes):
    def make(directory, _):
        made.MAKERS[tokenizer](directory)
        model = model_of(directory, kind, tied=tied, **changes)
        hub_config(model, directory, **(config or {}))
        weights(model, directory)
        return directory

    return make


def one_bin(model, directory):
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def bins(model, directory):
    index = {}
    for number, (name, tensor) in enumerate(model.to(torch.bfloat16).state_dict().items()):
        index[name] = f"pytorch_model-{1 + number % 2:05}-of-00002.bin"
    for file in set(index.values()):
        shard = {name: tensor for name, tensor in model.state_dict().items() if index[name] == file}
        torch.save(shard, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def without_shared(model, directory):
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors["shared.weight"], tensors["encoder.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def halves(model, directory):
    tensors = {name: tensor.clone() if ".wo." in name else tensor.half() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def in_the_cache(make, identifier):
    """The same model in the cache of the hub: links into `blobs`, and a name instead of a directory."""

    def make_cached(directory, environment):
        make(directory, environment)
        repository = pathlib.Path(environment["HF_HOME"]) / "hub" / ("models--" + identifier.replace("/", "--"))
        shutil.rmtree(repository, ignore_errors=True)
        snapshot = repository / "snapshots" / "0123456789abcdef"
        for folder in (repository / "blobs", snapshot, repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text(snapshot.name)
        for number, path in enumerate(sorted(directory.iterdir())):
            blob = repository / "blobs" / f"{number:040x}"
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
        return pathlib.Path(identifier)

    return make_cached


GATED, UNTIED = {"feed_forward_proj": "gated-gelu"}, {"tie_word_embeddings": False}
T5_V1_1 = published("t5-spiece-alone", one_bin, config=UNTIED, **GATED)

CASES = {
    "t5-saved": as_saved("t5-spiece-alone", tied=True),
    "t5-hub": published("t5-spiece-alone", one_bin, tied=True),
    "t5-v1.1-saved": as_saved("t5-slow", **GATED, scale_decoder_outputs=False),
    "t5-v1.1-hub": T5_V1_1,
    "flan-t5-cached": in_the_cache(published("t5-slow", halves, config=UNTIED, **GATED), "google/flan-t5-small"),
    "mt5-saved": as_saved("mt5", "mt5", **GATED),
    "mt5-hub": published("mt5", one_bin, "mt5", config=UNTIED, **GATED),
    "umt5-saved": as_saved("umt5", "umt5", **GATED),
    "umt5-hub": published("umt5", one_bin, "umt5", config=UNTIED | {"scalable_attention": True}, **GATED),
    "byt5-saved": as_saved("byt5", **GATED, scale_decoder_outputs=False),
    "byt5-hub": published("byt5-hub", one_bin, config=UNTIED, **GATED),
    "byt5-no-file": published("byt5", one_bin, config=UNTIED, **GATED),
    "codet5-saved": as_saved("codet5", tied=True),
    "codet5-hub": published("codet5", one_bin, tied=True),
    "chatlm": published("chatlm", halves, tied=True, config={"architectures": ["TextToTextModel"], "auto_map":
                        {"AutoModelForSeq2SeqLM": "modeling_chat_model.TextToTextModel"}}),
    "madlad": published("t5-slow", without_shared, config=UNTIED, **GATED),
    "ul2": published("t5-slow", bins, config=UNTIED, feed_forward_proj="gated-silu"),
}


if __name__ == "__main__":
    main()
