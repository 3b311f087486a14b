"""What the paper's theory of memory retrieval says, measured on random patterns.

python jobs/theory.py
python jobs/theory.py --patterns 8 64 512 --dim 32 --draws 2000 --output theory
"""

from __future__ import annotations

import sys
from pathlib import Path

# A plain clone starts this file by path: the package then lies one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bishop_ray import cli
from bishop_ray.cli import theory


def main() -> int:
    """Parses, then makes one library call."""
    return theory.run_theory(theory.theory_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
