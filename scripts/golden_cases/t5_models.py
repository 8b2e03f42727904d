"""T5 goldens: a Hugging Face directory, a batch, and transformers' results for the two.

Each case is `<case>/config.json`, `<case>/model.safetensors`, `<case>/golden.json` (scalars, ids) and
`<case>/golden.safetensors` (tensors). Every directory is written first and then loaded with
`T5ForConditionalGeneration.from_pretrained`, so the golden is the result that a user of transformers would get.

Shapes: B batch, S source length, T target length, D model size, V vocabulary.
"""

import copy
import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from .compare import relative_difference
from .files import write_json

BASE = {
    "vocab_size": 67,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": True,
}

# name -> (config changes, lengths of the sources, lengths of the targets, head)
# head: "tied"; "untied" (the checkpoint holds an lm_head.weight of its own).
CASES = {
    "v1_0_relu_tied": ({}, [9, 14, 5], [7, 4, 11], "tied"),
    # As transformers 5 itself saves T5 v1.1: tie_word_embeddings true, scale_decoder_outputs false, two tensors.
    "v1_1_gated_gelu_untied": (
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": True, "scale_decoder_outputs": False},
        [11, 6, 13, 3],
        [5, 9, 2, 8],
        "untied",
    ),
    # As transformers 4 saves T5 v1.1: tie_word_embeddings false. No size is a multiple of another.
    "odd_shapes_untied": (
        {
            "vocab_size": 83,
            "d_model": 19,
            "d_kv": 5,
            "d_ff": 29,
            "num_heads": 3,
            "num_layers": 1,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 9,
            "relative_attention_max_distance": 17,
            "layer_norm_epsilon": 1e-5,
            "feed_forward_proj": "gated-gelu",
            "pad_token_id": 3,
            "eos_token_id": 2,
            "decoder_start_token_id": 7,
            "tie_word_embeddings": False,
        },
        [23, 8, 31],
        [19, 27, 6],
        "untied",
    ),
    # Far past the last bucket, in the encoder (bidirectional) and in the decoder.
    "long_positions_gelu": (
        {
            "d_model": 16,
            "num_heads": 2,
            "d_ff": 24,
            "vocab_size": 41,
            "num_decoder_layers": 1,
            "relative_attention_num_buckets": 12,
            "relative_attention_max_distance": 40,
            "feed_forward_proj": "gelu",
        },
        [170, 95],
        [120, 150],
        "tied",
    ),
    "gated_gelu_tied": (
        {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 1, "d_model": 32, "d_kv": 16, "d_ff": 48},
        [10, 12],
        [9, 6],
        "tied",
    ),
    "ragged_padding": ({"num_heads": 5, "d_kv": 3, "num_layers": 1}, [1, 40, 7, 23, 2], [30, 1, 3, 17, 8], "tied"),
    # tie_word_embeddings false but no lm_head in the checkpoint: transformers 5 ties and does not scale.
    "gated_silu_tied_unscaled": (
        {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "num_layers": 1},
        [8, 15],
        [6, 10],
        "tied",
    ),
}

MAX_NEW_TOKENS = 16
SMALLEST_MARGIN = 1e-3  # between the two best logits at every greedy choice, so that rounding cannot flip one


def write(folder):
    for index, (name, (changes, source_lengths, target_lengths, head)) in enumerate(CASES.items()):
        config = BASE | changes
        write_case(folder / name, config, source_lengths, target_lengths, head, seed=100 * (index + 1))
    write_sharded(folder / "v1_1_gated_gelu_untied", folder / "sharded")
    write_bf16(folder / "v1_0_relu_tied", folder / "bf16_stored")
    write_hub_layout(folder / "v1_0_relu_tied", folder / "hub_layout")


def write_case(folder, config, source_lengths, target_lengths, head, seed):
    """Takes the first seed from `seed` on whose greedy generation makes clear choices.

    With a head of its own the model must also end one answer early; tied ones of this size rarely reach EOS.
    """
    for attempt in range(seed, seed + 100):
        generator = torch.Generator().manual_seed(attempt)
        write_directory(folder, config, head, generator, attempt)
        batch = make_batch(config, source_lengths, target_lengths, generator)
        generated, margin = generate(folder, batch)
        lengths = {len(ids) for ids in generated}
        varied = max(len(set(ids)) for ids in generated) >= 3
        if margin > SMALLEST_MARGIN and varied and (head == "tied" or len(lengths) > 1):
            break
    else:
        raise SystemExit(f"error: {folder.name}: no seed from {seed} on generates what a golden needs")
    write_golden(folder, batch, generated, gradients=True)


def write_directory(folder, config, head, generator, seed):
    """A model initialised by transformers, then perturbed so that no weight has a special value."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**config))
    if head == "untied":
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight).normal_(generator=generator))
    perturb(model, generator)
    model.save_pretrained(folder)
    if not config["tie_word_embeddings"]:
        as_transformers_4_writes(folder / "config.json")


def perturb(model, generator):
    """Adds noise to every weight; norm weights leave 1, relative biases become large enough to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = parameter.std().item() if parameter.dim() > 1 else 1.0
            amount = 0.5 if "relative_attention_bias" in name else 0.2 * spread
            parameter.add_(torch.empty_like(parameter).normal_(generator=generator), alpha=amount)
            if name.endswith("SelfAttention.q.weight") or name.endswith("EncDecAttention.q.weight"):
                parameter.mul_(1.5)  # sharper attention, so that positions and masks show
        if model.lm_head.weight is model.shared.weight:
            # Otherwise the token just read dominates its own residual stream and is generated for ever.
            model.shared.weight.mul_(0.2)
            model.decoder.final_layer_norm.weight.mul_(4.0)


def as_transformers_4_writes(path):
    config = json.loads(path.read_text())
    config.pop("scale_decoder_outputs")
    config["tie_word_embeddings"] = False
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.57.1"
    path.write_text(json.dumps(config, indent=2) + "\n")


def make_batch(config, source_lengths, target_lengths, generator):
    """Sequences of ids that end with EOS, and the padded tensors transformers wants."""
    pad, eos = config["pad_token_id"], config["eos_token_id"]
    special = {pad, eos, config["decoder_start_token_id"]}
    words = torch.tensor([token for token in range(config["vocab_size"]) if token not in special])

    def sequence(length):
        picks = torch.randint(len(words), (length - 1,), generator=generator)
        return words[picks].tolist() + [eos]

    def padded(rows, value):
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    sources = [sequence(length) for length in source_lengths]
    targets = [sequence(length) for length in target_lengths]
    return {
        "sources": sources,
        "targets": targets,
        "input_ids": padded(sources, pad),
        "attention_mask": padded([[1] * len(row) for row in sources], 0),
        "labels": padded(targets, -100),
    }


def load(folder, dtype=torch.float32):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def generate(folder, batch):
    """Greedy answers without the start token, cut after EOS, and the smallest margin of any choice."""
    model = load(folder)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        num_beams=1,
        use_cache=False,  # transformers 5.23 sizes the cache by num_layers, too small for a deeper decoder
        max_new_tokens=MAX_NEW_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers, margin = [], float("inf")
    for row, ids in enumerate(output.sequences[:, 1:].tolist()):
        length = ids.index(model.config.eos_token_id) + 1 if model.config.eos_token_id in ids else len(ids)
        answers.append(ids[:length])
        for step in range(length):
            best, second = output.scores[step][row].topk(2).values.tolist()
            margin = min(margin, best - second)
    return answers, margin


def run(model, batch, gradients):
    """Logits (B, T, V), encoder output (B, S, D), token losses (B, T) and the gradients of the mean loss."""
    context = torch.enable_grad() if gradients else torch.no_grad()
    with context:
        output = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
            use_cache=False,
        )
        losses = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="none"
        ).view_as(batch["labels"])
        if gradients:
            output.loss.backward()
    tensors = {
        "logits": output.logits,
        "encoder_output": output.encoder_last_hidden_state,
        "token_losses": losses,
    }
    if gradients:
        tensors |= {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return tensors, output.loss.item(), losses.sum().item()


def write_golden(folder, batch, generated, gradients):
    model = load(folder)
    tensors, loss_mean, loss_sum = run(model, batch, gradients)
    exact, exact_mean, _ = run(load(folder, torch.float64), batch, gradients)
    noise = {name: relative_difference(exact[name], tensors[name]) for name in tensors}
    gradient_noise = [value for name, value in noise.items() if name.startswith("grad.")]
    labels = batch["labels"]
    golden = {
        "sources": batch["sources"],
        "targets": batch["targets"],
        "target_tokens": int((labels != -100).sum()),
        "loss_sum": loss_sum,
        "loss_mean": loss_mean,
        "tied": model.lm_head.weight is model.shared.weight,
        "logit_scale": model.config.d_model**-0.5 if scales(model.config) else 1.0,
        "max_new_tokens": MAX_NEW_TOKENS,
        "generated": generated,
        "f32_noise": {
            "loss": abs(loss_mean - exact_mean) / exact_mean,
            "logits": noise["logits"],
            "largest_gradient": max(gradient_noise, default=None),
        },
    }
    write_json(folder / "golden.json", golden)
    tensors |= {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    save_file(tensors, folder / "golden.safetensors")


def scales(config):
    """Whether this version of transformers scales the decoder's output: mT5's never, UMT5's always."""
    return getattr(config, "scale_decoder_outputs", config.model_type == "umt5")


def copy_of(source_folder):
    """The model of a case and its batch, to be saved in another way."""
    golden = json.loads((source_folder / "golden.json").read_text())
    model = load(source_folder)
    batch = {"sources": golden["sources"], "targets": golden["targets"]}
    stored = load_file(source_folder / "golden.safetensors")
    batch |= {name: stored[name] for name in ("input_ids", "attention_mask", "labels")}
    return model, batch


def write_sharded(source_folder, folder):
    """The same model in shards of 20 kB with an index, as `save_pretrained(max_shard_size=...)` writes them."""
    model, batch = copy_of(source_folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    write_golden(folder, batch, generate(folder, batch)[0], gradients=False)


def write_bf16(source_folder, folder):
    """Weights stored in bf16; the golden is computed in f32 from the rounded weights."""
    model, batch = copy_of(source_folder)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    write_golden(folder, batch, generate(folder, batch)[0], gradients=False)


def write_hub_layout(source_folder, folder):
    """The layout of older checkpoints on the hub: tied tensors stored several times, and an unused tensor."""
    model, batch = copy_of(source_folder)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    later_keys = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "tie_word_embeddings", "dtype")
    for key in (*later_keys, "num_decoder_layers"):
        config.pop(key)
    config |= {"n_positions": 512, "output_past": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[unused] = torch.zeros(32, model.config.num_heads)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_golden(folder, batch, generate(folder, batch)[0], gradients=False)
