"""Goldens of losses of rankings: eight training steps by transformers in f64.

`model` is a Hugging Face directory with the weights to start from. `golden.json` has AdamW's options, and by case the settings, and of every
step the lists (a source and a label of each text), the loss and the norm of the gradient before clipping. Losses are written out as RankT5
(arXiv 2210.10634) and monoT5 (arXiv 2003.06713) define them; scores are logits at the decoder's first position. Dropout is off.
"""

import torch
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import T5ForConditionalGeneration

from .encoders import CLIP_NORM, CONFIG, OPTIMIZER, STEPS, inputs, made, make_sources
from .files import write_json

ANSWERS = [7, 11]
SENTINEL = [23]
CASES = {
    "monot5": {"loss": "monot5", "answers": ANSWERS},
    "monot5_weights": {"loss": "monot5", "answers": ANSWERS, "weights": [3.0, 0.5]},
    "pointwise": {"loss": "pointwise", "answers": SENTINEL},
    "pairwise": {"loss": "pairwise", "answers": SENTINEL},
    "softmax": {"loss": "softmax", "answers": SENTINEL},
}


def write(folder):
    made(folder / "model", T5ForConditionalGeneration, CONFIG, seed=400)
    cases = {name: {"settings": settings, "steps": steps(folder, settings, seed)} for seed, (name, settings) in enumerate(CASES.items())}
    write_json(folder / "golden.json", {"optimizer": OPTIMIZER, "grad_clip_norm": CLIP_NORM, "cases": cases})


def steps(folder, settings, seed):
    generator = torch.Generator().manual_seed(500 + seed)
    model = T5ForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    optimizer, made_steps = torch.optim.AdamW(model.parameters(), **OPTIMIZER), []
    for _ in range(STEPS):
        lengths = torch.randint(1, 6, (3,), generator=generator).tolist()
        sources = [make_sources(length, generator) for length in lengths]
        labels = [torch.randint(0, 3, (length,), generator=generator).tolist() for length in lengths]
        batch = inputs([source for of_list in sources for source in of_list])
        start = torch.full((len(batch["input_ids"]), 1), CONFIG["decoder_start_token_id"])
        logits = model(**batch, decoder_input_ids=start).logits[:, 0]
        loss = loss_of(settings, logits, labels)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        lists = [list(map(list, zip(*of_list))) for of_list in zip(sources, labels)]
        made_steps.append({"lists": lists, "loss": loss.item(), "grad_norm": norm.item()})
    return made_steps


def loss_of(settings, logits, labels):
    all_labels = torch.tensor([label for of_list in labels for label in of_list], dtype=torch.float64)
    if settings["loss"] == "monot5":
        weights = torch.ones(CONFIG["vocab_size"], dtype=torch.float64)
        weights[settings["answers"]] = torch.tensor(settings.get("weights", [1.0, 1.0]), dtype=torch.float64)
        targets = torch.where(all_labels > 0, *settings["answers"])
        return cross_entropy(logits, targets, weights)
    scores = logits[:, settings["answers"][0]].split(list(map(len, labels)))
    parts = [PARTS[settings["loss"]](of_list, torch.tensor(y, dtype=torch.float64)) for of_list, y in zip(scores, labels)]
    return torch.stack(parts).mean()


def pointwise(scores, labels):
    return -torch.where(labels > 0, logsigmoid(scores), logsigmoid(-scores)).sum()


def pairwise(scores, labels):
    leads = scores.unsqueeze(1) - scores.unsqueeze(0)
    return -(logsigmoid(leads) * (labels.unsqueeze(1) > labels.unsqueeze(0))).sum()


def softmax(scores, labels):
    return -(labels * scores.log_softmax(0)).sum()


PARTS = {"pointwise": pointwise, "pairwise": pairwise, "softmax": softmax}
