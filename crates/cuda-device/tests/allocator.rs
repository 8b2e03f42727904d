//! Memory of a card that the program allocates itself. Runs on a card, or on the emulated one.
#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Tensor};

#[path = "support/emulated.rs"]
mod emulated;

use self::emulated::{is_emulated, test_alone};

const MIB: usize = 1 << 20;

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

fn mib(card: &Device) -> [u64; 4] {
    let bytes = cuda_device::device_bytes(card).expect("a card counts");
    [bytes.pool, bytes.pool_peak, bytes.tensors, bytes.tensors_peak].map(|bytes| bytes >> 20)
}

/// A tensor of `mib` MiB, all of whose elements are `value`.
fn tensor(mib: usize, value: f32, card: &Device) -> candle_core::Result<Tensor> {
    Tensor::full(value, mib * MIB / 4, card)
}

#[test]
fn memory_between_tensors_goes_where_a_large_one_wants_it_and_no_limit_is_passed() {
    let card = card();
    cuda_device::limit_device(&card, 64 * MIB as u64).unwrap();
    let mut tensors: Vec<Option<Tensor>> = (0..14).map(|i| Some(tensor(4, i as f32, &card).unwrap())).collect();
    tensors.iter_mut().step_by(2).for_each(|tensor| *tensor = None);
    // 28 MiB are free in places of four, and six or eight MiB that no memory backs.
    let large = tensor(32, 0.5, &card).unwrap();
    for (i, tensor) in tensors.iter().enumerate() {
        let Some(tensor) = tensor else { continue };
        let values: Vec<f32> = tensor.to_vec1().unwrap();
        assert!(values.iter().all(|&value| value == i as f32), "tensor {i}");
    }
    assert!(large.to_vec1::<f32>().unwrap().iter().all(|&value| value == 0.5));
    let error = tensor(8, 0.0, &card).unwrap_err().to_string();
    assert!(cuda_device::is_out_of_device_memory(&error), "{error}");
    let [held, held_peak, of_tensors, _] = mib(&card);
    assert!(held <= 64 && held_peak <= 64 && of_tensors == 60, "{held} and at most {held_peak} for {of_tensors}");
    drop(large);
    cuda_device::release_unused_of_device(&card).unwrap();
    let [held, held_peak, of_tensors, most_of_tensors] = mib(&card);
    assert_eq!([of_tensors, most_of_tensors], [28, 28]);
    assert!(held == held_peak && (28..=32).contains(&held), "{held} MiB");
}

#[test]
fn small_tensors_are_held_in_few_units() {
    let card = card();
    let before = mib(&card)[0];
    let small: Vec<Tensor> = (0..100).map(|_| Tensor::zeros(1000, DType::F32, &card).unwrap()).collect();
    let large = tensor(3, 1.0, &card).unwrap();
    let unit = cuda_device::pool_unit(&card).expect("memory is given out here") >> 20;
    assert!(mib(&card)[0] - before <= 3 + unit, "{:?}", mib(&card));
    drop((small, large));
    cuda_device::release_unused_of_device(&card).unwrap();
    assert_eq!(mib(&card)[0], 0, "nothing is held for no tensors");
}

#[test]
fn a_card_without_memory_pools_is_refused_with_a_word() {
    let pools = ("LOW_MEM_T5_EMULATED_POOLS", "none");
    if std::env::var(pools.0).as_deref() != Ok(pools.1) {
        if is_emulated(&card()) {
            let ran = test_alone("a_card_without_memory_pools_is_refused_with_a_word", &[pools]);
            assert!(String::from_utf8_lossy(&ran.stdout).contains("1 passed"));
        }
        return;
    }
    let error = cuda_device::open_card(0).unwrap_err().to_string();
    assert!(error.contains("expected a card whose driver has memory pools"), "{error}");
}

#[test]
fn a_driver_that_cannot_back_addresses_keeps_its_pool() {
    let mapping = ("LOW_MEM_T5_EMULATED_MAPPING", "none");
    if std::env::var(mapping.0).as_deref() != Ok(mapping.1) {
        // A card is asked for its abilities when it is opened. A real card has its own driver.
        if is_emulated(&card()) {
            let ran = test_alone("a_driver_that_cannot_back_addresses_keeps_its_pool", &[mapping]);
            let text = String::from_utf8_lossy(&ran.stdout);
            assert!(text.contains("1 passed"), "{text}");
        }
        return;
    }
    let card = card();
    assert_eq!(cuda_device::pool_unit(&card), None);
    let error = cuda_device::limit_device(&card, 64 * MIB as u64).unwrap_err().to_string();
    assert!(error.contains("cannot back addresses by memory"), "{error}");
    let large = tensor(5, 2.0, &card).unwrap();
    let [held, _, of_tensors, _] = mib(&card);
    assert!(of_tensors >= 5 && held >= of_tensors, "{held} for {of_tensors}");
    drop(large);
    cuda_device::release_unused_of_device(&card).unwrap();
    assert_eq!(mib(&card)[2], 0);
}
