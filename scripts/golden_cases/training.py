"""Whole-training goldens: twelve optimizer steps of a tiny T5, dropout off, by transformers and its Adafactor.

Each case is a Hugging Face directory with the weights to start from, `golden.json` (options; for every step the
batch's ids, loss, gradient norm before clipping, learning rate) and `golden.safetensors` (`final.PARAMETER`).
The loss is the sum of token losses over the batch divided by its target tokens, before the update.
"""

import torch
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor

from .compare import relative_difference
from .files import write_json
from .schedules import scheduler
from .t5_models import load, make_batch, perturb

STEPS = 12
CLIP_NORM = 1.0

CONFIG = {
    "vocab_size": 59,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 28,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

# name -> (config changes, Adafactor's options, (schedule, warm-up steps, div_factor), clip norm)
CASES = {
    "fixed_rate": (
        {"feed_forward_proj": "gated-gelu"},
        {"lr": 3e-3, "scale_parameter": False, "relative_step": False},
        None,
        CLIP_NORM,
    ),
    "relative_step": (
        {"feed_forward_proj": "relu", "num_layers": 1, "num_decoder_layers": 2, "tie_word_embeddings": False},
        {"lr": None, "scale_parameter": True, "relative_step": True},
        None,
        CLIP_NORM,
    ),
    "one_cycle_beta1_decay": (
        {"feed_forward_proj": "gated-gelu"},
        {"lr": 5e-3, "scale_parameter": False, "relative_step": False, "beta1": 0.9, "weight_decay": 0.01},
        ("one-cycle", None, 50.0),
        0.25,
    ),
}


def write(folder):
    for index, (name, (changes, options, schedule, clip_norm)) in enumerate(CASES.items()):
        write_case(folder / name, CONFIG | changes, options, schedule, clip_norm, seed=1000 + index)


def write_case(folder, config, options, schedule, clip_norm, seed):
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**config))
    if config.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight).normal_(generator=generator))
    perturb(model, generator)
    model.save_pretrained(folder)
    batches = make_batches(config, generator)
    steps, final = train(folder, batches, options, schedule, clip_norm, torch.float32)
    exact_steps, exact = train(folder, batches, options, schedule, clip_norm, torch.float64)
    keys = ("scale_parameter", "relative_step", "beta1", "weight_decay")
    golden = {
        "adafactor": {"learning_rate": options["lr"]} | {key: options[key] for key in keys if key in options},
        "schedule": schedule and dict(zip(("name", "warmup_steps", "div_factor"), schedule)),
        "grad_clip_norm": clip_norm,
        "steps": steps,
        "f32_noise": {
            "loss": max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(steps, exact_steps)),
            "grad_norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(steps, exact_steps)),
            "largest_parameter": max(relative_difference(exact[name], final[name]) for name in final),
        },
    }
    write_json(folder / "golden.json", golden)
    save_file({f"final.{name}": tensor for name, tensor in final.items()}, folder / "golden.safetensors")


def make_batches(config, generator):
    """Batches of unlike lengths over a reversing task; the last one is smaller, as at the end of an epoch."""
    batches = []
    for step in range(STEPS):
        samples = 2 if step == STEPS - 1 else 5
        lengths = torch.randint(2, 15, (samples,), generator=generator).tolist()
        batch = make_batch(config, lengths, lengths, generator)
        backwards = [source[-2::-1] for source in batch["sources"]]
        targets = [words[: 2 + row] + [config["eos_token_id"]] for row, words in enumerate(backwards)]
        longest = max(map(len, targets))
        batch["targets"] = targets
        batch["labels"] = torch.tensor([target + [-100] * (longest - len(target)) for target in targets])
        batches.append(batch)
    return batches


def train(folder, batches, options, schedule, clip_norm, dtype):
    model = load(folder, dtype).train()
    optimizer = Adafactor(model.parameters(), **options)
    scheduled = None
    if schedule:
        name, warmup_steps, div_factor = schedule
        scheduled = scheduler(name, optimizer, options["lr"], len(batches), warmup_steps, div_factor)
    steps = []
    for number, batch in enumerate(batches):
        loss = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
            use_cache=False,
        ).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        if scheduled and number + 1 < len(batches):
            scheduled.step()
        steps.append(
            {
                "sources": batch["sources"],
                "targets": batch["targets"],
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "learning_rate": None if rate is None else float(rate),
            }
        )
    final = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    return steps, final
