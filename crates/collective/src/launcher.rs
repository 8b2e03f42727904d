//! The environment variables with which launchers start each of several processes.
//!
//! MPI itself tells the number of processes and this process's own number. Before MPI is started, the environment tells whether there
//! are other processes to join, and how many of them share this host.

/// A launcher that started this process as one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The launcher's command.
    pub by: &'static str,
    /// The number of all processes.
    pub processes: usize,
    /// The number of processes on this host, if the launcher tells it.
    pub on_this_host: Option<usize>,
    /// The number of this process among those on this host, from 0, if the launcher tells it.
    pub number_on_host: Option<usize>,
}

/// The launcher's name, and the variables for the number of processes, the number on this host, and this process's number on the host.
const LAUNCHERS: [(&str, [&str; 3]); 4] = [
    ("mpirun", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ("torchrun", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"]),
    // The first is set in a step of `srun` alone, not in a batch script.
    ("srun", ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"]),
    ("mpiexec", ["PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"]),
];

/// The launcher of this process, if it started more than one. `variable` reads the environment.
pub fn launched(variable: impl Fn(&str) -> Option<String>) -> Option<Launched> {
    // `4` or, for several hosts, `4(x2),3`: the largest.
    let number = |text: String| {
        let parts = text.split(',').map(|part| part.split('(').next().unwrap_or(part).trim().parse::<usize>().ok());
        parts.collect::<Option<Vec<_>>>()?.into_iter().max()
    };
    let found = LAUNCHERS.iter().find_map(|&(by, variables)| {
        let [processes, on_this_host, number_on_host] = variables.map(|name| variable(name).and_then(number));
        processes.map(|processes| Launched { by, processes, on_this_host, number_on_host })
    });
    found.filter(|launched| launched.processes > 1)
}

/// Threads for each of several processes that share a host, so that together they use each processor once. If a launcher has bound
/// them to processors, `available` is this process's share already.
pub fn threads(available: usize, on_host: usize, processes: usize) -> usize {
    available.min((on_host / processes.max(1)).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_variables(variables: &[(&str, &str)]) -> Option<Launched> {
        launched(|name| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_string()))
    }

    #[test]
    fn launchers_are_known_by_what_they_set() {
        let launched = |by, processes, on_this_host, number_on_host| {
            Some(Launched { by, processes, on_this_host, number_on_host })
        };
        let open_mpi = [
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("PMI_SIZE", "9"),
        ];
        assert_eq!(from_variables(&open_mpi), launched("mpirun", 4, Some(2), Some(1)));
        assert_eq!(
            from_variables(&[("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8")]),
            launched("torchrun", 8, Some(8), None)
        );
        let slurm = [("SLURM_STEP_NUM_TASKS", "11"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2),3"), ("SLURM_LOCALID", "0")];
        assert_eq!(from_variables(&slurm), launched("srun", 11, Some(4), Some(0)));
        assert_eq!(from_variables(&[("PMI_SIZE", "3")]), launched("mpiexec", 3, None, None));
    }

    #[test]
    fn one_process_and_a_batch_script_are_not_launched() {
        assert_eq!(from_variables(&[]), None);
        assert_eq!(from_variables(&[("OMPI_COMM_WORLD_SIZE", "1")]), None);
        assert_eq!(from_variables(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), None);
        assert_eq!(from_variables(&[("WORLD_SIZE", "many")]), None);
    }

    #[test]
    fn processes_of_a_host_share_its_processors() {
        assert_eq!(threads(16, 16, 4), 4);
        assert_eq!(threads(1, 2, 2), 1, "bound to one processor each");
        assert_eq!(threads(2, 2, 4), 1);
    }
}
