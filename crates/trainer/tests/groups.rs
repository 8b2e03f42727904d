//! Groups of parameters: each moves by its own numbers, in every plan, in several processes and after a resume.

mod support;

use candle_core::DType;
use collective::{Shards, threads};
use support::{bits, device};
use t5::{Files, Lora, T5, Targets};
use trainer::adafactor::AdafactorOptions;
use trainer::adamw::AdamwOptions;
use trainer::checkpoint::Checkpoints;
use trainer::groups::{Group, group_of_each};
use trainer::lion::LionOptions;
use trainer::{Batch, LayerMajor, Levers, OptimizerOptions, Parallel, Sharding, StepPlan, Trainer, TrainerOptions};

// Only memory of this allocator can be in a file.
#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

const RATE: f64 = 0.01;
const FACTOR: f64 = 0.25;
const DECAY: f64 = 0.3;
const OTHER_DECAY: f64 = 0.7;

fn optimizers(learning_rate: f64, weight_decay: f64) -> [OptimizerOptions; 4] {
    let adamw = AdamwOptions { learning_rate, weight_decay, ..AdamwOptions::default() };
    let adafactor = AdafactorOptions {
        learning_rate: Some(learning_rate),
        relative_step: false,
        weight_decay,
        beta1: Some(0.9),
        ..AdafactorOptions::default()
    };
    [
        adafactor.into(),
        adamw.into(),
        AdamwOptions { scale_parameter: Some(1e-3), ..adamw }.into(),
        LionOptions { learning_rate, weight_decay, ..LionOptions::default() }.into(),
    ]
}

fn group(items: &[&str], learning_rate_factor: f64, weight_decay: Option<f64>) -> Group {
    let parameters = items.iter().map(|&item| item.to_owned()).collect();
    Group { parameters, learning_rate_factor, weight_decay }
}

fn groups() -> Vec<Group> {
    vec![group(&["norms"], 1.0, Some(0.0)), group(&["*.wi.*", "shared"], FACTOR, Some(OTHER_DECAY))]
}

fn options(optimizer: OptimizerOptions, groups: Vec<Group>) -> TrainerOptions {
    TrainerOptions { optimizer, groups, dropout: 0.0, grad_clip_norm: 0.0, ..support::options() }
}

fn plans() -> [StepPlan; 3] {
    let plan = |layer_major| StepPlan {
        levers: Levers { micro_batch_samples: 3, loss_chunk_rows: 8, layer_major, ..Levers::default() },
        longest: None,
    };
    let on_disk = LayerMajor { optimizer_on_disk: true, ..LayerMajor::PLAIN };
    [plan(None), plan(Some(LayerMajor::PLAIN)), plan(Some(on_disk))]
}

/// A model, with an adapter or without one, after some steps.
fn stepped(options: TrainerOptions, plan: &StepPlan, has_adapter: bool, steps: u32) -> Trainer {
    let config = t5::Config { d_ff: 400, d_model: 64, ..support::config() };
    let model = T5::init(&config, 7, DType::F32, &device()).unwrap();
    let lora = Lora { rank: 3, targets: Targets::AllLinear, ..Lora::default() };
    let model = if has_adapter { model.with_adapter(lora, 5).unwrap() } else { model };
    let mut trainer = Trainer::new(model, options).unwrap();
    let directory = tempfile::tempdir().unwrap();
    trainer.offload_to(Files::in_directory(directory.path()));
    support::run(&mut trainer, plan, 7, 0..steps);
    trainer
}

/// A first step is the same up to the update, so it shows which numbers a parameter was updated with.
#[test]
fn a_parameter_moves_by_the_numbers_of_its_group_in_every_plan() {
    for (number, has_adapter) in (0..4).flat_map(|number| [(number, false), (number, true)]) {
        let all_in = |factor, decay| vec![group(&["*"], factor, Some(decay))];
        let plan = plans()[(number + usize::from(has_adapter)) % 3];
        let options_of = |groups| options(optimizers(RATE, DECAY)[number], groups);
        let first = |options: TrainerOptions| stepped(options, &plan, has_adapter, 1);
        let groups = if has_adapter { vec![group(&["*lora_A*"], FACTOR, Some(OTHER_DECAY))] } else { groups() };
        let mixed = first(options_of(groups.clone()));
        let names: Vec<&str> = mixed.model().parameters().iter().map(|p| p.name.as_str()).collect();
        let of_each = group_of_each(&names, &vec![true; names.len()], &groups).unwrap();
        // The optimizer's own numbers, those of each group as the optimizer's own, and as a group of all.
        let whole = |factor: f64, decay| options(optimizers(RATE * factor, decay)[number], Vec::new());
        let own = first(whole(1.0, DECAY));
        let each: Vec<[Trainer; 2]> = groups
            .iter()
            .map(|group| {
                let (factor, decay) = (group.learning_rate_factor, group.weight_decay.unwrap());
                [first(whole(factor, decay)), first(options_of(all_in(factor, decay)))]
            })
            .collect();
        let values = |trainer: &Trainer, index: usize| support::values(&trainer.model().parameters()[index].tensor);
        let mut seen = 0;
        for (index, of_group) in of_each.iter().enumerate() {
            let expected: Vec<&Trainer> = of_group.map_or(vec![&own], |number| each[number].iter().collect());
            for expected in expected {
                assert_eq!(values(&mixed, index), values(expected, index), "{number} {plan:?} {}", names[index]);
            }
            seen += usize::from(of_group.is_some());
        }
        assert!(seen > 3 && seen < names.len());
    }
}

#[test]
fn plans_and_processes_agree_over_some_steps() {
    for (number, has_adapter) in [(0, false), (1, true), (2, false), (3, false)] {
        let groups = if has_adapter { vec![group(&["*lora_A*"], FACTOR, None)] } else { groups() };
        let options = options(optimizers(RATE, DECAY)[number], groups);
        let expected = stepped(options.clone(), &plans()[1], has_adapter, 3);
        let on_disk = stepped(options.clone(), &plans()[2], has_adapter, 3);
        assert!(bits(&expected) == bits(&on_disk), "{number}");
    }
    let run = |processes: usize, sharding| {
        let of_each = threads::run(processes, |group| {
            let mut trainer = support::new(options(optimizers(RATE, DECAY)[1], groups()));
            let parallel = Parallel::new(group, Some(2)).unwrap();
            let (shards, rank): (Shards, usize) = (parallel.shards(), parallel.group().rank());
            trainer.join(parallel, sharding).unwrap();
            for step in 0..3 {
                let (sources, targets) = support::batch(step, 6);
                let of_shards: Vec<_> = shards.owned_by(rank).map(|shard| shards.positions(shard, 6)).collect();
                let mine = of_shards[0].start..of_shards[of_shards.len() - 1].end;
                let batch = Batch { sources: &sources[mine.clone()], targets: &targets[mine] };
                let of_shards: Vec<usize> = of_shards.iter().map(ExactSizeIterator::len).collect();
                trainer.step_of_shards(&batch, &of_shards, &plans()[0], &|| false).unwrap();
            }
            let parameters = trainer.model().parameters().iter();
            parameters.map(|parameter| support::values(&parameter.tensor)).collect::<Vec<_>>()
        });
        assert!(of_each.iter().all(|one| *one == of_each[0]));
        of_each[0].clone()
    };
    let expected = run(1, Sharding::None);
    for sharding in [Sharding::None, Sharding::Optimizer, Sharding::Gradients] {
        assert!(run(2, sharding) == expected, "{sharding:?}");
    }
}

#[test]
fn a_resumed_run_goes_on_with_its_groups() {
    let options = options(optimizers(RATE, DECAY)[1], groups());
    let mut whole = support::new(options);
    support::run(&mut whole, &plans()[0], 5, 0..2);
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
    checkpoints.save(&whole, &serde_json::Value::Null, None, &|| false).unwrap();
    let found = Checkpoints::newest_valid(directory.path()).unwrap().unwrap();
    assert_eq!(found.state.options.groups, groups());
    let mut resumed = Trainer::resume(&found, found.state.options.clone(), DType::F32, &device()).unwrap();
    let losses = [&mut whole, &mut resumed].map(|trainer| support::run(trainer, &plans()[0], 5, 2..5));
    assert_eq!(losses[0], losses[1]);
    assert!(bits(&whole) == bits(&resumed));
}
