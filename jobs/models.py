"""What searches have left, used again: registered models, ensembles rebuilt without data, MLflow brought up to date.

python jobs/models.py list
python jobs/models.py promote breast_cancer --version 3 --holdout march.csv
python jobs/models.py rollback breast_cancer
python jobs/models.py ensemble breast_cancer
python jobs/models.py ensemble CR-abalone-automl-s0 --top-k 3
python jobs/models.py sync
python jobs/models.py explain my new.csv --target price
python jobs/models.py replay 8f3c0d5e2b7a4c1f9e6d5a4b3c2d1e0f
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import models


def main() -> int:
    """Parses, then makes one library call."""
    return models.run_models(models.models_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
