//! Clients that disconnect, answers that take too long, and the server's shutdown.

use std::io::{Read, Write};
use std::time::Duration;

use openai_server::Limits;

use crate::support::*;

#[test]
fn an_answer_that_takes_too_long_ends_and_so_does_its_job() {
    let brief = Limits { request_timeout: Duration::from_millis(50), ..limits() };
    let running = start_with(brief, "", 8);
    let wait_until_idle = || {
        while running.queue.load() != openai_server::Load::default() {
            std::thread::yield_now();
        }
    };
    refused(&running.complete(r#"{"prompt":"wait until cancelled"}"#), 504, "deadline");
    // Whether the engine took the job up in time or not, no work on it is left.
    wait_until_idle();
    // After a stream has begun, its last event is the error. A stream that the engine does not take up in time is refused and retried.
    let stream = loop {
        let stream = running.complete(r#"{"prompt":"wait until cancelled","stream":true}"#);
        if status(&stream) == 200 {
            break stream;
        }
        refused(&stream, 504, "deadline");
    };
    assert!(stream.contains("\"deadline\"") && stream.contains("data: [DONE]"), "{stream}");
    wait_until_idle();
}

#[test]
fn the_job_of_a_client_that_leaves_is_cancelled() {
    let running = start();
    for body in [r#"{"prompt":"wait until cancelled"}"#, r#"{"prompt":"wait until cancelled","stream":true}"#] {
        let mut stream = running.connect();
        stream.write_all(request("/v1/completions", "", body).as_bytes()).unwrap();
        while running.queue.load().running == 0 {
            std::thread::yield_now();
        }
        drop(stream);
        assert_eq!(running.done(), "wait until cancelled");
    }
    let log = running.log.clone();
    assert!(running.end());
    assert!(log.lock().unwrap().iter().all(|access| access.cancelled));
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let running = start_with(Limits { write_timeout: Duration::from_millis(50), ..limits() }, "", 8);
    let mut stream = running.connect();
    stream
        .write_all(request("/v1/completions", "", r#"{"prompt":"flood until cancelled","stream":true}"#).as_bytes())
        .unwrap();
    assert_eq!(running.done(), "flood until cancelled");
    drop(stream);
}

#[test]
fn a_request_that_ends_in_the_middle_leaves_nothing_behind() {
    let running = start();
    let whole = request("/v1/completions", "", r#"{"prompt":"a"}"#);
    for end in [0, 1, 10, whole.len() / 2, whole.len() - 1] {
        let mut stream = running.connect();
        stream.write_all(&whole.as_bytes()[..end]).unwrap();
        half_close(&stream);
        let answer = rest(stream);
        assert!(answer.is_empty() || status(&answer) == 400, "{end}: {answer}");
    }
    assert_eq!(running.queue.load(), openai_server::Load::default());
    assert_eq!(status(&running.get("/health")), 200);
}

#[test]
fn a_server_that_ends_answers_what_it_took_and_nothing_more() {
    let running = start();
    let mut idle = running.connect();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut bytes = [0; 4096];
    assert!(idle.read(&mut bytes).unwrap() > 0);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| running.complete(r#"{"prompt":"wait"}"#));
        while running.queue.load().running == 0 {
            std::thread::yield_now();
        }
        running.drain();
        // An idle connection is closed.
        assert_eq!(idle.read(&mut bytes).unwrap(), 0);
        // Until the last answer, probes are told: the process lives, and takes no more requests.
        assert_eq!(json(&running.get("/health"))["status"], "stopping");
        refused(&running.get("/ready"), 503, "shutting_down");
        refused(&running.complete(r#"{"prompt":"a"}"#), 503, "shutting_down");
        running.go.send(()).unwrap();
        assert_eq!(status(&first.join().unwrap()), 200);
    });
    let address = running.address;
    assert!(running.end());
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn a_server_that_ends_does_not_wait_for_an_answer_that_does_not_come() {
    let running = start_with(Limits { drain_timeout: Duration::from_millis(50), ..limits() }, "", 8);
    let mut stream = running.connect();
    stream.write_all(request("/v1/completions", "", r#"{"prompt":"wait until cancelled"}"#).as_bytes()).unwrap();
    while running.queue.load().running == 0 {
        std::thread::yield_now();
    }
    assert!(running.end());
}
