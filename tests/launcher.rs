//! Starting the command as several processes.

use crate::run::Scene;

/// A launcher of this many processes, also on fewer processors, with variables of the form `NAME=value`. It shares no directory with other
/// launchers.
pub fn mpirun(scene: &Scene, processes: usize, variables: &[String]) -> String {
    let root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1";
    let own = format!("OMPI_MCA_orte_tmpdir_base={}", scene.path("").display());
    let variables: String = variables.iter().map(|variable| format!("{variable} ")).collect();
    format!("env {root} {own} {variables}mpirun -n {processes}")
}
