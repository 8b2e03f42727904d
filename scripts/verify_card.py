#!/usr/bin/env python3
"""Tests every claim about a card on a machine with a card: results, memory, budgets, prices, and speed beside PyTorch.

    python3 verify_card.py --binary ./train_low_mem
    python3 verify_card.py --binary ./train_low_mem --parts smoke:1,parity,speed:8 --minutes 5 --output card
    python3 verify_card.py --binary ./train_low_mem --budget 540 # seconds in all; the most important numbers come first
    python3 verify_card.py --binary ./train_low_mem --quick      # shapes that take seconds, to try the script

Needs the driver, the binary (built with `--features cuda`), Python and the scripts beside it; only the part `speed` needs torch and transformers. Each part
ends within --minutes, or its own minutes after a colon, and names the cases that did not run. Within --budget each part has a share
of the time that is left, so that every part begins. Writes OUTPUT/verify_card.json, where each case has its command, numbers, verdict and
seconds, and the page OUTPUT/verify_card.md: first the verdicts, and then everything that was not measured. Exits 1 if a case failed.

| part | ok if |
| --- | --- |
| smoke | libraries are found, `doctor` sees the card, and the binary trains, evaluates and answers on it |
| rates | measured: the bus, products, and attention at 256 and 1,024 keys, as shares of the published peak of the card's dense products |
| parity | losses equal the CPU's (f32: 1e-5 at every step, bf16: 2e-2); a second run has the same digits, also after kill -9 and a resume |
| memory | predicted peaks are within 5 % of the peaks by the binary and by nvidia-smi; they may always be 48 MiB too high |
| budgets | no run fails in a budget that the binary offers, no peak is above its budget, and predictions are within 5 % |
| levers | each lever runs; its measured price stands beside the planner's |
| graphs | as graphs and kernel by kernel, in turn, tokens and training steps have the same bits; all micro-batches of later steps are graphs; times of both |
| offload | with tensors off the card losses keep every digit, and predictions are within 5 %; the tensors' prices, and the rate of copies |
| cards | with a build of `mpi,cuda` or `nccl`: two cards and all cards have one card's losses, memory as predicted, and bits with virtual shards |
| speed | each contender runs; times, tokens, shares of the peak, and memory of train_low_mem and PyTorch, in turn |
| large | t5-3b's shape trains in 2 GiB, and an adapter of flan-t5-xxl's in 2 GiB beside 1 GiB of the host, within 2e-2 of ample budgets |
| sanitizer | compute-sanitizer finds nothing in a step (memcheck, racecheck) |
"""

import argparse
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
PARTS = ["smoke", "rates", "parity", "memory", "budgets", "levers", "graphs", "offload", "cards", "speed", "large", "sanitizer"]
# The order of parts within a budget, and their shares of it: measurements that no card has made come first.
SHARES = {"smoke": 4, "rates": 3, "large": 8, "offload": 5, "sanitizer": 4, "parity": 4, "graphs": 6, "speed": 4, "budgets": 4, "memory": 3,
          "levers": 2, "cards": 1}
# The part of a budget for ending the last command and writing the page.
SECONDS_OF_THE_END = 10
MEMORY_TOLERANCE = 0.05
# The bill has a fixed part for the allocator's pool, which is a large share of a small model's bill.
ALLOWED_ABOVE_THE_PEAK_MIB = 48
# nvidia-smi counts in MiB, and the driver allocates in pieces of 2 MiB.
SMI_ROUNDING_MIB = 16
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}
# A relu's kink and the default's high rate amplify rounding: with other micro-batches the CPU's own losses differ by up to 6e-3 after 50 steps.
SMOOTH = ["--set", 'model.overrides={feed_forward_proj="gated-gelu"}', "--set", "optimizer.learning_rate=3e-3"]
# Published rates of dense products in bf16 with sums in f32, and in f32 without tensor cores: TFLOP/s. The first of these names that is in a card's name counts.
PEAKS = {"H200 NVL": (835.5, 60.0), "H200": (989.4, 66.9), "H100 PCIe": (756.0, 51.2), "H100 NVL": (835.5, 60.0), "H100": (989.4, 66.9),
         "A100": (312.0, 19.5), "L40S": (362.0, 91.6), "L4": (121.0, 30.3), "RTX 4090": (165.2, 82.6), "RTX 3090": (71.2, 35.6)}
STOCHASTIC = ["--precision", "bf16", "--master-weights", "stochastic-rounding", "--gradient-precision", "bf16"]
PRECISIONS = {"f32": ["--precision", "f32"], "bf16": ["--precision", "bf16"], "bf16 stochastic": STOCHASTIC}

# Open MPI starts as many processes as there are cards, even as root, and does not bind them to processors.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none"}


class NotRun(Exception):
    """A case that could not be tried, and why."""


class NoTimeLeft(NotRun):
    """A case that did not start because the part's time was over."""


class Failed(Exception):
    """A case that ran and is wrong; its numbers so far."""

    def __init__(self, reason, numbers=None):
        super().__init__(reason)
        self.numbers = numbers or {}


class Ran:
    """A command that ended: exit code, output, seconds, and the card's peak by nvidia-smi if it was watched."""

    def __init__(self, code, out, err, seconds, card_mib):
        self.code, self.out, self.err, self.seconds, self.card_mib = code, out, err, seconds, card_mib

    def expect(self, *codes):
        if self.code not in codes:
            said = " / ".join(line for line in (self.err or self.out).strip().splitlines()[-6:] if line.strip())
            raise Failed(f"exit code {self.code}: {said[-600:]}")
        return self

    def last_json(self):
        for line in reversed(self.out.strip().splitlines()):
            if line.startswith("{"):
                return json.loads(line)
        raise Failed(f"no JSON was printed: {self.out.strip()[-200:]}")


class CardWatch:
    """The most memory of the card that nvidia-smi shows during a command, minus the memory in use before it."""

    def __init__(self, card):
        self.card = card
        self.command = ["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self.before, self.most, self.child = None, None, None

    def __enter__(self):
        if not self.card:
            return self
        try:
            once = subprocess.run(self.command, capture_output=True, text=True, timeout=20)
            self.before = float(once.stdout.split()[0])
            self.child = subprocess.Popen(self.command + ["-lms", "100"], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self.read, daemon=True).start()
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            self.child = None
        return self

    def read(self):
        for line in self.child.stdout:
            if re.fullmatch(r"\d+(\.\d+)?", line.strip()):
                self.most = max(self.most or 0.0, float(line))

    def __exit__(self, *_):
        if self.child:
            self.child.kill()
            self.child.wait()

    def peak_mib(self):
        return self.most - self.before if self.most is not None else None


class Session:
    """The binary under test, the parts' time, and the cases so far."""

    def __init__(self, options):
        self.options, self.cases, self.commands, self.part, self.end = options, [], [], None, 0.0
        # Parts of which not all cases ran, each with the reason.
        self.unmeasured = {part: "did not begin" if part in options.parts else "not asked for" for part in PARTS}
        self.binary = str(options.binary.resolve())
        self.is_card = options.device != "cpu"
        number = options.device.partition(":")[2] or "0"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self.card = visible[int(number)] if int(number) < len(visible) and visible[int(number)] else number
        self.environment = dict(os.environ, CUDA_DEVICE_ORDER="PCI_BUS_ID", LD_LIBRARY_PATH=library_path(options.libraries), **OPEN_MPI)
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="scratch-", dir=options.output))
        # The machine is measured again, regardless of earlier runs.
        self.environment["XDG_CACHE_HOME"] = str(self.scratch / "cache")
        self.begun = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")

    def left(self):
        return self.end - time.monotonic()

    def try_part(self, part, seconds):
        """Runs one part. No failure in it ends the script."""
        self.part, self.end = part, time.monotonic() + seconds
        self.unmeasured[part] = "was not finished"
        try:
            (cards_together if part == "cards" else globals()[part])(self)
        except Exception as error:
            reason = f"this script: {error!r}"

            def broken():
                raise Failed(reason)

            self.case("the rest of the part", broken)
        del self.unmeasured[part]
        write_results(self)

    def run(self, command, limit=180, watched=False, until=None):
        """Runs a command in a session of its own. It is killed at its limit, at the end of the part, or when `until` is true."""
        command = [str(word) for word in command]
        self.commands.append(command)
        if self.left() < 2:
            raise NoTimeLeft("no time left")
        seconds, began, cut = min(limit, self.left()), time.monotonic(), False
        watch = CardWatch(self.card if watched else None)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, watch as card:
            try:
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.scratch,
                                         env=self.environment, start_new_session=True)
            except OSError as error:
                raise Failed(f"cannot be started: {error}") from None
            try:
                while child.poll() is None and not cut:
                    time.sleep(0.005 if until else 0.02)
                    cut = time.monotonic() - began > seconds or (until is not None and until())
            finally:  # Also if the script is interrupted.
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0), err.seek(0)
            took = time.monotonic() - began
            ran = Ran(child.returncode, out.read(), err.read(), took, card.peak_mib())
        if cut and took >= seconds:
            if seconds < limit:
                raise NotRun(f"the part's time was over after {took:.0f} s")
            raise Failed(f"did not end within {limit} s")
        return ran

    def ours(self, subcommand, flags, launcher=(), **how):
        """Runs the binary as one process or with a launcher. Its help has to know every flag."""
        flags = [str(flag) for flag in flags]
        for flag in flags:
            if flag.startswith("--") and flag not in self.flags_of(subcommand):
                raise NotRun(f"this binary's `{subcommand}` has no `{flag}`")
        for flag, value in zip(flags, flags[1:]):
            if flag == "--set" and value.split("=")[0] not in self.keys():
                raise NotRun(f"this binary has no key `{value.split('=')[0]}`")
        return self.run([*launcher, self.binary, *subcommand.split(), *flags], **how)

    @functools.lru_cache(None)
    def flags_of(self, subcommand):
        return set(re.findall(r"--[a-z][a-z-]+", self.text_of(*subcommand.split(), "--help")))

    @functools.lru_cache(None)
    def keys(self):
        section, keys = "", set()
        for line in self.text_of("keys").splitlines():
            section = line.strip("[]") if line.startswith("[") else section
            keys |= {f"{section}.{line.split()[0]}"} if " = " in line else set()
        return keys

    def text_of(self, *words):
        ran = self.run([self.binary, *words], limit=60)
        self.commands.pop()
        return ran.expect(0).out

    def case(self, name, check):
        """Tries one case. Every failure in it becomes its verdict."""
        began, self.commands, reason, before = time.monotonic(), [], "", self.cases[-1] if self.cases else {}
        try:
            numbers, verdict = check() or {}, "ok"
        except NotRun as error:
            numbers, verdict, reason = {}, "not run", str(error)
            if isinstance(error, NoTimeLeft) and (before.get("part"), before.get("reason")) == (self.part, reason):
                # One line stands for all cases without time.
                before["others"] = before.get("others", 0) + 1
                return False
        except Failed as error:
            numbers, verdict, reason = error.numbers, "failed", str(error)
        except Exception as error:  # One case never ends the script.
            numbers, verdict, reason = {}, "failed", f"this script: {error!r}"
        commands = [" ".join(map(quoted, command)) for command in self.commands]
        case = {"part": self.part, "case": name, "verdict": verdict, "reason": reason, "numbers": numbers,
                "commands": commands, "seconds": round(time.monotonic() - began, 1)}
        self.cases.append(case)
        shown = ", ".join(f"{key} {cell(value)}" for key, value in numbers.items() if not isinstance(value, list))
        print(f"{verdict:8} {case['seconds']:6.1f} s  {self.part}: {name}  {reason or shown}", flush=True)
        write_results(self)
        return verdict == "ok" and numbers


def library_path(directories):
    """Directories in which the loader looks for CUDA's libraries: its own ones, --libraries, and the wheels that torch brings."""
    places = [str(directory.resolve()) for directory in directories]
    for package in ["nvidia", "torch"]:
        found = importlib.util.find_spec(package)
        for root in (found and found.submodule_search_locations) or []:
            files = pathlib.Path(root).glob("**/lib*.so*")
            places += sorted({str(file.parent) for file in files if re.match(r"lib(cudart|cublas|curand|nvrtc)", file.name)})
    return ":".join([place for place in [os.environ.get("LD_LIBRARY_PATH", "")] if place] + places)


def quoted(word):
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\\''") + "'"


# Runs of training.


class Training:
    """A run that ended: its events, the digest of its model, and the command's end."""

    def __init__(self, directory, ran):
        lines = (directory / "metrics.jsonl").read_text().splitlines() if (directory / "metrics.jsonl").exists() else []
        self.events = [json.loads(line) for line in lines if line.endswith("}")]
        # A resumed run may repeat a step: the last one counts.
        self.steps = {event["step"]: event for event in self.events if event["event"] == "step"}
        model = directory / "model" / "model.safetensors"
        self.digest = digest(model) if model.exists() else None
        self.directory, self.ran = directory, ran

    def of_steps(self, key):
        return [self.steps[step][key] for step in sorted(self.steps)]

    def last(self, event):
        return [found for found in self.events if found["event"] == event][-1]


def digest(path):
    """The digest of a file that may be larger than memory."""
    sum_of = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(16 << 20):
            sum_of.update(part)
    return sum_of.hexdigest()[:16]


def train_flags(session, name, device, steps, batch, more):
    directory = session.scratch / name
    sets = ["train.dropout=0.1", f"train.batch_size={batch}", "train.eval_samples=1", "train.eval_generate_samples=0",
            "train.sample_generations=0", "run.seed=7"]
    flags = ["--device", device, "--max-steps", steps, "--output", directory]
    return directory, flags + [word for key in sets for word in ("--set", key)] + list(more)


def train(session, name, device, steps, batch, more=(), codes=(0,), **how):
    """A whole run of the embedded data, or of the data that `more` names."""
    directory, flags = train_flags(session, name, device, steps, batch, more)
    shutil.rmtree(directory, ignore_errors=True)
    ran = session.ours("train", flags, **how).expect(*codes)
    return Training(directory, ran)


def smoke(session):
    device, seen = session.options.device, {}

    def libraries():
        if not shutil.which("ldd"):
            raise NotRun("no ldd here")
        ran = session.run(["ldd", session.binary]).expect(0)
        missing = re.findall(r"(\S+) => not found", ran.out)
        if missing:
            raise Failed(f"not found: {', '.join(missing)}; `--libraries DIR` names a directory")
        return {"libraries": ran.out.count("=>")}

    def doctor():
        report = json.loads(session.ours("doctor", ["--json"]).expect(0, 6).out)
        found = {finding["name"]: finding for finding in report["findings"]}
        if "cuda" not in found["program"]["facts"].get("features", []) and session.is_card:
            raise Failed("the binary was built without the feature cuda")
        # A finding for each card; without a card, a finding that says why.
        seen = [finding["found"] for finding in report["findings"] if finding["name"] == "card"]
        if not seen and cards(session):
            raise Failed("nvidia-smi shows a card, and doctor none")
        return {"findings": len(found), "severity": report["severity"], "cards": "; ".join(seen) or found["cards"]["found"]}

    def two_steps():
        seen["run"] = train(session, "smoke", device, 2, 4)
        losses = seen["run"].of_steps("loss")
        if len(losses) != 2 or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise Failed(f"losses {losses}")
        return {"loss_1": losses[0], "loss_2": losses[1], "step_ms": seen["run"].of_steps("step_ms")[1]}

    def model():
        if not seen.get("run"):
            raise NotRun("there is no model: the run failed")
        return ["--model", session.scratch / "smoke" / "model", "--device", device]

    def evaluation():
        rows = session.scratch / "smoke" / "sample-data" / "sample-validation.parquet"
        flags = ["--data", rows, "--samples", 4, "--generate-samples", 1, "--max-new-tokens", 4, "--json"]
        result = session.ours("eval", model() + flags).expect(0).last_json()
        if not math.isfinite(result["loss"]) or result["samples"] != 4:
            raise Failed(f"printed {result}")
        return {"loss": result["loss"], "samples": result["samples"]}

    def generation():
        flags = ["--prompt", "2 + 2", "--max-new-tokens", 4, "--scores", "--json"]
        result = session.ours("generate", model() + flags).expect(0).last_json()
        return {"answer_characters": len(result["response"])}

    session.case("libraries", libraries)
    session.case("doctor", doctor)
    session.case("two steps of preset tiny", two_steps)
    session.case("eval", evaluation)
    session.case("generate", generation)


def distance(ours, others):
    """The largest relative difference of two runs' losses, and its step."""
    if len(ours) != len(others) or not ours:
        raise Failed(f"{len(ours)} and {len(others)} steps to compare")
    pairs = [abs(a - b) / abs(b) if isinstance(a, float) and isinstance(b, float) else math.inf for a, b in zip(ours, others)]
    return max(pairs), pairs.index(max(pairs)) + 1


def parity(session):
    device, quick = session.options.device, session.options.quick
    steps, batch, runs = (6, 4, {}) if quick else (50, 8, {})
    ways = {"f32": [], "bf16": ["--set", "train.precision=bf16"]}
    ways["bf16 stochastic"] = ways["bf16"] + ["--set", "train.master_weights=stochastic-rounding"]
    smooth = [*SMOOTH, "--set", f"checkpoint.every_steps={max(2, steps // 5)}"]

    def of(name, way, where, more=()):
        key = f"{name} {way}".replace(" ", "-")
        if key not in runs:
            runs[key] = train(session, key, where, steps, batch, smooth + ways[way] + list(more), limit=300)
        return runs[key]

    def beside_the_cpu(way, tested=None, tolerance=None):
        cpu = of("cpu", way, "cpu")
        run = (tested or (lambda: of("card", way, device)))()
        worst, step = distance(run.of_steps("loss"), cpu.of_steps("loss"))
        norms, _ = distance(run.of_steps("grad_norm"), cpu.of_steps("grad_norm"))
        numbers = {"steps": len(cpu.steps), "worst_loss_difference": worst, "at_step": step, "worst_norm_difference": norms,
                   "last_loss": run.of_steps("loss")[-1], "losses": run.of_steps("loss"), "losses_of_cpu": cpu.of_steps("loss")}
        if worst > (tolerance or TOLERANCE[way.split()[0]]):
            raise Failed(f"the loss of step {step} is {worst:.1e} from the CPU's", numbers)
        return numbers

    def cut():
        return of("cut-cpu", "f32", "cpu", ["--set", "memory.micro_batch_samples=3"])

    def same(one, two):
        for key in ["loss", "grad_norm"]:
            pairs = list(zip(one.of_steps(key), two.of_steps(key)))
            differ = [step + 1 for step, (a, b) in enumerate(pairs) if a != b]
            if differ or len(one.steps) != len(two.steps):
                raise Failed(f"{key}: {len(one.steps)} and {len(two.steps)} steps, the first difference in {differ[:1]}")
        if one.digest is None or one.digest != two.digest:
            raise Failed(f"the models have other bits: {one.digest} and {two.digest}")
        return {"steps": len(one.steps), "last_loss": two.of_steps("loss")[-1], "model": two.digest}

    def killed(way):
        whole = of("card", way, device)
        directory, flags = train_flags(session, f"killed-{way}".replace(" ", "-"), device, steps, batch, smooth + ways[way])
        is_saved = functools.partial(has_checkpoint, directory / "metrics.jsonl")
        if session.ours("train", flags, until=is_saved, limit=300).code == 0:
            raise NotRun("the run ended before it could be killed")
        made = len(Training(directory, None).steps)
        resumed = session.ours("train", ["--output", directory, "--keep-training", "--device", device, "--max-steps", steps], limit=300)
        return {"killed_after_steps": made, **same(Training(directory, resumed.expect(0)), whole)}

    for way in ways:
        session.case(f"{way}: card beside CPU", lambda: beside_the_cpu(way))
        session.case(f"{way}: the card twice", lambda: same(of("card", way, device), of("again", way, device)))
    for way in ["f32", "bf16 stochastic"]:
        session.case(f"{way}: kill -9 and resume", lambda: killed(way))
    session.case("the CPU beside itself, in other micro-batches", lambda: beside_the_cpu("f32", cut))


def has_checkpoint(metrics):
    try:
        return '"event":"checkpoint"' in metrics.read_text()
    except OSError:
        return False


def bench(session, model, shape, flags, steps=3, **how):
    batch, source, target = shape
    words = ["--json", "--device", session.options.device, "--model", model, "--batch", batch, "--source-tokens", source,
             "--target-tokens", target, "--steps", steps, *flags]
    ran = session.ours("bench", words, watched=session.is_card, **how).expect(0)
    result = ran.last_json()
    result["peak"] = result["device_peak_bytes" if session.is_card else "peak_rss_bytes"] / MIB
    result["predicted"] = result["predicted_device_peak_bytes" if session.is_card else "predicted_peak_bytes"] / MIB
    result["smi"] = ran.card_mib
    # For example, that recorded launches were refused.
    result["warnings"] = [line.strip() for line in ran.err.splitlines() if "warning" in line.lower() or "WARN" in line]
    return result


def warned(result):
    """The first warning of a run, for the table."""
    return {"warning": result["warnings"][0][:120]} if result["warnings"] else {}


def prediction(predicted, peaks, more):
    """The numbers of a prediction beside the peaks by each count, and `more`. Fails if they differ too much. All are MiB."""
    numbers, wrong = {"predicted_mib": predicted}, []
    for by, peak in peaks.items():
        if not peak:
            continue
        numbers |= {f"{by}_mib": peak, f"{by}_error_percent": 100 * (predicted / peak - 1)}
        spare = predicted - peak
        if -spare > MEMORY_TOLERANCE * peak or spare > max(MEMORY_TOLERANCE * peak, ALLOWED_ABOVE_THE_PEAK_MIB):
            wrong.append(f"{by} {peak:.0f} MiB, predicted {predicted:.0f} MiB")
    numbers |= more
    if not any(peaks.values()):
        raise Failed("nobody counted a peak", numbers)
    if wrong:
        raise Failed("; ".join(wrong), numbers)
    return numbers


def of_peak(session, tflops, precision):
    """A rate, and its share of the card's published rate if that is known."""
    name = machine(session)["card"] if session.is_card else ""
    peak = next((rates for known, rates in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)
    share = {"percent_of_peak": 100 * tflops / peak[precision == "f32"]} if peak else {}
    return {"tflops": tflops, **share}


def rates(session):
    """Rates of the card: the binary's own measurement, and operations of a step, with a wait after each."""
    quick, device = session.options.quick, session.options.device
    model, shapes, steps = ("tiny", [(1, 8, 8)], 1) if quick else ("t5-base", [(32, 256, 256), (8, 1024, 1024)], 3)

    @functools.lru_cache(None)
    def measured():
        bench(session, model, (1, 16, 16), [], 1)
        kept = session.scratch / "cache" / "train_low_mem" / "speed.json"
        if not kept.exists():
            raise NotRun("the binary did not measure: LOW_MEM_T5_PRICES says built-in")
        return [found["speed"] for found in json.loads(kept.read_text())["measured"] if bool(found.get("card")) == session.is_card][-1]

    def bus():
        times = measured()["f32"].get("card")
        if not times:
            raise NotRun("no card was measured")
        # Older programs, and drivers that lock no memory, report only one rate.
        locked = times.get("locked_byte_ps", times["bus_byte_ps"])
        numbers = {"bus_gb_s": 1000 / locked, "through_staging_gb_s": 1000 / times["bus_byte_ps"], "launch_us": times["launch_ps"] / 1e6}
        query = ["nvidia-smi", "-i", session.card, "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
            generation, width = map(int, said.split(","))
        except (OSError, ValueError, subprocess.SubprocessError):
            return numbers
        # A lane of generation 3 has 8 GT/s, and each later generation has twice as many; 128 of 130 bits are data.
        link = width * 2 ** (generation - 3) * 8 / 8 * 128 / 130
        return {**numbers, "link": f"PCIe {generation} x{width}", "link_gb_s": link, "percent_of_link": 100 * numbers["bus_gb_s"] / link}

    def products(precision):
        return of_peak(session, 2 / measured()[precision]["product_ps"], precision)

    def operations(shape, precision):
        profile = bench(session, model, shape, PRECISIONS[precision] + ["--micro-batch", shape[0], "--profile"], steps)["profile"]
        numbers = {}
        for operation in profile["operations"]:
            if operation["name"] in ("attention", "attention_backward", "linear", "linear_backward_input", "linear_backward_weight"):
                rate = of_peak(session, operation["gflops_per_second"] / 1000, precision)
                numbers |= {f"{operation['name']}_{key}": value for key, value in rate.items()}
        return numbers

    def of_adapter(shape):
        """The time of each operation of a step with an adapter, whose products are of rank 16 beside the base's products."""
        flags = PRECISIONS["bf16"] + ["--micro-batch", shape[0], "--lora", 16]
        profile = bench(session, model, shape, flags + ["--profile"], steps)["profile"]
        ms = {operation["name"] + "_ms": operation["ms"] for operation in profile["operations"]}
        return {"step_ms": bench(session, model, shape, flags, steps)["step_ms"], **ms}

    session.case("the bus", bus)
    for precision in ("bf16", "f32"):
        session.case(f"products, {precision}", lambda: products(precision))
    for shape in shapes[::-1]:
        for precision in ("bf16", "f32"):
            session.case(f"{model} {precision}, attention at {shape[1]} keys", lambda: operations(shape, precision))
    session.case(f"{model} bf16, an adapter's step", lambda: of_adapter(shapes[0]))


def memory(session):
    def check(model, shape, flags):
        result = bench(session, model, shape, flags)
        peaks = {"peak": result["peak"], "smi": result["smi"]}
        more = {"micro_batch": result["micro_batch_samples"], "step_ms": result["step_ms"], "plan": result["plan"]}
        return prediction(result["predicted"], peaks, more | warned(result))

    cuts = {"": [], "recompute": ["--recompute", "full"], "layer-major": ["--micro-batch", 2, "--accumulation", "layer-major"]}
    if session.options.quick:
        shapes = {"tiny": [(2, 8, 8), (4, 16, 16)]}
        cuts["layer-major"][1] = 1
    else:
        shapes = {model: [(8, tokens, tokens) for tokens in (512, 128, 1024)] for model in ("t5-small", "t5-base", "chatlm-0.2b")}
        shapes["tiny"] = [(64, 128, 128)]
    # One shape of every model first, so that even a short run covers all models.
    order = sorted((rank, model, shape) for model, found in shapes.items() for rank, shape in enumerate(found))
    for _, model, shape in order:
        for precision, flags in PRECISIONS.items():
            for cut, more in cuts.items():
                name = " ".join(filter(None, [model, f"{shape[0]} x {shape[1]}+{shape[2]}", precision, cut]))
                session.case(name, lambda: check(model, shape, flags + more))


def material(session, words, rows, target_words=None):
    """Rows of many words, and the tokenizer of the embedded data, which a run leaves in its directory."""
    target_words = target_words or words
    directory = session.scratch / "material"
    if not (directory / "sample-data").exists():
        train(session, "material", "cpu", 1, 1)
    draw, path = random.Random(1), directory / f"rows-{words}-{target_words}.jsonl"
    text = lambda words: " ".join(str(draw.randint(0, 999)) for _ in range(words))
    path.write_text("".join(json.dumps({"prompt": text(words), "response": text(target_words)}) + "\n" for _ in range(rows)))
    return ["--set", f"data.train={path}", "--set", f"data.tokenizer={directory / 'sample-data' / 'sample-tokenizer.json'}",
            "--set", f"data.max_source_tokens={words}", "--set", f"data.max_target_tokens={target_words}"]


def budgets(session):
    """Four settings. Each has a refusal, which names the smallest budget, and six budgets from that one upwards."""
    flag = "--device-memory-budget" if session.is_card else "--memory-budget"
    bf16 = ["--set", "train.precision=bf16"]
    stochastic = bf16 + ["--set", "train.master_weights=stochastic-rounding", "--set", "train.gradient_precision=bf16"]
    if session.options.quick:
        settings = [("tiny", 4, 8, []), ("tiny", 8, 12, []), ("tiny", 4, 8, bf16), ("tiny", 8, 12, stochastic)]
        steps, rows = 2, 64
    else:
        # Settings that no card has measured come first.
        settings = [("t5-base", 32, 512, []), ("t5-base", 32, 512, stochastic), ("t5-base", 64, 128, bf16), ("t5-small", 64, 256, [])]
        steps, rows = 4, 512

    def refused(flags, batch):
        ran = train(session, "refused", session.options.device, steps, batch, flags + [flag, "1MiB"], codes=(3,)).ran
        smallest = re.search(rf"{flag} (\d+(?:\.\d+)?)(MiB|GiB)", ran.err)
        if not smallest:
            raise Failed(f"the refusal names no budget: {ran.err.strip()[-300:]}")
        return {"budget_mib": 1, "smallest_mib": float(smallest[1]) * (1024 if smallest[2] == "GiB" else 1)}

    def holds(flags, batch, mib):
        run = train(session, "budget", session.options.device, steps, batch, flags + [flag, f"{mib}MiB"], watched=session.is_card)
        end, plan = run.last("end"), run.last("plan")
        peak = end["device_peak_bytes" if session.is_card else "peak_rss_bytes"] / MIB
        predicted = plan["predicted_device_peak" if session.is_card else "predicted_peak"] / MIB
        numbers = {"budget_mib": mib, "peak_mib": peak, "predicted_mib": predicted, "used_percent": 100 * peak / mib,
                   "micro_batch": plan["micro_batch_samples"], "replans": sum(e["event"] == "replan" for e in run.events),
                   "step_ms": statistics.median(run.of_steps("step_ms"))}
        if peak > mib or (run.ran.card_mib or 0) > mib + SMI_ROUNDING_MIB:
            raise Failed(f"the peak is above {mib} MiB", numbers | ({"smi_mib": run.ran.card_mib} if run.ran.card_mib else {}))
        return prediction(predicted, {"peak": peak, "smi": run.ran.card_mib}, numbers)

    for model, batch, tokens, way in settings:
        name = f"{model} {batch} x {tokens}+{tokens} {' '.join(word.split('=')[1] for word in way[1::2]) or 'f32'}"
        made = {}

        def smallest():
            made["flags"] = ["--set", f"model.config={model}", *way, *material(session, tokens, rows)]
            made["mib"] = refused(made["flags"], batch)["smallest_mib"]
            return {"smallest_mib": made["mib"]}

        session.case(f"{name}: a refusal", smallest)
        for factor in [1.0, 1.1, 1.25, 1.5, 2.0, 3.0]:

            def inside():
                if "mib" not in made:
                    raise NotRun("the smallest budget is unknown")
                return holds(made["flags"], batch, math.ceil(made["mib"] * factor))

            session.case(f"{name}: {factor} of the smallest", inside)


def levers(session):
    model, shape, steps = ("tiny", (4, 12, 12), 1) if session.options.quick else ("t5-base", (32, 512, 128), 5)
    half, most = shape[0] // 2, shape[0]
    ways = {
        "the fastest plan": [],
        "recompute full": ["--recompute", "full"],
        "recompute 3": ["--recompute", 3],
        **{f"loss chunk {rows}": ["--loss-chunk-rows", rows] for rows in (16, 64, 1024, 4096)},
        **{f"micro-batch {count}": ["--micro-batch", count] for count in sorted({1, max(1, half // 4), half, most})},
        "layer-major": ["--micro-batch", half, "--accumulation", "layer-major"],
        "layer-major keep heads": ["--micro-batch", half, "--accumulation", "layer-major", "--keep-heads"],
        "layer-major 3 gradients": ["--micro-batch", half, "--accumulation", "layer-major", "--kept-gradient-blocks", 3],
    }
    if session.options.quick:
        ways = {name: flags for name, flags in ways.items() if not re.search("64|4096|heads", name)}
    for precision in ["f32"] if session.options.quick else ["bf16", "f32"]:
        first = None
        for name, flags in ways.items():

            def priced():
                # The fastest plan runs again beside each lever, because a card's clock falls as it warms.
                result = bench(session, model, shape, PRECISIONS[precision] + flags, steps)
                before = bench(session, model, shape, PRECISIONS[precision], steps) if flags and not session.options.quick else first
                numbers = {"step_ms": result["step_ms"], "peak_mib": result["peak"], "micro_batch": result["micro_batch_samples"]} | warned(result)
                if before:
                    numbers["price"] = result["step_ms"] / before["step_ms"]
                    numbers["planned_price"] = result["relative_time"] / before["relative_time"]
                return {**numbers, "relative_time": result["relative_time"]}

            found = session.case(f"{model} {precision}: {name}", priced)
            first = first or found or None


# Launchers that set the binary's environment: it launches steps and tokens as graphs, or kernel by kernel.
LAUNCHED = {way: ["env", f"LOW_MEM_T5_GRAPHS={value}"] for way, value in {"graphs": "all", "kernels": "none"}.items()}


def has_card(session):
    """Whether there is a card for the part; without a card a case says so."""

    def none():
        raise NotRun("without a card there is nothing to try")

    if not session.is_card:
        session.case("all", none)
    return session.is_card


def graphs(session):
    """Tokens and training steps, recorded and kernel by kernel. A card's clock falls as it warms, so the order alternates."""
    if not has_card(session):
        return
    quick, device = session.options.quick, session.options.device
    model, sources, tokens, batch, words, steps = ("tiny", "1,2", 6, 4, 8, 6) if quick else ("t5-base", "1,8,32", 64, 16, 128, 12)
    ways = {"f32": [], "bf16": ["--precision", "bf16"]}

    def in_turn(once, rounds=2):
        found = {way: [] for way in LAUNCHED}
        for number in range(rounds):
            for way in list(LAUNCHED)[:: 1 if number % 2 == 0 else -1]:
                found[way].append(once(way))
        return found

    def launched(ran, way):
        """Refuses a run with graphs that launched none, because the comparison would be empty."""
        lines = [line.strip() for line in ran.err.splitlines() if "launched kernel by kernel" in line]
        if way == "graphs" and lines:
            raise Failed(f"no graphs: {lines[0][:300]}")
        return ran

    def beside(of_graphs, of_kernels, unit):
        graph, kernels = statistics.median(of_graphs), statistics.median(of_kernels)
        return {f"graph_{unit}": graph, f"kernels_{unit}": kernels, "spared_percent": 100 * (1 - graph / kernels)}

    def trained(name):
        if not (session.scratch / name / "model").exists():
            train(session, name, device, 1, 1, ["--set", f"model.config={model}", *material(session, words, batch * steps)])
        return session.scratch / name / "model"

    def answers(more):
        flags = ["--model", trained("graphs-model"), "--device", device, "--json", "--scores", "--max-new-tokens", tokens, *more]
        flags += [word for prompt in ("2 + 2", "75", "after 12") for word in ("--prompt", prompt)]
        said = {way: launched(session.ours("generate", flags, launcher=launcher).expect(0), way).out for way, launcher in LAUNCHED.items()}
        if said["graphs"] != said["kernels"]:
            raise Failed("the answers or their scores differ")
        return {"answers": said["graphs"].count("\n")}

    def paced(more):
        flags = [trained("graphs-model"), "--device", device, "--json", "--batch", sources, "--source-tokens", words, "--new-tokens", tokens, *more]
        once = lambda way: launched(session.ours("bench serve", flags, launcher=LAUNCHED[way]).expect(0), way).last_json()
        found = in_turn(once)
        numbers = {}
        for at, line in enumerate(found["graphs"][0]["batches"]):
            token_ms = {way: [result["batches"][at]["answer_ms"] / tokens for result in results] for way, results in found.items()}
            numbers |= {f"{key}_of_{line['batch']}": number for key, number in beside(*token_ms.values(), "token_ms").items()}
        return numbers

    def all_graphs(numbers):
        """The number of a step's micro-batches, and of those launched as graphs. They must be equal, or times of graphs include times of kernels."""
        counts = {key: numbers[key] for key in ("micro_batches", "graph_micro_batches")}
        if counts["graph_micro_batches"] != counts["micro_batches"]:
            raise Failed("not all micro-batches were launched as graphs", counts)
        return counts

    def benched(config, samples, tokens, more):
        flags = ["--model", config, "--device", device, "--json", "--batch", 8, "--micro-batch", samples, "--source-tokens", tokens, "--target-tokens", tokens, *more]
        found = in_turn(lambda way: launched(session.ours("bench", flags, launcher=LAUNCHED[way]).expect(0), way).last_json())
        step_ms = {way: [result["step_ms"] for result in results] for way, results in found.items()}
        predicted = {f"{way}_predicted_ms": results[0]["predicted_step_ms"] for way, results in found.items()}
        return {**beside(*step_ms.values(), "step_ms"), **predicted, **all_graphs(found["graphs"][0])}

    def stepped(more):
        base = [*SMOOTH[:2], "--set", f"model.config={model}", *more, *material(session, words, batch * steps)]
        made = in_turn(lambda way: train(session, "graphs", device, steps, batch, base, launcher=LAUNCHED[way], limit=300))
        [launched(run.ran, way) for way, runs in made.items() for run in runs]
        if not made["graphs"][0].last("plan").get("repeats"):
            raise Failed("the plan of graphs records no micro-batches")
        first = made["graphs"][0]
        for run in [run for runs in made.values() for run in runs]:
            if run.of_steps("loss") != first.of_steps("loss") or run.digest != first.digest:
                raise Failed("losses or models of graphs and of kernels have other bits")
        # The first half of the steps is left out, because their micro-batches are measured or recorded.
        step_ms = {way: [statistics.median(run.of_steps("step_ms")[len(run.steps) // 2 :]) for run in runs] for way, runs in made.items()}
        peaks = {f"{way}_peak_mib": max(run.last("end")["device_peak_bytes"] for run in runs) / MIB for way, runs in made.items()}
        return {**beside(*step_ms.values(), "step_ms"), **peaks, **all_graphs(first.steps[max(first.steps)])}

    # Small micro-batches first: without graphs the host takes longer to launch their kernels than the card to run them.
    config, length = ("tiny", 8) if quick else ("chatlm-0.2b", 512)
    for samples in (1, 8):
        session.case(f"{config} bf16, 8 samples in micro-batches of {samples}: bench", lambda: benched(config, samples, length, ways["bf16"]))
    for precision, more in ways.items():
        for name, search in {"greedy": [], "4 beams": ["--num-beams", 4]}.items():
            session.case(f"{model} {precision}, {name}: the same answers", lambda: answers(more + search))
            session.case(f"{model} {precision}, {name}: a token", lambda: paced(more + search))
        of_training = ["--set", f"train.precision={precision}"]
        for samples in (batch, batch // 4):
            # Layer-major steps are not recorded. The number of rows of logits at a time changes bits, and the planner may choose another number for graphs.
            pins = {"micro_batch_samples": samples, "accumulation": "micro-batch-major", "loss_chunk_rows": 1024}
            way = [*of_training, *(word for key, value in pins.items() for word in ("--set", f"memory.{key}={value}"))]
            session.case(f"{model} {precision}, micro-batches of {samples}: a step", lambda: stepped(way))


def copies(run):
    """For each step, the milliseconds in which the card waited for copies, and the bytes that were copied to it and from it."""
    steps = [step for step in run.steps.values() if step.get("copy_wait_ms")]
    return [step["copy_wait_ms"] for step in steps], [step["copied_to_device_bytes"] + step["copied_from_device_bytes"] for step in steps]


# Suffix of settings with overlapped copies, and prefix of settings without copies.
BESIDE, ALL_THERE = ", copies beside", "all on the card"


def offload(session):
    """Runs with tensors off the card, beside a run with all tensors on the card: the losses are equal, and the time shows the price."""
    if not has_card(session):
        return
    model, batch, words, steps = ("tiny", 4, 8, 2) if session.options.quick else ("t5-base", 16, 256, 6)
    keys = {"activations": "activation", "gradients": "gradient", "weights": "weight", "moments": "optimizer"}
    base = ["--set", f"model.config={model}", "--set", "memory.accumulation=layer-major", "--set", f"memory.micro_batch_samples={batch // 2}"]
    adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-4"]
    for precision, way in {"f32": [], "bf16 stochastic": ["--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding"]}.items():
        first, waited = {}, {}

        def run(name, more):
            flags = base + adamw + way + material(session, words, batch * steps) + more
            made = train(session, "offload", session.options.device, steps, batch, flags, watched=session.is_card)
            end, plan = made.last("end"), made.last("plan")
            numbers = {"step_ms": statistics.median(made.of_steps("step_ms")), "peak_mib": end["device_peak_bytes"] / MIB,
                       "predicted_mib": plan["predicted_device_peak"] / MIB, "host_peak_mib": end["peak_rss_bytes"] / MIB,
                       "bus_gib": plan["step_bus_bytes"] / (1 << 30)}
            waited_ms, copied = (statistics.median(found or [0]) for found in copies(made))
            if waited_ms:
                # Copies that the card waits for. With files, the time includes reading and writing them.
                numbers |= {"copy_wait_ms": waited_ms, "copied_gib": copied / (1 << 30), "copied_gib_s": copied / (1 << 30) / waited_ms * 1000}
            losses = made.of_steps("loss")
            if name.startswith(ALL_THERE):
                if numbers["bus_gib"]:
                    raise Failed("not all is on the card", numbers)
                first.update(step_ms=numbers["step_ms"])
            first.setdefault("losses", losses)
            if "step_ms" in first:
                numbers["price"] = numbers["step_ms"] / first["step_ms"]
            waits = waited.get(name.removesuffix(BESIDE))
            if waits and waits > first.get("step_ms", math.inf):
                # The share of the copies' cost that overlap hides.
                numbers["hidden"] = (waits - numbers["step_ms"]) / (waits - first["step_ms"])
            waited[name] = numbers["step_ms"]
            if losses != first["losses"]:
                raise Failed(f"{name}: losses {losses} instead of {first['losses']}", numbers)
            return prediction(numbers["predicted_mib"], {"peak": numbers["peak_mib"], "smi": made.ran.card_mib}, numbers)

        # All four are pinned: otherwise the planner would offload other tensors, too.
        pinned = lambda gone: [word for what, key in keys.items() for word in ("--set", f"memory.{key}_offload={'disk' if what in gone else 'none'}")]
        off = {"everything": pinned(keys), **{what: pinned([what]) for what in keys}}
        ways = {}
        for place in ("host", "disk"):
            # All on the card again, because a card's clock falls as it warms.
            ways[f"{ALL_THERE}, before {place}"] = pinned([])
            for what, more in off.items():
                there = more + ["--set", f"memory.offload_to={place}"]
                ways[f"{what} to {place}"] = there + ["--set", "memory.copy_overlap=none"]
                if what != "moments":
                    ways[f"{what} to {place}{BESIDE}"] = there + ["--set", "memory.copy_overlap=block"]
        for name, more in ways.items():
            session.case(f"{model} {precision}: {name}", lambda: run(name, more))


def visible_cards(session):
    """The number of cards that a process may choose from."""
    if session.options.cards:
        return session.options.cards
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([card for card in visible.split(",") if card])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))


def cards_together(session):
    """One model on two cards, and on all cards, beside the same model on one card."""
    quick, number = session.options.quick, visible_cards(session)
    model, batch, words, steps = ("tiny", 4, 8, 4) if quick else ("t5-base", 64, 256, 8)
    made = {}

    def check_machine():
        report = json.loads(session.ours("doctor", ["--json"]).expect(0, 6).out)
        features = {finding["name"]: finding for finding in report["findings"]}["program"]["facts"].get("features", [])
        if session.options.device != "cuda":
            raise NotRun("each process takes a card of its own with `--device cuda` alone")
        if number < 2:
            raise NotRun(f"several cards are needed, and there are {number}")
        if "mpi" not in features:
            raise NotRun("the binary was built without the feature mpi")
        if not shutil.which("mpirun"):
            raise NotRun("no mpirun in PATH")
        made["way"] = "nccl" if "nccl" in features else "mpi"
        return {"cards": number, "by_nccl": int("nccl" in features)}

    def run(count, name, more, until=steps):
        if "way" not in made:
            raise NotRun("see the first case")
        sets = ["memory.accumulation=layer-major", "optimizer.name=adamw", "optimizer.learning_rate=1e-4"]
        flags = ["--set", f"model.config={model}", *(word for key in sets for word in ("--set", key)), *SMOOTH[:2]]
        flags += material(session, words, batch * steps) + more
        launcher = ["mpirun", "-n", count] if count > 1 else []
        directory, all_flags = train_flags(session, name, session.options.device, until, batch, flags)
        ran = session.ours("train", all_flags, launcher=launcher, limit=300).expect(0)
        return Training(directory, ran)

    def alone(way, more):
        if way not in made:
            made[way] = run(1, f"one-{way}".replace(" ", "-"), more)
        return made[way]

    def beside_one(count, way, more, sharding):
        one = alone(way, more)
        several = run(count, f"{count}-{way}-{sharding}".replace(" ", "-"), more + ["--set", f"parallel.shard={sharding}"])
        worst, step = distance(several.of_steps("loss"), one.of_steps("loss"))
        end, plan = several.last("end"), several.last("plan")
        times = {name: statistics.median(found.of_steps("step_ms")[1:]) for name, found in {"step_ms": several, "step_ms_of_one": one}.items()}
        hidden = [share for share in several.of_steps("communication_hidden")[1:] if share is not None]
        numbers = {"worst_loss_difference": worst, **times, "faster": times["step_ms_of_one"] / times["step_ms"],
                   "peak_mib": end["device_peak_bytes"] / MIB, "predicted_mib": plan["predicted_device_peak"] / MIB,
                   "peak_mib_of_one": one.last("end")["device_peak_bytes"] / MIB, "sent_mib": plan["step_sent_bytes"] / MIB,
                   "communication_ms": statistics.median(several.of_steps("communication_ms")[1:]),
                   "planned_ms": 1000 * plan["step_sent_seconds"]}
        numbers |= {"hidden": statistics.median(hidden)} if hidden else {}
        if worst > TOLERANCE[way.split()[0]]:
            raise Failed(f"the loss of step {step} is {worst:.1e} from one card's", numbers)
        return prediction(numbers["predicted_mib"], {"peak": numbers["peak_mib"]}, numbers)

    def same_bits(count):
        shards = ["--set", f"parallel.virtual_shards={number}"]
        if "bits" not in made:
            made["bits"] = run(1, "bits", shards)
        sharding = ["--set", "parallel.shard=optimizer"]
        run(count, f"bits-{count}", shards + sharding, steps // 2)
        both = run(1, f"bits-{count}", shards + sharding + ["--keep-training"])
        one = made["bits"]
        if both.of_steps("loss") != one.of_steps("loss") or both.digest is None or both.digest != one.digest:
            raise Failed(f"the models have other bits: {both.digest} and {one.digest}")
        return {"steps": len(one.steps), "model": one.digest}

    session.case("cards, feature and launcher", check_machine)
    ways = {"f32": [], "bf16 stochastic": ["--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding"]}
    for count in sorted({2, max(2, number)}):
        for way, more in ways.items():
            for sharding in ("none", "optimizer", "gradients", "weights"):
                session.case(f"{count} cards, {way}, {sharding}", lambda: beside_one(count, way, more, sharding))
        session.case(f"{count} cards, then one, with {number} virtual shards", lambda: same_bits(count))


# Speed beside PyTorch.

# name: (our precision, weights, autocast, compile, attention, optimizer). `bench` updates with Adafactor: AdamW is another optimizer.
PYTORCH = {
    "eager f32": ("f32", "float32", False, False, "eager", "adafactor"),
    "compile f32": ("f32", "float32", False, True, "eager", "adafactor"),
    "sdpa f32": ("f32", "float32", False, False, "sdpa", "adafactor"),
    "compile, fused AdamW f32": ("f32", "float32", False, True, "eager", "adamw"),
    "compile, sdpa f32": ("f32", "float32", False, True, "sdpa", "adafactor"),
    "eager bf16 autocast": ("bf16", "float32", True, False, "eager", "adafactor"),
    "compile bf16 autocast": ("bf16", "float32", True, True, "eager", "adafactor"),
    "sdpa bf16 autocast": ("bf16", "float32", True, False, "sdpa", "adafactor"),
    "compile, fused AdamW bf16 autocast": ("bf16", "float32", True, True, "eager", "adamw"),
    "compile, sdpa bf16 autocast": ("bf16", "float32", True, True, "sdpa", "adafactor"),
    "eager bf16 weights": ("bf16 stochastic", "bfloat16", False, False, "eager", "adafactor"),
    "compile bf16 weights": ("bf16 stochastic", "bfloat16", False, True, "eager", "adafactor"),
    "sdpa bf16 weights": ("bf16 stochastic", "bfloat16", False, False, "sdpa", "adafactor"),
}
# Contenders that take turns: our precisions, and PyTorch's attentions. A first torch.compile takes more than a minute.
TURNS = {"bf16": (("bf16", "bf16 stochastic"), ("eager",)), "bf16 with SDPA": (("bf16", "bf16 stochastic"), ("sdpa",)), "f32": (("f32",), ("eager", "sdpa"))}
SHAPES = {
    "tiny": dict(d_model=128, d_ff=512, d_kv=32, num_heads=4, num_layers=3, vocab_size=4096),
    "t5-small": dict(d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=6, vocab_size=32128),
    "t5-base": dict(d_model=768, d_ff=3072, d_kv=64, num_heads=12, num_layers=12, vocab_size=32128),
}


def step_tflop(model, shape):
    """The products of a step without recomputation, over whole sequences: 10^12 floating-point operations."""
    of, (batch, source, target) = SHAPES[model], shape
    inner, feed_forward = of["d_kv"] * of["num_heads"], 2 * of["d_model"] * of["d_ff"]
    attention = of["d_model"] * inner
    encoder = source * (4 * attention + feed_forward) + 2 * source * source * inner
    decoder = target * (6 * attention + feed_forward) + source * 2 * attention + 2 * target * (target + source) * inner
    head = target * of["d_model"] * of["vocab_size"]
    # Two operations for each multiply-add; backward has twice the operations of forward.
    return 6 * batch * (of["num_layers"] * (encoder + decoder) + head) / 1e12


def work(words):
    """One run of PyTorch, in a process of its own: prints its times and its peak as JSON."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    model, (batch, source, target), device, steps, mode = json.loads(words)
    _, weights, autocast, compiled, attention, optimizer = PYTORCH[mode]
    if attention == "sdpa" and not getattr(T5ForConditionalGeneration, "_supports_sdpa", False):
        print(json.dumps({"lacks": "this transformers has no SDPA for T5"}))
        return 0
    torch.manual_seed(0)
    config = T5Config(**SHAPES[model], decoder_start_token_id=0, dropout_rate=0.1, attn_implementation=attention)
    with torch.device(device):  # On a few cores random values take half a minute.
        net = T5ForConditionalGeneration(config)
    net = net.to(dtype=getattr(torch, weights)).train()
    if device != "cpu":  # The weights in f32 are freed, and do not count towards a step's peak.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if optimizer == "adamw":
        update = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    else:
        from transformers.optimization import Adafactor

        update = Adafactor(net.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    ids = [torch.randint(3, config.vocab_size, (batch, tokens), device=device) for tokens in (source, target)]
    forward, times = torch.compile(net) if compiled else net, []
    for _ in range(steps + 3):
        began = time.perf_counter()
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=autocast):
            loss = forward(input_ids=ids[0], attention_mask=torch.ones_like(ids[0]), labels=ids[1], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        update.step()
        update.zero_grad(set_to_none=True)
        loss.item()  # Waits for the device.
        times.append(1000 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_reserved(device) / MIB if device != "cpu" else None
    print(json.dumps({"step_ms": statistics.median(times[3:]), "peak": peak, "loss": float(loss)}))
    return 0


def speed(session):
    missing = [package for package in ("torch", "transformers") if not importlib.util.find_spec(package)]
    quick, device = session.options.quick, session.options.device
    # 16 k tokens in a micro-batch first. No contender splits a batch.
    shapes = [("tiny", (4, 12, 12))] if quick else [("t5-base", (16, 512, 512)), ("t5-base", (32, 512, 128)), ("t5-small", (64, 512, 128))]
    steps, rounds = (1, 2) if quick else (10, 2)
    for (model, shape), turn in [(found, turn) for found in shapes for turn in TURNS]:
        results, lacks, typed = {}, {}, {}
        precisions, attentions = TURNS[turn]
        contenders = [f"train_low_mem {precision}" for precision in precisions]
        contenders += [name for name, (precision, *_, attention, _) in PYTORCH.items() if precision in precisions and attention in attentions]
        size = f"{model} {shape[0]} x {shape[1]}+{shape[2]}, {turn}"

        def lacking():
            raise NotRun(f"not installed: {', '.join(missing)}")

        if missing and attentions == ("sdpa",):
            # Our contenders already ran in another turn.
            session.case(size, lacking)
            continue

        def once(name):
            if name not in PYTORCH:
                return bench(session, model, shape, PRECISIONS[name.partition(" ")[2]] + ["--micro-batch", shape[0]], steps)
            if missing:
                lacking()
            words = json.dumps([model, shape, device, steps, name])
            try:  # PyTorch's own failure is not the binary's. Its last line is the most informative.
                ran = session.run([sys.executable, pathlib.Path(__file__).resolve(), "--worker", words], limit=240, watched=session.is_card)
            except Failed as error:
                raise NotRun(f"PyTorch {error}") from None
            if ran.code:
                raise NotRun(f"PyTorch: exit code {ran.code}: {([''] + ran.err.strip().splitlines())[-1][-200:]}")
            result = {**ran.last_json(), "smi": ran.card_mib}
            if "lacks" in result:
                raise NotRun(result["lacks"])
            return result

        def round_of(number):
            for name in contenders if number % 2 == 0 else contenders[::-1]:
                before = len(session.commands)
                try:
                    results.setdefault(name, {})[number] = once(name)
                except (NotRun, Failed) as error:
                    # The first reason is the most informative, but a failure replaces it.
                    lacks[name] = error if isinstance(error, Failed) else lacks.get(name, error)
                typed.setdefault(name, []).extend(session.commands[before:])
            if not (ran := sum(number in found for found in results.values())):
                raise NotRun("nobody ran")
            return {"contenders": ran, "of": len(contenders)}

        def summary(name):
            found, session.commands = results.get(name), typed.get(name, [])
            if not found or isinstance(lacks.get(name), Failed):
                raise lacks.get(name, NotRun("no time left"))
            ms = statistics.median(result["step_ms"] for result in found.values())
            numbers = {"step_ms": ms, "tokens_per_second": 1000 * shape[0] * (shape[1] + shape[2]) / ms, "rounds": len(found),
                       **of_peak(session, 1000 * step_tflop(model, shape) / ms, name.split()[1] if name not in PYTORCH else PYTORCH[name][0])}
            for key, title in [("peak", "peak_mib"), ("smi", "smi_mib")]:
                peaks = [result[key] for result in found.values() if result.get(key) is not None]
                numbers |= {title: max(peaks)} if peaks else {}
            ours = results.get(f"train_low_mem {PYTORCH[name][0]}", {}) if name in PYTORCH else {}
            ratios = [found[number]["step_ms"] / ours[number]["step_ms"] for number in found if number in ours]
            return {**numbers, "time_over_ours": statistics.median(ratios)} if ratios else numbers

        for number in range(rounds):
            session.case(f"{size}: round {number + 1}", lambda: round_of(number))
        for name in contenders:
            session.case(f"{size}: {name}", lambda: summary(name))


# Models that are larger than the budgets in which they are trained.


@functools.lru_cache(None)
def pool_of_values(exponent):
    """Random numbers in bf16, of either sign. Their absolute values are from 2^exponent (even after adding 127) to four times that."""
    draw, count = random.Random(exponent), 8 << 20
    pool = bytearray(2 * count)
    # The low byte has seven bits of the mantissa and one of the exponent, the high byte the rest of the exponent and the sign.
    pool[0::2] = draw.randbytes(count)
    pool[1::2] = draw.randbytes(count).translate(bytes((exponent + 127) // 2 | (byte & 0x80) for byte in range(256)))
    return bytes(pool)


def cheap_values(lengths, deviation):
    """A tensor's values, as `verify_large.make_model` takes them. Tensors of about one size share a pool, so writing is as fast as the disk."""
    left, start = 2 * math.prod(lengths), 2 * (math.prod(lengths) * 7919 % 65_521)
    if deviation is None:
        yield b"\x80\x3f" * (left // 2)
        return
    # The root of the mean square is 2.4 times the smallest size.
    pool = pool_of_values(2 * round((math.log2(deviation / 2.4) + 127) / 2) - 127)
    while left > 0:
        part = memoryview(pool)[start : start + left]
        yield part
        left, start = left - len(part), 0


def large(session):
    """Shapes of 3 and 11 billion parameters in 2 GiB of the card, beside ample budgets: losses, memory and the price."""
    if not has_card(session):
        return
    quick, device, made = session.options.quick, session.options.device, {}
    source, target, steps = (8, 4, 2) if quick else (256, 64, 3)
    # All weights cross the bus in every step, regardless of its tokens: 16 k of them in a source.
    batch, adapted = (2, 2) if quick else (64, 16)
    rows = lambda: material(session, source, batch * steps, target)
    # Without a budget a run takes a small plan that is nearly the fastest.
    free = None if quick or not cards(session) else int(0.8 * float(cards(session)[2].split()[0]))

    def run(samples, flags, budgets):
        """A run with budgets of card and host. Its files are deleted at once."""
        limits = [word for flag, mib in zip(("--device-memory-budget", "--memory-budget"), budgets) if mib for word in (flag, f"{mib}MiB")]
        limits += ["--set", "checkpoint.every_minutes=none"]
        try:
            return train(session, "large", device, steps, samples, flags + limits, limit=420, watched=True)
        finally:
            shutil.rmtree(session.scratch / "large", ignore_errors=True)

    def smallest(flags):
        """The card's budget that a refusal names, for shapes that fit into any budget."""
        said = train(session, "large", device, steps, batch, flags + ["--device-memory-budget", "1MiB"], codes=(3,)).ran.err
        return math.ceil(float(re.search(r"--device-memory-budget (\d+(?:\.\d+)?)MiB", said)[1]))

    def tried(name, samples, flags, budgets):
        if quick and budgets[0]:
            budgets = (smallest(flags()), 256)
        found = run(samples, flags(), budgets)
        end, plan = found.last("end"), found.last("plan")
        numbers = {"loss": found.of_steps("loss")[-1], "step_ms": statistics.median(found.of_steps("step_ms")[1:]),
                   "micro_batch": plan["micro_batch_samples"], "bus_gib": plan["step_bus_bytes"] / (1 << 30),
                   "host_peak_mib": end["peak_rss_bytes"] / MIB}
        numbers |= {key: mib for key, mib in zip(("budget_mib", "host_budget_mib"), budgets) if mib}
        if name in made:
            numbers["time_over_first"] = numbers["step_ms"] / made[name]["step_ms"]
            numbers["worst_loss_difference"], _ = distance(found.of_steps("loss"), made[name]["losses"])
        made.setdefault(name, {**numbers, "losses": found.of_steps("loss")})
        numbers = prediction(plan["predicted_device_peak"] / MIB, {"peak": end["device_peak_bytes"] / MIB, "smi": found.ran.card_mib}, numbers)
        for peak, budget in [(max(numbers["peak_mib"], numbers.get("smi_mib", 0) - SMI_ROUNDING_MIB), budgets[0]), (numbers["host_peak_mib"], budgets[1])]:
            if budget and peak > budget:
                raise Failed(f"a peak of {peak:.0f} MiB is above {budget} MiB", numbers)
        if numbers.get("worst_loss_difference", 0) > TOLERANCE["bf16"]:
            raise Failed("losses depend on the budget", numbers)
        return numbers

    whole = "tiny" if quick else "t5-3b"
    trained = ["--set", f"model.config={whole}", "--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding",
               "--set", "train.gradient_precision=bf16", *SMOOTH[2:], *([] if quick else ["--set", "model.vocab_size=32128"])]

    base = session.scratch / "base"

    def until_the_end(lengths, deviation):
        for values in cheap_values(lengths, deviation):
            if session.left() < 2:
                raise NotRun("the part's time was over")
            yield values

    def make_base():
        import verify_large

        shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4} if quick else verify_large.SHAPES["xxl"]
        need = sum(2 * math.prod(lengths) for _, lengths, _ in verify_large.parameters(shape))
        if shutil.disk_usage(session.scratch).free < need + (4 << 30):
            raise NotRun(f"{need / 1e9:.0f} GB and 4 GiB of room are needed beside --output")
        rows()
        verify_large.make_model(base, shape, session.scratch / "material" / "sample-data" / "sample-tokenizer.json", until_the_end)
        return {"gb": need / 1e9}

    def adapter():
        if not (base / "config.json").exists():
            raise NotRun("there is no model")
        return ["--lora", "--set", f"model.init_from={base}", "--set", "lora.rank=16", "--set", "train.precision=bf16", *rows()]

    name = "an adapter of a small shape" if quick else "an adapter of flan-t5-xxl's shape"
    session.case(f"{whole}, all trained, in 2 GiB", lambda: tried(whole, batch, lambda: trained + rows(), (2048, 16384)))
    session.case(f"{whole}, all trained, ample", lambda: tried(whole, batch, lambda: trained + rows(), (free, None)))
    session.case(f"{name}: random weights", make_base)
    session.case(f"{name}, in 2 GiB beside 1 GiB", lambda: tried(name, adapted, adapter, (2048, 1024)))
    session.case(f"{name}, ample", lambda: tried(name, adapted, adapter, (free, None)))
    shutil.rmtree(base, ignore_errors=True)


def sanitizer(session):
    device = session.options.device
    step = ["bench", "--json", "--device", device, "--model", "tiny", "--batch", 1, "--source-tokens", 8, "--target-tokens", 8, "--steps", 1]

    def check(tool, words):
        if not shutil.which("compute-sanitizer"):
            raise NotRun("no compute-sanitizer in PATH")
        # A measurement launches thousands of kernels, each of which takes a hundred times as long here.
        measured = ["env", "LOW_MEM_T5_PRICES=built-in"]
        ran = session.run([*measured, "compute-sanitizer", "--tool", tool, "--error-exitcode", 9, session.binary, *words], limit=300)
        said = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", ran.out + ran.err)
        # Without a summary the tool checked nothing.
        if ran.code or said[-1:] != ["0"]:
            raise Failed(f"exit code {ran.code}: {(ran.out + ran.err).strip()[-600:]}")
        return {"findings": 0}

    def answer(search):
        if not (session.scratch / "sanitized" / "model").exists():
            train(session, "sanitized", "cpu", 1, 1)
        return ["generate", "--model", session.scratch / "sanitized" / "model", "--device", device, "--prompt", "2 + 2", "--max-new-tokens", 4, *search]

    off = [word for flag in ("", "-weights", "-gradients") for word in (f"--offload{flag}", session.scratch)]
    steps = {**PRECISIONS, "bf16, an adapter": [*PRECISIONS["bf16"], "--lora", 2],
             "bf16, off the card": [*PRECISIONS["bf16"], "--accumulation", "layer-major", *off, "--offload-to", "host", "--copy-overlap", "block"]}
    for tool in ["memcheck", "racecheck"]:
        for name, flags in steps.items():
            session.case(f"{name}: {tool}", lambda: check(tool, step + flags))
        for name, search in {"answers": [], "answers, 2 beams": ["--num-beams", 2]}.items():
            session.case(f"{name}: {tool}", lambda: check(tool, answer(search)))


# Results.


def cards(session):
    """The card's description by nvidia-smi, or nothing."""
    query = ["nvidia-smi", "-i", session.card, "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    return fields if done.returncode == 0 and len(fields) == 4 else None


@functools.lru_cache(None)
def machine(session):
    """Facts about the machine and the versions, which a page of numbers must have."""
    name, driver, size, capability = cards(session) or ["unknown: nvidia-smi shows none"] + [None] * 3
    try:
        said = subprocess.run([session.binary, "--version"], capture_output=True, text=True, env=session.environment, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {"binary": said.strip() or "does not start", "binary's SHA-256": digest(session.binary), "device": session.options.device,
             "card": name, "card's memory": size, "compute capability": capability, "driver": driver,
             "machine": f"{platform.machine()}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()} {platform.release()}",
             "load": f"{os.getloadavg()[0]:.1f}", "Python": platform.python_version()}
    for package in ["torch", "transformers"]:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return {key: value for key, value in facts.items() if value}


def cell(value):
    if isinstance(value, float):
        return f"{value:.3e}" if 0 < abs(value) < 1e-2 else f"{value:.6g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "/").replace("\n", " ")


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |",
            *("| " + " | ".join(map(cell, row)) + " |" for row in rows), ""]


def page(session):
    count = lambda cases, verdict: sum(1 + case.get("others", 0) for case in cases if case["verdict"] == verdict)
    name = lambda case: case["case"] + (f" and {case['others']} others" if "others" in case else "")
    cases, facts = session.cases, {"date": session.begun, **machine(session)}
    verdict = f"{count(cases, 'failed')} failed, {count(cases, 'ok')} ok, {count(cases, 'not run')} not run"
    lines = [f"# train_low_mem on {facts['card']}: {verdict}", ""]
    parts = {part: [case for case in cases if case["part"] == part] for part in PARTS}
    parts = {part: found for part, found in parts.items() if found}
    lines += table(["part", "failed", "ok", "not run", "seconds"],
                   [[part, *(count(found, verdict) for verdict in ("failed", "ok", "not run")), sum(case["seconds"] for case in found)]
                    for part, found in parts.items()])
    for case in cases:
        if case["verdict"] == "failed":
            command = f"\n  `{case['commands'][-1]}`" if case["commands"] else ""
            lines += [f"- **failed** {case['part']}: {case['case']}: {cell(case['reason'])}{command}"]
    lines += [""] + table(["", ""], facts.items())
    if session.options.quick:
        lines += ["Made with `--quick`: the shapes are too small to say anything of speed.", ""]
    lines += not_measured(session) + [""]
    for part, found in parts.items():
        names = list(dict.fromkeys(key for case in found for key, value in case["numbers"].items() if not isinstance(value, list)))
        ranked = sorted(found, key=lambda case: ["failed", "ok", "not run"].index(case["verdict"]))
        rows = [[case["verdict"], name(case), *(case["numbers"].get(key, "") for key in names), case["seconds"], case["reason"][:120]]
                for case in ranked]
        claim = re.search(rf"^\| {part} \| (.*) \|$", __doc__, re.MULTILINE)[1]
        lines += [f"## {part}", "", f"Ok: {claim}.", ""] + table(["verdict", "case", *(name.replace("_", " ") for name in names), "seconds", "reason"], rows)
    return "\n".join(lines)


def not_measured(session):
    """Lines on everything that was not measured, and why; the tables of the parts name the cases."""
    reasons = {}
    for part, reason in session.unmeasured.items():
        reasons.setdefault(reason, []).append(part)
    lines = [f"- **not measured**, {reason}: {', '.join(parts)}" for reason, parts in reasons.items()]
    counts = {}
    for case in session.cases:
        if case["verdict"] == "not run":
            of = case["part"], cell(case["reason"])
            counts[of] = counts.get(of, 0) + 1 + case.get("others", 0)
    return lines + [f"- **not measured** of {part}: {count} cases: {reason}" for (part, reason), count in counts.items()]


def write_results(session):
    """Writes both files whole, after every case, so that a killed script keeps its results."""
    results = {"begun": session.begun, "arguments": sys.argv[1:], "machine": machine(session), "unmeasured": session.unmeasured,
               "cases": session.cases}
    for name, text in [("verify_card.json", json.dumps(results, indent=1) + "\n"), ("verify_card.md", page(session))]:
        path = session.options.output / name
        try:
            path.with_suffix(".part").write_text(text)
            os.replace(path.with_suffix(".part"), path)
        except OSError as error:  # For example, a full disk: models are deleted at the end of a part, and the next case writes again.
            print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)


def positive(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def seconds_of(part, options, left):
    """Seconds for a part: at most its minutes, and its share of the seconds that are left, among the parts that are left."""
    parts = list(options.parts)
    shares = sum(options.shares[later] for later in parts[parts.index(part) :])
    return min(60 * options.parts[part], left * options.shares[part] / shares)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, help="train_low_mem, built with the feature cuda")
    parser.add_argument("--parts", help="names, separated by commas, each with its minutes after a colon where it has its own [default: all]")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("verify-card"), help="[default: verify-card]")
    parser.add_argument("--minutes", type=positive, default=10.0, help="at most so many for each part [default: 10]")
    parser.add_argument("--budget", type=positive, help="at most so many seconds for all parts together; without --parts those that matter most come first")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script without a card")
    parser.add_argument("--cards", type=int, default=0, help="cards to train on together [default: as many as there are]")
    parser.add_argument("--libraries", type=pathlib.Path, nargs="+", default=[], help="directories of CUDA's libraries, if not installed")
    parser.add_argument("--quick", action="store_true", help="shapes that take seconds on anything")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parts = options.parts or ",".join(SHARES if options.budget else PARTS)
    named = [part.partition(":")[::2] for part in options.parts.split(",")]
    unknown = [part for part, _ in named if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    try:
        options.parts = {part: positive(minutes) if minutes else options.minutes for part, minutes in named}
        # Minutes after a colon are shares, too.
        options.shares = {part: float(minutes) if minutes else SHARES[part] for part, minutes in named}
    except ValueError:
        parser.error(f"--parts {options.parts}: expected minutes after a colon, as in speed:5")
    if not options.worker and (options.binary is None or not options.binary.is_file()):
        parser.error("expected --binary FILE, the binary under test")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        parser.error(f"--device {options.device}: expected cuda, cuda:N or cpu")
    return options


def main():
    options, began = arguments(), time.monotonic()
    if options.worker:
        return work(options.worker)
    # A script that is ended by a signal leaves no running command and no scratch files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.output.mkdir(parents=True, exist_ok=True)
    options.output = options.output.resolve()
    session, end = Session(options), began + (options.budget or math.inf) - SECONDS_OF_THE_END
    try:
        write_results(session)
        for part in options.parts:
            session.try_part(part, seconds_of(part, options, end - time.monotonic()))
    finally:
        shutil.rmtree(session.scratch, ignore_errors=True)
    print(f"see {options.output / 'verify_card.md'}")
    return 1 if any(case["verdict"] == "failed" for case in session.cases) else 0


if __name__ == "__main__":
    sys.exit(main())
