//! Copies that overlap with the card's work give the bits of copies that are waited for. Runs on a card, or on the emulated one. There it
//! runs in processes whose streams do their work as early, and as late, as their order allows, so that a missing wait is detected.
#![cfg(feature = "cuda")]

#[path = "support/tensors.rs"]
mod tensors;

use std::fs::File;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use cuda_device::copies::{Download, STAGING_BYTES, Upload, WriteBack};
use cuda_device::copy_waits::{self, CopyWaits};
use cuda_device::page_locked::PageLocked;
use cuda_device::pinned_copies::{self, PinnedCopy};
use heap::FileMemory;
use tensor_storage::{WritePolicy, unallocated};

use self::tensors::{bits, is_emulated, test_alone};

// For tensors in files.
#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// Variables of the emulated card (`cuda-kernels/emulation/driver.cc`).
const STREAMS: &str = "LOW_MEM_T5_EMULATED_STREAMS";
const BLOCKS: usize = 6;
/// Large enough that a weight has pages of its own: a driver locks whole pages, and each page once.
const WIDTH: usize = 72;
/// More than all pinned memory, and no whole number of pieces.
const LARGE: usize = STAGING_BYTES as usize / 4 + 1_300_001;

/// The weight of a block, and a large tensor that belongs to it.
fn host_copy(block: usize) -> [Tensor; 2] {
    let weight = (0..WIDTH * WIDTH).map(|i| ((i * 7919 + block * 31) % 1009) as f32 / 4000.0 - 0.1).collect();
    let large: Vec<f32> = (0..LARGE).map(|i| (i % 65_521 + block) as f32).collect();
    let tensor = |values: Vec<f32>, shape: &[usize]| Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    [tensor(weight, &[WIDTH, WIDTH]), tensor(large, &[LARGE])]
}

/// Gives an absent tensor the values of its host copy.
fn uploaded(to: &Tensor, host_copy: &Tensor) -> candle_core::Result<()> {
    let mut incoming = Upload::begin(to)?;
    incoming.copy(host_copy)?;
    incoming.complete()
}

/// Whether a host copy is page-locked, and so has its tensor's values now.
fn written_back(x: &Tensor, host_copy: &Tensor) -> candle_core::Result<bool> {
    let write_back = WriteBack::begin(x, host_copy)?;
    let is_locked = write_back.is_some();
    write_back.map_or(Ok(()), WriteBack::complete)?;
    Ok(is_locked)
}

/// The output of a block, and the part of the large tensor that it needs.
fn compute(x: &Tensor, [weight, large]: &[Tensor; 2]) -> Tensor {
    let y = t5_ops::linear(x, weight).unwrap();
    let end = large.narrow(0, LARGE - x.elem_count(), x.elem_count()).unwrap();
    t5_ops::add_in_place(&y, &end.copy().unwrap().reshape(x.shape()).unwrap()).unwrap();
    t5_ops::scaled(&y, 1e-3).unwrap()
}

fn input(card: &Device) -> Tensor {
    let values: Vec<f32> = (0..5 * WIDTH).map(|i| (i % 17) as f32 - 8.0).collect();
    Tensor::from_vec(values, (5, WIDTH), &Device::Cpu).unwrap().to_device(card).unwrap()
}

/// The outputs of all blocks, one after the other, with copies that are waited for.
fn one_after_the_other(card: &Device) -> Vec<Vec<u32>> {
    let mut x = input(card);
    (0..BLOCKS)
        .map(|block| {
            x = compute(&x, &host_copy(block).map(|host_copy| host_copy.to_device(card).unwrap()));
            bits(&x.to_device(&Device::Cpu).unwrap())
        })
        .collect()
}

/// The same outputs. Each block's tensors are copied while the previous block is computed, and its output while the next one is. Homes may
/// be locked.
fn beside_each_other(card: &Device, is_locked: bool) -> Vec<Vec<u32>> {
    let host_copies: Vec<_> = (0..=BLOCKS).map(host_copy).collect();
    let locks: Vec<_> =
        host_copies.iter().flatten().filter(|_| is_locked).map(|host_copy| PageLocked::lock(host_copy, card)).collect();
    assert!(locks.iter().all(Option::is_some));
    let unallocated = |block: usize| {
        host_copies[block].each_ref().map(|host_copy| unallocated::unallocated_like(host_copy, card).unwrap())
    };
    let begin = |tensors: &[Tensor; 2]| tensors.each_ref().map(|tensor| Upload::begin(tensor).unwrap());
    let copy = |incoming: &mut [Upload; 2], block: usize| {
        incoming
            .iter_mut()
            .zip(&host_copies[block])
            .for_each(|(incoming, host_copy)| incoming.copy(host_copy).unwrap());
    };
    let (mut x, mut here, mut outputs) = (input(card), unallocated(0), Vec::new());
    let mut incoming = begin(&here);
    copy(&mut incoming, 0);
    let mut outgoing: Option<Download> = None;
    for block in 0..BLOCKS {
        incoming.into_iter().for_each(|incoming| incoming.complete().unwrap());
        let next = unallocated(block + 1);
        incoming = begin(&next);
        let y = compute(&x, &here);
        // All launched work is done meanwhile.
        copy(&mut incoming, block + 1);
        let before = outgoing.replace(Download::begin(&y).unwrap());
        outputs.extend(before.map(|before| bits(&before.complete().unwrap())));
        here.iter().for_each(|tensor| unallocated::release(tensor).unwrap());
        (x, here) = (y, next);
    }
    outputs.extend(outgoing.map(|last| bits(&last.complete().unwrap())));
    outputs
}

#[test]
fn copies_beside_what_is_computed_change_no_bit() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let expected = one_after_the_other(&card);
    assert!(expected.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    for is_locked in [false, true] {
        let got = beside_each_other(&card, is_locked);
        assert!(got == expected, "the outputs have other bits: {:?}, {is_locked}", std::env::var(STREAMS));
    }
    // A tensor that is larger than all pinned memory, there and back, in reused memory.
    let [_, large] = host_copy(3);
    let to = unallocated::unallocated_like(&large, &card).unwrap();
    let mut incoming = Upload::begin(&to).unwrap();
    incoming.copy(&large).unwrap();
    incoming.complete().unwrap();
    let doubled = t5_ops::scaled(&to.narrow(0, 0, 1000).unwrap().copy().unwrap(), 2.0).unwrap();
    let [outgoing, of_large] = [&doubled, &to].map(|x| Download::begin(x).unwrap());
    assert!(bits(&of_large.complete().unwrap()) == bits(&large));
    let expected: Vec<u32> = (0..1000).map(|i| (2.0 * (i % 65_521 + 3) as f32).to_bits()).collect();
    assert_eq!(bits(&outgoing.complete().unwrap()), expected);
}

#[test]
fn bytes_of_copies_and_the_time_that_the_card_waits_for_them_are_counted_once() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let (began, [weight, large]) = (Instant::now(), host_copy(2));
    let [of_weight, of_large] = [&weight, &large].map(|x| (x.elem_count() * size_of::<f32>()) as u64);
    let bytes = |waits: CopyWaits| (waits.to_card, waits.from_card);
    assert_eq!(copy_waits::so_far().unwrap(), CopyWaits::default());
    // A wait within another one.
    let to = unallocated::unallocated_like(&large, &card).unwrap();
    copy_waits::waiting(&card, || uploaded(&to, &large)).unwrap();
    let uploaded = copy_waits::so_far().unwrap();
    assert_eq!(bytes(uploaded), (of_large, 0));
    assert!(uploaded.seconds > 0.0);
    assert!(bits(&copy_waits::moved(&to, &Device::Cpu).unwrap()) == bits(&large));
    // During other work, there and back.
    let to = unallocated::unallocated_like(&weight, &card).unwrap();
    let mut incoming = Upload::begin(&to).unwrap();
    incoming.copy(&weight).unwrap();
    incoming.complete().unwrap();
    assert_eq!(bits(&Download::begin(&to).unwrap().complete().unwrap()), bits(&weight));
    let all = copy_waits::so_far().unwrap();
    assert_eq!(bytes(all), (of_large + of_weight, of_large + of_weight));
    assert!(all.seconds > uploaded.seconds && all.seconds <= began.elapsed().as_secs_f64(), "{all:?}");
    // Without a copy nothing is counted.
    copy_waits::moved(&weight, &Device::Cpu).unwrap();
    assert_eq!(copy_waits::so_far().unwrap().since(all), CopyWaits::default());
}

#[test]
fn whenever_streams_do_their_work_copies_wait_for_it() {
    // A real card's streams have no such order.
    if !is_emulated(&cuda_device::open_card(0).expect("a card, or the emulated one")) {
        return;
    }
    let tests = [
        "copies_beside_what_is_computed_change_no_bit",
        "values_that_nobody_waits_for_are_there_before_their_memory_serves_others",
        "copies_go_on_after_a_thread_has_forgotten_its_cards",
        "values_in_a_file_come_from_it_piece_by_piece",
        "a_file_that_is_shortened_is_an_error_and_other_copies_go_on",
        "a_home_that_is_locked_follows_its_tensor",
        "values_that_wait_come_back_though_their_memory_served_others",
    ];
    for (order, name) in ["early", "late", "all-late"].into_iter().flat_map(|order| tests.map(|name| (order, name))) {
        let ran = test_alone(name, &[(STREAMS, order)]);
        assert!(ran.status.success(), "{order}: {}", String::from_utf8_lossy(&ran.stdout));
    }
}

#[test]
fn where_the_driver_gives_too_little_pinned_memory_copies_go_through_other() {
    if !is_emulated(&cuda_device::open_card(0).expect("a card, or the emulated one")) {
        return;
    }
    let tests = ["copies_beside_what_is_computed_change_no_bit", "values_in_a_file_come_from_it_piece_by_piece"];
    // None, and some pieces.
    for (pinnable, order) in [("0", "late"), ("5000000", "early"), ("9000000", "all-late")] {
        for name in tests {
            let ran = test_alone(name, &[("LOW_MEM_T5_EMULATED_PINNABLE", pinnable), (STREAMS, order)]);
            assert!(ran.status.success(), "{pinnable}, {order}: {}", String::from_utf8_lossy(&ran.stdout));
        }
    }
}

#[test]
fn values_that_nobody_waits_for_are_there_before_their_memory_serves_others() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let [small, large] = host_copy(1);
    for _ in 0..3 {
        let to = unallocated::unallocated_like(&large, &card).unwrap();
        let mut incoming = Upload::begin(&to).unwrap();
        incoming.copy(&large).unwrap();
        drop(incoming);
        drop(to);
        let others = Tensor::zeros(LARGE, DType::F32, &card).unwrap();
        // Otherwise a late copy would run after the values were read. Another copy that is waited for comes after it.
        let last = unallocated::unallocated_like(&small, &card).unwrap();
        let mut incoming = Upload::begin(&last).unwrap();
        incoming.copy(&small).unwrap();
        incoming.complete().unwrap();
        assert!(bits(&others).iter().all(|&bits| bits == 0));
    }
}

#[test]
fn a_home_that_is_locked_follows_its_tensor() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let [_, large] = host_copy(4);
    let to = unallocated::unallocated_like(&large, &card).unwrap();
    uploaded(&to, &large).unwrap();
    t5_ops::add_in_place(&to, &to.copy().unwrap()).unwrap();
    assert!(!written_back(&to, &large).unwrap(), "it is not locked");
    let expected = bits(&large);
    assert_eq!(expected, bits(&host_copy(4)[1]));
    let [lock, again] = [PageLocked::lock(&large, &card), PageLocked::lock(&large, &card)];
    assert!(lock.is_some() && again.is_some());
    // The memory stays locked as long as there is any lock on it.
    drop(lock);
    let rows = |x: &Tensor| x.narrow(0, 1000, LARGE - 1001).unwrap();
    assert!(written_back(&rows(&to), &rows(&large)).unwrap());
    let doubled: Vec<u32> = expected.iter().map(|&bits| (2.0 * f32::from_bits(bits)).to_bits()).collect();
    let got = bits(&large);
    assert!(got[1000..LARGE - 1] == doubled[1000..LARGE - 1]);
    assert!(got[..1000] == expected[..1000] && got[LARGE - 1] == expected[LARGE - 1], "nothing beside it");
    assert!(written_back(&to.narrow(0, 0, 7).unwrap(), &large).is_err());
    drop(again);
    assert!(!written_back(&to, &large).unwrap(), "it is not locked any more");
}

#[test]
fn values_in_a_file_come_from_it_piece_by_piece() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let [_, large] = host_copy(2);
    let directory = std::env::temp_dir();
    let memory = FileMemory::create(&directory, std::iter::once(4 * LARGE)).unwrap();
    let in_file = tensor_storage::copy_into_file(&large, &memory, WritePolicy::Later).unwrap();
    assert!(tensor_storage::is_in_file(&in_file));
    tensor_storage::page_out(&in_file);
    let [all, part] = [in_file.clone(), in_file.narrow(0, 1001, LARGE - 2002).unwrap()];
    for (of, expected) in [(all, bits(&large)), (part, bits(&large)[1001..LARGE - 1001].to_vec())] {
        let to = unallocated::unallocated_like(&of, &card).unwrap();
        uploaded(&to, &of).unwrap();
        assert!(bits(&to) == expected);
    }
}

#[test]
fn a_file_that_is_shortened_is_an_error_and_other_copies_go_on() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let path = std::env::temp_dir().join(format!("t5-ops-copies-{}", std::process::id()));
    let values: Vec<u8> = (0..LARGE as u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    std::fs::write(&path, &values).unwrap();
    let memory = FileMemory::of_file(File::open(&path).unwrap(), &path).unwrap();
    let of_file =
        tensor_storage::tensor_in_file(&memory, 0, &[LARGE], DType::F32).unwrap().expect("a tensor in the file");
    // Copies of some pieces are under way when the end of the file is reached.
    File::options().write(true).open(&path).unwrap().set_len(2 * LARGE as u64).unwrap();
    let to = unallocated::unallocated_like(&of_file, &card).unwrap();
    let mut incoming = Upload::begin(&to).unwrap();
    assert!(matches!(incoming.copy(&of_file), Err(candle_core::Error::Io(_))) && !incoming.is_copied());
    drop((incoming, to));
    let [_, large] = host_copy(3);
    let others = unallocated::unallocated_like(&large, &card).unwrap();
    uploaded(&others, &large).unwrap();
    assert!(bits(&others) == bits(&large));
    std::fs::remove_file(&path).unwrap();
}

/// A tensor of `elements` elements on a card, with memory of its own.
fn of_card(number: usize, elements: usize, card: &Device) -> Tensor {
    let values: Vec<f32> = (0..elements).map(|i| ((i * 31 + number * 7919) % 65_521) as f32).collect();
    Tensor::from_vec(values, elements, &Device::Cpu).unwrap().to_device(card).unwrap()
}

#[test]
fn values_that_wait_come_back_though_their_memory_served_others() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    assert!(PinnedCopy::begin(&of_card(0, 1000, &card)).unwrap().is_none(), "it is small");
    let on_host = Tensor::zeros(1 << 20, DType::F32, &Device::Cpu).unwrap();
    assert!(PinnedCopy::begin(&on_host).unwrap().is_none());
    // Sizes that are not whole pages, taken and given back in different orders, so that later values lie in fragments of earlier ones.
    let elements = |number: usize| 20_000 + (number * 48_271 % 97) * 1_537;
    let mut there = Vec::new();
    for number in 0..60 {
        let x = of_card(number, elements(number), &card);
        let (values, outgoing_pinned) = PinnedCopy::begin(&x).unwrap().expect("memory is locked");
        assert_eq!((values.shape(), values.dtype()), (x.shape(), x.dtype()));
        // Other values reuse the memory once the copy was waited for, or was dropped.
        if number % 3 == 0 {
            drop(outgoing_pinned)
        } else {
            outgoing_pinned.complete().unwrap()
        }
        drop(x);
        there.push((number, values));
        if number % 2 == 1 {
            let (number, values) = there.remove(number * 7 % there.len());
            let back = Tensor::zeros(elements(number), DType::F32, &card).unwrap();
            let mut incoming = Upload::begin(&back).unwrap();
            values.copy_to(&mut incoming).unwrap();
            drop(values);
            // Meanwhile the next values take its memory.
            let (_next, outgoing_pinned) =
                PinnedCopy::begin(&of_card(number + 100, elements(number), &card)).unwrap().expect("memory is locked");
            outgoing_pinned.complete().unwrap();
            incoming.complete().unwrap();
            assert!(bits(&back) == bits(&of_card(number, elements(number), &card)), "values {number}");
        }
    }
    // Values that are requested before any wait for them.
    let back = Tensor::zeros(elements(1), DType::F32, &card).unwrap();
    let mut incoming = Upload::begin(&back).unwrap();
    let (values, outgoing_pinned) =
        PinnedCopy::begin(&of_card(1, elements(1), &card)).unwrap().expect("memory is locked");
    values.copy_to(&mut incoming).unwrap();
    incoming.complete().unwrap();
    assert!(bits(&back) == bits(&of_card(1, elements(1), &card)));
    drop((values, outgoing_pinned));
    there.clear();
    pinned_copies::release_unused();
    let (_values, outgoing_pinned) = PinnedCopy::begin(&of_card(1, 30_000, &card)).unwrap().expect("memory is locked");
    outgoing_pinned.complete().unwrap();
}

#[test]
fn values_of_another_shape_or_dtype_are_refused() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let [weight, _] = host_copy(0);
    let to = unallocated::unallocated_like(&weight, &card).unwrap();
    let mut incoming = Upload::begin(&to).unwrap();
    for other in [weight.narrow(0, 0, 7).unwrap(), weight.to_dtype(DType::BF16).unwrap()] {
        assert!(incoming.copy(&other).unwrap_err().to_string().starts_with("copy: expected F32 [72, 72]"));
    }
}

#[test]
fn copies_go_on_after_a_thread_has_forgotten_its_cards() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    let [_, large] = host_copy(5);
    for _ in 0..3 {
        let to = unallocated::unallocated_like(&large, &card).unwrap();
        let mut incoming = Upload::begin(&to).unwrap();
        incoming.copy(&large).unwrap();
        incoming.complete().unwrap();
        cuda_device::release_thread_caches();
        assert!(bits(&to) == bits(&large));
    }
}
