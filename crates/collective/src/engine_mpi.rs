//! Processes of MPI, on one host or many.
//!
//! MPI's own answer to a lost process is to end the others; an [`Error`](crate::Error) is for what it does report.

use std::fmt;

use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives as _, Root as _};
use mpi::{Count, Threading};

use crate::group::{Engine, Error, Group, Result};

/// MPI, from its start to its end. When it is dropped every process of the group waits for the others.
pub struct Mpi {
    universe: Universe,
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mpi")
    }
}

impl Mpi {
    /// Joins the processes that a launcher started. Only the thread that calls this may use the group.
    ///
    /// # Errors
    /// [`Error::Lost`] where MPI was started before.
    pub fn join() -> Result<Self> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| Error::Lost("MPI was started twice".into()))?;
        Ok(Self { universe })
    }

    /// The group of all these processes.
    pub fn group(&self) -> Group {
        Group::new(World(self.universe.world()))
    }

    /// The name of this host.
    pub fn host() -> String {
        mpi::environment::processor_name().unwrap_or_default()
    }
}

struct World(SimpleCommunicator);

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {} of MPI", self.0.rank(), self.0.size())
    }
}

/// Counts and places as MPI takes them: pieces are far below 2 GiB.
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
        self.0.rank().cast_unsigned() as usize
    }

    fn size(&self) -> usize {
        self.0.size().cast_unsigned() as usize
    }

    fn exchange(&self, send: &[u8], send_bytes: &[usize], received: &mut [u8], received_bytes: &[usize]) -> Result<()> {
        let (send_counts, send_places) = counts_and_places(send_bytes)?;
        let (counts, places) = counts_and_places(received_bytes)?;
        // An empty vector's address is 1, which Open MPI takes for `MPI_IN_PLACE`.
        let mut nothing = [0];
        let send = if send.is_empty() { &[0][..] } else { send };
        let received = if received.is_empty() { &mut nothing[..] } else { received };
        let send = Partition::new(send, send_counts, send_places);
        self.0.all_to_all_varcount_into(&send, &mut PartitionMut::new(received, counts, places));
        Ok(())
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        let root = i32::try_from(root).map_err(|_| Error::Lost(format!("there is no process {root}")))?;
        self.0.process_at_rank(root).broadcast_into(bytes);
        Ok(())
    }

    fn abort(&self, code: i32) -> ! {
        self.0.abort(code)
    }
}
