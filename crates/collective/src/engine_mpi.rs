//! Processes of MPI, on one host or many.
//!
//! Messages do not block: between two tests of a message, its thread leaves the processor to threads that compute. When a process is
//! lost, MPI itself ends the others; an [`Error`] is for failures that MPI reports.

use std::fmt;
use std::mem::ManuallyDrop;

use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::request::{Request, Scope, scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives as _, Root as _};
use mpi::{Count, Threading};

use crate::engine::{Engine, Error, Result};
use crate::group::{Group, WaitSignal};

/// Joins the processes that a launcher started.
///
/// # Errors
/// [`Error::Lost`] if MPI was started before.
pub fn join() -> Result<Group> {
    Group::start(move |awaited| {
        // Only this thread calls MPI.
        let (universe, _) = mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| Error::Lost("MPI was started twice".into()))?;
        let world = universe.world();
        Ok(World { world, awaited, universe: Some(ManuallyDrop::new(universe)) })
    })
}

/// The name of this host.
pub fn host() -> String {
    mpi::environment::processor_name().unwrap_or_default()
}

/// MPI, from its start to its end. At the end every process of the group waits for the others.
struct World {
    world: SimpleCommunicator,
    awaited: WaitSignal,
    /// Not dropped where the other processes may not end, too.
    universe: Option<ManuallyDrop<Universe>>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {} of MPI", self.world.rank(), self.world.size())
    }
}

impl World {
    /// Tests a message until it is complete.
    fn finish<'a, D: ?Sized, S: Scope<'a>>(&self, mut request: Request<'a, D, S>) {
        let mut looks = 0_u32;
        while let Err(again) = request.test() {
            request = again;
            self.awaited.pause(looks);
            looks = looks.saturating_add(1);
        }
    }
}

/// Counts and offsets in MPI's integers: pieces are far below 2 GiB.
fn counts_and_places(bytes: &[usize]) -> Result<(Vec<Count>, Vec<Count>)> {
    let mut place = 0;
    let mut places = Vec::with_capacity(bytes.len());
    let count = |bytes: usize| {
        Count::try_from(bytes).map_err(|_| Error::Lost(format!("a message of {bytes} bytes is too long for MPI")))
    };
    for &bytes in bytes {
        places.push(count(place)?);
        place += bytes;
    }
    Ok((bytes.iter().map(|&bytes| count(bytes)).collect::<Result<_>>()?, places))
}

impl Engine for World {
    fn rank(&self) -> usize {
        self.world.rank().cast_unsigned() as usize
    }

    fn size(&self) -> usize {
        self.world.size().cast_unsigned() as usize
    }

    fn exchange(&self, send: &[u8], send_bytes: &[usize], received: &mut [u8], received_bytes: &[usize]) -> Result<()> {
        let (send_counts, send_places) = counts_and_places(send_bytes)?;
        let (counts, places) = counts_and_places(received_bytes)?;
        // An empty vector's address is 1, which Open MPI treats as `MPI_IN_PLACE`.
        let mut nothing = [0];
        let send = if send.is_empty() { &[0][..] } else { send };
        let received = if received.is_empty() { &mut nothing[..] } else { received };
        let send = Partition::new(send, send_counts, send_places);
        let mut received = PartitionMut::new(received, counts, places);
        scope(|scope| self.finish(self.world.immediate_all_to_all_varcount_into(scope, &send, &mut received)));
        Ok(())
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        let root = i32::try_from(root).map_err(|_| Error::Lost(format!("there is no process {root}")))?;
        scope(|scope| self.finish(self.world.process_at_rank(root).immediate_broadcast_into(scope, bytes)));
        Ok(())
    }

    fn end(&mut self) {
        drop(self.universe.take().map(ManuallyDrop::into_inner));
    }

    fn abort(&self, code: i32) -> ! {
        self.world.abort(code)
    }
}
