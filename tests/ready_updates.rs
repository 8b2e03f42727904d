//! The host's requests to a card between the last gradient and the end of an update. When the host knows the sums of squares, only launches
//! are left. So the card does not wait for requests that the host could have sent during computation.

use crate::on_a_card::emulated_scene;
use crate::run::Scene;

const UPDATES: usize = 3;

/// The requests of a run with this many updates, as the emulated driver received them.
fn requests(scene: &Scene, name: &str, way: &[&str]) -> Vec<String> {
    let file = format!("{name}.trace");
    let one = ["--max-steps", &UPDATES.to_string(), "--output", name, "--set", "checkpoint.every_steps=100"];
    let quiet = ["--set", "train.eval_samples=1", "--set", "train.eval_generate_samples=0"];
    crate::on_card(scene, &[("TRACE", &file)], &[&one[..], &quiet, way].concat()).expect_code(0);
    let text = String::from_utf8(scene.read(&file)).expect("text");
    // Each line begins with a time.
    text.lines().map(|line| line.split_once(' ').expect("a request").1.to_owned()).collect()
}

/// The requests of each of the last updates: from behind the launch of the totals to the last launch of the update. Earlier updates belong
/// to measured prices.
fn of_updates(requests: &[String], last: &str) -> Vec<Vec<String>> {
    let mut starts: Vec<usize> = (0..requests.len()).filter(|&at| requests[at] == "launch total_square_sums").collect();
    starts.drain(..starts.len() - UPDATES);
    let update = |at: usize| {
        let behind = &requests[at + 1..];
        let end = behind.iter().position(|request| request == last).expect("an update");
        behind[..=end].to_vec()
    };
    starts.into_iter().map(update).collect()
}

#[test]
fn when_the_sums_of_squares_are_known_an_update_is_launches_alone() {
    let Some(scene) = emulated_scene() else { return };
    let minor = ["--set", "memory.accumulation=micro-batch-major"];
    let adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"];
    let narrow = ["--precision", "bf16", "--set", "train.master_weights=stochastic-rounding"];
    let several = ["--set", "memory.micro_batch_samples=2"];
    let adafactor = ["launch adafactor_factors", "launch adafactor_squares", "launch adafactor_apply"];
    let ways: [(&str, &[&str], &[&str]); 4] = [
        ("adafactor", &[], &adafactor),
        ("narrow", &narrow, &adafactor),
        ("several", &several, &adafactor),
        ("adamw", &adamw, &["launch adamw"]),
    ];
    for (name, way, launches) in ways {
        let requests = requests(&scene, name, &[&minor, way].concat());
        for update in of_updates(&requests, launches.last().expect("a launch")) {
            let at = update.iter().position(|request| request.starts_with("download ")).expect("sums are read");
            let (before, after) = (&update[..at], &update[at + 1..]);
            assert_eq!(after, launches, "{name}");
            // The table has been uploaded by then, without a wait.
            let is = |kind: &str| before.iter().filter(|request| request.split(' ').next() == Some(kind)).count();
            assert_eq!(
                (is("upload"), is("waiting-upload"), is("wait"), is("launch")),
                (1, 0, 0, 0),
                "{name}: {before:?}"
            );
        }
    }
}
