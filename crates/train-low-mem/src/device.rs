//! The device that computes: opened by its name, and where its tensors lie.

use candle_core::Device;
use memory_policy::Place;

use crate::failure::{Failure, Outcome};

/// Opens the device of this name. `auto` is the fastest one: on a card every operation is a composition of candle's so far, which the
/// kernels of the CPU outrun, so that a card computes where it is named and nowhere else.
pub fn open(name: &str) -> Outcome<Device> {
    let failed = |error: candle_core::Error| {
        let feature = name.split(':').next().unwrap_or(name);
        let is_built = if feature == "metal" { cfg!(feature = "metal") } else { cfg!(feature = "cuda") };
        let problem = if is_built { error.to_string() } else { format!("this build has no `{feature}`") };
        let failure = Failure::usage(format!("`run.device`: cannot use `{name}`: {problem}"));
        let failure = failure.hint("`--device cpu` works everywhere");
        match is_built {
            true => failure,
            false => failure.hint(format!("to use it, build with `cargo build --release --features {feature}`")),
        }
    };
    match name {
        "cpu" | "auto" => Ok(Device::Cpu),
        "metal" => Device::new_metal(0).map_err(failed),
        // A stream of our own: candle's default is one for each thread.
        cuda => Device::new_cuda_with_stream(index(cuda)).map_err(failed),
    }
}

/// The index of the card that a name such as `cuda:1` means.
pub fn index(name: &str) -> usize {
    name.strip_prefix("cuda:").and_then(|index| index.parse().ok()).unwrap_or(0)
}

/// Whether a device of this name is another than the CPU.
pub fn is_named(name: &str) -> bool {
    !matches!(name, "cpu" | "auto")
}

/// Where the tensors of a device lie.
pub fn place(device: &Device) -> Place {
    if device.is_cpu() { Place::Host } else { Place::Device }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_computes_unless_another_device_is_named() {
        for name in ["auto", "cpu"] {
            assert!(open(name).is_ok_and(|device| device.is_cpu() && place(&device) == Place::Host), "{name}");
            assert!(!is_named(name));
        }
        assert!(is_named("cuda") && is_named("cuda:1") && is_named("metal"));
        assert_eq!((index("cuda"), index("cuda:3")), (0, 3));
    }

    #[cfg(not(any(feature = "cuda", feature = "metal")))]
    #[test]
    fn a_device_that_the_build_lacks_is_refused_with_the_feature_that_it_takes() {
        for (name, feature) in [("cuda", "cuda"), ("cuda:1", "cuda"), ("metal", "metal")] {
            let failure = open(name).unwrap_err().to_string();
            assert!(failure.contains(&format!("this build has no `{feature}`")), "{failure}");
            assert!(failure.contains(&format!("--features {feature}`")), "{failure}");
        }
    }
}
