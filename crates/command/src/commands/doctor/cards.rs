//! Cards: NVIDIA's cards by their driver, and cards without a driver.

use std::path::PathBuf;

use memory_policy::{Card, Cards};

use super::finding::Finding;
use super::program::read;

/// NVIDIA's number on the bus.
const NVIDIA: &str = "0x10de";

/// The facts about cards.
#[derive(Clone, Debug)]
struct Facts {
    /// The driver's answer.
    cards: Result<Cards, String>,
    /// NVIDIA's display controllers on the bus.
    on_the_bus: usize,
    is_built_for_cuda: bool,
    /// The file of cuBLAS if this program can open a card, or why it cannot.
    opened: Result<PathBuf, String>,
    /// Whether this program loads libraries, such as the driver's. A static program does not.
    loads_libraries: bool,
}

/// Findings about cards.
pub fn findings() -> Vec<Finding> {
    diagnose(&Facts {
        cards: memory_policy::cards(),
        on_the_bus: on_the_bus(),
        is_built_for_cuda: cfg!(feature = "cuda"),
        opened: cuda_device::open_card(0)
            .and_then(|_| cuda_device::cublas())
            .map_err(|error| t5::without_backtrace(error).to_string()),
        loads_libraries: cfg!(not(target_env = "musl")),
    })
}

fn on_the_bus() -> usize {
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().filter_map(Result::ok);
    let is_card = |path: PathBuf| {
        let of = |name: &str| read(&path.join(name).display().to_string()).unwrap_or_default();
        // Display controllers are class 03.
        of("vendor").trim() == NVIDIA && of("class").starts_with("0x03")
    };
    devices.filter(|device| is_card(device.path())).count()
}

fn diagnose(facts: &Facts) -> Vec<Finding> {
    let Facts { cards, on_the_bus, is_built_for_cuda, opened, loads_libraries } = facts;
    let Ok(Cards { driver, cuda, cards }) = cards else {
        return vec![match on_the_bus {
            0 => Finding::note("cards", "no NVIDIA GPU, and none is needed"),
            count if !loads_libraries => {
                Finding::warning("cards", format!("{count} of NVIDIA; this build is static, and GPUs are not used"))
                    .remedy("cargo build --release --features cuda")
            }
            count => Finding::warning("cards", format!("{count} of NVIDIA without a driver"))
                .remedy("install the driver: `apt-get install nvidia-driver`, or https://www.nvidia.com/drivers"),
        }];
    };
    if cards.is_empty() {
        return vec![
            Finding::note("cards", format!("driver {driver}, and no GPU that this process may see"))
                .remedy("in a container: `docker run --gpus all ..`; else `unset CUDA_VISIBLE_DEVICES`"),
        ];
    }
    let shown = |card: &Card| format!("{}: {} of {} free", card.name, card.free, card.total);
    let mut findings: Vec<Finding> = cards
        .iter()
        .map(|card| {
            Finding::ok("card", shown(card))
                .fact("name", card.name.as_str())
                .fact("total_bytes", card.total.0)
                .fact("free_bytes", card.free.0)
                .fact("capability", card.capability.clone())
        })
        .collect();
    let found = format!("{driver}, CUDA {cuda}");
    let driver_found = match (is_built_for_cuda, opened) {
        (false, _) => Finding::warning("card driver", format!("{found}; this build has no `cuda`: GPUs are not used"))
            .remedy("cargo build --release --features cuda"),
        (true, Err(why)) => {
            Finding::warning("card driver", format!("{found}; no GPU can be opened, the processor computes: {why}"))
                .remedy("check `nvidia-smi`, and that the driver is as new as the toolkit of the build")
        }
        (true, Ok(cublas)) => Finding::ok("card driver", format!("{found}; cuBLAS: {}", cublas.display()))
            .fact("cublas", cublas.display().to_string()),
    };
    findings.push(driver_found.fact("driver", driver.as_str()).fact("cuda", cuda.as_str()));
    findings
}

#[cfg(test)]
mod tests {
    use memory_policy::Bytes;

    use super::super::finding::Severity;
    use super::*;

    fn one() -> Cards {
        let (total, free) = (Bytes(80 << 30), Bytes(79 << 30));
        let card = Card { name: "H100".into(), id: String::new(), total, free, capability: Some("9.0".into()) };
        Cards { driver: "570.1".into(), cuda: "12.8".into(), cards: vec![card] }
    }

    #[track_caller]
    fn check(facts: &Facts, severity: Severity, words: &str) {
        let findings = diagnose(facts);
        let text: String = findings.iter().map(Finding::to_string).collect();
        let worst = findings.iter().map(|finding| finding.severity).max();
        assert!(worst == Some(severity) && text.contains(words), "{text}");
    }

    #[test]
    fn a_card_that_is_not_used_is_a_warning_with_what_it_lacks() {
        let opened = Ok(PathBuf::from("libcublas.so.12"));
        let good = Facts { cards: Ok(one()), on_the_bus: 1, is_built_for_cuda: true, opened, loads_libraries: true };
        check(&good, Severity::Ok, "79 GiB of 80 GiB free");
        check(&Facts { is_built_for_cuda: false, ..good.clone() }, Severity::Warning, "--features cuda");
        check(&good, Severity::Ok, "cuBLAS: libcublas.so.12");
        let no_products = Facts { opened: Err("cuBLAS was not found".into()), ..good.clone() };
        check(&no_products, Severity::Warning, "no GPU can be opened, the processor computes: cuBLAS was not found");
        let none = Facts { cards: Err("no library".into()), on_the_bus: 0, ..good.clone() };
        check(&none, Severity::Note, "none is needed");
        check(&Facts { on_the_bus: 2, ..none.clone() }, Severity::Warning, "install the driver");
        check(&Facts { on_the_bus: 2, loads_libraries: false, ..none }, Severity::Warning, "this build is static");
        let hidden = Cards { cards: Vec::new(), ..one() };
        check(&Facts { cards: Ok(hidden), ..good }, Severity::Note, "--gpus all");
    }
}
