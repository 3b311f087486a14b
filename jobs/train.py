"""One model with fixed settings and several seeds, no search.

python jobs/train.py --dataset adult --model bishop --set d_model=64 train.lr=1e-3 --seeds 3
python jobs/train.py --table my.csv --target price --model lightgbm
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import train


def main() -> int:
    """Parses, then makes one library call."""
    return train.run_train(train.train_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
