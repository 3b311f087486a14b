"""A registered model over HTTP, on Ray Serve.

python jobs/serve.py CR-abalone
python jobs/serve.py CR-abalone --alias catboost --port 9000 --replicas 2
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
    return serve.run_serve(serve.serve_parser().parse_args())


if __name__ == "__main__":
    cli.run(main)
