//! The rate of the network between processes, measured by short sums: the bytes that a process sends, divided by the time.

use std::time::Instant;

use crate::engine::{PIECE_BYTES, Result};
use crate::group::Group;
use crate::shards::Shards;
use crate::sums::{self, Element, To};
use crate::wire::Wire;

/// Bytes of the first sum, which tells whether longer ones would take long.
const FEW_BYTES: usize = 64 << 10;
/// About the most seconds that a longer sum takes.
const MAX_SECONDS: f64 = 0.2;
/// How often a sum is timed. Other load only makes it slower, so the shortest time counts.
const TIMES: usize = 3;

/// Bits per second that a process sends to the others. All processes return the slowest one's figure.
///
/// # Errors
/// The engine reports an error.
pub fn bits_per_second(group: &Group) -> Result<f64> {
    group.submit(measure).wait()?
}

fn measure(wire: &Wire) -> Result<f64> {
    // The first sum makes the connections.
    time_of_sum(wire, wire.size())?;
    let few = time_of_sum(wire, FEW_BYTES)?;
    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    let enough = (MAX_SECONDS / few * FEW_BYTES as f64) as usize;
    let bytes = enough.clamp(FEW_BYTES, PIECE_BYTES);
    // Each process sends the others their shares, and then its own sums.
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

/// The seconds that a call takes that all processes make together. Returns the shortest of some times, of the slowest process: the
/// same number in all processes. `said` gathers numbers like [`Wire::gather_numbers`].
///
/// # Errors
/// `said` or `done` returns an error.
pub fn shortest<E>(
    said: impl Fn(&[u64]) -> Result<Vec<Vec<u64>>, E>,
    mut done: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let mut shortest = f64::INFINITY;
    for _ in 0..TIMES {
        // All processes begin together.
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
