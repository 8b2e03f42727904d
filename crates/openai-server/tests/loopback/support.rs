//! A server with an engine that follows the prompt's command, and clients that write bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use openai_server::{
    Access, ApiError, Event, Finish, Hooks, Job, Keys, Limits, Prompt, Queue, Server, Settings, StreamedText,
};

pub struct Running {
    pub address: SocketAddr,
    pub queue: Arc<Queue>,
    /// Receives the prompt of each job that the engine has finished.
    done: Mutex<Receiver<String>>,
    /// Lets one job with the prompt `wait` finish.
    pub go: Sender<()>,
    pub log: Arc<Mutex<Vec<Access>>>,
    server: Option<Server>,
    engine: Option<JoinHandle<()>>,
}

pub fn limits() -> Limits {
    Limits { drain_timeout: Duration::from_secs(20), ..Limits::default() }
}

pub fn start() -> Running {
    start_with(limits(), "", 8)
}

/// Starts a server with these keys, whose queue holds `capacity` waiting jobs.
pub fn start_with(limits: Limits, keys: &str, capacity: usize) -> Running {
    let queue = Queue::new(capacity);
    let log: Arc<Mutex<Vec<Access>>> = Arc::default();
    let lines = Arc::clone(&log);
    let hooks = Hooks {
        log: Box::new(move |access| {
            lines.lock().unwrap().push(access.clone());
            true
        }),
        ..Hooks::default()
    };
    let keys = if keys.is_empty() { Keys::default() } else { Keys::of_file(keys).unwrap() };
    let settings = Settings { keys, limits, ..Settings::new("127.0.0.1:0".parse().unwrap(), &["base", "tuned"]) };
    let server = Server::start(settings, &queue, hooks).unwrap();
    let (told, done) = channel();
    let (go, gate) = channel();
    let of_engine = Arc::clone(&queue);
    let engine = std::thread::spawn(move || {
        while let Some(job) = of_engine.next() {
            let prompt = match &*job.prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(ids) => format!("{ids:?}"),
                Prompt::Chat(messages) => messages.last().unwrap().content.clone(),
                Prompt::Pair(query, document) => format!("{query} {document}"),
            };
            answer(job, &prompt, &gate, &told);
            let _ = told.send(prompt);
        }
    });
    let address = server.address();
    Running { address, queue, done: Mutex::new(done), go, log, server: Some(server), engine: Some(engine) }
}

/// Follows the prompt: fails, waits, gives up, or repeats the prompt word by word with the model's number.
fn answer(job: Job, prompt: &str, gate: &Receiver<()>, told: &Sender<String>) {
    match prompt {
        "fail" => return job.send(Event::Failed(ApiError::parameter("prompt", "too long"))),
        "give up" => return,
        "wait" => {
            job.send(Event::Started { prompt_tokens: 1, is_cut: false });
            let _ = gate.recv();
        }
        "token, then wait" => {
            job.send(Event::Started { prompt_tokens: 1, is_cut: false });
            job.token_made();
            let _ = told.send("token was made".to_owned());
            let _ = gate.recv();
        }
        "wait until cancelled" => {
            job.send(Event::Started { prompt_tokens: 1, is_cut: false });
            while !job.is_cancelled() {
                std::thread::yield_now();
            }
            return;
        }
        "flood until cancelled" => {
            // More than the buffers of both sockets hold.
            for _ in 0..1000 {
                job.send(Event::Text { choice: 0, text: "x".repeat(1 << 14), tokens: 1, logprobs: Vec::new() });
            }
            while !job.is_cancelled() {
                std::thread::yield_now();
            }
            return;
        }
        _ => {}
    }
    job.send(Event::Started { prompt_tokens: prompt.split(' ').count(), is_cut: job.options.is_cut });
    for (choice, label) in job.options.labels.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a few letters")]
        job.send(Event::Scored { choice, logprob: -(label.len() as f64), tokens: 1 });
    }
    if !job.options.labels.is_empty() {
        return;
    }
    let text = format!("{} {prompt}", job.model);
    let words: Vec<&str> = text.split_inclusive(' ').collect();
    for choice in 0..job.options.n {
        let most = job.options.max_tokens.unwrap_or(words.len()).min(words.len());
        let mut outgoing = StreamedText::new(&job.options.stop);
        let mut so_far = String::new();
        for (i, word) in words[..most].iter().enumerate() {
            so_far += word;
            let text = outgoing.more(&so_far, i + 1 == most).to_owned();
            job.token_made();
            job.send(Event::Text { choice, text, tokens: 1, logprobs: Vec::new() });
        }
        let is_cut = most < words.len() && !outgoing.is_stopped();
        job.send(Event::Finished { choice, reason: if is_cut { Finish::Length } else { Finish::Stop } });
    }
}

impl Running {
    /// Shuts the server down. True if every thread ended normally.
    pub fn end(mut self) -> bool {
        self.ended()
    }

    fn ended(&mut self) -> bool {
        let Some(server) = self.server.take() else { return true };
        server.drain();
        let is_well = server.join();
        self.engine.take().is_none_or(|engine| engine.join().is_ok()) && is_well
    }

    /// Waits for the next job that the engine has finished, and returns its prompt.
    pub fn done(&self) -> String {
        self.done.lock().unwrap().recv().unwrap()
    }

    pub fn drain(&self) {
        self.server.as_ref().unwrap().drain();
    }

    /// Connects, with a time limit for reading, so that a fault does not hang the test.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Sends bytes on a new connection, and returns the complete response.
    pub fn exchange(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut stream = self.connect();
        // A server that refuses may close the connection before it has read everything.
        let _ = stream.write_all(bytes.as_ref());
        rest(stream)
    }

    pub fn get(&self, path: &str) -> String {
        self.exchange(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    pub fn post(&self, path: &str, body: &str) -> String {
        self.exchange(request(path, "", body))
    }

    pub fn complete(&self, body: &str) -> String {
        self.post("/v1/completions", body)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ended();
    }
}

/// A request that closes its connection.
pub fn request(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    )
}

/// Reads everything until the server closes the connection.
pub fn rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset after the answer loses no bytes that were read.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

pub fn half_close(stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

#[track_caller]
pub fn status(response: &str) -> u16 {
    let word = response.split(' ').nth(1).unwrap_or_else(|| panic!("no status: {response:?}"));
    word.parse().unwrap_or_else(|_| panic!("no status: {response:?}"))
}

/// The body of a response that is not chunked, as JSON.
#[track_caller]
pub fn json(response: &str) -> serde_json::Value {
    let body = response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no body: {response:?}")).1;
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
}

/// Checks the status and the error's code.
#[track_caller]
pub fn refused(response: &str, status: u16, code: &str) {
    assert_eq!((self::status(response), json(response)["error"]["code"].as_str()), (status, Some(code)), "{response}");
}
