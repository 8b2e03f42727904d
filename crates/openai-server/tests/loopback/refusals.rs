//! Requests that are refused, each with a status and a code.

use std::time::Duration;

use openai_server::Limits;

use crate::support::*;

#[test]
fn what_cannot_be_answered_has_a_status_and_a_code() {
    let running = start();
    refused(&running.complete("{"), 400, "invalid_json");
    refused(&running.complete(r#"{"prompt":"a","n":99}"#), 400, "invalid_value");
    refused(&running.complete(r#"{"prompt":"a","colour":1}"#), 400, "unknown_parameter");
    refused(&running.complete(r#"{"prompt":"a","model":"other"}"#), 404, "model_not_found");
    refused(&running.complete(r#"{"prompt":"fail"}"#), 400, "invalid_value");
    refused(&running.complete(r#"{"prompt":"fail","stream":true}"#), 400, "invalid_value");
    refused(&running.complete(r#"{"prompt":"give up"}"#), 500, "internal_error");
    refused(&running.get("/v1/nothing"), 404, "unknown_path");
    refused(&running.get("/v1/models/other"), 404, "model_not_found");
    refused(&running.get("/v1/completions"), 405, "method_not_allowed");
    refused(&running.post("/health", ""), 405, "method_not_allowed");
}

#[test]
fn pages_of_others_cannot_ask() {
    let running = start();
    let typed = request("/v1/completions", "", r#"{"prompt":"a"}"#);
    refused(&running.exchange(typed.replace("application/json", "text/plain")), 415, "not_json");
    refused(&running.exchange(typed.replace("Host: 127.0.0.1", "Host: attacker.example:8080")), 421, "unknown_host");
    assert_eq!(status(&running.exchange(typed.replace("Host: 127.0.0.1", "Host: localhost:9"))), 200);
    let preflight = "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://a.example\r\n\
         Access-Control-Request-Method: POST\r\nConnection: close\r\n\r\n";
    let answer = running.exchange(preflight);
    assert_eq!(status(&answer), 405);
    assert!(!answer.to_lowercase().contains("access-control-allow"));
}

#[test]
fn a_server_with_keys_answers_who_has_one() {
    let running = start_with(limits(), "sk-test-1\nsk-test-2\n", 8);
    let ask = |header: &str| running.exchange(request("/v1/completions", header, r#"{"prompt":"a"}"#));
    refused(&ask(""), 401, "invalid_api_key");
    refused(&ask("Authorization: Bearer sk-test-3\r\n"), 401, "invalid_api_key");
    assert_eq!(status(&ask("Authorization: Bearer sk-test-2\r\n")), 200);
    assert_eq!(status(&running.get("/v1/models")), 401);
    assert_eq!(status(&running.get("/metrics")), 401);
    assert_eq!(status(&running.get("/health")), 200);
}

#[test]
fn a_full_queue_says_when_to_come_again() {
    let running = start_with(limits(), "", 1);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| running.complete(r#"{"prompt":"wait"}"#));
        while running.queue.load().running == 0 {
            std::thread::yield_now();
        }
        let second = scope.spawn(|| running.complete(r#"{"prompt":"a"}"#));
        while running.queue.load().waiting == 0 {
            std::thread::yield_now();
        }
        let third = running.complete(r#"{"prompt":"b"}"#);
        refused(&third, 429, "queue_full");
        assert!(third.to_lowercase().contains("\r\nretry-after: "), "{third}");
        refused(&running.complete(r#"{"prompt":["c","d"]}"#), 429, "queue_full");
        running.go.send(()).unwrap();
        assert_eq!((status(&first.join().unwrap()), status(&second.join().unwrap())), (200, 200));
    });
}

#[test]
fn large_requests_are_refused_before_they_are_read() {
    let small = Limits { body_bytes: 1000, head_bytes: 8 << 10, ..limits() };
    let running = start_with(small, "", 8);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    refused(&running.exchange(format!("{head}Content-Length: 1000000000000\r\n\r\n")), 413, "body_too_large");
    let chunk = format!("3e8\r\n{}\r\n", "x".repeat(1000));
    refused(
        &running.exchange(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n")),
        413,
        "body_too_large",
    );
    let long = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(20_000));
    refused(&running.exchange(long), 431, "head_too_large");
    let many = format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "a: b\r\n".repeat(200));
    refused(&running.exchange(many), 431, "head_too_large");
    assert_eq!(status(&running.get("/health")), 200);
}

#[test]
fn what_is_no_http_is_told_so() {
    let running = start();
    for bytes in [
        "\0\0\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET / HTTP/1.1\r\nno colon\r\n\r\n",
        "\u{16}\u{3}\u{1}\0",
    ] {
        let answer = running.exchange([bytes.as_bytes(), b"\r\n\r\n"].concat());
        refused(&answer, 400, "invalid_http");
    }
    let smuggled =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde";
    refused(&running.exchange(smuggled), 400, "invalid_http");
    let behind = running.exchange("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\0\0 nonsense\r\n\r\n");
    let at = behind.rfind("HTTP/1.1 ").unwrap();
    assert_eq!(status(&behind[..at]), 200);
    refused(&behind[at..], 400, "invalid_http");
    refused(&running.exchange("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 400, "invalid_http");
    assert_eq!(status(&running.get("/health")), 200);
}

#[test]
fn who_sends_too_slowly_is_told_so() {
    let brief = Duration::from_millis(50);
    // The client never sends the rest, but gets an answer. Only one of the time limits is short, so a slow start does no harm.
    let of_heads = start_with(Limits { head_timeout: brief, ..limits() }, "", 8);
    refused(&of_heads.exchange("GET /health HTTP/1.1\r\nHost: loc"), 408, "head_timeout");
    let of_bodies = start_with(Limits { body_timeout: brief, ..limits() }, "", 8);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{";
    refused(&of_bodies.exchange(head), 408, "body_timeout");
}
