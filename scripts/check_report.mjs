// Opens the pages that `report` and `plan --html` write in a headless browser, and compares them with the run's metrics.jsonl.
//
//   cargo build --release --locked -p train-low-mem
//   node scripts/check_report.mjs [--binary target/release/train_low_mem] [--browser chromium-headless-shell] [--pictures DIRECTORY]
//
// It makes two short runs of the embedded default. The second one has a budget and is resumed. Each page is opened from disk: wide
// and narrow, light and dark, and as print. The script computes every number again from metrics.jsonl and compares it with the page. Every
// curve must pass through its values according to its axis. No text may be cut off, overlap another text, or have low contrast. The page
// may send no network request. Needs node 18 or later and no package.
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { spawnSync } from "node:child_process";

import { open, option } from "./browser.mjs";
import { billOf, bytes, count, decimal, duration, runOf, together } from "./report_numbers.mjs";

const root = path.resolve(import.meta.dirname ?? path.dirname(new URL(import.meta.url).pathname), "..");
const command = path.resolve(option("--binary") ?? path.join(root, "target/release/train_low_mem"));
const browser = option("--browser") ?? "chromium-headless-shell", pictures = option("--pictures");
const scratch = fs.mkdtempSync(path.join(os.tmpdir(), "report-"));
process.on("exit", () => fs.rmSync(scratch, { recursive: true, force: true }));

const MAX_BYTES = 300_000;
const VIEWS = [
  { name: "wide", width: 1240 }, { name: "wide dark", width: 1240, dark: true }, { name: "narrow", width: 400 }, { name: "narrow dark", width: 400, dark: true },
  // An A4 page without its margins.
  { name: "print", width: 718, print: true },
];

function run(...words) {
  const ran = spawnSync(command, words, { cwd: scratch, encoding: "utf8", maxBuffer: 1 << 28, env: { ...process.env, NO_COLOR: "1" } });
  if (ran.status !== 0) throw new Error(`${words.join(" ")}: exit ${ran.status}: ${ran.error ?? ran.stderr}`);
  return ran.stdout;
}

const failures = [];
let compared = 0;
function same(what, seen, expected) {
  compared++;
  if (JSON.stringify(seen) === JSON.stringify(expected)) return;
  if (Array.isArray(seen) && Array.isArray(expected) && seen.length === expected.length) return seen.forEach((one, at) => same(`${what}, ${at + 1}`, one, expected[at]));
  failures.push(`${what}: page \`${JSON.stringify(seen)}\`, expected \`${JSON.stringify(expected)}\``);
}
const near = (what, seen, expected, within) => { compared++; if (!(Math.abs(seen - expected) <= within)) failures.push(`${what}: page ${seen}, expected ${expected} within ${within}`); };

// Runs in the page, and returns the texts and shapes that it shows, with their positions.
function look() {
  const text = element => element.textContent.replace(/\s+/g, " ").trim(), all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const direct = element => [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("").trim();
  const onScreen = path => {
    const matrix = path.getScreenCTM();
    return (path.getAttribute("d").match(/-?[\d.]+,-?[\d.]+/g) ?? []).map(pair => { const [x, y] = pair.split(",").map(Number); return [matrix.a * x + matrix.e, matrix.d * y + matrix.f]; });
  };
  const box = element => element.getBoundingClientRect();
  const charts = all("figure.chart").map(figure => ({
    title: text(figure.querySelector("strong")), keys: all(".key", figure).map(text), rules: all("i.on,i.beyond", figure).map(text), log: figure.dataset.y.endsWith(" 1"),
    y: all("i.y", figure).map(tick => [text(tick), box(tick).top + box(tick).height / 2]),
    x: all("i.x", figure).map(tick => [text(tick), box(tick).left + box(tick).width * (tick.matches(".end") ? 0.9 : 0.5)]),
    lines: all("path.line", figure).map(onScreen), areas: all("path.area", figure).map(onScreen), dashes: all("path.rule", figure).map(onScreen), marks: all("path.mark", figure).map(onScreen),
    plot: box(figure.querySelector(".plot")).toJSON(),
  }));
  const cells = table => all("tr", table).map(row => [...row.cells].map(text));

  // Collects texts that cannot be read. Hidden texts do not count: a bar without room for a text hides it completely.
  const faults = [], shown = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const colour = value => value.match(/[\d.]+/g).map(Number);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("script,style,svg") || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const holder = element.closest(".bar span,.scroll"), words = node.data.trim().slice(0, 40);
    for (const rect of range.getClientRects()) {
      const edge = holder && box(holder), isBar = holder?.matches("span");
      if (isBar && rect.top > edge.bottom - 2) continue;
      if (isBar && (rect.right > edge.right + 1 || rect.bottom > edge.bottom + 1)) faults.push(`cut off: ${words}`);
      if (!isBar && (rect.left < -0.5 || (rect.right > innerWidth + 0.5 && !(holder && edge.right <= innerWidth)))) faults.push(`beyond the edge: ${words}`);
      shown.push([rect, words, holder?.matches(".scroll") ? holder : null]);
    }
    let behind = element;
    while (behind && colour(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const [a, b] = [colour(getComputedStyle(element).color), behind ? colour(getComputedStyle(behind).backgroundColor) : [255, 255, 255]].map(luminance);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(2)}: ${words}`);
  }
  for (const [at, [a, words, of]] of shown.entries()) for (const [b, others, holder] of shown.slice(at + 1)) {
    if (of !== holder) continue;
    const [across, down] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
    // The box of a text is higher than its letters.
    if (across > 1 && down > 3) faults.push(`over each other: ${words} / ${others}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push("wider than the window");
  const details = all("details").filter(one => !text(one).startsWith("resolved.toml"));
  return {
    charts, faults, title: text(document.querySelector("h1")), status: text(document.querySelector(".status")),
    top: all("dl.top>div").map(fact => [text(fact.querySelector("dt")), direct(fact.querySelector("dd")), text(fact.querySelector("small"))]),
    tables: all("table").filter(table => !table.matches(".answers")).map(cells), mute: all("p").map(text),
    bars: all(".bars>div").map(row => [text(row.children[0]), all("span", row).map(span => span.title), text(row.children[2])]),
    widths: all(".bars>div").map(row => all("span", row).map(span => box(span).width / box(row.querySelector(".bar")).width)),
    limits: all(".bars .limit").map(limit => (box(limit).left - box(limit.parentElement).left) / box(limit.parentElement).width),
    answers: details.map(one => [text(one.querySelector("summary")), cells(one.querySelector("table")).slice(1)]),
    // A closed `details` shows no text, but `textContent` still has it.
    facts: Object.fromEntries(all("dl.facts dt").map(name => [text(name), text(name.nextElementSibling)])),
    resolved: all("pre").map(pre => pre.textContent),
  };
}

// Parses the label of a tick.
function valueOf(text) {
  const [, digits, unit] = text.match(/^(-?[\d.]+(?:e-?\d+)?) ?([A-Za-z]*)$/);
  const units = { "": 1, k: 1e3, M: 1e6, G: 1e9, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, s: 1e3, min: 6e4, h: 3.6e6 };
  return Number(digits) * units[unit];
}

// Returns a function from a position in the window to a value, derived from the labels of an axis alone.
function axis(ticks, isLog) {
  const [from, to] = [ticks[0], ticks.at(-1)].map(([text, place]) => [isLog ? Math.log(valueOf(text)) : valueOf(text), place]);
  const scale = (to[0] - from[0]) / (to[1] - from[1]);
  return place => isLog ? Math.exp(from[0] + (place - from[1]) * scale) : from[0] + (place - from[1]) * scale;
}

function chartsAre(what, seen, expected) {
  same(`${what}, titles of charts`, seen.map(chart => chart.title), Object.keys(expected));
  for (const chart of seen) {
    const { keys, lines = [], rules = [], marks = [], heights, areas = [] } = expected[chart.title] ?? {};
    const of = `${what}, chart ${chart.title}`, y = axis(chart.y, chart.log), x = chart.x.length > 1 ? axis(chart.x) : place => (place - chart.plot.left) / chart.plot.width * areas[0].at(-1)[0];
    same(`${of}, legend`, chart.keys, keys);
    same(`${of}, rules`, chart.rules, rules);
    // One pixel, and the rounding of the labels' positions and of the curve's units.
    const [wide, high] = [Math.abs(x(chart.plot.right) - x(chart.plot.left)), Math.abs(y(chart.plot.top) - y(chart.plot.bottom))];
    const points = (name, curves, values) => {
      same(`${of}, number of ${name}`, curves.map(curve => curve.length), values.map(curve => curve.length));
      values.forEach((curve, at) => curve.forEach(([step, value], n) => {
        const [left, top] = curves[at]?.[n] ?? [NaN, NaN];
        near(`${of}, ${name} ${at + 1}, point ${n + 1}, x`, x(left), step, wide * (0.002 + 1 / chart.plot.width));
        near(`${of}, ${name} ${at + 1}, point ${n + 1}, y`, y(top), value, high * (0.002 + 1 / chart.plot.height));
      }));
    };
    points("line", chart.lines, lines);
    points("area", chart.areas.map(area => area.slice(0, area.length / 2)), areas);
    same(`${of}, number of marks`, chart.marks.length, marks.length);
    marks.forEach((mark, at) => near(`${of}, mark`, x(chart.marks[at][0][0]), mark, wide * (0.002 + 1 / chart.plot.width)));
    heights?.forEach((height, at) => near(`${of}, rule`, y(chart.dashes[at][0][1]), height, high * (0.002 + 1 / chart.plot.height)));
  }
}

// Checks the values that a chart shows at the mouse's position: the nearest value of each curve, to three digits.
async function tipsAre(what, page, charts) {
  for (const [at, { title }] of charts.entries()) {
    const { lines = [], keys } = title in charts.expected ? charts.expected[title] : {};
    if (!lines.length) continue;
    for (const share of [0.03, 0.34, 0.5, 0.71, 0.98]) {
      const plot = await page.value(`(() => { const plot = document.querySelectorAll("figure.chart .plot")[${at}]; plot.scrollIntoView({ block: "center" }); return plot.getBoundingClientRect().toJSON(); })()`);
      await page.hover(plot.left + share * plot.width, plot.top + plot.height / 2);
      const told = await page.value(`document.querySelectorAll("figure.chart")[${at}].querySelector(".tip")?.textContent ?? ""`);
      const box = await page.value(`(() => { const box = document.querySelectorAll("figure.chart")[${at}].querySelector(".tip").getBoundingClientRect(); return box.left >= 0 && box.right <= innerWidth; })()`);
      same(`${what}, ${title}, the tip is in the window`, box, true);
      const parts = told.split(" · "), chart = charts[at], x = axis(chart.x);
      const [, number, unit = ""] = parts[0].match(/([\d.,]+) ?(s|min|h)?$/) ?? [];
      const place = valueOf(`${number?.replaceAll(",", "")} ${unit}`), aim = x(plot.left + share * plot.width);
      same(`${what}, ${title}, values in the tip`, parts.length - 1, lines.length);
      lines.forEach((curve, n) => {
        const closest = curve.reduce((a, b) => Math.abs(b[0] - aim) < Math.abs(a[0] - aim) ? b : a);
        const [, value, unit = "", other] = parts[n + 1]?.match(/(-?[\d.,e-]+)(?: (KiB|MiB|GiB))?(?: at (.*))?$/) ?? [];
        const its = other ? valueOf(other.replace(/^step /, "").replaceAll(",", "")) : place;
        const found = curve.filter(([step]) => Math.abs(step - its) <= (chart.x.at(-1)[0].match(/[a-z]/) ? 100 : 0));
        near(`${what}, ${title}, place of the tip`, its, closest[0], Math.abs(x(plot.right) - x(plot.left)) * 0.02);
        const seen = valueOf(`${value?.replaceAll(",", "")} ${unit}`), within = Math.max(Math.abs(seen) * 0.006, Math.abs(axis(chart.y, chart.log)(plot.top) - axis(chart.y, chart.log)(plot.bottom)) * 1e-4);
        if (!found.some(([, value]) => Math.abs(value - seen) <= within)) failures.push(`${what}, ${title}: the tip \`${told}\` is of no value: ${JSON.stringify(found.slice(0, 4))}`);
        compared++;
      });
    }
  }
}

const BUDGET = 64;
const shared = ["--max-steps", "60", "--set", "train.eval_every_steps=20"];
run("--output", "a", ...shared);
const lower = ["--output", "b", "--learn-rate", "0.01", "--memory-budget", `${BUDGET}MiB`, "--set", "train.eval_every_steps=20"];
run(...lower, "--max-steps", "40");
run(...lower, "--max-steps", "60", "--keep-training");
run("report", "a", "b", "--output", "both.html");
const plan = JSON.parse(run("plan", "--json", "--html", "plan.html", "--set", "train.batch_size=32"));
run("report", "b");
const files = ["a", "b"].map(name => path.join(scratch, name)), runs = files.map(file => runOf(file)), both = together(["a", "b"], runs);
// Run a has the page that the run wrote. The page of run b was written again by `report`.
const pagesOfRuns = { a: runOf(files[0], true), b: runs[1] };

function ofRun(what, seen, name) {
  const run = pagesOfRuns[name];
  same(`${what}, title`, seen.title, name);
  same(`${what}, status`, seen.status, run.status);
  same(`${what}, top`, seen.top, run.top);
  chartsAre(what, seen.charts, run.charts);
  billIs(what, seen, run.bill, run.plan);
  same(`${what}, evaluations`, seen.tables[0], run.table);
  if (run.events.length) same(`${what}, events`, seen.tables[1], run.events);
  same(`${what}, answers`, seen.answers, run.answers.map(([summary, rows]) => [summary, rows.map(row => row.map(text => text.replace(/\s+/g, " ").trim()))]));
  const facts = Object.entries(run.facts).filter(([, value]) => value !== undefined && value !== null && value !== false);
  same(`${what}, facts`, Object.entries(seen.facts).sort(), facts.sort());
  same(`${what}, resolved.toml`, seen.resolved.map(text => text.replace(/^(#.*)?\n+/, "")), [run.settings]);
  const given = seen.tables.at(-1).map(([key, , origin]) => [key, origin]);
  same(`${what}, settings that were given`, ["train.max_steps", "train.eval_every_steps"].every(key => given.some(([other]) => other === key)), true);
  same(`${what}, defaults among the settings`, given.filter(([key]) => ["run.seed", "data.shuffle", "memory.device_budget"].includes(key)), []);
}

function billIs(what, seen, bill, plan) {
  same(`${what}, bars`, seen.bars, bill.bars);
  same(`${what}, bill`, seen.tables.find(table => table[0][0] === "MiB"), bill.table);
  const totals = bill.shares.map(rows => rows.reduce((a, b) => a + b)), peak = Math.max(...totals), scale = plan.budget <= 3 * peak ? Math.max(peak, plan.budget) : peak;
  same(`${what}, dashes of the budget`, seen.limits.length, plan.budget <= 3 * peak ? totals.length : 0);
  seen.limits.forEach(limit => near(`${what}, budget`, limit, plan.budget / scale, 0.01));
  // Neighbouring spans that are thinner than their border are drawn too wide.
  bill.shares.forEach((rows, at) => rows.forEach((row, n) => near(`${what}, bar ${bill.bars[at][0]}, part ${n + 1}`, seen.widths[at]?.[n], row / scale, 0.015)));
}

function ofPlan(what, seen) {
  same(`${what}, top`, seen.top, [
    ["predicted peak", bytes(plan.predicted_peak), `largest phase: ${plan.bill.binding}`], ["budget", bytes(plan.budget), plan.bill.budget_source],
    ["smallest budget of this plan", bytes(plan.smallest_budget_bytes), "peak and safety margin"],
    ["time of a step", `${decimal(plan.step_seconds)} s`, `${duration(plan.run_seconds * 1e3)} for all steps`],
  ]);
  billIs(what, seen, billOf(plan), plan);
  chartsAre(what, seen.charts, { "A step, from event to event": billOf(plan).step });
}

function ofBoth(what, seen) {
  same(`${what}, title`, [seen.title, seen.status], ["2 runs", "a · b"]);
  same(`${what}, figures`, seen.tables[0], both.table);
  chartsAre(what, seen.charts, both.charts);
  const rows = Object.fromEntries(seen.tables[1].map(([key, ...values]) => [key, values]));
  same(`${what}, settings that differ`, [rows["optimizer.learning_rate"], rows["memory.budget"], rows["run.seed"]], [["0.03", "0.01"], ['"auto"', `"${BUDGET}MiB"`], undefined]);
}

const pages = [
  ["a/report.html", ofRun, "a", pagesOfRuns.a.charts], ["b/report.html", ofRun, "b", runs[1].charts], ["both.html", ofBoth, null, both.charts], ["plan.html", ofPlan, null, {}],
];
let largest = 0;
if (pictures) fs.mkdirSync(pictures, { recursive: true });
for (const [file, is, name, expected] of pages) for (const view of VIEWS) {
  const what = `${file}, ${view.name}`, page = await open(browser, `file://${path.join(scratch, file)}`, view);
  if (pictures) await page.picture(path.join(pictures, `${file.replace("/report", "").replace(".html", "")}-${view.name.replace(" ", "-")}.png`));
  const seen = await page.value(`(${look})()`);
  is(what, seen, name);
  same(`${what}, hard to read`, [...new Set(seen.faults)], []);
  if (view.name === "wide") await tipsAre(what, page, Object.assign(seen.charts, { expected }));
  if (view.print) same(`${what}, is printed`, (await page.tell("Page.printToPDF", { printBackground: true })).data.length > 1000, true);
  same(`${what}, said`, page.said, []);
  same(`${what}, asked of a network`, page.asked, []);
  largest = Math.max(largest, fs.statSync(path.join(scratch, file)).size);
  await page.close();
}
same("the largest page is below 300 KB", largest < MAX_BYTES, true);

console.log(`${pages.length} pages in ${VIEWS.length} views: ${count(compared)} things compared with metrics.jsonl and the plan; the largest page has ${count(largest)} bytes`);
failures.slice(0, 60).forEach(failure => console.error(`error: ${failure}`));
if (failures.length > 60) console.error(`error: and ${failures.length - 60} more`);
process.exit(failures.length ? 1 : 0);
