"""Goldens of each family as its publisher ships it: files of old and new formats, and transformers' results for them.

A case has the same content as in `t5_models.py`. `LAYOUTS` says which files hold the weights.
"""

import json

import torch
from safetensors.torch import save_file
from transformers import MT5Config, MT5ForConditionalGeneration, T5Config, T5ForConditionalGeneration
from transformers import UMT5Config, UMT5ForConditionalGeneration

from .t5_models import SMALLEST_MARGIN, generate, make_batch, perturb, write_golden

SMALL = {
    "vocab_size": 53, "d_model": 16, "d_kv": 6, "d_ff": 28, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2,
    "dropout_rate": 0.1, "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
RELU = {"feed_forward_proj": "relu"}
T5, MT5, UMT5 = (
    (T5Config, T5ForConditionalGeneration),
    (MT5Config, MT5ForConditionalGeneration),
    (UMT5Config, UMT5ForConditionalGeneration),
)

# name -> (classes, changes of the model, whether the head is tied, layout, changes of the written config)
CASES = {
    # transformers 5 writes tie_word_embeddings true for an mT5 with a head of its own, and scales nothing.
    "mt5": (MT5, {}, False, "save_pretrained", {}),
    "mt5_hub": (MT5, {"num_decoder_layers": 3}, False, "bin", {"tie_word_embeddings": False}),
    "umt5": (UMT5, {"num_layers": 3, "num_decoder_layers": 2}, False, "save_pretrained", {}),
    "umt5_hub": (UMT5, {"num_layers": 1}, False, "bin", {"tie_word_embeddings": False, "scalable_attention": True}),
    "byt5": (T5, {"vocab_size": 384, "num_layers": 3, "num_decoder_layers": 1, "d_model": 8}, False, "bin",
             {"tie_word_embeddings": False, "tokenizer_class": "ByT5Tokenizer"}),
    "codet5": (T5, RELU | {"eos_token_id": 2, "bos_token_id": 1}, True, "bin", {}),
    # No shared table under its own name.
    "madlad": (T5, {}, False, "without_shared", {"tie_word_embeddings": False}),
    "ul2": (T5, {"feed_forward_proj": "gated-silu"}, False, "sharded_bin_bf16", {"tie_word_embeddings": False}),
    # f16 except `wo`, which transformers keeps in f32; an unused tensor; few keys in the config.
    "flan_f16": (T5, {}, False, "f16", {"tie_word_embeddings": False, "num_decoder_layers": None}),
}  # fmt: skip

UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def write(folder):
    for index, (name, case) in enumerate(CASES.items()):
        write_case(folder / name, *case, seed=1000 * (index + 1))


def write_case(folder, classes, changes, tied, layout, config_changes, seed):
    """Takes the first seed whose greedy generation makes clear choices, with gradients of every parameter."""
    config = SMALL | changes
    for attempt in range(seed, seed + 300):
        generator = torch.Generator().manual_seed(attempt)
        write_directory(folder, classes, config, tied, layout, config_changes, generator, attempt)
        batch = make_batch(config, [9, 14, 5], [7, 4, 11], generator)
        generated, margin = generate(folder, batch)
        varied = max(len(set(ids)) for ids in generated) >= 3
        if margin > SMALLEST_MARGIN and varied:
            break
    else:
        raise SystemExit(f"error: {folder.name}: no seed from {seed} on generates what a golden needs")
    write_golden(folder, batch, generated, gradients=True)


def write_directory(folder, classes, config, tied, layout, config_changes, generator, seed):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    config_class, model_class = classes
    model = model_class(config_class(**config))
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight).normal_(generator=generator))
    perturb(model, generator)
    LAYOUTS[layout](model, folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    if layout != "save_pretrained":
        written = as_the_hub_has_it(written) | config_changes
    path.write_text(json.dumps({key: value for key, value in written.items() if value is not None}, indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def as_the_hub_has_it(config):
    later = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "tie_word_embeddings", "dtype", "is_decoder")
    return {key: value for key, value in config.items() if key not in later} | {"output_past": True}


def save_pretrained(model, folder):
    model.save_pretrained(folder)


def bin(model, folder):
    """One pickle; names of one table share its storage, as they do in the model."""
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def sharded_bin_bf16(model, folder):
    model.config.save_pretrained(folder)
    shards = [{}, {}, {}]
    for index, (name, tensor) in enumerate(model.to(torch.bfloat16).state_dict().items()):
        shards[index % 3][name] = tensor.clone()
    names = [f"pytorch_model-{number:05}-of-00003.bin" for number in (1, 2, 3)]
    for name, shard in zip(names, shards):
        torch.save(shard, folder / name)
    weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")


def without_shared(model, folder):
    model.config.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors["shared.weight"], tensors["encoder.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def f16(model, folder):
    model.config.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor if ".wo." in name else tensor.half() for name, tensor in tensors.items()}
    tensors[UNUSED] = torch.zeros(32, model.config.num_heads)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


LAYOUTS = {function.__name__: function for function in (save_pretrained, bin, sharded_bin_bf16, without_shared, f16)}
