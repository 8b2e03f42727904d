//! Starting the command and looking at what it left.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

/// A directory of its own for one test; the command runs in it.
pub struct Scene {
    directory: TempDir,
}

/// What a finished command printed and returned.
#[derive(Debug)]
pub struct Ran {
    /// The exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Scene {
    /// An empty scene.
    pub fn new() -> Self {
        Self {
            directory: tempfile::tempdir().expect("a temporary directory"),
        }
    }

    /// A path in the scene.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file of the scene.
    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).expect("a directory in the scene");
        }
        std::fs::write(&path, text).expect("a file in the scene");
        path
    }

    /// The command with these arguments, not started.
    pub fn command<S: AsRef<str>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train_low_mem"));
        command
            .args(arguments.iter().map(AsRef::as_ref))
            .current_dir(self.directory.path());
        command
    }

    /// Runs the command to its end.
    pub fn run<S: AsRef<str>>(&self, arguments: &[S]) -> Ran {
        self.command(arguments)
            .output()
            .expect("the command starts")
            .into()
    }

    /// Starts the command and returns while it runs.
    pub fn start<S: AsRef<str>>(&self, arguments: &[S]) -> Child {
        self.command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts")
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ran {
    /// Holds the command to its exit code, and shows what it printed where it had another.
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(
            self.code,
            Some(code),
            "standard output:\n{}\nstandard error:\n{}",
            self.out,
            self.err
        );
        self
    }
}

/// The repository's root.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
