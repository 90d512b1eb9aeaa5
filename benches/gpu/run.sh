#!/usr/bin/env bash
# Verifies and times every copy path of the first CUDA device: one command, one table, a CSV.
#
#   benches/gpu/run.sh             builds if there is a Rust toolchain, then runs (under 10 minutes)
#   benches/gpu/run.sh --pack DIR  puts a stripped binary and this script into DIR, to run where nothing
#                                  can be compiled: copy DIR there and call DIR/run.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ -x "$here/gpu-bench" ]; then
  binary=$here/gpu-bench
else
  cd "$here/../.."
  binary=$(cargo bench --features cuda --bench gpu --no-run --message-format=json |
    sed -n 's/.*"name":"gpu".*"executable":"\([^"]*\)".*/\1/p' | tail -1)
  [ -n "$binary" ] || { echo "the benchmark was not built" >&2; exit 1; }
fi
if [ "${1:-}" = --pack ]; then
  mkdir -p "${2:?--pack DIR}"
  strip -o "$2/gpu-bench" "$binary"
  cp "$0" "$2/run.sh"
  exit
fi
# The driver's library is not always on the search path.
for dir in /usr/lib/x86_64-linux-gnu /usr/local/nvidia/lib64 /usr/lib64 /usr/lib/wsl/lib; do
  [ -e "$dir/libcuda.so.1" ] && export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$dir
done
date -u +%Y-%m-%d
command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
ulimit -l unlimited 2> /dev/null || true
code=0
timeout 600 "$binary" || code=$?
[ "$code" != 124 ] || echo "stopped after 10 minutes" >&2
exit "$code"
