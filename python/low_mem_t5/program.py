"""The program: where it is, one run of it to its end, and its failures as exceptions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import warnings
from typing import Dict, List, Optional, Sequence, Type

NAME = "train_low_mem"
VARIABLE = "LOW_MEM_T5_PROGRAM"


class Error(Exception):
    """The program failed. `str()` is its message with its hints."""

    def __init__(self, message: str, hints: Sequence[str] = (), code: Optional[int] = None) -> None:
        super().__init__("\n".join([message, *(f"hint: {hint}" for hint in hints)]))
        #: What is wrong, where, what was expected and what was found.
        self.message = message
        #: What to do about it, best first.
        self.hints = list(hints)
        #: The exit code. A negative one is the signal that ended the program; `None`: the program did not start.
        self.code = code


class InternalError(Error):
    """Exit code 1: a fault of the program, or of the machine."""


class UsageError(Error):
    """Exit code 2: a flag or a config key is wrong."""


class DoesNotFit(Error):
    """Exit code 3: the budget is too small. The hints name one that works."""


class UnusableData(Error):
    """Exit code 4: rows, a model or a checkpoint cannot be used."""


class Diverged(Error):
    """Exit code 5: the losses are no longer finite."""


class Interrupted(Error):
    """Exit code 75: a signal ended the run, which saved a checkpoint and can be resumed."""


ERRORS: Dict[int, Type[Error]] = {
    1: InternalError,
    2: UsageError,
    3: DoesNotFit,
    4: UnusableData,
    5: Diverged,
    75: Interrupted,
}


def find_program() -> str:
    """Returns the program's path: `$LOW_MEM_T5_PROGRAM`, else the one that this package's wheel installed, else the first on the PATH."""
    named = os.environ.get(VARIABLE)
    if named:
        if os.path.isfile(named) and os.access(named, os.X_OK):
            return os.path.abspath(named)
        raise Error(f"{VARIABLE}: expected a program, got `{named}`", ["unset it to use the installed program"])
    # Of an environment, of `pip install --user`, and of `pip install --target DIR`.
    directories = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")]
    directories.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin"))
    for directory in directories:
        path = os.path.join(directory, NAME)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    found = shutil.which(NAME)
    if found:
        return found
    raise Error(
        f"{NAME}: not found beside this package ({directories[0]}) nor on the PATH",
        [f"set {VARIABLE} to the path of the program"],
    )


def failure(code: int, errors: str) -> Error:
    """The exception of an exit code and of what the program wrote to standard error."""
    lines = [line for line in errors.splitlines() if line.strip()]
    # An interrupted run ends with words that are no error.
    starts = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    starts = starts or [at for at, line in enumerate(lines) if not line.startswith(("hint: ", "warning: "))][-1:]
    said = lines[starts[0] :] if starts and code >= 0 else []
    words = [line for line in said if not line.startswith("hint: ")]
    hints = [line[len("hint: ") :] for line in said if line.startswith("hint: ")]
    message = "\n".join(line[len("error: ") :] if line.startswith("error: ") else line for line in words)
    if not message:
        message = f"{NAME} was ended by signal {-code}" if code < 0 else f"{NAME} ended with exit code {code}"
    return ERRORS.get(code, Error)(message, hints, code)


def output_of(arguments: Sequence[str], stdin: str = "") -> str:
    """Runs the program to its end, and returns its standard output. Its warnings become Python's."""
    done = subprocess.run(
        [find_program(), *arguments], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    if done.returncode != 0:
        raise failure(done.returncode, done.stderr)
    for text in warnings_in(done.stderr):
        warnings.warn(text, stacklevel=3)
    return done.stdout


def warnings_in(errors: str) -> List[str]:
    """The warnings in what the program wrote to standard error."""
    return [line[len("warning: ") :] for line in errors.splitlines() if line.startswith("warning: ")]
