"""Keyword arguments as flags of the program.

`batch_size=8` is `--batch-size 8`, a list repeats its flag, `True` gives a flag without a value, and `False` and `None` leave it out. Every other
config key goes into `set`, by its full name: `set={"train.dropout": 0.1}` is `--set train.dropout=0.1`. The program knows the flags;
this module only spells them.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, List, Mapping, Sequence, TypedDict, Union

if TYPE_CHECKING:
    Path = Union[str, "os.PathLike[str]"]
    Paths = Union[Path, Sequence[Path]]


class Flags(TypedDict, total=False):
    """The flags of `train` and `plan`; `train_low_mem train --help` describes them."""

    model: Path
    preset: str
    data: Paths
    validation: Paths
    tokenizer: Path
    batch_size: int
    lr: float
    epochs: int
    max_steps: int
    seed: int
    config: Path
    finetune: bool
    lora: bool
    keep_training: bool
    resume_from: int
    memory_budget: str
    device_memory_budget: str
    device: str
    allow_changed: Union[str, Sequence[str]]
    wait: bool
    threads: int
    set: Mapping[str, Any]


def arguments(flags: Mapping[str, Any]) -> List[str]:
    """The flags as arguments of the program."""
    spelled: List[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if name == "set":
            for key, set_to in value.items():
                spelled += [flag, f"{key}={toml(set_to)}"]
        elif value is True:
            spelled.append(flag)
        elif value is None or value is False:
            continue
        elif isinstance(value, (list, tuple)):
            for one in value:
                spelled.append(f"{flag}={text(one)}")
        else:
            # In one argument: a value may begin with a dash.
            spelled.append(f"{flag}={text(value)}")
    return spelled


def text(value: Any) -> str:
    """A flag's value."""
    if isinstance(value, (str, int, float, os.PathLike)):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    raise TypeError(f"a flag is text, a number, a path or a list of them, got {type(value).__name__}: {value!r}")


def toml(value: Any) -> str:
    """A config value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, os.PathLike)):
        return quoted(os.fspath(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(one) for one in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quoted(str(key))} = {toml(one)}" for key, one in value.items()) + "}"
    raise TypeError(f"a config key is text, a number, a boolean, a list or a table, got {type(value).__name__}: {value!r}")


def quoted(value: str) -> str:
    """A TOML string. JSON's escapes are TOML's, which also escapes the one control character that JSON leaves alone."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
