//! The memory of planning beyond the choices that it keeps. There is only one test, because the allocator counts all threads.

use memory_policy::{Budget, Bytes, MemorySnapshot, MemorySpace};
use planner::{Evaluation, Feed, Job, Pins, Prices, Processes, RowCounts, Training, Wanted, Work};
use t5::safetensors::StoredIn;
use t5::{AnswerShape, Config, Lora, StoredWeights};
use t5_ops::{InstructionSet, Processor};
use trainer::TrainerOptions;

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// The result of `f`, and the most bytes allocated at a time meanwhile.
fn counted<T>(f: impl FnOnce() -> T) -> (T, u64) {
    heap::count_allocations(true);
    let result = f();
    heap::count_allocations(false);
    (result, heap::peak_live())
}

/// Plans an adapter over `samples` samples a step. Returns the bytes of the choices that remain, and the most bytes allocated beside them.
fn planning(samples: usize, evaluation: Option<Evaluation<'_>>) -> (u64, u64) {
    let model = Config { lora: Some(Lora::default()), ..Config::preset("t5-small").expect("a preset") };
    let options = TrainerOptions { total_steps: 2, ..TrainerOptions::default() };
    let base = StoredWeights {
        is_bf16: false,
        has_duplicates: false,
        read_from: StoredIn::ANY,
        copied_bytes: [0; 2],
        copying_bytes: [0; 2],
    };
    let training = Training {
        options: &options,
        disk_writes: 1 << 40,
        evaluation,
        saves: true,
        wanted: Wanted::Undominated(None),
        base: Some(base),
        frozen: None,
        processes: Processes::default(),
        lengths: &[],
    };
    let job = Job {
        model: &model,
        work: Work::Training(training),
        samples,
        longest: (64, 32),
        place: MemorySpace::Host,
        budgets: Budget::Explicit(Bytes::gib(4)).into(),
        pins: &Pins::default(),
        feed: Feed::Given,
        process_note: "",
        past: Vec::new(),
        prices: Prices::vectors(),
    };
    let now = MemorySnapshot { available: Bytes::gib(64), total: Bytes::gib(64), ..MemorySnapshot::default() };
    let processor = Processor { instruction_set: InstructionSet::Avx2, threads: 2, second_level_bytes: 1 << 20 };
    t5_ops::set_target_processor(processor);
    let (costs, most) = counted(|| planner::costs(&job, &now).expect("it trains"));
    let (_copy, left) = counted(|| costs.clone());
    (left, most - left)
}

// Freed rows of choices leave holes in the pages of those that stay, and the process keeps the pages.
#[test]
fn choices_are_made_one_at_a_time_however_many_rows_they_have() {
    let evaluation =
        Evaluation { answer: AnswerShape::greedy(32), counts: RowCounts { evaluated: 8, answered: 1 }, rows: None };
    for samples in [2, 32] {
        let (least, beside) = planning(samples, None);
        let (left, beside_larger) = planning(samples, Some(evaluation.clone()));
        assert!(left > least * 3 / 2, "{samples} samples: {least} and {left} bytes are left");
        // The rows of an evaluation make a choice half as large again. All choices of a cut would be hundreds.
        assert!(
            beside_larger < beside + left / 8,
            "{samples} samples: {beside} and {beside_larger} bytes beside the {left} of the choices that are left"
        );
    }
}
