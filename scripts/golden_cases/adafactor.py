"""Adafactor goldens: 20 steps of `transformers.optimization.Adafactor` on given gradients, for every option.

`adafactor.json`: the parameters' shapes, `steps_kept` and the cases (options, learning rate of each step or
null where `relative_step` makes its own). `adafactor.safetensors`:
  `initial.PARAMETER`, `gradient.PARAMETER` (20 in the first dimension): the same for all cases;
  `CASE.step_N.PARAMETER` for N of `steps_kept`;
  `CASE.row.PARAMETER` and `CASE.column.PARAMETER` or `CASE.full.PARAMETER`, `CASE.first.PARAMETER`: state at the end.
"""

import torch
from safetensors.torch import save_file
from transformers.optimization import Adafactor

from .files import write_json

STEPS = 20
STEPS_KEPT = [1, 5, 20]

SHAPES = {
    "matrix": (21, 13),
    "tall": (40, 3),
    "vector": (19,),
    "wild": (6, 11),  # gradients that jump in size, so that update clipping works
    "sparse": (8, 6),  # rows without any gradient, as in an embedding, and steps without one at all
    "tiny": (5, 4),  # values and gradients near the epsilons
}

FIXED = {"lr": 1e-3, "scale_parameter": False, "relative_step": False, "warmup_init": False}
RELATIVE = {"lr": None, "scale_parameter": True, "relative_step": True, "warmup_init": False}

CASES = {
    "fixed": FIXED,
    "fixed_scaled": FIXED | {"lr": 0.05, "scale_parameter": True},
    "fixed_scheduled": FIXED | {"lr": "scheduled"},
    "fixed_scaled_scheduled_beta1": FIXED | {"lr": "scheduled", "scale_parameter": True, "beta1": 0.9},
    "relative": RELATIVE,
    "relative_unscaled": RELATIVE | {"scale_parameter": False},
    "relative_warmup": RELATIVE | {"warmup_init": True},
    "relative_unscaled_warmup": RELATIVE | {"scale_parameter": False, "warmup_init": True},
    "beta1": FIXED | {"beta1": 0.9},
    "beta1_zero": FIXED | {"beta1": 0.0},
    "weight_decay": FIXED | {"lr": 0.01, "weight_decay": 0.1},
    "weight_decay_beta1_relative": RELATIVE | {"weight_decay": 0.3, "beta1": 0.7},
    "clip_threshold_small": FIXED | {"clip_threshold": 0.3},
    "clip_threshold_large": FIXED | {"clip_threshold": 5.0},
    "decay_rate": FIXED | {"decay_rate": -0.5},
    "eps": FIXED | {"lr": 0.05, "scale_parameter": True, "eps": (1e-6, 0.2)},
}


def scheduled_rates():
    return [1e-3 * min(step / 5, (STEPS - step + 1) / 15) for step in range(1, STEPS + 1)]


def make_inputs():
    generator = torch.Generator().manual_seed(20)

    def normal(*shape):
        return torch.empty(shape).normal_(generator=generator)

    initial = {name: normal(*shape) for name, shape in SHAPES.items()}
    gradient = {name: normal(STEPS, *shape) * 0.1 for name, shape in SHAPES.items()}
    gradient["matrix"] *= torch.linspace(0.1, 3.0, SHAPES["matrix"][1])
    jumps = torch.tensor([10.0 ** (step % 7 - 3) for step in range(STEPS)])
    gradient["wild"] *= jumps[:, None, None]
    gradient["vector"] *= jumps.flip(0)[:, None]
    gradient["sparse"][:, [1, 4, 7]] = 0.0  # never any gradient
    gradient["sparse"][::3, [0, 2]] = 0.0
    gradient["sparse"][[0, 6, 7]] = 0.0  # no gradient at all in steps 1, 7 and 8
    initial["tiny"] *= 1e-4
    gradient["tiny"] *= 1e-9
    return initial, gradient


def write(folder):
    initial, gradient = make_inputs()
    tensors = {f"initial.{name}": tensor for name, tensor in initial.items()}
    tensors |= {f"gradient.{name}": tensor for name, tensor in gradient.items()}
    cases = {}
    for name, options in CASES.items():
        rates = scheduled_rates() if options["lr"] == "scheduled" else [options["lr"]] * STEPS
        tensors |= {f"{name}.{key}": tensor for key, tensor in run(initial, gradient, options, rates).items()}
        cases[name] = described(options, rates)
    golden = {
        "steps": STEPS,
        "steps_kept": STEPS_KEPT,
        "parameters": {name: list(shape) for name, shape in SHAPES.items()},
        "cases": cases,
    }
    write_json(folder / "adafactor.json", golden)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adafactor.safetensors")


def described(options, rates):
    eps1, eps2 = options.get("eps", (1e-30, 1e-3))
    return {
        "learning_rates": rates,
        "relative_step": options["relative_step"],
        "scale_parameter": options["scale_parameter"],
        "warmup_init": options["warmup_init"],
        "clip_threshold": options.get("clip_threshold", 1.0),
        "decay_rate": options.get("decay_rate", -0.8),
        "eps1": eps1,
        "eps2": eps2,
        "beta1": options.get("beta1"),
        "weight_decay": options.get("weight_decay", 0.0),
    }


def run(initial, gradient, options, rates):
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in initial.items()}
    optimizer = Adafactor(parameters.values(), **(options | {"lr": rates[0]}))
    kept = {}
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rates[step - 1]
        for name, parameter in parameters.items():
            parameter.grad = gradient[name][step - 1].clone()
        optimizer.step()
        if step in STEPS_KEPT:
            kept |= {f"step_{step}.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    state_names = {"exp_avg_sq_row": "row", "exp_avg_sq_col": "column", "exp_avg_sq": "full", "exp_avg": "first"}
    for name, parameter in parameters.items():
        for key, tensor in optimizer.state[parameter].items():
            if key in state_names:
                kept[f"{state_names[key]}.{name}"] = tensor.clone()
    return kept
