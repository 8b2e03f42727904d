"""Goldens of models that make no text: vectors of an encoder, and eight training steps of classifiers, by transformers in f64.

Each case is a Hugging Face directory with the weights to start from, and `golden.json`. Of `encoder` it has `sources` and, by the name of
the pooling, their `vectors`. Of a classifier it has AdamW's options, and of every step the ids, the labels (null: ignored), the loss and
the norm of the gradient before clipping; `golden.safetensors` has `final.PARAMETER`. Dropout is off.

`CASE_adapter` has the same for an adapter of PEFT beside the classifier of CASE: `start` and `final` are what PEFT saved.
Cases of `GEMMA` are T5Gemma and T5Gemma 2, one source at a time: beside longer sources transformers takes the label of a shorter one a token
later.
`weighted` has steps of these classifiers with weights of their classes, as torch's losses take them: the loss of a step is the weighted one.
`contrastive` has steps of `encoder` with losses of its vectors, written out as sentence-transformers defines them: by case the settings, and of
each step the rows of texts, their scores if the loss has such, the loss and the norm of the gradient.
"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import T5Config, T5EncoderModel, T5ForSequenceClassification, T5ForTokenClassification
from transformers import T5Gemma2ForSequenceClassification, T5Gemma2ForTokenClassification, T5GemmaEncoderModel
from transformers import T5GemmaForSequenceClassification, T5GemmaForTokenClassification

from . import gemma
from .adapters import save
from .files import write_json

STEPS = 8
LONGEST = 13
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
CLIP_NORM = 1.0
CONFIG = {
    "vocab_size": 59, "d_model": 16, "d_kv": 6, "d_ff": 28, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 1,
    "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
NAMES = ["negative", "neutral", "positive"]
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
CASES = {
    "sequence": (T5ForSequenceClassification, LABELS),
    "regression": (T5ForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
    "tokens": (T5ForTokenClassification, {"id2label": dict(enumerate(TAGS)), "label2id": {name: index for index, name in enumerate(TAGS)}}),
    "label_sets": (T5ForSequenceClassification, LABELS | {"problem_type": "multi_label_classification"}),
}  # fmt: skip
# case -> weights of its classes
WEIGHTS = {"sequence": [0.5, 1.0, 3.0], "tokens": [0.25, 2.0, 1.0, 0.0, 1.5], "label_sets": [2.0, 1.0, 0.5]}
# name -> (class, generation, kind of labels, whether the decoder is read)
GEMMA = {
    "gemma_sequence": (T5GemmaForSequenceClassification, 1, "sequence", True),
    "gemma_tokens": (T5GemmaForTokenClassification, 1, "tokens", False),
    "gemma2_sequence": (T5Gemma2ForSequenceClassification, 2, "sequence", True),
    "gemma2_tokens": (T5Gemma2ForTokenClassification, 2, "tokens", True),
}
SMALL = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 4}
# name -> LoraConfig's arguments. PEFT itself adds the modules `classifier` and `score` to those that are saved.
ADAPTERS = {
    "sequence": {"task_type": "SEQ_CLS", "target_modules": ["q", "v", "wo"], "modules_to_save": ["classification_head"]},
    "tokens": {"task_type": "TOKEN_CLS", "target_modules": r"transformer\.encoder\..*\.(k|wi_\d)", "use_dora": True},
}
# name -> settings: how vectors are made and compared
CONTRASTIVE = {
    "mnr": {"loss": "mnr", "pooling": "mean", "temperature": 0.05},
    "mnr_negatives": {"loss": "mnr", "pooling": "max", "temperature": 0.2, "has_negatives": True, "sizes": [16, 5]},
    "triplet": {"loss": "triplet", "pooling": "cls", "margin": 5.0, "has_negatives": True},
    "triplet_normal": {"loss": "triplet", "pooling": "last", "margin": 0.5, "has_negatives": True, "normalizes": True},
    "cosine": {"loss": "cosine", "pooling": "mean", "largest_score": 5.0},
    "cosine_sizes": {"loss": "cosine", "pooling": "last", "sizes": [16, 4]},
    "cosent": {"loss": "cosent", "pooling": "mean", "temperature": 0.05},
}


def write(folder):
    write_encoder(folder / "encoder", seed=1)
    for index, (name, (model_class, changes)) in enumerate(CASES.items()):
        write_classifier(folder / name, name, model_class, CONFIG | changes, seed=100 + index)
    for index, (name, arguments) in enumerate(ADAPTERS.items()):
        write_adapter(folder, name, arguments, seed=200 + index)
    write_weighted(folder, seed=250)
    write_contrastive(folder, seed=300)
    write_gemma(folder, seed=400)


def write_gemma(folder, seed):
    gemma.exact_in_f64()
    for index, (name, (model_class, generation, kind, has_decoder)) in enumerate(GEMMA.items()):
        changes = CASES[kind][1] | ({} if has_decoder else {"is_encoder_decoder": False})
        here, generator = folder / name, torch.Generator().manual_seed(seed + index)
        model = made_gemma(here, model_class, generation, changes, generator)
        # A small step where the gradient is small: without it AdamW makes much of rounding.
        optimizer = OPTIMIZER | {"eps": 1e-2}
        steps = train(kind, gemma.without_images(model), generator, first=6, is_alone=True, optimizer=optimizer)
        final = {f"final.{name.replace('.text_model', '')}": of.detach().float().contiguous() for name, of in model.named_parameters()}
        write_json(here / "golden.json", {"optimizer": optimizer, "grad_clip_norm": CLIP_NORM, "steps": steps})
        save_file(final, here / "golden.safetensors")
    generator = torch.Generator().manual_seed(seed + len(GEMMA))
    here = folder / "gemma_encoder"
    model = made_gemma(here, T5GemmaEncoderModel, 1, {"is_encoder_decoder": False}, generator)
    write_vectors(here, model, make_sources(7, generator, first=6))


def made_gemma(folder, model_class, generation, changes, generator):
    """A new model in a directory, read back in f64."""
    folder.mkdir()
    config = gemma.make_config(generation, SMALL, SMALL)
    for key, value in changes.items():
        setattr(config, key, value)
    model = model_class._from_config(config, attn_implementation="eager")
    gemma.fill(model, generator)
    model.save_pretrained(folder)
    return model_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def perturb(model, generator):
    """Norm weights leave 1, and biases 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            amount = 0.2 if parameter.dim() == 1 else 0.1
            parameter.add_(torch.empty_like(parameter).normal_(generator=generator), alpha=amount)


def make_sources(count, generator, first=3):
    lengths = torch.randint(2, LONGEST, (count,), generator=generator).tolist()
    words = lambda length: torch.randint(first, CONFIG["vocab_size"], (length,), generator=generator).tolist()  # noqa: E731
    return [words(length) + [CONFIG["eos_token_id"]] for length in lengths]


def padded(lists, value):
    longest = max(map(len, lists))
    return torch.tensor([row + [value] * (longest - len(row)) for row in lists])


def inputs(sources):
    mask = padded([[1] * len(source) for source in sources], 0)
    return {"input_ids": padded(sources, CONFIG["pad_token_id"]), "attention_mask": mask}


def made(folder, model_class, config, seed):
    """A new model in a directory, read back in f64, and the generator that perturbed it."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = model_class(T5Config(**config))
    perturb(model, generator)
    model.save_pretrained(folder)
    return model_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager"), generator


def write_encoder(folder, seed):
    model, generator = made(folder, T5EncoderModel, CONFIG, seed)
    write_vectors(folder, model, make_sources(7, generator))


def write_vectors(folder, model, sources):
    model.eval()
    batch = inputs(sources)
    with torch.no_grad():
        output = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    lengths = batch["attention_mask"].sum(1)
    vectors = {
        "mean": (output * mask).sum(1) / lengths.unsqueeze(-1),
        "cls": output[:, 0],
        "max": output.masked_fill(mask == 0, -torch.inf).max(1).values,
        "last": output[torch.arange(len(sources)), lengths - 1],
    }
    write_json(folder / "golden.json", {"sources": sources, "vectors": {name: of.tolist() for name, of in vectors.items()}})


def write_classifier(folder, name, model_class, config, seed):
    model, generator = made(folder, model_class, config, seed)
    steps = train(name, model, generator)
    final = {f"final.{name}": of.detach().float().contiguous() for name, of in model.named_parameters()}
    write_json(folder / "golden.json", {"optimizer": OPTIMIZER, "grad_clip_norm": CLIP_NORM, "steps": steps})
    save_file(final, folder / "golden.safetensors")


def write_adapter(folder, name, arguments, seed):
    model_class, _ = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    base = lambda dtype: model_class.from_pretrained(folder / name, dtype=dtype, attn_implementation="eager")  # noqa: E731
    here = folder / f"{name}_adapter"
    save(get_peft_model(base(torch.float32), LoraConfig(r=3, lora_alpha=6, **arguments)), here / "start")
    model = PeftModel.from_pretrained(base(torch.float64), here / "start", is_trainable=True).to(torch.float64)
    steps = train(name, model, generator)
    save(model.to(torch.float32), here / "final")
    for saved in (here / "start", here / "final"):
        path = saved / "adapter_config.json"
        path.write_text(path.read_text().replace(str(folder / name), name))
    write_json(here / "golden.json", {"optimizer": OPTIMIZER, "grad_clip_norm": CLIP_NORM, "steps": steps})


def write_weighted(folder, seed):
    cases = {}
    for index, (name, weights) in enumerate(WEIGHTS.items()):
        generator = torch.Generator().manual_seed(seed + index)
        model = CASES[name][0].from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager")
        cases[name] = {"weights": weights, "steps": train(name, model, generator, weights=weights)}
    write_json(folder / "weighted.json", {"optimizer": OPTIMIZER, "grad_clip_norm": CLIP_NORM, "cases": cases})


def weighted_loss(logits, labels, weights):
    weights = torch.tensor(weights, dtype=logits.dtype)
    if labels.shape == logits.shape:
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight=weights)


def write_contrastive(folder, seed):
    cases = {}
    for index, (name, settings) in enumerate(CONTRASTIVE.items()):
        generator = torch.Generator().manual_seed(seed + index)
        model = T5EncoderModel.from_pretrained(folder / "encoder", dtype=torch.float64, attn_implementation="eager")
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, **OPTIMIZER)
        texts, steps = 3 if settings.get("has_negatives") else 2, []
        for _ in range(STEPS):
            rows = [make_sources(texts, generator) for _ in range(7)]
            batch = inputs([text for row in rows for text in row])
            vectors = pooled(model(**batch).last_hidden_state, batch["attention_mask"], settings["pooling"])
            scores = {}
            if settings["loss"] in ("cosine", "cosent"):
                # Tenths of the largest score; some are equal.
                tenths = torch.randint(-10, 11, (len(rows),), generator=generator)
                scores = {"scores": (tenths * settings.get("largest_score", 1.0) / 10).tolist()}
            loss = contrastive_loss(vectors.unflatten(0, (len(rows), texts)), settings | scores)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            steps.append({"rows": rows, "loss": loss.item(), "grad_norm": norm.item()} | scores)
        cases[name] = {"settings": settings, "steps": steps}
    write_json(folder / "contrastive.json", {"optimizer": OPTIMIZER, "grad_clip_norm": CLIP_NORM, "cases": cases})


def pooled(output, mask, pooling):
    lengths = mask.sum(1)
    masked = mask.unsqueeze(-1)
    if pooling == "mean":
        return (output * masked).sum(1) / lengths.unsqueeze(-1)
    if pooling == "max":
        return output.masked_fill(masked == 0, -torch.inf).max(1).values
    return output[torch.arange(len(output)), 0 if pooling == "cls" else lengths - 1]


def contrastive_loss(vectors, settings):
    """Of vectors (rows, texts, width)."""
    normalize = torch.nn.functional.normalize
    if settings.get("normalizes"):
        vectors = normalize(vectors, dim=-1)
    if "sizes" in settings:
        plain = {key: value for key, value in settings.items() if key != "sizes"}
        return sum(contrastive_loss(normalize(vectors[..., :size], dim=-1), plain) for size in settings["sizes"])
    if settings["loss"] == "triplet":
        distance = lambda other: torch.nn.functional.pairwise_distance(vectors[:, 0], vectors[:, other])  # noqa: E731
        return torch.relu(distance(1) - distance(2) + settings["margin"]).mean()
    if settings["loss"] in ("cosine", "cosent"):
        scores = torch.tensor(settings["scores"], dtype=vectors.dtype) / settings.get("largest_score", 1.0)
        cosines = torch.nn.functional.cosine_similarity(vectors[:, 0], vectors[:, 1])
        if settings["loss"] == "cosine":
            return torch.nn.functional.mse_loss(cosines, scores)
        # sentence-transformers' CoSENTLoss: all differences, of which those of rows in order are kept.
        scaled = cosines / settings["temperature"]
        differences = (scaled[None, :] - scaled[:, None])[scores[:, None] > scores[None, :]]
        return torch.logsumexp(torch.cat([torch.zeros(1, dtype=vectors.dtype), differences]), dim=0)
    candidates = vectors[:, 1:].transpose(0, 1).flatten(0, 1)
    scores = normalize(vectors[:, 0], dim=-1) @ normalize(candidates, dim=-1).T / settings["temperature"]
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(vectors)))


def train(name, model, generator, first=3, is_alone=False, optimizer=OPTIMIZER, weights=None):
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **optimizer)
    steps = []
    for _ in range(STEPS):
        sources = make_sources(5, generator, first)
        labels, tensor = make_labels(name, sources, generator)
        if is_alone:
            counts = [sum(label is not None for label in row) for row in labels]
            rows = [tensor[row : row + 1, ..., : len(source)] if tensor.dim() > 1 else tensor[row : row + 1] for row, source in enumerate(sources)]
            losses = [model(**inputs([source]), labels=row).loss * count for source, row, count in zip(sources, rows, counts, strict=True) if count]
            loss = sum(losses) / sum(counts)
        elif weights:
            loss = weighted_loss(model(**inputs(sources)).logits, tensor, weights)
        else:
            loss = model(**inputs(sources), labels=tensor).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"sources": sources, "labels": labels, "loss": loss.item(), "grad_norm": norm.item()})
    return steps


def make_labels(name, sources, generator):
    """Labels as lists, and as the tensor that transformers takes."""
    if name == "sequence":
        labels = torch.randint(0, len(NAMES), (len(sources),), generator=generator)
        return [[label] for label in labels.tolist()], labels
    if name == "label_sets":
        labels = torch.randint(0, 2, (len(sources), len(NAMES)), generator=generator)
        return labels.tolist(), labels.double()
    if name == "regression":
        # Quarters are exact in f32.
        labels = torch.randint(-8, 9, (len(sources),), generator=generator).double() / 4
        return [[label] for label in labels.tolist()], labels
    labels = []
    for source in sources:
        tags = torch.randint(-2, len(TAGS), (len(source),), generator=generator).tolist()
        labels.append([tag if tag >= 0 and place + 1 < len(source) else None for place, tag in enumerate(tags)])
    numbers = [[-100 if tag is None else tag for tag in row] for row in labels]
    return labels, padded(numbers, -100)
