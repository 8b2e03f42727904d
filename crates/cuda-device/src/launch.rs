//! Launches the kernels for NVIDIA's cards (`cuda-kernels`) on the stream of candle's device, and multiplies by cuBLAS.
//!
//! One stream carries all computation, so a tensor may be dropped as soon as its kernel is launched: later work on the stream reuses the
//! memory. Other streams carry copies alone. These copies wait for the stream that computes, and it waits for them ([`crate::copies`]).

use std::cell::Cell;
use std::ffi::c_void;
use std::ops::Range;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result as cublas, sys};
use candle_core::cuda_backend::cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute};
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg, result as driver};
use candle_core::{CudaDevice, DType, Device, DeviceLocation, Result, Shape, Storage, Tensor, bail};
use tensor_storage::elements;

use crate::pieces::{STAGED_BYTES, of_piece};

pub use lists::{changing, uploaded};
pub use numbers::{Number, read_numbers};
pub(crate) use {lists::forget_lists, numbers::forget_numbers};

mod lifetimes;
mod lists;
mod numbers;
pub mod recording;
mod round;
pub(crate) mod rounds;

/// A source of `cuda-kernels`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "`cuda_kernels::ptx` documents them")]
pub enum Module {
    Attention,
    AttentionBackward,
    AttentionForward,
    CrossEntropy,
    Decoding,
    Dequantise,
    Dropout,
    Elementwise,
    SmallM,
    Norm,
    Optimizer,
    Rows,
}

impl Module {
    fn name_and_ptx(self) -> (&'static str, &'static str) {
        use cuda_kernels::ptx;
        match self {
            Module::Attention => ("attention", ptx::ATTENTION),
            Module::AttentionBackward => ("attention_backward", ptx::ATTENTION_BACKWARD),
            Module::AttentionForward => ("attention_forward", ptx::ATTENTION_FORWARD),
            Module::CrossEntropy => ("cross_entropy", ptx::CROSS_ENTROPY),
            Module::Decoding => ("decoding", ptx::DECODING),
            Module::Dequantise => ("dequantise", ptx::DEQUANTISE),
            Module::Dropout => ("dropout", ptx::DROPOUT),
            Module::Elementwise => ("elementwise", ptx::ELEMENTWISE),
            Module::SmallM => ("small_m", ptx::SMALL_M),
            Module::Norm => ("norm", ptx::NORM),
            Module::Optimizer => ("optimizer", ptx::OPTIMIZER),
            Module::Rows => ("rows", ptx::ROWS),
        }
    }
}

/// Shared memory that a block has without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

/// Whether there are kernels for these operands: all on one card, in f32 or bf16.
pub fn takes<'a>(operands: impl IntoIterator<Item = &'a Tensor>) -> bool {
    let mut cards = operands.into_iter().map(|t| if computes_in(t.dtype()) { card_number(t.device()) } else { None });
    let Some(Some(first)) = cards.next() else { return false };
    cards.all(|card| card == Some(first))
}

/// Whether there are kernels for these operands, and all have one dtype.
pub fn takes_alike<'a>(operands: impl IntoIterator<Item = &'a Tensor>) -> bool {
    let operands: Vec<&Tensor> = operands.into_iter().collect();
    operands.iter().all(|t| t.dtype() == operands[0].dtype()) && takes(operands)
}

/// Whether kernels compute in a dtype.
pub fn computes_in(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// The number of a device's card. `None` for other devices.
pub fn card_number(device: &Device) -> Option<usize> {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
        _ => None,
    }
}

fn card(device: &Device) -> Result<&CudaDevice> {
    device.as_cuda_device()
}

/// Whether a block on this card can have this many bytes of shared memory on request.
pub fn has_shared_bytes(device: &Device, bytes: usize) -> Result<bool> {
    Ok(bytes <= SHARED_BYTES as usize || bytes <= max_shared_bytes(device)?)
}

/// The most shared memory of a block, in bytes. The driver is asked once per card.
fn max_shared_bytes(device: &Device) -> Result<usize> {
    thread_local! {
        /// The number of the card that was asked last, and its answer.
        static ANSWER: Cell<(Option<usize>, usize)> = const { Cell::new((None, 0)) };
    }
    let (number, (of, bytes)) = (card_number(device), ANSWER.get());
    if number == of {
        return Ok(bytes);
    }
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let bytes = card(device)?.cuda_stream().context().attribute(attribute).w()?;
    let bytes = usize::try_from(bytes).unwrap_or(0);
    ANSWER.set((number, bytes));
    Ok(bytes)
}

/// The suffix of a dtype in names of kernels.
pub fn suffix(dtype: DType) -> &'static str {
    if dtype == DType::BF16 { "bf16" } else { "f32" }
}

/// Whether the byte ranges of both tensors, from the first byte to the last, overlap.
pub fn overlap(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(meet(&extent(a)?, &extent(b)?))
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Bytes of a tensor's elements.
pub fn byte_count(t: &Tensor) -> usize {
    t.elem_count() * t.dtype().size_in_bytes()
}

/// The address of the first element of a contiguous tensor.
pub fn address(t: &Tensor) -> Result<u64> {
    if !t.is_contiguous() {
        bail!("expected a contiguous tensor, got strides {:?}", t.stride())
    }
    first_address(t)
}

/// Refuses to change a tensor in place if it shares memory with an operand. On the CPU the lock of the storage detects this.
pub fn check_apart<'a>(op: &str, to: &Tensor, operands: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
    for operand in operands {
        if overlap(to, operand)? {
            return Err(not_apart(op));
        }
    }
    Ok(())
}

/// [`check_apart`] for each pair of tensors, where all of them may be changed.
pub fn check_each_apart(op: &str, tensors: &[&Tensor]) -> Result<()> {
    let extents: Vec<Range<u64>> = tensors.iter().map(|t| extent(t)).collect::<Result<_>>()?;
    for (at, a) in extents.iter().enumerate() {
        if extents[at + 1..].iter().any(|b| meet(a, b)) {
            return Err(not_apart(op));
        }
    }
    Ok(())
}

fn not_apart(op: &str) -> candle_core::Error {
    candle_core::Error::Msg(format!("{op}: the tensor to be changed in place shares its memory with an operand")).bt()
}

/// The addresses from a tensor's first byte to the end of its last element, in bytes.
fn extent(t: &Tensor) -> Result<Range<u64>> {
    let first = first_address(t)?;
    let steps: usize = t.dims().iter().zip(t.stride()).map(|(size, stride)| size.saturating_sub(1) * stride).sum();
    let elements = if t.elem_count() == 0 { 0 } else { steps + 1 };
    Ok(first..first + (elements * t.dtype().size_in_bytes()) as u64)
}

/// The address of a matrix's first row, and the distance between rows. `None` if the elements of a row are not contiguous.
pub fn rows_address(t: &Tensor) -> Result<Option<(u64, usize)>> {
    match t.stride() {
        &[row, 1] => Ok(Some((first_address(t)?, row))),
        _ => Ok(None),
    }
}

/// The address of a tensor's first element, for the next launch.
fn first_address(t: &Tensor) -> Result<u64> {
    Ok(recording::seen(own_address(t)?))
}

/// The address of a tensor's first element, where no launch is given it.
pub fn own_address(t: &Tensor) -> Result<u64> {
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("expected a tensor on a card") };
    let stream = storage.device.cuda_stream();
    let end = layout.start_offset() + t.elem_count();
    macro_rules! address {
        ($element:ty) => {{
            let slice = storage.as_cuda_slice::<$element>()?;
            if slice.len() < end {
                bail!("expected a tensor with values, got one that is unallocated")
            }
            slice.device_ptr(&stream).0
        }};
    }
    let base = match t.dtype() {
        DType::F32 => address!(f32),
        DType::F64 => address!(f64),
        DType::BF16 => address!(half::bf16),
        DType::F16 => address!(half::f16),
        DType::U32 => address!(u32),
        DType::U8 => address!(u8),
        other => bail!("expected F32, BF16, F16, F64, U32 or U8 on a card, got {other:?}"),
    };
    Ok(base + (layout.start_offset() * t.dtype().size_in_bytes()) as u64)
}

/// A tensor on the same device whose elements are not initialised.
pub fn unwritten(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    elements(&shape)?;
    if let Some(piece) = recording::piece(&shape, dtype)? {
        return Ok(piece);
    }
    // SAFETY: on a card no Rust code reads it, and every pattern of bytes is a number.
    let tensor = unsafe { Tensor::empty(shape, dtype, device) }?;
    recording::taken(&tensor)?;
    Ok(tensor)
}

/// A tensor of zeros on a card.
pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    if !recording::is_active() {
        return Tensor::zeros(shape, dtype, device);
    }
    // A recording reuses memory that holds old values, so each launch has to set it to zero.
    let zeros = unwritten(shape, dtype, device)?;
    set_to_zero(&zeros)?;
    Ok(zeros)
}

/// Writes zeros into a contiguous tensor.
pub fn set_to_zero(t: &Tensor) -> Result<()> {
    if t.elem_count() == 0 {
        // candle would launch its kernel even for no elements, and a card refuses a grid without blocks.
        return Ok(());
    }
    let at = address(t)?;
    t.zero_set()?;
    recording::launched([at]);
    Ok(())
}

/// Converts a tensor to another dtype, in memory of its own. Returns the tensor itself if it has that dtype.
pub fn cast(t: &Tensor, dtype: DType) -> Result<Tensor> {
    if t.dtype() == dtype {
        return Ok(t.clone());
    }
    let (t, count) = (t.contiguous()?, t.elem_count());
    let other = unwritten(t.shape(), dtype, t.device())?;
    let name = format!("cast_{}_{}", t.dtype().as_str(), dtype.as_str());
    let kernel = Kernel::new(t.device(), Module::Elementwise, name)?;
    // Without a layout the elements are contiguous.
    let kernel = kernel.value(count).value(1usize).value(0u64).tensor(&t)?.tensor(&other)?;
    // SAFETY: two tensors of the same number of elements.
    unsafe { kernel.launch([count.div_ceil(1024), 1, 1], 1024, 0)? };
    Ok(other)
}

/// Copies the bytes of a contiguous tensor to an address on the card.
///
/// # Safety
/// The address has memory for these bytes.
pub unsafe fn copy_to(from: &Tensor, to: u64) -> Result<()> {
    let bytes = byte_count(from);
    let stream = card(from.device())?.cuda_stream();
    stream.context().bind_to_thread().w()?;
    let from = address(from)?;
    // SAFETY: the tensor has these bytes; the address by the caller's promise.
    unsafe { driver::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.w()?;
    recording::launched([from, to]);
    Ok(())
}

/// Overwrites the numbers of a tensor of the same count.
pub fn overwrite(card: &CudaDevice, there: &Tensor, numbers: &[u32]) -> Result<()> {
    if there.elem_count() != numbers.len() {
        bail!("expected {} numbers, got {}", there.elem_count(), numbers.len())
    }
    let stream = card.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the counts are equal. The driver has read the numbers when it returns, because the host's memory is not pinned.
    unsafe { driver::memcpy_htod_async(address(there)?, numbers, stream.cu_stream()) }.w()
}

/// Converts a number of elements to the type that kernels count in.
pub fn count(n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| candle_core::Error::Msg(format!("expected a size below 2^31 on a card, got {n}")))
}

/// Uploads structs with C's layout as one array. The host does not wait for work that was launched before.
///
/// # Safety
/// They have no padding.
pub unsafe fn table<T: Copy>(entries: &[T], device: &Device) -> Result<Tensor> {
    const { assert!(size_of::<T>().is_multiple_of(size_of::<u64>()) && align_of::<T>() == align_of::<u64>()) };
    let words = size_of_val(entries) / size_of::<u32>();
    // SAFETY: memory of this many words, each of which is written.
    let words = unsafe { std::slice::from_raw_parts(entries.as_ptr().cast::<u32>(), words) };
    let (there, stream) = (unwritten(words.len(), DType::U32, device)?, card(device)?.cuda_stream());
    stream.context().bind_to_thread().w()?;
    let mut at = address(&there)?;
    for piece in words.chunks(STAGED_BYTES as usize / size_of::<u32>()) {
        // SAFETY: there is room for all pieces. The driver has read each when it returns, because the host's memory is not pinned.
        unsafe { driver::memcpy_htod_async(at, piece, stream.cu_stream()) }.w()?;
        at += size_of_val(piece) as u64;
    }
    Ok(there)
}

/// One allocation on the card, from which pieces are taken one after the other.
pub struct Scratch {
    memory: Tensor,
    at: u64,
    taken: u64,
}

impl Scratch {
    /// Allocates `bytes` bytes: the sum of [`of_piece`] over all pieces.
    pub fn new(bytes: u64, device: &Device) -> Result<Self> {
        let memory = unwritten(bytes as usize / size_of::<f32>(), DType::F32, device)?;
        Ok(Self { at: address(&memory)?, memory, taken: 0 })
    }

    /// Takes the next piece, and returns its address.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn piece(&mut self, bytes: u64) -> u64 {
        let at = self.at + self.taken;
        self.taken += of_piece(bytes);
        assert!(self.taken <= byte_count(&self.memory) as u64, "scratch memory for fewer pieces");
        at
    }

    /// Reuses the memory from the first piece on, for work that is launched after the users of the earlier pieces.
    pub fn begin_again(&mut self) {
        self.taken = 0;
    }

    /// Returns the tensor that holds all pieces.
    pub fn into_memory(self) -> Tensor {
        self.memory
    }
}

/// Holds the largest kernel argument, the sizes of attention.
type Word = [u64; 7];

/// A kernel and its arguments.
pub struct Kernel<'a> {
    card: &'a CudaDevice,
    module: Module,
    name: String,
    arguments: Vec<Word>,
}

impl<'a> Kernel<'a> {
    /// The kernel of this name in a module, still without arguments.
    pub fn new(device: &'a Device, module: Module, name: impl Into<String>) -> Result<Self> {
        Ok(Self { card: card(device)?, module, name: name.into(), arguments: Vec::new() })
    }

    /// Adds a contiguous tensor.
    pub fn tensor(self, t: &Tensor) -> Result<Self> {
        let address = address(t)?;
        Ok(self.value(address))
    }

    /// Adds a contiguous tensor, or null.
    pub fn tensor_or_null(self, t: Option<&Tensor>) -> Result<Self> {
        match t {
            Some(t) => self.tensor(t),
            None => Ok(self.value(0u64)),
        }
    }

    /// Adds a size.
    pub fn size(self, n: usize) -> Result<Self> {
        let n = count(n)?;
        Ok(self.value(n))
    }

    /// Adds a number, or a struct with C's layout.
    pub fn value<T: Copy>(mut self, value: T) -> Self {
        const { assert!(size_of::<T>() <= size_of::<Word>() && align_of::<T>() <= align_of::<Word>()) };
        let mut word = Word::default();
        // SAFETY: the word is large enough, and aligned.
        unsafe { word.as_mut_ptr().cast::<T>().write(value) };
        self.arguments.push(word);
        self
    }

    /// Launches the kernel, unless the grid is empty.
    ///
    /// # Safety
    /// The arguments are those of the kernel; its tensors have the elements that it reads and writes.
    pub unsafe fn launch(self, grid: [usize; 3], threads: u32, shared_bytes: usize) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let (module, ptx) = self.module.name_and_ptx();
        // Finding a kernel in a loaded module, and setting its limits, works on the thread's current context.
        self.card.cuda_stream().context().bind_to_thread().w()?;
        let function = self.card.get_or_load_custom_func(&self.name, module, ptx)?;
        let shared_bytes = u32::try_from(shared_bytes).map_err(candle_core::Error::wrap)?;
        if shared_bytes > SHARED_BYTES {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared_bytes as i32).w()?;
        }
        let [x, y, z] = grid.map(count);
        let grid_dim = (x? as u32, y? as u32, z? as u32);
        let mut launch = function.builder();
        for argument in &self.arguments {
            launch.arg(argument);
        }
        // SAFETY: by the caller's promise.
        unsafe { launch.launch(LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: shared_bytes }) }
            .w()?;
        recording::launched(self.arguments.into_iter().flatten());
        Ok(())
    }
}

/// The number of threads of a block that works along rows of this width, four elements at a time.
pub fn threads_along(width: usize) -> u32 {
    (width.div_ceil(4).next_multiple_of(32)).clamp(32, 256) as u32
}

/// Bytes of shared memory for a block of `threads` threads that adds partial sums by the kernels' `add_in_order`: 16 numbers a thread.
pub fn bytes_to_add_in_order(threads: u32) -> usize {
    threads as usize * 16 * size_of::<f32>()
}

/// A matrix of a product, as it lies in memory or transposed.
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    /// The matrix as it lies in memory.
    pub matrix: &'a Tensor,
    /// Whether the product takes its transpose.
    pub is_transposed: bool,
}

impl<'a> Factor<'a> {
    /// The matrix itself.
    pub fn plain(matrix: &'a Tensor) -> Self {
        Self { matrix, is_transposed: false }
    }

    /// The transpose of the matrix.
    pub fn transposed(matrix: &'a Tensor) -> Self {
        Self { matrix, is_transposed: true }
    }
}

/// Whether cuBLAS multiplies operands of one dtype into a result of another.
pub fn multiplies(operands: DType, result: DType) -> bool {
    matches!((operands, result), (DType::F32, DType::F32) | (DType::BF16, DType::F32 | DType::BF16))
}

/// `c = alpha * a b + beta * c` with a (M, K), b (K, N), c (M, N): contiguous, a and b of one dtype; sums are in f32.
pub fn multiply(a: Factor, b: Factor, c: &Tensor, size: (usize, usize, usize), alpha: f32, beta: f32) -> Result<()> {
    multiply_into_columns(a, b, (c, 0, size.2), size, alpha, beta)
}

/// Like [`multiply`], but into N columns of a wider c, given as that matrix, the first of the columns, and the matrix's width.
pub fn multiply_into_columns(
    a: Factor,
    b: Factor,
    (c, first, width): (&Tensor, usize, usize),
    (m, k, n): (usize, usize, usize),
    alpha: f32,
    beta: f32,
) -> Result<()> {
    if m == 0 || n == 0 {
        return Ok(());
    }
    if first + n > width || m * width > c.elem_count() {
        bail!("expected {m} rows of {width}, with columns {first} to {}, got {:?}", first + n, c.dims())
    }
    if a.matrix.dtype() != b.matrix.dtype() || !multiplies(a.matrix.dtype(), c.dtype()) {
        let dtypes = [a.matrix, b.matrix, c].map(Tensor::dtype);
        bail!("expected a product of two matrices of one dtype, got {dtypes:?}")
    }
    let kind = |dtype| match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_32F,
    };
    let operation = |is_transposed| match is_transposed {
        true => sys::cublasOperation_t::CUBLAS_OP_T,
        false => sys::cublasOperation_t::CUBLAS_OP_N,
    };
    check_apart("a product", c, [a.matrix, b.matrix])?;
    let card = card(c.device())?;
    card.cuda_stream().context().bind_to_thread().w()?;
    let (operands, result) = (kind(a.matrix.dtype()), kind(c.dtype()));
    let into = address(c)? + (first * c.dtype().size_in_bytes()) as u64;
    let [of_a, of_b, of_c] = [address(a.matrix)?, address(b.matrix)?, into].map(|at| at as *mut c_void);
    // cuBLAS asks for at least one element from column to column, even in a matrix without elements.
    let lead = |plain: usize, other: usize, is_transposed| count(if is_transposed { other } else { plain }.max(1));
    // cuBLAS is column-major: it is given the transposed product, cᵀ = bᵀ aᵀ, whose matrices are the same bytes.
    // SAFETY: three matrices on the card with the elements that the sizes say; candle's handle has candle's stream.
    unsafe {
        cublas::gemm_ex(
            *card.cublas_handle().handle(),
            operation(b.is_transposed),
            operation(a.is_transposed),
            count(n)?,
            count(m)?,
            count(k)?,
            (&raw const alpha).cast(),
            of_b,
            operands,
            lead(n, k, b.is_transposed)?,
            of_a,
            operands,
            lead(k, m, a.is_transposed)?,
            (&raw const beta).cast(),
            of_c,
            result,
            count(width)?,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            // Not the algorithm for tensor cores: before Ampere it lets cuBLAS multiply f32 in f16. bf16 uses tensor cores either way.
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .w()?;
    recording::launched([]);
    Ok(())
}
