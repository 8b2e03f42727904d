//! The command under `mpirun`, with emulated cards for its processes (`LOW_MEM_T5_CUDA=emulated`, docs/gpu-testing.md). Needs an MPI, and the
//! features `cuda` and `mpi`, or `nccl` for transfers from card to card.

mod launcher;
mod on_a_card;
#[expect(dead_code, reason = "made for every test of the command")]
mod run;

use on_a_card::{assert_within, emulated_scene, of_steps};
use run::{Ran, Scene};
use serde_json::Value;

const ADAMW: [&str; 4] = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"];
const BY_LAYER: [&str; 2] = ["--set", "memory.accumulation=layer-major"];

fn arguments(more: &[&str]) -> Vec<String> {
    on_a_card::arguments(&[&["--max-steps", "4"], more].concat())
}

/// The most bytes of a small batch that cross the bus.
const MAX_BATCH_BYTES: u64 = 32 << 10;

/// The assignment of processes to cards.
#[derive(Clone, Copy, Debug)]
enum Cards {
    /// One process on one card.
    One,
    /// Two processes, each on a card of its own. If this build has NCCL, tensors go from card to card.
    Two,
    /// Three processes on three cards.
    Three,
    /// Four processes on four cards.
    Four,
    /// Two processes on one card, which always go through the host.
    Shared,
}

fn on_cards(scene: &Scene, cards: Cards, more: &[&str]) -> Ran {
    with_variables(scene, &[], cards, more)
}

/// Runs with variables of the emulated cards, without their prefix.
fn with_variables(scene: &Scene, variables: &[(&str, &str)], cards: Cards, more: &[&str]) -> Ran {
    starting(scene, variables, cards, "", more)
}

/// Runs with `program`, followed by a space, before the command in each process.
fn starting(scene: &Scene, variables: &[(&str, &str)], cards: Cards, program: &str, more: &[&str]) -> Ran {
    let budget = ["--device-memory-budget", "1GiB"];
    let (processes, cards, budget) = match cards {
        Cards::One => (1, 1, &[][..]),
        Cards::Two => (2, 2, &[][..]),
        Cards::Three => (3, 3, &[][..]),
        Cards::Four => (4, 4, &[][..]),
        Cards::Shared => (2, 1, &budget[..]),
    };
    let number = ("CARDS", cards.to_string());
    let variables = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).chain([number]);
    let variables = variables.map(|(name, value)| format!("LOW_MEM_T5_EMULATED_{name}={value}"));
    let launcher = launcher::mpirun(scene, processes, &variables.collect::<Vec<_>>()) + program;
    // With a measured rate, another plan would be the fastest on a busy machine.
    let network = ["--set", "parallel.network_mbit=10000"];
    scene.run_under(&launcher, &arguments(&[&["--device", "cuda"], budget, &network, more].concat()))
}

/// Runs on cards, one for each process, that write their counts into files of this name.
fn reporting(scene: &Scene, file: &str, cards: Cards, more: &[&str]) -> Ran {
    with_variables(scene, &[("REPORT", file)], cards, more)
}

#[track_caller]
fn assert_close(what: &str, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= 1e-5, "{what}: step {}: {got} instead of {expected}", step + 1);
    }
}

#[track_caller]
fn assert_predicted(scene: &Scene, run: &str) {
    let last = &scene.events(run, "end")[0];
    let of = |key: &str| last[key].as_u64().expect("bytes");
    let (peak, predicted) = (of("device_peak_bytes"), of("predicted_device_peak_bytes"));
    assert!(peak > 0 && peak <= predicted, "{run}: {peak} of {predicted} bytes");
}

#[test]
fn two_cards_have_the_losses_of_the_cpu_whatever_each_of_them_holds() {
    let Some(scene) = emulated_scene() else { return };
    let by_layer = [&ADAMW[..], &BY_LAYER].concat();
    // Here one of the processes has no sample.
    let idle = ["--set", "train.batch_size=1", "--set", "memory.communication_overlap=none"];
    let idle = [&by_layer[..], &idle].concat();
    for (name, way) in [("adafactor", &[][..]), ("adamw", &ADAMW), ("layers", &by_layer), ("idle", &idle)] {
        let cpu = format!("{name}-cpu");
        scene.run(&arguments(&[way, &["--output", &cpu]].concat())).expect_code(0);
        let mut cases = vec![("none", Cards::Two)];
        match name {
            // Micro-batch by micro-batch, weights can be sharded only with virtual shards.
            "layers" => cases.extend([("gradients", Cards::Two), ("weights", Cards::Two), ("weights", Cards::Shared)]),
            "idle" => cases.push(("gradients", Cards::Two)),
            _ => cases.extend([("none", Cards::Shared), ("optimizer", Cards::Two)]),
        }
        for (shard, cards) in cases {
            let (run, sharding) = (format!("{name}-{shard}-{cards:?}"), format!("parallel.shard={shard}"));
            on_cards(&scene, cards, &[way, &["--set", &sharding, "--output", &run]].concat()).expect_code(0);
            for key in ["loss", "grad_norm"] {
                let [got, expected] = [&run, &cpu].map(|run| of_steps(&scene, run, key));
                assert_close(&format!("{run}: {key}"), &got, &expected);
            }
            let evaluated =
                |run: &str| scene.events(run, "eval").iter().map(|line| line["loss"].as_f64().unwrap()).collect();
            let [got, expected]: [Vec<f64>; 2] = [evaluated(&run), evaluated(&cpu)];
            assert_close(&format!("{run}: validation loss"), &got, &expected);
            assert_predicted(&scene, &run);
        }
    }
}

#[test]
fn virtual_shards_give_the_same_file_for_one_card_and_two_and_after_a_resume() {
    let Some(scene) = emulated_scene() else { return };
    let shards = [&ADAMW[..], &["--set", "parallel.virtual_shards=2"]].concat();
    on_cards(&scene, Cards::One, &[&shards[..], &["--output", "one"]].concat()).expect_code(0);
    let model = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
    let expected = model("one");
    for (shard, more, cards) in [
        ("none", &[][..], Cards::Two),
        ("none", &[], Cards::Shared),
        ("optimizer", &[], Cards::Two),
        ("gradients", &BY_LAYER, Cards::Two),
        ("weights", &[], Cards::Two),
        ("weights", &BY_LAYER, Cards::Shared),
    ] {
        let run = format!("{shard}-{}-{cards:?}", more.len());
        let sharding = format!("parallel.shard={shard}");
        on_cards(&scene, cards, &[&shards[..], more, &["--set", &sharding, "--output", &run]].concat()).expect_code(0);
        assert!(model(&run) == expected, "{run}: the model has other bits");
    }
    // Two cards, then one.
    let until = |steps| [&shards[..], &["--set", "parallel.shard=optimizer", "--max-steps", steps]].concat();
    on_cards(&scene, Cards::Two, &until("2")).expect_code(0);
    on_cards(&scene, Cards::One, &[&until("4")[..], &["--keep-training"]].concat()).expect_code(0);
    assert!(model("run") == expected, "the model has other bits after a resume");
}

#[test]
fn two_processes_on_one_card_are_told_and_share_it_where_each_has_a_budget() {
    let Some(scene) = emulated_scene() else { return };
    let told = "processes 0, 1 of 2 compute on one GPU";
    // These runs measure their network.
    let few = ["--max-steps", "2", "--output", "shared", "--set", "parallel.network_mbit=auto"];
    let named = on_cards(&scene, Cards::Two, &[&few[..], &["--device", "cuda:1"]].concat());
    named.expect_code(2).expect_words(&[told, "`--device-memory-budget`"]);
    assert!(!scene.path("shared/model").exists());
    on_cards(&scene, Cards::Shared, &few).expect_code(0).expect_words(&[told]);
    let bus = scene.events("shared", "plan")[0]["step_bus_bytes"].as_u64();
    assert!(bus.expect("bytes") > 0, "gradients go through the host");
}

#[test]
fn gradients_cross_the_bus_as_often_as_the_plan_says() {
    let Some(scene) = emulated_scene() else { return };
    for shard in ["none", "gradients"] {
        let sharding = format!("parallel.shard={shard}");
        let counts = |steps: &str| {
            let run = format!("{shard}-{steps}");
            let rarely = ["--set", "checkpoint.every_steps=100", "--set", "train.eval_every_steps=100"];
            // Over a slow network a plan may take gradients off the card, which then also cross the bus.
            let network = ["--set", "parallel.network_mbit=100000"];
            let more =
                [&["--max-steps", steps], &rarely[..], &network, &ADAMW, &["--set", &sharding, "--output", &run]]
                    .concat();
            reporting(&scene, &format!("{run}.json"), Cards::Two, &more).expect_code(0);
            let of_card = |file: String| {
                let report: Value = serde_json::from_slice(&scene.read(&file)).expect("JSON");
                ["uploaded_bytes", "downloaded_bytes"].map(|key| report[key].as_u64().expect("bytes")).iter().sum()
            };
            [of_card(format!("{run}.json")), of_card(format!("{run}.json1"))]
        };
        let (two, four): ([u64; 2], [u64; 2]) = (counts("2"), counts("4"));
        let counted = (0..2).map(|card| (four[card] - two[card]) / 2).max().expect("two GPUs");
        let planned = scene.events(&format!("{shard}-4"), "plan")[0]["step_bus_bytes"].as_u64().expect("bytes");
        println!("{shard}: {counted} bytes a step, {planned} predicted");
        // In addition, a step on one card copies ids, positions and losses.
        let is_near = (planned..planned + MAX_BATCH_BYTES).contains(&counted);
        assert!(is_near, "{shard}: {counted} bytes a step, {planned} predicted");
        assert_eq!(planned == 0, cfg!(feature = "nccl"), "from GPU to GPU nothing goes through the host");
        let run = format!("{shard}-4");
        let planned = scene.events(&run, "plan")[0]["step_sent_bytes"].as_f64().expect("bytes");
        let sent = of_steps(&scene, &run, "sent_bytes");
        let counted = sent[1] - sent[0];
        assert!((planned / counted - 1.0).abs() < 0.001, "{shard}: {planned} bytes planned, {counted} sent");
    }
}

fn evaluated(scene: &Scene, run: &str) -> Vec<f64> {
    scene.events(run, "eval").iter().map(|line| line["loss"].as_f64().expect("a loss")).collect()
}

const BF16: [&str; 4] = ["--precision", "bf16", "--set", "train.master_weights=stochastic-rounding"];

#[test]
fn several_cards_train_in_bf16_and_beside_a_base_in_codes_as_one_process_does() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--output", "base", "--max-steps", "2"])).expect_code(0);
    let beside = ["--lora", "--set", "model.init_from=base/model", "--set", "lora.dropout=0.1"];
    let [int8, nf4] = ["int8", "nf4"].map(|codes| format!("model.base_precision={codes}"));
    let [int8, nf4] = [&int8, &nf4].map(|codes| [&beside[..], &["--set", codes]].concat());
    let dora = [&beside[..], &["--set", "lora.dora=true"]].concat();
    let nf4_bf16 = [&nf4[..], &["--precision", "bf16", "--set", "lora.dora=true"]].concat();
    let ways: [(&str, &[&str], &str, Cards, f64); 6] = [
        ("bf16", &BF16, "optimizer", Cards::Two, 2e-2),
        ("bf16-layers", &[&BF16[..], &BY_LAYER].concat(), "weights", Cards::Three, 2e-2),
        ("dora", &dora, "none", Cards::Two, 1e-5),
        ("int8", &int8, "gradients", Cards::Two, 1e-5),
        ("nf4", &[&nf4[..], &BY_LAYER].concat(), "weights", Cards::Three, 1e-5),
        ("nf4-bf16", &nf4_bf16, "optimizer", Cards::Shared, 2e-2),
    ];
    for (name, way, shard, cards, tolerance) in ways {
        let [cpu, run] = ["cpu", "cards"].map(|device| format!("{name}-{device}"));
        scene.run(&arguments(&[way, &["--output", &cpu]].concat())).expect_code(0);
        let sharding = format!("parallel.shard={shard}");
        on_cards(&scene, cards, &[way, &["--set", &sharding, "--output", &run]].concat()).expect_code(0);
        for key in ["loss", "grad_norm"] {
            let [got, expected] = [&run, &cpu].map(|run| of_steps(&scene, run, key));
            assert_within(&format!("{name}: {key}"), &got, &expected, tolerance);
        }
        let [got, expected] = [&run, &cpu].map(|run| evaluated(&scene, run));
        assert_within(&format!("{name}: validation loss"), &got, &expected, tolerance);
        assert_predicted(&scene, &run);
    }
}

#[test]
fn three_and_four_cards_have_the_bits_of_one_also_in_turn() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--output", "base", "--max-steps", "2"])).expect_code(0);
    let nf4 = ["--lora", "--set", "model.init_from=base/model", "--set", "model.base_precision=nf4"];
    let shards = ["--set", "parallel.virtual_shards=4"];
    let all = [&ADAMW[..], &shards].concat();
    let bf16 = [&BF16[..], &shards].concat();
    let adapter = [&nf4[..], &shards].concat();
    for (name, way, weights) in [
        ("all", &all, "model/model.safetensors"),
        ("bf16", &bf16, "model/model.safetensors"),
        ("adapter", &adapter, "adapter/adapter_model.safetensors"),
    ] {
        let until = |run: &str, cards, shard: &str, steps: &str| {
            let sharding = format!("parallel.shard={shard}");
            let more = ["--set", &sharding, "--output", run, "--max-steps", steps];
            let resumes: &[&str] = if scene.path(run).exists() { &["--keep-training"] } else { &[] };
            on_cards(&scene, cards, &[way.as_slice(), &more, resumes].concat()).expect_code(0);
        };
        let [one, turns] = ["one", "turns"].map(|run| format!("{name}-{run}"));
        until(&one, Cards::One, "none", "4");
        // Four cards, then three, then one, then four again.
        until(&turns, Cards::Four, "optimizer", "1");
        until(&turns, Cards::Three, "gradients", "2");
        until(&turns, Cards::One, "none", "3");
        until(&turns, Cards::Four, "weights", "4");
        let of = |run: &str| scene.read(&format!("{run}/{weights}"));
        assert!(of(&turns) == of(&one), "{name} has other bits");
        assert_eq!(of_steps(&scene, &turns, "loss"), of_steps(&scene, &one, "loss"), "{name}");
    }
}

/// Allocations of a card until the end of a run.
fn allocations(scene: &Scene, file: &str) -> u64 {
    let report: Value = serde_json::from_slice(&scene.read(file)).expect("JSON");
    report["allocations"].as_u64().expect("a count")
}

/// Starts the command with counts and the failing allocation only in process 1. Two processes on one card would write to one file of counts
/// at once.
const OF_ONE: &str = "[ \"${OMPI_COMM_WORLD_RANK:-$PMI_RANK}\" = 1 ] \
    || unset LOW_MEM_T5_EMULATED_FAILURE LOW_MEM_T5_EMULATED_REPORT\nexec \"$@\"\n";

#[test]
fn a_process_without_memory_is_a_smaller_plan_for_all_or_one_message() {
    let Some(scene) = emulated_scene() else { return };
    scene.write("one.sh", OF_ONE);
    let free = ["--set", "memory.micro_batch_samples=auto", "--set", "train.batch_size=8"];
    let shards = ["--set", "parallel.virtual_shards=4"];
    let ways: [(&str, &[&str], Cards); 5] = [
        ("none", &[], Cards::Two),
        ("optimizer", &[], Cards::Shared),
        ("gradients", &BY_LAYER, Cards::Two),
        ("weights", &shards, Cards::Two),
        ("weights", &shards, Cards::Shared),
    ];
    for (number, (shard, way, cards)) in ways.into_iter().enumerate() {
        let sharding = format!("parallel.shard={shard}");
        let way = [&free[..], &ADAMW, way, &["--set", &sharding]].concat();
        let (whole, counts) = (format!("{number}-whole"), format!("{number}.json"));
        let more = [&way[..], &["--output", &whole]].concat();
        starting(&scene, &[("REPORT", &counts)], cards, " sh one.sh", &more).expect_code(0);
        let expected = of_steps(&scene, &whole, "loss");
        let of_its_card = if matches!(cards, Cards::Shared) { counts } else { format!("{counts}1") };
        let count = allocations(&scene, &of_its_card);
        let mut made_again = 0;
        for part in [9, 11, 13] {
            let (run, failing) = (format!("{number}-{part}"), (count * part / 16).to_string());
            let more = [&way[..], &["--output", &run]].concat();
            let ran = starting(&scene, &[("FAILURE", &failing)], cards, " sh one.sh", &more);
            println!("{shard}: allocation {failing} of {count}: {:?}", ran.code);
            match ran.code {
                Some(0) => {
                    made_again += ran.err.matches("the device of process 1 had no memory left").count();
                    assert_within(&run, &of_steps(&scene, &run, "loss"), &expected, 1e-5);
                }
                Some(3) => {
                    let told = ran.err.matches("error: the device has no memory left").count();
                    assert_eq!(told, 1, "{}", ran.err);
                }
                other => panic!("{shard}: allocation {failing}: exit code {other:?}: {}", ran.err),
            }
        }
        assert!(made_again > 0, "{shard}: no step was made again");
    }
}
