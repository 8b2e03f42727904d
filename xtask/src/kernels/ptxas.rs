//! The resources of a kernel, as `ptxas -v` reports them.

/// Resources of one kernel for one capability. Memory is in bytes per thread; shared memory is in bytes per block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub name: String,
    pub registers: u32,
    pub spill_stores: u32,
    pub spill_loads: u32,
    pub stack: u32,
    /// Static shared memory; the launch gives dynamic memory.
    pub shared: u32,
}

/// Parses the kernels of a report, in its order.
///
/// # Errors
///
/// A kernel has no line of registers, or there is no kernel.
pub fn kernels(report: &str) -> Result<Vec<Resources>, String> {
    let mut kernels: Vec<Resources> = Vec::new();
    // Functions that are called instead of inlined have lines of their own; the kernel's sums include them.
    let mut is_of_kernel = false;
    for line in report.lines() {
        if let Some(name) = between(line, "Compiling entry function '", "'") {
            kernels.push(Resources { name: name.to_owned(), ..Resources::default() });
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            is_of_kernel = kernels.last().is_some_and(|kernel| kernel.name == name.trim());
        } else if let Some(kernel) = kernels.last_mut() {
            if is_of_kernel && line.contains("bytes stack frame") {
                kernel.stack = before(line, " bytes stack frame").unwrap_or(0);
                kernel.spill_stores = before(line, " bytes spill stores").unwrap_or(0);
                kernel.spill_loads = before(line, " bytes spill loads").unwrap_or(0);
            }
            if let Some(registers) = before(line, " registers") {
                kernel.registers = registers;
                kernel.shared = before(line, " bytes smem").unwrap_or(0);
            }
        }
    }
    if let Some(kernel) = kernels.iter().find(|kernel| kernel.registers == 0) {
        return Err(format!("ptxas: expected the registers of {}, got none", kernel.name));
    }
    if kernels.is_empty() {
        return Err("ptxas: expected a report with kernels, got none; is it another version's?".to_owned());
    }
    Ok(kernels)
}

fn between<'a>(line: &'a str, from: &str, to: &str) -> Option<&'a str> {
    Some(line.split_once(from)?.1.split_once(to)?.0)
}

/// The number before some words.
fn before(line: &str, words: &str) -> Option<u32> {
    line.split_once(words)?.0.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
ptxas info    : 296 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'attention_backward_keys_128' for 'sm_80'
ptxas info    : Function properties for attention_backward_keys_128
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 528 bytes cmem[0]
ptxas info    : Compile time = 166.296 ms
ptxas info    : Compiling entry function 'upowf_f64' for 'sm_90'
ptxas info    : Function properties for upowf_f64
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers, used 0 barriers, 512 bytes smem
ptxas info    : Compile time = 8.717 ms
ptxas info    : Function properties for $upowf_f64$__internal_accurate_pow
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
";

    #[test]
    fn a_report_gives_the_resources_of_each_kernel() {
        let spilling = Resources {
            name: "attention_backward_keys_128".to_owned(),
            registers: 255,
            spill_stores: 20,
            spill_loads: 16,
            stack: 24,
            shared: 0,
        };
        let other = Resources { name: "upowf_f64".to_owned(), registers: 34, shared: 512, ..Resources::default() };
        assert_eq!(kernels(REPORT), Ok(vec![spilling, other]));
    }

    #[test]
    fn a_report_without_kernels_or_registers_is_an_error() {
        assert!(kernels("ptxas info    : 0 bytes gmem\n").unwrap_err().contains("got none"));
        let cut: String = REPORT.lines().take(3).map(|line| format!("{line}\n")).collect();
        assert!(kernels(&cut).unwrap_err().contains("attention_backward_keys_128"));
    }
}
