#!/usr/bin/env python3
"""Trains with transformers and its Adafactor, independently, and compares the result with train_low_mem's.

    # cases of scripts/make_hf_case.py, trained here and by the binary:
    python scripts/compare_training.py --case cases/7 cases/8 --binary target/release/train_low_mem
    # a run that already exists (dropout 0, data.shuffle false):
    python scripts/compare_training.py --init HF_DIR --data train.parquet --steps 12 --batch-size 4 \
        --max-source-tokens 64 --max-target-tokens 64 --learning-rate 1e-3 --run RUN
    # only the reference: losses and gradient norms as JSON
    python scripts/compare_training.py --init HF_DIR --data train.parquet --steps 12 --json

Rows [i*B, (i+1)*B) make step i, epoch after epoch; loss is per target token; the norm is taken before clipping.
The final parameters are compared in two ways, each the worst over all tensors: relative to the parameter, and
relative to its change in training (the sharper one). `noise` is the same measure for transformers in f32
against transformers in f64: a difference far above it is a fault, a difference near it is rounding. Exits 1 on a
difference over the tolerances.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from golden_cases.schedules import scheduler
from safetensors.torch import load_file
from t5_data import Encoder, in_order, read_pairs
from transformers import T5ForConditionalGeneration
from transformers.optimization import Adafactor

ADAFACTOR_DEFAULTS = {
    "learning_rate": 1e-3,
    "relative_step": False,
    "scale_parameter": False,
    "warmup_init": False,
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "eps1": 1e-30,
    "eps2": 1e-3,
    "beta1": None,
    "weight_decay": 0.0,
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", type=pathlib.Path, help="folders made by make_hf_case.py")
    parser.add_argument("--init", type=pathlib.Path, help="Hugging Face directory with tokenizer.json")
    parser.add_argument("--data", nargs="+", type=pathlib.Path, help="parquet files, in order")
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--response-column", default="response")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-source-tokens", type=int, default=64)
    parser.add_argument("--max-target-tokens", type=int, default=64)
    parser.add_argument("--grad-clip-norm", type=float, default=1.0)
    parser.add_argument("--finetune", action="store_true", help="freeze encoder and shared embedding")
    parser.add_argument("--bad-rows", choices=["error", "skip"], default="error")
    for key, default in ADAFACTOR_DEFAULTS.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=float, default=default)
    parser.add_argument("--schedule", default="constant", help="constant, one-cycle, linear, cosine, inverse-sqrt")
    parser.add_argument("--warmup-steps", type=int)
    parser.add_argument("--div-factor", type=float, default=50.0)
    theirs = parser.add_mutually_exclusive_group()
    theirs.add_argument("--binary", type=pathlib.Path, help="train_low_mem, to run on the same settings")
    theirs.add_argument("--run", type=pathlib.Path, help="the output directory of a finished run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the binary")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the binary's output directories here")
    parser.add_argument("--loss-tolerance", type=float, default=1e-5, help="relative, or 10 x noise if larger")
    parser.add_argument("--norm-tolerance", type=float, default=1e-4)
    parser.add_argument("--parameter-tolerance", type=float, default=1e-4)
    parser.add_argument("--movement-tolerance", type=float, default=5e-3)
    parser.add_argument("--timeout-seconds", type=float, default=600, help="of the binary")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    if not options.case and not (options.init and options.data):
        parser.error("give --case, or --init and --data")
    return options


def settings_of(options):
    """One dictionary of settings per case; without folders, the command line flags are the case."""
    if options.case:
        for folder in options.case:
            case = json.loads((folder / "case.json").read_text())
            yield case | {
                "name": folder.name,
                "init": folder / "model",
                "data": [folder / name for name in case["train"]],
                "optimizer": ADAFACTOR_DEFAULTS | case["optimizer"],
                "schedule": case.get("schedule", {"name": "constant"}),
                "bad_rows": case.get("bad_rows", "error"),
            }
        return
    settings = {key: value for key, value in vars(options).items() if key not in ADAFACTOR_DEFAULTS}
    optimizer = {key: getattr(options, key) for key in ADAFACTOR_DEFAULTS}
    schedule = {"name": options.schedule}
    if options.schedule != "constant" or options.warmup_steps:
        schedule |= {"warmup_steps": options.warmup_steps, "div_factor": options.div_factor}
    yield settings | {"name": options.init.name, "optimizer": optimizer, "schedule": schedule}


def make_optimizer(parameters, options):
    return Adafactor(
        parameters,
        lr=None if options["relative_step"] else options["learning_rate"],
        eps=(options["eps1"], options["eps2"]),
        **{key: value for key, value in options.items() if key not in ("learning_rate", "eps1", "eps2")},
    )


def make_scheduler(settings, optimizer):
    """The learning rate's schedule, or None for a constant one."""
    schedule, rate = settings["schedule"], settings["optimizer"]["learning_rate"]
    if schedule == {"name": "constant"}:
        return None
    warmup_steps = schedule.get("warmup_steps")
    if schedule["name"] == "one-cycle":
        rate *= schedule["div_factor"]  # the configured rate is where the cycle starts
    else:
        warmup_steps = warmup_steps or 0
    return scheduler(schedule["name"], optimizer, rate, settings["steps"], warmup_steps, schedule["div_factor"])


def freeze_for_finetuning(model):
    for name, parameter in model.named_parameters():
        if name.startswith(("shared.", "encoder.")):
            parameter.requires_grad_(False)


def step_on(model, batch, optimizer, trainable, settings):
    """One update. A batch with only bad rows makes no update, and is logged with a loss and norm of 0."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainable, settings["grad_clip_norm"] or float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def train(settings, dtype):
    """Losses, gradient norms and final parameters of transformers; also the initial parameters."""
    model = T5ForConditionalGeneration.from_pretrained(
        settings["init"], dtype=dtype, dropout_rate=0.0, attn_implementation="eager"
    ).train()
    if settings["finetune"]:
        freeze_for_finetuning(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(trainable, settings["optimizer"])
    scheduled = make_scheduler(settings, optimizer)
    encoder = Encoder(settings["init"])
    pairs = read_pairs(
        settings["data"], settings["prompt_column"], settings["response_column"], settings["bad_rows"]
    )
    losses, norms = [], []
    for step, rows in enumerate(in_order(pairs, settings["batch_size"], settings["steps"])):
        batch = encoder.batch(rows, settings["max_source_tokens"], settings["max_target_tokens"])
        loss, norm = step_on(model, batch, optimizer, trainable, settings) if batch else (0.0, 0.0)
        losses.append(loss)
        norms.append(norm)
        if scheduled and step + 1 < settings["steps"]:
            scheduled.step()
    final = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "grad_norms": norms, "initial": initial, "final": final}


def toml_value(value):
    return json.dumps(str(value) if isinstance(value, pathlib.Path) else value, ensure_ascii=False)


def write_config(path, settings, output):
    files = [str(file.resolve()) for file in settings["data"]]
    optimizer = {key: value for key, value in settings["optimizer"].items() if value is not None}
    if optimizer["relative_step"]:
        optimizer.pop("learning_rate")
    tables = {
        "run": {"output_dir": str(output), "seed": 1},
        "model": {"init_from": str(settings["init"].resolve())},
        "data": {
            "train": files,
            "prompt_column": settings["prompt_column"],
            "response_column": settings["response_column"],
            "max_source_tokens": settings["max_source_tokens"],
            "max_target_tokens": settings["max_target_tokens"],
            "shuffle": False,
            "bad_rows": settings["bad_rows"],
        },
        "train": {
            "batch_size": settings["batch_size"],
            "epochs": 1000,
            "max_steps": settings["steps"],
            "dropout": 0.0,
            "precision": "f32",
            "grad_clip_norm": settings["grad_clip_norm"],
        },
        "optimizer": {"name": "adafactor"} | optimizer,
        "schedule": {key: value for key, value in settings["schedule"].items() if value is not None},
    }
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]"] + [f"{key} = {toml_value(value)}" for key, value in values.items()] + [""]
    path.write_text("\n".join(lines))


def run_binary(options, settings, folder):
    output = (folder / "run").resolve()
    write_config(folder / "config.toml", settings, output)
    command = [str(options.binary.resolve()), "train", "--config", str(folder / "config.toml")]
    command += ["--finetune"] if settings["finetune"] else []
    command += [word for override in options.set for word in ("--set", override)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=options.timeout_seconds
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
        raise RuntimeError(f"train_low_mem left with exit code {done.returncode}")
    return output


def read_run(run, steps):
    """Losses, gradient norms and the parameters after the last step of a finished run."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [event for event in events if event["event"] == "step"]
    last = run / "checkpoints" / f"step-{steps:08d}"
    model = last if last.is_dir() else run / "model"
    parameters = {}
    for file in sorted(model.glob("model*.safetensors")):
        parameters |= load_file(file)
    return {
        "losses": [event["loss"] for event in logged],
        "grad_norms": [event["grad_norm"] for event in logged],
        "final": parameters,
    }


def worst_relative(expected, actual):
    if len(expected) != len(actual):
        return float("inf")
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, actual))


def parameter_distances(reference, actual):
    """For each tensor its name, |actual - expected| / |expected| and |actual - expected| / |expected - initial|."""
    for name, expected in reference["final"].items():
        if name not in actual:
            yield name, float("inf"), float("inf")
            continue
        found = actual[name].to(torch.float64)
        expected = expected.to(torch.float64)
        moved = (expected - reference["initial"][name].to(torch.float64)).norm().item()
        distance = (found - expected).norm().item() if found.shape == expected.shape else float("inf")
        by_size = distance / max(expected.norm().item(), 1e-30)
        yield name, by_size, distance / moved if moved else (0.0 if distance == 0 else float("inf"))


def compare(reference, actual):
    distances = list(parameter_distances(reference, actual["final"]))
    worst = sorted(distances, key=lambda row: -row[2])[:3]
    return {
        "loss": worst_relative(reference["losses"], actual["losses"]),
        "grad_norm": worst_relative(reference["grad_norms"], actual["grad_norms"]),
        "parameters": max(by_size for _, by_size, _ in distances),
        "parameters_by_movement": worst[0][2],
        "worst_parameters": [{"name": name, "by_size": a, "by_movement": b} for name, a, b in worst],
        "unknown_parameters": sorted(actual["final"].keys() - reference["final"].keys()),
    }


def verdict(options, found, noise):
    tolerances = {
        "loss": options.loss_tolerance,
        "grad_norm": options.norm_tolerance,
        "parameters": options.parameter_tolerance,
        "parameters_by_movement": options.movement_tolerance,
    }
    return [key for key, tolerance in tolerances.items() if not found[key] <= max(tolerance, 10 * noise[key])]


def compare_case(options, settings):
    reference = train(settings, torch.float32)
    report = {"name": settings["name"], "losses": reference["losses"], "grad_norms": reference["grad_norms"]}
    if not options.binary and not options.run:
        return report | {"failed": []}
    exact = train(settings, torch.float64)
    noise = compare(exact, reference)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep / settings["name"] if options.keep else pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run = options.run or run_binary(options, settings, folder)
            actual = read_run(run, settings["steps"])
        except (RuntimeError, OSError, KeyError, subprocess.TimeoutExpired) as error:
            return report | {"failed": [str(error)]}
    found = compare(reference, actual)
    found["failed"] = verdict(options, found, noise)
    kept = {key: noise[key] for key in ("loss", "grad_norm", "parameters", "parameters_by_movement")}
    theirs = {"their_losses": actual["losses"], "their_grad_norms": actual["grad_norms"]}
    return report | theirs | found | {"noise": kept}


def describe(report):
    lines = [f"{report['name']}: {'FAILED: ' + ', '.join(report['failed']) if report['failed'] else 'agrees'}"]
    if "noise" not in report:
        columns = zip(report["losses"], report["grad_norms"])
        steps = [f"  step {step}: loss {a:.6f} grad_norm {b:.6f}" for step, (a, b) in enumerate(columns, 1)]
        return "\n".join(lines + steps)
    for key in ("loss", "grad_norm", "parameters", "parameters_by_movement"):
        lines.append(f"  {key:24} {report[key]:.1e}   noise {report['noise'][key]:.1e}")
    if report["failed"]:
        for step, (a, b) in enumerate(zip(report["losses"], report["their_losses"]), 1):
            norms = report["grad_norms"][step - 1], report["their_grad_norms"][step - 1]
            lines.append(f"  step {step}: loss {a:.7f} / {b:.7f}  grad_norm {norms[0]:.6f} / {norms[1]:.6f}")
        for row in report["worst_parameters"]:
            lines.append(f"  {row['name']}: {row['by_size']:.1e}, by movement {row['by_movement']:.1e}")
    if report["unknown_parameters"]:
        lines.append(f"  tensors that transformers does not have: {', '.join(report['unknown_parameters'])}")
    return "\n".join(lines)


def main():
    options = arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    failed = 0
    for settings in settings_of(options):
        report = compare_case(options, settings)
        failed += bool(report["failed"])
        print(json.dumps(report) if options.json else describe(report), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
