#!/usr/bin/env bash
# Runs the tests of crates with `unsafe` under AddressSanitizer: `scripts/sanitize.sh [CRATE]...`
#
# The workspace's own crates are instrumented, their dependencies are not. A stable compiler knows the sanitizer, too: RUSTC_BOOTSTRAP lets
# it take the flag. `PROFILE=dev` builds with debug assertions. With CUDA=emulated the tests run on the emulated card, whose kernels are C++;
# its compiler must then be clang, because gcc's sanitizer is another one than Rust's.
set -euo pipefail
cd "$(dirname "$0")/.."

# As the compiler of the workspace: cargo calls this script with the compiler and its arguments.
if [[ ${1:-} == *rustc ]]; then
    exec env RUSTC_BOOTSTRAP=1 "$@" -Zsanitizer=address
fi

crates=("$@")
if ((${#crates[@]} == 0)); then
    crates=(heap tensor-storage cuda-device t5-ops cuda-kernels)
fi
export RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/sanitize.sh
# Memory that is lost is safe, and the allocator keeps some on purpose.
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
words=(--locked --profile "${PROFILE:-release}" --lib --tests --no-fail-fast)
if [[ ${CUDA:-} == emulated ]]; then
    export CXX=clang++ CXXFLAGS=-fsanitize=address LOW_MEM_T5_CUDA=emulated CUDARC_CUDA_VERSION=13000 LOW_MEM_T5_TEST_DEVICE=cuda
    words+=(--features train-low-mem/cuda -p train-low-mem)
fi
for crate in "${crates[@]}"; do
    echo "=== $crate"
    cargo test "${words[@]}" -p "$crate"
done
