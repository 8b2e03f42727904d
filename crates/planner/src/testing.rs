//! Jobs for tests, and the processor that they are planned for.

use std::cell::Cell;

use memory_policy::{Budget, Bytes, MemorySnapshot, MemorySpace};
use t5::StoredWeights;
use t5::safetensors::StoredIn;
use t5_ops::{InstructionSet, Processor};
use trainer::TrainerOptions;

use crate::answer_speed::{AnswerSpeed, FewRows};
use crate::feed::Feed;
use crate::job::{Job, Training, Wanted, Work};
use crate::lever::Pins;
use crate::prices::Prices;
use crate::processes::Processes;
use crate::speed::Speed;

/// A model published in f32, of which nothing is copied.
pub(crate) const STORED: StoredWeights = StoredWeights {
    is_bf16: false,
    has_duplicates: false,
    read_from: StoredIn::ANY,
    copied_bytes: [0; 2],
    copying_bytes: [0; 2],
};

/// Training by a single process, without evaluation. It writes no files unless a pin asks for them.
pub(crate) fn training(options: &TrainerOptions) -> Training<'_> {
    Training {
        options,
        disk_writes: 0,
        evaluation: None,
        saves: true,
        wanted: Wanted::Undominated(None),
        base: None,
        frozen: None,
        processes: Processes::default(),
        lengths: &[],
    }
}

/// A job on the host over 8 samples of 64 + 64 tokens, which come from elsewhere.
pub(crate) fn job<'a>(model: &'a t5::Config, training: Training<'a>, pins: &'a Pins) -> Job<'a> {
    Job {
        model,
        work: Work::Training(training),
        samples: 8,
        longest: (64, 64),
        place: MemorySpace::Host,
        budgets: Budget::ShareOfAvailable.into(),
        pins,
        feed: Feed::Given,
        process_note: "",
        past: Vec::new(),
        prices: Prices::vectors(),
    }
}

/// States the processor that needs are counted for on a test's thread: that of `LOW_MEM_T5_TEST_PROCESSOR`, such as `amx:64`, or [`AVX2`].
/// In tests of this crate each plan begins here, so none reads this machine's processor:
/// a test that does passes on some machines only.
pub(crate) fn state_processor() {
    if !IS_STATED.get() {
        state(&std::env::var("LOW_MEM_T5_TEST_PROCESSOR").unwrap_or_else(|_| AVX2.to_owned()));
    }
}

thread_local! {
    static IS_STATED: Cell<bool> = const { Cell::new(false) };
}

/// The processor of tests whose numbers hold for one alone.
pub(crate) const AVX2: &str = "avx2:2";

/// States this processor for the rest of a test.
pub(crate) fn state(stated: &str) {
    IS_STATED.set(true);
    let (set, threads) = stated.split_once(':').expect("LOW_MEM_T5_TEST_PROCESSOR is INSTRUCTION-SET:THREADS");
    t5_ops::set_target_processor(Processor {
        instruction_set: InstructionSet::of_name(set).expect("the name of an instruction set"),
        threads: threads.parse().expect("a number of threads"),
        second_level_bytes: 1 << 20,
    });
}

/// A machine with 64 GiB, all of them free.
pub(crate) fn machine() -> MemorySnapshot {
    MemorySnapshot { available: Bytes::gib(64), total: Bytes::gib(64), ..MemorySnapshot::default() }
}

/// A machine whose products of few rows take ten picoseconds for each byte of their weight. Everything else takes no time.
pub(crate) fn answer_speed() -> AnswerSpeed {
    let of_bytes =
        |bytes: f64| FewRows { one_row_ps: 10.0 * bytes, eight_rows_ps: 10.0 * bytes, most_rows_ps: 10.0 * bytes };
    let (f32_weights, bf16_weights) = (of_bytes(4.0), of_bytes(2.0));
    AnswerSpeed { f32_weights, bf16_weights, query_ps: 0.0, block_ps: 0.0, source_ps: 0.0, token_ps: 0.0 }
}

/// The same machine, with ten picoseconds for each multiply-add of other work.
pub(crate) fn speed() -> Speed {
    Speed {
        product_ps: 10.0,
        product_overhead_rows: 0.0,
        attention_ps: 10.0,
        attention_overhead_keys: 0.0,
        attention_backward_ps: 10.0,
        attention_backward_overhead_keys: 0.0,
        head_ps: 10.0,
        head_overhead_rows: 0.0,
        between_ps: 0.0,
        between_backward_ps: 0.0,
        update_ps: 100.0,
        file_byte_ps: Some(550.0),
        answers: answer_speed(),
        card: None,
    }
}
