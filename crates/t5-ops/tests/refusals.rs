//! Calls that a card refuses, and work that it must not refuse: on other threads, and on less capable cards. Runs on a card, or on the
//! emulated one, so that a real card shows whether the emulation is right.
#![cfg(feature = "cuda")]
// Calls of the driver.
#![allow(unsafe_code)]

#[path = "support/tensors.rs"]
mod tensors;

use std::ffi::c_void;

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::cublas::{result as cublas, sys as blas};
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUfunction_attribute, CUresult, CUstreamCaptureMode};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, DevicePtr, DriverError, LaunchConfig, PushKernelArg, result,
};
use candle_core::{DType, Device, Storage, Tensor};
use cuda_kernels::ptx;
use t5_ops::{Attended, Attention, Dropout, Mask};

use self::tensors::{is_emulated, tensor, test_alone};

/// A variable of the emulated card (`cuda-kernels/emulation`).
const CAPABILITY: &str = "LOW_MEM_T5_EMULATED_CAPABILITY";
/// The most shared memory of a block that has not asked for more.
const SHARED_BYTES: u32 = 48 << 10;

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

fn error<T>(result: Result<T, DriverError>) -> Option<CUresult> {
    result.err().map(|error| error.0)
}

/// A kernel of `optimizer.cu`, of 256 threads at most.
fn kernel(card: &CudaDevice, name: &str) -> CudaFunction {
    card.get_or_load_custom_func(name, "optimizer", ptx::OPTIMIZER).unwrap().into_cuda_function()
}

/// Launches `add_f32` to add nothing.
fn launch(card: &CudaDevice, f: &CudaFunction, grid: (u32, u32, u32), threads: u32, shared: u32) -> Option<CUresult> {
    let stream = card.cuda_stream();
    let (nowhere, count) = (0u64, 0usize);
    let config = LaunchConfig { grid_dim: grid, block_dim: (threads, 1, 1), shared_mem_bytes: shared };
    // SAFETY: the kernel's arguments; with no elements it reads and writes none.
    error(unsafe { stream.launch_builder(f).arg(&nowhere).arg(&nowhere).arg(&count).launch(config) })
}

#[test]
fn launches_that_no_card_has_are_refused() {
    let device = card();
    let card = device.as_cuda_device().unwrap();
    let f = kernel(card, "add_f32");
    let invalid = Some(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(card, &f, (1, 65_535, 1), 32, 0), None);
    assert_eq!(launch(card, &f, (1, 1, 65_535), 32, 0), None);
    assert_eq!(launch(card, &f, (0, 1, 1), 32, 0), invalid);
    assert_eq!(launch(card, &f, (1, 65_536, 1), 32, 0), invalid);
    assert_eq!(launch(card, &f, (1, 1, 65_536), 32, 0), invalid);
    assert_eq!(launch(card, &f, (1, 1, 1), 1056, 0), invalid);
    assert!(launch(card, &f, (1, 1, 1), 512, 0).is_some(), "more threads than it is compiled for");

    assert_eq!(launch(card, &f, (1, 1, 1), 256, SHARED_BYTES), None);
    assert_eq!(launch(card, &f, (1, 1, 1), 256, SHARED_BYTES + 4), invalid);
    let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(error(f.set_attribute(most, 256 << 10)), invalid, "more than any card has");
    f.set_attribute(most, 60 << 10).unwrap();
    assert_eq!(launch(card, &f, (1, 1, 1), 256, 60 << 10), None);
    assert_eq!(launch(card, &f, (1, 1, 1), 256, 61 << 10), invalid);
    // The card continues.
    assert_eq!(Tensor::ones(2, DType::F32, &device).unwrap().to_vec1::<f32>().unwrap(), [1.0; 2]);
}

#[test]
fn a_kernel_is_found_in_its_module_alone() {
    let device = card();
    let card = device.as_cuda_device().unwrap();
    let module = card.cuda_stream().context().load_module(ptx::NORM.into()).unwrap();
    assert!(module.load_function("row_lengths").is_ok());
    assert_eq!(error(module.load_function("add_f32")), Some(CUresult::CUDA_ERROR_NOT_FOUND));
}

#[test]
fn a_thread_without_a_context_is_refused_and_operations_bring_their_own() {
    let device = card();
    // So that only the launch is left to the other thread.
    let (sum, x) = (Tensor::ones(5, DType::F32, &device).unwrap(), Tensor::ones(5, DType::F32, &device).unwrap());
    t5_ops::add_in_place(&sum, &x).unwrap();
    let on_new_thread = |work: &(dyn Fn() + Sync)| std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    on_new_thread(&|| {
        // SAFETY: memory that is never allocated twice.
        let asked = unsafe { result::malloc_sync(16) };
        assert_eq!(error(asked), Some(CUresult::CUDA_ERROR_INVALID_CONTEXT));
    });
    on_new_thread(&|| t5_ops::add_in_place(&sum, &x).unwrap());
    assert_eq!(sum.to_vec1::<f32>().unwrap(), [3.0; 5]);
}

#[test]
fn time_is_taken_between_events_that_keep_it() {
    let device = card();
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let event = |flags| stream.record_event(Some(flags)).unwrap();
    let timed = || event(sys::CUevent_flags::CU_EVENT_DEFAULT);
    assert!(timed().elapsed_ms(&timed()).is_ok());
    let untimed = event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
    assert_eq!(error(timed().elapsed_ms(&untimed)), Some(CUresult::CUDA_ERROR_INVALID_HANDLE));
}

#[test]
fn a_copy_of_memory_that_is_locked_in_part_is_refused() {
    const BYTES: usize = 64 << 10;
    let device = card();
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let tensor = Tensor::zeros(BYTES / 4, DType::F32, &device).unwrap();
    let there = address(&tensor);
    let mut memory = vec![0u8; 3 * BYTES];
    let first = memory.as_ptr().align_offset(4096);
    let (locked, invalid) = (memory[first..].as_mut_ptr().cast::<c_void>(), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
    // SAFETY: a part of the memory, which is unlocked below. No copy of it is under way there.
    unsafe { sys::cuMemHostRegister_v2(locked, BYTES, 0) }.result().unwrap();
    for (at, expected) in [(0, None), (BYTES / 2, invalid), (2 * BYTES - 4096, None)] {
        let part = &mut memory[first + at..][..BYTES - 8192];
        // SAFETY: the card has as many bytes there, and both copies are waited for.
        let copied = unsafe { result::memcpy_htod_async(there, part, stream.cu_stream()) };
        assert_eq!(error(copied), expected, "{at}");
        // SAFETY: the same.
        assert_eq!(error(unsafe { result::memcpy_dtoh_async(part, there, stream.cu_stream()) }), expected, "{at}");
        stream.synchronize().unwrap();
    }
    // SAFETY: what was locked above.
    unsafe { sys::cuMemHostUnregister(locked) }.result().unwrap();
}

#[test]
fn nobody_waits_or_looks_while_launches_are_recorded() {
    let device = card();
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    let other = stream.context().new_stream().unwrap();
    let before = stream.record_event(None).unwrap();
    let calls: [&dyn Fn() -> Option<CUresult>; 3] =
        [&|| error(before.try_is_complete()), &|| error(before.synchronize()), &|| error(other.synchronize())];
    for call in calls {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        assert_eq!(call(), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        assert!(stream.end_capture(sys::CUgraphInstantiate_flags(0)).is_err());
        stream.synchronize().unwrap();
        assert_eq!(call(), None);
    }
}

/// The address of a tensor's memory.
fn address(t: &Tensor) -> u64 {
    let (storage, _) = t.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { panic!("a tensor on the card") };
    let stream = storage.device.cuda_stream();
    match t.dtype() {
        DType::F32 => storage.as_cuda_slice::<f32>().unwrap().device_ptr(&stream).0,
        _ => storage.as_cuda_slice::<half::bf16>().unwrap().device_ptr(&stream).0,
    }
}

/// A product of matrices of ones: (2, 2) each, whose columns are `lead` apart in the first.
fn multiply(
    device: &Device,
    dtype: DType,
    lead: i32,
    mode: Option<blas::cublasMath_t>,
) -> Result<Vec<f32>, blas::cublasStatus_t> {
    let card = device.as_cuda_device().unwrap();
    let [a, b, c] = [0; 3].map(|_| Tensor::ones((2, 2), dtype, device).unwrap());
    let of = if dtype == DType::F32 { blas::cudaDataType::CUDA_R_32F } else { blas::cudaDataType::CUDA_R_16BF };
    let handle = *card.cublas_handle().handle();
    let (no, one, zero) = (blas::cublasOperation_t::CUBLAS_OP_N, 1f32, 0f32);
    let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
    let (by, algorithm) = (blas::cublasComputeType_t::CUBLAS_COMPUTE_32F, blas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT);
    let at = |t: &Tensor| address(t) as *mut c_void;
    // SAFETY: the handle of an open card, and three matrices of these sizes.
    let multiplied = unsafe {
        if let Some(mode) = mode {
            blas::cublasSetMathMode(handle, mode).result().unwrap();
        }
        cublas::gemm_ex(
            handle,
            no,
            no,
            2,
            2,
            2,
            one,
            at(&a),
            of,
            lead,
            at(&b),
            of,
            2,
            zero,
            at(&c),
            of,
            2,
            by,
            algorithm,
        )
    };
    multiplied.map_err(|error| error.0)?;
    Ok(c.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap())
}

#[test]
fn products_are_of_matrices_that_exist_and_their_sums_are_in_f32() {
    let device = card();
    for dtype in [DType::F32, DType::BF16] {
        assert_eq!(multiply(&device, dtype, 2, None), Ok(vec![2.0; 4]));
        assert_eq!(multiply(&device, dtype, 1, None), Err(blas::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE));
    }
    if is_emulated(&card()) {
        // A card multiplies them, and may round its partial sums.
        let default = blas::cublasMath_t::CUBLAS_DEFAULT_MATH;
        assert_eq!(multiply(&device, DType::F32, 2, Some(default)), Ok(vec![2.0; 4]));
        let refused = Err(blas::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        assert_eq!(multiply(&device, DType::BF16, 2, Some(default)), refused);
        // A matrix of f32 in memory of half its bytes.
        assert_eq!(multiply(&device, DType::F32, 300, None), Err(blas::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE));
    }
}

/// More sequences than a grid has blocks along its second side.
#[test]
fn a_micro_batch_may_have_more_sequences_than_a_grid_has_blocks_along_a_side() {
    const SEQUENCES: u32 = 65_537;
    let samples: Vec<u32> = (0..SEQUENCES).collect();
    let dropout = Dropout { probability: 0.5, seed: 1, step: 2, site: 3, samples: &samples };
    let dropped = |device: &Device| {
        let x = Tensor::ones((SEQUENCES as usize, 1, 1), DType::F32, device).unwrap();
        t5_ops::dropout(&x, Some(&dropout)).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(dropped(&card()), dropped(&Device::Cpu));
}

/// Writes six numbers into memory of five.
fn write_behind_an_allocation() {
    let device = card();
    let card = device.as_cuda_device().unwrap();
    let [y, x] = [5, 8].map(|count| Tensor::ones(count, DType::F32, &device).unwrap());
    let (to, from, factor, count, f) = (address(&y), address(&x), 2f32, 6usize, kernel(card, "scaled_f32"));
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: none: it writes one element past the result.
    unsafe { card.cuda_stream().launch_builder(&f).arg(&from).arg(&to).arg(&factor).arg(&count).launch(config) }
        .unwrap();
}

#[test]
fn the_emulated_card_ends_a_process_that_writes_behind_an_allocation() {
    const NAME: &str = "the_emulated_card_ends_a_process_that_writes_behind_an_allocation";
    const WRITES: &str = "LOW_MEM_T5_TEST_WRITES";
    if !is_emulated(&card()) {
        return;
    }
    if std::env::var_os(WRITES).is_some() {
        return write_behind_an_allocation();
    }
    let ran = test_alone(NAME, &[(WRITES, "1")]);
    let text = String::from_utf8_lossy(&ran.stderr);
    // Kernels from PTX are stopped before they write.
    let says = ["written behind an allocation of 20 bytes", "scaled_f32: memory that is nobody's"];
    assert!(!ran.status.success() && says.iter().any(|says| text.contains(says)), "{text}");
}

#[test]
fn a_call_before_the_libraries_are_open_is_an_error() {
    const NAME: &str = "a_call_before_the_libraries_are_open_is_an_error";
    const CALLS: &str = "LOW_MEM_T5_TEST_CALLS";
    if std::env::var_os(CALLS).is_some() {
        let mut count = 0;
        // SAFETY: a place for the number.
        let called = unsafe { sys::cuDeviceGetCount(&raw mut count) };
        assert_eq!((called, count), (CUresult::CUDA_ERROR_NOT_INITIALIZED, 0));
        assert_eq!(cuda_device::cards().unwrap(), 1);
        // SAFETY: as above.
        let called = unsafe { sys::cuDeviceGetCount(&raw mut count) };
        return assert_eq!((called, count), (CUresult::CUDA_SUCCESS, 1));
    }
    if is_emulated(&card()) {
        let ran = test_alone(NAME, &[(CALLS, "1")]);
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
    }
}

/// Attention, its gradients, and a product, on this card and on the CPU. Heads have the largest size that has kernels, or a size that is
/// not a multiple of four.
fn computes_as_the_cpu_does(dtype: DType, tolerance: f64) {
    for head in [128, 110] {
        computes_heads_as_the_cpu_does(head, dtype, tolerance);
    }
}

fn computes_heads_as_the_cpu_does(head: usize, dtype: DType, tolerance: f64) {
    let lengths = [9, 12];
    let on = |device: &Device| {
        let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| tensor(seed, &[2, 12, 2 * head], dtype, device));
        let a = Attention { mask: Mask::CAUSAL, ..Attention::new(2, &lengths) };
        let (out, lse) = t5_ops::attention(&q, &k, &v, &a).unwrap();
        let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let (dq, dk, dv) = t5_ops::attention_backward(&of, &dout, &a, None).unwrap();
        let w = tensor(5, &[3, 2 * head], dtype, device);
        let y = t5_ops::linear(&out, &w).unwrap();
        [out, dq, dk, dv, y].map(|x| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap())
    };
    for (got, expected) in on(&card()).iter().zip(&on(&Device::Cpu)) {
        let most = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
        assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() <= tolerance * most), "{head} {dtype:?}");
    }
}

#[test]
fn every_card_computes_in_f32() {
    computes_as_the_cpu_does(DType::F32, 1e-5);
}

#[test]
fn cards_from_ampere_on_compute_in_bf16() {
    if cuda_device::check_dtype(&card(), DType::BF16).is_ok() {
        computes_as_the_cpu_does(DType::BF16, 3e-2);
    } else {
        let refused = multiply(&card(), DType::BF16, 2, None);
        assert_eq!(refused, Err(blas::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH));
    }
}

#[test]
fn cards_with_less_shared_memory_and_older_ones_compute() {
    if !is_emulated(&card()) {
        return;
    }
    for capability in ["61", "70", "75", "80", "86", "90", "120"] {
        for name in ["every_card_computes_in_f32", "cards_from_ampere_on_compute_in_bf16"] {
            let ran = test_alone(name, &[(CAPABILITY, capability)]);
            let text = String::from_utf8_lossy(&ran.stdout);
            assert!(ran.status.success() && text.contains("1 passed"), "{capability}: {text}");
        }
    }
}
