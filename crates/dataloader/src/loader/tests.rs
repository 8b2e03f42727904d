use super::*;
use crate::error::BadValue;
use crate::objective::SpanCorruption;
use crate::testing::{Files, letters, sample_tokenizer};
use proptest::prelude::*;

const SYNCHRONOUS: LoaderLimits = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };

fn limits(prefetch_batches: usize, decode_threads: usize) -> LoaderLimits {
    LoaderLimits { prefetch_batches, decode_threads }
}

fn options(batch_size: usize) -> LoaderOptions {
    let order = OrderOptions { seed: 11, shuffle: true, block_rows: 16, window_blocks: 4 };
    LoaderOptions {
        batch_size,
        order,
        epochs: Some(2),
        max_source_tokens: 12,
        max_target_tokens: 6,
        ..Default::default()
    }
}

fn loader(files: &Files, options: LoaderOptions, start: Position, limits: LoaderLimits) -> DataLoader {
    DataLoader::new(files.open(), Arc::clone(sample_tokenizer()), options, start, limits).unwrap()
}

/// The rest of the stream.
fn drain(mut loader: DataLoader) -> Vec<Batch> {
    std::iter::from_fn(|| loader.next_batch().unwrap()).collect()
}

fn stream(files: &Files, options: LoaderOptions, start: Position, limits: LoaderLimits) -> Vec<Batch> {
    drain(loader(files, options, start, limits))
}

#[test]
fn every_row_of_every_file_is_met_once_an_epoch() {
    let files = Files::new().with_squares(100, 30).with_squares(57, 1000);
    let batches = stream(&files, options(20), Position::default(), limits(3, 2));
    for epoch in 0..2 {
        let mut rows: Vec<u64> =
            batches.iter().filter(|batch| batch.epoch == epoch).flat_map(|batch| batch.rows.clone()).collect();
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..157), "epoch {epoch}");
    }
    let sizes: Vec<usize> = batches.iter().map(Batch::len).collect();
    assert_eq!(sizes, [20, 20, 20, 20, 20, 20, 20, 17].repeat(2), "the last batch of an epoch is smaller, not dropped");
}

#[test]
fn without_shuffling_step_i_is_rows_i_times_batch_size_on() {
    let files = Files::new().with_squares(50, 20);
    let mut options = options(16);
    options.order.shuffle = false;
    let batches = stream(&files, options, Position::default(), SYNCHRONOUS);
    let rows: Vec<_> = batches.iter().map(|batch| (batch.rows[0], batch.rows[batch.len() - 1])).collect();
    assert_eq!(rows, [(0, 15), (16, 31), (32, 47), (48, 49)].repeat(2));
    assert_eq!(sample_tokenizer().decode(&batches[0].sources[7]).unwrap(), "7 squared");
    assert_eq!(sample_tokenizer().decode(&batches[0].targets[7]).unwrap(), "49");
    assert!(
        batches.iter().flat_map(|batch| batch.sources.iter().chain(&batch.targets)).all(|ids| ids.last() == Some(&1))
    );
}

#[test]
fn the_shares_of_several_processes_are_the_whole_batch_bad_rows_left_out() {
    let (files, start, idle) = (files_with_bad_rows(), Position::default(), limits(0, 0));
    let skipping = LoaderOptions { bad_rows: BadRows::Skip, ..options(5) };
    let whole = stream(&files, skipping.clone(), start, idle);
    for (count, processes) in [(2, 2), (4, 2), (7, 3)] {
        let shards = Shards { count, processes };
        let of = |rank| {
            let share = BatchShare { shards, rank };
            stream(&files, LoaderOptions { share, ..skipping.clone() }, start, idle)
        };
        let shares: Vec<Vec<Batch>> = (0..processes).map(of).collect();
        for (number, batch) in whole.iter().enumerate() {
            let parts = || shares.iter().map(|share| &share[number]);
            assert_eq!(parts().flat_map(|part| part.rows.clone()).collect::<Vec<_>>(), batch.rows);
            assert_eq!(parts().flat_map(|part| part.targets.clone()).collect::<Vec<_>>(), batch.targets);
            assert_eq!(parts().map(|part| part.bad_rows).sum::<u64>(), batch.bad_rows);
            for part in parts() {
                assert_eq!(part.position_after, batch.position_after);
                assert_eq!(part.shard_samples.iter().sum::<usize>(), part.len());
            }
            assert_eq!(parts().map(|part| part.shard_samples.len()).sum::<usize>(), count);
        }
    }
}

#[test]
fn threads_and_depth_do_not_change_the_stream() {
    let files = Files::new().with_squares(200, 64);
    let expected = stream(&files, options(9), Position::default(), SYNCHRONOUS);
    for (depth, threads) in [(0, 3), (1, 0), (1, 1), (2, 1), (3, 4), (100, 2)] {
        let actual = stream(&files, options(9), Position::default(), limits(depth, threads));
        assert!(actual == expected, "depth {depth}, {threads} threads");
    }
}

#[test]
fn changing_the_limits_at_any_step_loses_and_reorders_nothing() {
    let files = Files::new().with_squares(200, 64);
    let expected = stream(&files, options(7), Position::default(), SYNCHRONOUS);
    let mut loader = loader(&files, options(7), Position::default(), limits(4, 2));
    let changes = [(4, 2), (0, 0), (1, 1), (6, 3), (2, 0), (0, 2), (1, 3), (5, 1)];
    for (step, expected) in expected.iter().enumerate() {
        let (depth, threads) = changes[step % changes.len()];
        loader.set_limits(limits(depth, threads));
        assert_eq!(loader.next_batch().unwrap().as_ref(), Some(expected), "step {step}");
        assert_eq!(loader.position(), expected.position_after);
    }
    assert_eq!(loader.next_batch().unwrap(), None);
    assert_eq!(loader.next_batch().unwrap(), None, "the end stays the end");
}

#[test]
fn no_more_batches_than_the_depth_are_made_ahead() {
    let files = Files::new().with_squares(300, 64);
    let mut loader = loader(&files, options(5), Position::default(), limits(3, 2));
    for _ in 0..20 {
        loader.next_batch().unwrap();
        let queue = loader.shared.lock();
        assert!(queue.next_begun - queue.next_out <= 3);
        assert!(queue.finished.len() + queue.begun.len() <= 3);
    }
}

#[test]
fn a_loader_that_is_dropped_in_the_middle_joins_its_threads() {
    let files = Files::new().with_squares(300, 64);
    for batches in 0..4 {
        let mut loader = loader(&files, options(50), Position::default(), limits(4, 3));
        (0..batches).for_each(|_| drop(loader.next_batch().unwrap()));
        let shared = Arc::downgrade(&loader.shared);
        drop(loader);
        assert_eq!(shared.strong_count(), 0, "every thread has left");
    }
}

#[test]
fn nobody_waits_for_a_batch_once_the_flag_is_up() {
    let files = Files::new().with_squares(300, 64);
    let position = Position { epoch: 0, sample: 50 };
    for (threads, batches) in [(limits(2, 1), 1), (SYNCHRONOUS, 1), (limits(1, 0), 0)] {
        let mut loader = loader(&files, options(50), Position::default(), threads);
        let flag = Arc::new(AtomicBool::new(false));
        loader.stop_on(&flag);
        (0..batches).for_each(|_| assert!(loader.next_batch().unwrap().is_some()));
        if batches == 0 {
            // A thread that is counted on but never runs: a disk that hangs.
            loader.allow(1, 1);
        }
        std::thread::scope(|scope| {
            if batches == 0 {
                scope.spawn(|| flag.store(true, Ordering::Relaxed));
            } else {
                flag.store(true, Ordering::Relaxed);
            }
            assert_eq!(loader.next_batch().unwrap(), None);
        });
        assert_eq!(loader.position(), if batches == 0 { Position::default() } else { position });
    }
}

#[test]
fn the_stream_ends_where_the_epochs_end_and_goes_on_where_they_do_not() {
    let files = Files::new().with_squares(10, 64);
    let count = |epochs, start| {
        let options = LoaderOptions { epochs, ..options(4) };
        let mut loader = loader(&files, options, start, SYNCHRONOUS);
        let left = loader.batches_left();
        let batches = std::iter::from_fn(|| loader.next_batch().unwrap()).take(50).count();
        assert!(left.is_none_or(|left| left == batches as u64));
        batches
    };
    assert_eq!(count(Some(2), Position::default()), 6);
    assert_eq!(count(Some(2), Position { epoch: 1, sample: 8 }), 1);
    assert_eq!(count(Some(2), Position { epoch: 1, sample: 10 }), 0);
    assert_eq!(count(Some(2), Position { epoch: 9, sample: 0 }), 0);
    assert_eq!(count(Some(0), Position::default()), 0);
    assert_eq!(count(None, Position::default()), 50);
}

#[test]
fn a_position_that_the_data_does_not_have_is_refused() {
    let files = Files::new().with_squares(10, 64);
    let start = Position { epoch: 0, sample: 11 };
    let tokenizer = Arc::clone(sample_tokenizer());
    let error = DataLoader::new(files.open(), tokenizer, options(4), start, SYNCHRONOUS).err().unwrap();
    assert_eq!(error.to_string(), "the data has no epoch 0, sample 11: an epoch has 10 samples");
}

/// Rows 3, 5 and 6 of the second file, in its second row group, are bad in three ways; so is row 8.
fn files_with_bad_rows() -> Files {
    let good = |n: u64| (Some(format!("{n} + 1").into_bytes()), Some((n + 1).to_string().into_bytes()));
    let mut rows: Vec<_> = (0..10).map(good).collect();
    rows[3].1 = None;
    rows[5].0 = Some(b" \t".to_vec());
    rows[6].1 = Some(vec![b'4', 0xff, 0xfe]);
    rows[8].0 = None;
    Files::new().with_squares(10, 100).with(&rows, 3)
}

#[test]
fn a_bad_row_is_an_error_that_names_file_row_group_row_and_column() {
    let files = files_with_bad_rows();
    let mut options = options(4);
    options.order.shuffle = false;
    for limits in [SYNCHRONOUS, limits(8, 2)] {
        let mut loader = loader(&files, options.clone(), Position::default(), limits);
        for _ in 0..3 {
            loader.next_batch().unwrap();
        }
        // The error belongs to the batch of rows 12 to 15, and asking again tries that batch again.
        for _ in 0..2 {
            let error = loader.next_batch().unwrap_err();
            let expected = format!("{}: row group 1: row 3: column `response` is null", files.paths()[1].display());
            assert_eq!(error.to_string(), expected);
            assert!(error.hint().unwrap().contains("data.bad_rows"));
            assert_eq!(loader.position(), Position { epoch: 0, sample: 12 });
        }
    }
}

#[test]
fn skipped_rows_are_counted_and_make_their_batch_smaller() {
    let files = files_with_bad_rows();
    let mut options = LoaderOptions { bad_rows: BadRows::Skip, epochs: Some(1), ..options(4) };
    options.order.shuffle = false;
    let batches = stream(&files, options, Position::default(), limits(2, 1));
    let counts: Vec<_> = batches.iter().map(|batch| (batch.len(), batch.bad_rows)).collect();
    assert_eq!(counts, [(4, 0), (4, 0), (4, 0), (2, 2), (2, 2)]);
    assert_eq!(batches[3].rows, [12, 14]);
    let first = batches[4].first_bad_row.clone().unwrap();
    assert_eq!((first.row_group, first.row, first.column.as_str(), first.value), (2, 6, "response", BadValue::NotUtf8));
    assert_eq!(batches[3].position_after, Position { epoch: 0, sample: 16 });
}

#[test]
fn a_batch_of_bad_rows_alone_is_empty_and_the_stream_goes_on() {
    let rows = [(None, None), (None, None), (Some(b"1 + 1".to_vec()), Some(b"2".to_vec()))];
    let files = Files::new().with(&rows, 10);
    let mut options = LoaderOptions { bad_rows: BadRows::Skip, epochs: Some(1), ..options(2) };
    options.order.shuffle = false;
    let batches = stream(&files, options, Position::default(), SYNCHRONOUS);
    assert!(batches[0].is_empty() && batches[0].bad_rows == 2);
    assert_eq!(batches[1].rows, [2]);
}

#[test]
fn texts_are_kept_beside_their_samples_when_asked_for() {
    let files = Files::new().with_squares(40, 64);
    let options = LoaderOptions { keep_texts: true, keep_prompts: true, max_source_tokens: 3, ..options(8) };
    for batch in stream(&files, options, Position::default(), limits(2, 2)) {
        for ((row, texts), source) in batch.rows.iter().zip(&batch.texts).zip(&batch.sources) {
            assert_eq!(*texts, (row * row).to_string());
            assert!(source.len() <= 3, "the ids are cut");
        }
        let prompts: Vec<String> = batch.rows.iter().map(|row| format!("{row} squared")).collect();
        assert_eq!(batch.prompts, prompts);
        assert_eq!(batch.cut_sources, batch.len() as u64);
    }
}

#[test]
fn a_row_whose_two_targets_lose_characters_counts_once() {
    let text = |text: &str| Some(text.as_bytes().to_vec());
    let files = Files::new().with(&[(text("why"), text("\u{1f600}")), (text("\u{1f600}"), text("so"))], 8);
    let [prompt_column, chosen_column, rejected_column] = ["prompt", "response", "response"].map(str::to_owned);
    let objective = Objective::Preference { prompt_column, chosen_column, rejected_column };
    let options = LoaderOptions { objective, eos_id: 1, ..options(2) };
    let loader = DataLoader::new(files.open(), Arc::new(letters()), options, Position::default(), SYNCHRONOUS);
    let batch = loader.unwrap().next_batch().unwrap().unwrap();
    assert_eq!((batch.lossy.sources, batch.lossy.targets), (1, 1));
}

#[test]
fn spans_depend_on_seed_epoch_and_row_and_not_on_the_batch_that_holds_the_row() {
    let text = |n: u64| Some(format!("{n} squared is {} and ", n * n).repeat(5).into_bytes());
    let files = Files::new().with(&(0..60).map(|n| (text(n), None)).collect::<Vec<_>>(), 64);
    let samples = |batch_size, seed| {
        let mut options = options(batch_size);
        let text_column = "prompt".to_owned();
        options.max_source_tokens = 32;
        options.objective = Objective::SpanCorruption { text_column, spans: SpanCorruption::default() };
        options.order.seed = seed;
        let mut samples = Vec::new();
        for batch in stream(&files, options, Position::default(), limits(2, 2)) {
            for (index, &row) in batch.rows.iter().enumerate() {
                samples.push((batch.epoch, row, batch.sources[index].clone(), batch.targets[index].clone()));
            }
        }
        samples.sort();
        samples
    };
    assert_eq!(samples(7, 1), samples(16, 1));
    assert_ne!(samples(7, 1), samples(7, 2));
    let epochs = samples(7, 1);
    let (first, second) = epochs.split_at(60);
    assert!(first.iter().zip(second).any(|(a, b)| a.1 == b.1 && a.2 != b.2), "each epoch draws spans anew");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let files = Files::new().with_squares(10, 64);
    let check = |options: LoaderOptions, expected: &str| {
        let tokenizer = Arc::clone(sample_tokenizer());
        let loader = DataLoader::new(files.open(), tokenizer, options, Position::default(), SYNCHRONOUS);
        let error = loader.err().expect(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(options(0), "train.batch_size");
    check(LoaderOptions { max_source_tokens: 1, ..options(1) }, "data.max_source_tokens");
    check(LoaderOptions { max_target_tokens: 0, ..options(1) }, "data.max_target_tokens");
    check(LoaderOptions { eos_id: 50_000, ..options(1) }, "end-of-sequence id is 50000");
    let objective = Objective::SpanCorruption { text_column: "text".to_owned(), spans: SpanCorruption::default() };
    check(LoaderOptions { objective, ..options(1) }, "column `text`");
    let order = OrderOptions { block_rows: 0, ..OrderOptions::default() };
    check(LoaderOptions { order, ..options(1) }, "shuffle window");
}

#[test]
fn a_file_that_changes_while_it_is_read_is_an_error_at_its_batch() {
    let files = Files::new().with_squares(2000, 100);
    let dataset = files.open();
    dataset.set_residency(parquet_dataset::Residency::UltraLowMem);
    let tokenizer = Arc::clone(sample_tokenizer());
    let mut loader = DataLoader::new(dataset, tokenizer, options(4), Position::default(), limits(1, 1)).unwrap();
    loader.next_batch().unwrap();
    let path = &files.paths()[0];
    let bytes = std::fs::read(path).unwrap();
    std::fs::write(path, &bytes[..bytes.len() / 3]).unwrap();
    let error = (0..500).find_map(|_| loader.next_batch().err()).expect("most of the file is gone");
    assert!(matches!(error, Error::Dataset(_)), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn resuming_at_any_position_gives_the_rest_of_the_stream(
        rows in 1_u64..90, batch_size in 1_usize..20, at: prop::sample::Index, threads in 0_usize..3,
    ) {
        let files = Files::new().with_squares(rows, 40);
        let whole = stream(&files, options(batch_size), Position::default(), SYNCHRONOUS);
        let at = at.index(whole.len());
        let rest = stream(&files, options(batch_size), whole[at].position_after, limits(2, threads));
        prop_assert_eq!(&rest[..], &whole[at + 1..]);
    }

    #[test]
    fn resuming_at_any_sample_meets_the_samples_that_were_left(
        rows in 1_u64..60, batch_size in 1_usize..20, sample: prop::sample::Index,
    ) {
        let files = Files::new().with_squares(rows, 40);
        let sample = sample.index(rows as usize + 1);
        let start = Position { epoch: 0, sample: sample as u64 };
        let samples = |start| -> Vec<u64> {
            stream(&files, options(batch_size), start, SYNCHRONOUS).into_iter().flat_map(|batch| batch.rows).collect()
        };
        prop_assert_eq!(&samples(start)[..], &samples(Position::default())[sample..]);
    }
}

#[test]
fn a_prefix_stands_before_every_source_as_if_the_rows_had_it() {
    let text = |text: String| Some(text.into_bytes());
    let long = |n: usize| "\u{4f60}\u{597d} a ".repeat(n * n);
    let rows = |prefix: &str| -> Vec<_> {
        (1..40).map(|n| (text(format!("{prefix}{}", long(n))), text(format!("{n}")))).collect()
    };
    let batches = |files: &Files, source_prefix: &str| -> Vec<Batch> {
        let options = LoaderOptions { source_prefix: source_prefix.to_owned(), max_source_tokens: 900, ..options(5) };
        let idle = LoaderLimits { prefetch_batches: 0, decode_threads: 0 };
        let tokenizer = Arc::clone(sample_tokenizer());
        let loader = DataLoader::new(files.open(), tokenizer, options, Position::default(), idle);
        let mut loader = loader.unwrap();
        std::iter::from_fn(|| loader.next_batch().unwrap()).take(8).collect()
    };
    for prefix in ["summarize: ".to_owned(), "\u{603b}\u{7ed3}\u{ff1a}".repeat(800)] {
        let (with, without) = (Files::new().with(&rows(&prefix), 10), Files::new().with(&rows(""), 10));
        assert_eq!(batches(&without, &prefix), batches(&with, ""));
        assert_ne!(batches(&without, ""), batches(&with, ""));
    }
}
