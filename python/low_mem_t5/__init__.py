"""Train T5 in the memory you have: the program `train_low_mem` from Python.

Every function starts the program and reads its output and files. There is no second implementation, so memory, losses and bits are
the command line's. Keyword arguments are the program's flags: `memory_budget="600MiB"` is `--memory-budget 600MiB`. The program
checks them, and its messages and hints become exceptions.

    import low_mem_t5 as t5

    bill = t5.plan(model="google/flan-t5-small", data="tickets.csv", memory_budget="1GiB")
    with t5.train("runs/tickets", model="google/flan-t5-small", data="tickets.csv", memory_budget="1GiB") as training:
        for event in training.follow("eval"):
            print(event["step"], event["loss"])
    with t5.Model("runs/tickets") as model:
        print(model.generate("My card was charged twice"))
"""

from .flags import Flags
from .models import Model, embed, evaluate
from .plans import Plan, Row, plan
from .program import DoesNotFit, Diverged, Error, InternalError, Interrupted, UnusableData, UsageError, find_program
from .runs import Report, Run, Training, report, train

__all__ = [
    "DoesNotFit",
    "Diverged",
    "Error",
    "Flags",
    "InternalError",
    "Interrupted",
    "Model",
    "Plan",
    "Report",
    "Row",
    "Run",
    "Training",
    "UnusableData",
    "UsageError",
    "embed",
    "evaluate",
    "find_program",
    "plan",
    "report",
    "train",
]
