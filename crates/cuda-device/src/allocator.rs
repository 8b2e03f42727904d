//! Allocates memory of a card. Addresses are backed by the card's memory only as far as tensors need it, and never beyond a limit.
//!
//! A driver's pool takes memory in pieces of 32 MiB. On an H200 the pool held up to a quarter more than its tensors, beyond its own limit.
//! Here a tensor takes the smallest free place that holds it. So the card holds little besides tensors, and the same on every card.
//!
//! candle and cudarc allocate by the driver's `cuMemAllocAsync` and `cuMemFreeAsync`. This program defines functions of these names: they
//! serve the streams that were given to [`begin`], and pass all other streams on to the driver. Memory is in the order of one stream: a
//! freed place serves later launches while earlier launches may still use it, because the earlier ones run first.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};
use cuda_kernels::driver;
use heap::FreeRanges;

type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A tensor begins at a multiple of this: the alignment that the driver gives.
const ALIGNMENT: usize = 512;
/// Tensors of fewer bytes have addresses of their own, so that no small tensor stays in a place that a large one would take.
const SMALL: usize = 256 << 10;
/// The driver is asked for pieces of the held memory divided by this. A piece is given back as a whole, which takes some microseconds.
const HELD_OVER_PIECE: usize = 256;

const OUT_OF_MEMORY: DriverError = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
/// The error of a driver that lacks the function.
const NOT_SUPPORTED: c_int = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as c_int;

/// Bytes of a card's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    /// Memory that backs addresses: now, and the most so far.
    pub held: usize,
    pub held_peak: usize,
    /// The part of that memory that tensors take: now, and the most so far.
    pub tensors: usize,
    pub tensors_peak: usize,
}

/// A range of addresses, parts of which are backed by memory. A place is an offset in bytes from the first address.
#[derive(Debug)]
struct Region {
    base: u64,
    bytes: usize,
    /// Places that are backed and that no tensor uses.
    free: FreeRanges,
    /// The bytes of each piece of memory, by the place of its first byte.
    committed: BTreeMap<usize, usize>,
}

/// Where a tensor lies: the number of its region, its place there, and its bytes.
#[derive(Clone, Copy, Debug)]
struct Allocation {
    region: usize,
    at: usize,
    bytes: usize,
}

#[derive(Debug)]
struct CardMemory {
    card: sys::CUdevice,
    stream: usize,
    /// The limit of the memory that is held.
    most: usize,
    /// Memory is backed in multiples of this.
    unit: usize,
    /// One region for small tensors, one for all others.
    regions: [Region; 2],
    /// Tensors by their addresses.
    tensors: HashMap<u64, Allocation>,
    count: Count,
}

static ALL: Mutex<Vec<CardMemory>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<CardMemory>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The properties of an allocation: the kind of memory, and its card.
fn properties(card: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: zeros are a value of each field: kinds, a location, numbers, a null pointer.
    let mut properties: sys::CUmemAllocationProp = unsafe { zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = card;
    properties
}

impl Region {
    fn new(bytes: usize) -> Result<Self> {
        let mut base = 0;
        // SAFETY: a place for the address. Addresses alone take no memory, and belong to the process until it ends.
        unsafe { sys::cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0) }.result()?;
        Ok(Self { base, bytes, free: FreeRanges::new(), committed: BTreeMap::new() })
    }

    /// Returns the place at which the least additional memory gives `bytes` contiguous free bytes, and that additional memory in bytes, a
    /// multiple of `unit`. `None` if the region has too few addresses.
    fn place_for(&self, bytes: usize, unit: usize) -> Option<(usize, usize)> {
        let after = self.committed.iter().map(|(place, size)| place + size);
        let until = self.committed.keys().copied().chain([self.bytes]);
        let gaps = [0].into_iter().chain(after).zip(until);
        let found = gaps.filter_map(|(from, until)| {
            let more = bytes.saturating_sub(self.free.before(from)).next_multiple_of(unit);
            (from + more <= until).then_some((from, more))
        });
        found.min_by_key(|(_, more)| *more)
    }

    /// Backs `bytes` bytes from a place on with memory.
    fn back(&mut self, card: sys::CUdevice, place: usize, bytes: usize) -> Result<()> {
        let (properties, at) = (properties(card), self.base + place as u64);
        let access = sys::CUmemAccessDesc {
            location: properties.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut memory = 0;
        // SAFETY: these are addresses of this region that nothing backs. The mapping keeps the memory, so its handle may be released. If a
        // later call fails, the earlier calls are undone.
        unsafe {
            sys::cuMemCreate(&raw mut memory, bytes, &raw const properties, 0).result()?;
            let mapped = sys::cuMemMap(at, bytes, 0, memory, 0).result();
            sys::cuMemRelease(memory).result()?;
            mapped?;
            if let Err(error) = sys::cuMemSetAccess(at, bytes, &raw const access, 1).result() {
                sys::cuMemUnmap(at, bytes).result()?;
                return Err(error);
            }
        }
        self.committed.insert(place, bytes);
        self.free.insert(place, bytes);
        Ok(())
    }

    /// Gives every piece of memory in which no tensor lies back to the driver. No launched work may still use it.
    fn trim(&mut self) -> Result<()> {
        let pieces: Vec<(usize, usize)> = self.committed.iter().map(|(&place, &bytes)| (place, bytes)).collect();
        for (place, bytes) in pieces {
            if !self.free.cut(place, bytes) {
                continue;
            }
            // SAFETY: one mapping as a whole, in which no tensor lies.
            if let Err(error) = unsafe { sys::cuMemUnmap(self.base + place as u64, bytes) }.result() {
                self.free.insert(place, bytes);
                return Err(error);
            }
            self.committed.remove(&place);
        }
        Ok(())
    }

    fn held(&self) -> usize {
        self.committed.values().sum()
    }
}

impl CardMemory {
    fn new(card: sys::CUdevice, stream: usize, total: usize) -> Result<Self> {
        let (mut unit, properties) = (0, properties(card));
        let flag = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: a place for the number, and whole properties.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const properties, flag) }.result()?;
        let unit = unit.max(ALIGNMENT);
        // Addresses cost nothing, and a large tensor needs many contiguous ones.
        let bytes = (2 * total).next_multiple_of(unit);
        let regions = [Region::new(bytes)?, Region::new(bytes)?];
        Ok(Self { card, stream, most: usize::MAX, unit, regions, tensors: HashMap::new(), count: Count::default() })
    }

    /// Allocates `bytes` bytes, and returns their address.
    fn take(&mut self, bytes: usize) -> Result<u64> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let own = usize::from(bytes >= SMALL);
        let place = match self.place_in(own, bytes) {
            Some(place) => place,
            None => {
                let grown = self.grow(own, bytes);
                // If the region cannot grow, there may be room among tensors of other sizes.
                let from = if grown.is_ok() { own } else { 1 - own };
                self.place_in(from, bytes).ok_or(grown.err().unwrap_or(OUT_OF_MEMORY))?
            }
        };
        let address = self.regions[place.region].base + place.at as u64 * driver::SPREAD;
        self.tensors.insert(address, place);
        self.count.tensors += bytes;
        self.count.tensors_peak = self.count.tensors_peak.max(self.count.tensors);
        Ok(address)
    }

    /// Takes the smallest free place of a region that has at least `bytes` bytes.
    fn place_in(&mut self, region: usize, bytes: usize) -> Option<Allocation> {
        self.regions[region].free.take(bytes).map(|at| Allocation { region, at, bytes })
    }

    /// Makes `bytes` contiguous free bytes in a region, if need be from memory that lies between tensors.
    fn grow(&mut self, number: usize, bytes: usize) -> Result<()> {
        let grown = self.grow_at_once(number, bytes);
        if grown != Err(OUT_OF_MEMORY) {
            return grown;
        }
        // SAFETY: the stream of the caller. Afterwards no launched work uses the memory.
        unsafe { result::stream::synchronize(std::ptr::with_exposed_provenance_mut(self.stream)) }?;
        self.trim()?;
        self.grow_at_once(number, bytes)
    }

    fn grow_at_once(&mut self, number: usize, bytes: usize) -> Result<()> {
        let (mut place, mut more) = self.more_for(number, bytes).ok_or(OUT_OF_MEMORY)?;
        while more > 0 {
            let piece = (self.count.held / HELD_OVER_PIECE).next_multiple_of(self.unit).max(self.unit).min(more);
            self.regions[number].back(self.card, place, piece)?;
            (place, more) = (place + piece, more - piece);
            self.count.held += piece;
            self.count.held_peak = self.count.held_peak.max(self.count.held);
        }
        Ok(())
    }

    /// Returns the place at which additional memory gives `bytes` contiguous free bytes, and that additional memory in bytes. `None` if it
    /// is not within the limit.
    fn more_for(&self, number: usize, bytes: usize) -> Option<(usize, usize)> {
        let (place, more) = self.regions[number].place_for(bytes, self.unit)?;
        self.count.held.checked_add(more).is_some_and(|held| held <= self.most).then_some((place, more))
    }

    /// Gives a tensor's place back.
    fn give_back(&mut self, address: u64) {
        if let Some(Allocation { region, at, bytes }) = self.tensors.remove(&address) {
            self.regions[region].free.insert(at, bytes);
            self.count.tensors -= bytes;
        }
    }

    fn trim(&mut self) -> Result<()> {
        let trimmed = self.regions.iter_mut().try_for_each(Region::trim);
        self.count.held = self.regions.iter().map(Region::held).sum();
        trimmed
    }
}

/// Whether launches of a stream are being recorded. Memory that is allocated then belongs to the graph, and a stream must not free any
/// other memory meanwhile.
fn is_recorded(stream: *mut c_void) -> bool {
    let idle = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a stream of the caller.
    unsafe { result::stream::is_capturing(stream.cast()) }.is_ok_and(|status| status != idle)
}

/// Replaces the driver's `cuMemAllocAsync`.
///
/// # Safety
/// As for the driver's function: a place for the address, and a stream.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(to: *mut u64, bytes: usize, stream: *mut c_void) -> c_int {
    let mut memories = all();
    let own = memories.iter_mut().find(|memory| memory.stream == stream.addr()).filter(|_| !is_recorded(stream));
    let Some(memory) = own else {
        drop(memories);
        let of_driver = driver::allocate();
        // SAFETY: by the caller's promise.
        return of_driver.map_or(NOT_SUPPORTED, |allocate| unsafe { allocate(to, bytes, stream) });
    };
    let at = match memory.take(bytes) {
        Ok(at) => at,
        Err(DriverError(error)) => return error as c_int,
    };
    // SAFETY: `take` has just allocated it.
    let refused = unsafe { driver::begin_life(at, bytes, stream) };
    if refused != 0 {
        memory.give_back(at);
        return refused;
    }
    // SAFETY: the caller's place.
    unsafe { to.write(at) };
    0
}

/// Replaces the driver's `cuMemFreeAsync`.
///
/// # Safety
/// As for the driver's function: an address that was allocated, and a stream.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeAsync(at: u64, stream: *mut c_void) -> c_int {
    let is_recorded = is_recorded(stream);
    let mut memories = all();
    let own = memories.iter_mut().find(|memory| memory.tensors.contains_key(&at));
    let is_own = own.is_some();
    if let Some(memory) = own {
        // SAFETY: it was allocated, and is freed once.
        unsafe { driver::end_life(at, stream) };
        memory.give_back(at);
    }
    drop(memories);
    if is_own && !is_recorded {
        return 0;
    }
    // SAFETY: by the caller's promise. The driver refuses a recording that frees memory of another owner.
    driver::free().map_or(NOT_SUPPORTED, |free| unsafe { free(at, stream) })
}

/// Allocates the memory of a device from here on, in the order of its stream. Returns `false` if the driver keeps allocating, because it
/// cannot back addresses with memory.
///
/// # Errors
/// The driver's.
pub(crate) fn begin(device: &CudaDevice) -> candle_core::Result<bool> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    if context.attribute(attribute).w()? == 0 {
        return Ok(false);
    }
    let (card, handle) = (context.cu_device(), stream.cu_stream().expose_provenance());
    {
        let mut memories = all();
        // A stream that is gone may have had the same handle. Its memory is used again.
        memories.retain(|memory| memory.stream != handle || memory.card == card);
        match memories.iter_mut().find(|memory| memory.stream == handle) {
            Some(memory) => memory.most = usize::MAX,
            None => memories.push(CardMemory::new(card, handle, context.total_mem().w()?).w()?),
        }
    }
    // SAFETY: nothing reads the element.
    let tried = unsafe { device.alloc::<u8>(1) }?;
    let is_own = count(device).is_some_and(|count| count.tensors > 0);
    drop(tried);
    if !is_own {
        all().retain(|memory| memory.stream != handle);
    }
    Ok(is_own)
}

fn with_memory<R>(device: &CudaDevice, f: impl FnOnce(&mut CardMemory) -> R) -> Option<R> {
    let handle = device.cuda_stream().cu_stream().addr();
    all().iter_mut().find(|memory| memory.stream == handle).map(f)
}

/// Returns how a device's memory is used. `None` if the driver allocates.
pub(crate) fn count(device: &CudaDevice) -> Option<Count> {
    with_memory(device, |memory| memory.count)
}

/// Returns the most memory that is held besides tensors and the places between them: the last unit of each region. `None` if the driver
/// allocates.
pub(crate) fn unit(device: &CudaDevice) -> Option<usize> {
    with_memory(device, |memory| memory.unit * memory.regions.len())
}

/// Sets the limit of the memory that is held, in bytes. `None` if the driver allocates.
pub(crate) fn limit(device: &CudaDevice, most: usize) -> Option<()> {
    with_memory(device, |memory| memory.most = most)
}

/// Gives memory between tensors back to the driver. All launched work must be done. `None` if the driver allocates.
pub(crate) fn trim(device: &CudaDevice) -> Option<Result<()>> {
    with_memory(device, CardMemory::trim)
}

/// Resets the peaks to the current values.
pub(crate) fn reset_peaks(device: &CudaDevice) {
    with_memory(device, |memory| {
        memory.count.held_peak = memory.count.held;
        memory.count.tensors_peak = memory.count.tensors;
    });
}

/// Gives back the memory of allocators that have no tensors, once all launched work is done.
pub(crate) fn release_unused() {
    let is_done =
        result::ctx::get_current().is_ok_and(|context| context.is_some()) && result::ctx::synchronize().is_ok();
    if is_done {
        for memory in all().iter_mut().filter(|memory| memory.tensors.is_empty()) {
            // Memory that could not be given back stays.
            let _ = memory.trim();
        }
    }
}
