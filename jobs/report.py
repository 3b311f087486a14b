"""What studies found, to look at and to print: one HTML page with figures, Markdown and CSV.

python jobs/report.py iris-bishop-s0
python jobs/report.py --paper-table 1
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import report


def main() -> int:
    """Parses, then makes one library call."""
    return report.run_report(report.report_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
