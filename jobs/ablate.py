"""Ablations: fixed configurations, or changed data, trained several times each and compared.

python jobs/ablate.py components --dataset breast_cancer
python jobs/ablate.py sparsity --task 361288 --runs 3 --models bishop xgboost --output sparsity.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import ablate


def main() -> int:
    """Parses, then makes one library call."""
    return ablate.run_ablate(ablate.ablate_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
