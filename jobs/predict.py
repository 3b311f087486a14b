"""Predictions of a file's rows, which may be more than fit into memory.

python jobs/predict.py CR-abalone new.csv -o predicted.csv
python jobs/predict.py my_ensemble new.parquet -o predicted.parquet --folder --keep id
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import serve


def main() -> int:
    """Parses, then makes one library call."""
    return serve.run_predict(serve.predict_parser().parse_args())


if __name__ == "__main__":
    cli.run(main, interrupted="nothing was written")
