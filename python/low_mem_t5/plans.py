"""The bill and the plan of a run, without running it."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional

from .flags import Flags, arguments
from .program import output_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Row(NamedTuple):
    """One row of the bill."""

    name: str
    bytes: int
    note: str


class Plan:
    """What a run will take. `data` is the whole of `train_low_mem plan --json`."""

    def __init__(self, data: Dict[str, Any]) -> None:
        self.data = data

    @property
    def budget_bytes(self) -> int:
        """The budget: that of `memory_budget`, or most of the available memory."""
        return int(self.data["budget_bytes"])

    @property
    def predicted_peak_bytes(self) -> int:
        """The most memory that the process will hold."""
        return int(self.data["predicted_peak_bytes"])

    @property
    def smallest_budget_bytes(self) -> int:
        """The smallest budget that works."""
        return int(self.data["smallest_budget_bytes"])

    @property
    def micro_batch_samples(self) -> int:
        """Samples that are computed at a time."""
        return int(self.data["micro_batch_samples"])

    @property
    def total_steps(self) -> Optional[int]:
        """Optimizer steps of the run."""
        steps = self.data.get("total_steps")
        return None if steps is None else int(steps)

    @property
    def run_seconds(self) -> Optional[float]:
        """Expected time of all steps, without evaluations and checkpoints."""
        seconds = self.data.get("run_seconds")
        return None if seconds is None else float(seconds)

    @property
    def rows(self) -> List[Row]:
        """The rows of the largest phase, which add up to the predicted peak."""
        return [Row(**row) for row in self.data["bill"]["rows"]]

    @property
    def phases(self) -> List[Row]:
        """The peak of each phase: loading, training, evaluation, saving and others."""
        return [Row(**row) for row in self.data["bill"]["phases"]]

    def __repr__(self) -> str:
        return f"Plan({mebibytes(self.predicted_peak_bytes)} of {mebibytes(self.budget_bytes)}; {self.data['bill']['conclusion']})"

    def _repr_html_(self) -> str:
        cells = [(row.name, mebibytes(row.bytes), row.note) for row in sorted(self.rows, key=lambda row: -row.bytes)]
        cells.append(("predicted peak", mebibytes(self.predicted_peak_bytes), f"of {mebibytes(self.budget_bytes)}"))
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        return f"<table>{body}</table><p>{html.escape(self.data['bill']['conclusion'])}</p>"


def mebibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:,.1f} MiB"


def plan(**flags: Unpack[Flags]) -> Plan:
    """Plans a run, and allocates nothing large. Raises `DoesNotFit` if the budget is too small."""
    return Plan(json.loads(output_of(["plan", "--json", *arguments(flags)])))
