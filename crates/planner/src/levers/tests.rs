use super::*;

#[test]
fn a_batch_is_cut_into_parts_as_even_as_can_be() {
    assert_eq!(even_cuts(12), [12, 6, 4, 3, 2, 1]);
    assert_eq!(even_cuts(7), [7, 4, 3, 2, 1]);
    assert_eq!(even_cuts(1), [1]);
}

#[test]
fn a_deep_model_has_no_more_values_of_a_lever_and_still_all_and_none() {
    assert_eq!(counts(3, MAX_COUNTS), [0, 1, 2, 3]);
    for blocks in [64, 65, 127, 200, 256] {
        let counts = counts(blocks, MAX_COUNTS);
        assert!(counts.is_sorted() && counts.len() <= MAX_COUNTS + 1, "{counts:?}");
        assert_eq!((counts[0], counts.last()), (0, Some(&blocks)));
    }
}

#[test]
fn every_lever_reads_what_it_sets_and_names_are_unique() {
    let layers = Levers {
        layer_major: Some(LayerMajor { boundaries_on_disk: true, weights_on_disk: true, ..LayerMajor::default() }),
        ..Levers::default()
    };
    for (index, lever) in LEVERS.iter().enumerate() {
        assert!(LEVERS[..index].iter().all(|earlier| earlier.name != lever.name), "{} is there twice", lever.name);
        let values = match lever.values {
            Values::Count(least, _) => vec![Value::Count(least + 1), Value::Count(least + 5)],
            Values::Blocks(_) => vec![Value::Count(0), Value::Count(7)],
            Values::Words(words) => words.iter().map(|word| Value::Word(word)).collect(),
        };
        for value in values {
            assert_eq!((lever.get)(&lever.with(&layers, value)), Some(value), "{}", lever.name);
        }
    }
}

#[test]
fn the_document_has_every_lever() {
    let document = include_str!("../../../../docs/memory.md");
    for (name, _, _) in lever_of_a_pin() {
        assert!(document.contains(&format!("`memory.{name}")), "{name} is not in the table of `docs/memory.md`");
    }
}

#[test]
fn a_plan_says_its_levers_in_words() {
    let plain = Levers { micro_batch_samples: 4, loss_chunk_rows: 256, ..Levers::default() };
    let step = |levers| Step { levers, evaluation_samples: 1, ..Step::default() };
    assert_eq!(step(plain).in_words(), "micro-batches of 4");
    let layers = LayerMajor {
        kept_gradient_blocks: 2,
        boundaries_on_disk: true,
        weights_on_disk: true,
        ..LayerMajor::default()
    };
    let by_layer = Levers { layer_major: Some(layers), recompute_blocks: 3, ..plain };
    let words = "micro-batches of 4, layer by layer, gradients of 2 blocks kept, block inputs on disk, weights on disk, 3 blocks recomputed";
    assert_eq!(step(by_layer).in_words(), words);
}

#[test]
fn a_step_differs_only_in_accumulation_whatever_moves_with_it() {
    let plain = Step {
        levers: Levers { micro_batch_samples: 4, loss_chunk_rows: 256, ..Levers::default() },
        ..Step::default()
    };
    let layers = LayerMajor { kept_gradient_blocks: 2, gradients_on_disk: true, ..LayerMajor::default() };
    let by_layer = Step { levers: Levers { layer_major: Some(layers), recompute_blocks: 3, ..plain.levers }, ..plain };
    let smaller = Step { levers: Levers { micro_batch_samples: 2, ..by_layer.levers }, ..plain };
    for (one, other) in [(plain, by_layer), (by_layer, plain)] {
        assert!(one.differs_only_in(ACCUMULATION.name, &other));
        assert!(!one.differs_only_in(RECOMPUTE_BLOCKS.name, &other));
    }
    assert!(!plain.differs_only_in(ACCUMULATION.name, &smaller));
    assert!(by_layer.differs_only_in(MICRO_BATCH_SAMPLES.name, &smaller));
}

#[test]
fn pins_that_contradict_each_other_are_named() {
    let pins = Pins::default().with("accumulation", Value::Word("micro-batch-major"));
    assert_eq!(pins.contradiction(), None);
    assert_eq!(pins.clone().with("gradient_offload", Value::Word("none")).contradiction(), None);
    assert_eq!(pins.clone().with("gradient_offload", Value::Word("disk")).contradiction(), Some("gradient_offload"));
    assert_eq!(pins.with("kept_gradient_blocks", Value::Count(0)).contradiction(), Some("kept_gradient_blocks"));
}

#[test]
fn a_step_is_written_as_plain_numbers() {
    let step = Step {
        levers: Levers { micro_batch_samples: 4, loss_chunk_rows: 256, ..Levers::default() },
        evaluation_samples: 2,
        ..Step::default()
    };
    let json = serde_json::to_value(step).unwrap();
    let expected = serde_json::json!({"micro_batch_samples": 4, "recompute_blocks": 0, "loss_chunk_rows": 256,
        "layer_major": null, "evaluation_samples": 2});
    assert_eq!(json, expected);
    assert_eq!(serde_json::from_value::<Step>(json).unwrap(), step);
}
