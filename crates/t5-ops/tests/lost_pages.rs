//! A file that is shortened under its mapping ends the process with an exit code and the file's name, and not with a signal.
//!
//! Each test starts this test binary again, as a child that does the test's work.
//!
//! The host alone: a card maps no file.

#![cfg(target_os = "linux")]

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Output};

use candle_core::{DType, Device, Tensor};
use heap::{Allocator, FileMemory, exit_on_sigbus};
use tensor_storage::{WritePolicy, copy_from_file, copy_into_file, overwrite_in_file, page_in, page_out};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Set for the children: the work to do.
const DO: &str = "T5_OPS_TEST_DO";
const HINT: &str = "what was saved is intact";

/// An empty directory for one child.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the test of that name in a child, with the work `what`.
fn child(test: &str, what: &str) -> (Directory, Output) {
    let directory = std::env::temp_dir().join(format!("t5-ops-{test}-{what}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(DO, what).current_dir(&directory);
    (Directory(directory), command.output().unwrap())
}

fn ones() -> Tensor {
    Tensor::ones(1 << 18, DType::F32, &Device::Cpu).unwrap()
}

/// A tensor in a file in the working directory, out of memory.
fn in_file() -> Tensor {
    let memory = FileMemory::create(".".as_ref(), [1 << 20].into_iter()).unwrap();
    let x = copy_into_file(&ones(), &memory, WritePolicy::Later).unwrap();
    page_out(&x);
    x
}

/// Shortens every file of this process in the working directory whose name was removed.
fn shorten(bytes: u64) {
    let here = std::env::current_dir().unwrap();
    let mut found = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let is_ours = std::fs::read_link(&path)
            .is_ok_and(|to| to.starts_with(&here) && to != here && to.to_string_lossy().ends_with(" (deleted)"));
        if is_ours {
            File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1, "the file of the tensor");
}

#[test]
fn a_file_that_is_shortened_ends_the_process_with_its_name_and_an_exit_code() {
    const NAME: &str = "a_file_that_is_shortened_ends_the_process_with_its_name_and_an_exit_code";
    if let Ok(what) = std::env::var(DO) {
        exit_on_sigbus(21, HINT);
        let x = in_file();
        shorten(if what == "half" { 1 << 19 } else { 0 });
        match what.as_str() {
            "page_in" => page_in(&x),
            // On threads of the pool.
            "threads" => drop(t5_ops::rms_norm(
                &x.reshape((1 << 10, 1 << 8)).unwrap(),
                &ones().narrow(0, 0, 1 << 8).unwrap(),
                1e-6,
            )),
            _ => drop(x.sum_all()),
        }
        unreachable!("{what}: the values are gone");
    }
    for what in ["read", "half", "page_in", "threads"] {
        let (_directory, output) = child(NAME, what);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(21), "{what}: {said}");
        let expected = "\nerror: ./<offload file>: this file lost what was in it: it was shortened, or its disk failed or is full\n\
                        hint: what was saved is intact\n";
        assert!(said.ends_with(expected), "{what}: {said}");
    }
}

#[test]
fn a_file_that_is_shortened_is_an_error_where_it_is_read_or_written_whole() {
    const NAME: &str = "a_file_that_is_shortened_is_an_error_where_it_is_read_or_written_whole";
    if std::env::var(DO).is_ok() {
        let x = in_file();
        shorten(1 << 12);
        let read = copy_from_file(&x).unwrap_err().to_string();
        let written = overwrite_in_file(&x, &ones(), WritePolicy::Now).unwrap_err().to_string();
        assert_eq!((&read, read.as_str()), (&written, "the file was shortened from 1048576 to 4096 bytes"));
        return;
    }
    let (_directory, output) = child(NAME, "copy");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn another_fault_is_what_it_was_before() {
    use std::os::unix::process::ExitStatusExt;

    const NAME: &str = "another_fault_is_what_it_was_before";
    if let Ok(what) = std::env::var(DO) {
        exit_on_sigbus(21, HINT);
        let _x = in_file();
        if what == "sent" {
            // From another process, and more than once: the runtime's handler lets the first signal pass.
            for _ in 0..100 {
                Command::new("sh").args(["-c", "kill -s BUS $PPID"]).status().unwrap();
            }
        } else {
            fn deeper(n: usize) -> usize {
                let frame = std::hint::black_box([n; 1000]);
                if n == usize::MAX { 0 } else { deeper(n + 1) + frame[n % 1000] }
            }
            deeper(0);
        }
        unreachable!("{what}: the signal has ended the process");
    }
    // SIGBUS is 7 and SIGABRT is 6.
    for (what, signal, words) in [("sent", 7, ""), ("stack", 6, "overflowed its stack")] {
        let (_directory, output) = child(NAME, what);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(signal), "{what}: {said}");
        assert!(said.contains(words) && !said.contains(HINT), "{what}: {said}");
    }
}
