//! The last bits of a run depend on its config, its data, the cut of a batch, and the kernels.
//!
//! They do not depend on the number of threads. A checkpoint records the cut and the kernels, and a resumed run compares them. If they
//! differ, it warns in one line, or is refused with `run.deterministic`.

use candle_core::DType;
use memory_policy::{Budgets, MemorySnapshot};
use planner::{Costs, DoesNotFit, MICRO_BATCH_SAMPLES, Plan};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use t5::Levers;

use crate::config::Config;
use crate::failure::{Failure, Outcome};

/// A checkpoint's record of the kernels that made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernels {
    /// `cpu` or `cuda`.
    pub device: String,
    /// See [`t5_ops::instruction_set`].
    pub instruction_set: String,
    /// See [`t5_ops::KERNELS_VERSION`].
    pub version: u32,
    /// The number of threads, for people: no bit depends on it.
    pub threads: usize,
}

impl Kernels {
    /// The kernels of this process.
    pub fn of_this_process(device: &candle_core::Device) -> Self {
        let device = match device {
            candle_core::Device::Cpu => "cpu",
            candle_core::Device::Cuda(_) => "cuda",
            candle_core::Device::Metal(_) => "metal",
        };
        Self {
            device: device.to_string(),
            instruction_set: t5_ops::instruction_set().to_string(),
            version: t5_ops::KERNELS_VERSION,
            threads: t5_ops::threads(),
        }
    }
}

/// The settings of a run that determine which levers change bits.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Whether the number of samples in a micro-batch is pinned, with any lengths.
    is_pinned: bool,
    /// Whether activations or gradients are bf16.
    has_bf16: bool,
    is_on_cpu: bool,
}

impl Scope {
    /// The scope of a run.
    pub fn new(config: &Config, options: &trainer::TrainerOptions, device: &candle_core::Device) -> Self {
        Self {
            is_pinned: config.memory.pins.value(MICRO_BATCH_SAMPLES.name).is_some(),
            has_bf16: options.precision.activations() == DType::BF16 || options.gradient_dtype() == DType::BF16,
            is_on_cpu: device.is_cpu(),
        }
    }
}

/// One setting that changes bits, with its old and its new value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    setting: &'static str,
    was: String,
    now: String,
    /// The difference in words.
    words: String,
}

impl Difference {
    fn new(setting: &'static str, was: impl ToString, now: impl ToString, words: String) -> Self {
        Self { setting, was: was.to_string(), now: now.to_string(), words }
    }
}

/// Differences between the levers of two plans that change bits.
pub fn of_levers(was: &Levers, now: &Levers, scope: Scope) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut compare = |setting, before: usize, after: usize, words: String| {
        if before != after {
            found.push(Difference::new(setting, before, after, words));
        }
    };
    let [before, after] = [was, now].map(|levers| levers.micro_batch_samples);
    let words = format!("the batch is cut into micro-batches of {after} samples instead of {before}");
    compare("memory.micro_batch_samples", before, after, words);
    // Unless samples are pinned, both of these levers determine how many samples share a micro-batch.
    let [before, after] = [was, now].map(|levers| if scope.is_pinned { 0 } else { levers.recompute_blocks });
    compare("memory.recompute", before, after, format!("{after} blocks are recomputed instead of {before}"));
    let [before, after] = [was, now].map(|levers| rows_of_loss(levers, scope));
    compare(
        "memory.loss_chunk_rows",
        before,
        after,
        format!("the loss computes {after} rows at a time instead of {before}"),
    );
    let [before, after] = [was, now].map(|levers| usize::from(levers.layer_major.is_some()));
    if before != after {
        let name = |layers: usize| ["micro-batch-major", "layer-major"][layers];
        let words = format!("gradients are accumulated {} instead of {}", name(after), name(before));
        found.push(Difference::new("memory.accumulation", name(before), name(after), words));
    }
    found
}

/// The rows of logits at a time, or 0 if they change no bit. Logits that are computed again always take the same number of rows, however
/// few a plan has room for.
fn rows_of_loss(levers: &Levers, scope: Scope) -> usize {
    let dtype = if scope.has_bf16 { DType::BF16 } else { DType::F32 };
    let shows = !scope.is_pinned || !scope.is_on_cpu || t5_ops::keeps_logits(dtype, levers.loss_chunk_rows);
    if shows { levers.loss_chunk_rows } else { 0 }
}

/// Differences between two sets of kernels that change bits.
fn of_kernels(was: &Kernels, now: &Kernels, scope: Scope) -> Vec<Difference> {
    let mut found = Vec::new();
    if was.device != now.device {
        let words = format!("tensors are on {} instead of {}", now.device, was.device);
        found.push(Difference::new("run.device", &was.device, &now.device, words));
    }
    if scope.is_on_cpu && decisive(&was.instruction_set, scope) != decisive(&now.instruction_set, scope) {
        let words = if t5_ops::has_instruction_set(&was.instruction_set) {
            format!("{} are used instead of {}", in_words_of(&now.instruction_set), was.instruction_set)
        } else {
            format!(
                "this processor has no {} instructions, so {} are used",
                was.instruction_set,
                in_words_of(&now.instruction_set)
            )
        };
        found.push(Difference::new("instruction set", &was.instruction_set, &now.instruction_set, words));
    }
    if was.version != now.version {
        let words = "this version of the program adds in another order".to_string();
        found.push(Difference::new("kernels", was.version, now.version, words));
    }
    found
}

/// The name of an instruction set for messages.
fn in_words_of(instruction_set: &str) -> String {
    match instruction_set {
        "software-tiles" => "tiles in software".to_string(),
        name => format!("{name} instructions"),
    }
}

/// The instruction set as far as it changes bits: those that add products of bf16 compute f32 in the same way.
fn decisive(name: &str, scope: Scope) -> &str {
    match name {
        "amx" | "avx512bf16" if !scope.has_bf16 => "avx512",
        "software-tiles" if !scope.has_bf16 => "portable",
        _ => name,
    }
}

/// The facts in the checkpoint that a run resumes from.
pub struct Before<'a> {
    /// The name of the checkpoint.
    pub checkpoint: String,
    /// The plan of its last step.
    pub plan: &'a Plan,
    /// The kernels that made the checkpoint, if recorded.
    pub kernels: Option<&'a Kernels>,
}

/// The plan of a resumed run, with a warning about changed bits.
pub struct Resumed {
    /// The plan.
    pub plan: Plan,
    /// The warning, if bits change.
    pub warning: Option<Warning>,
}

/// A warning about changed bits: one line, and an event for the metrics.
pub struct Warning {
    /// The line.
    pub text: String,
    differences: Value,
}

impl Warning {
    /// The fields of the warning's event.
    pub fn event(&self, step: u64) -> Value {
        json!({"step": step, "kind": "bits", "message": self.text, "differences": self.differences})
    }
}

/// The plan of a resumed run: the checkpoint's plan if possible, and with `run.deterministic` always.
///
/// # Errors
/// Exit 3 if nothing fits; exit 2 if `run.deterministic` is set and the bits would change.
pub fn resume(
    before: &Before,
    now: &Kernels,
    (snapshot, costs, budgets): (&MemorySnapshot, &Costs, Budgets),
    scope: Scope,
    is_deterministic: bool,
) -> Outcome<Resumed> {
    let mut plan = memory_policy::plan_for_resume(snapshot, costs, budgets, before.plan)?;
    let mut differences = of_levers(&before.plan.step.levers, &plan.step.levers, scope);
    let mut refusal = None;
    if is_deterministic && !differences.is_empty() {
        let costs = with_batch_split_of(costs, before.plan, scope);
        if !costs.steps.is_empty() {
            match memory_policy::plan(snapshot, &costs, budgets) {
                Ok(same) => (plan, differences) = (same, Vec::new()),
                Err(why) => refusal = Some(why),
            }
        }
    }
    let cut_changed = !differences.is_empty();
    differences.extend(before.kernels.map(|was| of_kernels(was, now, scope)).into_iter().flatten());
    if is_deterministic && !differences.is_empty() {
        return Err(refused(before, &differences, cut_changed.then_some(refusal.as_ref()), &plan));
    }
    let warning = warning(&differences, before.kernels.is_some(), &plan);
    Ok(Resumed { plan, warning })
}

/// The costs limited to steps with the same cut as a plan.
pub fn with_batch_split_of(costs: &Costs, plan: &Plan, scope: Scope) -> Costs {
    let mut costs = costs.clone();
    costs.steps.retain(|step| of_levers(&plan.step.levers, &step.what.levers, scope).is_empty());
    costs
}

/// The differences in words.
pub fn in_words(differences: &[Difference]) -> String {
    differences.iter().map(|difference| difference.words.as_str()).collect::<Vec<_>>().join("; ")
}

/// The differences, for the metrics.
pub fn to_json(differences: &[Difference]) -> Value {
    differences.iter().map(|d| json!({"setting": d.setting, "was": d.was, "now": d.now})).collect()
}

fn warning(differences: &[Difference], is_said: bool, plan: &Plan) -> Option<Warning> {
    let mut lines = Vec::new();
    if !differences.is_empty() {
        let words = in_words(differences);
        lines.push(format!(
            "from here on the bits differ from those of an uninterrupted run: {words} (budget {})",
            plan.budget
        ));
    }
    if !is_said {
        lines.push(
            "the checkpoint does not name its instruction set and kernel version; the bits may differ \
             from those of an uninterrupted run"
                .to_string(),
        );
    }
    (!lines.is_empty()).then(|| Warning { text: lines.join("; "), differences: to_json(differences) })
}

/// `cut`: `Some` if the cut of a batch is among the differences, with the reason why it cannot be kept, if it does not fit.
fn refused(before: &Before, differences: &[Difference], cut: Option<Option<&DoesNotFit>>, plan: &Plan) -> Failure {
    let line = |d: &Difference| format!("\n  {}: was {}, now {}", d.setting, d.was, d.now);
    let lines: String = differences.iter().map(line).collect();
    let budget = if cut.is_some() { format!("\n  (budget {})", plan.budget) } else { String::new() };
    let mut failure = Failure::usage(format!(
        "{}: cannot resume with the same bits, and `run.deterministic` is true:{lines}{budget}",
        before.checkpoint
    ));
    failure = match cut {
        Some(Some(why)) => failure.hint(why.hint()),
        Some(None) => failure.hint("set the pinned `memory` keys as they were when the checkpoint was saved"),
        None => failure,
    };
    if let Some(d) = differences.iter().find(|d| d.setting == "instruction set") {
        failure = if t5_ops::has_instruction_set(&d.was) {
            failure.hint(format!("set LOW_MEM_T5_ISA={} in the environment to compute as before", d.was))
        } else {
            failure.hint(format!("resume on a processor with {} instructions", d.was))
        };
    }
    failure.hint("`--set run.deterministic=false` resumes with other bits")
}

#[cfg(test)]
mod tests {
    use memory_policy::{Budget, Bytes, CostRow};
    use planner::names::ACTIVATIONS;
    use planner::{Feeding, FeedingChoice, Step, StepChoice};
    use t5::LayerMajor;

    use super::*;

    const SCOPE: Scope = Scope { is_pinned: false, has_bf16: false, is_on_cpu: true };

    /// Micro-batches of 4 in 400 MiB, and slower micro-batches of 2 in 200 MiB.
    fn costs() -> Costs {
        let step = |samples: usize, relative_time: f64| {
            let levers = Levers { micro_batch_samples: samples, loss_chunk_rows: 256, ..Levers::default() };
            let rows = vec![CostRow::new(ACTIVATIONS, (samples as u64 * 100) << 20, "")];
            StepChoice::new(Step { levers, evaluation_samples: 1, ..Step::default() }, rows, relative_time)
        };
        let loader = FeedingChoice::new(Feeding::default(), Vec::new(), 1.0);
        Costs {
            task: "8 samples a step".to_string(),
            steps: vec![step(4, 1.0), step(2, 1.5)],
            loaders: vec![loader],
            ..Costs::default()
        }
    }

    fn snapshot() -> MemorySnapshot {
        MemorySnapshot { total: Bytes::gib(64), available: Bytes::gib(60), ..MemorySnapshot::default() }
    }

    fn budgets(mib: u64) -> Budgets {
        Budget::Explicit(Bytes::mib(mib)).into()
    }

    fn planned(mib: u64) -> Plan {
        memory_policy::plan(&snapshot(), &costs(), budgets(mib)).expect("it fits")
    }

    fn kernels(instruction_set: &str) -> Kernels {
        Kernels { device: "cpu".to_string(), instruction_set: instruction_set.to_string(), version: 2, threads: 2 }
    }

    fn resumed(
        was: Option<&Kernels>,
        now: &Kernels,
        mib: u64,
        is_deterministic: bool,
        scope: Scope,
    ) -> Outcome<Resumed> {
        let plan = planned(1000);
        let before = Before { checkpoint: "c".to_string(), plan: &plan, kernels: was };
        resume(&before, now, (&snapshot(), &costs(), budgets(mib)), scope, is_deterministic)
    }

    #[test]
    fn the_same_plan_and_kernels_go_on_without_a_word_on_any_number_of_threads() {
        let threads = Kernels { threads: 7, ..kernels("avx2") };
        for is_deterministic in [false, true] {
            let resumed = resumed(Some(&kernels("avx2")), &threads, 1000, is_deterministic, SCOPE).expect("it goes on");
            assert!(resumed.warning.is_none());
        }
    }

    #[test]
    fn another_cut_is_said_with_the_budget_or_refused_with_one_that_does() {
        let now = kernels("avx2");
        let warning = resumed(Some(&now), &now, 250, false, SCOPE).expect("it goes on").warning.expect("a line");
        assert_eq!(
            warning.text,
            "from here on the bits differ from those of an uninterrupted run: \
             the batch is cut into micro-batches of 2 samples instead of 4 (budget 250 MiB)"
        );
        let event = warning.event(4);
        assert_eq!(event["differences"][0], json!({"setting": "memory.micro_batch_samples", "was": "4", "now": "2"}));
        let Err(refused) = resumed(Some(&now), &now, 250, true, SCOPE) else { panic!("it goes on") };
        assert!(refused.message.contains("\n  memory.micro_batch_samples: was 4, now 2\n"), "{refused}");
        assert_eq!(refused.hints[0], "the smallest budget that works: --memory-budget 421MiB");
        assert_eq!(
            resumed(Some(&now), &now, 421, true, SCOPE).expect("it does").plan.step.levers.micro_batch_samples,
            4
        );
    }

    #[test]
    fn a_deterministic_run_keeps_its_cut_in_a_larger_budget() {
        let (plan, now) = (planned(250), kernels("avx2"));
        for (is_deterministic, samples) in [(false, 4), (true, 2)] {
            let before = Before { checkpoint: "c".to_string(), plan: &plan, kernels: Some(&now) };
            let with = (&snapshot(), &costs(), budgets(1000));
            let resumed = resume(&before, &now, with, SCOPE, is_deterministic).expect("it goes on");
            assert_eq!(resumed.plan.step.levers.micro_batch_samples, samples);
            assert_eq!(resumed.warning.is_none(), is_deterministic);
        }
        assert_eq!(with_batch_split_of(&costs(), &plan, SCOPE).steps.len(), 1);
    }

    #[test]
    fn an_instruction_set_that_is_not_there_is_said_and_refused_with_a_hint() {
        let (was, now) = (kernels("sse9"), kernels("portable"));
        let warning = resumed(Some(&was), &now, 1000, false, SCOPE).expect("it goes on").warning.expect("a line");
        assert!(
            warning.text.contains("this processor has no sse9 instructions, so portable instructions are used"),
            "{}",
            warning.text
        );
        let Err(refused) = resumed(Some(&was), &now, 1000, true, SCOPE) else { panic!("it goes on") };
        assert!(refused.message.contains("instruction set: was sse9, now portable"), "{refused}");
        assert_eq!(refused.hints[0], "resume on a processor with sse9 instructions");
        let refused = resumed(Some(&now), &was, 1000, true, SCOPE).err().expect("it is refused");
        assert_eq!(refused.hints[0], "set LOW_MEM_T5_ISA=portable in the environment to compute as before");
    }

    #[test]
    fn instructions_for_bf16_show_in_bf16_only() {
        let bf16 = Scope { has_bf16: true, ..SCOPE };
        for (was, now) in [("amx", "avx512"), ("software-tiles", "portable")] {
            for (scope, says) in [(SCOPE, false), (bf16, true)] {
                let resumed = resumed(Some(&kernels(was)), &kernels(now), 1000, false, scope).expect("it goes on");
                assert_eq!(resumed.warning.is_some(), says, "{was} and {now}");
            }
        }
    }

    #[test]
    fn a_checkpoint_that_does_not_name_its_kernels_goes_on_with_a_line() {
        for is_deterministic in [false, true] {
            let resumed = resumed(None, &kernels("avx2"), 1000, is_deterministic, SCOPE).expect("it goes on");
            let text = resumed.warning.expect("a line").text;
            assert!(text.starts_with("the checkpoint does not name its instruction set"), "{text}");
        }
    }

    #[test]
    fn what_lies_on_disk_shows_in_no_bit_and_the_order_of_layers_does() {
        let plan = planned(1000).step.levers;
        let layers = |layers| Levers { layer_major: Some(layers), ..plan };
        let (memory, disk) = (LayerMajor::default(), LayerMajor { boundaries_on_disk: true, ..LayerMajor::default() });
        assert!(of_levers(&layers(memory), &layers(disk), SCOPE).is_empty());
        assert_eq!(of_levers(&plan, &layers(disk), SCOPE)[0].setting, "memory.accumulation");
        let recomputed = Levers { recompute_blocks: 3, ..plan };
        assert_eq!(of_levers(&plan, &recomputed, SCOPE)[0].setting, "memory.recompute");
        assert!(of_levers(&plan, &recomputed, Scope { is_pinned: true, ..SCOPE }).is_empty());
    }
}
