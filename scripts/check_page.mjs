// Compares target/page/will-it-fit.html with the command and with the same code built natively, to the byte.
//
//   cargo xtask page
//   cargo build --release --locked -p will-it-fit --example answer -p train-low-mem --bins
//   node scripts/check_page.mjs [--browser chromium [--pictures DIRECTORY]]
//
// For each case of crates/will-it-fit/cases.json, the whole answer of the page's planner must equal that of its native build. If
// there is a plan, its JSON and its text must equal the output of `plan --json` and `plan --explain`. The command measures the memory
// that it holds at the start, so the script reads that number from the command's bill. With --browser the page itself is opened in
// several states and widths: its table and texts are compared, and no error may occur. Needs node 18 or later and no package.
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { execFileSync, spawnSync } from "node:child_process";

import { open, option } from "./browser.mjs";

const root = path.resolve(import.meta.dirname ?? path.dirname(new URL(import.meta.url).pathname), "..");
const page = path.join(root, "target/page/will-it-fit.html");
const command = path.join(root, "target/release/train_low_mem");
const native = path.join(root, "target/release/examples/answer");
const html = fs.readFileSync(page, "utf8");
const worker = fs.readFileSync(path.join(root, "crates/will-it-fit/page/worker.js"), "utf8");
const cases = JSON.parse(fs.readFileSync(path.join(root, "crates/will-it-fit/cases.json"), "utf8"));

const gzipped = Buffer.from(html.split('type="application/octet-stream">')[1].split("</script>")[0].trim(), "base64");
const ask = new Function(`${worker}; return planner();`)();
const scratch = fs.mkdtempSync(path.join(os.tmpdir(), "will-it-fit-"));
process.on("exit", () => fs.rmSync(scratch, { recursive: true, force: true }));
fs.mkdirSync(path.join(scratch, "MODEL"));

// The bytes of second-level cache for each thread of this machine, read from the same files as the command does.
function secondLevel() {
  const read = (index, file) => {
    try { return fs.readFileSync(`/sys/devices/system/cpu/cpu0/cache/index${index}/${file}`, "utf8").trim(); } catch { return null; }
  };
  for (let index = 0; read(index, "level") !== null; index++) {
    if (read(index, "level") !== "2") continue;
    const [, digits, unit] = read(index, "size").match(/^(\d+)([KM]?)$/);
    const sharing = (read(index, "shared_cpu_list") ?? "0").split(",").map(range => range.split("-").map(Number))
      .reduce((sum, [first, last = first]) => sum + last + 1 - first, 0);
    return Math.floor(digits * ({ K: 1024, M: 1048576 }[unit] ?? 1) / Math.max(1, sharing));
  }
  return 512 * 1024;
}

function run(one, flag) {
  fs.writeFileSync(path.join(scratch, "machine.json"), JSON.stringify([{ total: one.available, available: one.available }]));
  if (one.model) for (const name of ["config.json", "MODEL/config.json"]) fs.writeFileSync(path.join(scratch, name), JSON.stringify(one.model));
  const set = one.set.flatMap(assignment => ["--set", assignment]);
  const env = { ...process.env, LOW_MEM_T5_PRICES: "built-in", LOW_MEM_T5_ISA: one.instruction_set, RAYON_NUM_THREADS: String(one.threads), NO_COLOR: "1" };
  const ran = spawnSync(command, ["plan", "--machine", "machine.json", ...set, flag], { cwd: scratch, env, encoding: "utf8" });
  return { exit: ran.status, out: ran.stdout, err: ran.stderr };
}

function question(one, rss) {
  return {
    set: one.set, model: one.model ? JSON.stringify(one.model) : null, machine: { total: one.available, available: one.available, rss },
    processor: { instruction_set: one.instruction_set, threads: one.threads, second_level_bytes: secondLevel() }, explain: true,
  };
}

const nativeAnswer = asked => JSON.parse(execFileSync(native, { input: JSON.stringify(asked) + "\n", encoding: "utf8", maxBuffer: 1 << 28 }));
const held = text => JSON.parse(text).bill.rows.find(row => row.name === "process").bytes;
const failures = [];
const counts = { native: 0, json: 0, text: 0, refused: 0, shown: 0, skipped: 0, slowest: 0 };
function same(what, left, right, counted) {
  if (left === right) { counts[counted]++; return; }
  const [a, b] = [String(left).split("\n"), String(right).split("\n")];
  const line = a.findIndex((text, index) => text !== b[index]);
  failures.push(`${what}: line ${line + 1}: page \`${a[line]}\`, expected \`${b[line]}\``);
}

// The bytes that a plan adds for a process that has not started yet.
const probe = question({ ...cases[0], model: null }, 1 << 24);
const added = held((await ask(gzipped, probe)).json) - (1 << 24);
for (const one of cases) {
  const began = performance.now();
  const asked = question(one, 20 << 20);
  const answer = await ask(gzipped, asked);
  counts.slowest = Math.max(counts.slowest, performance.now() - began);
  same(`${one.what}, native`, JSON.stringify(answer), JSON.stringify(nativeAnswer(asked)), "native");
  const printed = run(one, "--json");
  if (printed.err.includes("LOW_MEM_T5_ISA")) { counts.skipped++; continue; }
  if (printed.exit !== 0) {
    same(`${one.what}, exit`, answer.exit, printed.exit, "refused");
    continue;
  }
  same(`${one.what}, --json`, (await ask(gzipped, question(one, held(printed.out) - added))).json, printed.out, "json");
  // The command runs a second time and holds a different number of bytes. Its text shows that number rounded to a tenth of a MiB or
  // coarser, so the loop tries the numbers that round to it.
  const explained = run(one, "--explain").out;
  const said = explained.match(/^  process +([\d.]+) MiB/m)?.[1];
  const [middle, step] = said ? [Math.round(said * 256), 1] : [Math.round(held(printed.out) / 4096), 14];
  let text = "";
  for (let number = 0; number < 60 && text !== explained; number++) {
    const pages = middle + step * Math.ceil(number / 2) * (number % 2 ? 1 : -1);
    text = (await ask(gzipped, question(one, pages * 4096 - added))).text;
  }
  same(`${one.what}, --explain`, text, explained, "text");
}

// Opens the page in a browser, and returns the question that it asked its planner and the texts that it shows.
async function opened(browser, address, width, dark, picture) {
  const ready = `Boolean(document.querySelector("#answer")?.dataset.answered && !document.querySelector("#answer").matches(".busy"))`;
  const page = await open(browser, address, { width, dark, ready });
  const id = name => page.value(`document.getElementById("${name}").textContent`);
  const seen = {
    asked: await page.value(`document.querySelector("#answer").dataset.answered`), json: await id("json"), text: await id("text"), verdict: await id("verdict"),
    cells: await page.value(`[...document.querySelectorAll("#bill tr:not(.sum) td:nth-child(2)")].map(cell => cell.textContent)`), peak: await page.value(`document.getElementById("peak")?.textContent`),
    wide: await page.value("document.documentElement.scrollWidth > innerWidth"), errors: page.said, requests: page.asked.filter(url => !/^(blob|data):/.test(url)),
  };
  if (picture) await page.picture(picture);
  await page.close();
  return seen;
}

const browser = option("--browser"), pictures = option("--pictures");
const views = [["preset=t5-base&budget=90", 1240, false], ["budget=48", 400, true], ["task=lora-nf4&preset=t5-v1.1-xl%2C%20flan-t5-xl&budget=100", 1240, true],
  ["preset=mt5-small&card=true&card-budget=112", 400, false], ["set=no.such%3D1", 1240, false]];
for (const [number, [fields, width, dark]] of (browser ? views : []).entries()) {
  const seen = await opened(browser, `file://${page}#${fields}`, width, dark, pictures && path.join(pictures, `page-${number}.png`));
  const what = `browser, ${fields}`;
  same(`${what}, errors`, seen.errors.join("\n"), "", "shown");
  same(`${what}, asked of a network`, seen.requests.join("\n"), "", "shown");
  same(`${what}, wider than the window`, seen.wide, false, "shown");
  if (!seen.asked) { failures.push(`${what}: no answer`); continue; }
  const expected = nativeAnswer(JSON.parse(seen.asked));
  same(`${what}, JSON`, seen.json, expected.json, "shown");
  same(`${what}, text`, seen.text, expected.text || expected.error, "shown");
  if (expected.exit !== 0) continue;
  const plan = JSON.parse(expected.json);
  const rows = [...plan.bill.rows.filter(row => row.bytes > 0).sort((a, b) => b.bytes - a.bytes), ...(plan.bill.device?.rows ?? []).filter(row => row.bytes > 0)];
  same(`${what}, rows`, seen.cells.map(cell => cell.replaceAll(/\D/g, "")).join(), rows.map(row => row.bytes).join(), "shown");
  same(`${what}, peak`, seen.peak.replaceAll(/\D/g, ""), String(plan.predicted_peak_bytes), "shown");
}

console.log(`${cases.length} cases: ${counts.native} answers equal to the native build's, ${counts.json} times the JSON and ${counts.text} times the text of plan, ${counts.refused} refusals, ${counts.shown} things seen in a browser; ${counts.skipped} need another processor for the command; the slowest answer took ${Math.round(counts.slowest)} ms`);
failures.forEach(failure => console.error(`error: ${failure}`));
process.exit(failures.length ? 1 : 0);
