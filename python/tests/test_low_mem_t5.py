"""The package with the real program: the embedded default, a few steps.

    LOW_MEM_T5_PROGRAM=target/release/train_low_mem PYTHONPATH=python python3 -m unittest discover -s python/tests
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import low_mem_t5 as t5
from low_mem_t5 import flags, models, program

REPOSITORY = Path(__file__).resolve().parents[2]

#: The embedded default, shortened to a few small steps.
SHORT: Dict[str, Any] = {
    "train.batch_size": 6,
    "memory.micro_batch_samples": 4,
    "train.eval_samples": 12,
    "train.eval_generate_samples": 3,
    "train.eval_max_new_tokens": 4,
    "schedule.name": "constant",
    "checkpoint.every_steps": 2,
}

#: So many steps that a test is always earlier than the last one.
ENDLESS = 1_000_000

#: The processes that a process started, as this system lists them.
CHILDREN = "/proc/{0}/task/{0}/children"
HAS_CHILDREN = os.path.exists(CHILDREN.format(os.getpid()))

scene: Path
base: t5.Run


def setUpModule() -> None:
    global scene, base
    if os.environ.get(program.VARIABLE):
        # A relative path is one of the directory in which the tests start.
        os.environ[program.VARIABLE] = os.path.abspath(os.environ[program.VARIABLE])
    # Plans that do not depend on the speed of the machine.
    os.environ["LOW_MEM_T5_PRICES"] = "built-in"
    warnings.simplefilter("ignore", UserWarning)
    scene = Path(tempfile.mkdtemp(prefix="low_mem_t5-"))
    base = t5.train(scene / "base", max_steps=6, set=SHORT).wait(300)


def tearDownModule() -> None:
    shutil.rmtree(scene)


def python(code: str) -> subprocess.Popen[str]:
    """Another interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def goes_on(pid: int) -> bool:
    """Whether a process is there, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    for _ in range(600):
        if not goes_on(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} goes on")


def zombies() -> List[str]:
    """Children of this process that have ended and were not collected."""
    children = Path(CHILDREN.format(os.getpid())).read_text().split() if HAS_CHILDREN else []
    return [child for child in children if not goes_on(int(child))]


class Plans(unittest.TestCase):
    def test_the_bill_is_data_that_adds_up(self) -> None:
        plan = t5.plan(max_steps=6, memory_budget="200MiB", set=SHORT)
        self.assertEqual(plan.budget_bytes, 200 << 20)
        self.assertEqual(plan.micro_batch_samples, 4)
        self.assertEqual(plan.total_steps, 6)
        self.assertEqual(sum(row.bytes for row in plan.rows), plan.predicted_peak_bytes)
        self.assertEqual(max(phase.bytes for phase in plan.phases), plan.predicted_peak_bytes)
        self.assertIn("<td>parameters</td>", plan._repr_html_())

    def test_a_refusal_names_a_budget_that_works(self) -> None:
        with self.assertRaises(t5.DoesNotFit) as refused:
            t5.plan(memory_budget="10MiB")
        self.assertEqual(refused.exception.code, 3)
        self.assertIn("got 10 MiB", refused.exception.message)
        named = re.search(r"--memory-budget (\S+)", refused.exception.hints[0])
        assert named
        self.assertLess(t5.plan(memory_budget=named[1]).predicted_peak_bytes, 60 << 20)


class Trainings(unittest.TestCase):
    def test_a_training_is_followed_as_it_goes(self) -> None:
        training = t5.train(scene / "followed", max_steps=4, set=SHORT)
        events = list(training.follow())
        self.assertEqual(training.code, 0)
        self.assertEqual(events[0]["event"], "start")
        self.assertEqual([event["step"] for event in events if event["event"] == "step"], [1, 2, 3, 4])
        self.assertEqual(training.events(), events)
        self.assertIn("Memory plan", training.log)
        self.assertEqual(zombies(), [])

    def test_metrics_have_a_row_for_each_step_and_evaluation(self) -> None:
        with mock.patch.dict(sys.modules, {"pandas": None}):
            steps, evaluations = base.metrics(), base.evaluations()
        self.assertEqual([row["step"] for row in steps], [1, 2, 3, 4, 5, 6])
        self.assertTrue(all(math.isfinite(row["loss"]) and row["step_ms"] > 0 for row in steps))
        self.assertEqual([row["step"] for row in evaluations], [0, 6])
        self.assertLess(evaluations[1]["loss"], evaluations[0]["loss"])
        if importlib.util.find_spec("pandas"):
            self.assertEqual(list(base.metrics()["loss"]), [row["loss"] for row in steps])

    def test_a_stopped_training_resumes(self) -> None:
        training = t5.train(scene / "stopped", max_steps=ENDLESS, set=SHORT)
        next(event for event in training.follow("step") if event["step"] == 3)
        run = training.stop()
        self.assertEqual(training.code, 75)
        last = run.events("step")[-1]["step"]
        self.assertEqual(run.events("checkpoint")[-1]["step"], last)
        run.resume(max_steps=last + 2).wait(300)
        self.assertEqual([event["step"] for event in run.events("step")], list(range(1, last + 3)))
        self.assertEqual(len(run.events("resume")), 1)

    def test_steps_that_were_made_again_count_once(self) -> None:
        step = lambda number, loss: json.dumps({"event": "step", "step": number, "loss": loss})  # noqa: E731
        resume = lambda number: json.dumps({"event": "resume", "step": number})  # noqa: E731
        lines = [step(1, 0.5), '{"event": "start", "step": 0}', step(1, 1.0), step(2, 2.0), step(3, 3.0), resume(2), step(3, 3.5)]
        lines += [resume(1), step(2, "NaN"), '{"event": "step", "step": 3, "lo']
        (scene / "again").mkdir()
        (scene / "again/metrics.jsonl").write_text("\n".join(lines))
        with mock.patch.dict(sys.modules, {"pandas": None}):
            rows = t5.Run(scene / "again").metrics()
        self.assertEqual([row["step"] for row in rows], [1, 2])
        self.assertEqual(rows[0]["loss"], 1.0)
        self.assertTrue(math.isnan(rows[1]["loss"]))

    def test_a_block_stops_its_training_and_keeps_its_exception(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            with t5.train(scene / "block", max_steps=ENDLESS, set=SHORT) as training:
                raise ZeroDivisionError
        self.assertEqual(training.code, 75)

    def test_a_training_that_another_process_interrupts_is_an_exception(self) -> None:
        training = t5.train(scene / "interrupted", max_steps=ENDLESS, set=SHORT)
        next(training.follow("step"))
        os.kill(training.pid, signal.SIGTERM)
        with self.assertRaises(t5.Interrupted) as interrupted:
            training.wait(300)
        self.assertEqual(interrupted.exception.code, 75)
        self.assertRegex(interrupted.exception.message, r"^interrupted at step \d+")
        self.assertIn("--keep-training", interrupted.exception.hints[0])
        training = training.resume(max_steps=ENDLESS)
        with self.assertRaises(TimeoutError):
            training.wait(0.01)
        os.kill(training.pid, signal.SIGKILL)
        with self.assertRaisesRegex(t5.Error, "ended by signal 9"):
            training.wait(300)

    def test_wrong_settings_are_exceptions_with_the_programs_words(self) -> None:
        with self.assertRaises(t5.UsageError) as wrong:
            t5.train(scene / "wrong", set={"train.max_stepz": 3})
        self.assertEqual((wrong.exception.code, wrong.exception.message), (2, "--set: unknown key `train.max_stepz`"))
        self.assertIn("did you mean `train.max_steps`", wrong.exception.hints[0])
        with self.assertRaises(t5.UnusableData) as unusable:
            t5.train(scene / "wrong", preset="tiny", tokenizer=base.path, data=scene / "absent.csv")
        self.assertIn("absent.csv", str(unusable.exception))
        self.assertEqual(zombies(), [])

    def test_a_training_outlives_its_handle_and_says_so(self) -> None:
        training = t5.train(scene / "dropped", max_steps=ENDLESS, set=SHORT)
        pid = training.pid
        said = io.StringIO()
        with redirect_stderr(said):
            del training
        self.assertIn(f"goes on as process {pid}; `kill {pid}` saves and stops it", said.getvalue())
        self.assertTrue(goes_on(pid))
        os.kill(pid, signal.SIGTERM)
        wait_for_end(pid)
        for _ in range(100):
            if not zombies():
                break
            time.sleep(0.05)
        self.assertEqual(zombies(), [])

    def test_a_training_outlives_its_interpreter_and_says_so(self) -> None:
        code = f"""
            import low_mem_t5 as t5
            training = t5.train({str(scene / "left")!r}, max_steps={ENDLESS}, set={SHORT!r})
            print(training.pid)
        """
        out, err = python(code).communicate(timeout=300)
        pid = int(out)
        self.assertIn(f"goes on as process {pid}", err)
        self.assertTrue(goes_on(pid))
        os.kill(pid, signal.SIGTERM)
        wait_for_end(pid)

    def test_an_interrupt_while_waiting_stops_the_training(self) -> None:
        code = f"""
            import os, signal, threading
            import low_mem_t5 as t5
            training = t5.train({str(scene / "pressed")!r}, max_steps={ENDLESS}, set={SHORT!r})
            def press():
                next(event for event in training.follow("step") if event["step"] == 3)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=press).start()
            try:
                training.wait()
            except KeyboardInterrupt:
                print(training.code)
        """
        self.assertEqual(python(code).communicate(timeout=300), ("75\n", ""))

    def test_a_report_is_a_page(self) -> None:
        report = base.report()
        self.assertIn("predicted peak", report.html)
        self.assertTrue(report._repr_html_().startswith("<iframe sandbox srcdoc="))
        self.assertNotIn('<script id="figures"', report._repr_html_())
        report.save(scene / "page.html")
        self.assertEqual((scene / "page.html").read_text(encoding="utf-8"), report.html)


class Models(unittest.TestCase):
    def test_answers_are_those_of_the_command(self) -> None:
        prompts = ["how many legs has a spider", "倒过来：茶木金心", "two\nlines", "", *(f"add {number} and 2" for number in range(40))]
        rows = scene / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts if prompt), encoding="utf-8")
        arguments = ["generate", "--model", base.path, "--input", str(rows), "--json", "--max-new-tokens", "5"]
        expected = [json.loads(line)["response"] for line in program.output_of(arguments).splitlines()]
        with t5.Model(base.path, "200MiB") as model:
            answers = model.generate([prompt for prompt in prompts if prompt], max_tokens=5)
            self.assertEqual(answers, expected)
            self.assertEqual(model.generate(prompts[0], max_tokens=5), expected[0])
            self.assertEqual(model.generate([]), [])
            with self.assertRaisesRegex(t5.UsageError, "`nonsense`"):
                model.generate("x", nonsense=1)
            shell = model._process.pid
        self.assertFalse(goes_on(shell))
        with self.assertRaisesRegex(t5.UsageError, "is closed"):
            model.generate("x")
        self.assertEqual(zombies(), [])

    def test_a_model_that_cannot_be_had_is_an_exception(self) -> None:
        with self.assertRaisesRegex(t5.UnusableData, "absent"):
            t5.Model(scene / "absent")
        with self.assertRaises(t5.DoesNotFit) as refused:
            t5.Model(base.path, "2MiB")
        self.assertTrue(refused.exception.hints)

    @unittest.skipUnless(HAS_CHILDREN, "this system does not list the children of a process")
    def test_a_model_ends_with_its_interpreter_however_that_ends(self) -> None:
        for ending in ["pass", "os.kill(os.getpid(), signal.SIGKILL)"]:
            code = f"""
                import os, signal
                import low_mem_t5 as t5
                model = t5.Model({base.path!r}, "200MiB")
                shell = model._process.pid
                children = open({CHILDREN!r}.format(shell)).read()
                print(shell, children, flush=True)
                {ending}
            """
            out, _ = python(code).communicate(timeout=300)
            pids = [int(pid) for pid in out.split()]
            self.assertEqual(len(pids), 3, "the shell, the program and the one that watches the pipe")
            for pid in pids:
                wait_for_end(pid)

    @unittest.skipUnless(HAS_CHILDREN, "this system does not list the children of a process")
    def test_a_model_whose_process_is_killed_is_an_exception(self) -> None:
        model = t5.Model(base.path, "200MiB")
        shell = model._process.pid
        server = int(Path(CHILDREN.format(shell)).read_text().split()[0])
        os.kill(server, signal.SIGKILL)
        model._process.wait(60)
        with self.assertRaisesRegex(t5.Error, "signal 9"):
            model.generate("x")
        model.close()

    def test_scores_are_those_of_the_run(self) -> None:
        rows = Path(base.path) / "sample-data/sample-validation.parquet"
        scores = t5.evaluate(base.path, rows, samples=12, generate_samples=3, max_new_tokens=4)
        last = base.events("eval")[-1]
        self.assertEqual(scores["samples"], 12)
        self.assertAlmostEqual(scores["loss"], last["loss"], delta=1e-5)

    def test_vectors_are_those_of_the_texts(self) -> None:
        if " embed " not in program.output_of(["--help"]):
            self.skipTest("this program has no `embed`")
        texts = ["a spider", "two\nlines", "a spider"]
        with mock.patch.dict(sys.modules, {"numpy": None}):
            first, second, third = t5.embed(base.path, texts, pooling="mean", normalize=True)
        self.assertEqual(first, third)
        self.assertNotEqual(first, second)
        self.assertAlmostEqual(sum(value * value for value in first), 1.0, delta=1e-5)
        if importlib.util.find_spec("numpy"):
            self.assertEqual(t5.embed(base.path, texts, normalize=True)[1].tolist(), second)

    def test_a_file_of_vectors_is_read_without_numpy(self) -> None:
        head = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
        head += " " * (-(len(head) + 11) % 64) + "\n"
        values = b"".join(bytes.fromhex(value) for value in ["0000803f", "00000040", "00004040", "0000c0bf", "00000000", "0000003f"])
        path = scene / "vectors.npy"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + values)
        with mock.patch.dict(sys.modules, {"numpy": None}):
            self.assertEqual(models.read_vectors(str(path)), [[1.0, 2.0, 3.0], [-1.5, 0.0, 0.5]])


class Flags(unittest.TestCase):
    def test_keywords_are_flags(self) -> None:
        for given, expected in [
            ({"batch_size": 8}, ["--batch-size=8"]),
            ({"data": ["a.csv", Path("b.csv")]}, ["--data=a.csv", "--data=b.csv"]),
            ({"lora": True, "finetune": False, "seed": None}, ["--lora"]),
            ({"lr": 1e-3}, ["--lr=0.001"]),
            ({"set": {"train.dropout": 0.1, "train.freeze": ["a", "b"]}}, ["--set", "train.dropout=0.1", "--set", 'train.freeze=["a", "b"]']),
            ({"set": {"data.source_prefix": 'say "x": ', "a": {"b": True}}}, ["--set", 'data.source_prefix="say \\"x\\": "', "--set", 'a={"b" = true}']),
        ]:
            self.assertEqual(flags.arguments(given), expected)
        with self.assertRaises(TypeError):
            flags.arguments({"model": object()})

    def test_texts_of_settings_keep_every_character(self) -> None:
        prefix = 'say "x"\t\\ 倒\u2028\x7f: '
        run = t5.train(scene / "prefix", max_steps=1, set={**SHORT, "data.source_prefix": prefix}).wait(300)
        config = json.loads((Path(run.path) / "model/config.json").read_text(encoding="utf-8"))
        self.assertEqual(config["prefix"], prefix)

    def test_every_typed_flag_is_one_of_the_program(self) -> None:
        help_text = program.output_of(["train", "--help"])
        for name in flags.Flags.__annotations__:
            self.assertIn("--" + name.replace("_", "-"), help_text)

    def test_a_program_that_is_not_there_is_named(self) -> None:
        with mock.patch.dict(os.environ, {program.VARIABLE: "/nowhere"}):
            with self.assertRaisesRegex(t5.Error, "LOW_MEM_T5_PROGRAM: expected a program, got `/nowhere`"):
                t5.plan()
        with mock.patch.dict(os.environ, {"PATH": "/nowhere"}), mock.patch.object(program.sysconfig, "get_path", return_value="/nowhere"):
            os.environ.pop(program.VARIABLE, None)
            with self.assertRaisesRegex(t5.Error, "not found beside this package"):
                t5.find_program()

    def test_the_module_is_the_program(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
        said = subprocess.run([sys.executable, "-m", "low_mem_t5", "--version"], stdout=subprocess.PIPE, text=True, env=environment)
        self.assertEqual(said.stdout, program.output_of(["--version"]))


class Documents(unittest.TestCase):
    def test_every_cell_of_the_notebook_runs(self) -> None:
        notebook = json.loads((REPOSITORY / "docs/notebook.ipynb").read_text(encoding="utf-8"))
        names: Dict[str, Any] = {}
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        with redirect_stdout(io.StringIO()):
            for cell in cells:
                # The real run takes a minute.
                exec(compile(cell.replace("max_steps=400", "max_steps=4"), "notebook.ipynb", "exec"), names)
        self.assertEqual(len(names["training"].events("step")), 4)
        shutil.rmtree(names["runs"])

    def test_every_snippet_runs_as_it_is_shown(self) -> None:
        readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
        snippets = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
        self.assertEqual(len(snippets), 6)
        directory = scene / "newcomer"
        # What `hf download google/flan-t5-small` makes, with a small model in it.
        snapshot = directory / "cache/hub/models--google--flan-t5-small/snapshots/1"
        snapshot.mkdir(parents=True)
        for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]:
            shutil.copy(Path(base.path) / "model" / name, snapshot)
        rows = "prompt,response\nMy card was charged twice,billing\nIt does not start,technical\n"
        for name in ["tickets.csv", "valid.csv"]:
            (directory / name).write_text(rows)
        names: Dict[str, Any] = {}
        before, said = os.getcwd(), io.StringIO()
        os.chdir(directory)
        try:
            with mock.patch.dict(os.environ, {"HF_HOME": "cache"}), redirect_stdout(said):
                for snippet in snippets:
                    exec(compile(snippet, "README.md", "exec"), names)
        finally:
            os.chdir(before)
        self.assertTrue((directory / "runs/tickets/model/model.safetensors").exists())
        self.assertIn("hint: ", said.getvalue())


if __name__ == "__main__":
    unittest.main()
