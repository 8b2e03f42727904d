"""Learning rate schedules: the rate that the optimizer uses in each step, the first step first.

`schedules.json` is a list of {name, schedule, peak, total_steps, warmup_steps, div_factor, learning_rates}.
`peak` is the highest rate; one-cycle starts at `peak / div_factor`, which is the meaning of `optimizer.learning_rate`
there. `warmup_steps` of a one-cycle schedule is torch's `pct_start * total_steps`; torch's default is 0.3.
"""

import math

import torch
from torch.optim.lr_scheduler import OneCycleLR
from transformers import get_scheduler

from .files import write_json

# name, schedule, peak, total steps, warm-up steps (None: the schedule's default), div_factor
CASES = [
    ("one_cycle_of_the_original", "one-cycle", 1e-4, 40, None, 50.0),
    ("one_cycle_warmup", "one-cycle", 2e-3, 30, 6, 25.0),
    ("one_cycle_odd", "one-cycle", 5e-4, 17, None, 50.0),
    ("constant", "constant", 1e-3, 12, 0, None),
    ("constant_warmup", "constant", 1e-3, 12, 5, None),
    ("linear", "linear", 1e-3, 20, 0, None),
    ("linear_warmup", "linear", 3e-4, 25, 7, None),
    ("linear_all_warmup", "linear", 3e-4, 6, 6, None),
    ("cosine", "cosine", 1e-3, 20, 0, None),
    ("cosine_warmup", "cosine", 3e-4, 25, 7, None),
    ("inverse_sqrt_warmup", "inverse-sqrt", 1e-2, 40, 10, None),
    ("inverse_sqrt_short_warmup", "inverse-sqrt", 1e-2, 12, 1, None),
    ("inverse_sqrt_no_warmup", "inverse-sqrt", 1e-2, 12, 0, None),
]

TRANSFORMERS_NAMES = {"linear": "linear", "cosine": "cosine", "inverse-sqrt": "inverse_sqrt"}


def scheduler(schedule, optimizer, peak, total_steps, warmup_steps, div_factor):
    if schedule == "one-cycle":
        # Another pct_start only if the case gives a warm-up: the original sets div_factor alone.
        start = {} if warmup_steps is None else {"pct_start": warmup_steps / total_steps}
        options = {"div_factor": div_factor, "cycle_momentum": False} | start
        return OneCycleLR(optimizer, max_lr=peak, total_steps=total_steps, **options)
    if schedule == "constant":
        name = "constant_with_warmup" if warmup_steps else "constant"
        return get_scheduler(name, optimizer, num_warmup_steps=warmup_steps)
    return get_scheduler(TRANSFORMERS_NAMES[schedule], optimizer, warmup_steps, total_steps)


def rates(schedule, peak, total_steps, warmup_steps, div_factor):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduled = scheduler(schedule, optimizer, peak, total_steps, warmup_steps, div_factor)
    used = []
    for step in range(total_steps):
        used.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step + 1 < total_steps:
            scheduled.step()
    assert all(math.isfinite(rate) for rate in used)
    return used


def write(folder):
    keys = ("name", "schedule", "peak", "total_steps", "warmup_steps", "div_factor")
    goldens = [dict(zip(keys, case)) | {"learning_rates": rates(*case[1:])} for case in CASES]
    write_json(folder / "schedules.json", goldens)
