"""What is in a table, what will be done with it, what would mislead; then a dry run of the models.

python jobs/doctor.py my.csv --target price
python jobs/doctor.py my.parquet --target churned --models all --json report.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import doctor


def main() -> int:
    """Parses, then makes one library call."""
    return doctor.run_doctor(doctor.doctor_parser().parse_args())


if __name__ == "__main__":
    cli.run(main, interrupted="nothing was written")
