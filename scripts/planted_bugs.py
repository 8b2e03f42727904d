#!/usr/bin/env python3
"""Plants bugs into copies of the kernels and of the code for overlapped copies, one at a time, and runs their tests: each has to fail.

    python3 scripts/planted_bugs.py [--only PARTS] [--target DIRECTORY]

Needs Python, a C++ compiler and cargo, and no card: the kernels run over the emulation. Some bugs are visible only to NVIDIA's compiler. They
need that compiler, because the tests run the PTX that it makes; without it they are left out. The copy of the repository is made in a
temporary directory. Before the bugs the tests run on the unchanged copy, and have to pass. Prints a table in Markdown. Exits 1 if a bug
was not caught.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = "crates/cuda-kernels/kernels"
CARD = "crates"
PTX = "PTX"

# The tests of each folder, and their environment.
SUITES = {
    # The C++ compiler takes most of the time.
    KERNELS: (["-p", "cuda-kernels", "--test", "kernels"], {"CXXFLAGS": "-O1"}),
    PTX: (["-p", "cuda-kernels", "--test", "kernels"], {"CXXFLAGS": "-O1", "LOW_MEM_T5_KERNELS": "ptx"}),
    CARD: (["-p", "cuda-device", "-p", "t5-ops", "--features", "t5-ops/cuda", "--test", "copies", "--test", "replay", "--test", "rounds", "--test", "device", "--test", "allocator"], {"LOW_MEM_T5_CUDA": "emulated", "CUDARC_CUDA_VERSION": "13000"}),
}

# Kind, file, text that occurs once, text in its place.
BUGS = [
    ("missing barrier", "device.h", "sum += shared[warp];\n    BARRIER();\n", "sum += shared[warp];\n"),
    ("missing barrier", "norm.cu", "    BARRIER();\n    for (int i = threadIdx.x; i < width; i += blockDim.x) partial", "    for (int i = threadIdx.x; i < width; i += blockDim.x) partial"),
    ("missing barrier", "cross_entropy.cu", "overwritten below by another.\n    BARRIER();\n", "overwritten below.\n"),
    ("missing barrier", "attention_forward.cu", "wait_for_copies<0>();\n        BARRIER();\n", "wait_for_copies<0>();\n"),
    ("missing barrier", "rows.cu", "counts[threadIdx.x] = before;\n    BARRIER();\n", "counts[threadIdx.x] = before;\n"),
    ("missing barrier", "small_m.cu", "        BARRIER();\n        for (int at = lane", "        for (int at = lane"),
    ("copy not waited for", "attention_forward.cu", "wait_for_copies<0>();\n        BARRIER", "wait_for_copies<1>();\n        BARRIER"),
    ("race between two tiles", "attention_forward.cu", "tiles_v + (stage ^ 1) * KEYS", "tiles_v + stage * KEYS"),
    ("mask one key too wide", "attention_forward.cu", ">= from_here[c / 2]) scores", "> from_here[c / 2]) scores"),
    ("causal mask one key too narrow", "attention.h", "query + 1 + s.keys", "query + s.keys"),
    ("first tile left out", "attention_backward.cu", "- s.keys, 0) / TILE : 0", "- s.keys, 0) / TILE + 1 : 0"),
    ("row behind the last", "norm.cu", "if (row >= rows) return;\n    const T* from", "if (row > rows) return;\n    const T* from"),
    ("label off by one", "cross_entropy.cu", "uint32_t(i + k) == label ?", "uint32_t(i + k) == label + 1 ?"),
    ("last rows not added", "optimizer.cu", "; done < rows; done++)", "; done + 1 < rows; done++)"),
    ("block of another tensor", "optimizer.cu", ".*first <= block) from", ".*first < block) from"),
    ("wrong noise of rounding", "optimizer.cu", "hash(key, column + j) >> 16", "hash(key, column + j) >> 17"),
    ("dropped rounding", "device.h", "(bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16", "bits >> 16"),
    ("upper half of a hash for both elements", "random.h", "lower_hash(x) >= dropout.threshold};", "x >= dropout.threshold};"),
    ("wrong stride", "dropout.cu", "samples[row / positions], row % positions", "samples[row / positions], row"),
    ("wrong stride", "optimizer.cu", "of.partial[of.parts + part] = parameters", "of.partial[of.parts + part + 1] = parameters"),
    ("position of a graph not looked at", "decoding.cu", "    position += moved(at);\n", ""),
    ("bias of another position of a graph", "decoding.cu", "- query - position;", "- query;"),
    ("copy into memory that is in use", "cuda-device/src/copy_streams.rs", "self.up.wait(is_free).w()?;\n        if", "let _ = is_free;\n        if"),
    ("copy of locked memory into memory that is in use", "cuda-device/src/copy_streams.rs", "let mut copied = after.into_iter().try_for_each(|event| stream.wait(event));", "let _ = after.into_iter();\n        let mut copied = Ok(());"),
    ("locked memory read before it was filled", "cuda-device/src/copies.rs", "event.synchronize().w()", "let _ = event;\n        Ok(())"),
    ("locked memory taken while it is in use", "cuda-device/src/pinned_copies.rs", "missing -= taken;\n", "slab.free.insert(at, taken);\n                missing -= taken;\n"),
    ("locked memory filled before it was read", "cuda-device/src/pinned_copies.rs", "let after = iter::once(&is_ready).chain(is_read.as_deref());", "let _ = is_read;\n            let after = iter::once(&is_ready);"),
    ("locked memory copied before its values are there", "cuda-device/src/copies.rs", "[&self.is_free, is_filled]", "[&self.is_free, is_filled].map(|_| &self.is_free)"),
    ("locked memory given up before it was copied", "cuda-device/src/page_locked.rs", ".and_then(|()| self.context.synchronize())", ""),
    ("copy not waited for", "cuda-device/src/copies.rs", "self.copy_streams.borrow().compute_wait_on(&done)", "Ok(drop(done))"),
    ("memory that serves others while it is copied to", "cuda-device/src/copies.rs", "that is reported.\n            let _ = self.wait();", "that is reported.\n            let _ = &self.is_done;"),
    ("copy of values that are not there", "cuda-device/src/copy_streams.rs", "self.down.wait(is_ready)?;", "let _ = is_ready;"),
    ("pinned memory filled before it was copied", "cuda-device/src/copy_streams.rs", "&mut piece.wait().w()?[..length]", "piece.of(length)"),
    ("pinned memory read before it was filled", "cuda-device/src/copy_streams.rs", "&oldest.wait()?[..part.len()]", "oldest.of(part.len())"),
    ("stale position of a graph", "cuda-device/src/launch/recording.rs", "            overwrite(card, there, numbers)?;\n", ""),
    ("stale addresses of a graph", "cuda-device/src/launch/recording.rs", "if of != self.of {", "if of.len() != self.of.len() {"),
    ("two tensors of a graph in one place", "cuda-device/src/launch/recording.rs", "scope.taken[kind] += count.next_multiple_of(ALIGNMENT);", "scope.taken[kind] += ALIGNMENT;"),
    ("memory beyond the limit", "cuda-device/src/allocator.rs", "held <= self.most", "held < usize::MAX"),
    ("memory taken back from a tensor", "cuda-device/src/allocator.rs", "if !self.free.cut(place, bytes) {", "if self.free.cut(place, bytes) && false {"),
    ("two tensors in one place", "cuda-device/src/allocator.rs", "self.regions[region].free.insert(at, bytes);", "self.regions[region].free.insert(at, 2 * bytes);"),
    ("memory of a graph that no pool knows", "cuda-device/src/device.rs", "        set_workspace(device)?;\n", ""),
    ("work of a graph with a number of the host", "cuda-device/src/replay.rs", "    crate::launch::recording::refuse(operation);\n", "    let _ = operation;\n"),
    ("stale lists and step of a graph", "cuda-device/src/launch/round.rs", "overwrite(card, &self.numbers, &changing.numbers())?;", "let _ = card;"),
    ("stale step of a graph", "t5-ops/src/ops/dropout/cuda.rs", "recording::key().unwrap_or(0)", "0 * recording::key().unwrap_or(0)"),
    ("stale ids of a graph", "cuda-device/src/launch/round.rs", "unsafe { copy_to(tensor, address(place)?)? };", "let _ = (tensor, place);"),
    ("stale gradient that a graph is given", "cuda-device/src/launch/rounds.rs", "unsafe { copy_to(&x, address(&place)?)? };", ""),
    ("stale addresses of a graph", "cuda-device/src/launch/rounds.rs", "recorded.external == external", "recorded.external.len() == external.len()"),
    ("memory of a graph used again too early", "cuda-device/src/launch/lifetimes.rs", "self.all[number].last = self.launches;", "let _ = number;"),
    ("two tensors of a graph in one place", "cuda-device/src/launch/lifetimes.rs", "if places[other] >= from + life.elements {", "if places[other] + 64 >= from + life.elements {"),
    ("wrong scale", "attention.cu", "p[i][k] *= kept;", "p[i][k] *= kept > 0.0f ? 1.0f : 0.0f;"),
    ("wrong bound", "decoding.cu", "i < count; i += gridDim.y", "i < count - 1; i += gridDim.y"),
    ("wrong stride of a part", "cuda-device/src/launch.rs", "            count(width)?,\n", "            count(n)?,\n"),
    ("wrong stride of pieces", "cuda-device/src/copy_streams.rs", "let at = from + (number * self.piece_bytes) as u64;", "let at = from + (number * length) as u64;"),
    ("event of the other stream", "cuda-device/src/copy_streams.rs", "self.compute_stream.record_event(None)", "self.up.record_event(None)"),
    ("a graph that is not ended", "cuda-device/src/launch/recording.rs", "let dropped = stream.context().check_err();", "let dropped = Ok(());"),
]


# The same for bugs that the host's C++ compiler hides: in inline assembler, and in accesses to shared memory, whose order it chooses.
BUGS_OF_PTX = [
    ("operands of tensor cores swapped", "tensor_cores.h", '"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)'),
    ("matrices not transposed", "tensor_cores.h", ".x4.trans.shared", ".x4.shared"),
    ("pair in the wrong order", "device.h", '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
    ("copy of other bytes than the valid ones", "tensor_cores.h", "is_valid ? 16 : 0", "is_valid ? 0 : 16"),
    ("copy not waited for", "tensor_cores.h", '"n"(N) : "memory"', '"n"(N + 1) : "memory"'),
    ("address of another space", "tensor_cores.h", "uint32_t(__cvta_generic_to_shared(at))", "uint32_t(reinterpret_cast<size_t>(at))"),
    ("another function", "device.h", "ex2.approx.ftz.f32", "lg2.approx.ftz.f32"),
    ("lanes of a part of the warp", "device.h", "DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes)", "DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xFFFFu, x, lanes)"),
]


def folder(name):
    return CARD if name.endswith(".rs") else KERNELS


def copied(to):
    """The files of the repository as they are."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def tested(copy, target, of):
    """Whether the tests of a folder pass, and the names of the failing tests; a build that fails is an error."""
    tests, variables = SUITES[of]
    command = ["cargo", "test", "--release", "--locked", *tests, "--target-dir", target, "--no-fail-fast"]
    environment = {**os.environ, **variables}
    build = subprocess.run([*command, "--no-run"], cwd=copy, capture_output=True, text=True, env=environment)
    if build.returncode != 0:
        sys.exit(f"{of} does not compile:\n{build.stderr[-2000:]}")
    ran = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=environment)
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", ran.stdout, re.MULTILINE)
    # A signal ends the tests without a message.
    return ran.returncode == 0, failed or ([] if ran.returncode == 0 else ["a signal"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose kind or file contains one of these, separated by commas; PTX for those that only the PTX has")
    parser.add_argument("--target", default=str(ROOT / "target"), help="where cargo builds")
    options = parser.parse_args()
    bugs = [(folder(bug[1]), *bug) for bug in BUGS]
    has_compiler = shutil.which("nvcc") or (pathlib.Path(os.environ.get("CUDA_HOME", "")) / "bin/nvcc").is_file()
    if has_compiler:
        bugs += [(PTX, *bug) for bug in BUGS_OF_PTX]
    else:
        print("left out, as there is no nvcc: bugs that only the PTX has", file=sys.stderr)
    bugs = [bug for bug in bugs if any(part in bug[1] or part in bug[2] or part == bug[0] for part in options.only.split(","))]
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory)
        copied(copy)
        for of in {of for of, *_ in bugs}:
            passes, failed = tested(copy, options.target, of)
            if not passes:
                sys.exit(f"the tests fail without a bug: {', '.join(failed)}")
        print("| bug | file | tests that fail |\n| --- | --- | --- |", flush=True)
        for of, kind, name, old, new in bugs:
            path = copy / folder(name) / name
            text = path.read_text()
            if text.count(old) != 1:
                sys.exit(f"{name}: {text.count(old)} places for `{old}`, expected one")
            path.write_text(text.replace(old, new))
            passes, failed = tested(copy, options.target, of)
            path.write_text(text)
            missed += passes
            names = "**none**" if passes else ", ".join(f"`{test}`" for test in failed[:2])
            more = f" and {len(failed) - 2} more" if len(failed) > 2 else ""
            print(f"| {kind} | `{name}`{', as PTX' if of == PTX else ''} | {names}{more} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
