//! The time of a step, and the part of it for files and copies.

use std::time::Duration;

use cuda_device::copy_waits::{self, CopyWaits};
use serde_json::{Value, json};

use crate::failure::{Failure, Outcome};
use crate::files::disk::FileUse;

/// The times of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// The wait for the batch.
    pub data_wait: Duration,
    /// The step itself.
    pub step: Duration,
    /// The use of files in place of memory.
    pub files: FileUse,
    /// The waits for copies between the host and a card.
    pub copies: CopyWaits,
}

impl StepTimes {
    /// Adds these times to the event of the step.
    pub(super) fn add_to(&self, event: &mut Value) {
        if let Some(bytes) = self.files.disk_read_bytes {
            event["disk_read_bytes"] = json!(bytes);
        }
        let CopyWaits { seconds, to_card, from_card } = self.copies;
        if to_card + from_card > 0 {
            event["copy_wait_ms"] = json!(milliseconds(Duration::from_secs_f64(seconds)));
            event["copied_to_device_bytes"] = json!(to_card);
            event["copied_from_device_bytes"] = json!(from_card);
        }
    }
}

/// The waits for copies between the host and a card so far.
pub fn copies_so_far() -> Outcome<CopyWaits> {
    copy_waits::so_far().map_err(|error| Failure::internal(format!("copies to and from the GPU: {error}")))
}

pub(super) fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_in_an_event_where_there_were_any() {
        let files = FileUse { waited: Duration::ZERO, disk_read_bytes: None };
        let took = |copies| StepTimes { data_wait: Duration::ZERO, step: Duration::ZERO, files, copies };
        let mut event = json!({});
        took(CopyWaits::default()).add_to(&mut event);
        assert_eq!(event, json!({}));
        took(CopyWaits { seconds: 0.0125, to_card: 7, from_card: 0 }).add_to(&mut event);
        let expected = json!({"copy_wait_ms": 12.5, "copied_to_device_bytes": 7, "copied_from_device_bytes": 0});
        assert_eq!(event, expected);
    }
}
