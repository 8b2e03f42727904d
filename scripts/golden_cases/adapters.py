"""Adapter goldens: fifty AdamW steps of LoRA adapters by PEFT, the adapters as PEFT saves them, and its merged weights.

`bases/NAME` are Hugging Face directories. Each case has `CASE/start` and `CASE/final`, the directories that
`save_pretrained` wrote before the first and after the last step, without the model card; `CASE/golden.json` (base, rate,
decay, the batches that are used in turn, the loss of each step before its update); `CASE/merged.safetensors`: the
parameters that `merge_and_unload` changed, and the head if it was separated from the shared table.
`unusual` holds directories that are only read: `bin` is saved without safetensors.
"""

import json
import os
import pathlib
import shutil
import warnings
from contextlib import chdir

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from .compare import relative_difference
from .files import write_json
from .t5_models import make_batch, perturb

STEPS = 50
BATCHES = 3

CONFIG = {
    "vocab_size": 47,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 20,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

# name -> (config changes, whether the head has a table of its own)
BASES = {
    "gated_tied": ({"feed_forward_proj": "gated-gelu"}, False),
    "gelu_tied": ({"feed_forward_proj": "gelu", "num_layers": 1, "num_decoder_layers": 2}, False),
    "gated_untied": ({"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False}, True),
}

# name -> (base, LoraConfig's arguments, AdamW's arguments)
CASES = {
    "q_v": ("gated_tied", {"target_modules": ["q", "v"], "r": 8, "lora_alpha": 16}, {"lr": 1e-3}),
    "all_linear": ("gelu_tied", {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}, {"lr": 1e-3, "weight_decay": 0.0}),
    "rslora": (
        "gated_untied",
        {"target_modules": ["k", "o", "wo"], "r": 6, "lora_alpha": 9, "use_rslora": True},
        {"lr": 2e-3},
    ),
    "dora": ("gated_untied", {"target_modules": "all-linear", "r": 3, "lora_alpha": 6, "use_dora": True}, {"lr": 1e-3}),
    # `q` is a key of both kinds of attention, `decoder.*` goes across dots, and the first key that matches decides.
    "patterns": (
        "gelu_tied",
        {
            "target_modules": ["q", "v", "wi", "wo"],
            "exclude_modules": ["EncDecAttention.v"],
            "r": 4,
            "lora_alpha": 4,
            "rank_pattern": {"SelfAttention.q": 2, "decoder.*w[io]": 5, "wo": 3},
            "alpha_pattern": {"block.1.layer.0.SelfAttention.v": 12, "q": 7},
        },
        {"lr": 1e-3},
    ),
    "regex_dora_rslora": (
        "gated_tied",
        {
            "target_modules": r"decoder\..*\.(q|k|wi_\d)",
            "r": 5,
            "lora_alpha": 3,
            "use_dora": True,
            "use_rslora": True,
            "init_lora_weights": "gaussian",
        },
        {"lr": 1e-3},
    ),
    "layers": (
        "gated_tied",
        {"target_modules": ["q", "wo"], "layers_to_transform": [1], "r": 2, "lora_alpha": 4},
        {"lr": 3e-3},
    ),
    "head": ("gated_untied", {"target_modules": ["v", "lm_head"], "r": 4, "lora_alpha": 8}, {"lr": 1e-3}),
    "head_tied": ("gelu_tied", {"target_modules": ["v", "lm_head"], "r": 4, "lora_alpha": 8}, {"lr": 1e-3}),
    "head_saved": (
        "gated_untied",
        {"target_modules": ["q", "v"], "r": 2, "lora_alpha": 4, "modules_to_save": ["lm_head", "final_layer_norm"]},
        {"lr": 1e-3},
    ),
    "head_saved_tied": (
        "gated_tied",
        {"target_modules": ["wo"], "r": 2, "lora_alpha": 4, "modules_to_save": ["lm_head"]},
        {"lr": 1e-3},
    ),
}


def write(folder):
    warnings.filterwarnings("ignore")
    # `base_model_name_or_path` is the path that the base was loaded from: one below the folder.
    with chdir(folder):
        for index, (name, (changes, has_head)) in enumerate(BASES.items()):
            write_base(f"bases/{name}", CONFIG | changes, has_head, seed=2000 + index)
        for index, (name, case) in enumerate(CASES.items()):
            write_case(name, *case, seed=2100 + index)
        write_bin("q_v/final", "unusual/bin")


def write_base(folder, config, has_head, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**config))
    if has_head:
        table = torch.empty_like(model.shared.weight).normal_(std=0.3, generator=generator)
        model.lm_head.weight = torch.nn.Parameter(table)
    perturb(model, generator)
    model.save_pretrained(folder)


def write_case(name, base, lora, adamw, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), LoraConfig(task_type="SEQ_2_SEQ_LM", **lora))
    save(model, f"{name}/start")
    batches = [make_batches(model.config, generator) for _ in range(BATCHES)]
    losses, model = train(name, base, batches, adamw, torch.float32)
    exact, exact_model = train(name, base, batches, adamw, torch.float64)
    save(model, f"{name}/final")
    merged = merged_weights(base, f"{name}/final")
    save_file(merged, f"{name}/merged.safetensors")
    final = trained(model)
    golden = {
        "base": base,
        "learning_rate": adamw["lr"],
        "weight_decay": adamw.get("weight_decay", 1e-2),
        "batches": [{"sources": batch["sources"], "targets": batch["targets"]} for batch in batches],
        "losses": losses,
        "f32_noise": {
            "loss": max(abs(a - b) for a, b in zip(losses, exact)),
            "largest_parameter": max(
                relative_difference(tensor, final[key]) for key, tensor in trained(exact_model).items()
            ),
        },
    }
    write_json(pathlib.Path(name, "golden.json"), golden)


def load_base(base, dtype=torch.float32):
    return T5ForConditionalGeneration.from_pretrained(f"bases/{base}", dtype=dtype, attn_implementation="eager")


def make_batches(config, generator):
    """Samples of unlike lengths over a reversing task."""
    lengths = torch.randint(2, 12, (4,), generator=generator).tolist()
    batch = make_batch(config.to_dict(), lengths, lengths, generator)
    targets = [source[-2::-1] + [config.eos_token_id] for source in batch["sources"]]
    longest = max(map(len, targets))
    batch["targets"] = targets
    batch["labels"] = torch.tensor([target + [-100] * (longest - len(target)) for target in targets])
    return batch


def train(name, base, batches, adamw, dtype):
    model = PeftModel.from_pretrained(load_base(base, dtype), f"{name}/start", is_trainable=True).to(dtype).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **adamw)
    losses = []
    for step in range(STEPS):
        batch = batches[step % BATCHES]
        keys = ("input_ids", "attention_mask", "labels")
        loss = model(**{key: batch[key] for key in keys}, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def trained(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def merged_weights(base, adapter):
    """The parameters that `merge_and_unload` changed. A tied head is separated first: PEFT would change the shared table with it."""
    model = load_base(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.lm_head.weight is model.shared.weight:
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    return {name: t.contiguous() for name, t in merged.items() if not torch.equal(before[name], t)}


def save(model, folder):
    model.save_pretrained(folder)
    os.remove(f"{folder}/README.md")
    sort_sets(f"{folder}/adapter_config.json")


def sort_sets(path):
    """PEFT writes these lists in the order of a set, which differs between runs."""
    with open(path) as file:
        config = json.load(file)
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(config[key], list):
            config[key] = sorted(config[key])
    with open(path, "w") as file:
        file.write(json.dumps(config, indent=2, sort_keys=True))


def write_bin(adapter, folder):
    os.makedirs(folder)
    torch.save(load_file(f"{adapter}/adapter_model.safetensors"), f"{folder}/adapter_model.bin")
    shutil.copy(f"{adapter}/adapter_config.json", folder)
