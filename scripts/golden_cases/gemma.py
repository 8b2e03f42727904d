"""Goldens of T5Gemma and T5Gemma 2: directories as they are published, with random weights, and transformers' results for them.

A case has the same content as in `t5_models.py`, and in `golden.json` also `steps`: loss and gradient norm of six steps of AdamW, in f64,
whose sources begin with `<bos>`, and `answers`: greedy answers to these sources.
Directories of T5Gemma 2 have the smallest vision tower that transformers builds. `make_model` is used by `scripts/check_gemma.py`, too.
"""

import json

import torch
import transformers.models.t5gemma.modeling_t5gemma as of_t5gemma
import transformers.models.t5gemma2.modeling_t5gemma2 as of_t5gemma2
from safetensors.torch import save_file
from transformers import SiglipVisionConfig, T5Gemma2Config, T5Gemma2ForConditionalGeneration, T5GemmaConfig
from transformers import T5GemmaForConditionalGeneration

from .compare import relative_difference
from .files import write_json
from .t5_models import MAX_NEW_TOKENS, SMALLEST_MARGIN, make_batch, run

STEPS = 6
STACK = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
# Few positions turn by much, as in long texts.
ROPE = {SLIDING: {"rope_type": "default", "rope_theta": 100.0}, FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
TOWER = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
KINDS = [SLIDING, FULL, SLIDING]

# name -> (generation, changes of the encoder, changes of the decoder, layout)
CASES = {
    "t5gemma2": (2, {}, {"layer_types": KINDS[:2], "num_hidden_layers": 2}, "save_pretrained"),
    # The pattern of layers and the old names of rotary positions, in shards and in bf16; a cap of the logits.
    "t5gemma2_shards": (2, {}, {"num_key_value_heads": 1, "final_logit_softcapping": 3.0}, "shards_bf16_old_keys"),
    "t5gemma": (1, {}, {}, "save_pretrained"),
    "t5gemma_unbalanced": (
        1,
        {"hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 4, "num_attention_heads": 2},
        {"num_key_value_heads": 4, "layer_types": [FULL, SLIDING, SLIDING]},
        "save_pretrained",
    ),
}


def write(folder):
    exact_in_f64()
    for index, (name, case) in enumerate(CASES.items()):
        write_case(folder / name, *case, seed=1000 * (index + 1))


def exact_in_f64():
    """transformers computes norms and softmaxes in f32, whatever the dtype of the model."""

    def norm(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.to(wide.dtype))).type_as(x)

    def attention(module, query, key, value, mask, dropout=0.0, scaling=None, softcap=None, **_):
        groups = module.num_key_value_groups
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), weights

    of_t5gemma.T5GemmaRMSNorm.forward = norm
    of_t5gemma2.T5Gemma2RMSNorm.forward = norm
    of_t5gemma.eager_attention_forward = attention
    of_t5gemma2.eager_attention_forward = attention


def make_config(generation, of_encoder, of_decoder, vocab=None):
    stack = STACK | ({"vocab_size": vocab} if vocab else {})
    kinds = {1: {"layer_types": KINDS}, 2: {"layer_types": KINDS, "rope_parameters": ROPE}}[generation]
    if generation == 1:
        kinds |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    encoder, decoder = stack | kinds | of_encoder, stack | kinds | of_decoder
    for settings in (encoder, decoder):
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    if generation == 2:
        images = {"mm_tokens_per_image": 4, "boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5}
        encoder = {"text_config": encoder, "vision_config": SiglipVisionConfig(**TOWER).to_dict()} | images
        return T5Gemma2Config(encoder=encoder, decoder=decoder, image_token_index=5, dropout_rate=0.0)
    return T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=stack["vocab_size"], dropout_rate=0.0)


def make_model(generation, of_encoder, of_decoder, seed, vocab=None):
    """A model with random weights."""
    torch.manual_seed(seed)
    model_class = {1: T5GemmaForConditionalGeneration, 2: T5Gemma2ForConditionalGeneration}[generation]
    config = make_config(generation, of_encoder, of_decoder, vocab)
    model = model_class._from_config(config, attn_implementation="eager")
    fill(model, torch.Generator().manual_seed(seed))
    return model


def fill(model, generator):
    """Gives a model random weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.2, generator=generator)
            elif "embed_tokens" in name:
                parameter.normal_(std=0.1, generator=generator)  # or each token would be answered by itself
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def write_case(folder, generation, of_encoder, of_decoder, layout, seed):
    folder.mkdir(exist_ok=True)
    for attempt in range(seed, seed + 300):
        generator = torch.Generator().manual_seed(attempt)
        model = make_model(generation, of_encoder, of_decoder, attempt)
        if layout == "shards_bf16_old_keys":
            model.to(torch.bfloat16).float()
        # Sources and targets longer than the windows; ids of texts, not of images.
        batch = make_batch(STACK | {"decoder_start_token_id": 2}, [9, 14, 5], [7, 4, 11], generator)
        for lists, name in (("sources", "input_ids"), ("targets", "labels")):
            batch[lists] = [[id if id == 1 else max(id, 6) for id in row] for row in batch[lists]]
            batch[name] = torch.where(batch[name] > 1, batch[name].clamp(min=6), batch[name])
        generated, margin = generate(model.eval(), batch)
        answers, margin_of_answers = generate(model, begun(batch))
        # A token of images in an answer has another embedding, which texts do not use.
        is_of_text = not {3, 4, 5} & {id for ids in generated + answers for id in ids}
        is_clear = min(margin, margin_of_answers) > SMALLEST_MARGIN
        if is_clear and is_of_text and max(len(set(ids)) for ids in generated) >= 3:
            break
    else:
        raise SystemExit(f"error: {folder.name}: no seed from {seed} on generates what a golden needs")
    LAYOUTS[layout](model, folder)
    write_golden(folder, batch, generated)


def load(folder, dtype=torch.float32):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    classes = {"t5gemma": T5GemmaForConditionalGeneration, "t5gemma2": T5Gemma2ForConditionalGeneration}
    return classes[kind].from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def generate(model, batch, max_new_tokens=MAX_NEW_TOKENS):
    """Greedy answers without the start token, cut after EOS, and the smallest margin of any choice."""
    answers, margin = [], float("inf")
    for row in range(len(batch["sources"])):
        source, ids = torch.tensor([batch["sources"][row]]), [2]
        while len(ids) <= max_new_tokens and ids[-1] != 1:
            with torch.no_grad():
                decoded = model(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=torch.tensor([ids]),
                                decoder_attention_mask=torch.ones(1, len(ids)), use_cache=False)  # fmt: skip
            best, second = decoded.logits[0, -1].topk(2).values.tolist()
            margin = min(margin, best - second)
            ids.append(int(decoded.logits[0, -1].argmax()))
        answers.append(ids[1:])
    return answers, margin


def is_text(name):
    """Whether a parameter is one that texts use."""
    return not any(part in name for part in ("vision_tower", "multi_modal_projector", "eoi_embedding"))


def steps(model, batches, count=STEPS, rate=1e-3, decay=1e-2, clip=1.0, optimizer="adamw"):
    """Loss and gradient norm of some steps. Parameters of images have no gradient, and do not change."""
    named = [p for name, p in model.named_parameters() if is_text(name)]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    updater = make(named, lr=rate, weight_decay=decay)
    numbers = []
    for step in range(count):
        batch = batches[step % len(batches)]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        loss = model(**inputs, decoder_attention_mask=(batch["labels"] != -100).long(), use_cache=False).loss
        updater.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named, clip).item()
        updater.step()
        numbers.append({"loss": loss.item(), "grad_norm": norm})
    return numbers


def write_golden(folder, batch, generated):
    model, wide = load(folder), load(folder, torch.float64)
    tensors, loss_mean, loss_sum = run(without_images(model), batch, True)
    exact, exact_mean, exact_sum = run(without_images(wide), batch, True)
    noise = {name: relative_difference(exact[name], tensors[name]) for name in tensors}
    golden = {
        "sources": batch["sources"],
        "targets": batch["targets"],
        "target_tokens": int((batch["labels"] != -100).sum()),
        "loss_sum": exact_sum,
        "loss_mean": exact_mean,
        "tied": True,
        "logit_scale": 1.0,
        "max_new_tokens": MAX_NEW_TOKENS,
        "generated": generated,
        "steps": steps(load(folder, torch.float64), [begun(batch)]),
        "answers": generate(load(folder, torch.float64), begun(batch))[0],
        "f32_noise": {
            "loss": abs(loss_mean - exact_mean) / exact_mean,
            "logits": noise["logits"],
            "largest_gradient": max(value for name, value in noise.items() if name.startswith("grad.")),
        },
    }
    write_json(folder / "golden.json", golden)
    # Names are those of the files.
    tensors = {name.replace(".text_model", ""): tensor.float() for name, tensor in exact.items()}
    tensors |= {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    save_file(tensors, folder / "golden.safetensors")


def begun(batch):
    """The batch whose sources begin with `<bos>`."""
    sources = [[2, *source] for source in batch["sources"]]
    longest = max(map(len, sources))
    padded = lambda lists: torch.tensor([ids + [0] * (longest - len(ids)) for ids in lists])
    return batch | {"sources": sources, "input_ids": padded(sources), "attention_mask": padded([[1] * len(ids) for ids in sources])}


def without_images(model):
    """The same model, where parameters of images are no parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_text(name))
    named = model.named_parameters
    model.named_parameters = lambda **_: [(name, parameter) for name, parameter in named() if parameter.requires_grad]
    return model


def save_pretrained(model, folder):
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def shards_bf16_old_keys(model, folder):
    """Shards of bf16, and a config with the names of rotary positions and layers of earlier versions."""
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="12KB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for stack in (config["encoder"]["text_config"], config["decoder"]):
        del stack["rope_parameters"], stack["layer_types"]
        stack |= {"sliding_window_pattern": 2, "rope_theta": 1e4, "rope_local_base_freq": 100.0}
        stack |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    path.write_text(json.dumps(config, indent=2) + "\n")


LAYOUTS = {function.__name__: function for function in (save_pretrained, shards_bf16_old_keys)}
