//! The rate of the network between processes, measured by short sums: what they send, over the time that a process takes for them.

use std::time::Instant;

use crate::engine::{PIECE_BYTES, Result};
use crate::group::Group;
use crate::shards::Shards;
use crate::sums::{self, Element, To};
use crate::wire::Wire;

/// Bytes of the sum that says whether longer ones would take long.
const FEW_BYTES: usize = 64 << 10;
/// The seconds that a longer sum takes, at most and about.
const MOST_SECONDS: f64 = 0.2;
/// How often something is timed: what else goes on only ever takes away.
const TIMES: usize = 3;

/// Bits a second that a process sends to the others, as the slowest of them sees it: the same number in all of them.
///
/// # Errors
/// Those of the engine.
pub fn bits_per_second(group: &Group) -> Result<f64> {
    group.hand_over(measure).wait()?
}

fn measure(wire: &Wire) -> Result<f64> {
    // Connections are made by the first.
    time_of_sum(wire, wire.size())?;
    let few = time_of_sum(wire, FEW_BYTES)?;
    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    let enough = (MOST_SECONDS / few * FEW_BYTES as f64) as usize;
    let bytes = enough.clamp(FEW_BYTES, PIECE_BYTES);
    // Each process sends the others their shares, and then the sums of its own.
    let sent = 2 * bytes / wire.size() * (wire.size() - 1);
    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    Ok(8.0 * sent as f64 / time_of_sum(wire, bytes)?)
}

/// The seconds that a sum of `bytes` bytes, or a few more, takes.
fn time_of_sum(wire: &Wire, bytes: usize) -> Result<f64> {
    let shards = Shards { count: wire.size(), processes: wire.size() };
    let mut gradient = vec![0; bytes.next_multiple_of(Element::F32.bytes())];
    shortest(
        |mine| wire.gather_numbers(mine),
        || sums::sum(wire, shards, Element::F32, (gradient.as_mut_slice(), &[]), To::All),
    )
}

/// The seconds that something takes which all processes do together: of some times the shortest, of the process that takes longest, the
/// same number in all of them. `said`: what all say, as [`Wire::gather_numbers`] has it.
///
/// # Errors
/// Those of both.
pub fn shortest<E>(
    said: impl Fn(&[u64]) -> Result<Vec<Vec<u64>>, E>,
    mut done: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let mut shortest = f64::INFINITY;
    for _ in 0..TIMES {
        // All of them begin together.
        said(&[0])?;
        let began = Instant::now();
        done()?;
        shortest = shortest.min(began.elapsed().as_secs_f64());
    }
    let all = said(&[shortest.to_bits()])?;
    Ok(all.iter().map(|said| f64::from_bits(said[0])).fold(1e-9, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads;
    use crate::throttled::Rate;

    #[test]
    fn all_processes_measure_the_rate_of_the_slowest() {
        let rate = 1e8;
        let measured =
            threads::run_at(3, Some(Rate { bits_per_second: rate }), |group| bits_per_second(&group).unwrap());
        assert!(measured.iter().all(|other| *other == measured[0]), "{measured:?}");
        assert!(measured[0] > 0.0 && measured[0] <= rate, "no exchange is faster than its network: {measured:?}");
    }
}
