"""A table of the paper again, selected on validation rows only, the paper's figures beside ours.

python jobs/reproduce.py --paper-table 1 --dataset qsar_biodeg --models bishop xgboost --trials 8
python jobs/reproduce.py --paper-table 2 --defaults-only --splits 3
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import reproduce


def main() -> int:
    """Parses, then makes one library call."""
    return reproduce.run_reproduce(reproduce.reproduce_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
