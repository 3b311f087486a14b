"""The main job: search, one honest evaluation, registration, for a table or a whole OpenML suite.

python jobs/tune.py --suite CR
python jobs/tune.py --table my.csv --target price --time-budget 30m
"""

from __future__ import annotations

import sys
from pathlib import Path

# `ray job submit` and a plain clone start this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import listing, tune


def main() -> int:
    """Parses, then makes one library call."""
    args = cli.tune_parser().parse_args()
    if text := listing.listing(args):
        print(text)
        return 0
    return tune.tune(args)


if __name__ == "__main__":
    cli.run(main)
