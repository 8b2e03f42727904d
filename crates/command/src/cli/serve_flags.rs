//! The flags of `serve` and `bench serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use memory_policy::Bytes;
use openai_server::{Limits, RequestLimits};

use crate::cli::answer_flags::ModelsFlags;
use crate::cli::flag_values::Precision;

/// Flags of `serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// The models
    #[command(flatten)]
    pub models: ModelsFlags,
    /// Name of the model for clients [default: that of its directory]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Address and port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080", value_parser = address)]
    pub listen: SocketAddr,
    /// File with the keys that requests need, one a line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Accept network requests without an API key
    #[arg(long)]
    pub without_key: bool,
    /// Accept requests whose Host header has this name (repeatable). Only needed on loopback without keys
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Longest answer in tokens, and that of requests that say none [default: that of generation_config.json, or 256]
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Full-length requests to reserve memory for; shorter ones are answered together in larger numbers
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub batch_samples: usize,
    /// Whether a prompt of more than --max-source-tokens is an error, or is cut as in training
    #[arg(long, value_enum, value_name = "HOW", default_value_t = PromptOverflow::Error)]
    pub prompt_overflow: PromptOverflow,
    /// Most beams, and most answers to a prompt
    #[arg(long, value_name = "N", default_value_t = RequestLimits::default().rows)]
    pub max_rows: usize,
    /// Prompts that wait; others are refused with 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Connections at a time; then idle and slow ones give way
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections)]
    pub connections: usize,
    /// Largest body of a request
    #[arg(long, value_name = "SIZE", default_value_t = Bytes(Limits::default().body_bytes as u64))]
    pub max_body: Bytes,
    /// Seconds for an answer, waiting included
    #[arg(long, value_name = "S", default_value_t = Limits::default().request_timeout.as_secs())]
    pub request_timeout: u64,
    /// Seconds for requests to end after SIGTERM
    #[arg(long, value_name = "S", default_value_t = Limits::default().drain_timeout.as_secs())]
    pub drain_timeout: u64,
    /// File for the access log, one JSON object a line [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
}

/// `--prompt-overflow`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PromptOverflow {
    /// Refuse the request with 400
    Error,
    /// Cut on the side on which the model's tokenizer cuts; of a chat, the oldest messages
    Truncate,
}

/// The parser of a server's address. A port alone is one of this machine.
pub fn address(text: &str) -> Result<SocketAddr, &'static str> {
    let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':')).unwrap_or(text);
    match port.parse::<u16>() {
        Ok(port) => Ok(SocketAddr::from(([127, 0, 0, 1], port))),
        Err(_) => text.parse().map_err(|_| "expected a port or ADDRESS:PORT, such as 8080 or 127.0.0.1:8080"),
    }
}

/// Flags of `bench serve`.
#[derive(Args, Debug)]
pub struct BenchServeArgs {
    /// Model: a Hugging Face directory, a run, or a hub id in the local cache
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Sources answered together, one measurement each [default: 1,8,32]
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 8, 32], hide_default_value = true)]
    pub batch: Vec<usize>,
    /// Tokens of a source
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub source_tokens: usize,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub new_tokens: usize,
    /// Beams of a beam search (1: greedy)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub num_beams: usize,
    /// Timed rounds of each batch, after one that is not
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Memory limit of the whole process
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Precision of activations. Weights keep the precision in which they are stored
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub precision: Precision,
    /// Device: cpu, cuda or cuda:N; auto is the faster one of the CPU and a GPU
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_this_machine() {
        let address = |text: &str| address(text).map(|address| address.to_string());
        for text in ["8080", ":8080", "localhost:8080", "127.0.0.1:8080"] {
            assert_eq!(address(text).unwrap(), "127.0.0.1:8080");
        }
        assert_eq!(address("[::1]:80").unwrap(), "[::1]:80");
        for text in ["", "80800", "example.com:80", "127.0.0.1"] {
            assert!(address(text).unwrap_err().contains("such as 8080"), "{text}");
        }
    }
}
