"""Runs: their files, and a training in progress.

A training is a process of its own. It outlives its handle and the interpreter, because hours of work should not depend on a cell of a
notebook. When the handle or the interpreter goes first, one line on standard error names the process that goes on. `with train(..)`
stops the training at the end of the block, and so does an interrupt (Ctrl-C) while `wait` or `follow` waits. A training that is
stopped saves a checkpoint and can be resumed.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Type

from .flags import Flags, arguments
from .program import ERRORS, Interrupted, failure, find_program, output_of

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from .flags import Path

#: An event of `metrics.jsonl`; docs/metrics.schema.json describes each.
Event = Dict[str, Any]

#: Seconds between two looks at a file or a process.
PAUSE = 0.1


class Report:
    """A page about runs, complete in one file. Jupyter shows it."""

    def __init__(self, page: str) -> None:
        #: The page.
        self.html = page

    def save(self, path: Path) -> None:
        """Writes the page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html)

    def __repr__(self) -> str:
        return f"Report({len(self.html):,} characters)"

    def _repr_html_(self) -> str:
        # Sandboxed, without scripts: the page holds texts of the data.
        return f'<iframe sandbox srcdoc="{html.escape(self.html)}" width="100%" height="640" style="border:0"></iframe>'


class Run:
    """A run's directory, finished or not."""

    def __init__(self, path: Path) -> None:
        #: The output directory.
        self.path = os.fspath(path)

    def events(self, *names: str) -> List[Event]:
        """The events of `metrics.jsonl` that count, in order; with names, only these.

        A resumed run makes the steps after its checkpoint again. Only the later ones count, and a torn last line does not.
        """
        with open(os.path.join(self.path, "metrics.jsonl"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        counted: List[Event] = []
        for event in lines:
            if event["event"] == "start":
                counted = []
            elif event["event"] == "resume":
                counted = [before for before in counted if before.get("step", 0) <= event["step"]]
            counted.append(event)
        return [event for event in counted if not names or event["event"] in names]

    def metrics(self) -> Any:
        """A row for each step: a pandas DataFrame where pandas is installed, else a list of dictionaries."""
        return table(self.events("step"))

    def evaluations(self) -> Any:
        """A row for each evaluation, the first one before step 1; the form is that of `metrics`. `events("eval")` has the answers too."""
        return table([{key: value for key, value in event.items() if not isinstance(value, (list, dict))} for event in self.events("eval")])

    def report(self) -> Report:
        """The run as one page."""
        return report(self.path)

    def resume(self, **flags: Unpack[Flags]) -> Training:
        """Goes on from the newest valid checkpoint."""
        return start(self.path, {**flags, "keep_training": True})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


def table(events: List[Event]) -> Any:
    """Events as rows, with numbers where JSON has `"NaN"`, `"inf"` or `"-inf"`."""
    rows = [{key: number(value) for key, value in event.items() if key != "event"} for event in events]
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def number(value: Any) -> Any:
    """The number of a text that stands for one."""
    return float(value) if value in ("NaN", "inf", "-inf") else value


def report(*runs: Path) -> Report:
    """A page of one run, or of several side by side."""
    with tempfile.TemporaryDirectory() as directory:
        page = os.path.join(directory, "report.html")
        output_of(["report", "--output", page, "--", *(os.path.abspath(run) for run in runs)])
        with open(page, encoding="utf-8") as file:
            return Report(file.read())


class Training(Run):
    """A run in progress. `metrics`, `evaluations` and `report` show it as far as it is."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], said: IO[bytes], errors: IO[bytes], starts_at: int) -> None:
        super().__init__(path)
        self._process = process
        self._said = said
        self._errors = errors
        self._starts_at = starts_at
        self._is_asked_to_stop = False
        # Collects the process when it ends, whoever waits: none is left as a zombie.
        threading.Thread(target=process.wait, daemon=True).start()
        weakref.finalize(self, leave, self.path, process, (said, errors))

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def code(self) -> Optional[int]:
        """The exit code, or `None` while the run goes on."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """What the program has said: its plan, its progress, its warnings and errors."""
        return contents(self._said) + contents(self._errors)

    def follow(self, *names: str) -> Iterator[Event]:
        """Yields the events of this training as they happen, up to its end; with names, only these. Ends as `wait` does."""
        at = self._starts_at
        with self._stopped_by_interrupt():
            while True:
                has_ended = self.code is not None
                lines, at = whole_lines(self._metrics(), at)
                for line in lines:
                    event: Event = json.loads(line)
                    if not names or event["event"] in names:
                        yield event
                if has_ended:
                    break
                time.sleep(PAUSE)
        self.wait()

    def wait(self, timeout: Optional[float] = None) -> Run:
        """Waits for the end, and returns the run. An exit code that is not 0 is an exception, except for 75 after `stop`.

        Raises `TimeoutError` after `timeout` seconds; the training goes on then.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._stopped_by_interrupt():
            while self.code is None:
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"{self.path}: the training goes on after {timeout} s")
                time.sleep(PAUSE)
        code = self._process.returncode
        if code != 0 and not (self._is_asked_to_stop and ERRORS.get(code) is Interrupted):
            raise failure(code, contents(self._errors))
        return Run(self.path)

    def stop(self) -> Run:
        """Saves a checkpoint, ends the run and returns it. It can be resumed."""
        # A second signal would end the run without saving.
        if self.code is None and not self._is_asked_to_stop:
            self._is_asked_to_stop = True
            self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        if kind is None:
            self.stop()
        elif self.code is None:
            # The exception of the block is the one to see.
            try:
                self.stop()
            except Exception as also:  # noqa: BLE001
                sys.stderr.write(f"low_mem_t5: {self.path}: {also}\n")

    def _metrics(self) -> str:
        return os.path.join(self.path, "metrics.jsonl")

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise

    def _wait_for_start(self) -> None:
        """Waits for the run's first event, which comes once its plan fits and its data can be read."""
        with self._stopped_by_interrupt():
            while not whole_lines(self._metrics(), self._starts_at)[0] and self.code is None:
                time.sleep(PAUSE)
        if self.code:
            self.wait()


def leave(path: str, process: subprocess.Popen[bytes], files: Sequence[IO[bytes]]) -> None:
    """Says on standard error that a training outlives its handle, if it does."""
    for file in files:
        file.close()
    if process.poll() is None:
        sys.stderr.write(f"low_mem_t5: the training of {path} goes on as process {process.pid}; `kill {process.pid}` saves and stops it\n")


def train(output: Path, **flags: Unpack[Flags]) -> Training:
    """Starts a training, and returns when it has begun: the plan fits, and the data can be read.

    With `keep_training=True` it resumes. With `wait=True` it returns at once, because the machine may be busy for long.
    """
    return start(os.fspath(output), flags)


def start(path: str, flags: Mapping[str, Any]) -> Training:
    """Starts a training from flags."""
    # Files without names: they last as long as one of the two processes needs them, and no pipe can break or fill up.
    said, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    starts_at = length(os.path.join(path, "metrics.jsonl"))
    # In a session of its own, so that Ctrl-C reaches Python alone, which then stops the training in order.
    process = subprocess.Popen(
        [find_program(), "train", *arguments({**flags, "output": path})],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=errors,
        start_new_session=True,
    )
    training = Training(path, process, said, errors, starts_at)
    if not flags.get("wait"):
        training._wait_for_start()
    return training


def contents(file: IO[bytes]) -> str:
    """The text of a file that another process appends to."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8", "replace")


def length(path: str) -> int:
    """The bytes of a file, 0 if it is not there."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def whole_lines(path: str, at: int) -> tuple[List[bytes], int]:
    """The complete lines of a file from a position on, and the position behind them."""
    if length(path) < at:
        # The run removed a torn last line.
        return [], length(path)
    if length(path) == at:
        return [], at
    with open(path, "rb") as file:
        file.seek(at)
        found = file.read()
    found = found[: found.rfind(b"\n") + 1]
    return found.splitlines(), at + len(found)
