//! `doctor`: findings for people and for programs, and exit codes by severity.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;

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

/// A server that gives one connection this answer, and the address of it.
fn server(answer: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        // A request may come in parts, and what is unread when a connection is closed takes the answer with it.
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a request");
            request.extend(byte);
        }
        assert!(request.starts_with(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1:"));
        // The first line of an answer may come in parts too.
        let (start, rest) = answer.split_at(answer.len() / 3);
        for part in [start, rest] {
            stream.write_all(part.as_bytes()).expect("an answer");
        }
    });
    address
}

#[test]
fn doctor_asks_a_server_whether_it_takes_requests() {
    let scene = Scene::new();
    let ready = server("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").to_string();
    scene.run(&["doctor", "--server", &ready]).expect_code(0).expect_words(&["server", "takes requests"]);
    let draining = server("HTTP/1.1 503 Service Unavailable\r\n\r\n").to_string();
    scene.run(&["doctor", "--server", &draining]).expect_code(7).expect_words(&["HTTP/1.1 503 Service Unavailable"]);
    let hostile = server("\u{1b}[2J\u{202e}").to_string();
    let ran = scene.run(&["doctor", "--server", &hostile, "--json"]).expect_code(7);
    assert_eq!(ran.json()["findings"][0]["found"], format!("{hostile} takes no requests: \\u{{1b}}[2J\\u{{202e}}"));
    // The port of a service that no machine has had for decades.
    let nobody = "127.0.0.1:1";
    scene.run(&["doctor", "--server", nobody]).expect_code(7).expect_words(&["does not answer", "--listen"]);
    scene.run(&["doctor", "--server", "here", "--quick"]).expect_code(2);
}
