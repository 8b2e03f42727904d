//! Tests the library in this test's own program, which is started again with faults.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};

/// The environment variable with the child's directory.
const DIRECTORY: &str = "FAULT_POINTS_TEST_DIRECTORY";

/// The child writes a file, renames it and reads it. Outside of a test it does nothing.
#[test]
fn the_child_writes_renames_and_reads() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let path = |name: &str| Path::new(&directory).join(name);
    let work = || -> std::io::Result<Vec<u8>> {
        let mut file = fs::File::create(path("new"))?;
        file.write_all(b"twelve bytes")?;
        file.sync_all()?;
        fs::rename(path("new"), path("whole"))?;
        let mut text = Vec::new();
        fs::File::open(path("whole"))?.read_to_end(&mut text)?;
        Ok(text)
    };
    match work() {
        Ok(text) => println!("read {}", String::from_utf8_lossy(&text)),
        Err(error) => println!("error {}", error.raw_os_error().unwrap_or(0)),
    }
}

/// The child starts three threads, one after the other. Outside of a test it does nothing.
#[test]
fn the_child_starts_threads() {
    if std::env::var(DIRECTORY).is_err() {
        return;
    }
    let started = (0..3).map(|_| std::thread::Builder::new().spawn(|| {}).map(|thread| thread.join().is_ok()));
    println!("started {:?}", started.map(|thread| thread.map_err(|error| error.raw_os_error())).collect::<Vec<_>>());
}

/// Runs the child under these faults in an empty directory, and passes its output and directory to `check`.
fn child(name: &str, faults: &str, check: impl FnOnce(&Output, &Path)) {
    child_of("the_child_writes_renames_and_reads", name, faults, check);
}

/// Runs the test of this name as the child, as [`child`] does.
fn child_of(test: &str, name: &str, faults: &str, check: impl FnOnce(&Output, &Path)) {
    let program = std::env::current_exe().expect("this program's path");
    // Two concurrent tests may use the same name.
    static CHILDREN: AtomicU64 = AtomicU64::new(0);
    let number = CHILDREN.fetch_add(1, Ordering::Relaxed);
    let directory = program.with_file_name(format!("fault-points-{}-{number}-{name}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let output = Command::new(&program)
        .args(["--exact", &format!("tests::{test}"), "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, &directory)
        .env("FAULT_POINTS", format!("under={}\n{faults}", directory.display()))
        .output()
        .expect("the child starts");
    check(&output, &directory);
    fs::remove_dir_all(&directory).expect("the directory can be removed");
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The number of the first operation with this name in a run without faults.
fn number_of(call: &str) -> u64 {
    let mut found = None;
    child(&format!("count-{call}"), "trace=/dev/stderr", |output, _| {
        let trace = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = trace.lines().find(|line| line.split('\t').nth(1) == Some(call));
        let line = line.unwrap_or_else(|| panic!("no `{call}` in\n{trace}"));
        found = line.split('\t').next().and_then(|number| number.parse().ok());
    });
    found.expect("a number")
}

#[test]
fn without_a_fault_operations_are_counted_and_nothing_changes() {
    child("none", "", |output, directory| {
        assert!(printed(output).contains("read twelve bytes"), "{output:?}");
        assert!(directory.join("whole").exists());
    });
    assert!(number_of("write") < number_of("fsync"));
    assert_eq!(number_of("fsync"), number_of("fsync"), "the same number is the same operation");
}

#[test]
fn the_operation_of_that_number_fails_with_that_error() {
    let write = number_of("write");
    child("errno", &format!("from={write}\ndo=errno:28"), |output, directory| {
        assert!(printed(output).contains("error 28"), "{output:?}");
        assert_eq!(fs::read(directory.join("new")).unwrap(), b"");
    });
}

#[test]
fn the_process_dies_before_in_or_after_an_operation() {
    let write = number_of("write");
    for (action, left) in [("kill-before", &b""[..]), ("kill-in", b"twelve"), ("kill-after", b"twelve bytes")] {
        child(action, &format!("from={write}\ndo={action}"), |output, directory| {
            assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{action}");
            assert_eq!(fs::read(directory.join("new")).unwrap(), left, "{action}");
        });
    }
}

#[test]
fn short_reads_and_writes_and_interruptions_are_everywhere() {
    for (name, faults) in
        [("short", "from=1\nto=end\ndo=short"), ("eintr", "calls=read,write\nfrom=1\nto=end\nevery=2\ndo=errno:4")]
    {
        child(name, faults, |output, _| assert!(printed(output).contains("read twelve bytes"), "{name}: {output:?}"));
    }
}

#[test]
fn a_lie_reports_success_and_does_nothing() {
    child("lie", "calls=rename\nfrom=1\ndo=lie", |output, directory| {
        assert!(printed(output).contains("error 2"), "{output:?}");
        assert!(directory.join("new").exists() && !directory.join("whole").exists());
    });
}

#[test]
fn what_was_synced_is_kept() {
    let directory = std::env::current_exe().unwrap().with_file_name(format!("recorded-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let sync = number_of("fsync");
    child("record", &format!("record={}", directory.display()), |output, _| {
        assert!(printed(output).contains("read twelve bytes"), "{output:?}");
    });
    assert_eq!(fs::read(directory.join(sync.to_string())).unwrap(), b"twelve bytes");
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn so_many_threads_start_and_no_more() {
    // With `--test-threads=1`, a test runs on the process's first thread or on a counted one. So counts are compared from
    // limit to limit.
    let started = |most: u64| {
        let mut count = None;
        child_of("the_child_starts_threads", &format!("threads-{most}"), &format!("threads={most}"), |output, _| {
            let out = printed(output);
            let line = out.lines().find_map(|line| line.split_once("started ")).unwrap_or_else(|| panic!("{output:?}"));
            count = Some((
                line.1.matches("Ok(true)").count(),
                line.1.matches(&format!("Err(Some({}))", libc::EAGAIN)).count(),
            ));
        });
        count.expect("the child ran")
    };
    assert_eq!(started(9), (3, 0));
    let counts: Vec<(usize, usize)> = (0..4).map(started).collect();
    assert!(counts.iter().all(|(ok, refused)| ok + refused == 3), "{counts:?}");
    assert!(counts.windows(2).all(|pair| pair[1].0 - pair[0].0 <= 1) && counts[0].0 == 0, "{counts:?}");
}
