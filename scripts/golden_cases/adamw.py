"""AdamW goldens: 50 steps of `torch.optim.AdamW` on given gradients.

`adamw.json`: the parameters' shapes, `steps_kept` and the cases (options, learning rate of each step).
`adamw.safetensors`:
  `initial.PARAMETER`, `gradient.PARAMETER` (50 in the first dimension): the same for all cases;
  `CASE.step_N.PARAMETER` for N of `steps_kept`; `CASE.exp_avg.PARAMETER`, `CASE.exp_avg_sq.PARAMETER`: state at the end.
"""

import torch
from safetensors.torch import save_file

from .files import write_json

STEPS = 50
STEPS_KEPT = [1, 10, 50]

SHAPES = {"matrix": (11, 7), "vector": (13,), "wild": (3, 5), "tiny": (4, 3)}

CASES = {
    "torch_defaults": {"lr": 1e-3},
    "no_decay": {"lr": 1e-2, "weight_decay": 0.0},
    "betas": {"lr": 1e-3, "betas": (0.5, 0.9)},
    "no_momentum": {"lr": 1e-3, "betas": (0.0, 0.999)},
    "eps": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.3},
    "scheduled": {"lr": "scheduled", "weight_decay": 0.1},
}


def make_inputs():
    generator = torch.Generator().manual_seed(24)

    def normal(*shape):
        return torch.empty(shape).normal_(generator=generator)

    initial = {name: normal(*shape) for name, shape in SHAPES.items()}
    gradient = {name: normal(STEPS, *shape) * 0.1 for name, shape in SHAPES.items()}
    jumps = torch.tensor([10.0 ** (step % 5 - 2) for step in range(STEPS)])
    gradient["wild"] *= jumps[:, None, None]
    gradient["vector"][::3] = 0.0  # no gradient at all in every third step
    gradient["tiny"] *= 1e-6
    return initial, gradient


def rates_of(options):
    if options["lr"] == "scheduled":
        return [1e-3 * min(step / 10, (STEPS - step + 1) / 40) for step in range(1, STEPS + 1)]
    return [options["lr"]] * STEPS


def write(folder):
    initial, gradient = make_inputs()
    tensors = {f"initial.{name}": tensor for name, tensor in initial.items()}
    tensors |= {f"gradient.{name}": tensor for name, tensor in gradient.items()}
    cases = {}
    for name, options in CASES.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in run(initial, gradient, options).items()}
        beta1, beta2 = options.get("betas", (0.9, 0.999))
        cases[name] = {
            "learning_rates": rates_of(options),
            "beta1": beta1,
            "beta2": beta2,
            "eps": options.get("eps", 1e-8),
            "weight_decay": options.get("weight_decay", 1e-2),
        }
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    golden = {"steps": STEPS, "steps_kept": STEPS_KEPT, "parameters": shapes, "cases": cases}
    write_json(folder / "adamw.json", golden)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adamw.safetensors")


def run(initial, gradient, options):
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in initial.items()}
    rates = rates_of(options)
    optimizer = torch.optim.AdamW(parameters.values(), **(options | {"lr": rates[0]}))
    kept = {}
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rates[step - 1]
        for name, parameter in parameters.items():
            parameter.grad = gradient[name][step - 1].clone()
        optimizer.step()
        if step in STEPS_KEPT:
            kept |= {f"step_{step}.{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for key in ["exp_avg", "exp_avg_sq"]:
            kept[f"{key}.{name}"] = optimizer.state[parameter][key].clone()
    return kept
