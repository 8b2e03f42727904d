//! Requests that are refused, each with a status and a code.

use std::io::{Read, Write};
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
    for host in ["localhost:9", "LOCALHOST", "[::1]:80"] {
        assert_eq!(status(&running.exchange(typed.replace("Host: 127.0.0.1", &format!("Host: {host}")))), 200);
    }
    let twice = typed.replace("Host: 127.0.0.1", "Host: 127.0.0.1\r\nHost: attacker.example");
    refused(&running.exchange(twice), 400, "invalid_http");
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
fn a_request_of_http_1_1_names_one_host() {
    let running = start();
    let check = |path: &str, hosts: &str, expected: u16| {
        let answer = running.exchange(format!("GET {path}\r\n{hosts}Connection: close\r\n\r\n"));
        match expected {
            200 => assert_eq!(status(&answer), 200, "{path} {hosts:?}"),
            _ => refused(&answer, expected, if expected == 400 { "invalid_http" } else { "unknown_host" }),
        }
    };
    for path in ["/health", "/nothing"] {
        check(&format!("{path} HTTP/1.1"), "", 400);
    }
    check("/health HTTP/1.0", "", 200);
    check("/health HTTP/1.0", "Host: a.example\r\n", 421);
    for host in ["", "localhost", "LocalHost:80", "localhost:", "[::1]:8080", "127.0.0.1"] {
        check("/health HTTP/1.1", &format!("Host: {host}\r\n"), 200);
    }
    for host in
        ["local host", "localhost:80:80", "localhost:a", "me@localhost", "localhost/", "[::1", "\u{e9}", "localhost, a"]
    {
        check("/health HTTP/1.1", &format!("Host: {host}\r\n"), 400);
    }
    check("/health HTTP/1.1", "Host: localhost\r\nHost: localhost\r\n", 400);
    check("http://localhost/health HTTP/1.1", "Host: localhost\r\n", 200);
    check("http://localhost/health HTTP/1.1", "", 400);
}

#[test]
fn documents_that_are_given_back_count_as_held() {
    let running = start_with(Limits { answer_bytes: 8192, ..limits() }, "", 8);
    let rank = |bytes: usize, returns: bool| {
        let document = "x".repeat(bytes);
        running
            .post("/v1/rerank", &format!(r#"{{"query":"q","documents":["{document}"],"return_documents":{returns}}}"#))
    };
    refused(&rank(3000, true), 503, "answer_not_taken");
    for (bytes, returns) in [(3000, false), (1000, true), (1000, true), (1000, true)] {
        assert_eq!(status(&rank(bytes, returns)), 200, "{bytes} {returns}");
    }
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

#[test]
fn refused_heads_are_logged_and_counted_and_idle_connections_are_not() {
    let brief = Limits { head_timeout: Duration::from_millis(50), ..limits() };
    let running = start_with(brief, "", 8);
    for bytes in [
        "GET / HTTP/9\r\n\r\n".to_owned(),
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(70_000)),
        "GET /he".to_owned(),
    ] {
        running.exchange(bytes);
    }
    assert_eq!(running.exchange(""), "", "a connection without a request is closed without a word");
    let metrics = running.get("/metrics");
    for status in [400, 408, 431] {
        let line = format!("serve_requests_total{{route=\"other\",status=\"{status}\"}} 1");
        assert!(metrics.contains(&line), "{status}: {metrics}");
    }
    let log = running.log.clone();
    assert!(running.end());
    let seen: Vec<(u16, &str)> =
        log.lock().unwrap().iter().map(|access| (access.status, access.error.unwrap_or("-"))).collect();
    assert_eq!(seen, [(400, "invalid_http"), (431, "head_too_large"), (408, "head_timeout"), (200, "-")]);
}

#[test]
fn a_refusal_before_the_body_says_that_the_connection_ends_and_is_read_whole() {
    let running = start();
    let head = "POST /v1/nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n";
    let answer = running.exchange(format!("{head}{}", "x".repeat(300_000)));
    refused(&answer, 404, "unknown_path");
    assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    // After a body that was read, the connection goes on.
    let mut stream = running.connect();
    let bad = request("/v1/completions", "", "{").replace("Connection: close\r\n", "");
    for _ in 0..2 {
        stream.write_all(bad.as_bytes()).unwrap();
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).unwrap();
        let answer = std::str::from_utf8(&bytes[..read]).unwrap();
        assert!(status(answer) == 400 && !answer.contains("connection: close"), "{answer}");
    }
}

#[test]
fn each_refusal_is_logged_and_counted_and_says_whether_the_connection_goes_on() {
    let running = start_with(Limits { body_bytes: 1000, ..limits() }, "sk-test-1", 8);
    let key = "Authorization: Bearer sk-test-1\r\n";
    let with =
        |headers: &str, body: &str| request("/v1/completions", headers, body).replace("Connection: close\r\n", "");
    let good = r#"{"prompt":"a"}"#;
    let asks = [
        // Before the body is read.
        (with("", good), 401, "invalid_api_key", true),
        (with(key, good).replace("POST", "PUT"), 405, "method_not_allowed", true),
        (with(key, good).replace("/v1/completions", "/v1/nothing"), 404, "unknown_path", true),
        (with(key, good).replace("Host: 127.0.0.1", "Host: a b"), 400, "invalid_http", true),
        (with(key, good).replace("application/json", "text/plain"), 415, "not_json", true),
        (with(key, &" ".repeat(1001)), 413, "body_too_large", true),
        // After it.
        (with(key, "{"), 400, "invalid_json", false),
        (with(key, r#"{"prompt":"a","model":"b"}"#), 404, "model_not_found", false),
        (with(key, r#"{"prompt":"fail"}"#), 400, "invalid_value", false),
        // Without a body.
        ("GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), 401, "invalid_api_key", false),
    ];
    for (ask, expected, code, ends) in &asks {
        let mut stream = running.connect();
        stream.write_all(ask.as_bytes()).unwrap();
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).unwrap();
        let answer = std::str::from_utf8(&bytes[..read]).unwrap();
        refused(answer, *expected, code);
        assert_eq!(answer.contains("\r\nconnection: close\r\n"), *ends, "{code}: {answer}");
        if *ends {
            assert_eq!(rest(stream), "", "{code}");
        } else {
            stream.write_all(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            assert_eq!(status(&rest(stream)), 200, "{code}");
        }
    }
    let metrics = running.exchange(format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{key}Connection: close\r\n\r\n"));
    let counted =
        metrics.lines().filter(|line| line.starts_with("serve_requests_total{") && !line.contains("status=\"200\""));
    let counted: usize = counted.filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).sum();
    assert_eq!(counted, asks.len(), "{metrics}");
    let log = running.log.clone();
    assert!(running.end());
    let logged: Vec<(u16, &str)> =
        log.lock().unwrap().iter().filter_map(|access| Some((access.status, access.error?))).collect();
    assert_eq!(logged, asks.each_ref().map(|(_, status, code, _)| (*status, *code)));
}

#[test]
fn an_error_names_the_parameter_that_the_request_has() {
    let running = start();
    let long = "x".repeat(20_000);
    for (path, body, expected) in [
        ("/v1/completions", format!(r#"{{"prompt":"{long}"}}"#), "prompt"),
        ("/v1/completions", format!(r#"{{"prompt":[{}1]}}"#, "1,".repeat(20_000)), "prompt"),
        ("/v1/score", format!(r#"{{"prompt":"{long}","labels":["a"]}}"#), "prompt"),
        ("/v1/chat/completions", format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}]}}"#), "messages"),
        ("/v1/embeddings", format!(r#"{{"input":["a","{long}"]}}"#), "input"),
        ("/v1/embeddings", format!(r#"{{"input":[[{}1]]}}"#, "1,".repeat(20_000)), "input"),
        ("/v1/embeddings", format!(r#"{{"input":[{}"a"]}}"#, r#""a","#.repeat(64)), "input"),
        ("/v1/rerank", format!(r#"{{"query":"a","documents":["a","{long}"]}}"#), "documents"),
        ("/v1/rerank", format!(r#"{{"query":"{long}","documents":["a"]}}"#), "query"),
    ] {
        let answer = running.post(path, &body);
        let error = &json(&answer)["error"];
        assert_eq!((status(&answer), error["param"].as_str()), (400, Some(expected)), "{path}: {answer}");
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains(&format!("`{expected}`")) && (expected == "prompt" || !message.contains("prompt")),
            "{message}"
        );
    }
}

#[test]
fn the_largest_request_of_each_path_is_served_beside_others() {
    let running = start_with(limits(), "", 64);
    let text = |bytes: usize| "x".repeat(bytes);
    let list = |text: String, count: usize| format!("[{}]", vec![format!("\"{text}\""); count].join(","));
    let labels: Vec<String> = (0..64).map(|number| format!("\"{number:0256}\"")).collect();
    for (path, body) in [
        ("/v1/completions", format!(r#"{{"prompt":{}}}"#, list(text(8000), 16))),
        ("/v1/score", format!(r#"{{"prompt":{},"labels":[{}]}}"#, list(text(6000), 16), labels.join(","))),
        ("/v1/rerank", format!(r#"{{"query":"q","documents":{}}}"#, list(text(2000), 64))),
        ("/v1/embeddings", format!(r#"{{"input":{}}}"#, list(text(2000), 64))),
    ] {
        let whole = std::thread::scope(|scope| {
            let first = scope.spawn(|| running.complete(r#"{"prompt":"wait"}"#));
            while running.queue.load().running == 0 {
                std::thread::yield_now();
            }
            let largest = scope.spawn(|| running.post(path, &body));
            while running.queue.load().waiting < 16 {
                std::thread::yield_now();
            }
            // Others of the same address have room beside it.
            let others: Vec<_> = (0..16).map(|_| scope.spawn(|| running.complete(r#"{"prompt":"a"}"#))).collect();
            while running.queue.load().waiting < 16 + 16 {
                std::thread::yield_now();
            }
            running.go.send(()).unwrap();
            assert_eq!(status(&first.join().unwrap()), 200);
            others.into_iter().for_each(|other| assert_eq!(status(&other.join().unwrap()), 200));
            largest.join().unwrap()
        });
        assert_eq!(status(&whole), 200, "{path}: {}", &whole[..400.min(whole.len())]);
    }
}

#[test]
fn clients_that_keep_the_server_waiting_give_way_to_others() {
    let running = start_with(Limits { connections: 4, ..limits() }, "", 8);
    let kept = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let begins: [&[u8]; 4] =
        [b"", b"GET /health HTTP/1.1\r\nX: ", kept, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"];
    for begin in begins {
        let mut hostile: Vec<_> = (0..8).map(|_| running.connect()).collect();
        hostile.iter_mut().for_each(|stream| drop(stream.write_all(begin)));
        assert_eq!(status(&running.get("/health")), 200);
        assert_eq!(status(&running.complete(r#"{"prompt":"a"}"#)), 200);
    }
    let metrics = running.get("/metrics");
    assert!(!metrics.contains("serve_connections_gave_way_total 0"), "{metrics}");
}

#[test]
fn a_body_that_comes_slowly_gives_way_when_its_memory_is_needed() {
    let running = start_with(Limits { bodies: 1, body_bytes: 1000, ..limits() }, "", 8);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n";
    let mut slow = running.connect();
    slow.write_all(format!("{head}{}", " ".repeat(900)).as_bytes()).unwrap();
    // A small one finds room beside it; a large one takes its place.
    assert_eq!(status(&running.complete(r#"{"prompt":"a"}"#)), 200);
    let large = format!("{{\"prompt\":\"{}\"}}", "b".repeat(900));
    assert_eq!(status(&running.complete(&large)), 200);
    refused(&rest(slow), 408, "body_timeout");
}

#[test]
fn answers_that_nobody_reads_do_not_fill_the_memory() {
    let running = start_with(Limits { answer_bytes: 1 << 20, ..limits() }, "", 8);
    let mut stream = running.connect();
    let flood = request("/v1/completions", "", r#"{"prompt":"flood until cancelled","stream":true}"#);
    stream.write_all(flood.as_bytes()).unwrap();
    // It ends by its own fault, before the time limit for writes.
    assert_eq!(running.done(), "flood until cancelled");
    assert_eq!(status(&running.complete(r#"{"prompt":"a"}"#)), 200);
    assert!(rest(stream).contains("answer_not_taken"));
}
