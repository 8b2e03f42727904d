#!/usr/bin/env python3
"""Tries random cases on a card that no test has: predicted and counted memory, results beside the CPU's, and failures.

    python3 scripts/card_held_out.py --binary target/release/train_low_mem [--seed 1] [--cases 60] [--only 7,12] [--inference] [--off-card] [--jobs 2] [--output DIR]

Needs a build with the feature `cuda` and a card, or a build over the emulated card (docs/gpu-testing.md), whose report has the bytes of tensors.
The number and the seed decide a case: the model's shape, precision, optimizer, adapter, levers, graphs, clipping, rows, how much
memory the driver locks, and a budget of the card. The run on the card is compared with a run on the CPU, and with a plain run, whose settings change no bit:
everything is on the card, kernel by kernel. Some runs are killed and resumed, also with other settings. In some an allocation fails. Some have
a learning rate that leaves no finite gradient. Some models are then evaluated and answer prompts. With --inference every model is, and is trained
on the CPU. With --off-card every case trains with weights, gradients, activations or moments off the GPU. Writes OUTPUT/card_held_out.jsonl,
one line a case, and prints a table. Exits 1 if a case failed.
"""

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from verify_card import MIB, TOLERANCE, Training, digest, distance, has_checkpoint, quoted

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "data" / "sample-tokenizer.json"
# The emulated card takes a minute for a processor's second.
LONGEST_SECONDS = 600
# The row "pool" of a bill (`crates/planner/src/place.rs`): the units of small and of large tensors, and a share for gaps between tensors.
POOL_UNIT, POOL_FACTOR = 4 * MIB, 1.04

# Another order of sums on the CPU. A relu's kink amplifies rounding. So does Adafactor if gradients are only rounding errors, because it divides them
# by their size. If the CPU differs from itself in a case, the case proves nothing about the card, unless the card differs this many times as much.
OTHER_ORDER, MAX_TIMES = {"LOW_MEM_T5_ISA": "portable"}, 4

# Keys that the CPU refuses.
OF_CARDS = ["memory.offload_to", "memory.copy_overlap", "memory.weight_copies", "memory.recorded_micro_batches"]
OFFLOADS = ["memory.activation_offload", "memory.gradient_offload", "memory.weight_offload", "memory.optimizer_offload"]
# Kernel by kernel, on a card that works in the order of the requests.
PLAIN = {"LOW_MEM_T5_GRAPHS": "none", "LOW_MEM_T5_EMULATED_STREAMS": "", "LOW_MEM_T5_EMULATED_ORDER": "", "LOW_MEM_T5_EMULATED_LOCKABLE": "0"}
# The exit code of a run with steps that are not finite.
DIVERGED = 5


def sets(**keys):
    return {name.replace("__", "."): value for name, value in keys.items()}


def shape(draw):
    """A small model of odd sizes."""
    gated = draw.random() < 0.6
    kind = draw.choice(["relu", "gelu_new", "gelu", "silu"])
    return {
        "d_model": draw.choice([24, 33, 40, 56, 65, 72, 96, 100]), "d_kv": draw.choice([7, 8, 12, 16, 17, 32, 64, 128, 136]),
        "num_heads": draw.choice([1, 2, 3, 5]), "d_ff": draw.choice([31, 64, 90, 129, 200]),
        "num_layers": draw.choice([1, 1, 2, 3]), "num_decoder_layers": draw.choice([1, 1, 2, 3]),
        "feed_forward_proj": f"gated-{kind.removesuffix('_new')}" if gated else kind.removesuffix("_new"),
        "tie_word_embeddings": draw.random() < 0.6,
        **dict(zip(["relative_attention_num_buckets", "relative_attention_max_distance"], draw.choice([(8, 11), (32, 128), (32, 17)]))),
    }


def wide(draw, model):
    """The same with a large table, so that tensors need more memory than the fixed costs."""
    return {**model, "d_model": draw.choice([96, 104, 131]), "num_layers": 1, "num_decoder_layers": 1, "d_kv": 16, "num_heads": 3}


def case(number, seed, is_off=False):
    """The case of a number, with all its settings."""
    draw = random.Random(f"{seed} {number}")
    model, is_wide = shape(draw), number % 3 == 0
    if is_wide:
        model = wide(draw, model)
    vocabulary = draw.choice([30_001, 50_021] if is_wide else [1_024, 1_025, 1_031, 2_047])
    precision = draw.choice(["f32", "f32", "bf16", "stochastic", "stochastic with bf16 gradients"])
    adapter = draw.choice(["", "", "", "lora", "dora", "rslora", "saved"])
    batch, source, target = draw.choice([2, 3, 5]), draw.choice([3, 9, 17, 31]), draw.choice([2, 2, 5, 13])
    if is_wide:
        batch, source, target = 2, min(source, 9), min(target, 5)
    optimizer = draw.choice(["adafactor", "adamw"])
    keys = sets(train__batch_size=batch, data__max_source_tokens=source, data__max_target_tokens=target, run__seed=draw.randint(1, 999),
                train__dropout=draw.choice([0, 0.1]), optimizer__name=optimizer, optimizer__learning_rate=1e-3, run__log_every_steps=1,
                train__eval_samples=draw.choice([1, 3]), train__eval_generate_samples=draw.choice([0, 1, 2]), train__sample_generations=0,
                train__eval_max_new_tokens=3, checkpoint__every_steps=2)
    if precision != "f32":
        keys |= sets(train__precision="bf16")
    if precision.startswith("stochastic") and not adapter:
        keys |= sets(train__master_weights="stochastic-rounding")
    if precision.endswith("gradients") and not adapter:
        keys |= sets(train__gradient_precision="bf16")
    if optimizer == "adafactor" and draw.random() < 0.3:
        keys |= sets(optimizer__beta1=0.9)
    if adapter:
        keys |= sets(lora__rank=draw.choice([1, 3, 8]), lora__dropout=draw.choice([0, 0.1]))
        keys |= {"dora": sets(lora__dora="true"), "rslora": sets(lora__rslora="true"),
                 "saved": sets(lora__modules_to_save='["lm_head"]')}.get(adapter, {})
        base = draw.choice(["none", "int8", "nf4"])
        keys |= sets(model__base_precision=base) if base != "none" else {}
    keys |= levers(draw, precision, optimizer, batch)
    environment = {"LOW_MEM_T5_GRAPHS": draw.choice(["none", "tokens", "all"]),
                   "LOW_MEM_T5_EMULATED_STREAMS": draw.choice(["", "early", "late"]),
                   "LOW_MEM_T5_EMULATED_ORDER": draw.choice(["", "random"])}
    drawn = {
        "number": number, "model": model, "vocabulary": vocabulary, "precision": precision, "adapter": adapter, "keys": keys,
        "steps": 8 if environment["LOW_MEM_T5_GRAPHS"] == "all" and not is_wide else 3, "environment": {k: v for k, v in environment.items() if v},
        "even": draw.random() < 0.8, "budget": draw.choice([None, None, 1.0, 1.05, 1.2, 1.5]),
        "then": draw.choice(["", "resume", "answers", "beams"]), "rate": "",
    }
    return off_card(draw, later_draws(draw, drawn)) if is_off else later_draws(draw, drawn)


def later_draws(draw, case):
    """Draws that come after all others, so that a case keeps the draws of an older script."""
    keys, environment = case["keys"], case["environment"]
    layers = keys.get("memory.accumulation") == "layer-major"
    clipping, evaluations = draw.choice([None, 0, 0.05]), draw.choice([None, 1, 2])
    keys |= sets(train__grad_clip_norm=clipping) if clipping is not None else {}
    keys |= sets(train__eval_every_steps=evaluations) if evaluations else {}
    if draw.random() < 0.7 and "memory.micro_batch_samples" not in keys:
        keys |= sets(memory__micro_batch_samples=draw.randint(1, keys["train.batch_size"]))
    if layers and draw.random() < 0.5:
        keys |= {"memory.weight_offload": "disk", "memory.offload_to": "host", "memory.copy_overlap": draw.choice(["none", "block"])}
        keys |= {"memory.activation_offload": draw.choice(["none", "disk"])}
    if not layers and draw.random() < 0.4:
        keys |= sets(memory__accumulation="micro-batch-major", memory__recorded_micro_batches=draw.choice(["none", "all", "all"]))
        environment.pop("LOW_MEM_T5_GRAPHS")
        case["steps"] = 6
    environment |= {name: value for name, value in {"LOW_MEM_T5_EMULATED_LOCKABLE": draw.choice(["", "", "0", "20000", "150000", "3000000"])}.items() if value}
    case["then"] = draw.choice([case["then"], case["then"], "resume", "another lever", "no memory"])
    if case["then"] == "another lever":
        keys.setdefault("memory.micro_batch_samples", 2)
    if case["then"] == "no memory":
        # A smaller plan has to exist.
        for name in ["micro_batch_samples", "loss_chunk_rows", "recompute_blocks"]:
            keys.pop(f"memory.{name}", None)
        case["budget"] = None
    if draw.random() < 0.12:
        case |= {"rate": "diverges", "then": "", "steps": draw.choice([4, 8])}
        keys |= sets(optimizer__learning_rate=1e30)
    case["answers_in_bf16"] = draw.random() < 0.3
    if draw.random() < 0.15:
        # A table of positions as large as the tensors that may be offloaded.
        case["model"] |= {"relative_attention_num_buckets": 4096, "relative_attention_max_distance": 9000}
    keys |= draw.choice([{}, {}, sets(optimizer__weight_decay=0.1), sets(schedule__name="linear", schedule__warmup_steps=2)])
    if case["adapter"]:
        keys |= draw.choice([{}, {}, sets(lora__targets='["q", "v"]'), sets(lora__targets='["wo", "o"]', lora__init="gaussian")])
    else:
        keys |= draw.choice([{}, {}, sets(train__freeze='["encoder"]'), sets(train__freeze='["shared"]'), sets(train__freeze='["decoder.block.0"]')])
        keys |= draw.choice([{}, {}, sets(optimizer__scale_parameter="true")]) if keys["optimizer.name"] == "adafactor" else {}
    return case


def off_card(draw, case):
    """The case with most of what may wait off a card there, and weights that are large enough for it."""
    keys, environment = case["keys"], case["environment"]
    for name in ["micro_batch_samples", "recompute_blocks", "recorded_micro_batches", "weight_copies"]:
        keys.pop(f"memory.{name}", None)
    case["model"] |= {"d_model": draw.choice([65, 96, 100, 131]), "num_heads": draw.choice([3, 5]), "d_kv": draw.choice([16, 17, 32])}
    often = lambda value, other, share=0.75: value if draw.random() < share else other
    then = draw.choice(["resume", "another lever", "no memory", case["then"]])
    # A run that diverges has no losses to compare.
    case["then"] = "" if case["rate"] else then
    if then == "no memory":
        # A smaller plan has to be there.
        keys.pop("memory.loss_chunk_rows", None)
        case["budget"] = None
    else:
        keys |= sets(memory__micro_batch_samples=draw.randint(1, keys["train.batch_size"]))
    keys |= {"memory.accumulation": "layer-major", "memory.weight_offload": often("disk", "none", 0.9)}
    keys |= {f"memory.{name}_offload": often("disk", "none") for name in ["activation", "gradient"]}
    if keys["optimizer.name"] == "adamw":
        keys |= sets(memory__optimizer_offload=often("disk", "none"))
    if any(keys.get(key) == "disk" for key in OFFLOADS):
        keys |= {"memory.offload_to": draw.choice(["host", "host", "disk"]), "memory.copy_overlap": often("block", "none")}
    case["steps"] = 3
    environment.pop("LOW_MEM_T5_GRAPHS", None)
    environment |= {"LOW_MEM_T5_EMULATED_STREAMS": draw.choice(["early", "late", "all-late"]),
                    "LOW_MEM_T5_EMULATED_LOCKABLE": draw.choice(["1000000000", "1000000000", "150000", "3000000"])}
    if draw.random() < 0.25:
        environment |= {"LOW_MEM_T5_EMULATED_PINNABLE": draw.choice(["0", "5000000"])}
    return case


def levers(draw, precision, optimizer, batch):
    """Pins of memory levers; most cases leave some to the planner."""
    keys = {}
    if draw.random() < 0.5:
        keys |= sets(memory__micro_batch_samples=draw.randint(1, batch))
    if draw.random() < 0.4:
        keys |= sets(memory__loss_chunk_rows=draw.choice([1, 3, 7, 33]))
    order = draw.choice(["auto", "micro-batch-major", "layer-major", "layer-major"])
    if order != "auto":
        keys |= sets(memory__accumulation=order)
    if order == "layer-major":
        for name in ["activation", "gradient", "weight", "optimizer"]:
            if name != "optimizer" or optimizer == "adamw":
                keys |= {f"memory.{name}_offload": draw.choice(["none", "disk"])}
        if "disk" in keys.values():
            keys |= sets(memory__offload_to=draw.choice(["host", "disk"]), memory__copy_overlap=draw.choice(["none", "block"]))
        if draw.random() < 0.3:
            keys |= sets(memory__attention_heads="keep")
    elif draw.random() < 0.4:
        keys |= sets(memory__recompute_blocks=draw.choice([0, 1, 2]))
    if precision == "bf16" and draw.random() < 0.5:
        keys |= sets(memory__weight_copies=draw.choice(["none", "bf16"]))
    return keys


def rows(case, path):
    """Rows of different lengths, or all longer than the limits."""
    draw = random.Random(case["number"])
    words = lambda most: " ".join(str(draw.randint(0, 99)) for _ in range(most if case["even"] else draw.randint(1, most)))
    path.write_text("".join(json.dumps({"prompt": words(33), "response": words(15)}) + "\n" for _ in range(64)))


class Wrong(Exception):
    """A forbidden result of a case."""


class Tried:
    """A case in progress: its directory, and the runs so far."""

    def __init__(self, options, case, directory):
        self.options, self.case, self.directory = options, case, directory
        self.commands, self.said = [], []
        rows(case, directory / "rows.jsonl")

    def ours(self, words, device, until=None, limit=LONGEST_SECONDS, report=None, variables=None):
        """Runs the binary. Returns exit code, standard output and standard error."""
        words = [str(self.options.binary.resolve()), *map(str, words), "--device", device]
        environment = {**os.environ, "LOW_MEM_T5_PRICES": "built-in", **(self.case["environment"] if device == "cuda" else {}),
                       **(variables or {})}
        environment.pop("RUST_BACKTRACE", None)
        if report:
            environment["LOW_MEM_T5_EMULATED_REPORT"] = str(report)
        self.commands.append(" ".join(map(quoted, words)))
        with open(self.directory / "out", "w+") as out, open(self.directory / "err", "w+") as err:
            child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.directory, env=environment)
            began = time.monotonic()
            while child.poll() is None:
                time.sleep(0.01)
                if time.monotonic() - began > limit or (until and until()):
                    child.send_signal(signal.SIGKILL)
                    child.wait()
            out.seek(0), err.seek(0)
            ran = child.returncode, out.read(), err.read()
        if time.monotonic() - began > limit:
            raise Wrong(f"did not end within {limit} s")
        if "panicked" in ran[2]:
            raise Wrong(f"a panic: {ran[2][-600:]}")
        self.said += [line for line in ran[2].splitlines() if line.startswith("warning")]
        return ran

    def flags(self, name, more=(), device="cuda", without=(), pins=None):
        keys = {"data.train": "rows.jsonl", "data.validation": "rows.jsonl", "data.tokenizer": TOKENIZER, **self.case["keys"]}
        keys = {key: value for key, value in keys.items() if key not in without} | (pins or {})
        if device == "cpu":
            keys = {key: value for key, value in keys.items() if key not in OF_CARDS}
        if self.case["adapter"]:
            keys["model.init_from"] = "base/model"
        else:
            keys |= {"model.config": "tiny", "model.vocab_size": self.case["vocabulary"], "model.overrides": inline(self.case["model"])}
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        return ["train", *words, "--max-steps", self.case["steps"], "--output", name, *more]

    def base(self):
        """The model below an adapter."""
        keys = {"model.config": "tiny", "model.vocab_size": self.case["vocabulary"], "model.overrides": inline(self.case["model"]),
                "data.train": "rows.jsonl", "data.tokenizer": TOKENIZER, "train.batch_size": 1, "data.max_source_tokens": 4,
                "data.max_target_tokens": 2}
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        code, _, err = self.ours(["train", *words, "--max-steps", 1, "--output", "base"], "cpu")
        if code:
            raise Wrong(f"the base: exit code {code}: {err[-400:]}")

    def trained(self, name, device, more=(), without=(), pins=None, **how):
        code, _, err = self.ours(self.flags(name, more, device, without, pins), device, **how)
        if code == 2:
            raise NotImplementedError(said(err))
        if code and not (code == DIVERGED and self.case["rate"]):
            raise Wrong(f"{name}: exit code {code}: {said(err)}")
        return Training(self.directory / name, code)

    def budget(self, words=None):
        """The budget of the case, for a run or for other words: a multiple of the smallest budget that a refusal names."""
        if not self.case["budget"]:
            return [], {}
        code, _, err = self.ours([*(words or self.flags("refused")), "--device-memory-budget", "1MiB"], "cuda")
        found = re.search(r"--device-memory-budget (\d+(?:\.\d+)?)(MiB|GiB)", err)
        if code == 2:
            raise NotImplementedError(said(err))
        if code != 3 or not found:
            raise Wrong(f"a budget of 1 MiB: exit code {code}: {said(err)}")
        smallest = float(found[1]) * (1024 if found[2] == "GiB" else 1)
        mib = math.ceil(smallest * self.case["budget"])
        return ["--device-memory-budget", f"{mib}MiB"], {"smallest_mib": smallest, "budget_mib": mib}

    def trial(self):
        """The whole case. Returns its numbers, or raises."""
        case = self.case
        if case["adapter"]:
            self.base()
        if self.options.inference:
            # A diverged model has no meaningful answers.
            case["keys"]["optimizer.learning_rate"], case["rate"] = 1e-3, ""
            self.trained("card", "cpu")
            return self.answers("beams" if case["then"] == "beams" else "answers")
        budget, numbers = self.budget()
        report = self.directory / "report.json"
        run = self.trained("card", "cuda", budget, report=report)
        if run.ran == DIVERGED:
            # The run ends without counts.
            self.beside_the_plain(run)
            return numbers | self.diverged(run)
        numbers |= memory(run, report)
        if budget and numbers["peak_mib"] > numbers["budget_mib"]:
            raise Wrong(f"the peak is above the budget: {numbers}")
        if numbers["peak_mib"] > numbers["predicted_mib"]:
            raise Wrong(f"the peak is above the prediction: {numbers}")
        if numbers.get("locked_left_bytes"):
            raise Wrong(f"memory stays locked: {numbers}")
        numbers |= self.diverged(run) if case["rate"] else self.beside_the_cpu(run)
        numbers |= self.beside_the_plain(run)
        if case["then"] == "resume":
            numbers |= self.resumed(run, budget)
        elif case["then"] == "another lever":
            numbers |= self.resumed(run, budget, *self.another_lever(run)) if self.has_its_cut(run) else {}
        elif case["then"] == "no memory":
            numbers |= self.without_memory(run, budget, report)
        elif case["then"]:
            numbers |= self.answers(case["then"])
        return numbers

    def beside_the_cpu(self, run):
        """Distances from the CPU's run, which must be within rounding."""
        cpu = self.trained("cpu", "cpu")
        worst, step = distance(run.of_steps("loss"), cpu.of_steps("loss"))
        norms, _ = distance(run.of_steps("grad_norm"), cpu.of_steps("grad_norm"))
        numbers = {"worst_loss": worst, "worst_norm": norms}
        if worst > self.tolerance():
            of_itself, _ = distance(self.trained("other-order", "cpu", variables=OTHER_ORDER).of_steps("loss"), cpu.of_steps("loss"))
            if worst > MAX_TIMES * of_itself:
                raise Wrong(f"the loss of step {step} is {worst:.1e} from the CPU's, which is {of_itself:.1e} from itself: "
                            f"{run.of_steps('loss')}, {cpu.of_steps('loss')}")
            numbers |= {"cpu_from_itself": of_itself}
        return numbers

    def resumed(self, whole, budget, more=(), variables=None):
        """A run that is killed after a checkpoint and resumed has the losses of an undisturbed run. With more flags it is resumed in another budget."""
        metrics = self.directory / "killed" / "metrics.jsonl"
        code, _, _ = self.ours(self.flags("killed", budget), "cuda", until=lambda: has_checkpoint(metrics))
        if code != -signal.SIGKILL:
            return {}
        again = self.trained("killed", "cuda", [*(["--device-memory-budget", "3GiB", *more] if more else budget), "--keep-training"], variables=variables)
        self.same("resumed", again, whole)
        return {"resumed": 1}

    def same(self, name, run, whole):
        """Refuses a run whose bits differ from a whole run's."""
        for key in ["loss", "grad_norm"]:
            if run.of_steps(key) != whole.of_steps(key):
                raise Wrong(f"{name}: {key} {run.of_steps(key)} instead of {whole.of_steps(key)}")
        if self.digest(run) != self.digest(whole):
            raise Wrong(f"{name}: the model has other bits")
        # Micro-batches of evaluations depend on the memory.
        evaluations = [{event["step"]: event["loss"] for event in of.events if event["event"] == "eval"} for of in (run, whole)]
        for step in evaluations[0].keys() | evaluations[1].keys():
            found = [of.get(step) for of in evaluations]
            if found[0] != found[1] and distance(found[:1], found[1:])[0] > self.tolerance():
                raise Wrong(f"{name}: evaluations of step {step} have losses {found}")

    def tolerance(self):
        return TOLERANCE["f32" if self.case["precision"] == "f32" else "bf16"]

    def digest(self, run):
        if not self.case["adapter"]:
            return run.digest
        file = run.directory / "adapter" / "adapter_model.safetensors"
        return digest(file) if file.exists() else None

    def has_its_cut(self, run):
        """Whether pins decide the bits: micro-batches of pinned samples, and one plan from the first step to the last."""
        return "memory.micro_batch_samples" in self.case["keys"] and not any(event["event"] == "replan" for event in run.events)

    def cut(self, run):
        """Pins of all settings that decide bits."""
        plan = run.last("plan")
        order = "layer-major" if plan.get("layer_major") else "micro-batch-major"
        return sets(memory__micro_batch_samples=plan["micro_batch_samples"], memory__loss_chunk_rows=plan["loss_chunk_rows"],
                    memory__accumulation=order)

    def beside_the_plain(self, run):
        """The same bits with all tensors on the card, kernel by kernel."""
        if not self.has_its_cut(run):
            return {}
        pins = self.cut(run) | {key: "none" for key in [*OFFLOADS, "memory.copy_overlap"] if self.cut(run)["memory.accumulation"] == "layer-major"}
        pins |= sets(memory__weight_copies="none") if self.case["precision"] == "bf16" else {}
        whole = self.trained("plain", "cuda", [], variables=PLAIN, without=[*OFFLOADS, *OF_CARDS], pins=pins)
        if whole.ran != run.ran:
            raise Wrong(f"exit code {run.ran}, and {whole.ran} with plain settings")
        self.same("beside plain settings", run, whole)
        return {"plain": 1}

    def another_lever(self, run):
        """Settings that change no bit, for the rest of a run."""
        draw = random.Random(f"another {self.case['number']}")
        pins = self.cut(run)
        if pins["memory.accumulation"] == "layer-major":
            pins |= {key: draw.choice(["none", "disk"]) for key in OFFLOADS[: 4 if self.case["keys"]["optimizer.name"] == "adamw" else 3]}
            if "disk" in pins.values():
                pins |= {"memory.offload_to": draw.choice(["host", "disk"]), "memory.copy_overlap": draw.choice(["none", "block"])}
        variables = {"LOW_MEM_T5_GRAPHS": draw.choice(["none", "all"]), "LOW_MEM_T5_EMULATED_LOCKABLE": draw.choice(["0", "100000", "1000000000"]),
                     "LOW_MEM_T5_EMULATED_STREAMS": draw.choice(["early", "late"])}
        return [word for key, value in pins.items() for word in ("--set", f"{key}={value}")], variables

    def without_memory(self, whole, budget, report):
        """One allocation fails: the same losses with smaller micro-batches, or exit code 3."""
        allocations = json.loads(report.read_text())["allocations"] if report.exists() else 0
        draw, ends = random.Random(f"failure {self.case['number']}"), []
        for _ in range(5 if allocations else 0):
            failing = {"LOW_MEM_T5_EMULATED_FAILURE": str(draw.randint(allocations // 20 + 1, allocations))}
            shutil.rmtree(self.directory / "failing", ignore_errors=True)
            code, _, err = self.ours(self.flags("failing", budget), "cuda", variables=failing)
            if code not in (0, 3) or (code == 3 and "error: the device has no memory left" not in err):
                raise Wrong(f"without memory, {failing}: exit code {code}: {said(err)}")
            ends.append(code)
            if code == 0:
                worst, step = distance(Training(self.directory / "failing", None).of_steps("loss"), whole.of_steps("loss"))
                if worst > self.tolerance():
                    raise Wrong(f"without memory, {failing}: the loss of step {step} is {worst:.1e} from that of the whole run")
        return {"survived": ends.count(0), "out_of_memory": ends.count(3)}

    def diverged(self, run):
        """The CPU skips the same steps, and ends the same way."""
        cpu = self.trained("cpu", "cpu")
        skipped = [[step for step, event in sorted(of.steps.items()) if event.get("skipped")] for of in (run, cpu)]
        if run.ran != cpu.ran or skipped[0] != skipped[1]:
            raise Wrong(f"exit codes {run.ran}, {cpu.ran} on the CPU; steps that are not finite: {skipped}")
        return {"skipped": len(skipped[0])}

    def answers(self, way):
        """`eval` and `generate` with the model, compared with the CPU."""
        beams = 3 if way == "beams" else 1
        model = "card/adapter" if self.case["adapter"] else "card/model"
        numbers = {}
        words = ["eval", "--model", model, "--data", "rows.jsonl", "--samples", 5, "--generate-samples", 3, "--max-new-tokens", 6,
                 "--num-beams", beams, "--json", "--show", 0]
        for key in ["data.max_source_tokens", "data.max_target_tokens"]:
            words += ["--set", f"{key}={self.case['keys'][key]}"]
        words += ["--precision", "bf16"] if self.case["answers_in_bf16"] else []
        results, budget = {}, self.budget(words)
        for device, limit in {"cuda": budget[0], "cpu": []}.items():
            report = self.directory / "of-eval.json"
            code, out, err = self.ours([*words, *limit, "--predictions", f"{device}.jsonl"], device, report=report if device == "cuda" else None)
            if code:
                raise Wrong(f"eval on {device}: exit code {code}: {said(err)}")
            results[device] = json.loads(out.strip().splitlines()[-1])
            if device == "cuda":
                of = results[device]
                peak, predicted = of["device_peak_bytes"], of["predicted_device_peak_bytes"]
                numbers = {"eval_" + key: value for key, value in (budget[1] | shares(peak, predicted, report)).items()}
                if peak > predicted or peak / MIB > budget[1].get("budget_mib", math.inf):
                    raise Wrong(f"eval: the peak is above the prediction: {numbers}")
        losses = [results[device]["loss"] for device in ["cuda", "cpu"]]
        if abs(losses[0] - losses[1]) > TOLERANCE["bf16" if self.case["answers_in_bf16"] else "f32"] * abs(losses[1]):
            raise Wrong(f"eval: losses {losses}")
        if self.case["answers_in_bf16"]:
            return numbers | self.answers_as_graphs(model, beams)
        answers = [[json.loads(line)["response"] for line in (self.directory / f"{device}.jsonl").read_text().splitlines() if "response" in line]
                   for device in ["cuda", "cpu"]]
        if answers[0] != answers[1]:
            raise Wrong(f"eval: answers {answers}")
        # The prompt has the greatest allowed length. With a budget, the command prints peaks.
        words = ["generate", "--model", model, "--prompt", "2 + 2", "--max-source-tokens", 3, "--max-new-tokens", 9, "--num-beams", beams, "--json",
                 "--memory-budget", "4GiB"]
        report = self.directory / "of-generate.json"
        limit, of_budget = self.budget(words)
        said_by = [self.ours(words + limit, "cuda", report=report), self.ours(words, "cpu")]
        if any(code for code, _, _ in said_by):
            raise Wrong(f"generate: {said_by}")
        ours, others = [json.loads(out) for _, out, _ in said_by]
        peak, predicted = map(int, re.search(r"on the device (\d+) bytes, (\d+) predicted", said_by[0][2]).groups())
        numbers |= {"generate_" + key: value for key, value in (of_budget | shares(peak, predicted, report)).items()}
        if peak > predicted or peak / MIB > of_budget.get("budget_mib", math.inf):
            raise Wrong(f"generate: the peak is above the prediction: {numbers}")
        # Greedy answers have a score only on request.
        scores = [float(of.get("score", 0)) for of in (ours, others)]
        if ours["response"] != others["response"] or abs(scores[0] - scores[1]) > TOLERANCE["f32"] * abs(scores[1]):
            raise Wrong(f"generate: {ours}, {others}")
        return numbers


    def answers_as_graphs(self, model, beams):
        """Answers in bf16 may differ from the CPU's. As graphs, kernel by kernel and in a budget they have the same bits."""
        words = ["generate", "--model", model, "--prompt", "2 + 2", "--prompt", "7", "--max-source-tokens", 5, "--max-new-tokens", 9,
                 "--num-beams", beams, "--json", "--scores", "--precision", "bf16"]
        said_by = [self.ours(words + self.budget(words)[0], "cuda"), self.ours(words, "cuda", variables=PLAIN)]
        if any(code for code, _, _ in said_by) or said_by[0][1] != said_by[1][1]:
            raise Wrong(f"generate in bf16, beside plain settings: {said_by}")
        return {"as_graphs": 1}


def shares(peak, predicted, report):
    """Peaks in MiB. The prediction of tensors, without the pool's row, stands beside their count."""
    numbers = {"peak_mib": peak / MIB, "predicted_mib": predicted / MIB, "error_percent": 100 * (predicted / peak - 1)}
    if report.exists():
        counted = json.loads(report.read_text())
        context = peak - counted["most_reserved_bytes"]
        tensors, of_plan = counted["most_used_bytes"], (predicted - context - POOL_UNIT) / POOL_FACTOR
        numbers |= {"tensors_mib": tensors / MIB, "predicted_tensors_mib": of_plan / MIB, "tensors_error_percent": 100 * (of_plan / tensors - 1)}
    return numbers


def memory(run, report):
    """Predicted and counted memory of a run on the card."""
    end = run.last("end")
    numbers = shares(end["device_peak_bytes"], end["predicted_device_peak_bytes"], report)
    if report.exists():
        counted = json.loads(report.read_text())
        numbers |= {"locked_mib": counted.get("most_locked_bytes", 0) / MIB, "locked_left_bytes": counted.get("locked_bytes", 0)}
        numbers |= {"off_mib": max(row["bytes"] for of in phases(run) for row in of["rows"] if row["name"] == "off the GPU") / MIB} if is_off(run) else {}
    return numbers | {"plan": run.last("plan")["bill"]["conclusion"], "replans": sum(event["event"] == "replan" for event in run.events), "micro_batch": run.last("plan")["micro_batch_samples"]}


def phases(run):
    return run.last("plan")["bill"]["phase_rows"]


def is_off(run):
    """Whether offloaded tensors are in the host's memory."""
    return any(row["name"] == "off the GPU" for of in phases(run) for row in of["rows"])


def inline(model):
    text = lambda value: json.dumps(value)
    return "{" + ", ".join(f"{key}={text(value)}" for key, value in model.items()) + "}"


def said(err):
    lines = [line for line in err.strip().splitlines() if line.strip()]
    return " / ".join(lines[-6:])[-700:]


def tried(options, number):
    """The case's line: its settings, its verdict, its numbers."""
    of, began = case(number, options.seed, options.off_card), time.monotonic()
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"case-{number}-", dir=options.output))
    one, verdict, reason, numbers = Tried(options, of, directory), "ok", "", {}
    try:
        numbers = one.trial()
    except NotImplementedError as error:
        verdict, reason = "refused", str(error)
    except Wrong as error:
        verdict, reason = "failed", str(error)
    except Exception as error:  # A failing case never ends the script.
        verdict, reason = "failed", f"this script: {error!r}"
    if verdict != "failed":
        shutil.rmtree(directory)
    line = {**of, "verdict": verdict, "reason": reason, "numbers": numbers, "warnings": sorted(set(one.said)), "commands": one.commands,
            "seconds": round(time.monotonic() - began, 1)}
    shown = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items() if not isinstance(value, str))
    print(f"{number:3} {verdict:8} {line['seconds']:6.1f} s  {reason or shown}", flush=True)
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--only", default="", help="numbers of cases, separated by commas")
    parser.add_argument("--inference", action="store_true", help="`eval` and `generate` alone, of every case: nothing trains on the card")
    parser.add_argument("--off-card", action="store_true", help="every case with weights, gradients, activations or moments off the GPU")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("card-held-out"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    options.output = options.output.resolve()
    numbers = [int(number) for number in options.only.split(",")] if options.only else range(1, options.cases + 1)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        lines = []
        for line in pool.map(lambda number: tried(options, number), numbers):
            lines.append(line)
            with open(options.output / "card_held_out.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
    summary(lines)
    return 1 if any(line["verdict"] == "failed" for line in lines) else 0


def summary(lines):
    for verdict in ["ok", "refused", "failed"]:
        print(f"{sum(line['verdict'] == verdict for line in lines)} {verdict}")
    kinds = ["", "eval_", "generate_"]
    for prefix, key in [(kind, kind + key) for kind in kinds for key in ["error_percent", "tensors_error_percent"]] + [("", "worst_loss")]:
        for least in [0, 8, 32, 128]:
            found = [abs(line["numbers"][key]) for line in lines
                     if key in line["numbers"] and line["numbers"].get(prefix + "tensors_mib", 0) >= least]
            if found:
                print(f"{key}, tensors of {least} MiB or more: {len(found)} cases, worst {max(found):.3g}, mean {statistics.mean(found):.3g}")


if __name__ == "__main__":
    sys.exit(main())
