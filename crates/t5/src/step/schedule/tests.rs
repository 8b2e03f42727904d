use super::*;

fn events(layer_major: Option<&LayerMajor>, n: usize) -> Vec<Event> {
    let config = Config { num_layers: 1, num_decoder_layers: 1, ..Config::default() };
    let reach = Reach::to(&config, [Part::Shared].into_iter());
    let outline = Outline {
        reach,
        trains_tables: [&[true]; 2],
        recompute_blocks: 0,
        layer_major,
        has_paged_weights: false,
        overlaps: false,
        copies_overlap: layer_major.is_some_and(|layers| layers.copies_overlap),
    };
    outline.training(n)
}

/// The units that backward goes through, with their micro-batches, in its order.
fn backward(events: &[Event]) -> Vec<(Unit, Range<usize>)> {
    let of = |event: &Event| match event {
        Event::Backward(Backward { unit, of, .. }) => Some((*unit, of.clone())),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn micro_batch_major_takes_one_micro_batch_through_everything_and_layer_major_all_through_one_unit() {
    let units = [
        Unit::Norm { decoder: true },
        Unit::Block { decoder: true, block: 0 },
        Unit::Norm { decoder: false },
        Unit::Block { decoder: false, block: 0 },
    ];
    let by_micro_batch = units.map(|unit| (unit, 0..1)).into_iter().chain(units.map(|unit| (unit, 1..2)));
    assert_eq!(backward(&events(None, 2)), by_micro_batch.collect::<Vec<_>>());
    // No gradient stays: the second pass goes through every unit again.
    let twice = [units, units].concat().into_iter().map(|unit| (unit, 0..2)).collect::<Vec<_>>();
    assert_eq!(backward(&events(Some(&LayerMajor::PLAIN), 2)), twice);
    let waits = LayerMajor { gradients_on_disk: true, ..LayerMajor::PLAIN };
    assert_eq!(backward(&events(Some(&waits), 2)), twice[..4]);
}

#[test]
fn every_gradient_is_measured_before_the_decision_and_applied_after_it() {
    let all = [
        None,
        Some(LayerMajor::PLAIN),
        Some(LayerMajor { kept_gradient_blocks: 1, ..LayerMajor::PLAIN }),
        Some(LayerMajor { kept_gradient_blocks: 2, boundaries_on_disk: true, ..LayerMajor::PLAIN }),
        Some(LayerMajor { gradients_on_disk: true, ..LayerMajor::PLAIN }),
    ];
    for layers in &all {
        let events = events(layers.as_ref(), 3);
        let decide = events.iter().position(|event| *event == Event::Decide).expect("a decision");
        for (place, event) in events.iter().enumerate() {
            match event {
                Event::HandOver { stage, .. } => assert_eq!(place > decide, *stage == Stage::Apply, "{layers:?}"),
                Event::ReadBack => assert!(place > decide),
                _ => {}
            }
        }
    }
}

#[test]
fn the_last_blocks_of_backward_keep_their_gradients_with_the_norms_between_them() {
    let config = Config { num_layers: 2, num_decoder_layers: 2, ..Config::default() };
    let units = Unit::entered(Reach::to(&config, [Part::Shared].into_iter()));
    // Decoder norm and two blocks, encoder norm and two blocks.
    let dropped: Vec<usize> = (0..=4).map(|kept| Unit::dropped(&units, kept)).collect();
    assert_eq!(dropped, [6, 5, 3, 2, 0]);
    let leading: Vec<usize> = (0..=4).map(|blocks| Unit::leading(&units, blocks)).collect();
    assert_eq!(leading, [0, 2, 4, 5, 6]);
}
