//! Checkpoints on a tiny T5: exact, atomic, verified.

use std::fs;
use std::path::Path;

use candle_core::{DType, Tensor};
use durable_files::NewDirectory;
use serde_json::json;
use t5::{Config, T5};

use super::*;
use crate::adafactor::AdafactorOptions;
use crate::options::TrainerOptions;
use crate::schedule::{Schedule, ScheduleKind};
use crate::test_device::device;
use t5::Levers;

use crate::stats::StepOutcome;
use crate::trainer::{Batch, StepPlan, Trainer};

fn config() -> Config {
    Config {
        vocab_size: 30,
        d_model: 8,
        d_kv: 4,
        d_ff: 12,
        num_layers: 1,
        num_decoder_layers: 1,
        num_heads: 2,
        ..Config::default()
    }
}

fn options() -> TrainerOptions {
    TrainerOptions {
        seed: 11,
        dropout: 0.2,
        optimizer: AdafactorOptions {
            learning_rate: Some(3e-3),
            relative_step: false,
            beta1: Some(0.5),
            ..AdafactorOptions::default()
        }
        .into(),
        schedule: Schedule { kind: ScheduleKind::ONE_CYCLE, warmup_steps: None },
        total_steps: 12,
        ..TrainerOptions::default()
    }
}

fn trainer() -> Trainer {
    Trainer::new(T5::init(&config(), 5, DType::F32, &device()).unwrap(), options()).unwrap()
}

/// One step on a batch that is a function of the step's number.
pub(super) fn step(trainer: &mut Trainer) {
    let n = trainer.step_count() as u32;
    let sources: Vec<Vec<u32>> =
        (0..5).map(|i| (0..=(n + i) % 4).map(|j| 2 + (n * 7 + i * 3 + j) % 28).chain([1]).collect()).collect();
    let targets: Vec<Vec<u32>> =
        (0..5).map(|i| (0..(n + 2 * i) % 3).map(|j| 2 + (n * 5 + i + j * 2) % 28).chain([1]).collect()).collect();
    let plan = StepPlan {
        levers: Levers {
            micro_batch_samples: 2,
            recompute_blocks: 0,
            loss_chunk_rows: 4,
            layer_major: None,
            ..Levers::default()
        },
        longest: None,
    };
    let outcome = trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap();
    assert!(matches!(outcome, StepOutcome::Done(_)), "{outcome:?}");
}

pub(super) fn stepped(steps: usize) -> Trainer {
    let mut trainer = trainer();
    (0..steps).for_each(|_| step(&mut trainer));
    trainer
}

fn everything(trainer: &Trainer) -> Vec<(String, Vec<u32>)> {
    let bits = |tensor: &Tensor| -> Vec<u32> {
        tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    let parameters = trainer.model().parameters();
    let values = parameters.iter().map(|parameter| (parameter.name.clone(), bits(&parameter.tensor)));
    values.chain(trainer.optimizer().named_state(parameters).map(|(name, tensor)| (name, bits(tensor)))).collect()
}

fn resume(found: &Found) -> Trainer {
    Trainer::resume(found, found.state.options.clone(), DType::F32, &device()).unwrap()
}

fn tokenizer_files(json: &Path) -> TokenizerFiles<'_> {
    TokenizerFiles {
        json: TokenizerJson::File(json),
        config: "{\"tokenizer_class\": \"PreTrainedTokenizerFast\"}",
        companions: &[],
    }
}

/// A directory with the checkpoints of steps 1 and 2, and a trainer at step 2.
pub(super) fn two_checkpoints() -> (tempfile::TempDir, Trainer) {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 5, 0);
    let tokenizer = directory.path().join("source-tokenizer.json");
    fs::write(&tokenizer, "{}").unwrap();
    let tokenizer = tokenizer_files(&tokenizer);
    let mut trainer = trainer();
    for _ in 0..2 {
        step(&mut trainer);
        checkpoints.save(&trainer, &json!({ "sample": trainer.step_count() * 5 }), Some(tokenizer), &|| false).unwrap();
    }
    (directory, trainer)
}

pub(super) fn newest(directory: &Path) -> Found {
    Checkpoints::newest_valid(directory).unwrap().unwrap()
}

pub(super) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_resumed_run_goes_on_to_the_same_bits() {
    let straight = stepped(9);
    let directory = tempfile::tempdir().unwrap();
    for stops in [vec![4], vec![1, 2, 7], vec![0, 8]] {
        let mut trainer = trainer();
        for at in stops {
            while trainer.step_count() < at {
                step(&mut trainer);
            }
            let path = directory.path().join(at.to_string());
            Checkpoints::new(&path, 1, 0).save(&trainer, &json!(null), None, &|| false).unwrap();
            trainer = resume(&newest(&path));
        }
        while trainer.step_count() < 9 {
            step(&mut trainer);
        }
        assert!(everything(&trainer) == everything(&straight));
        assert_eq!(trainer.optimizer().updates(), 9);
    }
}

#[test]
fn a_checkpoint_keeps_counters_scores_options_and_what_the_caller_gave() {
    let directory = tempfile::tempdir().unwrap();
    let mut trainer = stepped(2);
    assert!(trainer.record_score(0.1 + 0.2));
    step(&mut trainer);
    assert!(!trainer.record_score(0.25) && !trainer.record_score(f64::NAN));
    let caller = json!({ "epoch": 1, "position": 17, "data": "0123abcd", "x": 0.1 });
    Checkpoints::new(directory.path(), 1, 0).save(&trainer, &caller, None, &|| false).unwrap();
    let found = newest(directory.path());
    assert_eq!(found.state.caller, caller);
    assert_eq!((found.state.step, found.state.updates, found.state.score), (3, 3, Some(0.25)));
    assert_eq!(found.state.options, options());
    let resumed = resume(&found);
    assert_eq!(resumed.best_score().unwrap().value, 0.1 + 0.2);
    assert_eq!(resumed.best_score().unwrap().step, 2);
    assert!(everything(&resumed) == everything(&trainer));
}

#[test]
fn a_checkpoint_has_the_documented_files_and_is_a_model_that_loads() {
    let (directory, trainer) = two_checkpoints();
    let path = directory.path().join("step-00000002");
    let expected = [
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
    ];
    assert_eq!(names(&path), expected);
    let model = T5::load(&path, DType::F32, &device()).unwrap();
    for (loaded, saved) in model.parameters().iter().zip(trainer.model().parameters()) {
        assert_eq!(loaded.name, saved.name);
        assert_eq!(loaded.tensor.to_string(), saved.tensor.to_string());
    }
}

#[test]
fn saving_twice_writes_the_same_bytes() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for directory in [&a, &b] {
        Checkpoints::new(directory.path(), 1, 0).save(&stepped(3), &json!({ "seed": 1 }), None, &|| false).unwrap();
    }
    for name in names(&a.path().join("step-00000003")) {
        let read = |root: &Path| fs::read(root.join("step-00000003").join(&name)).unwrap();
        assert!(read(a.path()) == read(b.path()), "{name}");
    }
}

#[test]
fn a_torn_checkpoint_is_never_resumed() {
    let (directory, _) = two_checkpoints();
    let path = directory.path().join("step-00000002");
    type Damage = (&'static str, fn(&Path, &[u8]));
    let damages: [Damage; 7] = [
        ("deleted", |path, _| fs::remove_file(path).unwrap()),
        ("emptied", |path, _| fs::write(path, b"").unwrap()),
        ("cut in half", |path, bytes| fs::write(path, &bytes[..bytes.len() / 2]).unwrap()),
        ("cut at the end", |path, bytes| fs::write(path, &bytes[..bytes.len() - 1]).unwrap()),
        ("longer", |path, bytes| fs::write(path, [bytes, b" "].concat()).unwrap()),
        ("first bit flipped", |path, bytes| {
            let mut bytes = bytes.to_vec();
            bytes[0] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("a bit in the middle flipped", |path, bytes| {
            let mut bytes = bytes.to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
            fs::write(path, bytes).unwrap();
        }),
    ];
    for name in names(&path) {
        let whole = fs::read(path.join(&name)).unwrap();
        for (damage, apply) in &damages {
            // White space after a manifest does not change its contents.
            if name == MANIFEST_FILE && ["longer", "cut at the end"].contains(damage) {
                continue;
            }
            apply(&path.join(&name), &whole);
            let found = newest(directory.path());
            assert_eq!(found.state.step, 1, "{name} {damage}");
            assert_eq!(found.notes.len(), 1, "{name} {damage}");
            assert!(found.notes[0].contains("step-00000002"), "{}", found.notes[0]);
            assert!(found.notes[0].contains(&name) || name == MANIFEST_FILE, "{}", found.notes[0]);
        }
        fs::write(path.join(&name), &whole).unwrap();
        assert_eq!(newest(directory.path()).state.step, 2, "{name} mended");
    }
}

#[test]
fn when_no_checkpoint_is_whole_the_error_says_what_is_wrong_with_each() {
    let (directory, _) = two_checkpoints();
    for step in ["step-00000001", "step-00000002"] {
        fs::remove_file(directory.path().join(step).join("model.safetensors")).unwrap();
    }
    let error = Checkpoints::newest_valid(directory.path()).unwrap_err();
    assert!(matches!(&error, Error::NoValidCheckpoint { notes, .. } if notes.len() == 2), "{error}");
    assert!(error.hint().is_some());
}

#[test]
fn a_directory_without_checkpoints_has_none() {
    let directory = tempfile::tempdir().unwrap();
    assert!(Checkpoints::newest_valid(directory.path()).unwrap().is_none());
    assert!(Checkpoints::newest_valid(&directory.path().join("absent")).unwrap().is_none());
}

#[test]
fn a_checkpoint_under_the_name_of_another_step_is_not_resumed() {
    let (directory, _) = two_checkpoints();
    fs::rename(directory.path().join("step-00000002"), directory.path().join("step-00000009")).unwrap();
    assert_eq!(newest(directory.path()).state.step, 1);
}

#[test]
fn a_checkpoint_from_before_there_was_a_tokenizer_config_is_whole() {
    let (directory, _) = two_checkpoints();
    let path = directory.path().join("step-00000002");
    let mut manifest = Manifest::read(&path).unwrap();
    manifest.files.retain(|file| file.name != TOKENIZER_CONFIG_FILE);
    fs::write(path.join(MANIFEST_FILE), serde_json::to_vec(&manifest).unwrap()).unwrap();
    fs::remove_file(path.join(TOKENIZER_CONFIG_FILE)).unwrap();
    assert_eq!(newest(directory.path()).state.step, 2);
    export_checkpoint(&path, &directory.path().join("model")).unwrap();
    assert!(!directory.path().join("model").join(TOKENIZER_CONFIG_FILE).exists());
}

#[test]
fn a_manifest_cannot_point_outside_its_directory() {
    let (directory, _) = two_checkpoints();
    let path = directory.path().join("step-00000002").join(MANIFEST_FILE);
    let text = fs::read_to_string(&path).unwrap().replace("tokenizer.json", "../source-tokenizer.json");
    fs::write(&path, text).unwrap();
    let found = newest(directory.path());
    assert_eq!(found.state.step, 1);
    assert!(found.notes[0].contains("plain file names"), "{}", found.notes[0]);
}

#[test]
fn an_unfinished_save_is_invisible_and_the_next_save_removes_it() {
    let (directory, mut trainer) = two_checkpoints();
    let half = NewDirectory::create(&directory.path().join("step-00000003")).unwrap().path().to_owned();
    fs::write(half.join("model.safetensors"), "half").unwrap();
    assert_eq!(newest(directory.path()).state.step, 2);
    step(&mut trainer);
    step(&mut trainer);
    Checkpoints::new(directory.path(), 5, 0).save(&trainer, &json!(null), None, &|| false).unwrap();
    assert!(!half.exists());
}

#[test]
fn the_newest_and_the_best_are_kept_and_the_rest_go() {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 2, 2);
    let mut trainer = trainer();
    let mut pruned = Vec::new();
    for score in [Some(3.0), Some(9.0), None, Some(7.0), Some(7.0), None, Some(1.0)] {
        step(&mut trainer);
        score.map(|score| trainer.record_score(score));
        let saved = checkpoints.save(&trainer, &json!(null), None, &|| false).unwrap();
        assert!(saved.path.exists() && saved.notes.is_empty());
        pruned.extend(saved.pruned.iter().map(|path| path.file_name().unwrap().to_owned()));
    }
    // 6 and 7 are the newest; 2 (9.0) and 4 (7.0, and no worse than 5) are the best.
    assert_eq!(names(directory.path()), ["step-00000002", "step-00000004", "step-00000006", "step-00000007"]);
    assert_eq!(pruned, ["step-00000001", "step-00000003", "step-00000005"]);
    let best = |measure| Checkpoints::best_valid(directory.path(), measure).unwrap().map(|found| found.state.step);
    assert_eq!((best("loss"), best("bleu")), (Some(2), None));
    // Scores of another measure are not compared with those.
    trainer.score_by("bleu");
    assert_eq!(trainer.best_score(), None);
    for score in [40.0, 20.0, 10.0] {
        step(&mut trainer);
        trainer.record_score(score);
        checkpoints.save(&trainer, &json!(null), None, &|| false).unwrap();
    }
    assert_eq!(names(directory.path()), ["step-00000008", "step-00000009", "step-00000010"]);
    assert_eq!(best("bleu"), Some(8));
}

#[test]
fn a_damaged_checkpoint_never_pushes_out_a_whole_one() {
    let (directory, trainer) = two_checkpoints();
    // The run resumed from step 1, and a torn step 3 is still there.
    fs::create_dir(directory.path().join("step-00000003")).unwrap();
    fs::remove_dir_all(directory.path().join("step-00000002")).unwrap();
    Checkpoints::new(directory.path(), 1, 0).save(&trainer, &json!(null), None, &|| false).unwrap();
    assert_eq!(newest(directory.path()).state.step, 2);
}

#[test]
fn saving_a_step_again_replaces_it() {
    let (directory, trainer) = two_checkpoints();
    Checkpoints::new(directory.path(), 5, 0).save(&trainer, &json!("again"), None, &|| false).unwrap();
    let found = newest(directory.path());
    assert_eq!((found.state.step, found.state.caller), (2, json!("again")));
    assert_eq!(names(directory.path()), ["source-tokenizer.json", "step-00000001", "step-00000002"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_old_checkpoints_intact_and_says_so() {
    let (directory, mut trainer) = two_checkpoints();
    step(&mut trainer);
    let tokenizer = directory.path().join("source-tokenizer.json");
    let tokenizer = tokenizer_files(&tokenizer);
    let target = Checkpoints::new(directory.path(), 1, 0).path_of(3);
    // Writing to this device fails as writing to a full disk does.
    fn full_after(files: usize) -> impl Fn(&NewDirectory, &OsStr) -> io::Result<fs::File> {
        let made = std::cell::Cell::new(0);
        move |directory, name| {
            made.set(made.get() + 1);
            if made.get() > files {
                fs::File::options().write(true).open("/dev/full")
            } else {
                directory.create_file(name)
            }
        }
    }
    let files = names(&directory.path().join("step-00000002")).len();
    for written in 0..files {
        let create = full_after(written);
        let place = save::SaveTarget { directory: NewDirectory::create(&target).unwrap(), create: &create };
        let error = save::write(&place, &target, &trainer, &json!(null), Some(tokenizer)).unwrap_err();
        assert!(matches!(&error, Error::Files(durable_files::Error::DiskFull { .. })), "{written}: {error:?}");
        assert!(error.to_string().contains("intact"), "{error}");
        assert_eq!(names(directory.path()), ["source-tokenizer.json", "step-00000001", "step-00000002"], "{written}");
        let found = newest(directory.path());
        assert_eq!((found.state.step, found.notes.len()), (2, 0));
    }
    let create = full_after(files);
    let place = save::SaveTarget { directory: NewDirectory::create(&target).unwrap(), create: &create };
    save::write(&place, &target, &trainer, &json!(null), Some(tokenizer)).unwrap();
    assert_eq!(newest(directory.path()).state.step, 3);
}

#[test]
fn what_a_tokenizer_came_with_goes_with_every_checkpoint_and_away_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let beside = tempfile::tempdir().unwrap();
    let companions = ["spiece.model", "special_tokens_map.json", "notes.txt", "added_tokens.json"];
    let companions = companions.map(|name| beside.path().join(name));
    // The last one was removed meanwhile.
    companions[..3].iter().for_each(|path| fs::write(path, "of the tokenizer").unwrap());
    let tokenizer = TokenizerFiles { json: TokenizerJson::None, config: "{}", companions: &companions };
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
    let mut trainer = trainer();
    for _ in 0..2 {
        step(&mut trainer);
        checkpoints.save(&trainer, &json!(null), Some(tokenizer), &|| false).unwrap();
    }
    assert_eq!(names(directory.path()), ["step-00000002"]);
    let copied = directory.path().join("best");
    for _ in 0..2 {
        export_checkpoint(&directory.path().join("step-00000002"), &copied).unwrap();
        let of_model = ["config.json", "generation_config.json", "model.safetensors"];
        let of_tokenizer = ["special_tokens_map.json", "spiece.model", "tokenizer_config.json"];
        assert_eq!(names(&copied), [of_model, of_tokenizer].concat());
    }
    assert_eq!(fs::read(copied.join("spiece.model")).unwrap(), b"of the tokenizer");
}

#[test]
fn the_exported_model_is_the_same_whichever_way_it_is_exported() {
    let (directory, trainer) = two_checkpoints();
    let checkpoint = directory.path().join("step-00000002");
    let (live, copied) = (directory.path().join("model"), directory.path().join("best"));
    for _ in 0..2 {
        export_model(trainer.model(), &live, Some(tokenizer_files(&checkpoint.join(TOKENIZER_FILE)))).unwrap();
        export_checkpoint(&checkpoint, &copied).unwrap();
    }
    let expected =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(&live), expected);
    assert_eq!(names(&live), names(&copied));
    for name in names(&live) {
        assert!(fs::read(live.join(&name)).unwrap() == fs::read(copied.join(&name)).unwrap(), "{name}");
    }
    fs::write(
        checkpoint.join("model.safetensors"),
        vec![0; fs::metadata(checkpoint.join("model.safetensors")).unwrap().len() as usize],
    )
    .unwrap();
    let before = fs::read(copied.join("model.safetensors")).unwrap();
    assert!(matches!(export_checkpoint(&checkpoint, &copied), Err(Error::Torn { .. })));
    assert!(fs::read(copied.join("model.safetensors")).unwrap() == before);
}

#[test]
fn a_state_of_other_moments_is_refused() {
    let (directory, _) = two_checkpoints();
    let found = newest(directory.path());
    let check = |change: &dyn Fn(&mut TrainerOptions), expected: &str| {
        let mut options = found.state.options.clone();
        change(&mut options);
        let error = Trainer::resume(&found, options, DType::F32, &device()).err().unwrap();
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(&|options| options.freeze = vec!["encoder".to_owned()], "train.freeze");
    let without = AdafactorOptions { learning_rate: Some(3e-3), relative_step: false, ..AdafactorOptions::default() };
    check(&|options| options.optimizer = without.into(), "tensors for the trained parameters");
}
