"use strict";
const $ = id => document.getElementById(id);
// Published models by the preset that has their shape; those of mT5 differ in the vocabulary.
const SHAPES = {
  "t5-small": "t5-small", "t5-base": "t5-base", "t5-large": "t5-large", "t5-3b": "t5-3b",
  "t5-v1.1-small, flan-t5-small": "t5-v1.1-small", "t5-v1.1-base, flan-t5-base": "t5-v1.1-base",
  "t5-v1.1-large, flan-t5-large": "t5-v1.1-large", "t5-v1.1-xl, flan-t5-xl": "t5-v1.1-xl",
  "mt5-small": [512, 1024, 6, 8], "mt5-base": [768, 2048, 12, 12], "mt5-large": [1024, 2816, 16, 24], "mt5-xl": [2048, 5120, 32, 24],
  "chatlm-0.2b": "chatlm-0.2b", "tiny": "tiny",
};
const MIB = 1048576;
let dropped = null;

// A slider's position as bytes: eight steps to the doubling, whole MiB.
const sliderBytes = place => Math.round(2 ** (6 + place / 16)) * MIB;
const shown = bytes => bytes >= 1024 * MIB ? `${(bytes / 1024 / MIB).toFixed(2)} GiB` : `${(bytes / MIB).toFixed(1)} MiB`;
const grouped = bytes => String(bytes).replace(/\B(?=(\d{3})+$)/g, " ");
const whole = (id, least) => Math.max(least, Math.round(Number($(id).value) || 0));

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// The settings of the form as assignments, those of the command's `--set`.
function assignments() {
  const task = $("task").value, precision = $("precision").value;
  const set = task === "scratch"
    ? [`model.config=${configText() === null ? presetName() : "config.json"}`]
    : ["model.init_from=MODEL"];
  if (task === "finetune") set.push("run.finetune=true");
  if (task.startsWith("lora")) set.push(`lora.rank=${whole("rank", 1)}`);
  if (task === "lora-int8" || task === "lora-nf4") set.push(`model.base_precision=${task.slice(5)}`);
  set.push(`data.max_source_tokens=${whole("source", 2)}`, `data.max_target_tokens=${whole("target", 2)}`, `train.batch_size=${whole("batch", 1)}`);
  if (precision !== "f32") set.push("train.precision=bf16");
  if (precision === "bf16-stochastic") set.push("train.master_weights=stochastic-rounding");
  set.push(`optimizer.name=${$("optimizer").value}`);
  if (whole("steps", 0) > 0) set.push(`train.max_steps=${whole("steps", 0)}`);
  set.push(`memory.budget=${sliderBytes($("budget").value) / MIB}MiB`);
  if ($("card").checked) set.push("run.device=cuda", `memory.device_budget=${sliderBytes($("card-budget").value) / MIB}MiB`);
  else set.push("run.device=cpu");
  return set.concat($("set").value.split("\n").map(line => line.trim()).filter(Boolean));
}

function question() {
  const free = whole("free", 1) * 1024 * MIB;
  return {
    set: assignments(),
    model: configText(),
    preset: presetName(),
    machine: { total: free, available: free, rss: whole("rss", 1) * 1024 },
    processor: { instruction_set: $("isa").value, threads: whole("threads", 1), second_level_bytes: whole("cache", 1) * 1024 },
    explain: true,
  };
}

// The planner's own name for the chosen shape, or its config.json.
function presetName() {
  const shape = SHAPES[$("preset").value];
  return !dropped && typeof shape === "string" ? shape : null;
}
function configText() {
  if (dropped) return dropped.text;
  const shape = SHAPES[$("preset").value];
  if (typeof shape === "string") return null;
  const [d_model, d_ff, num_heads, num_layers] = shape;
  return JSON.stringify({ model_type: "mt5", vocab_size: 250112, d_model, d_ff, d_kv: 64, num_heads, num_layers, num_decoder_layers: num_layers, feed_forward_proj: "gated-gelu", tie_word_embeddings: false, relative_attention_num_buckets: 32, relative_attention_max_distance: 128, dropout_rate: 0.1, layer_norm_epsilon: 1e-6, pad_token_id: 0, eos_token_id: 1, decoder_start_token_id: 0 }, null, 2);
}

function quoted(text) {
  return /^[\w.,:=\/@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function commands(asked) {
  const set = asked.set.map(one => `--set ${quoted(one)}`).join(" \\\n  ");
  const model = asked.set[0].startsWith("model.init_from") ? "# MODEL: a directory with the model's config.json, weights and tokenizer\n"
    : asked.model === null ? "" : "# config.json: the model's own\n";
  return `${model}train_low_mem plan --explain \\\n  ${set}\n\n# the same run; --data names your rows\ntrain_low_mem --data rows.jsonl \\\n  ${set}\n`;
}

const kind = name => `--k:var(--${name.replaceAll(/[^a-z]+/g, "-")},var(--other))`;

function row(name, bytes, most, note) {
  const made = element("tr");
  const swatch = element("i", { className: "swatch" });
  const bar = element("i");
  bar.style.width = `${100 * bytes / most}%`;
  const barCell = element("td", { className: "bar" }, bar);
  made.append(element("td", {}, swatch, name), element("td", { className: "n", textContent: grouped(bytes) }),
    element("td", { className: "n", textContent: (bytes / MIB).toFixed(1) }), barCell, element("td", { className: "mute", textContent: note }));
  made.style.cssText = kind(name);
  return made;
}

function fact(name, value, more) {
  return element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }, element("small", { textContent: more })));
}

function showBill(plan) {
  const rows = plan.bill.rows.filter(row => row.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  const most = Math.max(1, ...rows.map(row => row.bytes));
  const sum = element("tr", { className: "sum" }, element("td", { textContent: "predicted peak" }),
    element("td", { className: "n", id: "peak", textContent: grouped(plan.predicted_peak_bytes) }),
    element("td", { className: "n", textContent: (plan.predicted_peak_bytes / MIB).toFixed(1) }), element("td"),
    element("td", { className: "mute", textContent: `of the process; largest phase: ${plan.bill.binding}` }));
  const device = plan.bill.device?.rows ?? [];
  const deviceRows = device.filter(row => row.bytes > 0).map(one => row(one.name, one.bytes, Math.max(...device.map(row => row.bytes)), `on the GPU; ${one.note}`));
  $("bill").replaceChildren(...rows.map(one => row(one.name, one.bytes, most, one.note)), sum, ...deviceRows);
}

function showPhases(plan) {
  const phases = plan.bill.phase_rows ?? [];
  const total = phase => phase.rows.reduce((sum, row) => sum + row.bytes, 0);
  const most = Math.max(1, ...phases.map(total));
  $("phases").replaceChildren(...phases.flatMap(phase => {
    const bar = element("div", { className: "bar-of" }, ...phase.rows.filter(row => row.bytes > 0).map(row => {
      const part = element("span", { title: `${row.name}: ${shown(row.bytes)}` });
      part.style.cssText = `${kind(row.name)};width:${100 * row.bytes / most}%`;
      return part;
    }));
    return [element("span", { textContent: phase.name }), bar, element("span", { textContent: shown(total(phase)) })];
  }));
}

// The end of `plan --explain`: `lever = value`, and below it the other values.
function showLevers(text) {
  const made = [];
  for (const line of text.split("\n\n").at(-1).split("\n").filter(Boolean)) {
    if (!line.startsWith("  ")) {
      const [lever, ...value] = line.split(" = ");
      made.push({ lever, value: value.join(" = "), others: [] });
    } else if (made.length) {
      made.at(-1).others.push(line.trim().split(/\s{2,}/));
    }
  }
  $("levers").replaceChildren(...made.map(({ lever, value, others }) => {
    const table = element("table", {}, ...others.map(([other, bytes, time]) => element("tr", {},
      element("td", { textContent: other }), element("td", { className: "n", textContent: bytes }), element("td", { className: "n", textContent: time }))));
    const beside = others.length ? table : element("span", { className: "mute", textContent: "nothing else was offered" });
    return element("div", { className: "lever" }, element("div", {}, element("b", { textContent: value }), element("span", { className: "mute", textContent: lever })), beside);
  }));
}

function show(asked, answer) {
  const fits = answer.exit === 0;
  const section = $("answer");
  section.className = fits ? "fits" : "refused";
  $("commands").textContent = commands(asked);
  $("text").textContent = answer.text || answer.error;
  $("json").textContent = answer.json;
  $("planned").hidden = $("top").hidden = !fits;
  $("refusal").hidden = fits;
  section.dataset.answered = JSON.stringify(asked);
  if (!fits) {
    $("verdict").textContent = answer.exit === 3 ? "It does not fit" : "This is no plan";
    $("refusal").replaceChildren(...answer.error.trimEnd().split("\n").map(line => element("p", { textContent: line })));
    return;
  }
  const plan = JSON.parse(answer.json);
  $("verdict").textContent = `It fits: ${shown(plan.predicted_peak_bytes)} of ${shown(plan.budget_bytes)}`;
  const facts = [
    fact("predicted peak", shown(plan.predicted_peak_bytes), `largest phase: ${plan.bill.binding}`),
    fact("budget", shown(plan.budget_bytes), plan.bill.budget_source ?? ""),
    fact("smallest budget of this plan", shown(plan.smallest_budget_bytes), "peak and safety margin"),
    fact("checkpoint", shown(plan.checkpoint_bytes), plan.step_written_bytes > 0 ? `${shown(plan.step_written_bytes)} written a step in place of memory` : "nothing is written in place of memory"),
  ];
  if (plan.predicted_device_peak_bytes) facts.push(fact("on the GPU", shown(plan.predicted_device_peak_bytes), "predicted"));
  $("top").replaceChildren(...facts);
  showBill(plan);
  showPhases(plan);
  showLevers(answer.text);
}

// Numbers of the form change faster than large models are planned: of questions that wait, only the last is asked.
const gzipped = Uint8Array.from(atob($("planner").textContent.trim()), letter => letter.charCodeAt(0));
const source = URL.createObjectURL(new Blob([`const ask=(${planner})();onmessage=async({data:[gzipped,question]})=>postMessage(await ask(gzipped,question))`], { type: "text/javascript" }));
const thread = new Worker(source);
let asking = null, waiting = null, sent = false;
function ask() {
  waiting = question();
  if (asking) return;
  asking = waiting;
  waiting = null;
  $("answer").classList.add("busy");
  thread.postMessage([sent ? null : gzipped, asking]);
  sent = true;
}
thread.onmessage = ({ data }) => {
  show(asking, data);
  asking = null;
  if (waiting) ask();
};

// The form is kept behind the `#` of the address, so that an answer can be passed on. A dropped file is not.
const FIELDS = [...document.querySelectorAll("form [id]")].filter(field => field.id !== "file" && "value" in field && field.tagName !== "OUTPUT");
const initial = new Map(FIELDS.map(field => [field.id, field.type === "checkbox" ? field.checked : field.value]));
function remember() {
  const changed = FIELDS.filter(field => (field.type === "checkbox" ? field.checked : field.value) !== initial.get(field.id));
  const text = changed.map(field => `${field.id}=${encodeURIComponent(field.type === "checkbox" ? field.checked : field.value)}`).join("&");
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}
function recall() {
  for (const pair of location.hash.slice(1).split("&").filter(Boolean)) {
    const [id, value] = pair.split("=");
    const field = FIELDS.find(field => field.id === id);
    if (!field) continue;
    if (field.type === "checkbox") field.checked = value === "true";
    else field.value = decodeURIComponent(value ?? "");
  }
}

function changed() {
  $("budget-is").textContent = shown(sliderBytes($("budget").value));
  $("card-budget-is").textContent = shown(sliderBytes($("card-budget").value));
  $("card-label").hidden = !$("card").checked;
  $("rank").parentElement.hidden = !$("task").value.startsWith("lora");
  $("model-is").textContent = dropped ? `${dropped.name}, dropped here` : "";
  try { remember(); } catch { /* An address that cannot be changed is none to pass on. */ }
  ask();
}

async function take(file) {
  if (!file) return;
  if (file.size > MIB) { $("model-is").textContent = `${file.name}: a config.json is smaller than 1 MiB`; return; }
  dropped = { name: file.name, text: await file.text() };
  $("preset").value = "";
  changed();
}

$("preset").replaceChildren(element("option", { value: "", textContent: "the dropped config.json", hidden: true }), ...Object.keys(SHAPES).map(name => element("option", { value: name, textContent: name })));
$("preset").value = "t5-small";
initial.set("preset", "t5-small");
recall();
$("preset").addEventListener("change", () => { dropped = null; $("file").value = ""; });
$("form").addEventListener("submit", event => event.preventDefault());
$("form").addEventListener("input", event => { if (event.target.id !== "file") changed(); });
$("file").addEventListener("change", event => take(event.target.files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, event => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") take(event.dataTransfer.files[0]);
  });
}
changed();
