#!/usr/bin/env bash
# The benchmarks' GPU parts, inside 6 minutes, on a machine with PyTorch, Triton and numpy only.
#
#   [REFERENCE=PATH] [OUT=DIR] [PYTHON=python3] bash jobs/bench/gpu.sh
#
# REFERENCE is a checkout of the authors' release (github MAGICS-LAB/BiSHop). It needs einops, and bisection the entmax
# package: both are plain Python, so a folder that holds them can be named in PYTHONPATH where nothing can be installed.
# What is missing is left out, with a line. Each part has a time limit and writes OUT/NAME.json and OUT/NAME.log.
set -u
cd "$(dirname "$0")/../.." || exit 1

python=${PYTHON:-$(command -v python3 || command -v python)}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out" || exit 1
began=$SECONDS
limit=350
failed=0

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "gpu.sh: expected a PyTorch that sees a GPU; found none with $python" >&2
  exit 2
}

reference=()
if [ -z "${REFERENCE:-}" ]; then
  echo "the authors' side is left out: REFERENCE names no checkout of their release"
elif ! "$python" -c 'import einops' 2>/dev/null; then
  echo "the authors' side is left out: einops is not installed"
else
  reference=(--reference "$REFERENCE")
fi

# part NAME SECONDS SCRIPT FLAGS...: at most SECONDS, and no longer than all parts together may take.
part() {
  local name=$1 most=$2 left=$((limit - (SECONDS - began)))
  shift 2
  [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 5 ]; then
    echo "== $name: left out, the time is over"
    failed=1
    return
  fi
  echo "== $name (at most $most s)"
  if ! timeout --kill-after=5 "$most" "$python" "jobs/bench/$1" "${@:2}" --device cuda --json "$out/$name.json" \
    > "$out/$name.log" 2>&1; then
    echo "$name failed or took longer than $most s"
    failed=1
  fi
  tail -n 25 "$out/$name.log"
}

part entmax 50 entmax.py --inner 20
part step_32 70 step.py "${reference[@]}" --batch 32 --modes eager graph
part step_256 70 step.py "${reference[@]}" --batch 256 --modes eager graph
part entmax_bf16 30 entmax.py --inner 20 --dtype bfloat16
part inference 40 inference.py "${reference[@]}" --repeats 100
# Compiling takes longest and says least, so it comes last, for the fastest settings only.
compiled=(--precision auto --shared-start on --modes compile compile+graph)
part step_compiled_32 90 step.py --batch 32 "${compiled[@]}"
part step_compiled_256 90 step.py --batch 256 "${compiled[@]}"

echo "files in $out, $((SECONDS - began)) s"
exit "$failed"
