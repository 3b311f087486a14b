"""Names of data: suites, tasks, files, scikit-learn's embedded tables. No rows here.

Suite and task numbers: Grinsztajn et al. 2022 on OpenML (334 CC, 337 NC, 335 CR, 336 NR).
"""

from __future__ import annotations

from dataclasses import dataclass

SUITES: dict[str, int] = {"CC": 334, "NC": 337, "CR": 335, "NR": 336}
"""Short names of the paper's four suites -> OpenML study id."""

PAPER_TASKS: dict[str, tuple[int, ...]] = {
    "CC": (361282, 361283, 361286),
    "CR": (361093, 361094, 361099, 361104, 361288),
    "NC": (361055, 361062, 361065, 361273, 361278),
    "NR": (361073, 361074, 361077, 361079, 361081, 361280),
}
"""The paper's own tasks of each suite (appendix, table "Details of Datasets", OpenML)."""

EMBEDDED: tuple[str, ...] = ("breast_cancer", "diabetes", "digits", "iris", "wine")
"""Tables that scikit-learn ships."""


@dataclass(frozen=True)
class DatasetRef:
    """A name that any node turns into the same rows.

    Attributes:
        kind: "openml" (a task id), "file" or "embedded".
        locator: Task id, absolute path, or embedded name, as text.
        name: The dataset's own name, for people.
        group: Suite or family, e.g. "CR"; empty for single tables.
        target: Target column (files only).
        task_type: Forced task type (files only), or "" to infer it.
        server: OpenML server address, or "" for the default.
    """

    kind: str
    locator: str
    name: str
    group: str = ""
    target: str = ""
    task_type: str = ""
    server: str = ""

    @property
    def key(self) -> str:
        """Name of study, registered model and folder: ``CR-abalone``, ``361093-analcatdata_supreme``, ``iris``."""
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in self.name).strip("._-") or "table"
        return f"{self.group}-{safe}" if self.group else safe

    @property
    def experiment(self) -> str:
        """MLflow experiment: one per suite or table; loose tasks share one."""
        return "openml-tasks" if self.group == self.locator else (self.group or self.key)
