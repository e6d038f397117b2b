#!/usr/bin/env bash
# Write locks/{cpu,gpu,dev}.txt anew from pyproject.toml: `make lock`.
# usage: locks/refresh.sh PYTHON WORK      PYTHON makes a throw-away venv for uv in the folder WORK
#
# Install a lock with `pip install --no-deps -r`: pip would otherwise add again what the exclude files leave out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 work=$2
export PIP_DISABLE_PIP_VERSION_CHECK=1

rm -rf "$work"
"$python" -m venv "$work"
trap 'rm -rf "$work"' EXIT
"$work/bin/python" -m pip install --quiet uv

# 3.11 is the oldest Python that we support; the same locks serve 3.12.
compile=("$work/bin/uv" pip compile pyproject.toml --quiet --python-version 3.11 --excludes locks/exclude.txt
  --no-header --no-annotate --no-emit-index-url --no-emit-find-links)
# uv does not read pip's variable.
for links in ${PIP_FIND_LINKS:-}; do compile+=(--find-links "$links"); done

# The CPU build of torch (2.x+cpu) is not on PyPI. Only where nothing nearer has it, ask PyTorch's own index too, and
# then take the best version from any index: uv would otherwise take every package that PyTorch mirrors from there.
with_torch() {
  "$@" 2>"$work/first" && return
  "$@" --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match && return
  echo "the first try, without PyTorch's index, said:" >&2
  cat "$work/first" >&2
  return 1
}

header() {
  echo "# Written by \`make lock\`. Install with: pip install --no-deps -r locks/$1.txt"
}

echo "locks/cpu.txt"
with_torch "${compile[@]}" --extra cpu --excludes locks/exclude-cpu.txt --output-file "$work/cpu.txt"
echo "locks/gpu.txt"
"${compile[@]}" --extra gpu --constraints locks/gpu-constraints.txt --output-file "$work/gpu.txt"
echo "locks/dev.txt"
"${compile[@]}" --extra dev --constraints "$work/cpu.txt" --output-file "$work/dev-all.txt"
# What dev adds to cpu.
grep --invert-match --line-regexp --fixed-strings --file="$work/cpu.txt" "$work/dev-all.txt" >"$work/dev.txt"

for name in cpu gpu dev; do
  { header "$name"; cat "$work/$name.txt"; } >"locks/$name.txt"
done
