//! `doctor`: findings for people and for programs, and exit codes by severity.

use crate::run::Scene;

#[test]
fn doctor_names_what_the_machine_has_and_ends_by_the_worst_finding() {
    let scene = Scene::new();
    let ran = scene.run(&["doctor", "--output", "runs/a", "--json"]);
    let json = ran.json();
    let findings = json["findings"].as_array().expect("findings");
    let names: Vec<&str> = findings.iter().filter_map(|finding| finding["name"].as_str()).collect();
    for name in
        ["program", "system", "variables", "processor", "kernels", "threads", "memory", "control group", "disk", "mpi"]
    {
        assert!(names.contains(&name), "{name}: {json:#}");
    }
    let expected = match json["severity"].as_str() {
        Some("ok" | "note") => 0,
        Some("warning") => 6,
        other => panic!("{other:?}: the tests run here\n{json:#}"),
    };
    ran.expect_code(expected);
    let of = |name: &str| findings.iter().find(|finding| finding["name"] == name).expect("a finding");
    assert!(of("memory")["facts"]["default_budget_bytes"].as_u64() > Some(1 << 20), "{json:#}");
    assert!(of("disk rate")["facts"]["read_bytes_per_second"].as_f64() > Some(1.0), "{json:#}");
    assert!(of("kernels")["facts"]["used"].is_string());
    assert!(scene.names(".").is_empty(), "nothing is made");
}

#[test]
fn doctor_warns_of_kernels_that_are_not_used_and_says_how_to_use_them() {
    let scene = Scene::new();
    let ran = scene.run_after("export LOW_MEM_T5_ISA=software-tiles", &["doctor", "--quick"]).expect_code(6);
    ran.expect_words(&["software-tiles", "=> unset LOW_MEM_T5_ISA", "LOW_MEM_T5_ISA=software-tiles", "warning"]);
}

#[test]
fn doctor_calls_a_directory_that_cannot_be_written_a_failure() {
    let scene = Scene::new();
    let ran = scene.run(&["doctor", "--quick", "--output", "/proc/here"]).expect_code(7);
    ran.expect_words(&["cannot be written", "--output DIR", "1 failure"]);
}
