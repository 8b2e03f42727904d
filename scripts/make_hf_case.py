#!/usr/bin/env python3
"""Make an unusual but legal training case from each seed: a Hugging Face directory, parquet files and settings.

    python scripts/make_hf_case.py --seed 7 8 --output cases
    python scripts/compare_training.py --case cases/7 cases/8 --binary target/release/train_low_mem

Writes OUTPUT/SEED/model (config.json, weights, tokenizer.json trained on the spot), OUTPUT/SEED/*.parquet and
OUTPUT/SEED/case.json (batch size, token limits, columns, optimizer). Shapes, head, activation, storage (one file,
shards, bf16, shared tensors stored again), special ids, tokenizer kind, parquet codec, row groups and column
names are all drawn from the seed; the same seed makes the same case.
"""

import argparse
import json
import pathlib
import random

import pyarrow as pa
import pyarrow.parquet as parquet
import tokenizers
import torch
import transformers
from golden_cases.t5_models import perturb
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

SYLLABLES = "ba ke li mo nu ra si to ve wo xa yi zu chi dra fle gro qui sta the".split()
HAN = "今天气很好我们去公园散步他买了三个苹果和两本书的是在有人这大为上中国地到说"


def text(rng, words):
    kinds = rng.choice(["latin", "latin", "mixed", "han"])
    parts = []
    for _ in range(words):
        kind = kinds if kinds != "mixed" else rng.choice(["latin", "han", "number"])
        if kind == "latin":
            parts.append("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))))
        elif kind == "han":
            parts.append("".join(rng.choices(HAN, k=rng.randint(1, 4))))
        else:
            parts.append(rng.choice([str(rng.randint(0, 99999)), f"{rng.random():.2f}", "1,000.5", "&quot;", "—"]))
    return ("" if kinds == "han" else " ").join(parts) + rng.choice(["", ".", "?", "。"])


def make_rows(rng, count):
    rows = []
    for _ in range(count):
        prompt = text(rng, rng.choice([1, 3, 8, 15, 40]))
        words = prompt.split()
        answer = " ".join(reversed(words)) if len(words) > 1 else prompt[::-1]
        rows.append((prompt, answer if rng.random() < 0.8 else text(rng, rng.randint(1, 30))))
    return rows


def make_tokenizer(rng, rows, specials):
    """`specials` are the texts of the first ids, in order; </s> and <pad> are among them."""
    corpus = [part for row in rows for part in row]
    size = rng.randint(150, 700)
    if rng.random() < 0.5:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=max(size, 300),
            special_tokens=specials,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
        tokenizer.normalizer = tokenizers.normalizers.NFKC()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=size, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(corpus, trainer)
    end = tokenizer.token_to_id("</s>")
    if rng.random() < 0.5:  # like T5's own: a post-processor that would add EOS a second time
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
        )
    if rng.random() < 0.3:  # left over from an earlier training; must not be obeyed
        tokenizer.enable_truncation(max_length=7)
        tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>", length=9)
    return tokenizer


def make_config(rng, vocabulary, specials):
    buckets = rng.choice([4, 6, 9, 16, 32, 33])
    config = {
        "vocab_size": vocabulary + rng.choice([0, 1, 5, 28]),
        "d_model": rng.choice([12, 17, 24, 32, 37, 48, 65]),
        "d_kv": rng.choice([3, 4, 7, 8, 16, 20]),
        "d_ff": rng.choice([11, 32, 45, 64, 100]),
        "num_heads": rng.choice([1, 2, 3, 5, 8]),
        "num_layers": rng.randint(1, 4),
        "num_decoder_layers": rng.randint(1, 4),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": buckets + rng.choice([3, 20, 128]),
        "layer_norm_epsilon": rng.choice([1e-6, 1e-5, 1e-3]),
        "initializer_factor": rng.choice([1.0, 0.5]),
        "feed_forward_proj": rng.choice(["relu", "gated-gelu", "gated-gelu", "gated-silu", "gelu", "gated-relu"]),
        "dropout_rate": rng.choice([0.0, 0.1, 0.3]),
        "pad_token_id": specials.index("<pad>"),
        "eos_token_id": specials.index("</s>"),
    }
    config["decoder_start_token_id"] = rng.choice([config["pad_token_id"], config["pad_token_id"], 0, 2])
    return config


def write_model(rng, directory, config):
    head = rng.choice(["tied", "tied", "untied", "untied", "tied unscaled"])
    storage = rng.choice(["one file", "shards", "bf16", "bf16 shards", "stored again"])
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    torch.manual_seed(rng.randrange(2**31))
    model = T5ForConditionalGeneration(T5Config(**config, tie_word_embeddings=head == "tied"))
    if head == "untied":
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight).normal_(generator=generator))
    perturb(model, generator)
    if storage.startswith("bf16"):
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="20KB" if "shards" in storage else "1GB")
    if storage == "stored again":
        tensors = load_file(directory / "model.safetensors")
        again = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"] + ["lm_head.weight"] * (head != "untied")
        tensors |= {name: tensors["shared.weight"].clone() for name in again}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if head != "tied" and rng.random() < 0.5:  # transformers 4 writes the same config in this form
        written = json.loads((directory / "config.json").read_text())
        written.pop("scale_decoder_outputs")
        written |= {"tie_word_embeddings": False, "torch_dtype": written.pop("dtype")}
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return {"head": head, "storage": storage}


def write_parquet(rng, path, rows, columns):
    strings = rng.choice([pa.string(), pa.large_string(), pa.string_view()])
    table = pa.table(
        {
            "id": list(range(len(rows))),
            columns[0]: pa.array([row[0] for row in rows], strings),
            "score": [rng.random() for _ in rows],
            columns[1]: pa.array([row[1] for row in rows], strings),
        }
    )
    parquet.write_table(
        table,
        path,
        compression=rng.choice(["snappy", "gzip", "zstd", "none"]),
        row_group_size=rng.choice([3, 10, 1 << 20]),
        data_page_version=rng.choice(["1.0", "2.0"]),
        use_dictionary=rng.random() < 0.5,
        data_page_size=rng.choice([64, 1 << 20]),
        write_page_index=rng.random() < 0.5,
    )


def make_case(seed, output):
    rng = random.Random(seed)
    output.mkdir(parents=True, exist_ok=True)
    rows = make_rows(rng, rng.randint(25, 120))
    specials = ["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>"]
    if rng.random() < 0.4:
        rng.shuffle(specials)
    tokenizer = make_tokenizer(rng, rows, specials)
    config = make_config(rng, tokenizer.get_vocab_size(), specials)
    kind = write_model(rng, output / "model", config)
    tokenizer.save(str(output / "model" / "tokenizer.json"))

    columns = rng.choice([("prompt", "response"), ("prompt", "response"), ("question", "answer text")])
    cut = rng.choice([len(rows), len(rows) // 3])
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    names = [f"train-{index}.parquet" for index in range(len(parts))]
    for name, part in zip(names, parts):
        write_parquet(rng, output / name, part, columns)
    write_parquet(rng, output / "validation.parquet", make_rows(rng, 20), columns)

    relative = rng.random() < 0.25
    case = {
        "seed": seed,
        "made_as": kind,
        "train": names,
        "prompt_column": columns[0],
        "response_column": columns[1],
        "rows": len(rows),
        "steps": 12,
        "batch_size": rng.choice([1, 3, 4, 7, 8]),
        "max_source_tokens": rng.choice([12, 33, 64]),
        "max_target_tokens": rng.choice([9, 32, 50]),
        "grad_clip_norm": rng.choice([1.0, 1.0, 0.3, 0.0]),
        "finetune": rng.random() < 0.25,
        "optimizer": {
            "relative_step": relative,
            "scale_parameter": relative or rng.random() < 0.3,
            "warmup_init": relative and rng.random() < 0.3,
            "beta1": rng.choice([None, None, 0.9]),
            "weight_decay": rng.choice([0.0, 0.0, 0.01]),
        },
    }
    if not relative:
        case["optimizer"]["learning_rate"] = 1e-2 if case["optimizer"]["scale_parameter"] else 1e-3
    (output / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    return case


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, nargs="+")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for seed in options.seed:
        print(json.dumps(make_case(seed, options.output / str(seed))), flush=True)


if __name__ == "__main__":
    main()
