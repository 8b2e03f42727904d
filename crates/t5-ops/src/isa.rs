//! The instruction set of the kernels: the best that the machine has, or the one that `LOW_MEM_T5_ISA` names.

use std::sync::OnceLock;

/// The variable that names the instruction set to use.
const VARIABLE: &str = "LOW_MEM_T5_ISA";

/// The instruction sets that kernels are compiled for. Every machine has the first two; each of the others includes those
/// before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Isa {
    /// [`Isa::Portable`] with tile registers in software, so that the code around the tiles is tested on any machine.
    SoftwareTiles,
    Portable,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// The instruction sets of this processor family.
#[cfg(target_arch = "x86_64")]
pub(crate) const ALL: [Isa; 6] = [Isa::SoftwareTiles, Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
/// The instruction sets of this processor family.
#[cfg(target_arch = "aarch64")]
pub(crate) const ALL: [Isa; 3] = [Isa::SoftwareTiles, Isa::Portable, Isa::Neon];
/// The instruction sets of this processor family.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) const ALL: [Isa; 2] = [Isa::SoftwareTiles, Isa::Portable];

impl Isa {
    /// Its name in `LOW_MEM_T5_ISA`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Isa::SoftwareTiles => "software-tiles",
            Isa::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
        }
    }
}

/// The instruction set in use: the best that the machine has, or the one that `LOW_MEM_T5_ISA` names if the machine has that.
/// Fixed for the process.
pub(crate) fn isa() -> Isa {
    static CHOSEN: OnceLock<Isa> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let (chosen, warning) = choose(std::env::var(VARIABLE).ok().as_deref(), detect());
        if let Some(warning) = warning {
            tracing::warn!("{warning}");
        }
        chosen
    })
}

/// The name of the instruction set in use, which decides the last bits of results: `portable`, `neon`, `avx2`, `avx512`,
/// `avx512bf16`, `amx`, or `software-tiles` for tests. Fixed for the process.
pub fn instruction_set() -> &'static str {
    isa().name()
}

/// Whether this machine has the instruction set of that [name](instruction_set), with all its extensions.
pub fn has_instruction_set(name: &str) -> bool {
    ALL.into_iter().any(|isa| isa.name() == name && isa <= detect())
}

/// Whether bf16 products multiply pairs along K: on tile registers, on vectors, or in software. Fixed for the process.
pub(crate) fn multiplies_pairs() -> bool {
    match isa() {
        Isa::SoftwareTiles => true,
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::Avx512Bf16 => true,
        _ => false,
    }
}

/// Chooses an instruction set on a machine whose best is `best`. Returns a warning if it is not the wished one.
fn choose(wish: Option<&str>, best: Isa) -> (Isa, Option<String>) {
    let Some(wish) = wish else { return (best, None) };
    match ALL.into_iter().find(|isa| isa.name() == wish) {
        Some(wish) if wish <= best => (wish, None),
        Some(wish) => {
            let (wish, best_name) = (wish.name(), best.name());
            (best, Some(format!("{VARIABLE}: this processor has no {wish}; {best_name} is used")))
        }
        None => {
            let (known, best_name) = (ALL.map(Isa::name).join(", "), best.name());
            (best, Some(format!("{VARIABLE}: expected one of {known}, got `{wish}`; {best_name} is used")))
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn detect() -> Isa {
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        return Isa::Portable;
    }
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if !avx512 {
        return Isa::Avx2;
    }
    if !is_x86_feature_detected!("avx512bf16") {
        return Isa::Avx512;
    }
    if has_amx() { Isa::Amx } else { Isa::Avx512Bf16 }
}

#[cfg(target_arch = "aarch64")]
pub(crate) fn detect() -> Isa {
    Isa::Neon
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn detect() -> Isa {
    Isa::Portable
}

/// Asks the operating system's kernel for the tile registers; returns false if the machine has none.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    #[cfg(target_os = "linux")]
    {
        use std::arch::x86_64::__cpuid_count;
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        let features = __cpuid_count(7, 0).edx;
        features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE && request_permission()
    }
    #[cfg(not(target_os = "linux"))]
    {
        false
    }
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`: Linux enables the tile registers for a process, with all
/// its threads, on request only, because they enlarge every saved context.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the system call reads no memory; unknown codes are refused with an error. `syscall` clobbers
    // rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_instruction_set_is_never_better_than_the_machine() {
        let best = ALL[ALL.len() - 1];
        assert_eq!(choose(None, best), (best, None));
        for wish in ALL {
            for best in ALL {
                let (chosen, warning) = choose(Some(wish.name()), best);
                assert_eq!(chosen, wish.min(best), "{wish:?} on {best:?}");
                assert_eq!(warning.is_some(), wish > best, "{wish:?} on {best:?}: {warning:?}");
            }
        }
    }

    #[test]
    fn a_name_that_no_instruction_set_has_is_said_with_those_that_there_are() {
        let (chosen, warning) = choose(Some("sse9"), Isa::Portable);
        let warning = warning.unwrap();
        assert_eq!(chosen, Isa::Portable);
        assert!(warning.starts_with("LOW_MEM_T5_ISA: expected one of software-tiles, portable, "), "{warning}");
        assert!(warning.ends_with("got `sse9`; portable is used"), "{warning}");
    }

    /// The instruction set is fixed for a process, so each one is tested in a process of its own. Products are tested with all of them
    /// anyway.
    #[test]
    fn lesser_instruction_sets_pass_these_tests() {
        // A card has one set of kernels.
        if std::env::var_os(VARIABLE).is_some() || !crate::testing::device().is_cpu() {
            return;
        }
        for isa in ALL.into_iter().filter(|&isa| isa < detect()) {
            let tests = std::env::current_exe().unwrap();
            let run = std::process::Command::new(tests)
                .env(VARIABLE, isa.name())
                .args(["--skip", "matmul::"])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&run.stdout);
            assert!(run.status.success() && said.contains("test result: ok"), "{isa:?}: {said}");
        }
    }

    #[test]
    fn instruction_sets_come_from_the_least_to_the_most() {
        assert!(ALL.is_sorted());
        assert_eq!(ALL[1], Isa::Portable);
    }
}
