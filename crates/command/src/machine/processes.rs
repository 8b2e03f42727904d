//! This process among several that train together: joining them, agreeing with them, and leaving them.
//!
//! Every process runs the whole command. The first one prints and writes. The others do the same work silently, and wait for the first when
//! it makes files that all of them read. A failure of one process ends all of them.

use std::collections::HashSet;

use candle_core::Device;
use collective::Group;
use collective::launcher::{self, Launched};
use dataloader::BatchShare;
use memory_policy::{Budgets, Bytes, Group as ControlGroup, MemorySnapshot, plural};
use planner::{Costs, Network, Plan};
use serde::Serialize;
use serde::de::DeserializeOwned;
use trainer::Parallel;

use crate::config::Config;
use crate::failure::{Exit, Failure, Outcome};
use crate::screen::{output, report};

/// The processes of this run; a single one if no launcher started several.
#[derive(Debug, Default)]
pub struct Processes {
    group: Option<Group>,
}

/// The launcher of this process, if it started several.
pub fn launched() -> Option<Launched> {
    launcher::launched(|name| std::env::var(name).ok())
}

/// The threads that compute: those of `--threads` or OMP_NUM_THREADS, else this process' share of the threads of its host, if several
/// processes run there. RAYON_NUM_THREADS takes precedence in [`t5_ops::join_threads`].
///
/// # Errors
/// `--threads` beside another number in RAYON_NUM_THREADS.
pub fn threads(flag: Option<usize>) -> Outcome<Option<usize>> {
    if let Some(threads) = asked_threads(flag, &|name| std::env::var(name).ok())? {
        return Ok(Some(threads));
    }
    let Some(here) = launched().and_then(|launched| launched.on_this_host) else { return Ok(None) };
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Some(launcher::threads(available, online_processors().unwrap_or(available), here)))
}

/// The variables of the environment with a number of threads. The first one that is set counts.
const OF_THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// The variable that set this number of threads, if one did.
pub fn variable_of_threads(threads: usize) -> Option<&'static str> {
    let count = |name: &str| std::env::var(name).ok().and_then(|text| first_count(&text));
    OF_THREADS
        .into_iter()
        .find_map(|name| Some((name, count(name)?)))
        .filter(|found| found.1 == threads)
        .map(|found| found.0)
}

fn asked_threads(flag: Option<usize>, variable: &dyn Fn(&str) -> Option<String>) -> Outcome<Option<usize>> {
    let [rayon, omp] = OF_THREADS.map(|name| variable(name).and_then(|text| first_count(&text)));
    match (flag, rayon) {
        (Some(flag), Some(other)) if flag != other => Err(Failure::usage(format!(
            "--threads is {flag}, and the variable RAYON_NUM_THREADS of the environment is {other}"
        ))
        .hint("leave out `--threads`, or `unset RAYON_NUM_THREADS`")),
        _ => Ok(flag.or(rayon).or(omp)),
    }
}

/// The first number of a variable such as `4` or, with a number for each nesting level of OpenMP, `4,2`.
fn first_count(text: &str) -> Option<usize> {
    text.split(',').next()?.trim().parse().ok().filter(|&count| count > 0)
}

/// The number of this process among those started on its host, from 0.
pub fn number_on_host() -> usize {
    launched().and_then(|launched| launched.number_on_host).unwrap_or(0)
}

/// Processors of this host, including those that this process may not use.
fn online_processors() -> Option<usize> {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    let count = |range: &str| {
        let mut ends = range.trim().splitn(2, '-').map(str::parse::<usize>);
        let first = ends.next()?.ok()?;
        Some(ends.next().map_or(Some(first), Result::ok)? - first + 1)
    };
    online.split(',').map(count).sum()
}

impl Processes {
    /// Joins the processes that a launcher started.
    ///
    /// # Errors
    /// This build has no MPI: each process would train the whole run alone, in the same directory.
    pub fn join() -> Outcome<Self> {
        let Some(launched) = launched() else { return Ok(Self::default()) };
        Self::join_launched(launched)
    }

    #[cfg(not(feature = "mpi"))]
    fn join_launched(launched: Launched) -> Outcome<Self> {
        let Launched { by, processes, .. } = launched;
        let features = if cfg!(feature = "cuda") { "mpi,cuda" } else { "mpi" };
        let build = format!("build with `cargo build --release --features {features}`; see docs/processes.md");
        Err(Failure::usage(format!("`{by}` started {processes} processes, and this build has no MPI"))
            .hint(format!("to train with several, {build}"))
            .hint("to train with one, start the command without it"))
    }

    #[cfg(feature = "mpi")]
    fn join_launched(launched: Launched) -> Outcome<Self> {
        let group = collective::engine_mpi::join()?;
        if group.size() != launched.processes {
            let Launched { by, processes, .. } = launched;
            return Err(Failure::usage(format!(
                "`{by}` started {processes} processes, and MPI joined {}",
                group.size()
            ))
            .hint("start it with the `mpirun` of the MPI that this program was built with"));
        }
        if !group.is_first() {
            output::be_silent(group.rank());
        }
        Ok(Self { group: Some(group) })
    }

    /// The group, if there are several processes.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Leaves the group. After success or an interruption all processes leave together; after a failure of this one, all are aborted.
    pub fn leave(self, ended: Outcome<()>) -> Outcome<()> {
        let Some(group) = &self.group else { return ended };
        if let Err(failure) = &ended
            && failure.exit != Exit::Interrupted
        {
            report::error(failure);
            output::drain();
            group.abort(failure.exit as i32);
        }
        group.barrier()?;
        group.end();
        ended
    }
}

/// The group of a process, for actions of all processes together; `None` for a single process.
#[derive(Clone, Copy, Debug)]
pub struct OptionalGroup<'a>(pub Option<&'a Group>);

impl OptionalGroup<'_> {
    /// Whether this is the process that prints and writes.
    pub fn is_first(self) -> bool {
        self.0.is_none_or(Group::is_first)
    }

    /// Makes files that all processes read. The first process makes them, and the others find them.
    pub fn main_process_first<T>(self, make: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let Some(group) = self.0 else { return make() };
        if group.is_first() {
            let made = make()?;
            group.barrier()?;
            return Ok(made);
        }
        group.barrier()?;
        make()
    }

    /// Returns the value of the first process on all processes.
    pub fn broadcast_from_root<T: Serialize + DeserializeOwned>(self, mine: T) -> Outcome<T> {
        let Some(group) = self.0 else { return Ok(mine) };
        let said = group.broadcast_from_root(serde_json::to_vec(&mine).map_err(unreadable)?)?;
        serde_json::from_slice(&said).map_err(unreadable)
    }

    /// The ranks of the processes that pass `true`. A single process has rank 0.
    pub fn ranks_where(self, yes: bool) -> Outcome<Vec<usize>> {
        let said =
            self.0.map_or_else(|| Ok(vec![vec![u64::from(yes)]]), |group| group.gather_numbers(&[u64::from(yes)]))?;
        Ok((0..said.len()).filter(|&rank| said[rank][0] != 0).collect())
    }

    /// After an error that all processes know of, lets process `rank` report it and end all of them. The others wait for that end.
    pub fn wait_for_abort_by(self, rank: usize) -> Outcome<()> {
        match self.0 {
            Some(group) if group.rank() != rank => Ok(group.barrier()?),
            _ => Ok(()),
        }
    }

    /// The division of a batch.
    ///
    /// # Errors
    /// There are fewer virtual shards than processes, or a run of one process has `parallel.*` settings that need several.
    pub fn parallel(self, config: &Config) -> Outcome<Option<Parallel>> {
        let shards = config.parallel.virtual_shards;
        let group = match (self.0, shards) {
            (Some(group), _) => group.clone(),
            // One process with several shards has the same bits as several processes.
            (None, Some(2..)) => Group::alone(),
            (None, _) => return Ok(None),
        };
        Ok(Some(Parallel::new(group, shards)?))
    }

    /// Measures the network between the processes, unless the config has its rate. With virtual shards the network is not measured, because
    /// plans, and with them bits, would depend on it.
    pub fn network(self, config: &Config, parallel: Option<&Parallel>, device: &Device) -> Outcome<Option<Network>> {
        let is_known = config.parallel.network.is_some() || config.parallel.virtual_shards.is_some();
        match (self.0, parallel) {
            (Some(_), Some(parallel)) if !is_known => Ok(Some(Network::measured(parallel.bits_per_second(device)?))),
            _ => Ok(None),
        }
    }

    /// Checks that the budgets of a host's processes do not exceed its memory. Without a budget, returns an equal share for each process.
    pub fn memory_share(self, config: &Config, now: &MemorySnapshot) -> Outcome<Option<u64>> {
        let Some(group) = self.0 else { return Ok(None) };
        let budget = planner::budget_of(config.memory.budget).resolve(now);
        let own_group = now.group.as_ref().map_or("", |group| group.path.as_str());
        let here = host(group)?;
        let said = all_gather(group, &(budget.0, here.clone(), own_group.to_owned()))?;
        let budgets = |is_meant: &dyn Fn(&str) -> bool| -> Vec<u64> {
            said.iter()
                .filter(|(_, host, group)| *host == here && is_meant(group))
                .map(|(budget, ..)| *budget)
                .collect()
        };
        let (on_host, in_group) = (budgets(&|_| true), budgets(&|group| group == own_group));
        // The memory that all of them may hold: of the host, and of a control group, which a launcher may create for each process.
        let shared = [(Some(now.available), on_host), (now.group.as_ref().map(ControlGroup::available), in_group)];
        let shared = shared.into_iter().filter_map(|(available, budgets)| {
            let processes = budgets.len().max(1) as u64;
            Some((available? + Bytes(now.rss.0 * processes), budgets, processes))
        });
        let shared: Vec<(Bytes, Vec<u64>, u64)> = shared.collect();
        if config.memory.budget.is_none() {
            let share = |(available, _, processes): &(Bytes, Vec<u64>, u64)| {
                planner::budget_of(None).resolve(&of_available(*available)).0 / processes
            };
            return Ok(shared.iter().map(share).min());
        }
        for (available, budgets, processes) in shared {
            let sum = Bytes(budgets.iter().sum());
            if sum > available {
                return Err(Failure::new(
                    Exit::DoesNotFit,
                    format!(
                        "memory budget: {processes} processes on {here} with {} each are {sum}, and {available} are available",
                        Bytes(sum.0 / processes)
                    ),
                )
                .hint(format!("`--memory-budget` is for each process: {} or less", Bytes(available.0 / processes))));
            }
        }
        Ok(None)
    }

    /// Finds processes that compute on the same card, and returns whether there are any. If this process shares its card and has a budget
    /// for it, also returns a warning.
    ///
    /// # Errors
    /// This process shares its card without a budget: each process would take all of the card's memory.
    pub fn shared_cards(self, config: &Config, device: &Device) -> Outcome<(bool, Option<String>)> {
        let Some(group) = self.0 else { return Ok((false, None)) };
        let mine = cuda_device::card_id(device).map(|card| Ok::<_, Failure>((host(group)?, card))).transpose()?;
        let said = all_gather(group, &mine)?;
        let cards: HashSet<&(String, String)> = said.iter().flatten().collect();
        let are_shared = cards.len() < said.iter().flatten().count();
        let on_mine = (0..said.len()).filter(|&rank| said[rank] == mine).map(|rank| rank.to_string());
        let on_mine: Vec<String> = on_mine.collect();
        let Some((host, _)) = mine.filter(|_| on_mine.len() > 1) else { return Ok((are_shared, None)) };
        let problem = format!("processes {} of {} compute on one GPU of {host}", on_mine.join(", "), said.len());
        if config.memory.device_budget.is_some() {
            let warning = format!("{problem}: they wait for each other, and each has a context of its own there");
            return Ok((are_shared, Some(warning)));
        }
        let cards = plural(cuda_device::cards().unwrap_or(1) as u64, "GPU");
        Err(Failure::usage(format!("{problem}, and each would plan with all of its memory"))
            .hint(format!("start one process for each GPU: this process sees {cards}"))
            .hint("`--device cuda` gives each process on a host its own GPU; `cuda:0` gives all of them the first GPU")
            .hint("to share a GPU, limit each process with `--device-memory-budget`"))
    }

    /// One plan for all: the slowest of the processes' own plans, with this process' own bill.
    ///
    /// # Errors
    /// The plan does not fit here. With `is_bound`, the plan is followed anyway.
    pub fn agree_on_plan(
        self,
        mine: Plan,
        (now, costs, budgets): (&MemorySnapshot, &Costs, Budgets),
        is_bound: bool,
    ) -> Outcome<Plan> {
        let Some(group) = self.0 else { return Ok(mine) };
        let mut slowest: Option<(f64, planner::Step)> = None;
        for (time, step) in all_gather(group, &(mine.relative_time, mine.step))? {
            if slowest.as_ref().is_none_or(|(slowest, _)| time > *slowest) {
                slowest = Some((time, step));
            }
        }
        let Some((_, step)) = slowest.filter(|(_, step)| *step != mine.step) else { return Ok(mine) };
        let mut costs = costs.clone();
        costs.steps.retain(|choice| choice.what == step);
        match memory_policy::plan(now, &costs, budgets) {
            Ok(plan) => Ok(plan),
            Err(refusal) if is_bound => Ok(*refusal.smallest_plan),
            Err(refusal) => Err(refusal.into()),
        }
    }
}

/// The values of all processes, by rank.
fn all_gather<T: Serialize + DeserializeOwned>(group: &Group, mine: &T) -> Outcome<Vec<T>> {
    let said = group.gather(&serde_json::to_vec(mine).map_err(unreadable)?)?;
    said.iter().map(|said| serde_json::from_slice(said).map_err(unreadable)).collect()
}

fn unreadable(error: serde_json::Error) -> Failure {
    Failure::internal(format!("a message between processes: {error}"))
}

/// A machine with this much available memory, and nothing else.
fn of_available(available: Bytes) -> MemorySnapshot {
    MemorySnapshot { available, ..MemorySnapshot::default() }
}

/// This process' share of every batch.
pub fn batch_share(parallel: Option<&Parallel>) -> BatchShare {
    parallel.map_or_else(BatchShare::default, |parallel| BatchShare {
        shards: parallel.shards(),
        rank: parallel.group().rank(),
    })
}

/// The name of this host.
#[cfg(feature = "mpi")]
fn host(group: &Group) -> Outcome<String> {
    Ok(group.submit(|_| collective::engine_mpi::host()).wait()?)
}

#[cfg(not(feature = "mpi"))]
fn host(_: &Group) -> Outcome<String> {
    Ok("this host".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_asked_for_by_the_flag_and_then_by_the_environment() {
        for (flag, rayon, omp, expected) in [
            (None, None, None, Some(None)),
            (None, None, Some("1"), Some(Some(1))),
            (None, None, Some("4,2"), Some(Some(4))),
            (None, None, Some("0"), Some(None)),
            (None, Some("3"), Some("1"), Some(Some(3))),
            (Some(2), None, Some("1"), Some(Some(2))),
            (Some(2), Some("2"), None, Some(Some(2))),
            (Some(2), Some("3"), None, None),
        ] {
            let variable = |name: &str| if name == "OMP_NUM_THREADS" { omp } else { rayon }.map(str::to_owned);
            assert_eq!(asked_threads(flag, &variable).ok(), expected, "{flag:?} {rayon:?} {omp:?}");
        }
    }
}
