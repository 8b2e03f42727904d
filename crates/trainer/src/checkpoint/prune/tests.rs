//! Pruning: which checkpoints go, and above all which stay.

#![cfg(unix)]

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::json;

use super::*;
use crate::checkpoint::tests::{names, newest, step, stepped, two_checkpoints};
use crate::checkpoint::{Found, MANIFEST_FILE, MODEL_FILES, Manifest, ManifestEntry, OPTIMIZER_FILE, STATE_FILE};
use crate::files;
use crate::trainer::Trainer;

fn save(checkpoints: &mut Checkpoints, trainer: &Trainer) -> Saved {
    checkpoints.save(trainer, &json!(null), None, &|| false).unwrap()
}

/// Saves after each of so many more steps.
fn save_steps(checkpoints: &mut Checkpoints, trainer: &mut Trainer, steps: usize) -> Vec<Saved> {
    let mut saved = Vec::new();
    for _ in 0..steps {
        step(trainer);
        saved.push(save(checkpoints, trainer));
    }
    saved
}

fn steps_in(directory: &Path) -> Vec<u64> {
    let mut steps: Vec<u64> = list(directory).unwrap().into_iter().map(|(step, _)| step).collect();
    steps.sort_unstable();
    steps
}

/// Makes a file of a checkpoint one that the system refuses to read, as a failing disk or a missing permission would.
fn make_unreadable(path: &Path) {
    fs::remove_file(path).unwrap();
    symlink(path, path).unwrap();
}

fn flip_a_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Changes the format that the manifest or the state says to have; the manifest then sums the new state.
fn set_format(checkpoint: &Path, name: &str, format: u64) {
    let mut changed: serde_json::Value = serde_json::from_slice(&fs::read(checkpoint.join(name)).unwrap()).unwrap();
    changed["format"] = json!(format);
    let bytes = serde_json::to_vec(&changed).unwrap();
    fs::write(checkpoint.join(name), &bytes).unwrap();
    if name == STATE_FILE {
        let mut manifest = Manifest::read(checkpoint).unwrap();
        let entry = manifest.files.iter_mut().find(|file| file.name == STATE_FILE).unwrap();
        *entry = ManifestEntry { name: name.to_owned(), bytes: bytes.len() as u64, sha256: files::sha256(&bytes) };
        fs::write(checkpoint.join(MANIFEST_FILE), serde_json::to_vec(&manifest).unwrap()).unwrap();
    }
}

#[test]
fn with_every_manifest_unreadable_eight_saves_keep_eight_checkpoints() {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 1);
    let mut trainer = stepped(0);
    let mut notes = Vec::new();
    for _ in 0..8 {
        step(&mut trainer);
        let mut saved = save(&mut checkpoints, &trainer);
        make_unreadable(&saved.path.join(MANIFEST_FILE));
        // The look that a failing disk refuses may be the first one at the checkpoint that was just saved.
        prune(&mut checkpoints, trainer.step_count(), &mut saved, &|| false);
        assert!(saved.pruned.is_empty(), "{:?}", saved.pruned);
        notes.extend(saved.notes);
    }
    assert_eq!(steps_in(directory.path()), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(notes.len(), 8, "each is named once: {notes:?}");
    assert!(notes.iter().all(|note| note.starts_with("kept ") && note.contains("could not be read")), "{notes:?}");
}

#[test]
fn what_cannot_be_read_stays_counts_for_nothing_and_is_named() {
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 2] = [
        ("a loop of links", make_unreadable),
        ("a directory", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
    ];
    for name in MODEL_FILES.into_iter().chain([OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE]) {
        for (damage, apply) in damages {
            let (directory, mut trainer) = two_checkpoints();
            apply(&directory.path().join("step-00000002").join(name));
            let mut checkpoints = Checkpoints::new(directory.path(), 2, 0);
            let saved = save_steps(&mut checkpoints, &mut trainer, 3);
            // 4 and 5 are the newest two; 2 is none of them; 1 and 3 went when two newer ones were whole.
            assert_eq!(steps_in(directory.path()), [2, 4, 5], "{name}: {damage}");
            let notes: Vec<&String> = saved.iter().flat_map(|saved| &saved.notes).collect();
            assert_eq!(notes.len(), 1, "{name}: {damage}: {notes:?}");
            assert!(notes[0].contains("step-00000002") && notes[0].contains("could not be read"), "{}", notes[0]);
        }
    }
}

#[test]
fn the_best_checkpoint_stays_when_its_score_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 1);
    let mut trainer = stepped(1);
    trainer.record_score(9.0);
    let best = save(&mut checkpoints, &trainer);
    make_unreadable(&best.path.join(STATE_FILE));
    for score in [1.0, 3.0, 2.0] {
        step(&mut trainer);
        trainer.record_score(score);
        save(&mut checkpoints, &trainer);
    }
    assert_eq!(steps_in(directory.path()), [1, 3, 4], "3 is the best that can be read");
    let found = Checkpoints::best_valid(directory.path(), "loss").unwrap().unwrap();
    assert_eq!(found.state.step, 3);
    assert!(found.notes.iter().any(|note| note.contains("step-00000001")), "{:?}", found.notes);
    assert!(matches!(checkpoints.valid_at(1), Err(Error::Unreadable { .. })));
}

#[test]
fn a_checkpoint_of_a_later_format_is_left_alone_and_never_called_damaged() {
    for name in [MANIFEST_FILE, STATE_FILE] {
        let (directory, mut trainer) = two_checkpoints();
        let later = directory.path().join("step-00000002");
        set_format(&later, name, 2);
        let error = Checkpoints::newest_valid(directory.path()).unwrap_err();
        assert!(matches!(error, Error::LaterFormat { format: 2, known: 1, .. }), "{error}");
        assert!(error.to_string().contains("newer version"), "{error}");
        let before = fs::read(later.join(name)).unwrap();
        let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
        let saved = save_steps(&mut checkpoints, &mut trainer, 2);
        assert_eq!(steps_in(directory.path()), [2, 4]);
        assert!(saved[0].notes[0].contains("newer version"), "{:?}", saved[0].notes);
        assert_eq!(fs::read(later.join(name)).unwrap(), before);
        assert_eq!(newest(directory.path()).state.step, 4);
    }
}

#[test]
fn torn_ones_go_once_enough_whole_ones_were_verified_and_are_named() {
    let (directory, mut trainer) = two_checkpoints();
    fs::remove_file(directory.path().join("step-00000001/manifest.json")).unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 3, 0);
    let saved = save_steps(&mut checkpoints, &mut trainer, 2);
    assert!(saved[0].pruned.is_empty() && saved[0].notes.is_empty(), "two whole ones are too few");
    assert_eq!(saved[1].pruned, [directory.path().join("step-00000001")]);
    assert_eq!(saved[1].notes.len(), 1);
    assert!(saved[1].notes[0].contains("step-00000001, because it was torn: manifest.json: missing"));
    assert_eq!(steps_in(directory.path()), [2, 3, 4]);
}

#[test]
fn a_checkpoint_with_a_changed_bit_is_not_one_of_the_last_that_are_kept() {
    let (directory, mut trainer) = two_checkpoints();
    flip_a_bit(&directory.path().join("step-00000002/model.safetensors"));
    let mut checkpoints = Checkpoints::new(directory.path(), 2, 0);
    let saved = save_steps(&mut checkpoints, &mut trainer, 1).remove(0);
    assert_eq!(steps_in(directory.path()), [1, 3], "the whole one stays, the damaged one goes");
    assert!(saved.notes[0].contains("model.safetensors: damaged"), "{:?}", saved.notes);
}

#[test]
fn the_best_that_is_kept_is_whole_to_the_last_byte() {
    let directory = tempfile::tempdir().unwrap();
    let mut trainer = stepped(0);
    for score in [5.0, 9.0, 1.0] {
        step(&mut trainer);
        trainer.record_score(score);
        save(&mut Checkpoints::new(directory.path(), 9, 0), &trainer);
    }
    flip_a_bit(&directory.path().join("step-00000002").join(OPTIMIZER_FILE));
    step(&mut trainer);
    save(&mut Checkpoints::new(directory.path(), 1, 1), &trainer);
    assert_eq!(steps_in(directory.path()), [1, 4]);
}

#[test]
fn what_this_process_wrote_or_resumed_from_is_not_read_again() {
    let (directory, _) = two_checkpoints();
    let Found { path, .. } = newest(directory.path());
    let mut checkpoints = Checkpoints::new(directory.path(), 2, 0);
    checkpoints.remember(&path);
    let mut trainer = stepped(2);
    let asked = Cell::new(0);
    for _ in 0..3 {
        step(&mut trainer);
        let saved = checkpoints
            .save(&trainer, &json!(null), None, &|| {
                asked.set(asked.get() + 1);
                false
            })
            .unwrap();
        assert_eq!(saved.pruned.len(), 1);
    }
    assert_eq!(asked.get(), 0, "it is asked while bytes are read");
    assert_eq!(steps_in(directory.path()), [4, 5]);
}

#[test]
fn who_is_asked_to_leave_reads_no_old_checkpoint_and_removes_none() {
    let (directory, mut trainer) = two_checkpoints();
    let mut checkpoints = Checkpoints::new(directory.path(), 2, 0);
    step(&mut trainer);
    let saved = checkpoints.save(&trainer, &json!(null), None, &|| true).unwrap();
    assert!(saved.pruned.is_empty() && saved.notes.is_empty());
    assert_eq!(steps_in(directory.path()), [1, 2, 3]);
    step(&mut trainer);
    save(&mut checkpoints, &trainer);
    assert_eq!(steps_in(directory.path()), [3, 4]);
}

#[test]
fn the_checkpoint_that_was_just_saved_stays_whatever_a_look_at_it_says() {
    let (directory, trainer) = two_checkpoints();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
    let path = directory.path().join("step-00000002");
    flip_a_bit(&path.join(STATE_FILE));
    let mut saved = Saved { path, bytes: 0, pruned: Vec::new(), notes: Vec::new() };
    prune(&mut checkpoints, trainer.step_count(), &mut saved, &|| false);
    assert_eq!(steps_in(directory.path()), [1, 2]);
}

#[test]
fn a_checkpoint_with_a_file_of_somebody_else_stays() {
    let (directory, mut trainer) = two_checkpoints();
    let thesis = directory.path().join("step-00000001/thesis.txt");
    fs::write(&thesis, "my only copy").unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
    let saved = save_steps(&mut checkpoints, &mut trainer, 2);
    assert_eq!(steps_in(directory.path()), [1, 4]);
    assert_eq!(fs::read_to_string(&thesis).unwrap(), "my only copy");
    assert!(saved[0].notes.iter().any(|note| note.contains("thesis.txt")), "{:?}", saved[0].notes);
}

#[test]
fn only_names_that_a_run_gives_are_checkpoints() {
    let (directory, mut trainer) = two_checkpoints();
    let others = ["step-1", "step-+0000001", "step-00000001-copy", "step-00000001.bak", "best"];
    for name in others {
        fs::create_dir(directory.path().join(name)).unwrap();
    }
    let elsewhere = tempfile::tempdir().unwrap();
    fs::rename(directory.path().join("step-00000001"), elsewhere.path().join("kept")).unwrap();
    symlink(elsewhere.path().join("kept"), directory.path().join("step-00000001")).unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
    save_steps(&mut checkpoints, &mut trainer, 2);
    assert!(others.iter().all(|name| directory.path().join(name).exists()));
    assert_eq!(steps_in(directory.path()), [1, 4], "a link stays");
    assert_eq!(names(&elsewhere.path().join("kept")).len(), 8);
}

#[test]
fn a_checkpoint_that_cannot_be_read_moves_aside_for_a_new_one_of_its_step() {
    let (directory, trainer) = two_checkpoints();
    let path = directory.path().join("step-00000002");
    make_unreadable(&path.join(MANIFEST_FILE));
    let weights = fs::read(path.join("model.safetensors")).unwrap();
    let found = newest(directory.path());
    assert_eq!(found.state.step, 1);
    assert!(found.notes[0].contains("could not be read"), "{:?}", found.notes);
    for number in 1..3 {
        let saved = save(&mut Checkpoints::new(directory.path(), 5, 0), &trainer);
        let aside = directory.path().join(format!("step-00000002.kept-{number}"));
        assert!(saved.notes[0].contains("moved") && saved.notes[0].contains("kept-"), "{:?}", saved.notes);
        assert_eq!(fs::read(aside.join("model.safetensors")).unwrap(), weights);
        assert_eq!(newest(directory.path()).state.step, 2);
        make_unreadable(&path.join(MANIFEST_FILE));
    }
}

#[test]
fn a_checkpoint_of_skipped_updates_takes_the_place_of_none_whose_weights_are_of_use() {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 2, 0);
    let mut trainer = stepped(0);
    let set_skipped = |trainer: &mut Trainer, skipped: u32| {
        let mut state = trainer.state(json!(null));
        state.non_finite_in_a_row = skipped;
        trainer.set_state(&state);
    };
    save_steps(&mut checkpoints, &mut trainer, 2);
    for step_number in 3..5 {
        step(&mut trainer);
        set_skipped(&mut trainer, step_number - 2);
        save(&mut checkpoints, &trainer);
        // The newest stays, too: a run that is interrupted goes on from there.
        assert_eq!(steps_in(directory.path()), [1, 2, u64::from(step_number)]);
    }
    // An update was finite again.
    set_skipped(&mut trainer, 0);
    save_steps(&mut checkpoints, &mut trainer, 1);
    assert_eq!(steps_in(directory.path()), [2, 5]);
}

#[test]
fn checkpoints_after_a_step_are_moved_aside_and_never_over_another() {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 9, 0);
    let mut trainer = stepped(0);
    save_steps(&mut checkpoints, &mut trainer, 3);
    fs::create_dir(directory.path().join("step-00000003.kept-1")).unwrap();
    let aside = checkpoints.set_aside_after(1).unwrap();
    let names: Vec<_> = aside.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["step-00000003.kept-2", "step-00000002.kept-1"]);
    assert_eq!(steps_in(directory.path()), [1]);
    assert_eq!(Checkpoints::newest_valid_before(directory.path(), 1).unwrap().map(|found| found.state.step), None);
    assert_eq!(Checkpoints::newest_valid_before(directory.path(), 2).unwrap().map(|found| found.state.step), Some(1));
    assert!(checkpoints.set_aside_after(1).unwrap().is_empty());
}
