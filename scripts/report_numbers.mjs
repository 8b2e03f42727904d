// Computes the numbers of a run's metrics.jsonl again, formatted as its page shows them, for scripts/check_report.mjs.
import fs from "node:fs";
import path from "node:path";

// Rounds as Rust does: exactly, and ties to the even digit.
function fixed(value, digits) {
  const text = value.toFixed(digits), scaled = Math.abs(value) * 10 ** digits;
  if (scaled % 1 !== 0.5 || Math.floor(scaled) % 2 !== 0) return text;
  return (Math.sign(value) * Math.floor(scaled) / 10 ** digits).toFixed(digits);
}
const trimmed = text => text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;

export function decimal(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e7) return value.toExponential(2).replace("e+", "e");
  return trimmed(fixed(value, Math.min(7, Math.max(0, 3 - Math.floor(Math.log10(size))))));
}
export function short(value) {
  for (const [least, unit, name] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) if (Math.abs(value) >= least) return trimmed(fixed(value / unit, 2)) + name;
  return decimal(value);
}
export function bytes(count) {
  const units = [["KiB", 10, 0], ["MiB", 20, 1], ["GiB", 30, 2], ["TiB", 40, 2]].filter(([, power]) => count >= 2 ** power);
  const [name, power, digits] = units.at(-1) ?? ["B", 0, 0];
  return `${fixed(count / 2 ** power, digits)} ${name}`;
}
export const count = value => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
export function duration(ms) {
  const s = Math.floor(ms / 1000), two = value => String(value).padStart(2, "0");
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${two(s % 60)} s` : `${Math.floor(s / 3600)} h ${two(Math.floor(s % 3600 / 60))} min`;
}
const scoreName = name => ({ bleu: "BLEU", chrf: "chrF", "chrf++": "chrF++", exact_match: "exact match" })[name] ?? name.replaceAll("_", " ").replace("rouge", "ROUGE-");
const score = (name, value) => /^(bleu|chrf)/.test(name) ? fixed(value, 1) : `${fixed(100 * value, 1)} %`;

// Averages values in at most 512 buckets of equal width. Each bucket is a point at its middle.
function series(values, width) {
  while (values.some(([x]) => Math.floor(x / width) >= 512)) width *= 2;
  const buckets = new Map();
  for (const [x, value] of values) buckets.set(Math.floor(x / width), [...buckets.get(Math.floor(x / width)) ?? [], value]);
  const mean = of => of.reduce((a, b) => a + b) / of.length;
  return [...buckets].sort(([a], [b]) => a - b).map(([at, of]) => [at * width + (width - 1) / 2, mean(of)]);
}
const median = points => points.map(([, value]) => value).sort((a, b) => a - b)[Math.floor(points.length / 2)];
const sum = (events, field) => events.reduce((all, event) => all + (event[field] ?? 0), 0);
const most = (events, field) => Math.max(...events.map(event => event[field] ?? 0));

// Returns a paragraph of the command's first screen.
function paragraph(screen, label) {
  const lines = screen.split("\n"), from = lines.findIndex(line => line.startsWith(`${label} `));
  if (from < 0) return null;
  const more = lines.slice(from + 1).findIndex(line => !line.startsWith(" "));
  return [lines[from].slice(label.length), ...lines.slice(from + 1, from + 1 + more)].map(line => line.trim()).join(" ");
}

// Returns the rows of a plan's bill as the page shows them: bars, table, and the moments of a step.
export function billOf(plan) {
  const phases = plan.bill.phase_rows.map(({ name, rows }) => ({ name, rows: rows.filter(row => row.place !== "device") }));
  const total = phase => sum(phase.rows, "bytes"), mib = value => fixed(value / 2 ** 20, 2);
  const names = [...new Set(phases.flatMap(phase => phase.rows.map(row => row.name)))];
  const cell = (phase, name) => phase.rows.some(row => row.name === name) ? mib(sum(phase.rows.filter(row => row.name === name), "bytes")) : "";
  const note = name => phases.flatMap(phase => phase.rows).find(row => row.name === name && row.note)?.note ?? "";
  const { rows, moments } = plan.timeline, held = moments.map(moment => moment.bytes.reduce((a, b) => a + b));
  const at = held.indexOf(Math.max(...held)), shown = rows.map((name, row) => [name, row]).filter(([, row]) => moments.some(moment => moment.bytes[row] > 0));
  return {
    bars: phases.map(phase => [phase.name, phase.rows.filter(row => row.bytes > 0).map(row => `${row.name}: ${bytes(row.bytes)}${row.note ? `, ${row.note}` : ""}`), bytes(total(phase))]),
    shares: phases.map(phase => phase.rows.filter(row => row.bytes > 0).map(row => row.bytes)),
    table: [
      ["MiB", ...phases.map(phase => phase.name), ""], ...names.map(name => [name, ...phases.map(phase => cell(phase, name)), note(name)]),
      ["total", ...phases.map(phase => mib(total(phase))), ""],
      ["safety margin", ...phases.map(() => ""), `${bytes(plan.headroom)} beyond the largest phase (${plan.bill.headroom_note})`],
    ],
    step: {
      keys: shown.map(([name, row]) => `${name} ${bytes(Math.max(...moments.map(moment => moment.bytes[row])))}`),
      rules: [`peak ${bytes(held[at])}: ${moments[at].pass}, ${moments[at].what}`], lines: [],
      areas: shown.map(([, row]) => moments.flatMap((moment, index) => [index, index + 1].map(x => [x, moment.bytes.slice(0, row + 1).reduce((a, b) => a + b)]))),
    },
  };
}

// Returns all contents of a run's page, and the values that the page of several runs needs. A run writes its page before its last
// event, which has the memory that the run holds after it has freed everything.
export function runOf(directory, isWrittenByTheRun = false) {
  const all = fs.readFileSync(path.join(directory, "metrics.jsonl"), "utf8").trim().split("\n").map(line => JSON.parse(line));
  const events = isWrittenByTheRun ? all.slice(0, all.findLastIndex(event => event.event === "end") + 1) : all;
  const of = kind => events.filter(event => event.event === kind);
  // Concatenates the times of the run's processes.
  let before = 0, origin, last = 0;
  for (const event of events) {
    if (["start", "resume"].includes(event.event)) [before, origin] = [last, Date.parse(event.time)];
    event.ms = last = Math.max(last, before + Date.parse(event.time) - origin);
  }
  const steps = of("step"), evaluations = of("eval"), [start] = of("start"), resumes = of("resume"), begun = resumes.at(-1) ?? start;
  const plan = [...of("plan"), ...of("replan").map(event => event.plan)].at(-1), totalSteps = begun.total_steps, step = steps.at(-1).step;
  const curve = field => steps.map(event => [event.step, event[field]]), losses = evaluations.map(event => [event.step, event.loss]);
  const speed = series(curve("tokens_per_second"), 1), wait = steps.map(event => [event.step, 100 * event.data_wait_ms / (event.step_ms + event.data_wait_ms)]);
  const memory = events.filter(event => ["step", "memory"].includes(event.event));
  const rss = series(memory.map(event => [event.ms, event.rss_bytes]), 50), peak = most(events, "peak_rss_bytes"), predicted = steps.at(-1).predicted_peak_bytes;
  const samples = sum(steps, "samples"), tokens = sum(steps, "source_tokens") + sum(steps, "target_tokens"), sums = field => sum(steps, field);
  const scores = Object.keys(evaluations[0]).filter(name => typeof evaluations[0][name] === "number" && !["loss", "perplexity", "samples", "generated_samples", "target_tokens", "bad_rows", "step", "ms"].includes(name)).sort();
  const [first, newest] = [evaluations[0], evaluations.at(-1)], waited = sums("data_wait_ms"), isNear = plan.budget <= 3 * Math.max(peak, predicted);
  const length = side => `mean ${fixed(sums(`${side}_tokens`) / samples, 1)}, longest ${count(most(steps, `longest_${side}`))}; ${count(sums(`cut_${side}s`))} cut (${fixed(100 * sums(`cut_${side}s`) / samples, 2)} %)`;
  const screen = Object.fromEntries(["Model", "Adapter", "Recipe", "Length", "Data", "Device"].map(label => [label, paragraph(begun.screen, label)]));
  const settings = fs.readFileSync(path.join(directory, "resolved.toml"), "utf8").replace(/^(#.*)?\n+/, ""), right = answer => answer.answer.trim() === answer.expected.trim();
  const bill = billOf(plan), last_ = field => decimal(steps.at(-1)[field]), notes = events.filter(event => ["resume", "replan", "warning"].includes(event.event));
  return {
    steps, evaluations, scores, peak, predicted, plan, tokens, speed, wait, rss, losses, step, curve, settings, notes, running: last, bill,
    end: of("end").at(-1), median: short(Math.round(median(speed))), row: { scoreName, score },
    waiting: `${fixed(100 * waited / (waited + sums("step_ms")), 2)} %`,
    status: `done at step ${count(step)} of ${count(totalSteps)} · ${duration(last)} · began ${start.time.slice(0, 16).replace("T", " ")} UTC`,
    top: [
      ["validation loss", decimal(newest.loss), `from ${decimal(first.loss)} before the first step`],
      ...scores.slice(0, 2).map(name => [scoreName(name), score(name, newest[name]), `from ${score(name, first[name])}`]),
      ["peak memory", bytes(peak), `${bytes(predicted)} predicted`], ["tokens a second", short(Math.round(median(speed))), `${count(tokens)} tokens in ${count(steps.length)} steps`],
    ],
    charts: {
      "Loss": { keys: [`training ${last_("loss")}`, `validation ${decimal(newest.loss)}`], lines: [curve("loss"), losses], marks: resumes.map(event => event.step) },
      "Learning rate": { keys: [`last ${last_("lr")}`], lines: [curve("lr")] },
      "Gradient norm": { keys: [`last ${last_("grad_norm")}`], lines: [curve("grad_norm")] },
      "Tokens a second": { keys: [`median ${short(Math.round(median(speed)))}`], lines: [speed] },
      "Waiting for data": { keys: [`of all time ${fixed(100 * waited / (waited + sums("step_ms")), 2)} %`], lines: [wait] },
      "Resident memory": {
        keys: [`peak ${bytes(peak)}`], lines: [rss], marks: resumes.map(event => event.ms),
        rules: [`predicted peak ${bytes(predicted)}`, `budget ${bytes(plan.budget)}${isNear ? "" : " ↑"}`], heights: [predicted, ...isNear ? [plan.budget] : []],
      },
      "A step, from event to event": bill.step,
    },
    table: [
      ["step", "loss", "perplexity", ...scores.map(scoreName), "rows", "generated"],
      ...evaluations.map(event => [count(event.step), decimal(event.loss), decimal(event.perplexity), ...scores.map(name => score(name, event[name])), count(event.samples), count(event.generated_samples)]),
    ],
    events: notes.length ? notes.map(event => [`step ${count(event.step)}`, duration(event.ms), event.event, event.message ?? `resumed at step ${event.step}`]) : [],
    answers: evaluations.filter(event => event.examples?.length).reverse().map(event => [
      `after step ${count(event.step)} ${event.examples.filter(right).length} of ${event.examples.length} right`, event.examples.map(answer => [answer.prompt, answer.answer, answer.expected])]),
    facts: {
      rows: screen.Data, "samples trained on": `${count(samples)} in ${count(steps.length)} steps`, "source tokens": length("source"), "target tokens": length("target"),
      padding: `${fixed(100 * (1 - tokens / sums("padded_tokens")), 1)} % of all computed tokens`, "rows left out": count(of("end").at(-1).bad_rows),
      ...Object.fromEntries(["Model", "Adapter", "Recipe", "Length"].filter(label => screen[label]).map(label => [label.toLowerCase(), screen[label]])),
      device: screen.Device, command: begun.version, commit: begun.commit, processor: begun.processor, threads: begun.threads && String(begun.threads), "instruction set": begun.instruction_set,
      processes: begun.world_size && String(begun.world_size), "memory of the machine": bytes(begun.total_memory_bytes),
    },
  };
}

// Returns the contents of the page of several runs.
export function together(names, runs) {
  const row = (name, of) => [name, ...runs.map(of)], newest = run => run.evaluations.at(-1), best = run => run.evaluations.reduce((a, b) => b.loss < a.loss ? b : a);
  const each = (title, of, shown) => ({ keys: runs.map((run, at) => `${names[at]} ${shown(run)}`), lines: runs.map(of) }), lastOf = field => run => decimal(run.steps.at(-1)[field]);
  return {
    table: [
      ["run", ...names], row("state", run => run.end.reason), row("step", run => count(run.step)), row("running time", run => duration(run.running)), row("training loss", lastOf("loss")),
      row("validation loss, last", run => decimal(newest(run).loss)), row("validation loss, best", run => `${decimal(best(run).loss)} at step ${count(best(run).step)}`),
      ...runs[0].scores.map(name => row(runs[0].row.scoreName(name), run => run.row.score(name, newest(run)[name]))),
      row("tokens a second, median", run => run.median), row("tokens", run => count(run.tokens)), row("peak memory", run => bytes(run.peak)), row("predicted peak", run => bytes(run.predicted)),
      row("budget", run => bytes(run.plan.budget)), row("replans", run => count(run.notes.filter(note => note.event === "replan").length)), row("warnings", run => count(run.notes.filter(note => note.event === "warning").length)),
    ],
    charts: {
      "Validation loss": each("", run => run.losses, run => decimal(newest(run).loss)), "Training loss": each("", run => run.curve("loss"), lastOf("loss")),
      "Learning rate": each("", run => run.curve("lr"), lastOf("lr")), "Gradient norm": each("", run => run.curve("grad_norm"), lastOf("grad_norm")),
      "Tokens a second": each("", run => run.speed, run => run.median), "Waiting for data": each("", run => run.wait, run => run.waiting),
      "Resident memory": each("", run => run.rss, run => bytes(run.peak)),
    },
  };
}
