//! The libraries of a card, which are opened when a card is first wanted: NVIDIA's driver, cuBLAS and NCCL.
//!
//! cudarc, in the way that candle builds it, links these libraries, and a program that links them does not start on a machine without a
//! driver. So this crate defines the functions that are called, each as a jump to an address, and [`open`] finds the addresses. Until then,
//! and where a library lacks a function, a call returns an error. A function that is missing in the list below is an error of the linker.
//!
//! The emulated card is a library, too, and is opened in the same way.

// A jump has no other form, and libraries are C's.
#![allow(unsafe_code)]

use std::ffi::{OsStr, c_int, c_void};
use std::fmt;
use std::mem::transmute;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};

/// The address behind a function that has none: `CUDA_ERROR_NOT_INITIALIZED`, and an error of cuBLAS and NCCL as well.
extern "C" fn not_opened() -> c_int {
    3
}

/// Where a function is, once its library is open.
type Address = AtomicPtr<c_void>;

macro_rules! functions {
    ($($library:ident { $($function:ident)* })*) => {
        /// The functions of each library, and their addresses.
        #[allow(non_upper_case_globals)]
        mod addresses {
            use super::*;
            $($(pub static $function: Address = Address::new(not_opened as *mut c_void);)*)*
        }

        /// The functions under the names that cudarc calls.
        #[allow(non_snake_case)]
        mod jumps {
            use std::arch::naked_asm;
            $($(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                extern "C" fn $function() {
                    // Arguments stay where the caller put them: in registers that a jump leaves alone, and on the stack.
                    #[cfg(target_arch = "x86_64")]
                    naked_asm!("jmp qword ptr [rip + {}]", sym super::addresses::$function);
                    #[cfg(target_arch = "aarch64")]
                    naked_asm!(
                        "adrp x16, {0}",
                        "ldr x16, [x16, :lo12:{0}]",
                        "br x16",
                        sym super::addresses::$function,
                    );
                }
            )*)*
        }

        fn functions(library: Library) -> Vec<(&'static str, &'static Address)> {
            match library {
                $(Library::$library => vec![$((stringify!($function), &addresses::$function)),*],)*
            }
        }
    };
}

/// A library that is opened when it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// NVIDIA's driver.
    Driver,
    /// Products of matrices, from CUDA's toolkit or one of NVIDIA's Python wheels.
    Blas,
    /// Communication between cards.
    Nccl,
}

functions! {
    Driver {
        cuCtxDestroy_v2 cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuCtxSynchronize
        cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceGetName cuDeviceGetUuid_v2
        cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2
        cuDriverGetVersion
        cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventElapsedTime_v2 cuEventQuery cuEventRecord cuEventSynchronize
        cuFuncSetAttribute
        cuGetErrorName cuGetErrorString
        cuGraphDestroy cuGraphExecDestroy cuGraphGetNodes cuGraphInstantiateWithFlags cuGraphLaunch cuGraphMemcpyNodeGetParams
        cuGraphNodeGetType cuGraphUpload
        cuInit
        cuLaunchKernel
        cuMemAddressReserve cuMemAlloc_v2 cuMemCreate cuMemFreeHost cuMemFree_v2 cuMemGetAllocationGranularity cuMemGetInfo_v2
        cuMemHostAlloc cuMemHostRegister_v2 cuMemHostUnregister cuMemMap cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolTrimTo
        cuMemRelease cuMemSetAccess cuMemUnmap
        cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async
        cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleUnload
        cuStreamBeginCapture_v2 cuStreamCreate cuStreamDestroy_v2 cuStreamEndCapture cuStreamIsCapturing cuStreamSynchronize
        cuStreamWaitEvent
    }
    Blas {
        cublasCreate_v2 cublasDestroy_v2 cublasDgemmStridedBatched cublasGemmEx cublasGemmStridedBatchedEx cublasSetMathMode
        cublasSetStream_v2 cublasSetWorkspace_v2
    }
    Nccl {
        ncclAllReduce ncclBroadcast ncclCommAbort ncclCommInitRank ncclGetUniqueId ncclGroupEnd ncclGroupStart ncclRecv ncclReduce ncclSend
    }
}

/// cuRAND's functions. candle makes a generator for each card, and this program asks none for a number: dropout and first values have their
/// own. So the library is not wanted.
#[allow(non_snake_case)]
mod no_curand {
    use std::ffi::{c_int, c_void};
    use std::ptr::dangling_mut;

    /// `CURAND_STATUS_NOT_INITIALIZED`.
    const NO_GENERATOR: c_int = 101;

    #[unsafe(no_mangle)]
    extern "C" fn curandCreateGenerator(generator: *mut *mut c_void, _kind: c_int) -> c_int {
        // SAFETY: the caller's place for the generator.
        unsafe { *generator = dangling_mut::<u8>().cast() };
        0
    }

    macro_rules! always {
        ($answer:expr; $($function:ident)*) => {
            $(
                #[unsafe(no_mangle)]
                extern "C" fn $function() -> c_int {
                    $answer
                }
            )*
        };
    }
    always! {
        0; curandDestroyGenerator curandSetPseudoRandomGeneratorSeed curandSetStream
    }
    always! {
        NO_GENERATOR; curandGenerateNormal curandGenerateNormalDouble curandGenerateUniform curandGenerateUniformDouble
    }
}

/// A library that could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which one.
    pub which: Library,
    /// What the system's linker said of the last file that was tried.
    pub said: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.which {
            Library::Driver => write!(f, "this machine has no NVIDIA driver ({})", self.said),
            Library::Blas => write!(
                f,
                "cuBLAS was not found ({}): `pip install nvidia-cublas-cu12` in the program's environment adds it, and so does CUDA's toolkit",
                self.said
            ),
            Library::Nccl => write!(
                f,
                "NCCL was not found ({}): `pip install nvidia-nccl-cu12` in the program's environment adds it, and so does libnccl2 from NVIDIA",
                self.said
            ),
        }
    }
}

impl std::error::Error for Missing {}

/// A library that is open until the process ends.
struct Opened {
    loaded: Loaded,
    file: PathBuf,
}

static OPENED: [OnceLock<Result<Opened, Missing>>; 3] = [const { OnceLock::new() }; 3];

/// Opens a library if it is not open, and gives its functions their addresses. Returns the file.
///
/// # Errors
/// No such library on this machine, or one that the system's linker cannot open.
pub fn open(library: Library) -> Result<&'static Path, &'static Missing> {
    opened(library).map(|opened| opened.file.as_path())
}

fn opened(library: Library) -> Result<&'static Opened, &'static Missing> {
    OPENED[library as usize]
        .get_or_init(|| {
            let mut said = String::new();
            let found = candidates(library)
                .into_iter()
                .find_map(|file| load(&file).map(|loaded| Opened { loaded, file }).map_err(|error| said = error).ok());
            let opened = found.ok_or(Missing { which: library, said })?;
            for (name, address) in functions(library) {
                let found = symbol(&opened.loaded, name);
                if !found.is_null() {
                    address.store(found, Ordering::Relaxed);
                }
            }
            Ok(opened)
        })
        .as_ref()
}

/// The version of CUDA whose compiler made the kernels, and that of the driver, if the driver is older and so refuses them. Each is as
/// `cuDriverGetVersion` says it: 12080 for 12.8.
pub fn older_driver() -> Option<(c_int, c_int)> {
    let of_kernels = env!("CUDA_OF_PTX").parse().unwrap_or(0);
    let of_driver = version_of_driver();
    (of_driver < of_kernels).then_some((of_kernels, of_driver))
}

/// The version of CUDA that the open driver knows; 0 without a driver.
fn version_of_driver() -> c_int {
    let found = of_driver("cuDriverGetVersion");
    // SAFETY: null, or the driver's function of that name, which has this signature (cuda.h).
    let function = unsafe { transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut c_int) -> c_int>>(found) };
    let mut version = 0;
    // SAFETY: a place for the number.
    function.map_or(0, |function| unsafe { if function(&raw mut version) == 0 { version } else { 0 } })
}

/// Returns a function of the driver, or null if there is none.
pub(crate) fn of_driver(name: &str) -> *mut c_void {
    opened(Library::Driver).map_or(null_mut(), |driver| symbol(&driver.loaded, name))
}

/// The files to try, in order. A name without a directory is looked for where the system's linker finds libraries.
fn candidates(library: Library) -> Vec<PathBuf> {
    if let Some(card) = option_env!("EMULATED_CARD") {
        return vec![PathBuf::from(card)];
    }
    let (names, wheels): (&[&str], &[&str]) = match library {
        // It belongs to the system's driver, and lies nowhere else.
        Library::Driver => return vec![PathBuf::from("libcuda.so.1")],
        // The functions above are the same in both versions. A driver loads libraries of its own version and older ones.
        Library::Blas if version_of_driver() < 13_000 => (&["libcublas.so.12"], &["cublas"]),
        Library::Blas => (&["libcublas.so.13", "libcublas.so.12"], &["cu13", "cublas"]),
        Library::Nccl => (&["libnccl.so.2"], &["nccl"]),
    };
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]).map(|toolkit| toolkit.join("lib64"));
    let directories: Vec<PathBuf> = toolkits.chain(environment(wheels)).collect();
    let mut files = Vec::new();
    for name in names {
        files.push(PathBuf::from(name));
        files.extend(directories.iter().map(|directory| directory.join(name)).filter(|file| file.exists()));
    }
    files
}

/// The directories of libraries in the Python environment whose `bin` has this program: the environment's own, and those of NVIDIA's wheels
/// of these names.
fn environment(wheels: &[&str]) -> Vec<PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    let Some(root) = program.parent().and_then(Path::parent) else { return Vec::new() };
    let mut found = vec![root.join("lib")];
    for lib in ["lib", "lib64"].map(|lib| root.join(lib)) {
        let versions = std::fs::read_dir(&lib).into_iter().flatten().flatten().map(|entry| entry.path());
        for version in
            versions.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
        {
            for packages in ["site-packages", "dist-packages"].map(|packages| version.join(packages).join("nvidia")) {
                found.extend(wheels.iter().map(|wheel| packages.join(wheel).join("lib")));
            }
        }
    }
    found
}

/// Opens a file; the error is the system's. cuBLAS calls cuBLASLt, which lies beside it, so that is opened first.
fn load(file: &Path) -> Result<Loaded, String> {
    if let Some(version) = file.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix("libcublas.so")) {
        // It stays open. If it is not there, the error of cuBLAS says so.
        let _ = load(&file.with_file_name(format!("libcublasLt.so{version}"))).map(std::mem::forget);
    }
    // SAFETY: constructors of these libraries need nothing of the program.
    let opened = unsafe { Loaded::open(Some(file), RTLD_NOW | RTLD_GLOBAL) };
    // The error itself only says that it failed, and its source says why.
    opened.map_err(|error| std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))
}

/// Returns the address of a function, or null.
fn symbol(library: &Loaded, name: &str) -> *mut c_void {
    // SAFETY: an address of any kind, which is only kept.
    unsafe { library.get::<*mut c_void>(name) }.map_or(null_mut(), |found| found.as_raw_ptr())
}
