"""Recipe goldens: fifty steps in f64 of each loss, optimizer and schedule, alone and together, with adapters and without.

`recipes.json` has the batches that are used in turn, and for each case its keys of the config, its base and adapter (directories of
the group `adapters`) and, for every step, `loss`, `objective` and `grad_norm`, before the update.

torch.optim.AdamW, transformers' schedules and PEFT's adapters compute them. Losses of preferences are the formulas of TRL's
DPOTrainer, ORPOTrainer, CPOTrainer (SimPO) and KTOTrainer: log-probabilities are sums over all target tokens, EOS included. The
teacher of `distillation` is in `teacher`.
`scripts/check_recipes.py` runs the same cases by the command.
"""

import contextlib
import math
import pathlib

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import T5Config, T5ForConditionalGeneration, get_scheduler
from transformers.models.t5.modeling_t5 import T5LayerNorm

from .files import write_json

STEPS = 50
RATE = 2e-3
BATCHES = 5
SAMPLES = 4
ADAPTERS = pathlib.Path(__file__).resolve().parents[2] / "crates/t5/tests/goldens/adapters"

# name -> the keys of the config beside the usual ones; what torch does follows from them
RECIPES = {
    "z-loss": {"train.z_loss": 1e-2},
    "label-smoothing": {"train.label_smoothing": 0.1},
    "scaled-adamw": {"optimizer.scale_parameter": True, "optimizer.eps2": 1e-3, "optimizer.learning_rate": 2e-2},
    "lion": {"optimizer.name": "lion", "optimizer.learning_rate": 2e-5, "optimizer.weight_decay": 0.1},
    "lion-adapter": {"adapter": True, "optimizer.name": "lion", "optimizer.learning_rate": 1e-5},
    "scaled-adamw-adapter": {"adapter": True, "optimizer.scale_parameter": True, "optimizer.learning_rate": 2e-2},
    "groups": {"groups": True},
    "warmup-ratio": {"schedule.name": "cosine", "schedule.warmup_ratio": 0.13},
    "recipe": {
        "train.z_loss": 1e-3,
        "train.label_smoothing": 0.1,
        "optimizer.scale_parameter": True,
        "optimizer.learning_rate": 2e-2,
        "schedule.name": "cosine",
        "schedule.warmup_ratio": 0.1,
        "groups": True,
    },
    "recipe-adapter": {
        "adapter": True,
        "train.z_loss": 1e-3,
        "train.label_smoothing": 0.1,
        "schedule.name": "linear",
        "schedule.warmup_ratio": 0.1,
    },
    "dpo": {"adapter": True, "preference.loss": "dpo"},
    "dpo-beta": {"adapter": True, "preference.loss": "dpo", "preference.beta": 0.4},
    "orpo": {"preference.loss": "orpo"},
    "orpo-adapter": {"adapter": True, "preference.loss": "orpo", "preference.beta": 0.3},
    "simpo": {"preference.loss": "simpo", "optimizer.learning_rate": 2e-4},
    "kto": {"adapter": True, "preference.loss": "kto"},
    "kto-weights": {
        "adapter": True,
        "preference.loss": "kto",
        "preference.beta": 0.5,
        "preference.desirable_weight": 1.3,
        "preference.undesirable_weight": 0.6,
    },
    "dpo-reference": {"preference.loss": "dpo", "preference.reference": "model", "optimizer.learning_rate": 2e-4},
    "dpo-reference-adapter": {"adapter": True, "preference.loss": "dpo", "preference.reference": "model"},
    "kto-reference": {"preference.loss": "kto", "preference.reference": "model", "optimizer.learning_rate": 2e-4},
    "distillation": {"distill.teacher": "teacher", "distill.alpha": 0.7, "distill.temperature": 2.5},
    "distillation-adapter": {"adapter": True, "distill.teacher": "teacher", "distill.alpha": 1.0, "distill.temperature": 1.0},
    "distillation-top-k": {"distill.teacher": "teacher", "distill.alpha": 0.6, "distill.temperature": 2.0, "distill.top_k": 5},
    "distillation-top-k-adapter": {"adapter": True, "distill.teacher": "teacher", "distill.alpha": 0.9, "distill.temperature": 1.5, "distill.top_k": 3},
    "simpo-adapter": {"adapter": True, "preference.loss": "simpo", "preference.gamma": 0.5},
}

GROUPS = [({"norms", "biases"}, 1.0, 0.0), ({"encoder"}, 0.25, None)]


def write(folder):
    generator = torch.Generator().manual_seed(58)

    def ids(most):
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(2, 47, (length,), generator=generator).tolist() + [1]

    def batch():
        lists = {name: [ids(most) for _ in range(SAMPLES)] for name, most in (("sources", 9), ("targets", 7), ("rejected", 9))}
        return lists | {"labels": [bool(torch.randint(0, 2, (), generator=generator)) for _ in range(SAMPLES)]}

    make_teacher().save_pretrained(folder / "teacher")
    batches = [batch() for _ in range(BATCHES)]
    cases = {}
    for name, recipe in RECIPES.items():
        adapter = "q_v/final" if recipe.get("adapter") else None
        numbers = steps(load(ADAPTERS / "bases/gated_tied", adapter and ADAPTERS / adapter), batches, recipe, frozen(recipe, folder))
        keys = ("loss", "objective", "grad_norm", "kl")
        cases[name] = {"recipe": {key: value for key, value in recipe.items() if "." in key}, "adapter": adapter}
        cases[name] |= {"groups": [[sorted(items), factor, decay] for items, factor, decay in GROUPS] if recipe.get("groups") else []}
        cases[name] |= {key: [number[key] for number in numbers] for key in keys if key in numbers[0]}
    write_json(folder / "recipes.json", {"base": "gated_tied", "batches": batches, "cases": cases})


def make_teacher():
    """A model of another shape, whose head has a table of its own."""
    torch.manual_seed(9)
    shape = dict(d_model=12, d_kv=4, num_heads=3, d_ff=10, num_layers=1, num_decoder_layers=2, vocab_size=47)
    config = T5Config(**shape, tie_word_embeddings=False, decoder_start_token_id=0, dropout_rate=0.0)
    return T5ForConditionalGeneration(config)


def load(base, adapter, dtype=torch.float64):
    model = T5ForConditionalGeneration.from_pretrained(base, dtype=dtype, attn_implementation="eager")
    if dtype == torch.float64:
        # transformers computes norms in f32, whatever the dtype of the model: fifty steps of Adam make 1e-5 of that.
        for module in model.modules():
            if isinstance(module, T5LayerNorm):
                module.forward = exact_norm.__get__(module)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(dtype)
    return model.train()


def exact_norm(self, hidden):
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def frozen(recipe, folder):
    """The model beside the trained one, if there is one: a reference or a teacher."""
    if recipe.get("distill.teacher"):
        return load(folder / "teacher", None)
    return load(ADAPTERS / "bases/gated_tied", None) if recipe.get("preference.reference") else None


def steps(model, batches, recipe, frozen=None):
    """The numbers of each step. A batch has lists of ids, EOS included: `sources`, `targets`, `rejected`, and `labels`."""
    loss, recipe = recipe.get("preference.loss"), recipe | {"frozen": frozen}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = Optimizer(named, recipe)
    all_numbers = []
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        objective, numbers = (preference if loss else cross_entropy)(model, batch, recipe)
        objective.backward()
        numbers["grad_norm"] = torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0).item()
        numbers["lr"] = optimizer.step()
        if loss or any(recipe.get(key) for key in ("train.z_loss", "train.label_smoothing", "distill.teacher")):
            numbers["objective"] = objective.item()
        all_numbers.append(numbers)
    return all_numbers


class Optimizer:
    """torch.optim.AdamW with a group for each parameter, so that each may have a rate and a decay; or Lion by its paper."""

    def __init__(self, named, recipe):
        self.recipe, self.rate = recipe, recipe.get("optimizer.learning_rate", RATE)
        self.decay = recipe.get("optimizer.weight_decay", 1e-2)
        self.named = [(p, *self.numbers(name)) for name, p in named]
        self.is_lion = recipe.get("optimizer.name") == "lion"
        self.inner = torch.optim.AdamW([{"params": [p]} for p, _, _ in self.named], lr=self.rate)
        name = recipe.get("schedule.name", "constant")
        warmup = math.ceil(recipe.get("schedule.warmup_ratio", 0) * STEPS)
        clock = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=self.rate)
        self.schedule = get_scheduler(name, clock, warmup, STEPS)
        self.clock = clock

    def numbers(self, name):
        name = name.removeprefix("base_model.model.")
        is_norm, is_bias = "norm" in name, "bias" in name
        for items, factor, decay in GROUPS if self.recipe.get("groups") else []:
            if ("norms" in items and is_norm) or ("biases" in items and is_bias) or name.split(".")[0] in items:
                return factor, self.decay if decay is None else decay
        return 1.0, self.decay

    def step(self):
        rate = self.clock.param_groups[0]["lr"]
        for group, (p, factor, decay) in zip(self.inner.param_groups, self.named):
            scale = 1.0
            if self.recipe.get("optimizer.scale_parameter"):
                scale = max(self.recipe.get("optimizer.eps2", 1e-3), p.detach().square().mean().sqrt().item())
            # The decay of torch is multiplied by the rate, and ours is not scaled.
            group["lr"], group["weight_decay"] = rate * factor * scale, decay / scale
            if self.is_lion:
                self.lion(p, rate * factor, decay)
        if not self.is_lion:
            self.inner.step()
        self.inner.zero_grad()
        self.clock.step()
        self.schedule.step()
        return float(rate)

    def lion(self, p, rate, decay, beta1=0.9, beta2=0.99):
        state = self.inner.state[p]
        moment = state.setdefault("moment", torch.zeros_like(p))
        with torch.no_grad():
            p.mul_(1 - rate * decay).sub_(rate * (beta1 * moment + (1 - beta1) * p.grad).sign())
            moment.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def logits_of(model, sources, targets):
    """Logits and labels, which are -100 beside the targets."""

    def padded(lists, value):
        longest = max(map(len, lists))
        return torch.tensor([ids + [value] * (longest - len(ids)) for ids in lists])

    labels = padded(targets, -100)
    mask = padded([[1] * len(ids) for ids in sources], 0)
    return model(input_ids=padded(sources, 0), attention_mask=mask, labels=labels, use_cache=False).logits, labels


def cross_entropy(model, batch, recipe):
    logits, labels = logits_of(model, batch["sources"], batch["targets"])
    flat = logits.view(-1, logits.shape[-1])
    mean = F.cross_entropy(flat, labels.view(-1), ignore_index=-100)
    if recipe.get("distill.teacher"):
        return distillation(logits, labels, mean, batch, recipe), {"loss": mean.item()}
    smoothing = recipe.get("train.label_smoothing", 0.0)
    objective = F.cross_entropy(flat, labels.view(-1), ignore_index=-100, label_smoothing=smoothing)
    z = torch.logsumexp(logits, -1)[labels != -100]
    return objective + recipe.get("train.z_loss", 0.0) * z.square().mean(), {"loss": mean.item()}


def distillation(logits, labels, mean, batch, recipe):
    """Hinton's loss, as the mean over target tokens."""
    alpha, temperature = recipe["distill.alpha"], recipe["distill.temperature"]
    with torch.no_grad():
        teacher = logits_of(recipe["frozen"], batch["sources"], batch["targets"])[0]
    if recipe.get("distill.top_k"):
        top = teacher.topk(recipe["distill.top_k"], -1)
        teacher = torch.full_like(teacher, -1e30).scatter(-1, top.indices, top.values)
    p, q = ((x[labels != -100] / temperature).log_softmax(-1) for x in (teacher, logits))
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    return alpha * temperature**2 * divergence + (1 - alpha) * mean


def log_probabilities(model, sources, targets):
    """The sum of the log-probabilities of each target's tokens, EOS included, and their number."""
    logits, labels = logits_of(model, sources, targets)
    mask = labels != -100
    tokens = torch.gather(logits.log_softmax(-1), 2, labels.masked_fill(~mask, 0).unsqueeze(2)).squeeze(2)
    return (tokens * mask).sum(-1), mask.sum(-1)


def of_reference(model, recipe, sources, targets):
    frozen = recipe["frozen"]
    with torch.no_grad(), model.disable_adapter() if frozen is None else contextlib.nullcontext():
        return log_probabilities(frozen or model, sources, targets)[0]


def preference(model, batch, recipe):
    loss, sources = recipe["preference.loss"], batch["sources"]
    beta = recipe.get("preference.beta", {"simpo": 2.0}.get(loss, 0.1))
    if loss == "kto":
        return kto(model, batch, beta, recipe)
    chosen, chosen_tokens = log_probabilities(model, sources, batch["targets"])
    rejected, rejected_tokens = log_probabilities(model, sources, batch["rejected"])
    mean_loss = -chosen.sum() / chosen_tokens.sum()
    average = chosen / chosen_tokens, rejected / rejected_tokens
    if loss == "dpo":
        chosen_ratio = chosen - of_reference(model, recipe, sources, batch["targets"])
        rejected_ratio = rejected - of_reference(model, recipe, sources, batch["rejected"])
        objective = -F.logsigmoid(beta * (chosen_ratio - rejected_ratio)).mean()
        rewards = beta * chosen_ratio, beta * rejected_ratio
    elif loss == "orpo":
        odds = (average[0] - average[1]) - (torch.log1p(-torch.exp(average[0])) - torch.log1p(-torch.exp(average[1])))
        objective = mean_loss - (beta * F.logsigmoid(odds)).mean()
        rewards = beta * average[0], beta * average[1]
    else:
        gamma = recipe.get("preference.gamma", 1.0)
        objective = -F.logsigmoid(beta * (average[0] - average[1] - gamma / beta)).mean()
        rewards = beta * average[0], beta * average[1]
    return objective, {
        "loss": mean_loss.item(),
        "preference_loss": objective.item(),
        "rewards/chosen": rewards[0].mean().item(),
        "rewards/rejected": rewards[1].mean().item(),
        "rewards/margins": (rewards[0] - rewards[1]).mean().item(),
        "rewards/accuracies": (rewards[0] > rewards[1]).double().mean().item(),
        "logps/chosen": chosen.mean().item(),
        "logps/rejected": rejected.mean().item(),
    }


def kto(model, batch, beta, recipe):
    sources, targets, labels = batch["sources"], batch["targets"], torch.tensor(batch["labels"])
    mismatched = targets[-1:] + targets[:-1]
    with torch.no_grad():
        kl = log_probabilities(model, sources, mismatched)[0] - of_reference(model, recipe, sources, mismatched)
        kl = kl.mean().clamp(min=0)
    of_model, tokens = log_probabilities(model, sources, targets)
    ratio = of_model - of_reference(model, recipe, sources, targets)
    chosen = recipe.get("preference.desirable_weight", 1.0) * (1 - F.sigmoid(beta * (ratio[labels] - kl)))
    rejected = recipe.get("preference.undesirable_weight", 1.0) * (1 - F.sigmoid(beta * (kl - ratio[~labels])))
    objective = torch.cat((chosen, rejected)).mean()
    numbers = {"loss": (-of_model.sum() / tokens.sum()).item(), "preference_loss": objective.item(), "kl": kl.item()}
    rewards = {"chosen": beta * ratio[labels], "rejected": beta * ratio[~labels]}
    for split, values in rewards.items():
        numbers[f"rewards/{split}"] = values.mean().item() if len(values) else None
    if labels.any() and not labels.all():
        numbers["rewards/margins"] = numbers["rewards/chosen"] - numbers["rewards/rejected"]
    return objective, numbers
